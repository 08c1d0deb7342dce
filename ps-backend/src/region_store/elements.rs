//! The places of a segment's elements in accumulators and optimizer state.

use std::ops::Range;

use libmodelio::bytes::kernels::Wire;
use libmodelio::vocabulary::layout::Segment;

/// The places of a segment's elements in accumulators and states, in values of 32 bits.
pub(super) fn element_span(segment: &Segment, wire: Wire) -> Range<usize> {
    let count = (segment.bytes.end - segment.bytes.start) as usize / wire.size() * wire.words();
    segment.element as usize..segment.element as usize + count
}
