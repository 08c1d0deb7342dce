//! `learners/<id>/all_reduce`: a line that is written has an operation and numbers, and what is read are the results, once
//! all learners of the job have written theirs.

use std::sync::Arc;

use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::{MAX_ALL_REDUCE, ReduceOp};
use parking_lot::Mutex;

use super::error::{CallError, CallResult, Done};
use super::explained::explained;
use super::learner::Learner;
use super::model::Model;

/// The last write.
#[derive(Default)]
struct Last {
    /// Where it ended: a program reads on from there.
    end: u64,
    /// A line with its results.
    results: String,
}

/// The file, opened by a program.
pub struct AllReduceFile {
    model: Arc<Model>,
    learner: Arc<Learner>,
    last: Arc<Mutex<Last>>,
}

impl AllReduceFile {
    /// The file of this learner.
    pub fn new(model: Arc<Model>, learner: Arc<Learner>) -> AllReduceFile {
        AllReduceFile { model, learner, last: Arc::default() }
    }

    /// The line with the results of the last write, from the file's beginning or from the end of that write on.
    pub fn results(&self, offset: u64) -> Vec<u8> {
        let last = self.last.lock();
        let skip = offset.checked_sub(last.end).unwrap_or(offset);
        last.results.as_bytes().iter().skip(skip as usize).copied().collect()
    }

    /// Gives the numbers of `line`, written at `offset`. `done` hears when [`Self::results`] has the results.
    ///
    /// EINVAL for a line that cannot be read, or where others wait for another operation or count of numbers; ETIMEDOUT
    /// after `control/timeout`.
    pub fn give(&self, offset: u64, line: &[u8], done: Done<()>) {
        let (model, learner) = (Arc::clone(&self.model), Arc::clone(&self.learner));
        let done: Done<()> = Box::new(move |outcome| {
            done(outcome.inspect_err(|error| learner.refusal.note(error, false)));
        });
        let (op, values) = match parse(line) {
            Ok(given) => given,
            Err(error) => return done(Err(error)),
        };
        let (last, end) = (Arc::clone(&self.last), offset.saturating_add(line.len() as u64));
        let answered = move |answer: Result<Vec<f64>, ShardError>| {
            let refused = |error| match error {
                ShardError::NotAllowed(why) => CallError::new(libc::EINVAL, why),
                error => explained(&model, error),
            };
            done(answer.map_err(refused).map(|values| {
                let values: Vec<String> = values.iter().map(|value| format!("{value:?}")).collect();
                *last.lock() = Last { end, results: format!("{}\n", values.join(" ")) };
            }));
        };
        self.model.job.all_reduce(self.learner.id, op, values, self.model.timeout(), Box::new(answered));
    }
}

/// `mean 0.5 1e-3`: an operation and its numbers.
fn parse(line: &[u8]) -> CallResult<(ReduceOp, Vec<f64>)> {
    let wrong = || {
        let what = format!("write one line: sum, mean, min or max, and 1 to {MAX_ALL_REDUCE} numbers");
        CallError::new(libc::EINVAL, what)
    };
    let mut words = std::str::from_utf8(line).map_err(|_| wrong())?.split_ascii_whitespace();
    let op = words.next().and_then(|word| word.parse().ok()).ok_or_else(wrong)?;
    let values = words.map(str::parse).collect::<Result<Vec<f64>, _>>().map_err(|_| wrong())?;
    if (1..=MAX_ALL_REDUCE).contains(&values.len()) { Ok((op, values)) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_an_operation_and_numbers() {
        assert_eq!(parse(b"mean 0.5 -1e-3\n"), Ok((ReduceOp::Mean, vec![0.5, -1e-3])));
        assert_eq!(parse(b" max inf"), Ok((ReduceOp::Max, vec![f64::INFINITY])));
        for line in [&b""[..], b"mean", b"mean x", b"product 1", b"1", b"mean 1,2", b"\xff 1"] {
            assert!(parse(line).is_err(), "{line:?}");
        }
        assert!(parse(format!("sum{}", " 1".repeat(64)).as_bytes()).is_ok());
        assert!(parse(format!("sum{}", " 1".repeat(65)).as_bytes()).is_err());
    }
}
