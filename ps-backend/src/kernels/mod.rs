//! Reduction kernels: from wire bytes to the next weights in one pass.
//!
//! [`apply`] reads each contribution, the old weights and the old optimizer state once and writes the
//! next ones elsewhere, so that the double buffer costs no extra pass. Large outputs bypass the caches: nobody
//! reads them soon, and a line that is streamed need not be fetched first. What bounds a reduction is
//! then memory: 8 bytes moved for each fp32 weight with `sum` and `sgd`, 24 with `adam`.
//!
//! Everything is written once over [`line::Line`] and compiled for several instruction sets, chosen at
//! run time in [`level`]. Doubles have plain loops over [`double::Eight`], compiled for the same sets. Results are the same bit for bit (but for which NaN a NaN is) whatever the
//! instruction set, address or length: sources are added in the given order, and nothing is fused.

mod double;
mod level;
mod line;
mod ops;
mod pass;
#[cfg(target_arch = "x86_64")]
mod x86;

use libmodelio::vocabulary::reducer::{Reducer, Step};

use level::dispatch;
#[doc(hidden)]
pub use level::{Level, with_level};
use line::Scalar;
use ops::Op;
use pass::{bytes, bytes_mut};

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
}

impl Wire {
    /// Bytes an element takes.
    #[inline]
    pub fn size(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    /// Values of 32 bits that an element takes in accumulators, masters and optimizer state.
    #[inline]
    pub fn words(self) -> usize {
        if self == Self::F64 { 2 } else { 1 }
    }

    /// Whether its arithmetic is wider than itself, so that its weights have masters.
    #[inline]
    pub fn is_half(self) -> bool {
        matches!(self, Self::F16 | Self::BF16)
    }

    /// What its sums, masters and optimizer state are.
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
    /// An accumulator, as [`fold`] makes it: fp32, or of F64 elements the bytes of an f64 in two values each.
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
    /// fp32 master of half-precision weights. Without one the weights are widened and rounded again at
    /// each step; F32 and F64 have none.
    pub master: Option<&'a [f32]>,
    /// Optimizer state; what the reducer does not have is empty. Of F64, the bytes of f64.
    pub slots: [&'a [f32]; 2],
}

/// Where the next version goes: the same lengths as in [`Input`], and the same parts.
///
/// Large outputs are fastest where equal elements of all parts lie equally far from a 64-byte boundary
/// (halves: half as far), and where no input lies less than 128 bytes before an output modulo 4096: the CPU
/// takes such a load to depend on the store before it, which costs up to half of the speed.
#[derive(Debug)]
pub struct Output<'a> {
    /// Weights in the segment's wire type; for half types, the master rounded to nearest even.
    pub weights: &'a mut [u8],
    /// fp32 master of half-precision weights.
    pub master: Option<&'a mut [f32]>,
    /// Optimizer state; what the reducer does not have is empty.
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

/// Compute the next version of a segment: `output = reducer(input, sum of sources)`.
///
/// Sources are summed in fp32 (F64 in f64) in the order given; none at all is a zero gradient, with which optimizers
/// still decay and step. `assign` takes the last source, bytes as they are, and without one keeps the
/// weights.
///
/// Returns whether every element of every source was finite, or true if not asked to `check`. The output
/// is complete either way; a caller who refuses the contributions drops it.
///
/// # Panics
/// If lengths disagree, or parts are there that the reducer or the type does not have, or missing.
pub fn apply(
    wire: Wire,
    step: &Step,
    sources: &[Source<'_>],
    input: Input<'_>,
    output: Output<'_>,
    check: bool,
) -> bool {
    let n = elements(wire, input.weights);
    assert_eq!(output.weights.len(), input.weights.len(), "output weights");
    assert!(sources.iter().all(|source| source.elements(wire) == n), "a source is not of {n} elements");
    assert!(wire.is_half() || input.master.is_none(), "{wire:?} weights are their own master");
    assert_eq!(input.master.map(<[f32]>::len), output.master.as_ref().map(|out| out.len()), "masters");
    assert!(input.master.is_none_or(|master| master.len() == n), "the master is not of {n} elements");
    for slot in 0..2 {
        let want = if slot < step.reducer.state_slots() { n * wire.words() } else { 0 };
        assert_eq!((input.slots[slot].len(), output.slots[slot].len()), (want, want), "slot {slot}");
    }

    let finite = match step.reducer {
        Reducer::Assign => return assign(wire, sources, input, output, check),
        _ if wire == Wire::F64 => optimize(step, Doubles(sources, input, output), !sources.is_empty()),
        _ => optimize(step, Floats(wire, sources, input, output), !sources.is_empty()),
    };
    finite || !check
}

/// What one reduction reads and writes, waiting for its arithmetic.
trait Operands<S> {
    /// Returns whether all sources were finite.
    fn reduce(self, op: impl Op<Scalar = S>) -> bool;
}

fn optimize<S: Scalar>(step: &Step, operands: impl Operands<S>, any: bool) -> bool {
    match step.reducer {
        Reducer::Sum if step.hyper.carry == 0.0 && any => operands.reduce(ops::Replace::new()),
        Reducer::Sum => operands.reduce(ops::Sum::new(step)),
        Reducer::Sgd => operands.reduce(ops::Sgd::new(step)),
        Reducer::Momentum | Reducer::Nesterov => {
            let nesterov = step.reducer == Reducer::Nesterov;
            if step.t <= 1 {
                operands.reduce(ops::Momentum::<_, true>::new(step, nesterov))
            } else {
                operands.reduce(ops::Momentum::<_, false>::new(step, nesterov))
            }
        }
        Reducer::Adam => operands.reduce(ops::Adam::new(step, false)),
        Reducer::AdamW => operands.reduce(ops::Adam::new(step, true)),
        Reducer::Assign => operands.reduce(ops::Replace::new()),
    }
}

struct Floats<'a>(Wire, &'a [Source<'a>], Input<'a>, Output<'a>);

impl Operands<f32> for Floats<'_> {
    fn reduce(self, op: impl Op<Scalar = f32>) -> bool {
        reduce(op, self.0, self.1, self.2, self.3)
    }
}

struct Doubles<'a>(&'a [Source<'a>], Input<'a>, Output<'a>);

impl Operands<f64> for Doubles<'_> {
    fn reduce(self, op: impl Op<Scalar = f64>) -> bool {
        let Doubles(sources, input, output) = self;
        let [slot0, slot1] = output.slots;
        dispatch(double::Reduce {
            op,
            sources,
            weights: (input.weights, output.weights),
            slots: [(bytes(input.slots[0]), bytes_mut(slot0)), (bytes(input.slots[1]), bytes_mut(slot1))],
        })
    }
}

fn reduce<O: Op<Scalar = f32>>(
    op: O,
    wire: Wire,
    sources: &[Source<'_>],
    input: Input<'_>,
    output: Output<'_>,
) -> bool {
    let plain = |i: usize| match sources[i] {
        Source::Wire(source) => source,
        Source::Acc(source) => bytes(source),
    };
    match (wire, sources.len()) {
        (Wire::F32, 1) => reduce_as(op, wire, sources, [plain(0)], input, output),
        (Wire::F32, 2) => reduce_as(op, wire, sources, [0, 1].map(plain), input, output),
        (Wire::F32, 3) => reduce_as(op, wire, sources, [0, 1, 2].map(plain), input, output),
        (Wire::F32, 4) => reduce_as(op, wire, sources, [0, 1, 2, 3].map(plain), input, output),
        _ => reduce_as(op, wire, sources, [], input, output),
    }
}

fn reduce_as<O: Op<Scalar = f32>, const N: usize>(
    op: O,
    wire: Wire,
    sources: &[Source<'_>],
    plain: [&[u8]; N],
    input: Input<'_>,
    output: Output<'_>,
) -> bool {
    let [slot0, slot1] = output.slots;
    dispatch(pass::Reduce::<O, N> {
        op,
        wire,
        sources,
        plain,
        weights: (input.weights, output.weights),
        master: input.master.map(bytes).zip(output.master.map(bytes_mut)),
        slots: [(bytes(input.slots[0]), bytes_mut(slot0)), (bytes(input.slots[1]), bytes_mut(slot1))],
        staged: [0; 32],
    })
}

fn assign(wire: Wire, sources: &[Source<'_>], input: Input<'_>, output: Output<'_>, check: bool) -> bool {
    let (last, before) = match sources.split_last() {
        Some((last, before)) => (Some(last), before),
        None => (None, sources),
    };
    let mut finite = !check || sources_are_finite(wire, before);
    match last {
        None => {
            stream_copy(input.weights, output.weights);
            if let (Some(old), Some(new)) = (input.master, output.master) {
                stream_copy(bytes(old), bytes_mut(new));
            }
        }
        // Others may be storing into the source: what is judged is read once.
        Some(Source::Wire(src)) if check && output.master.is_none() => {
            finite &= copy_checked(wire, src, output.weights);
        }
        Some(Source::Wire(src)) if !check => {
            stream_copy(src, output.weights);
            if let Some(master) = output.master {
                widen(wire, src, master);
            }
        }
        Some(_) => {
            let last = &sources[sources.len() - 1..];
            let fine = if wire == Wire::F64 {
                Doubles(last, input, output).reduce(ops::Replace::new())
            } else {
                reduce(ops::Replace::new(), wire, last, input, output)
            };
            finite &= fine || !check;
        }
    }
    finite
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
/// Returns whether every element was finite, or true if not asked to `check`.
///
/// # Panics
/// If the lengths disagree.
pub fn fold(wire: Wire, src: &[u8], acc: &mut [f32], first: bool, check: bool) -> bool {
    assert_eq!(elements(wire, src) * wire.words(), acc.len(), "accumulator");
    if wire == Wire::F64 {
        return dispatch(double::Fold { src, acc: bytes_mut(acc), first }) || !check;
    }
    dispatch(pass::Fold { wire, src, acc: bytes_mut(acc), first }) || !check
}

/// fp32 master copy from weights.
///
/// # Panics
/// If the lengths disagree.
pub fn widen(wire: Wire, src: &[u8], dst: &mut [f32]) {
    fold(wire, src, dst, true, false);
}

/// Copy, past the caches when large.
///
/// # Panics
/// If the lengths disagree.
pub fn stream_copy(src: &[u8], dst: &mut [u8]) {
    assert_eq!(src.len(), dst.len(), "copy");
    dispatch(pass::Copy { src, dst });
}

/// Copy, past the caches when large, and tell whether all elements of the copy are finite, whatever others store into the
/// source meanwhile. Bits of NaN may change.
///
/// # Panics
/// If the lengths disagree or are not whole elements.
pub fn copy_checked(wire: Wire, src: &[u8], dst: &mut [u8]) -> bool {
    assert_eq!(src.len(), dst.len(), "copy");
    elements(wire, src);
    if wire == Wire::F64 {
        return dispatch(double::Fold { src, acc: dst, first: true });
    }
    if wire != Wire::F32 {
        // Widened and narrowed again, which changes no finite number: each byte is read once.
        return dispatch(pass::Reduce::<_, 0> {
            op: ops::Replace::new(),
            wire,
            sources: &[Source::Wire(src)],
            plain: [],
            weights: (src, dst),
            master: None,
            slots: [(&[], &mut []), (&[], &mut [])],
            staged: [0; 32],
        });
    }
    dispatch(pass::Fold { wire, src, acc: dst, first: true })
}

/// Are all elements finite?
///
/// # Panics
/// If the bytes are not whole elements.
pub fn all_finite(wire: Wire, src: &[u8]) -> bool {
    elements(wire, src);
    match wire {
        Wire::F64 => dispatch(double::Finite { src }),
        _ => dispatch(pass::Finite { wire, src }),
    }
}
