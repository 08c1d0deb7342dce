//! Loops over the elements of a segment: added up, checked, copied, widened, or put through an [`Op`], in one pass.
//!
//! [`Operands::reduce`] reads each contribution, the old weights and the old state once and writes the next
//! ones elsewhere, so that the double buffer costs no extra pass. Large outputs bypass the caches: nobody
//! reads them soon, and a line that is streamed need not be fetched first. Memory then bounds a pass.
//!
//! Everything is written once over `Line` and compiled for several instruction sets, chosen at run time in
//! `level`. Doubles have plain loops over arrays of eight, compiled for the same sets. Results are the same
//! bit for bit (except that one NaN may be another) whatever the instruction set, address or length: sources
//! are added in the given order, and nothing is fused.

pub mod coded;
mod differ;
mod double;
mod fp8;
mod level;
mod line;
#[cfg(target_arch = "aarch64")]
mod neon;
mod op;
mod pass;
#[cfg(target_arch = "x86_64")]
mod x86;

#[doc(hidden)]
pub use fp8::{f32_to_e4m3, f32_to_e5m2};
use level::dispatch;
pub use level::{Level, with_level};
pub use line::{Lanes, Scalar};
pub use op::{Op, Total};
pub use pass::{bytes, bytes_mut};

use crate::vocabulary::dtype::DType;

const _: () = assert!(cfg!(target_endian = "little"), "wire bytes are used as they are");

/// Element type of a segment as it travels and as `weights` shows it; little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wire {
    /// IEEE binary64.
    F64,
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    BF16,
    /// 8 bits, 4 of them of exponent, without infinity.
    E4M3,
    /// The upper half of a binary16.
    E5M2,
}

impl Wire {
    /// The type whose elements tensors of `dtype` have; none if they cannot be added up.
    #[inline]
    pub fn of(dtype: DType) -> Option<Wire> {
        match dtype {
            DType::F64 => Some(Wire::F64),
            DType::F32 => Some(Wire::F32),
            DType::F16 => Some(Wire::F16),
            DType::BF16 => Some(Wire::BF16),
            DType::E4M3 => Some(Wire::E4M3),
            DType::E5M2 => Some(Wire::E5M2),
            DType::Opaque(_) => None,
        }
    }

    /// Bytes an element takes.
    #[inline]
    pub fn size(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::E4M3 | Self::E5M2 => 1,
        }
    }

    /// Values of 32 bits that an element takes in accumulators, masters and optimizer state.
    #[inline]
    pub fn words(self) -> usize {
        if self == Self::F64 { 2 } else { 1 }
    }

    /// Whether its arithmetic is wider than the type, so that its weights have masters.
    #[inline]
    pub fn is_narrow(self) -> bool {
        !matches!(self, Self::F64 | Self::F32)
    }

    /// The code of 8 bits from which on magnitudes are not finite.
    #[inline]
    fn finite_codes(self) -> Option<u8> {
        match self {
            Self::E4M3 => Some(0x7f),
            Self::E5M2 => Some(0x7c),
            _ => None,
        }
    }

    /// The type of its sums, masters and optimizer state.
    #[inline]
    pub fn wide(self) -> Self {
        if self == Self::F64 { Self::F64 } else { Self::F32 }
    }
}

/// Gradients, replicas or values that enter one reduction.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Bytes of the segment's [`Wire`] type, at any address.
    Wire(&'a [u8]),
    /// An accumulator, as [`accumulate`] makes it: fp32, or of F64 elements the bytes of an f64 in two values each.
    Acc(&'a [f32]),
}

impl Source<'_> {
    fn elements(&self, wire: Wire) -> usize {
        match self {
            Self::Wire(src) => elements(wire, src),
            Self::Acc(acc) => acc.len() / wire.words(),
        }
    }
}

/// The version a reduction starts from.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// Weights in the segment's wire type, at any address.
    pub weights: &'a [u8],
    /// fp32 master of narrow weights. Without one the weights are widened and rounded again at
    /// each step; F32 and F64 have none.
    pub master: Option<&'a [f32]>,
    /// State; slots that the operation does not have are empty. For F64, these are the bytes of f64.
    pub slots: [&'a [f32]; 2],
}

