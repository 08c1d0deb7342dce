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

/// Copies `data` to its place at `offset` in a region of the model's size, past the caches if it is long, and looks for
/// NaN and Inf on the way. Calls `suspect` for each block in which it found some, or of whose elements it has seen parts.
pub fn place_at(
    layout: &ModelLayout,
    offset: u64,
    data: &[u8],
    room: &Mapping,
    mut suspect: impl FnMut(BlockId),
) {
    if data.is_empty() {
        return;
    }
    let (range, start) = (offset..offset + data.len() as u64, offset);
    for block in (layout.block_of(range.start).0..=layout.block_of(range.end - 1).0).map(BlockId) {
        let mut finite = true;
        for segment in layout.segments(block) {
            let bytes = segment.bytes.start.max(range.start)..segment.bytes.end.min(range.end);
            if bytes.start >= bytes.end {
                continue;
            }
            let src = &data[span(&(bytes.start - start..bytes.end - start))];
            // SAFETY: the region is not read before all copies into it have ended. Two writers of the same bytes race as
            // two write(2) calls on any file do.
            let dst = unsafe { room.bytes_mut(span(&bytes)) };
            match Wire::of(segment.dtype) {
                Some(wire)
                    if whole_elements(segment, &bytes, wire) && kernels::copy_checked(wire, src, dst) => {}
                // A NaN keeps its bits.
                wire => {
                    finite &= wire.is_none();
                    kernels::stream_copy(src, dst);
                }
            }
        }
        if !finite {
            suspect(block);
        }
    }
}

/// Whether `bytes` of a segment begin and end with an element.
fn whole_elements(segment: &Segment, bytes: &Range<u64>, wire: Wire) -> bool {
    [bytes.start, bytes.end].iter().all(|cut| (cut - segment.bytes.start).is_multiple_of(wire.size() as u64))
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::vocabulary::layout::DType;

    /// A deterministic sequence of numbers below `end`.
    fn numbers(mut seed: u64) -> impl FnMut(u64) -> u64 {
        move |end| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) % end
        }
    }

    #[test]
    fn parts_of_any_shape_lie_in_their_place_and_no_nan_escapes_suspicion() {
        let dtype = |name| DType::parse(name).unwrap();
        let tensors =
            [("a", "f16", 70_001), ("b", "f32", 40_000), ("c", "i64", 9_000), ("d", "bf16", 50_003)];
        let tensors = tensors.map(|(name, of, len)| (name.to_owned(), dtype(of), vec![len]));
        let layout = ModelLayout::new(tensors.to_vec(), 64 << 10).unwrap();
        let size = layout.size();
        let mut number = numbers(1);
        for round in 0..20 {
            // Small numbers of all types, and a NaN with bits of its own here and there.
            let mut bytes: Vec<u8> = (0..size).map(|at| (at % 60) as u8).collect();
            let mut bad = BTreeSet::new();
            for tensor in layout.tensors().iter().filter(|tensor| tensor.dtype.is_reducible()) {
                let width = tensor.dtype.size_bytes().unwrap() as u64;
                if round % 3 != 0 {
                    let element = number((tensor.bytes.end - tensor.bytes.start) / width);
                    let at = tensor.bytes.start + element * width;
                    bytes[at as usize..(at + width) as usize].fill(0xff);
                    bytes[at as usize] = 0xda;
                    bad.insert(layout.block_of(at).0);
                }
            }
            let room = Mapping::anonymous(size as usize).unwrap();
            let (mut at, mut suspects, mut cut) = (0, BTreeSet::new(), BTreeSet::new());
            while at < size {
                let end = size.min(at + 1 + number([7, 5_000, 200_000][round % 3]));
                let data = &bytes[at as usize..end as usize];
                place_at(&layout, at, data, &room, |block| {
                    suspects.insert(block.0);
                });
                if layout.splits_element(end) {
                    cut.extend([end - 1, end].map(|byte| layout.block_of(byte).0));
                }
                at = end;
            }
            // SAFETY: single thread.
            assert!(unsafe { room.bytes(0..size as usize) } == bytes);
            assert!(bad.is_subset(&suspects), "{bad:?}, {suspects:?}");
            assert!(suspects.iter().all(|block| bad.contains(block) || cut.contains(block)));
            place_at(&layout, size, &[], &room, |block| panic!("{block} of nothing"));
        }
    }
}
