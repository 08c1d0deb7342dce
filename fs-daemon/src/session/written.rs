//! What an open file has written since something of it last ended, and why that must not count.
//!
//! Pure: it moves no bytes. A program says with O_TRUNC that it writes a whole file. It says with a truncation to the
//! model's size that what it leaves out is a hole, which holds zeros.

use libmodelio::explained::{ORDER, trained_type};
use libmodelio::vocabulary::layout::ModelLayout;

use super::error::{CallError, CallResult};

/// The writes of one open file since the last end.
#[derive(Clone, Debug, Default)]
pub struct Written {
    /// The file was truncated to nothing before it was written.
    truncated: bool,
    /// Unwritten bytes are zeros that were written.
    has_holes: bool,
    run: Run,
    /// The first write that was refused.
    refused: Option<CallError>,
    /// Why the beginning of this file must not count: what is written is the rest of it.
    refused_before: Option<CallError>,
    /// A close has told that. Whether it was the last one, nobody knows; so each later one tells it, too.
    told_by_close: bool,
}

/// The form of what was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Run {
    #[default]
    Nothing,
    /// One write behind the other, from offset 0 up to here.
    To(u64),
    /// Anything else.
    Parts,
}

impl Written {
    /// Whether there is something to end: bytes, holes, or a refusal to report.
    pub fn is_pending(&self) -> bool {
        self.is_begun() || self.told_by_close
    }

    /// Whether there is something to end that no close has told of.
    pub fn is_begun(&self) -> bool {
        self.run != Run::Nothing || self.refused.is_some() || self.has_holes
    }

    /// Whether a truncation has begun it.
    pub fn is_truncated(&self) -> bool {
        self.truncated
    }

    /// Whether unwritten bytes are zeros.
    pub fn has_holes(&self) -> bool {
        self.has_holes
    }

    /// The file was truncated to nothing. Once something was written, it means nothing.
    pub fn truncate(&mut self) {
        self.truncated |= !self.is_pending();
    }

    /// The file was truncated to the model's size. That means something for a file that is written as a whole.
    pub fn extend(&mut self) {
        self.has_holes |= self.truncated;
    }

    /// A write of `len` bytes at `offset` has this outcome.
    pub fn note<T>(&mut self, offset: u64, len: usize, outcome: &CallResult<T>) {
        match outcome {
            Err(error) => {
                self.refused.get_or_insert_with(|| error.clone());
            }
            Ok(_) if len == 0 => {}
            Ok(_) => {
                if self.run == Run::Nothing && offset == 0 {
                    (self.refused_before, self.told_by_close) = (None, false);
                }
                self.run = match self.run {
                    Run::Nothing if offset == 0 => Run::To(len as u64),
                    Run::To(end) if offset == end => Run::To(end + len as u64),
                    _ => Run::Parts,
                }
            }
        }
    }

    /// Ends what was written. If nothing was written, the file is still truncated, and still refused.
    pub fn end(&mut self) -> Written {
        if self.is_begun() { std::mem::take(self) } else { self.clone() }
    }

    /// Nothing of what was written so far matters any more. A truncated file is to be written as a whole again.
    pub fn begin_anew(&mut self) {
        *self = Written { truncated: self.truncated, ..Written::default() };
    }

    /// What was written so far must not count. Of a file that is written as a whole, what comes behind it must not, either.
    /// Whoever writes at offset 0 next begins another one.
    pub fn refuse_rest(&mut self, why: &CallError, told_by_close: bool) {
        if self.truncated {
            self.refused_before = Some(why.clone());
            self.told_by_close = told_by_close;
        }
    }

    /// The caller has heard of each write that was refused, and goes on without.
    pub fn forget_refused(&mut self) {
        self.refused = None;
    }

    /// The first write that was refused, or the beginning of the file. A close tells that again, and fsync does not.
    ///
    /// # Errors
    /// That of the write, or of the beginning.
    pub fn check_refused(&self, is_close: bool) -> CallResult<()> {
        let is_told = self.run != Run::Nothing || self.told_by_close && is_close;
        let before = self.refused_before.as_ref().filter(|_| is_told);
        self.refused.as_ref().or(before).cloned().map_or(Ok(()), Err)
    }

    /// The length of what was written, if that is one run from offset 0.
    pub fn run(&self) -> Option<u64> {
        match self.run {
            Run::To(end) => Some(end),
            _ => None,
        }
    }

