//! The actions of the job's core, carried out.

use std::collections::VecDeque;

use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::Message;

use super::made_from::MadeFrom;
use super::{Action, CoordinatorCore};
use crate::core::{self, Now};

impl CoordinatorCore {
    /// Carries out the core's actions until none is left.
    pub(in crate::coordinator) fn perform(
        &mut self,
        wanted: Vec<core::Action>,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let mut wanted = VecDeque::from(wanted);
        let mut answers = Vec::new();
        while let Some(action) = wanted.pop_front() {
            match action {
                core::Action::Reply(ticket, result) => {
                    let answer = match result {
                        Ok(()) => Message::Done,
                        Err(error) => Message::Refused(error.with_away(self.health.away()).into()),
                    };
                    let asked = self.tickets.take(ticket).into_iter();
                    answers.extend(asked.map(|(client, asked)| (client, asked, answer.clone())));
                }
                core::Action::Published(version) => {
                    self.states.outdated();
                    self.made_from = MadeFrom::of(self.run.as_ref());
                    actions.push(Action::Published(version));
                }
                core::Action::Left { learner, reason } => {
                    self.states.outdated();
                    if let Some((client, asked)) = self.all_reduce.leave(learner) {
                        let gone = ShardError::UnknownLearner(learner);
                        answers.push((client, asked, Message::Refused(gone.into())));
                    }
                    let owner = self.owners.remove(&learner);
                    if let Some(owner) = owner
                        && let Some(client) = self.clients.get_mut(&owner)
                    {
                        client.forget(learner);
                        actions.push(Action::ToClient(owner, 0, Message::Left { learner, reason }));
                    }
                }
                core::Action::Seal(plan) => self.seal(plan, now, actions),
                core::Action::Drop => self.drop_work(core::JobPlan::is_provisional, now, actions),
                core::Action::Begin(plan) => self.want(plan, now, actions),
            }
        }
        self.tell_reader_news(actions);
        if self.states.take_outdated() {
            self.send_state_to_all(now, actions);
        }
        let members = self.core.is_formed().then(|| self.core.learners());
        if let Some((values, asked)) = members.and_then(|members| self.all_reduce.take_complete(members)) {
            self.core.numbers_are_reduced(now);
            let answer = |(client, asked)| (client, asked, Message::AllReduced { values: values.clone() });
            answers.extend(asked.into_iter().map(answer));
        }
        // Answers go after the state: a client that has its answer must know the outcome.
        for (client, asked, answer) in answers {
            self.answer(client, asked, answer, actions);
        }
    }
}
