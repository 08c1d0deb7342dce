// A STREAM-like add: new weights = old weights + gradients, all three in memory that was touched before.
//
// It moves the bytes that a shard moves for a push of one learner with the reducer `sum`, and nothing else: the gradient and
// the old weight are read, the new weight is written to another buffer past the caches. The two buffers of weights change
// places after each round, as a shard's do. Threads take pieces in turn, so none waits for a slower one.
//
//   stream_add --bytes N --threads N

#include "common.h"

#include <atomic>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

constexpr size_t kPiece = 1 << 20;  // Bytes that a thread takes at once.

void Plain(float* sum, const float* old, const float* gradients, size_t count) {
  for (size_t i = 0; i < count; i++) sum[i] = old[i] + gradients[i];
}

#ifdef __x86_64__
__attribute__((target("avx512f"))) void Stream512(float* sum, const float* old, const float* gradients, size_t count) {
  for (size_t i = 0; i < count; i += 16) {
    _mm512_stream_ps(sum + i, _mm512_add_ps(_mm512_loadu_ps(old + i), _mm512_loadu_ps(gradients + i)));
  }
  _mm_sfence();
}

__attribute__((target("avx"))) void Stream256(float* sum, const float* old, const float* gradients, size_t count) {
  for (size_t i = 0; i < count; i += 8) {
    _mm256_stream_ps(sum + i, _mm256_add_ps(_mm256_loadu_ps(old + i), _mm256_loadu_ps(gradients + i)));
  }
  _mm_sfence();
}
#endif

// With the widest vectors that the processor has, as a shard does; `sum` is aligned to a page.
void AddPiece(float* sum, const float* old, const float* gradients, size_t count) {
  size_t whole = 0;
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f")) {
    Stream512(sum, old, gradients, whole = count & ~size_t{15});
  } else if (__builtin_cpu_supports("avx")) {
    Stream256(sum, old, gradients, whole = count & ~size_t{15});
  }
#endif
  Plain(sum + whole, old + whole, gradients + whole, count - whole);
}

}  // namespace

int main(int count, char** words) {
  Options options(count, words, 1);
  size_t bytes = options.Number("bytes"), threads = options.Number("threads");
  // As a shard's, whatever shmem_enabled says: gathered in huge pages where there are any.
  auto memory = [&](const char* name) {
    char* start = Memory(bytes, Memfd(name, bytes));
    madvise(start, bytes / kHuge * kHuge, 25 /* MADV_COLLAPSE */);
    return reinterpret_cast<float*>(start);
  };
  float *gradients = memory("gradients"), *old = memory("old"), *sum = memory("new");
  Fill(reinterpret_cast<char*>(gradients), bytes, 0);
  auto round = [&](const std::string& what) {
    if (what != "push") Fail("unknown round " + what);
    std::atomic<size_t> next{0};
    AtOnce(threads, [&](size_t) {
      for (size_t at; (at = next.fetch_add(kPiece, std::memory_order_relaxed)) < bytes;) {
        AddPiece(sum + at / 4, old + at / 4, gradients + at / 4, std::min(kPiece, bytes - at) / 4);
      }
    });
    std::swap(old, sum);
    return bytes;
  };
  Learn(round, [&](size_t pushes) { CheckWeights(reinterpret_cast<char*>(old), bytes, 1, pushes); });
}
