//! What learners of this process offer, so that each block of a contribution is taken once: until its commit nobody else
//! knows of it. Pure.

use std::collections::BTreeMap;

use fixedbitset::FixedBitSet;
use libmodelio::transport::{BlockSlot, ShardError};
use libmodelio::vocabulary::ids::{Incarnation, LearnerId, Step};

/// The open contribution of a learner.
#[derive(Debug)]
struct Open {
    step: Step,
    received: FixedBitSet,
    /// Its commit is on its way.
    ends: bool,
}

#[derive(Debug)]
struct Learner {
    incarnation: Incarnation,
    /// Its last step that is known to be taken.
    taken: Step,
    open: Option<Open>,
}

/// The learners of this process, with what they have open.
#[derive(Debug, Default)]
pub(super) struct Offers {
    of: BTreeMap<LearnerId, Learner>,
}

impl Offers {
    /// A learner has joined.
    pub(super) fn joined(&mut self, learner: LearnerId, incarnation: Incarnation) {
        self.of.insert(learner, Learner { incarnation, taken: Step(0), open: None });
    }

    /// It has left.
    pub(super) fn left(&mut self, learner: LearnerId) {
        self.of.remove(&learner);
    }

    /// Its contribution to `step`, of a model of `blocks` blocks, is open; it may have been before. That is the
    /// coordinator's word, and holds also if the step was taken: the coordinator has taken it back then, as one that
    /// nobody waits for any more.
    pub(super) fn opened(&mut self, learner: LearnerId, step: Step, blocks: u32) {
        let Some(known) = self.of.get_mut(&learner) else { return };
        known.taken = Step(step.0.saturating_sub(1));
        if known.open.as_ref().is_none_or(|open| open.step != step) {
            known.open =
                Some(Open { step, received: FixedBitSet::with_capacity(blocks as usize), ends: false });
        }
    }

    /// What it has open is dropped.
    pub(super) fn dropped(&mut self, learner: LearnerId) {
        if let Some(known) = self.of.get_mut(&learner) {
            known.open = None;
        }
    }

    /// The commit of `step` is sent, perhaps again.
    ///
    /// # Errors
    /// When that is neither open nor was taken, or the learner is gone.
    pub(super) fn ends(&mut self, learner: LearnerId, step: Step) -> Result<(), ShardError> {
        let known = self.of.get_mut(&learner).ok_or(ShardError::UnknownLearner(learner))?;
        match &mut known.open {
            Some(open) if open.step == step => open.ends = true,
            _ if step != Step(0) && step <= known.taken => {}
            _ => return Err(ShardError::StepOutOfOrder { got: step, expected: known.taken.next() }),
        }
        Ok(())
    }

    /// That commit was answered. If it was not `taken`, as far as is known, the contribution is open still.
    pub(super) fn ended(&mut self, learner: LearnerId, step: Step, taken: bool) {
        let Some(known) = self.of.get_mut(&learner) else { return };
        if taken {
            known.taken = known.taken.max(step);
            known.open.take_if(|open| open.step <= step);
        } else if let Some(open) = known.open.as_mut().filter(|open| open.step == step) {
            open.ends = false;
        }
    }

    /// Whether it writes a contribution.
    pub(super) fn is_writing(&self, learner: LearnerId) -> bool {
        self.of.get(&learner).and_then(|known| known.open.as_ref()).is_some_and(|open| !open.ends)
    }

    /// A block that the model has is offered. False if it was before.
    ///
    /// # Errors
    /// When the learner is gone, or in another life, or its contribution to that step is not open.
    pub(super) fn take(&mut self, slot: BlockSlot) -> Result<bool, ShardError> {
        let known = self.of.get_mut(&slot.learner).filter(|known| known.incarnation == slot.incarnation);
        let known = known.ok_or(ShardError::UnknownLearner(slot.learner))?;
        if slot.step <= known.taken {
            return Ok(false);
        }
        match &mut known.open {
            Some(open) if open.step == slot.step => Ok(!open.received.put(slot.block.index())),
            _ => Err(ShardError::StepOutOfOrder { got: slot.step, expected: known.taken.next() }),
        }
    }

    /// That block is refused after all: it may be offered again.
    pub(super) fn give_back(&mut self, slot: BlockSlot) {
        let known = self.of.get_mut(&slot.learner);
        let open = known.and_then(|known| known.open.as_mut()).filter(|open| open.step == slot.step);
        if let Some(open) = open {
            open.received.remove(slot.block.index());
        }
    }
}

