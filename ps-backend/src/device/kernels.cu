// The kernels of a GPU: one pass over elements of a model, in place, as libmodelio::bytes::kernels makes it on a CPU.
//
// A run of elements has one type, one formula and one step. A kernel adds up the run's sums in their order, computes the
// next value and state of each element, and stores them where it has read them. Of narrow elements, which have 16 or
// 8 bits, the values are fp32 masters, and the rounded weights go to `out`.
//
// The formulas are those of ps-backend/src/reducers, operation for operation, so that a GPU and a CPU make the same bits
// (except that one NaN may be another). So the compiler must fuse nothing (-fmad=false), keep subnormal numbers, and
// round division and square root to nearest.
//
// scripts/build-ptx makes kernels.ptx of this file.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// The memory of a run, as `device::cuda` passes it. Each pointer is to the first element of the run. All arrays of 32-bit
// words have the same distance from a 16-byte boundary, and `out` has half of that, or a quarter for elements of 8 bits.
struct Run {
    u32 *values;
    u32 *slots[2];
    const u32 *sums[2];
    void *out;
    u64 count;
    u32 sum_count;
    u32 unused;
};

template <typename S>
struct Constants {
    S k[9];
};

__device__ __forceinline__ float root(float x) { return __fsqrt_rn(x); }
__device__ __forceinline__ double root(double x) { return __dsqrt_rn(x); }

// Numbers beyond the limit are set to it, with their sign. NaN stays NaN.
template <typename S>
__device__ __forceinline__ S clamp(S x, S limit) {
    S below = limit < x ? limit : x;
    return -limit > below ? -limit : below;
}

// 1 above zero, -1 below, and else 0, also of NaN.
template <typename S>
__device__ __forceinline__ S sign(S x) {
    return (x > S(0) ? S(1) : S(0)) - (x < S(0) ? S(1) : S(0));
}

template <typename S>
__device__ __forceinline__ S gradient(S sum, S w, const S *k) {
    return clamp(sum * k[0], k[2]) + k[1] * w;
}

// The formulas. `SLOTS` is the number of values of state, and `READS` says whether old ones are read.

template <typename S>
struct Total {
    static const int SLOTS = 0;
    static const bool READS = false, WEIGHTS = false;
    __device__ __forceinline__ static S step(S g, S, S &, S &, const S *) { return g; }
};

template <typename S, bool OLD>
struct Carried {
    static const int SLOTS = 0;
    static const bool READS = false, WEIGHTS = OLD;
    __device__ __forceinline__ static S step(S g, S w, S &, S &, const S *k) {
        return k[0] * w + clamp(k[1] * g, k[2]);
    }
};

template <typename S>
struct Descent {
    static const int SLOTS = 0;
    static const bool READS = false, WEIGHTS = true;
    __device__ __forceinline__ static S step(S g, S w, S &, S &, const S *k) { return w - k[3] * gradient(g, w, k); }
};

template <typename S, bool FIRST, bool NESTEROV>
struct Running {
    static const int SLOTS = 1;
    static const bool READS = !FIRST, WEIGHTS = true;
    __device__ __forceinline__ static S step(S sum, S w, S &buffer, S &, const S *k) {
        S g = gradient(sum, w, k);
        buffer = FIRST ? g : k[4] * buffer + k[5] * g;
        S direction = NESTEROV ? g + k[4] * buffer : buffer;
        return w - k[3] * direction;
    }
};

template <typename S>
struct Moments {
    static const int SLOTS = 2;
    static const bool READS = true, WEIGHTS = true;
    __device__ __forceinline__ static S step(S sum, S w, S &m, S &v, const S *k) {
        S g = gradient(sum, w, k);
        m = m + (g - m) * k[4];
        v = k[5] * v + k[6] * g * g;
        S update = k[7] * m / (root(v) + k[8]);
        return k[3] * w - update;
    }
};

template <typename S>
struct MeanSquare {
    static const int SLOTS = 1;
    static const bool READS = true, WEIGHTS = true;
    __device__ __forceinline__ static S step(S sum, S w, S &square, S &, const S *k) {
        S g = gradient(sum, w, k);
        square = k[3] * square + k[4] * g * g;
        return w - k[5] * g / (root(square) + k[6]);
    }
};

