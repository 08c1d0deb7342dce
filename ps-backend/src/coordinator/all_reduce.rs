//! A few numbers of each learner, reduced among all of them: a mean loss, whether one of them has an overflow, a barrier.
//!
//! Pure. Numbers of one round wait until each learner in the job has given its own. Who leaves is not waited for, and what
//! it has given does not count. A learner that gives again takes the place of its earlier numbers, so a program can repeat
//! a call that was interrupted.

use std::collections::BTreeMap;

use libmodelio::vocabulary::ids::{ClientId, LearnerId};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::{MAX_ALL_REDUCE, ReduceOp};
use serde::{Deserialize, Serialize};

use super::requests::Asked;
use crate::core::Now;

/// A request that waits for the others.
type Waiting = (ClientId, Asked);

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Given {
    op: ReduceOp,
    values: Vec<f64>,
    waiting: Waiting,
    deadline: Now,
}

/// The round under way.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct AllReduce(BTreeMap<LearnerId, Given>);

impl AllReduce {
    /// A learner gives its numbers. Returns its earlier request, which they take the place of.
    ///
    /// # Errors
    /// [`ShardError::NotAllowed`] if there are none or too many, or others give another count of numbers, or ask for
    /// another operation.
    pub(super) fn give(
        &mut self,
        learner: LearnerId,
        op: ReduceOp,
        values: Vec<f64>,
        waiting: Waiting,
        deadline: Now,
    ) -> Result<Option<Waiting>, ShardError> {
        if !(1..=MAX_ALL_REDUCE).contains(&values.len()) {
            return Err(ShardError::NotAllowed(format!("give 1 to {MAX_ALL_REDUCE} numbers")));
        }
        let others = self.0.iter().find(|(other, _)| **other != learner);
        if let Some((other, given)) =
            others.filter(|(_, given)| (given.op, given.values.len()) != (op, values.len()))
        {
            return Err(ShardError::NotAllowed(format!(
                "learner {other} waits for the {} of {} numbers, and this one asks for the {op} of {}: all must call alike",
                given.op,
                given.values.len(),
                values.len()
            )));
        }
        let before = self.0.insert(learner, Given { op, values, waiting, deadline });
        Ok(before.map(|before| before.waiting))
    }

    /// Nobody waits for this learner any more. Returns its request.
    pub(super) fn leave(&mut self, learner: LearnerId) -> Option<Waiting> {
        self.0.remove(&learner).map(|given| given.waiting)
    }

    /// The results, and who waits for them, if all `members` have given their numbers. Then the next round begins.
    pub(super) fn take_complete(
        &mut self,
        mut members: impl Iterator<Item = LearnerId>,
    ) -> Option<(Vec<f64>, Vec<Waiting>)> {
        if self.0.is_empty() || !members.all(|member| self.0.contains_key(&member)) {
            return None;
        }
        let given = std::mem::take(&mut self.0);
        let op = given.values().next()?.op;
        // In the order of learners, so that all runs have the same result.
        let all = given.values().map(|of| of.values.clone());
        let reduced = all.reduce(|a, b| a.into_iter().zip(b).map(|(a, b)| combined(op, a, b)).collect())?;
        let divisor = if op == ReduceOp::Mean { given.len() as f64 } else { 1.0 };
        let values = reduced.into_iter().map(|value| value / divisor).collect();
        Some((values, given.into_values().map(|of| of.waiting).collect()))
    }

    /// The requests whose deadlines are over, and whose they are. They do not count in the round.
    pub(super) fn take_late(&mut self, now: Now) -> Vec<(LearnerId, Waiting)> {
        let late = self.0.extract_if(.., |_, of| of.deadline <= now);
        late.map(|(learner, of)| (learner, of.waiting)).collect()
    }

    /// When [`Self::take_late`] next has some.
    pub(super) fn next_deadline(&self) -> Option<Now> {
        self.0.values().map(|of| of.deadline).min()
    }
}