    /// The end of a run from offset 0 that is not the model's end, unless it is known what is behind it.
    fn short_run(&self, layout: &ModelLayout) -> Option<u64> {
        match self.run {
            Run::To(end) if end < layout.size() && !self.has_holes => Some(end),
            _ => None,
        }
    }

    /// Refuses an array of a narrower type than the model's: a run of exactly a half or a quarter of its bytes that ends
    /// inside a tensor. One that ends with a tensor may be meant; the answer is a line for the log then.
    ///
    /// # Errors
    /// EINVAL with the type's name.
    pub fn check_narrow(&self, layout: &ModelLayout) -> CallResult<Option<String>> {
        let run = self.short_run(layout);
        let Some((end, (part, types))) = run.and_then(|end| Some((end, narrower(layout, end)?))) else {
            return Ok(None);
        };
        let what = format!("what was written is {part} of the model's bytes");
        match tensor_cut_at(layout, end) {
            None => {
                Ok(Some(format!("{what}, and ends with a tensor: it counts. Is it an array of {types}?")))
            }
            Some(name) => Err(CallError::new(
                libc::EINVAL,
                format!(
                    "{what}, and ends inside tensor {name:?}: nothing of it counts. If it is an array of {types}, \
                     convert it to the model's type first{ORDER}"
                ),
            )),
        }
    }

    /// Refuses a file that was truncated, and whose one run from offset 0 ends inside a tensor.
    ///
    /// # Errors
    /// EINVAL with the tensor's name.
    pub fn check_cut(&self, layout: &ModelLayout) -> CallResult<()> {
        let end = self.short_run(layout).filter(|_| self.truncated);
        match end.and_then(|end| Some((end, tensor_cut_at(layout, end)?))) {
            None => Ok(()),
            Some((end, name)) => Err(CallError::new(
                libc::EINVAL,
                format!(
                    "the file was truncated, and what was written ends at byte {end}, inside tensor {name:?}: nothing of \
                     it counts. Write whole tensors, or open without O_TRUNC to write a part{ORDER}"
                ),
            )),
        }
    }
}

/// The part of the model's bytes that `end` bytes are, and the types of arrays that are as long.
fn narrower(layout: &ModelLayout, end: u64) -> Option<(&'static str, &'static str)> {
    let (_, own) = trained_type(layout)?;
    let times = [2, 4].into_iter().find(|times| end.saturating_mul(*times) == layout.size())?;
    match (own, times) {
        (8, 2) => Some(("half", "float32")),
        (8, 4) => Some(("a quarter", "float16 or bfloat16")),
        (4, 2) => Some(("half", "float16 or bfloat16")),
        (4, 4) => Some(("a quarter", "8-bit floats")),
        (2, 2) => Some(("half", "8-bit floats")),
        _ => None,
    }
}

/// The tensor that `end` lies inside of.
fn tensor_cut_at(layout: &ModelLayout, end: u64) -> Option<&str> {
    let tensors = layout.tensors();
    let at = tensors.partition_point(|tensor| tensor.bytes.end <= end);
    tensors.get(at).filter(|tensor| tensor.bytes.start < end).map(|tensor| tensor.name.as_str())
}

#[cfg(test)]
mod tests {
    use libmodelio::vocabulary::layout::DType;

    use super::*;

    const SIZE: u64 = 1 << 12;

    fn layout(tensors: &[u64]) -> ModelLayout {
        let dtype = DType::parse("f32").unwrap();
        let named = |(i, len): (usize, &u64)| (format!("t{i}"), dtype, vec![*len as usize / 4]);
        ModelLayout::new(tensors.iter().enumerate().map(named).collect(), 64 << 10).unwrap()
    }

    fn written(writes: &[(u64, u64)]) -> Written {
        let mut written = Written::default();
        writes.iter().for_each(|&(offset, len)| written.note(offset, len as usize, &Ok(())));
        written
    }

    #[test]
    fn a_refused_write_is_kept_until_the_end() {
        let mut of = Written::default();
        assert!(!of.is_pending());
        let refused = CallError::new(libc::EFBIG, "first");
        of.note(SIZE, 8, &Err::<(), _>(refused.clone()));
        of.note(0, 8, &Ok(()));
        of.note(SIZE, 8, &Err::<(), _>(CallError::new(libc::EIO, "second")));
        assert_eq!((of.is_pending(), of.check_refused(true)), (true, Err(refused)));
        of.end();
        assert_eq!((of.is_pending(), of.check_refused(true)), (false, Ok(())));
        of.note(0, 0, &Ok(()));
        assert!(!of.is_pending(), "nothing was written");
    }

