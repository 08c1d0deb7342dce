//! The places of elements in versions, sums, masters and optimizer state.

use std::ops::Range;

use libmodelio::bytes::kernels::Wire;
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::{DType, ModelLayout, Segment};
use libmodelio::wire::DataKind;

/// The places of a segment's elements in accumulators and states, in values of 32 bits.
pub(super) fn element_span(segment: &Segment, wire: Wire) -> Range<usize> {
    let count = (segment.bytes.end - segment.bytes.start) as usize / wire.size() * wire.words();
    segment.element as usize..segment.element as usize + count
}

/// The places of a block's elements, in values of 32 bits. They follow each other.
pub(super) fn block_span(layout: &ModelLayout, block: BlockId) -> Range<usize> {
    let mut spans = reduced(layout, block).map(|(segment, wire)| element_span(segment, wire));
    let Some(first) = spans.next() else { return 0..0 };
    first.start..spans.last().map_or(first.end, |last| last.end)
}

/// The segments of a block that are reduced, with their types.
pub(super) fn reduced(layout: &ModelLayout, block: BlockId) -> impl Iterator<Item = (&Segment, Wire)> {
    layout.segments(block).iter().filter_map(|segment| Some((segment, Wire::of(segment.dtype)?)))
}

/// Those of them that have masters.
pub(super) fn narrow(layout: &ModelLayout, block: BlockId) -> impl Iterator<Item = (&Segment, Wire)> {
    reduced(layout, block).filter(|(_, wire)| wire.is_narrow())
}

/// Whether some of the block's elements have masters.
pub(super) fn has_narrow(layout: &ModelLayout, block: BlockId) -> bool {
    narrow(layout, block).next().is_some()
}

/// The place of a block's data among all data of that kind. It is empty if the block has none of that kind. The
/// reducer is not considered.
///
/// # Panics
/// If there is no such block.
pub fn kept_range(layout: &ModelLayout, block: BlockId, what: DataKind) -> Range<u64> {
    let span = match what {
        DataKind::Weights => return layout.block_bytes(block),
        DataKind::Masters if !has_narrow(layout, block) => 0..0,
        DataKind::Masters | DataKind::Slot(_) => block_span(layout, block),
    };
    span.start as u64 * 4..span.end as u64 * 4
}

/// Whether all elements of a version have the type and the place of their sums.
pub(super) fn are_those_of_sums(layout: &ModelLayout) -> bool {
    let mut segments = (0..layout.blocks()).flat_map(|block| layout.segments(BlockId(block)));
    segments.all(|segment| {
        matches!(segment.dtype, DType::F32 | DType::F64) && segment.element * 4 == segment.bytes.start
    })
}