/// The place of the next version: the same lengths as in [`Input`], and the same parts.
///
/// Large outputs are fastest where equal elements of all parts lie equally far from a 64-byte boundary (halves: half as
/// far; 8 bits: a quarter), and where no input lies less than 128 bytes before an output modulo 4096: the CPU takes
/// such a load to depend on the store before it, which costs up to half of the speed.
#[derive(Debug)]
pub struct Output<'a> {
    /// Weights in the segment's wire type; for narrow types, the master rounded to nearest even.
    pub weights: &'a mut [u8],
    /// fp32 master of narrow weights.
    pub master: Option<&'a mut [f32]>,
    /// State; slots that the operation does not have are empty.
    pub slots: [&'a mut [f32]; 2],
}

/// Elements in `bytes`.
///
/// # Panics
/// If they are not whole elements.
fn elements(wire: Wire, bytes: &[u8]) -> usize {
    assert!(bytes.len().is_multiple_of(wire.size()), "{} bytes are not whole {wire:?}", bytes.len());
    bytes.len() / wire.size()
}

/// All that one pass over a segment reads and writes.
#[derive(Debug)]
pub struct Operands<'a> {
    /// The type of the elements.
    pub wire: Wire,
    /// The sources to add up, in this order.
    pub sources: &'a [Source<'a>],
    /// The input of the pass.
    pub input: Input<'a>,
    /// The place of its results.
    pub output: Output<'a>,
}

impl Operands<'_> {
    /// Checks that everything is as long as the old weights, for `slots` slots.
    ///
    /// # Panics
    /// If not, or if parts are there that the type does not have.
    pub fn assert_complete(&self, slots: usize) {
        let Self { wire, sources, input, output } = self;
        let n = elements(*wire, input.weights);
        assert_eq!(output.weights.len(), input.weights.len(), "output weights");
        assert!(sources.iter().all(|source| source.elements(*wire) == n), "a source is not of {n} elements");
        assert!(wire.is_narrow() || input.master.is_none(), "{wire:?} weights are their own master");
        assert_eq!(input.master.map(<[f32]>::len), output.master.as_ref().map(|out| out.len()), "masters");
        assert!(input.master.is_none_or(|master| master.len() == n), "the master is not of {n} elements");
        for slot in 0..2 {
            let want = if slot < slots { n * wire.words() } else { 0 };
            assert_eq!((input.slots[slot].len(), output.slots[slot].len()), (want, want), "slot {slot}");
        }
    }

    /// Compute `output` from `input` and the sum of the sources, which is made in fp32 (of F64 in f64): of F64 as
    /// `double` says, of all others as `single` says.
    ///
    /// Returns whether every element of every source was finite. The output is complete either way.
    ///
    /// # Panics
    /// Unless it [`Self::assert_complete`]s, with the slots of the operation.
    pub fn reduce<A: Op<Scalar = f32>, B: Op<Scalar = f64>>(
        self,
        single: impl FnOnce() -> A,
        double: impl FnOnce() -> B,
    ) -> bool {
        if self.wire == Wire::F64 { self.reduce_doubles(double()) } else { self.reduce_floats(single()) }
    }

    fn reduce_doubles<O: Op<Scalar = f64>>(self, op: O) -> bool {
        self.assert_complete(O::SLOTS);
        let Self { sources, input, output, .. } = self;
        let [slot0, slot1] = output.slots;
        dispatch(double::Reduce {
            op,
            sources,
            weights: (input.weights, output.weights),
            slots: [(bytes(input.slots[0]), bytes_mut(slot0)), (bytes(input.slots[1]), bytes_mut(slot1))],
        })
    }

    fn reduce_floats<O: Op<Scalar = f32>>(self, op: O) -> bool {
        self.assert_complete(O::SLOTS);
        let plain = |i: usize| match self.sources[i] {
            Source::Wire(source) => source,
            Source::Acc(source) => bytes(source),
        };
        match (self.wire, self.sources.len()) {
            (Wire::F32, 1) => self.reduce_plain(op, [plain(0)]),
            (Wire::F32, 2) => self.reduce_plain(op, [0, 1].map(plain)),
            (Wire::F32, 3) => self.reduce_plain(op, [0, 1, 2].map(plain)),
            (Wire::F32, 4) => self.reduce_plain(op, [0, 1, 2, 3].map(plain)),
            _ => self.reduce_plain(op, []),
        }
    }

    fn reduce_plain<O: Op<Scalar = f32>, const N: usize>(self, op: O, plain: [&[u8]; N]) -> bool {
        let Self { wire, sources, input, output } = self;
        let [slot0, slot1] = output.slots;
        dispatch(pass::Reduce::<O, N> {
            op,
            wire,
            sources,
            plain,
            weights: (input.weights, output.weights),
            master: input.master.map(bytes).zip(output.master.map(bytes_mut)),
            slots: [(bytes(input.slots[0]), bytes_mut(slot0)), (bytes(input.slots[1]), bytes_mut(slot1))],
            staged: pass::Staged::default(),
        })
    }
}

