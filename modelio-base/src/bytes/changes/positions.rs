//! Positions of units in a block, and their form in a patch.

use super::{HEAD, LINE, PatchError, each_bit, each_differing, each_line};

/// The units that have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Positions {
    /// Units have this power of two of bytes. The last one may be shorter.
    shift: u8,
    count: u32,
    form: Form,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Form {
    /// For each unit, how many unchanged ones are before it: seven bits a byte, the lowest first, and the highest bit
    /// set in all bytes but the last.
    Gaps(Box<[u8]>),
    /// A bit for each unit of the block.
    Bits(Box<[u64]>),
}

/// The number of the forms in a patch.
const GAPS: u8 = 0;
const BITS: u8 = 1;

/// In place of positions: all may have changed.
pub(super) const WHOLE: [u8; HEAD] = [0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// The bit of all bytes of a gap but the last.
const MORE: u8 = 0x80;
/// The most bytes of a gap: more units than a block has.
const LONGEST_GAP: usize = 4;

/// Checks that there are `count` gaps.
fn check_gaps(gaps: &[u8], count: u32) -> Result<(), PatchError> {
    let (mut found, mut length) = (0, 0);
    for byte in gaps {
        length += 1;
        match byte & MORE {
            0 => (found, length) = (found + 1, 0),
            _ if length == LONGEST_GAP => return Err(PatchError::Form),
            _ => {}
        }
    }
    if length == 0 && found == count { Ok(()) } else { Err(PatchError::Length) }
}

/// Gaps between units that come in order.
#[derive(Default)]
pub(super) struct Gaps {
    bytes: Vec<u8>,
    /// The unit after the last one.
    next: usize,
}

impl Gaps {
    fn push(&mut self, unit: usize) {
        let mut gap = unit - self.next;
        self.next = unit + 1;
        while gap >= usize::from(MORE) {
            self.bytes.push(gap as u8 | MORE);
            gap >>= 7;
        }
        self.bytes.push(gap as u8);
    }

    /// Takes the units that differ in these lines in place of those that it has. Returns their number, or none if there
    /// are more than `most`.
    pub(super) fn of_lines(
        &mut self,
        lines: &[u64],
        old: &[u8],
        new: &[u8],
        shift: u8,
        most: usize,
    ) -> Option<usize> {
        self.bytes.clear();
        self.next = 0;
        let mut count = 0;
        let all = each_line(lines, new.len(), |line| {
            let first = line.start >> shift;
            each_differing(&old[line.clone()], &new[line], shift, |unit| {
                self.push(first + unit);
                count += 1;
                count <= most
            })
        });
        all.then_some(count)
    }

    /// All of them.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// The power of two.
///
/// # Panics
/// If it is none, or longer than a line.
pub(super) fn shift_of(unit: usize) -> u8 {
    assert!(unit.is_power_of_two() && unit <= LINE, "a unit of {unit} bytes");
    unit.trailing_zeros() as u8
}

/// The lines that have such units.
pub(super) fn lines_of(units: &[u64], shift: u8) -> Vec<u64> {
    let to_line = shift_of(LINE) - shift;
    let mut lines = vec![0; units.len().div_ceil(1 << to_line)];
    for (word, &bits) in units.iter().enumerate() {
        each_bit(bits, |bit| {
            let line = (word * 64 + bit) >> to_line;
            lines[line / 64] |= 1 << (line % 64);
        });
    }
    lines
}

impl Positions {
    /// No units.
    pub(super) fn none() -> Positions {
        Positions { shift: 0, count: 0, form: Form::Gaps(Box::default()) }
    }

    /// These units, by gaps.
    pub(super) fn gaps(units: &[u64], shift: u8, count: usize) -> Positions {
        let mut gaps = Gaps::default();
        for (word, &bits) in units.iter().enumerate() {
            each_bit(bits, |bit| gaps.push(word * 64 + bit));
        }
        Positions::of_gaps(gaps.bytes(), shift, count)
    }

    /// The units of these gaps.
    pub(super) fn of_gaps(gaps: &[u8], shift: u8, count: usize) -> Positions {
        Positions { shift, count: count as u32, form: Form::Gaps(gaps.into()) }
    }

    /// These units, by bits.
    pub(super) fn bits(units: Vec<u64>, shift: u8) -> Positions {
        let count = units.iter().map(|word| word.count_ones()).sum();
        Positions { shift, count, form: Form::Bits(units.into()) }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The memory that they take, in bytes.
    pub(super) fn taken(&self) -> usize {
        match &self.form {
            Form::Gaps(gaps) => gaps.len(),
            Form::Bits(bits) => bits.len() * 8,
        }
    }

    /// The beginning of a patch.
    pub(super) fn head(&self) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        let form = match self.form {
            Form::Gaps(_) => GAPS,
            Form::Bits(_) => BITS,
        };
        head[..2].copy_from_slice(&[self.shift, form]);
        head[4..8].copy_from_slice(&self.count.to_le_bytes());
        head[8..].copy_from_slice(&(self.taken() as u32).to_le_bytes());
        head
    }

    /// Appends the patch.
    pub(super) fn patch(&self, block: &[u8], out: &mut Vec<u8>) {
        out.reserve(HEAD + self.taken() + ((self.count as usize) << self.shift));
        self.encode(out);
        self.by_unit(Gather { block, out });
    }

    /// Appends the patch without its values.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.head());
        match &self.form {
            Form::Gaps(gaps) => out.extend_from_slice(gaps),
            Form::Bits(bits) => bits.iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes())),
        }
    }

    /// The positions of a patch for a block of `len` bytes, and its values.
    pub(super) fn of_patch(patch: &[u8], len: usize) -> Result<(Positions, &[u8]), PatchError> {
        let (head, rest) = patch.split_first_chunk::<HEAD>().ok_or(PatchError::Length)?;
        let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (shift, count, taken) = (head[0], number(4), number(8) as usize);
        if shift > shift_of(LINE) {
            return Err(PatchError::Form);
        }
        let (positions, values) = rest.split_at_checked(taken).ok_or(PatchError::Length)?;
        let form = match head[1] {
            GAPS => {
                check_gaps(positions, count)?;
                Form::Gaps(positions.into())
            }
            BITS if taken == len.div_ceil(1 << shift).div_ceil(64) * 8 => Form::Bits(
                positions.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect(),
            ),
            BITS => return Err(PatchError::Length),
            _ => return Err(PatchError::Form),
        };
        if let Form::Bits(bits) = &form
            && bits.iter().map(|word| word.count_ones()).sum::<u32>() != count
        {
            return Err(PatchError::Length);
        }
        Ok((Positions { shift, count, form }, values))
    }

    /// Writes values, one after the other, to their places.
    pub(super) fn write(&self, values: &[u8], block: &mut [u8]) -> Result<(), PatchError> {
        let mut scatter = Scatter { values, block, error: None };
        self.by_unit(&mut scatter);
        match scatter.error {
            Some(error) => Err(error),
            None if scatter.values.is_empty() => Ok(()),
            None => Err(PatchError::Length),
        }
    }

    /// Copies the units.
    pub(super) fn copy(&self, from: &[u8], to: &mut [u8]) {
        self.by_unit(Copy { from, to });
    }

    /// Calls `each` with the numbers of the units, in order.
    pub(super) fn each(&self, mut each: impl FnMut(usize)) {
        match &self.form {
            Form::Gaps(gaps) => {
                let mut at = 0;
                let mut gaps = gaps.iter();
                while let Some(&byte) = gaps.next() {
                    let (mut byte, mut shift) = (byte, 0);
                    while byte & MORE != 0 {
                        at += usize::from(byte & !MORE) << shift;
                        shift += 7;
                        byte = gaps.next().copied().unwrap_or_default();
                    }
                    at += usize::from(byte) << shift;
                    each(at);
                    at += 1;
                }
            }
            Form::Bits(bits) => {
                bits.iter().enumerate().for_each(|(word, &bits)| each_bit(bits, |bit| each(word * 64 + bit)));
            }
        }
    }

    /// The power of two of bytes that a unit has.
    pub(super) fn shift(&self) -> u8 {
        self.shift
    }

    /// Does the work for each unit, compiled for its size.
    fn by_unit(&self, mut work: impl Work) {
        match self.shift {
            0 => self.each(|unit| work.unit::<1>(unit)),
            1 => self.each(|unit| work.unit::<2>(unit * 2)),
            2 => self.each(|unit| work.unit::<4>(unit * 4)),
            3 => self.each(|unit| work.unit::<8>(unit * 8)),
            shift => self.each(|unit| work.unit::<LINE>(unit << shift)),
        }
    }
}

