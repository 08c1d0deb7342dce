//! Pieces of equal length at equal distances: what a slice of a tensor is in a model's flat bytes.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// `count` pieces of `run` bytes. Each begins `stride` bytes behind the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Strided {
    /// Offset of the first piece, in bytes from the start of the model.
    pub start: u64,
    /// Bytes of a piece; at least 1.
    pub run: u64,
    /// Bytes from the start of a piece to the start of the next one; at least `run`.
    pub stride: u64,
    /// Pieces; at least 1.
    pub count: u64,
}

impl Strided {
    /// One piece.
    pub fn contiguous(range: Range<u64>) -> Strided {
        let run = range.end - range.start;
        Strided { start: range.start, run, stride: run, count: 1 }
    }

    /// Bytes of all pieces together; none if that is more than 64 bits can say, or if a bound does not hold.
    pub fn bytes(&self) -> Option<u64> {
        let is_sound = self.run > 0 && self.count > 0 && self.stride >= self.run;
        self.run.checked_mul(self.count).filter(|_| is_sound)
    }

    /// The offset behind the last piece; none if that is more than 64 bits can say, or if a bound does not hold.
    pub fn end(&self) -> Option<u64> {
        self.bytes()?;
        (self.count - 1).checked_mul(self.stride)?.checked_add(self.start)?.checked_add(self.run)
    }

    /// The bytes of all `parts` together; none if one of them is no pieces of a model of `size` bytes.
    pub fn total(parts: &[Strided], size: u64) -> Option<u64> {
        parts.iter().try_fold(0u64, |sum, part| {
            part.end().filter(|end| *end <= size)?;
            sum.checked_add(part.bytes()?)
        })
    }

    /// The pieces in order.
    pub fn pieces(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let Strided { start, run, stride, count } = *self;
        (0..count).map(move |at| start + at * stride).map(move |start| start..start + run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_as_far_apart_as_it_says() {
        let columns = Strided { start: 4, run: 2, stride: 8, count: 3 };
        assert_eq!(columns.pieces().collect::<Vec<_>>(), [4..6, 12..14, 20..22]);
        assert_eq!((columns.bytes(), columns.end()), (Some(6), Some(22)));
        assert!(Strided::contiguous(3..9).pieces().eq(std::iter::once(3..9)));
    }

    #[test]
    fn pieces_that_overlap_or_pass_the_end_of_numbers_have_no_length() {
        let sound = Strided { start: 0, run: 2, stride: 4, count: 2 };
        let unsound =
            [Strided { run: 0, ..sound }, Strided { count: 0, ..sound }, Strided { stride: 1, ..sound }];
        assert!(unsound.iter().all(|strided| strided.bytes().is_none() && strided.end().is_none()));
        assert_eq!(Strided { stride: u64::MAX, count: 3, ..sound }.end(), None);
        assert_eq!(Strided { run: u64::MAX, stride: u64::MAX, ..sound }.bytes(), None);
        assert_eq!(Strided::total(&[sound, sound], 6), Some(8));
        assert_eq!((Strided::total(&[sound], 5), Strided::total(&[unsound[0]], 9)), (None, None));
        let long = Strided::contiguous(0..u64::MAX);
        assert_eq!(Strided::total(&[long, long], u64::MAX), None);
    }
}
