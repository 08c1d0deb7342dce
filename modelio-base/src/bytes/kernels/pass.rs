//! The loops: one pass over a segment, line by line, ragged ends included.
//!
//! A ragged end goes through the same arithmetic in a zero-padded line, so that where a segment starts and
//! ends changes no result.

pub(super) mod models;

use super::level::Kernel;
use super::line::{LANES, Line, RawHalf, RawQuarter};
use super::op::Op;
use super::{Source, Wire, elements};

/// Outputs of at least this many bytes are stored past the caches, if their alignment allows: they are
/// read only after much else went through the caches, and a streamed line is not read before it is
/// written. Below, waiting for the stores to drain costs more than that saves.
const STREAM_FROM: usize = 16 << 10;

/// How many bytes ahead cold inputs are asked for: the hardware's prefetcher stops at each page's end.
const AHEAD: usize = 2 << 10;

/// The fp32 values as they lie in memory.
pub fn bytes(values: &[f32]) -> &[u8] {
    // SAFETY: the same memory, and any byte is a valid u8.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Like [`bytes`], to write to.
pub fn bytes_mut(values: &mut [f32]) -> &mut [u8] {
    // SAFETY: the same memory, exclusively borrowed; any bytes make a valid f32.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// A piece of a segment: `count` elements from element `at`.
#[derive(Clone, Copy)]
struct Piece {
    at: usize,
    count: usize,
}

/// How a segment falls into lines.
struct Split {
    /// Elements before the first whole line.
    head: usize,
    whole: usize,
    /// Whole lines, from the first, that may be streamed in every output.
    streamed: usize,
    tail: Piece,
}

impl Split {
    /// Lines over `elements`, placed so that those of the outputs (address, element size) are aligned.
    fn new(elements: usize, outputs: impl Iterator<Item = (*const u8, usize)> + Clone) -> Self {
        let misaligned = |(ptr, size): (*const u8, usize), at: usize| (ptr.addr() + at * size) % 64;
        let largest = outputs.clone().map(|(_, size)| size * elements).max().unwrap_or(0);
        let head = outputs.clone().next().map_or(0, |first| (64 - misaligned(first, 0)) % 64 / first.1);
        let stream = largest >= STREAM_FROM && outputs.clone().all(|output| misaligned(output, head) == 0);
        let head = if stream { head } else { 0 };
        let whole = (elements - head) / LANES;
        // Halves fill a line of memory in pairs, and quarters in fours.
        let least = outputs.clone().map(|(_, size)| size).min().unwrap_or(4).min(4);
        let filled = whole & !(4 / least - 1);
        let at = head + whole * LANES;
        let tail = Piece { at, count: elements - at };
        Self { head, whole, streamed: if stream { filled } else { 0 }, tail }
    }
}

/// A computation that goes over a segment piece by piece. It is no closure: closures cannot be
/// `#[inline(always)]`, which [`Kernel::run`] needs of all that it calls.
trait Pass {
    fn split(&self) -> Split;
    /// Do one piece, streaming it if it says so; returns `seen` with the exponents of its sources.
    fn piece<L: Line>(&mut self, seen: L::Exponents, piece: Piece, stream: bool) -> L::Exponents;
}

/// Do all pieces; returns whether all sources were finite.
#[inline(always)]
fn run<L: Line>(mut pass: impl Pass) -> bool {
    let split = pass.split();
    let mut seen = L::no_exponents();
    for line in 0..split.whole {
        let piece = Piece { at: split.head + line * LANES, count: LANES };
        seen = pass.piece::<L>(seen, piece, line < split.streamed);
    }
    // Up to a line of memory, which is two lines of halves, or four of quarters.
    for at in (0..split.head).step_by(LANES) {
        seen = pass.piece::<L>(seen, Piece { at, count: LANES.min(split.head - at) }, false);
    }
    if split.tail.count > 0 {
        seen = pass.piece::<L>(seen, split.tail, false);
    }
    if split.streamed > 0 {
        L::fence();
    }
    L::finite(seen)
}

/// The `N`-byte line at `piece`, or in `room`, zero-padded, where the piece is shorter. The caller loads it: in a
/// function that is passed here, the compiler may leave each instruction a call.
#[inline(always)]
fn line<'a, const N: usize>(src: &'a [u8], piece: Piece, room: &'a mut Option<[u8; N]>) -> &'a [u8; N] {
    let size = N / LANES;
    let part = &src[piece.at * size..][..piece.count * size];
    match part.first_chunk::<N>() {
        Some(line) => line,
        None => {
            let padded = room.insert([0; N]);
            padded[..part.len()].copy_from_slice(part);
            padded
        }
    }
}

#[inline(always)]
fn get<L: Line>(wire: Wire, src: &[u8], piece: Piece) -> L {
    match wire {
        // Doubles have passes of their own; see `apply` and its like.
        Wire::F64 => unreachable!(),
        Wire::F32 => L::load(line(src, piece, &mut None)),
        Wire::F16 => L::load_f16(line(src, piece, &mut None)),
        Wire::BF16 => L::load_bf16(line(src, piece, &mut None)),
        Wire::E4M3 => L::load_e4m3(line(src, piece, &mut None)),
        Wire::E5M2 => L::load_e5m2(line(src, piece, &mut None)),
    }
}

/// Like [`get`], and asks for the memory behind it.
#[inline(always)]
fn get_cold<L: Line>(wire: Wire, src: &[u8], piece: Piece) -> L {
    L::prefetch(src.as_ptr().wrapping_add(piece.at * wire.size() + AHEAD));
    get(wire, src, piece)
}

/// Store `value` at `piece`.
///
/// # Safety
/// With `stream`, the piece is a whole line, and 64-byte aligned in `dst`.
#[inline(always)]
unsafe fn put<L: Line>(value: L, dst: &mut [u8], piece: Piece, stream: bool) {
    let part = &mut dst[piece.at * 4..][..piece.count * 4];
    match part.first_chunk_mut() {
        // SAFETY: aligned, says the caller, and `run` fences.
        Some(line) if stream => unsafe { value.stream(line) },
        Some(line) => value.store(line),
        None => {
            let mut padded = [0; 64];
            value.store(&mut padded);
            part.copy_from_slice(&padded[..part.len()]);
        }
    }
}

/// Lines of a narrow type that wait for the rest of a line of memory: streaming less at a time halves the bandwidth,
/// and more.
#[derive(Default)]
pub(super) struct Staged {
    half: RawHalf,
    quarters: [RawQuarter; 4],
}

/// Store `value` at `piece` in the narrow type `wire`. With `stream`, the first lines of a line of memory wait in
/// `staged` for the last.
///
/// # Safety
/// With `stream`, the piece is a whole line, its pair or four is 64-byte aligned in `dst`, and all lines of it
/// come one after the other.
#[inline(always)]
unsafe fn put_narrow<L: Line>(
    wire: Wire,
    value: L,
    dst: &mut [u8],
    piece: Piece,
    stream: bool,
    staged: &mut Staged,
) {
    // SAFETY: passed on to the caller.
    unsafe {
        match wire {
            Wire::F16 => put_half::<L>(value.to_f16(), dst, piece, stream, &mut staged.half),
            Wire::BF16 => put_half::<L>(value.to_bf16(), dst, piece, stream, &mut staged.half),
            Wire::E4M3 => put_quarter::<L>(value.to_e4m3(), dst, piece, stream, &mut staged.quarters),
            Wire::E5M2 => put_quarter::<L>(value.to_e5m2(), dst, piece, stream, &mut staged.quarters),
            Wire::F64 | Wire::F32 => unreachable!(),
        }
    }
}

/// # Safety
/// The conditions of [`put_narrow`].
#[inline(always)]
unsafe fn put_half<L: Line>(half: RawHalf, dst: &mut [u8], piece: Piece, stream: bool, staged: &mut RawHalf) {
    let part = &mut dst[piece.at * 2..][..piece.count * 2];
    if !stream {
        part.copy_from_slice(&half[..piece.count * 2]);
    } else if part.as_ptr().addr().is_multiple_of(64) {
        *staged = half;
    } else if let [first, second] = dst[piece.at * 2 - 32..][..64].as_chunks_mut().0 {
        // SAFETY: aligned, says the caller, and `run` fences.
        unsafe {
            L::stream_half(*staged, first);
            L::stream_half(half, second);
        }
    }
}

/// # Safety
/// The conditions of [`put_narrow`].
#[inline(always)]
unsafe fn put_quarter<L: Line>(
    quarter: RawQuarter,
    dst: &mut [u8],
    piece: Piece,
    stream: bool,
    staged: &mut [RawQuarter; 4],
) {
    let part = &mut dst[piece.at..][..piece.count];
    if !stream {
        part.copy_from_slice(&quarter[..piece.count]);
        return;
    }
    let number = part.as_ptr().addr() / LANES % 4;
    staged[number] = quarter;
    if number == 3 {
        for (quarter, dst) in staged.iter().zip(dst[piece.at - 48..][..64].as_chunks_mut().0) {
            // SAFETY: aligned, says the caller, and `run` fences.
            unsafe { L::stream_quarter(*quarter, dst) };
        }
    }
}

/// One reducer over one segment. All lengths were checked to agree.
///
/// `N` > 0 is a common case compiled apart, without the choices in the loop: F32 from `plain` alone.
pub(super) struct Reduce<'a, O, const N: usize> {
    pub op: O,
    pub wire: Wire,
    pub sources: &'a [Source<'a>],
    pub plain: [&'a [u8]; N],
    pub weights: (&'a [u8], &'a mut [u8]),
    pub master: Option<(&'a [u8], &'a mut [u8])>,
    /// The slots, as many as the operation has.
    pub slots: [(&'a [u8], &'a mut [u8]); 2],
    /// Parts of a line on their way; any value at first.
    pub staged: Staged,
}

impl<O: Op<Scalar = f32>, const N: usize> Pass for Reduce<'_, O, N> {
    fn split(&self) -> Split {
        let [(_, slot0), (_, slot1)] = &self.slots;
        let outputs = [
            Some((self.weights.1.as_ptr(), self.wire.size())),
            self.master.as_ref().map(|(_, out)| (out.as_ptr(), 4)),
            (O::SLOTS > 0).then_some((slot0.as_ptr(), 4)),
            (O::SLOTS > 1).then_some((slot1.as_ptr(), 4)),
        ];
        Split::new(elements(self.wire, self.weights.0), outputs.into_iter().flatten())
    }

    #[inline(always)]
    fn piece<L: Line>(&mut self, mut seen: L::Exponents, piece: Piece, stream: bool) -> L::Exponents {
        let wire = if N > 0 { Wire::F32 } else { self.wire };
        let mut sum = L::splat(0.0);
        for (i, source) in self.plain.iter().enumerate() {
            // Staged contributions and sums may be in no cache. For one that has just arrived, asking costs little.
            let value: L = get_cold(wire, source, piece);
            seen = value.exponents(seen);
            sum = if i == 0 { value } else { sum + value };
        }
        if N == 0 {
            for (i, source) in self.sources.iter().enumerate() {
                let value: L = match source {
                    Source::Wire(src) => get_cold(wire, src, piece),
                    Source::Acc(acc) => get_cold(Wire::F32, bytes(acc), piece),
                };
                seen = value.exponents(seen);
                sum = if i == 0 { value } else { sum + value };
            }
        }

        let (mut w, mut slots) = (L::splat(0.0), [L::splat(0.0); 2]);
        if O::READS_WEIGHTS {
            w = match &self.master {
                Some((master, _)) if N == 0 => get_cold(Wire::F32, master, piece),
                _ => get_cold(wire, self.weights.0, piece),
            };
        }
        if O::READS_SLOTS && O::SLOTS > 0 {
            slots[0] = get_cold(Wire::F32, self.slots[0].0, piece);
        }
        if O::READS_SLOTS && O::SLOTS > 1 {
            slots[1] = get_cold(Wire::F32, self.slots[1].0, piece);
        }

        let (w, slots) = self.op.step(sum, w, slots);
        // SAFETY: `split` streams only whole lines, and only if they are aligned in all outputs.
        unsafe {
            if wire == Wire::F32 {
                put(w, self.weights.1, piece, stream);
            } else {
                put_narrow(wire, w, self.weights.1, piece, stream, &mut self.staged);
            }
            if N == 0
                && let Some((_, master)) = &mut self.master
            {
                put(w, master, piece, stream);
            }
            if O::SLOTS > 0 {
                put(slots[0], self.slots[0].1, piece, stream);
            }
            if O::SLOTS > 1 {
                put(slots[1], self.slots[1].1, piece, stream);
            }
        }
        seen
    }
}

