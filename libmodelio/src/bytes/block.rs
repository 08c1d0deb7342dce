//! Blocks of a model as bytes: whether they hold only finite numbers, and how they get to their place in a region.
//!
//! Holds `unsafe`: regions become slices. This is sound because nobody writes the part of the region, or
//! because it has one owner at a time, who calls these functions.

use std::ops::Range;

use crate::bytes::kernels::{self, Wire};
use crate::bytes::mmap::Mapping;
use crate::vocabulary::ids::BlockId;
use crate::vocabulary::layout::{ModelLayout, Segment};

/// A range of a model's bytes, for slices.
pub fn span(bytes: &Range<u64>) -> Range<usize> {
    bytes.start as usize..bytes.end as usize
}

/// The segments of `block` with their bytes in `payload`, which is the whole block.
fn segments<'a>(
    layout: &'a ModelLayout,
    block: BlockId,
    payload: &'a [u8],
) -> impl Iterator<Item = (&'a Segment, &'a [u8])> {
    let start = layout.block_bytes(block).start;
    let local = move |range: &Range<u64>| span(&(range.start - start..range.end - start));
    layout.segments(block).iter().map(move |segment| (segment, &payload[local(&segment.bytes)]))
}

/// Whether a whole block, as a program wrote it, holds only finite numbers.
pub fn is_finite(layout: &ModelLayout, block: BlockId, payload: &[u8]) -> bool {
    segments(layout, block, payload)
        .all(|(segment, bytes)| Wire::of(segment.dtype).is_none_or(|wire| kernels::all_finite(wire, bytes)))
}

/// Copies a whole block to its place in a staging region, past the caches: the shard reads it when the
/// others' are there too. Looks for NaN and Inf on the way if it is to `check`; false when it found some.
pub fn place(layout: &ModelLayout, block: BlockId, payload: &[u8], room: &Mapping, check: bool) -> bool {
    let mut finite = true;
    for (segment, src) in segments(layout, block, payload) {
        // SAFETY: the learner offers the block once, and reads or writes its place only after this.
        let dst = unsafe { room.bytes_mut(span(&segment.bytes)) };
        match Wire::of(segment.dtype) {
            Some(wire) if check => finite &= kernels::copy_checked(wire, src, dst),
            _ => kernels::stream_copy(src, dst),
        }
    }
    finite
}

/// Like [`is_finite`], for a block in a region that nobody writes.
pub fn is_finite_in(layout: &ModelLayout, block: BlockId, memory: &Mapping) -> bool {
    // SAFETY: the contribution is sealed: its program waits in fsync or close.
    is_finite(layout, block, unsafe { memory.bytes(span(&layout.block_bytes(block))) })
}

/// The first block in which one of the `written` byte ranges holds NaN or Inf.
pub fn written_is_finite(layout: &ModelLayout, memory: &Mapping, written: &[Range<u64>]) -> Option<BlockId> {
    for range in written.iter().filter(|range| !range.is_empty()) {
        for block in (layout.block_of(range.start).0..=layout.block_of(range.end - 1).0).map(BlockId) {
            for segment in layout.segments(block) {
                let Some(wire) = Wire::of(segment.dtype) else { continue };
                let size = wire.size() as u64;
                // Whole elements only; one that is written in part is judged when it is read.
                let start = segment.bytes.start
                    + range.start.saturating_sub(segment.bytes.start).next_multiple_of(size);
                let end = segment.bytes.end.min(range.end);
                let end = end.saturating_sub((end.saturating_sub(segment.bytes.start)) % size);
                if start >= end {
                    continue;
                }
                // SAFETY: the writer is in fsync or close, and nobody else knows the buffer.
                if !kernels::all_finite(wire, unsafe { memory.bytes(span(&(start..end))) }) {
                    return Some(block);
                }
            }
        }
    }
    None
}

/// Bytes of a version's buffer that is pinned, or the newest.
pub fn pinned_bytes(version: &Mapping, range: Range<u64>) -> &[u8] {
    // SAFETY: a version is not written while it is pinned, and the caller that asks for its bytes holds a
    // pin.
    unsafe { version.bytes(span(&range)) }
}

/// Copies `range` of a pinned version into a buffer that is being completed, which its owner alone knows.
pub fn copy_gap(from: &Mapping, to: &Mapping, range: Range<u64>) {
    // SAFETY: the version is pinned; the buffer's writer is in fsync or close, and nobody else knows it.
    let output = unsafe { to.bytes_mut(span(&range)) };
    kernels::stream_copy(pinned_bytes(from, range), output);
}
