//! Sums of contributions: an array of fp32, in which an F64 element takes two places.
//!
//! This module holds `unsafe`; the module above explains why it is sound. While a block is added to, its bytes in the
//! accumulator belong to one thread. Nobody changes them while a plan reads them.
use std::io;
use std::ops::Range;
use std::sync::Arc;

use libmodelio::bytes::block::span;
use libmodelio::bytes::kernels::coded::{self, Fault};
use libmodelio::bytes::kernels::{self, Wire};
use libmodelio::bytes::mmap::Mapping;
use libmodelio::vocabulary::coding::{Coding, Form};
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::{DType, ModelLayout, Segment};
use libmodelio::vocabulary::reducer::Combine;
use smallvec::SmallVec;

use super::places::{block_span, element_span, reduced};

/// The number of contributions that are listed on the stack. More of them cost an allocation for each block.
pub(super) const INLINE: usize = 16;
/// The number of values of a sum that all payloads are added to before the next values. They stay in the cache
/// meanwhile.
const CHUNK: usize = 2 << 10;

/// The sum of contributions that had to leave their learners' memory before the version is made.
#[derive(Clone, Debug)]
pub(super) struct Accumulator {
    /// The sums, in the order of reducible elements.
    sum: Arc<Mapping>,
    /// With `assign`, the bytes of tensors that are not reduced, at the layout's offsets.
    raw: Option<Arc<Mapping>>,
}

/// A block as it was sent.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// The block as it lies in the model.
    Plain(&'a [u8]),
    /// The same segments in the same order, with reducible elements as fp32, or as F64 if they are. Sums of several
    /// narrower contributions lose nothing on their way.
    Wide(&'a [u8]),
    /// The same segments in the same order, with the elements of fp32 and narrower tensors in a lossy form.
    Coded(Coding, &'a [u8]),
}

/// The form in which the elements of a segment are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    As(Wire),
    /// So many elements, in this form.
    Coded(Coding, usize),
}

impl Sent {
    /// Adds some of a segment's elements to `sum`, or stores them. `bytes` has all of the segment's, and `at` is the
    /// first value of `sum` in the segment's. Returns whether they are finite.
    fn accumulate(self, bytes: &[u8], at: usize, sum: &mut [f32], stores: bool) -> bool {
        match self {
            Sent::As(wire) => {
                let bytes_of = |words: usize| words / wire.words() * wire.size();
                let bytes = &bytes[bytes_of(at)..][..bytes_of(sum.len())];
                kernels::accumulate(wire, bytes, sum, stores)
            }
            Sent::Coded(coding, elements) => {
                let mut piece = [0.0; CHUNK];
                let mut finite = true;
                for (i, sum) in sum.chunks_mut(CHUNK).enumerate() {
                    let piece = &mut piece[..sum.len()];
                    coded::decode(coding, elements, bytes, at + i * CHUNK, piece);
                    finite &= kernels::accumulate(Wire::F32, kernels::bytes(piece), sum, stores);
                }
                finite
            }
        }
    }

    fn is_finite(self, bytes: &[u8]) -> bool {
        match self {
            Sent::As(wire) => kernels::all_finite(wire, bytes),
            Sent::Coded(coding, elements) => {
                let mut piece = [0.0; CHUNK];
                (0..elements).step_by(CHUNK).all(|at| {
                    let piece = &mut piece[..CHUNK.min(elements - at)];
                    coded::decode(coding, elements, bytes, at, piece);
                    kernels::all_finite(Wire::F32, kernels::bytes(piece))
                })
            }
        }
    }
}

impl<'a> Payload<'a> {
    /// The bytes as they were sent.
    pub fn bytes(self) -> &'a [u8] {
        match self {
            Payload::Plain(bytes) | Payload::Wide(bytes) | Payload::Coded(_, bytes) => bytes,
        }
    }

    /// Bytes in this form.
    pub fn of(form: Form, bytes: &'a [u8]) -> Payload<'a> {
        match form {
            Form::Plain => Payload::Plain(bytes),
            Form::Wide => Payload::Wide(bytes),
            Form::Coded(coding) => Payload::Coded(coding, bytes),
        }
    }

    /// The form of the bytes.
    pub fn form(self) -> Form {
        match self {
            Payload::Plain(_) => Form::Plain,
            Payload::Wide(_) => Form::Wide,
            Payload::Coded(coding, _) => Form::Coded(coding),
        }
    }

    /// Checks what the length of a coded payload does not say.
    ///
    /// # Errors
    /// The first fault.
    ///
    /// # Panics
    /// If the payload has not [`Self::wanted_len`].
    pub(super) fn check(self, layout: &ModelLayout, block: BlockId) -> Result<(), Fault> {
        if !matches!(self, Payload::Coded(..)) {
            return Ok(());
        }
        segments(layout, block, self).try_for_each(|(_, sent, bytes)| match sent {
            Some(Sent::Coded(coding, elements)) => coded::check(coding, elements, bytes),
            Some(Sent::As(_)) | None => Ok(()),
        })
    }

    /// Whether every element is finite.
    ///
    /// # Panics
    /// When the bytes are too few for a payload of `block`.
    pub(super) fn is_finite(self, layout: &ModelLayout, block: BlockId) -> bool {
        let mut segments = segments(layout, block, self);
        segments.all(|(_, sent, bytes)| sent.is_none_or(|sent| sent.is_finite(bytes)))
    }

    /// The length of a payload of `block`.
    pub fn wanted_len(self, layout: &ModelLayout, block: BlockId) -> usize {
        match self {
            Payload::Plain(_) => span(&layout.block_bytes(block)).len(),
            Payload::Wide(_) => wide_len(layout, block),
            Payload::Coded(coding, _) => coding.block_bytes(layout, block),
        }
    }
}

/// The segments of `block` with their bytes in `payload`, and the type in which they are sent: none if they are not
/// reduced.
///
/// # Panics
/// If the payload is shorter than [`Payload::wanted_len`].
fn segments<'a>(
    layout: &'a ModelLayout,
    block: BlockId,
    payload: Payload<'a>,
) -> impl Iterator<Item = (&'a Segment, Option<Sent>, &'a [u8])> {
    let mut rest = payload.bytes();
    layout.segments(block).iter().map(move |segment| {
        let own = Wire::of(segment.dtype);
        let (sent, len) = match (own, payload) {
            (Some(own), Payload::Wide(_)) => {
                (Some(Sent::As(own.wide())), element_span(segment, own).len() * 4)
            }
            (_, Payload::Coded(coding, _)) if let Some(elements) = Coding::elements(segment) => {
                (Some(Sent::Coded(coding, elements)), coding.bytes(elements))
            }
            _ => (own.map(Sent::As), span(&segment.bytes).len()),
        };
        let (bytes, others) = rest.split_at(len);
        rest = others;
        (segment, sent, bytes)
    })
}