/// Wire bytes into an fp32 accumulator.
pub(super) struct Accumulate<'a> {
    pub wire: Wire,
    pub src: &'a [u8],
    pub acc: &'a mut [u8],
    pub first: bool,
}

impl Pass for Accumulate<'_> {
    fn split(&self) -> Split {
        // Streamed only when first: a line that was just read is in the cache.
        let outputs = self.first.then_some((self.acc.as_ptr(), 4));
        Split::new(elements(Wire::F32, self.acc), outputs.into_iter())
    }

    #[inline(always)]
    fn piece<L: Line>(&mut self, seen: L::Exponents, piece: Piece, stream: bool) -> L::Exponents {
        let value: L = get(self.wire, self.src, piece);
        let sum = if self.first { value } else { get_cold::<L>(Wire::F32, self.acc, piece) + value };
        // SAFETY: `split` streams only whole lines, and only if they are aligned in all outputs.
        unsafe { put(sum, self.acc, piece, stream) };
        value.exponents(seen)
    }
}

/// A plain copy; both sides have the same length.
pub(super) struct Copy<'a> {
    pub src: &'a [u8],
    pub dst: &'a mut [u8],
}

impl Kernel for Copy<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Line>(self) {
        let Self { src, dst } = self;
        if dst.len() < STREAM_FROM {
            dst.copy_from_slice(src);
            return;
        }
        let (head, rest) = dst.split_at_mut(dst.as_ptr().align_offset(64));
        let (src_head, src) = src.split_at(head.len());
        head.copy_from_slice(src_head);
        let (lines, tail) = rest.as_chunks_mut::<64>();
        let (src_lines, src_tail) = src.as_chunks::<64>();
        for (src, dst) in src_lines.iter().zip(lines) {
            // SAFETY: the lines start after `head`, at a multiple of 64 bytes; the fence follows.
            unsafe { L::load(src).stream(dst) };
        }
        tail.copy_from_slice(src_tail);
        L::fence();
    }
}