template <typename S>
struct SumOfSquares {
    static const int SLOTS = 1;
    static const bool READS = true, WEIGHTS = true;
    __device__ __forceinline__ static S step(S sum, S w, S &squares, S &, const S *k) {
        S g = gradient(sum, w, k);
        squares = squares + g * g;
        return w - k[3] * g / (root(squares) + k[4]);
    }
};

template <typename S>
struct Direction {
    static const int SLOTS = 1;
    static const bool READS = true, WEIGHTS = true;
    __device__ __forceinline__ static S step(S sum, S w, S &mean, S &, const S *k) {
        S g = gradient(sum, w, k);
        S direction = sign(k[4] * mean + k[5] * g);
        mean = k[6] * mean + k[7] * g;
        return k[3] * w - k[8] * direction;
    }
};

// The types of elements, with their way to 16 or 8 bits and back: to nearest even, and NaNs stay NaNs. `Code` is a weight,
// and `Four` four of them.

struct F32 {
    static const bool NARROW = false;
};

struct F16 {
    static const bool NARROW = true;
    typedef u16 Code;
    typedef ushort4 Four;
    __device__ __forceinline__ static u16 narrow(float value) {
        u32 bits = __float_as_uint(value);
        u32 magnitude = bits & 0x7fffffff;
        u32 rounded = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
        // One ulp of 0.5 is the smallest subnormal of 16 bits: the addition rounds to a multiple of it.
        u32 subnormal = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - __float_as_uint(0.5f);
        u32 nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
        u32 finite = magnitude < 0x38800000 ? subnormal : min(rounded, 0x7c00u);
        return (u16)((magnitude > 0x7f800000 ? nan : finite) | ((bits >> 16) & 0x8000));
    }
    __device__ __forceinline__ static float widen(u16 half) {
        u32 magnitude = (u32)(half & 0x7fff) << 13;
        u32 scaled = __float_as_uint(__uint_as_float(magnitude) * __uint_as_float((127u + 112u) << 23));
        u32 special = magnitude | 0x7f800000 | (magnitude > 0x0f800000 ? 0x00400000 : 0);
        u32 sign = (u32)(half & 0x8000) << 16;
        return __uint_as_float((magnitude >= 0x0f800000 ? special : scaled) | sign);
    }
};

struct BF16 {
    static const bool NARROW = true;
    typedef u16 Code;
    typedef ushort4 Four;
    __device__ __forceinline__ static u16 narrow(float value) {
        u32 bits = __float_as_uint(value);
        u32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        return (u16)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
    }
    __device__ __forceinline__ static float widen(u16 half) { return __uint_as_float((u32)half << 16); }
};

// The types of 8 bits are those of modelio-base/src/bytes/kernels/fp8.rs. `BIAS` is what the exponents' biases differ by, one
// ulp of `ROUNDER` is the smallest number, and magnitudes from `NAN_FROM` on become NaN.
template <int SHIFT, u32 BIAS, int ROUNDER, u32 MOST, u32 NAN_FROM>
struct Byte {
    static const bool NARROW = true;
    typedef u8 Code;
    typedef uchar4 Four;
    __device__ __forceinline__ static u8 narrow(float value) {
        u32 bits = __float_as_uint(value);
        u32 magnitude = bits & 0x7fffffff;
        u32 rounded = (magnitude + (1u << (SHIFT - 1)) - 1 + ((magnitude >> SHIFT) & 1) - (BIAS << 23)) >> SHIFT;
        u32 subnormal = __float_as_uint(__uint_as_float(magnitude) + (float)ROUNDER) - __float_as_uint((float)ROUNDER);
        u32 number = magnitude < ((BIAS + 1) << 23) ? subnormal : min(rounded, MOST);
        return (u8)((magnitude >= NAN_FROM ? 0x7f : number) | ((bits >> 24) & 0x80));
    }
};

// Without infinity: what is too large becomes the largest number.
struct E4M3 : Byte<20, 120, 16384, 0x7e, 0x7f800000> {
    __device__ __forceinline__ static float widen(u8 code) {
        u32 magnitude = code & 0x7f;
        u32 subnormal = __float_as_uint((float)magnitude * (1.0f / 512.0f));
        u32 number = magnitude < 8 ? subnormal : (magnitude << 20) + (120u << 23);
        u32 quiet = magnitude == 0x7f ? 0x7fc00000 : 0;
        return __uint_as_float(number | quiet | (u32)(code & 0x80) << 24);
    }
};