/// The segments of `block`, cut to the `written` elements. A half-written element does not count.
fn pieces<'a>(
    layout: &'a ModelLayout,
    block: BlockId,
    written: &'a [Range<u32>],
) -> impl Iterator<Item = (&'a Segment, Range<u64>)> {
    let start = layout.block_bytes(block).start;
    layout.segments(block).iter().flat_map(move |segment| {
        written.iter().filter_map(move |range| Some((segment, within(segment, start, range)?)))
    })
}

/// The whole elements of `segment` in `range`, which is relative to `start`.
pub(super) fn within(segment: &Segment, start: u64, range: &Range<u32>) -> Option<Range<u64>> {
    let size = Wire::of(segment.dtype).map_or(1, |wire| wire.size() as u64);
    let bytes = &segment.bytes;
    let [from, to] = [range.start, range.end]
        .map(|at| (start + u64::from(at)).clamp(bytes.start, bytes.end) - bytes.start);
    let (from, to) = (from.next_multiple_of(size), to - to % size);
    (from < to).then(|| bytes.start + from..bytes.start + to)
}

/// The length of a wide payload of `block`.
pub(super) fn wide_len(layout: &ModelLayout, block: BlockId) -> usize {
    layout
        .segments(block)
        .iter()
        .map(|segment| match Wire::of(segment.dtype) {
            Some(wire) => element_span(segment, wire).len() * 4,
            None => span(&segment.bytes).len(),
        })
        .sum()
}

/// Whether a payload of `block` equals the accumulator's form of it byte for byte.
pub(super) fn is_direct(layout: &ModelLayout, block: BlockId, form: Form) -> bool {
    !matches!(form, Form::Coded(_))
        && layout.segments(block).iter().all(|segment| match segment.dtype {
            DType::F32 | DType::F64 => true,
            other => form == Form::Wide && other.is_reducible(),
        })
}