/// Whether all magnitudes of elements of 8 bits are below a code, which tells numbers from others.
pub(super) struct FiniteCodes<'a> {
    pub src: &'a [u8],
    pub below: u8,
}

impl Kernel for FiniteCodes<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<L: Line>(self) -> bool {
        self.src.iter().fold(0, |most, code| (code & 0x7f).max(most)) < self.below
    }
}

/// The same of what is copied.
pub(super) struct CopyCodes<'a> {
    pub src: &'a [u8],
    pub dst: &'a mut [u8],
    pub below: u8,
}

impl Kernel for CopyCodes<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<L: Line>(self) -> bool {
        let Self { src, dst, below } = self;
        let stream = dst.len() >= STREAM_FROM;
        let (head, rest) = dst.split_at_mut(dst.as_ptr().align_offset(64).min(dst.len()));
        let (src_head, src) = src.split_at(head.len());
        let (lines, tail) = rest.as_chunks_mut::<64>();
        let (src_lines, src_tail) = src.as_chunks::<64>();
        let mut most = [0; 64];
        for (src, dst) in src_lines.iter().zip(lines) {
            // What is checked is what was loaded, and so what is stored.
            let (line, mut codes) = (L::load(src), [0; 64]);
            line.store(&mut codes);
            most.iter_mut().zip(codes).for_each(|(most, code)| *most = (code & 0x7f).max(*most));
            if stream {
                // SAFETY: the lines start after `head`, at a multiple of 64 bytes; the fence follows.
                unsafe { line.stream(dst) };
            } else {
                line.store(dst);
            }
        }
        if stream {
            L::fence();
        }
        for (src, dst) in src_head.iter().zip(head).chain(src_tail.iter().zip(tail)) {
            *dst = *src;
            most[0] = most[0].max(*dst & 0x7f);
        }
        most.iter().all(|most| *most < below)
    }
}

/// Whether all elements are finite.
pub(super) struct Finite<'a> {
    pub wire: Wire,
    pub src: &'a [u8],
}

impl Pass for Finite<'_> {
    fn split(&self) -> Split {
        Split::new(elements(self.wire, self.src), std::iter::empty())
    }

    #[inline(always)]
    fn piece<L: Line>(&mut self, seen: L::Exponents, piece: Piece, _: bool) -> L::Exponents {
        get::<L>(self.wire, self.src, piece).exponents(seen)
    }
}

macro_rules! jobs {
    ($([$($generics:tt)*] $pass:ty),*) => {$(
        impl<$($generics)*> Kernel for $pass {
            /// Whether all sources were finite.
            type Output = bool;

            #[inline(always)]
            fn run<L: Line>(self) -> bool {
                run::<L>(self)
            }
        }
    )*};
}
jobs!([O: Op<Scalar = f32>, const N: usize] Reduce<'_, O, N>, [] Accumulate<'_>, [] Finite<'_>, [] models::Difference<'_>, [] models::Correction<'_>);