    #[test]
    fn the_rest_of_a_refused_file_never_counts() {
        let why = CallError::new(libc::EINVAL, "it ends inside a tensor");
        let mut of = Written::default();
        of.truncate();
        of.note(0, 8, &Ok(()));
        of.end();
        of.truncate();
        of.refuse_rest(&why, false);
        assert_eq!((of.is_pending(), of.check_refused(true)), (false, Ok(())), "it was told");
        let mut again = of.clone();
        of.note(8, 8, &Ok(()));
        assert_eq!(of.check_refused(true), Err(why.clone()));
        again.note(0, 8, &Ok(()));
        assert_eq!(again.check_refused(true), Ok(()), "another file");
        let mut parts = Written::default();
        parts.refuse_rest(&why, true);
        parts.note(8, 8, &Ok(()));
        assert_eq!(parts.check_refused(true), Ok(()), "each part is one of its own");
    }

    #[test]
    fn each_close_of_a_refused_file_says_so() {
        let why = CallError::new(libc::EINVAL, "not all bytes were written");
        let mut of = Written::default();
        of.truncate();
        of.note(0, 8, &Ok(()));
        for _ in 0..3 {
            of.end();
            of.truncate();
            of.refuse_rest(&why, true);
            assert_eq!((of.is_begun(), of.is_pending()), (false, true));
            assert_eq!(
                (of.check_refused(true), of.check_refused(false)),
                (Err(why.clone()), Ok(())),
                "fsync ships a mapping"
            );
        }
        let mut anew = of.clone();
        anew.begin_anew();
        assert_eq!((anew.is_pending(), anew.is_truncated(), anew.check_refused(true)), (false, true, Ok(())));
        of.note(0, 8, &Ok(()));
        assert_eq!((of.is_begun(), of.check_refused(true)), (true, Ok(())), "another file");
    }

    #[test]
    fn an_array_of_a_narrower_type_is_known_by_its_length() {
        let one = layout(&[SIZE]);
        for (len, name) in [(SIZE / 2, "float16"), (SIZE / 4, "8-bit")] {
            let error = written(&[(0, len / 2), (len / 2, len / 2)]).check_narrow(&one).unwrap_err();
            assert!(error.errno == libc::EINVAL && error.message.contains(name), "{error}");
        }
        for writes in [&[(0, SIZE)][..], &[(0, SIZE / 2 - 4)], &[(0, 4), (8, SIZE / 2 - 8)], &[(4, SIZE / 2)]]
        {
            assert_eq!(written(writes).check_narrow(&one), Ok(None), "{writes:?}");
        }
        let two = layout(&[SIZE / 2, SIZE / 2]);
        assert!(written(&[(0, SIZE / 2)]).check_narrow(&two).unwrap().is_some(), "it counts, and is said");
        assert!(written(&[(0, SIZE / 4)]).check_narrow(&two).is_err());
    }

    #[test]
    fn a_truncated_file_that_ends_inside_a_tensor_is_refused() {
        let two = layout(&[SIZE / 2, SIZE / 2]);
        let cases = [(SIZE / 2 - 4, true), (SIZE / 2, false), (SIZE / 2 + 4, true), (SIZE, false)];
        for (len, is_cut) in cases {
            let mut of = Written::default();
            of.truncate();
            of.note(0, len as usize, &Ok(()));
            assert_eq!(of.check_cut(&two).is_err(), is_cut, "{len}");
            of.extend();
            assert_eq!(of.check_cut(&two), Ok(()), "the rest is a hole");
            assert_eq!(written(&[(0, len)]).check_cut(&two), Ok(()), "it was not truncated");
        }
        let mut parts = Written::default();
        parts.truncate();
        parts.note(8, 4, &Ok(()));
        assert_eq!(parts.check_cut(&two), Ok(()));
    }

    #[test]
    fn only_a_truncated_file_has_holes() {
        let mut of = written(&[(0, 4)]);
        of.truncate();
        of.extend();
        assert!(!of.is_truncated() && !of.has_holes(), "it was written before");
        of = Written::default();
        of.truncate();
        of.end();
        assert!(of.is_truncated() && !of.is_pending(), "an end before any write changes nothing");
        of.extend();
        assert!(of.has_holes() && of.is_pending(), "a file of zeros alone");
    }
}
