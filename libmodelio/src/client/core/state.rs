//! The state of the job, from the coordinator.

use std::collections::BTreeMap;

use super::learners::Learner;
use super::{Action, ClientCore, Now, REPEAT_AFTER};
use crate::vocabulary::ids::LearnerId;
use crate::vocabulary::members::{LeaveReason, LifeSign};
use crate::vocabulary::phase::JobPhase;
use crate::wire::{JobState, LearnerState, MAX_NUMBER, Message};

impl ClientCore {
    pub(super) fn take_state(&mut self, state: JobState, now: Now, actions: &mut Vec<Action>) {
        let is_news = state.controls != self.state.controls;
        if state.sequence.max(state.version.0).max(state.over.0) > MAX_NUMBER
            || is_news && state.controls.check().is_err()
        {
            return;
        }
        // The first state over a connection counts, whatever an earlier connection brought.
        let is_anew = self.coordination.takes_first_state();
        if state.sequence <= self.state.sequence && !is_anew {
            return;
        }
        if is_anew {
            self.pull.take_if(|pull| pull.version > state.version && pull.decided);
        }
        self.plan_over(state.over, actions);
        if state.acked_through != Some(self.requests.acked_through()) && self.coordination.is_up() {
            actions.push(self.numbers());
        }
        let named: BTreeMap<LearnerId, LearnerState> =
            state.learners.iter().map(|learner| (learner.learner, learner.clone())).collect();
        let mut gone = Vec::new();
        for (learner, known) in &mut self.learners {
            match named.get(learner) {
                Some(new) => known.state = new.clone(),
                // The learner has left, and the notice of it was lost.
                None if state.sequence >= known.since => gone.push(*learner),
                None => {}
            }
        }
        for learner in gone {
            self.learner_left(learner, LeaveReason::LeaseExpired, now, actions);
        }
        for (&learner, known) in &self.learners {
            // The `Touch` was lost, or the coordinator did not know the learner yet.
            let attached = known.attached.filter(|attached| *attached != known.state.attached);
            if let Some(attached) = attached
                && named.contains_key(&learner)
                && self.coordination.is_up()
            {
                let touch = Message::Touch { learners: vec![learner], sign: LifeSign::Process(attached) };
                actions.push(Action::ToCoordinator(0, touch));
            }
        }
        for state in &state.learners {
            // All steps before a taken one are part of versions.
            let needed = if state.unpublished { state.step } else { state.step.next() };
            self.release_older(state.learner, needed, actions);
        }
        let joining = self.requests.has(|message| matches!(message, Message::Join { .. }));
        if !joining {
            // A learner whose join was given up here has joined after all. Nobody would ever use it.
            let strays: Vec<LearnerId> =
                named.keys().copied().filter(|learner| !self.learners.contains_key(learner)).collect();
            for learner in strays {
                let message = Message::Leave { learner, reason: LeaveReason::Asked };
                let id = self.requests.make_own(message, now + 10 * REPEAT_AFTER, now);
                actions.extend(self.requests.send(id, now));
                self.learners.insert(learner, Learner::new(None, named[&learner].clone(), state.sequence));
            }
        }
        self.check_readers(state.readers, actions);
        let offered = self.offered_version();
        self.coordination.reports(state.phase == JobPhase::Failed, now);
        if state.durable != self.state.durable {
            actions.push(Action::Durable);
        }
        self.state = state;
        if self.way.is_in_place() {
            self.release_left(actions);
        }
        actions.push(Action::State);
        if self.offered_version() > offered {
            actions.push(Action::Offered(self.offered_version()));
        }
        self.decide_followed(is_anew, now, actions);
        self.restart_pull(now, actions);
        self.start_pull(now, actions);
        self.answer_waits(now, actions);
    }
}