// The upper half of binary16.
struct E5M2 : Byte<21, 112, 128, 0x7c, 0x7f800001> {
    __device__ __forceinline__ static float widen(u8 code) { return F16::widen((u16)(code << 8)); }
};

__device__ __forceinline__ u64 thread() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ u64 threads() { return (u64)gridDim.x * blockDim.x; }

__device__ __forceinline__ float4 load4(const u32 *from, u64 at) { return *(const float4 *)(from + at); }
__device__ __forceinline__ void store4(u32 *to, u64 at, float4 value) { *(float4 *)(to + at) = value; }

// One element.
template <typename Op, typename Type>
__device__ __forceinline__ void one(const Run &run, u64 at, const float *k) {
    float g = 0.0f, w = 0.0f, s0 = 0.0f, s1 = 0.0f;
    if (run.sum_count > 0) g = __uint_as_float(run.sums[0][at]);
    if (run.sum_count > 1) g = g + __uint_as_float(run.sums[1][at]);
    if (Op::WEIGHTS) w = __uint_as_float(run.values[at]);
    if (Op::READS && Op::SLOTS > 0) s0 = __uint_as_float(run.slots[0][at]);
    if (Op::READS && Op::SLOTS > 1) s1 = __uint_as_float(run.slots[1][at]);
    w = Op::step(g, w, s0, s1, k);
    run.values[at] = __float_as_uint(w);
    if (Op::SLOTS > 0) run.slots[0][at] = __float_as_uint(s0);
    if (Op::SLOTS > 1) run.slots[1][at] = __float_as_uint(s1);
    if constexpr (Type::NARROW) ((typename Type::Code *)run.out)[at] = Type::narrow(w);
}

// Four elements, whose arrays are aligned to 16 bytes.
template <typename Op, typename Type>
__device__ __forceinline__ void four(const Run &run, u64 at, const float *k) {
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 g = zero, w = zero, s0 = zero, s1 = zero;
    if (run.sum_count > 0) g = load4(run.sums[0], at);
    if (Op::WEIGHTS) w = load4(run.values, at);
    if (Op::READS && Op::SLOTS > 0) s0 = load4(run.slots[0], at);
    if (Op::READS && Op::SLOTS > 1) s1 = load4(run.slots[1], at);
    if (run.sum_count > 1) {
        float4 more = load4(run.sums[1], at);
        g = make_float4(g.x + more.x, g.y + more.y, g.z + more.z, g.w + more.w);
    }
    w.x = Op::step(g.x, w.x, s0.x, s1.x, k);
    w.y = Op::step(g.y, w.y, s0.y, s1.y, k);
    w.z = Op::step(g.z, w.z, s0.z, s1.z, k);
    w.w = Op::step(g.w, w.w, s0.w, s1.w, k);
    store4(run.values, at, w);
    if (Op::SLOTS > 0) store4(run.slots[0], at, s0);
    if (Op::SLOTS > 1) store4(run.slots[1], at, s1);
    if constexpr (Type::NARROW) {
        typename Type::Four codes;
        codes.x = Type::narrow(w.x);
        codes.y = Type::narrow(w.y);
        codes.z = Type::narrow(w.z);
        codes.w = Type::narrow(w.w);
        *(typename Type::Four *)((typename Type::Code *)run.out + at) = codes;
    }
}

template <typename Op, typename Type>
__device__ __forceinline__ void floats(const Run &run, const float *k) {
    u64 head = (4 - ((u64)run.values / 4) % 4) % 4;
    if (head > run.count) head = run.count;
    u64 fours = (run.count - head) / 4, tail = head + fours * 4;
    for (u64 i = thread(); i < fours; i += threads()) four<Op, Type>(run, head + i * 4, k);
    u64 ragged = head + (run.count - tail);
    for (u64 i = thread(); i < ragged; i += threads()) one<Op, Type>(run, i < head ? i : tail + i - head, k);
}

// An f64 takes two words, which lie at any multiple of four bytes.
__device__ __forceinline__ double load_double(const u32 *from, u64 at) {
    return __hiloint2double((int)from[2 * at + 1], (int)from[2 * at]);
}
__device__ __forceinline__ void store_double(u32 *to, u64 at, double value) {
    to[2 * at] = (u32)__double2loint(value);
    to[2 * at + 1] = (u32)__double2hiint(value);
}

