//! What has changed from one version to another over those between them.

use std::ops::Range;

use super::positions::shift_of;
use super::{Changed, Units, least};

/// The changes of one block in several versions, together.
#[derive(Debug)]
pub struct Union {
    len: usize,
    shift: u8,
    units: Vec<u64>,
    is_whole: bool,
}

impl Union {
    /// Nothing yet, of a block of `len` bytes whose elements have `unit` bytes or more.
    ///
    /// # Panics
    /// If `unit` is no power of two up to 8.
    pub fn new(len: usize, unit: usize) -> Union {
        let shift = if len.is_multiple_of(unit) { shift_of(unit) } else { 0 };
        Union { len, shift, units: Vec::new(), is_whole: false }
    }

    /// Adds what has changed in one more version.
    pub fn add(&mut self, changed: &Changed) {
        match changed {
            Changed::Nothing => {}
            Changed::Whole => self.is_whole = true,
            Changed::Some(Units(positions)) => {
                let width = 1 << positions.shift();
                positions.each(|unit| {
                    // A line has several units.
                    let start = unit << positions.shift();
                    self.add_bytes(start..self.len.min(start + width));
                });
            }
        }
    }

    /// Adds the units that some of these bytes are of.
    pub fn add_bytes(&mut self, bytes: Range<usize>) {
        self.units.resize((self.len >> self.shift).div_ceil(64), 0);
        for unit in bytes.start >> self.shift..bytes.end.div_ceil(1 << self.shift) {
            self.units[unit / 64] |= 1 << (unit % 64);
        }
    }

    /// All of it, in the form that makes the shortest patch.
    pub fn all(self) -> Changed {
        match self.is_whole {
            true => Changed::Whole,
            false => least(&self.units, self.shift, self.len),
        }
    }
}
