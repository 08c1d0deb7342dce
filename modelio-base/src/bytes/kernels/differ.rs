//! Which lines of two copies differ.

use super::level::Kernel;
use super::line::Line;

/// The bytes of a line.
pub(super) const LINE: usize = 64;
/// The lines of a word of bits.
const LINES: usize = u64::BITS as usize;

/// A bit for each line of 64 bytes, the last one perhaps shorter: whether it differs.
pub(super) struct Differ<'a> {
    pub old: &'a [u8],
    pub new: &'a [u8],
    pub bits: &'a mut [u64],
}

impl Kernel for Differ<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Line>(self) {
        let pieces = self.old.chunks(LINE * LINES).zip(self.new.chunks(LINE * LINES));
        for ((old, new), bits) in pieces.zip(self.bits) {
            let ((whole, rest), (new, new_rest)) = (old.as_chunks::<LINE>(), new.as_chunks::<LINE>());
            let mut differ = 0;
            for (at, (old, new)) in whole.iter().zip(new).enumerate() {
                differ |= u64::from(old != new) << at;
            }
            // The last line of all may be shorter.
            if rest != new_rest {
                differ |= 1 << whole.len();
            }
            *bits = differ;
        }
    }
}
