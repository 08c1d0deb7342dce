//! The passing of time.

use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::Message;

use super::plans::Run;
use super::{Action, CoordinatorCore, REPEAT};
use crate::core::Now;

impl CoordinatorCore {
    /// The latest moment for the next [`Self::tick`].
    pub fn next_deadline(&self) -> Now {
        let repeat = self.run.as_ref().map(Run::repeat_at);
        let core = [self.core.next_deadline(), self.core.next_overdue()];
        let own = [Some(self.states.sent_at() + REPEAT), repeat, self.all_reduce.next_deadline()];
        let own = own.into_iter().chain([self.sets.deadline()]);
        let deadlines = own.chain(core);
        deadlines.flatten().min().unwrap_or(Now::MAX)
    }

    /// Time passes. Handles deadlines and leases, and repeats messages.
    pub fn tick(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.expire_clients(now, actions);
        let mut wanted = Vec::new();
        self.core.tick(now, &mut wanted);
        self.perform(wanted, now, actions);
        for learner in self.core.overdue(now) {
            let late = "a shard has not read the contribution in time: it is dropped";
            self.reclaim(learner, ShardError::TimedOut(late.into()), now, actions);
        }
        for (learner, (client, asked)) in self.all_reduce.take_late(now) {
            self.core.numbers_are_late(learner, now);
            let late = ShardError::TimedOut("other learners have not given their numbers".into());
            self.answer(client, asked, Message::Refused(late.into()), actions);
        }
        let (late, why) = self.sets.take_late(now);
        for (client, asked) in late {
            self.answer(client, asked, Message::Refused(why.clone().into()), actions);
        }
        self.repeat(now, actions);
        if now >= self.states.sent_at() + REPEAT {
            self.resend_states(now, actions);
        }
    }
}
