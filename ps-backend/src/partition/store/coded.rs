//! Pieces of a coded payload, while a block is computed from it.

use libmodelio::bytes::kernels::coded;
use libmodelio::vocabulary::coding::Coding;
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::{ModelLayout, Segment};
use smallvec::SmallVec;

/// A coded payload of a block.
pub(super) struct CodedBlock<'a> {
    coding: Coding,
    segments: &'a [Segment],
    /// Where each segment begins in `bytes`.
    starts: SmallVec<[usize; 8]>,
    bytes: &'a [u8],
}

impl<'a> CodedBlock<'a> {
    /// The payload must have passed its check.
    pub(super) fn new(layout: &'a ModelLayout, block: BlockId, coding: Coding, bytes: &'a [u8]) -> Self {
        let segments = layout.segments(block);
        let mut end = 0;
        let starts = segments.iter().map(|segment| {
            let start = end;
            end += coding.segment_bytes(segment);
            start
        });
        CodedBlock { coding, segments, starts: starts.collect(), bytes }
    }

    /// The segment that `piece` was cut from, its bytes, and the bytes of the model between its start and the piece's.
    fn segment(&self, piece: &Segment) -> (&'a Segment, &'a [u8], usize) {
        let at = self.segments.partition_point(|segment| segment.bytes.end <= piece.bytes.start);
        let segment = &self.segments[at];
        let bytes = &self.bytes[self.starts[at]..][..self.coding.segment_bytes(segment)];
        (segment, bytes, (piece.bytes.start - segment.bytes.start) as usize)
    }

    /// The bytes of a piece that travels as it is.
    pub(super) fn plain(&self, piece: &Segment) -> &'a [u8] {
        let (_, bytes, before) = self.segment(piece);
        &bytes[before..][..(piece.bytes.end - piece.bytes.start) as usize]
    }

    /// Gets the elements of a piece that is coded. `out` has room for exactly these.
    pub(super) fn decode(&self, piece: &Segment, out: &mut [f32]) {
        let (segment, bytes, before) = self.segment(piece);
        let Some(elements) = Coding::elements(segment) else { return };
        let size = (segment.bytes.end - segment.bytes.start) as usize / elements.max(1);
        coded::decode(self.coding, elements, bytes, before / size.max(1), out);
    }
}
