//! Runs of changed bytes of a model, short enough to be kept and to be written to a file.
//!
//! Each run is two numbers: how many bytes before it stay, and how many bytes it has, less one. Numbers have seven bits a
//! byte, the lowest first, and the highest bit set in all bytes but the last.

use std::ops::Range;

use super::PatchError;

/// A place is noted for each so many runs. From there on, runs are read one after the other.
const EVERY: u64 = 256;
const MORE: u8 = 0x80;

/// Runs of changed bytes, by rising offset. What they hold, one run after the other, is their *values*.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Runs {
    encoded: Vec<u8>,
    marks: Vec<Mark>,
    count: u64,
    bytes: u64,
}

/// What is before a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    /// Encoded bytes.
    at: usize,
    /// The end of the run before it.
    end: u64,
    /// Values.
    bytes: u64,
}

/// Collects runs.
#[derive(Debug, Default)]
pub struct RunsBuilder {
    runs: Runs,
    /// The run that may still grow.
    open: Range<u64>,
    /// The end of the last one before it.
    end: u64,
}

impl RunsBuilder {
    /// Bytes that have changed, not below those before. Runs that touch are one.
    ///
    /// # Panics
    /// If a range is below the one before it.
    pub fn add(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        if !self.open.is_empty() && range.start <= self.open.end {
            self.open.end = self.open.end.max(range.end);
            return;
        }
        self.split();
        assert!(self.end <= range.start, "runs rise");
        self.open = range;
    }

    /// The next run is one of its own. Returns the number of values so far.
    pub fn split(&mut self) -> u64 {
        let open = std::mem::take(&mut self.open);
        if !open.is_empty() {
            self.runs.note(self.end);
            push_number(&mut self.runs.encoded, open.start - self.end);
            push_number(&mut self.runs.encoded, open.end - open.start - 1);
            self.runs.bytes += open.end - open.start;
            self.end = open.end;
        }
        self.runs.bytes
    }

    /// The memory that they take so far, in bytes.
    pub fn taken(&self) -> usize {
        self.runs.encoded.len()
    }

    /// All of them.
    pub fn finish(mut self) -> Runs {
        self.split();
        self.runs.encoded.shrink_to_fit();
        self.runs
    }
}

impl Runs {
    /// The encoded form, in which `size` bytes of a model have changed at most.
    ///
    /// # Errors
    /// [`PatchError`].
    pub fn decode(encoded: Vec<u8>, size: u64) -> Result<Runs, PatchError> {
        let mut runs = Runs::default();
        let (mut rest, mut end) = (encoded.as_slice(), 0_u64);
        while !rest.is_empty() {
            runs.note_at(encoded.len() - rest.len(), end);
            let gap = take_number(&mut rest).ok_or(PatchError::Length)?;
            let more = take_number(&mut rest).ok_or(PatchError::Length)?;
            let start = end.checked_add(gap).ok_or(PatchError::Beyond)?;
            let next = start.checked_add(more).and_then(|last| last.checked_add(1));
            end = next.filter(|end| *end <= size).ok_or(PatchError::Beyond)?;
            runs.bytes += more + 1;
        }
        Ok(Runs { encoded, ..runs })
    }

    fn note(&mut self, end: u64) {
        self.note_at(self.encoded.len(), end);
    }

    fn note_at(&mut self, at: usize, end: u64) {
        if self.count.is_multiple_of(EVERY) {
            self.marks.push(Mark { at, end, bytes: self.bytes });
        }
        self.count += 1;
    }

    /// Their encoded form.
    pub fn encoded(&self) -> &[u8] {
        &self.encoded
    }

