//! The opening of a contribution by its first write.
//!
//! In the usual case this client knows the learner's next step. After a commit without success only the coordinator
//! does, and it may be out of reach. So nobody waits here: a write that needs the answer takes nothing, and its caller
//! tries again when [`Contributor::ask_step`] says so. The state is not locked meanwhile.

use std::sync::Arc;
use std::time::Duration;

use super::{ContributeError, Contributor, ContributorState, Done};
use crate::client::Opening;
use crate::vocabulary::ids::Step;
use crate::vocabulary::shard_error::ShardError;

/// What has become of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrote {
    /// It was taken.
    Taken,
    /// Nothing was taken: the coordinator must name the step first ([`Contributor::ask_step`]).
    Asks,
}

/// The question for the next step.
#[derive(Default)]
pub(super) struct Asking {
    /// The callers that wait for the answer, while there is none.
    waiting: Option<Vec<Done>>,
    /// The answer, which the next contribution takes.
    answer: Option<Opening>,
    /// The number of questions.
    number: u64,
    /// The step whose commit was sent and has no answer. It may count.
    in_doubt: Option<Step>,
}

impl Asking {
    /// The answer was for a contribution that has ended, as what was committed from the mapping has.
    pub(super) fn forget(&mut self) {
        self.answer = None;
    }

    /// The commit of `step` has ended so. After these errors the coordinator may have taken it.
    pub(super) fn ended(&mut self, step: Option<Step>, result: &Result<(), ShardError>) {
        match result {
            Ok(()) => self.in_doubt = None,
            Err(ShardError::TimedOut(_) | ShardError::Interrupted | ShardError::Unreachable) => {
                self.in_doubt = step.or(self.in_doubt);
            }
            Err(_) => {}
        }
    }

    /// Whether a commit may count that has no answer.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.in_doubt.is_some()
    }

    /// The coordinator has taken the learner's commits up to this step, and no other. Returns the step that was in doubt,
    /// if it counts.
    pub(super) fn settle(&mut self, taken: Step) -> Option<Step> {
        self.in_doubt.take().filter(|step| *step <= taken)
    }

    /// The contribution has ended, and the answer is not of the next one. Returns the callers that wait for it.
    pub(super) fn give_up(&mut self) -> Vec<Done> {
        self.forget();
        self.number += 1;
        self.waiting.take().unwrap_or_default()
    }
}

impl Contributor {
    /// Asks the coordinator for the next step, if this client does not know it. `done` is called when a write can open
    /// the contribution, or with the reason why it cannot, before `timeout` is over. Several callers share one question.
    pub fn ask_step(
        self: &Arc<Self>,
        timeout: Duration,
        done: impl FnOnce(Result<(), ContributeError>) + Send + 'static,
    ) {
        let number = {
            let mut state = self.state.lock();
            if state.step.is_some() || self.knows_step(&state) {
                drop(state);
                return done(Ok(()));
            }
            if let Some(waiting) = &mut state.asking.waiting {
                return waiting.push(Box::new(done));
            }
            state.asking.waiting = Some(vec![Box::new(done)]);
            state.asking.number += 1;
            state.asking.number
        };
        self.waits.get().inspect(|tell| tell(true));
        let this = Arc::clone(self);
        let answered = move |result: Result<Opening, ShardError>| {
            this.waits.get().inspect(|tell| tell(false));
            let (waiting, counts) = {
                let mut state = this.state.lock();
                if state.asking.number != number {
                    return;
                }
                let opening = result.as_ref().ok().copied();
                state.asking.answer = opening.filter(|_| state.step.is_none());
                let taken = opening.map(|opening| Step(opening.step.0.saturating_sub(1)));
                let counts = taken.and_then(|taken| state.asking.settle(taken));
                (state.asking.waiting.take().unwrap_or_default(), counts)
            };
            let outcome = match counts {
                Some(step) => Err(ContributeError::Counts(step)),
                None => result.map(drop).map_err(ContributeError::from),
            };
            waiting.into_iter().for_each(|done| done(outcome.clone()));
        };
        self.job.open(self.learner, timeout, Box::new(answered));
    }

    /// The first write was not taken, for this reason. The commit must not report success. (A contribution that was
    /// dropped meanwhile has reported it already.)
    pub fn fail_unopened(&self, why: &ContributeError) {
        let mut state = self.state.lock();
        if state.step.is_none() && *why != ContributeError::Dropped {
            state.failed.get_or_insert_with(|| why.clone());
        }
    }

    /// Nobody is left who has to hear why a first write was not taken: the next one starts clean.
    pub fn forget_unopened(&self) {
        let mut state = self.state.lock();
        if state.step.is_none() {
            state.failed = None;
        }
    }

    /// Whether a write would be taken now, without a question for the step.
    pub fn can_write(&self) -> bool {
        let state = self.state.lock();
        state.step.is_some() || self.knows_step(&state)
    }

    fn knows_step(&self, state: &ContributorState) -> bool {
        state.asking.answer.is_some() || self.job.knows_step(self.learner)
    }

    /// Opens the contribution. `None` if the coordinator must be asked for the step. The state is locked during this
    /// call, which answers no request.
    pub(super) fn open(
        &self,
        state: &mut ContributorState,
        timeout: Duration,
    ) -> Result<Option<Step>, ShardError> {
        if !self.knows_step(state) {
            return Ok(None);
        }
        let made = self.made(state)?;
        let known = self.job.open_known(self.learner, timeout)?;
        let answer = state.asking.answer.take();
        let Some(Opening { step, staging_lent }) = known.or(answer) else { return Ok(None) };
        // Blocks that were sent for a dropped plan may still be on their way.
        let has_strays = self.job.take_strays(self.learner);
        state.staging.open(&self.job, step, has_strays, staging_lent)?;
        (state.step, state.models.made, state.averaged) = (Some(step), made, self.job.averaged());
        Ok(Some(step))
    }
}