#[cfg(test)]
mod tests {
    use libmodelio::vocabulary::ids::BlockId;

    use super::*;

    const A: LearnerId = LearnerId(7);

    fn slot(step: u64, block: u32) -> BlockSlot {
        BlockSlot { learner: A, incarnation: Incarnation(1), step: Step(step), block: BlockId(block) }
    }

    fn offers() -> Offers {
        let mut offers = Offers::default();
        offers.joined(A, Incarnation(1));
        offers
    }

    #[test]
    fn a_block_is_taken_once_a_contribution() {
        let mut offers = offers();
        assert_eq!(
            offers.take(slot(1, 0)),
            Err(ShardError::StepOutOfOrder { got: Step(1), expected: Step(1) }),
            "not open"
        );
        offers.opened(A, Step(1), 3);
        assert_eq!((offers.take(slot(1, 2)), offers.take(slot(1, 2))), (Ok(true), Ok(false)));
        offers.give_back(slot(1, 2));
        assert_eq!(offers.take(slot(1, 2)), Ok(true), "it was refused");
        offers.opened(A, Step(1), 3);
        assert_eq!(offers.take(slot(1, 2)), Ok(false), "the same contribution");
        offers.dropped(A);
        offers.opened(A, Step(1), 3);
        assert_eq!(offers.take(slot(1, 2)), Ok(true), "another one");
    }

    #[test]
    fn what_was_taken_is_not_taken_again() {
        let mut offers = offers();
        offers.opened(A, Step(1), 3);
        assert!(offers.is_writing(A));
        assert_eq!(offers.ends(A, Step(1)), Ok(()));
        assert!(!offers.is_writing(A));
        offers.ended(A, Step(1), false);
        assert!(offers.is_writing(A));
        assert_eq!(offers.take(slot(1, 0)), Ok(true), "it is still open");
        assert_eq!(offers.ends(A, Step(1)), Ok(()));
        offers.ended(A, Step(1), true);
        assert_eq!(offers.take(slot(1, 1)), Ok(false));
        assert_eq!(offers.ends(A, Step(1)), Ok(()), "sent again");
        assert_eq!(
            offers.ends(A, Step(2)),
            Err(ShardError::StepOutOfOrder { got: Step(2), expected: Step(2) })
        );
        // A commit that timed out was taken after all: the next opening tells.
        offers.opened(A, Step(2), 3);
        offers.opened(A, Step(3), 3);
        assert_eq!(offers.take(slot(2, 1)), Ok(false));
        assert_eq!(offers.take(slot(3, 1)), Ok(true));
    }

    #[test]
    fn a_step_that_the_coordinator_has_taken_back_is_offered_anew() {
        let mut offers = offers();
        offers.opened(A, Step(2), 3);
        assert_eq!((offers.take(slot(2, 0)), offers.ends(A, Step(2))), (Ok(true), Ok(())));
        // The commit has timed out, and the coordinator says that it was taken; then it finds that nothing of it came.
        offers.ended(A, Step(2), false);
        offers.opened(A, Step(3), 3);
        assert_eq!((offers.take(slot(3, 0)), offers.ends(A, Step(3))), (Ok(true), Ok(())));
        offers.ended(A, Step(3), false);
        offers.dropped(A);
        offers.opened(A, Step(2), 3);
        assert_eq!((offers.take(slot(2, 0)), offers.take(slot(2, 0))), (Ok(true), Ok(false)));
        let early = ShardError::StepOutOfOrder { got: Step(3), expected: Step(2) };
        assert_eq!(offers.take(slot(3, 1)), Err(early));
        assert_eq!(offers.ends(A, Step(2)), Ok(()));
        offers.ended(A, Step(2), true);
        offers.opened(A, Step(3), 3);
        assert_eq!((offers.take(slot(2, 1)), offers.take(slot(3, 1))), (Ok(false), Ok(true)));
    }

    #[test]
    fn who_is_gone_offers_nothing() {
        let mut offers = offers();
        offers.opened(A, Step(1), 3);
        let other = BlockSlot { incarnation: Incarnation(2), ..slot(1, 0) };
        assert_eq!(offers.take(other), Err(ShardError::UnknownLearner(A)));
        offers.left(A);
        assert_eq!(offers.take(slot(1, 0)), Err(ShardError::UnknownLearner(A)));
        assert_eq!(offers.ends(A, Step(1)), Err(ShardError::UnknownLearner(A)));
        offers.opened(A, Step(1), 3);
        assert!(!offers.is_writing(A));
    }
}