/// Work on the unit at an offset. A last one may have fewer bytes than `U`.
trait Work {
    fn unit<const U: usize>(&mut self, at: usize);
}

impl<W: Work> Work for &mut W {
    #[inline(always)]
    fn unit<const U: usize>(&mut self, at: usize) {
        (**self).unit::<U>(at);
    }
}

struct Gather<'a> {
    block: &'a [u8],
    out: &'a mut Vec<u8>,
}

impl Work for Gather<'_> {
    #[inline(always)]
    fn unit<const U: usize>(&mut self, at: usize) {
        match self.block[at..].first_chunk::<U>() {
            Some(unit) => self.out.extend_from_slice(unit),
            None => self.out.extend_from_slice(&self.block[at..]),
        }
    }
}

struct Scatter<'a> {
    values: &'a [u8],
    block: &'a mut [u8],
    error: Option<PatchError>,
}

impl Work for Scatter<'_> {
    #[inline(always)]
    fn unit<const U: usize>(&mut self, at: usize) {
        let Some(room) = self.block.get_mut(at..).filter(|room| !room.is_empty()) else {
            self.error = Some(PatchError::Beyond);
            return;
        };
        if let (Some(room), Some((value, rest))) =
            (room.first_chunk_mut::<U>(), self.values.split_first_chunk())
        {
            *room = *value;
            self.values = rest;
            return;
        }
        match self.values.split_at_checked(room.len().min(U)) {
            Some((value, rest)) if room.len() < U => {
                room.copy_from_slice(value);
                self.values = rest;
            }
            _ => self.error = Some(PatchError::Length),
        }
    }
}

struct Copy<'a> {
    from: &'a [u8],
    to: &'a mut [u8],
}

impl Work for Copy<'_> {
    #[inline(always)]
    fn unit<const U: usize>(&mut self, at: usize) {
        let (from, to) = (&self.from[at..], &mut self.to[at..]);
        match (from.first_chunk::<U>(), to.first_chunk_mut::<U>()) {
            (Some(from), Some(to)) => *to = *from,
            _ => to.copy_from_slice(from),
        }
    }
}