    /// The number of their values, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The runs from the one on that holds this value, each with the number of values before it.
    pub fn from(&self, value: u64) -> impl Iterator<Item = (Range<u64>, u64)> {
        let mark = self.marks.partition_point(|mark| mark.bytes <= value).checked_sub(1);
        let Mark { at, mut end, mut bytes } =
            mark.map_or(Mark { at: 0, end: 0, bytes: 0 }, |mark| self.marks[mark]);
        let mut rest = &self.encoded[at..];
        let all = std::iter::from_fn(move || {
            let start = end + take_number(&mut rest)?;
            let before = bytes;
            end = start + take_number(&mut rest)? + 1;
            bytes += end - start;
            Some((start..end, before))
        });
        all.skip_while(move |(run, before)| before + (run.end - run.start) <= value)
    }

    /// Appends a range of their values, which are `bytes` of the model.
    pub fn values<'a>(&self, values: Range<u64>, bytes: impl Fn(Range<u64>) -> &'a [u8], out: &mut Vec<u8>) {
        for (run, before) in self.from(values.start) {
            if before >= values.end {
                break;
            }
            let from = run.start + values.start.saturating_sub(before);
            out.extend_from_slice(bytes(from..run.end.min(run.start + (values.end - before))));
        }
    }
}

fn push_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= u64::from(MORE) {
        out.push(number as u8 | MORE);
        number >>= 7;
    }
    out.push(number as u8);
}

fn take_number(rest: &mut &[u8]) -> Option<u64> {
    let (mut number, mut shift) = (0_u64, 0);
    loop {
        let (&byte, others) = rest.split_first()?;
        *rest = others;
        let bits = u64::from(byte & !MORE);
        // A number of more than 64 bits is none.
        if shift > 63 || bits << shift >> shift != bits {
            return None;
        }
        number |= bits << shift;
        if byte & MORE == 0 {
            return Some(number);
        }
        shift += 7;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(bits: &[bool]) -> (Runs, Vec<u64>) {
        let mut builder = RunsBuilder::default();
        let changed: Vec<u64> = (0..).zip(bits).filter(|(_, bit)| **bit).map(|(at, _)| at).collect();
        changed.iter().for_each(|&at| builder.add(at..at + 1));
        (builder.finish(), changed)
    }

    proptest! {
        #[test]
        fn values_are_the_changed_bytes_from_any_place_on(
            bits in proptest::collection::vec(any::<bool>(), 0..3000), from in 0_usize..1600, len in 0_usize..900
        ) {
            let (runs, changed) = of(&bits);
            let model: Vec<u8> = (0..bits.len()).map(|at| (at * 7 / 3) as u8).collect();
            let all: Vec<u8> = changed.iter().map(|&at| model[at as usize]).collect();
            prop_assert_eq!(runs.bytes(), all.len() as u64);
            let (from, mut out) = (from.min(all.len()), Vec::new());
            let to = all.len().min(from + len);
            let bytes = |range: Range<u64>| &model[range.start as usize..range.end as usize];
            runs.values(from as u64..to as u64, bytes, &mut out);
            prop_assert_eq!(&out, &all[from..to]);
            prop_assert_eq!(Runs::decode(runs.encoded().to_vec(), bits.len() as u64).unwrap(), runs);
        }

        #[test]
        fn bytes_that_are_no_runs_are_refused_and_do_no_harm(encoded: Vec<u8>, size: u64) {
            if let Ok(runs) = Runs::decode(encoded, size) {
                let (last, _) = runs.from(runs.bytes().saturating_sub(1)).last().unwrap_or_default();
                prop_assert!(last.end <= size && runs.bytes() <= size);
            }
        }
    }

    #[test]
    fn a_split_keeps_runs_apart_that_touch() {
        let mut builder = RunsBuilder::default();
        builder.add(3..5);
        builder.add(5..6);
        assert_eq!(builder.split(), 3);
        builder.add(6..9);
        let runs = builder.finish();
        assert_eq!(runs.from(0).collect::<Vec<_>>(), [(3..6, 0), (6..9, 3)]);
        assert_eq!(Runs::decode(runs.encoded().to_vec(), 8), Err(PatchError::Beyond));
        assert_eq!(Runs::decode(vec![0x80], 8), Err(PatchError::Length));
    }
}