/// NaN stays NaN, whatever the operation: a learner that has one wants it seen.
fn combined(op: ReduceOp, a: f64, b: f64) -> f64 {
    match op {
        ReduceOp::Sum | ReduceOp::Mean => a + b,
        _ if a.is_nan() || b.is_nan() => f64::NAN,
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordinator::requests::Requests;

    const LATE: Now = Now::from_secs(9);

    fn asked(number: u64) -> Waiting {
        (ClientId(1), Requests::new(0).opens(number))
    }

    fn give(
        of: &mut AllReduce,
        learner: u32,
        op: ReduceOp,
        values: &[f64],
    ) -> Result<Option<Waiting>, ShardError> {
        of.give(LearnerId(learner), op, values.to_vec(), asked(learner.into()), LATE)
    }

    fn complete(of: &mut AllReduce, members: &[u32]) -> Option<Vec<f64>> {
        of.take_complete(members.iter().map(|&id| LearnerId(id))).map(|(values, _)| values)
    }

    #[test]
    fn a_round_is_complete_when_all_have_given_theirs() {
        for (op, expected) in [
            (ReduceOp::Sum, [6.0, -2.0]),
            (ReduceOp::Mean, [3.0, -1.0]),
            (ReduceOp::Min, [2.0, -3.0]),
            (ReduceOp::Max, [4.0, 1.0]),
        ] {
            let mut of = AllReduce::default();
            assert_eq!(give(&mut of, 1, op, &[2.0, 1.0]), Ok(None));
            assert_eq!(complete(&mut of, &[1, 2]), None);
            assert_eq!(give(&mut of, 2, op, &[4.0, -3.0]), Ok(None));
            let (values, waiting) = of.take_complete([1, 2].map(LearnerId).into_iter()).unwrap();
            assert_eq!((&values[..], waiting), (&expected[..], vec![asked(1), asked(2)]), "{op}");
            assert_eq!(complete(&mut of, &[1, 2]), None, "the next round has begun");
        }
        let mut of = AllReduce::default();
        give(&mut of, 1, ReduceOp::Max, &[f64::NAN]).unwrap();
        give(&mut of, 2, ReduceOp::Max, &[1.0]).unwrap();
        assert!(complete(&mut of, &[1, 2]).unwrap()[0].is_nan());
    }

    #[test]
    fn who_leaves_or_is_late_is_not_counted_and_who_gives_again_counts_once() {
        let mut of = AllReduce::default();
        give(&mut of, 1, ReduceOp::Sum, &[1.0]).unwrap();
        assert_eq!(give(&mut of, 1, ReduceOp::Sum, &[5.0]), Ok(Some(asked(1))));
        give(&mut of, 2, ReduceOp::Sum, &[2.0]).unwrap();
        assert_eq!(of.leave(LearnerId(2)), Some(asked(2)));
        assert_eq!(complete(&mut of, &[1]), Some(vec![5.0]));
        give(&mut of, 1, ReduceOp::Sum, &[1.0]).unwrap();
        assert_eq!((of.next_deadline(), of.take_late(LATE)), (Some(LATE), vec![(LearnerId(1), asked(1))]));
        give(&mut of, 2, ReduceOp::Sum, &[2.0]).unwrap();
        assert_eq!(complete(&mut of, &[1, 2]), None);
    }

    #[test]
    fn all_must_call_alike() {
        let mut of = AllReduce::default();
        give(&mut of, 1, ReduceOp::Sum, &[1.0]).unwrap();
        for (op, values) in [(ReduceOp::Max, &[1.0][..]), (ReduceOp::Sum, &[1.0, 2.0])] {
            assert!(
                give(&mut of, 2, op, values)
                    .unwrap_err()
                    .to_string()
                    .contains("learner 1 waits for the sum of 1")
            );
        }
        assert!(give(&mut of, 1, ReduceOp::Max, &[1.0, 2.0]).is_ok(), "nobody else waits");
        assert!(
            give(&mut of, 3, ReduceOp::Sum, &[]).is_err()
                && give(&mut of, 3, ReduceOp::Sum, &[0.0; 65]).is_err()
        );
    }
}