template <typename Op>
__device__ __forceinline__ void doubles(const Run &run, const double *k) {
    for (u64 at = thread(); at < run.count; at += threads()) {
        double g = 0.0, w = 0.0, s0 = 0.0, s1 = 0.0;
        if (run.sum_count > 0) g = load_double(run.sums[0], at);
        if (run.sum_count > 1) g = g + load_double(run.sums[1], at);
        if (Op::WEIGHTS) w = load_double(run.values, at);
        if (Op::READS && Op::SLOTS > 0) s0 = load_double(run.slots[0], at);
        if (Op::READS && Op::SLOTS > 1) s1 = load_double(run.slots[1], at);
        w = Op::step(g, w, s0, s1, k);
        store_double(run.values, at, w);
        if (Op::SLOTS > 0) store_double(run.slots[0], at, s0);
        if (Op::SLOTS > 1) store_double(run.slots[1], at, s1);
    }
}

// New narrow weights were written: where a weight is the old one, its master stays, with the precision that the weight
// does not show.
template <typename Type>
__device__ __forceinline__ void adopt(
    float *values, const typename Type::Code *before, const typename Type::Code *after, u64 count) {
    for (u64 at = thread(); at < count; at += threads()) {
        typename Type::Code weight = after[at];
        if (weight != before[at]) values[at] = Type::widen(weight);
    }
}

#define ARRAY_TYPES(name, ...)                                                                          \
    extern "C" __global__ void name##_f32(Run run, Constants<float> c) {                                \
        typedef float S;                                                                                \
        floats<__VA_ARGS__, F32>(run, c.k);                                                             \
    }                                                                                                   \
    extern "C" __global__ void name##_f16(Run run, Constants<float> c) {                                \
        typedef float S;                                                                                \
        floats<__VA_ARGS__, F16>(run, c.k);                                                             \
    }                                                                                                   \
    extern "C" __global__ void name##_bf16(Run run, Constants<float> c) {                               \
        typedef float S;                                                                                \
        floats<__VA_ARGS__, BF16>(run, c.k);                                                            \
    }                                                                                                   \
    extern "C" __global__ void name##_e4m3(Run run, Constants<float> c) {                               \
        typedef float S;                                                                                \
        floats<__VA_ARGS__, E4M3>(run, c.k);                                                            \
    }                                                                                                   \
    extern "C" __global__ void name##_e5m2(Run run, Constants<float> c) {                               \
        typedef float S;                                                                                \
        floats<__VA_ARGS__, E5M2>(run, c.k);                                                            \
    }                                                                                                   \
    extern "C" __global__ void name##_f64(Run run, Constants<double> c) {                               \
        typedef double S;                                                                               \
        doubles<__VA_ARGS__>(run, c.k);                                                                 \
    }

ARRAY_TYPES(total, Total<S>)
ARRAY_TYPES(scaled, Carried<S, false>)
ARRAY_TYPES(carried, Carried<S, true>)
ARRAY_TYPES(sgd, Descent<S>)
ARRAY_TYPES(momentum_first, Running<S, true, false>)
ARRAY_TYPES(momentum, Running<S, false, false>)
ARRAY_TYPES(nesterov_first, Running<S, true, true>)
ARRAY_TYPES(nesterov, Running<S, false, true>)
ARRAY_TYPES(adam, Moments<S>)
ARRAY_TYPES(rmsprop, MeanSquare<S>)
ARRAY_TYPES(adagrad, SumOfSquares<S>)
ARRAY_TYPES(lion, Direction<S>)

extern "C" __global__ void adopt_f16(float *values, const u16 *before, const u16 *after, u64 count) {
    adopt<F16>(values, before, after, count);
}
extern "C" __global__ void adopt_bf16(float *values, const u16 *before, const u16 *after, u64 count) {
    adopt<BF16>(values, before, after, count);
}
extern "C" __global__ void adopt_e4m3(float *values, const u8 *before, const u8 *after, u64 count) {
    adopt<E4M3>(values, before, after, count);
}
extern "C" __global__ void adopt_e5m2(float *values, const u8 *before, const u8 *after, u64 count) {
    adopt<E5M2>(values, before, after, count);
}