impl Accumulator {
    /// An empty accumulator. Its pages are taken when they are touched.
    ///
    /// # Errors
    /// When there is no memory.
    pub(super) fn new(layout: &ModelLayout) -> io::Result<Accumulator> {
        let bytes = (layout.elements() as usize * 4).max(4);
        let mut segments = (0..layout.blocks()).flat_map(|block| layout.segments(BlockId(block)));
        let has_opaque = segments.any(|segment| !segment.dtype.is_reducible());
        let raw = has_opaque.then(|| Mapping::anonymous(layout.size() as usize).map(Arc::new)).transpose()?;
        Ok(Accumulator { sum: Arc::new(Mapping::anonymous(bytes)?), raw })
    }

    /// An accumulator in other memory, which has room for all elements.
    pub(super) fn over(memory: &Arc<Mapping>) -> Accumulator {
        Accumulator { sum: Arc::clone(memory), raw: None }
    }

    /// The memory of the sums.
    pub(super) fn memory(&self) -> &Arc<Mapping> {
        &self.sum
    }

    /// The sums of elements.
    ///
    /// # Safety
    /// Nobody writes them while the slice lives.
    pub(super) unsafe fn sums(&self, elements: Range<usize>) -> &[f32] {
        // SAFETY: passed on to the caller.
        unsafe { self.sum.floats(elements) }
    }

    /// The bytes of a segment that is not reduced, if they are kept.
    ///
    /// # Safety
    /// Nobody writes them while the slice lives.
    pub(super) unsafe fn raw(&self, bytes: Range<usize>) -> Option<&[u8]> {
        // SAFETY: passed on to the caller.
        self.raw.as_ref().map(|raw| unsafe { raw.bytes(bytes) })
    }

    /// The place of a payload that [`is_direct`].
    ///
    /// # Safety
    /// The block belongs to the caller alone while the slice lives.
    #[allow(clippy::mut_from_ref)] // that is what the safety contract is about
    pub(super) unsafe fn room(&self, layout: &ModelLayout, block: BlockId) -> &mut [u8] {
        let span = block_span(layout, block);
        // SAFETY: passed on to the caller.
        unsafe { self.sum.bytes_mut(span.start * 4..span.end * 4) }
    }

    /// Adds a block, or stores it. Bytes that are not reduced are stored with `assign`, and ignored otherwise.
    /// Returns whether all elements of the payload are finite.
    ///
    /// # Safety
    /// The block belongs to the caller alone. The payload has [`Payload::wanted_len`].
    pub(super) unsafe fn accumulate(
        &self,
        layout: &ModelLayout,
        block: BlockId,
        payload: Payload<'_>,
        stores: bool,
        combine: Combine,
    ) -> bool {
        let stores = stores || combine == Combine::Last;
        let mut finite = true;
        for (segment, sent, bytes) in segments(layout, block, payload) {
            // SAFETY: the block belongs to the caller alone.
            unsafe {
                if let (Some(sent), Some(own)) = (sent, Wire::of(segment.dtype)) {
                    let sum = self.sum.floats_mut(element_span(segment, own));
                    finite &= sent.accumulate(bytes, 0, sum, stores);
                } else if let (Combine::Last, Some(raw)) = (combine, &self.raw) {
                    kernels::stream_copy(bytes, raw.bytes_mut(span(&segment.bytes)));
                }
            }
        }
        finite
    }