/// Are all elements of all sources finite?
///
/// # Panics
/// If the bytes are not whole elements.
pub fn sources_are_finite(wire: Wire, sources: &[Source<'_>]) -> bool {
    sources.iter().all(|source| match source {
        Source::Wire(src) => all_finite(wire, src),
        Source::Acc(acc) => all_finite(wire.wide(), bytes(acc)),
    })
}

/// Add (or, when `first`, store) wire bytes into an accumulator.
///
/// Returns whether every element was finite.
///
/// # Panics
/// If the lengths disagree.
pub fn accumulate(wire: Wire, src: &[u8], acc: &mut [f32], first: bool) -> bool {
    accumulate_bytes(wire, src, bytes_mut(acc), first)
}

/// Like [`accumulate`], into the bytes of an accumulator at any address.
///
/// # Panics
/// If the lengths disagree.
pub fn accumulate_bytes(wire: Wire, src: &[u8], acc: &mut [u8], first: bool) -> bool {
    assert_eq!(elements(wire, src) * wire.wide().size(), acc.len(), "accumulator");
    match wire {
        Wire::F64 => dispatch(double::Accumulate { src, acc, first }),
        _ => dispatch(pass::Accumulate { wire, src, acc, first }),
    }
}

/// The sum of the squares of an accumulator's elements, or of the sums of two accumulators', in f64. The order of
/// addition depends on the number of elements alone.
///
/// # Panics
/// If the lengths disagree, or there is no accumulator.
pub fn squares(wire: Wire, sums: &[&[f32]]) -> f64 {
    assert!(sums.iter().all(|sum| sum.len() == sums[0].len()), "accumulators");
    dispatch(double::Squares { doubles: wire == Wire::F64, sums })
}

/// fp32 master copy from weights.
///
/// # Panics
/// If the lengths disagree.
pub fn widen(wire: Wire, src: &[u8], dst: &mut [f32]) {
    accumulate(wire, src, dst, true);
}

/// fp32 master copy from narrow weights, of those elements that differ from `old` ones.
///
/// # Panics
/// If the lengths disagree, or the type is not narrow.
pub fn widen_changed(wire: Wire, old: &[u8], new: &[u8], master: &mut [f32]) {
    assert!(wire.is_narrow(), "{wire:?} weights are their own master");
    assert_eq!([old.len(), new.len()], [wire.size() * master.len(); 2], "master copy");
    match wire.size() {
        1 => widen_changed_of::<1>(wire, old, new, master),
        _ => widen_changed_of::<2>(wire, old, new, master),
    }
}

fn widen_changed_of<const SIZE: usize>(wire: Wire, old: &[u8], new: &[u8], master: &mut [f32]) {
    /// Elements that are widened at once.
    const PIECE: usize = 1024;
    let mut wide = [0.0; PIECE];
    let pieces = old.chunks(SIZE * PIECE).zip(new.chunks(SIZE * PIECE)).zip(master.chunks_mut(PIECE));
    for ((old, new), master) in pieces {
        if old == new {
            continue;
        }
        let wide = &mut wide[..master.len()];
        widen(wire, new, wide);
        let both = old.as_chunks::<SIZE>().0.iter().zip(new.as_chunks::<SIZE>().0);
        for ((master, wide), (old, new)) in master.iter_mut().zip(wide).zip(both) {
            *master = if old == new { *master } else { *wide };
        }
    }
}

/// fp32 master copy from narrow weights, of the elements at these places.
///
/// # Panics
/// If the lengths disagree, the type is not narrow, or there is no such element.
pub fn widen_at(wire: Wire, new: &[u8], places: &[u32], master: &mut [f32]) {
    assert!(wire.is_narrow(), "{wire:?} weights are their own master");
    assert_eq!(new.len(), wire.size() * master.len(), "master copy");
    match wire.size() {
        1 => widen_at_of::<1>(wire, new.as_chunks().0, places, master),
        _ => widen_at_of::<2>(wire, new.as_chunks().0, places, master),
    }
}

fn widen_at_of<const SIZE: usize>(wire: Wire, new: &[[u8; SIZE]], places: &[u32], master: &mut [f32]) {
    /// Elements that are widened at once.
    const PIECE: usize = 256;
    let (mut narrow, mut wide) = ([[0; SIZE]; PIECE], [0.0; PIECE]);
    for places in places.chunks(PIECE) {
        for (narrow, &place) in narrow.iter_mut().zip(places) {
            *narrow = new[place as usize];
        }
        widen(wire, narrow[..places.len()].as_flattened(), &mut wide[..places.len()]);
        for (&place, wide) in places.iter().zip(wide) {
            master[place as usize] = wide;
        }
    }
}

/// Sets a bit for each line of 64 bytes that differs, and clears the others. The last line may be shorter.
///
/// # Panics
/// If the lengths disagree, or there is not a bit for each line.
pub fn differing_lines(old: &[u8], new: &[u8], bits: &mut [u64]) {
    assert_eq!(old.len(), new.len(), "compared");
    assert_eq!(old.len().div_ceil(differ::LINE).div_ceil(64), bits.len(), "a bit a line");
    dispatch(differ::Differ { old, new, bits });
}

/// Copy, past the caches when large.
///
/// # Panics
/// If the lengths disagree.
pub fn stream_copy(src: &[u8], dst: &mut [u8]) {
    assert_eq!(src.len(), dst.len(), "copy");
    dispatch(pass::Copy { src, dst });
}

/// Copies, past the caches when large, and returns whether all elements of the copy are finite, whatever
/// others store into the source meanwhile. Bits of NaN may change.
///
/// # Panics
/// If the lengths disagree or are not whole elements.
pub fn copy_checked(wire: Wire, src: &[u8], dst: &mut [u8]) -> bool {
    assert_eq!(src.len(), dst.len(), "copy");
    if let Some(below) = wire.finite_codes() {
        return dispatch(pass::CopyCodes { src, dst, below });
    }
    if wire.is_narrow() {
        // Widened and narrowed again, which changes no finite number: each byte is read once.
        let input = Input { weights: src, master: None, slots: [&[], &[]] };
        let output = Output { weights: dst, master: None, slots: [&mut [], &mut []] };
        return Operands { wire, sources: &[Source::Wire(src)], input, output }
            .reduce_plain(Total::new(), []);
    }
    accumulate_bytes(wire, src, dst, true)
}

/// `out = scale * (model - base)`, of weights that a learner has come to and those that it began from; without a base,
/// `scale * model`. Returns whether that is finite.
///
/// # Panics
/// If the lengths disagree or are not whole elements.
pub fn difference(wire: Wire, scale: f64, model: &[u8], base: Option<&[u8]>, out: &mut [u8]) -> bool {
    let len = elements(wire, model) * wire.size();
    assert!(out.len() == len && base.is_none_or(|base| base.len() == len), "weights");
    match wire {
        Wire::F64 => dispatch(double::Difference { scale, model, base, out }),
        _ => dispatch(pass::models::Difference { wire, scale, model, base, out }),
    }
}

/// `out` is the correction `elasticity * (replica - central)` of the replica that a learner began from. `next`, its
/// next replica, is `model`, the weights that it has come to, less the correction. Returns whether the model and the
/// correction are finite.
///
/// # Panics
/// If the lengths disagree or are not whole elements.
pub fn correction(
    wire: Wire,
    elasticity: f64,
    model: &[u8],
    [replica, central]: [&[u8]; 2],
    [out, next]: [&mut [u8]; 2],
) -> bool {
    let len = elements(wire, model) * wire.size();
    assert_eq!([replica.len(), central.len(), out.len(), next.len()], [len; 4], "weights");
    match wire {
        Wire::F64 => dispatch(double::Correction { elasticity, model, replica, central, out, next }),
        _ => dispatch(pass::models::Correction { wire, elasticity, model, replica, central, out, next }),
    }
}

/// Are all elements finite?
///
/// # Panics
/// If the bytes are not whole elements.
pub fn all_finite(wire: Wire, src: &[u8]) -> bool {
    elements(wire, src);
    match wire {
        Wire::F64 => dispatch(double::Finite { src }),
        _ if let Some(below) = wire.finite_codes() => dispatch(pass::FiniteCodes { src, below }),
        _ => dispatch(pass::Finite { wire, src }),
    }
}
