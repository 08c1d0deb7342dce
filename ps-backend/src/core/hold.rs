//! Holding the job at a moment when it consists of a version and this core alone. It can be moved then.
//!
//! The accumulator must hold nothing of the coming version. So contributions are no longer accumulated. They stay
//! where they are, and their commits wait for the version. After that version no new work begins. Requests are still
//! taken, and deadlines and leases go on.
use libmodelio::vocabulary::reducer::Reducer;

use super::{Action, Committed, Contribution, JobCore, Now, PayloadPlace, Pending, PendingKind};

impl JobCore {
    /// Begins to hold.
    pub fn hold(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.making.hold();
        self.advance(now, actions);
    }

    /// Lets the job go on.
    pub fn release(&mut self, now: Now, actions: &mut Vec<Action>) {
        if self.making.release() {
            self.advance(now, actions);
        }
    }

    /// The names of the learners that the coming version waits for.
    pub fn missing_names(&self) -> Vec<&str> {
        let missing = self.members.values().filter(|member| self.takes_part(member) && !member.unpublished);
        missing.map(|member| member.name.as_str()).collect()
    }

    /// The reducer with the most of the optimizer state that exists.
    pub fn state_of(&self) -> Reducer {
        self.recipe.state_of().widest()
    }

    /// Another coordinator has taken over the held job. No message of learners could come meanwhile, so all leases
    /// begin anew.
    pub fn taken_over(&mut self, now: Now) {
        self.waits.moved_on();
        for member in self.members.values_mut() {
            member.last_seen = now;
            member.activity.counts(now);
        }
    }

    /// Checks that this is the state of a held job with `blocks` blocks and `tensors` tensors. State from another
    /// process may be anything.
    pub fn is_sound(&self, blocks: u32, tensors: usize) -> bool {
        let of_model = |set: &fixedbitset::FixedBitSet| set.len() == blocks as usize;
        let contributed = |contribution: &Contribution| {
            of_model(&contribution.sent)
                && contribution.tensors.len() == tensors
                && contribution.partly.as_ref().is_none_or(|partly| partly.check(blocks).is_ok())
        };
        let held = |committed: &Committed| {
            !matches!(committed.place, PayloadPlace::Accumulating) && contributed(&committed.contribution)
        };
        let waits = |pending: &Pending| match &pending.kind {
            PendingKind::Commit { contribution, .. } => contributed(contribution),
            PendingKind::Assign { .. } => true,
        };
        self.recipe.is_sound(blocks as usize, tensors, self.controls.reducer)
            && self.making.readers.is_sound()
            && !self.has_accumulated()
            && self.committed.iter().all(held)
            && self.pending.iter().all(waits)
    }
}