    /// Adds several payloads of a block to the accumulator, or stores their sum, in one pass over memory: the sum
    /// stays in the cache until the last payload is added. Returns the index of the first payload that must be
    /// checked and holds NaN or Inf.
    ///
    /// # Safety
    /// The conditions of [`Self::accumulate`].
    pub(super) unsafe fn accumulate_all(
        &self,
        layout: &ModelLayout,
        block: BlockId,
        payloads: &[(Payload<'_>, bool)],
        stores: bool,
    ) -> Option<usize> {
        let mut bad: Option<usize> = None;
        let mut sent: SmallVec<[_; INLINE]> =
            payloads.iter().map(|&(payload, _)| segments(layout, block, payload)).collect();
        for segment in layout.segments(block) {
            let sent: SmallVec<[_; INLINE]> = sent.iter_mut().filter_map(Iterator::next).collect();
            let Some(own) = Wire::of(segment.dtype) else { continue };
            // SAFETY: the block belongs to the caller alone.
            let sum = unsafe { self.sum.floats_mut(element_span(segment, own)) };
            for (at, sum) in sum.chunks_mut(CHUNK).enumerate() {
                for (index, (_, sent, bytes)) in sent.iter().enumerate() {
                    let Some(sent) = sent else { continue };
                    let finite = sent.accumulate(bytes, at * CHUNK, sum, stores && index == 0);
                    if !finite && payloads[index].1 {
                        bad = Some(bad.map_or(index, |bad| bad.min(index)));
                    }
                }
            }
        }
        bad
    }

    /// Stores the `written` ranges of a block that was sent as it lies in the model, for `assign`. The rest stays as
    /// it is. Returns whether everything that is stored is finite.
    ///
    /// # Safety
    /// The conditions of [`Self::accumulate`].
    pub(super) unsafe fn overlay(
        &self,
        layout: &ModelLayout,
        block: BlockId,
        payload: &[u8],
        written: &[Range<u32>],
    ) -> bool {
        let start = layout.block_bytes(block).start;
        let mut finite = true;
        for (segment, range) in pieces(layout, block, written) {
            let bytes = &payload[(range.start - start) as usize..(range.end - start) as usize];
            // SAFETY: the block belongs to the caller alone.
            unsafe {
                if let Some(own) = Wire::of(segment.dtype) {
                    let sum = self.sum.floats_mut(element_span(&segment.cut(range), own));
                    finite &= kernels::accumulate(own, bytes, sum, true);
                } else if let Some(raw) = &self.raw {
                    kernels::stream_copy(bytes, raw.bytes_mut(span(&range)));
                }
            }
        }
        finite
    }

    /// Stores these bytes of the block from another accumulator, for `assign`.
    ///
    /// # Safety
    /// The block belongs to the caller alone in both.
    pub(super) unsafe fn overlay_from(
        &self,
        layout: &ModelLayout,
        block: BlockId,
        other: &Accumulator,
        written: &[Range<u32>],
    ) {
        for (segment, range) in pieces(layout, block, written) {
            // SAFETY: passed on to the caller.
            unsafe {
                if let Some(own) = Wire::of(segment.dtype) {
                    let elements = element_span(&segment.cut(range), own);
                    let bytes = elements.start * 4..elements.end * 4;
                    kernels::stream_copy(other.sum.bytes(bytes.clone()), self.sum.bytes_mut(bytes));
                } else if let (Some(from), Some(to)) = (&other.raw, &self.raw) {
                    kernels::stream_copy(from.bytes(span(&range)), to.bytes_mut(span(&range)));
                }
            }
        }
    }

    /// Adds the block of another accumulator.
    ///
    /// # Safety
    /// The block belongs to the caller alone in both.
    pub(super) unsafe fn add(&self, layout: &ModelLayout, block: BlockId, other: &Accumulator) {
        for (segment, wire) in reduced(layout, block) {
            let elements = element_span(segment, wire);
            // SAFETY: passed on to the caller.
            unsafe {
                let bytes = other.sum.bytes(elements.start * 4..elements.end * 4);
                kernels::accumulate(wire.wide(), bytes, self.sum.floats_mut(elements), false);
            }
        }
    }

    /// Gives its pages back to the system. False if others know the memory: a device may have it registered. Nobody may
    /// use the sums meanwhile, and their contents are gone.
    pub(super) fn give_back(&self) -> bool {
        let is_alone =
            std::iter::once(&self.sum).chain(&self.raw).all(|memory| Arc::strong_count(memory) == 1);
        is_alone && std::iter::once(&self.sum).chain(&self.raw).all(|memory| memory.give_back().is_ok())
    }

    /// The bytes that are taken from the system.
    pub(super) fn taken(&self) -> u64 {
        self.sum.taken() + self.raw.as_ref().map_or(0, |raw| raw.taken())
    }

    /// Its size when all of it is used: the sums, and with `raw` the bytes that are not reduced.
    pub(super) fn bytes(&self, layout: &ModelLayout, raw: bool) -> u64 {
        let segments = (0..layout.blocks()).flat_map(|block| layout.segments(BlockId(block)));
        let opaque = segments.filter(|segment| raw && self.raw.is_some() && !segment.dtype.is_reducible());
        let raw: u64 = opaque.map(|segment| segment.bytes.end - segment.bytes.start).sum();
        self.sum.len() as u64 + raw
    }
}
