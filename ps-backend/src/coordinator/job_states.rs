//! The job's state, as it is sent to clients.
use libmodelio::vocabulary::ids::{ClientId, LearnerId, Version};
use libmodelio::wire::{JobState, LearnerState, Message};
use serde::{Deserialize, Serialize};

use super::clients::Client;
use super::{Action, CoordinatorCore};
use crate::core::Now;

/// What clients were sent of the job's state.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct SentStates {
    /// The number of the newest state that was sent.
    sequence: u64,
    /// Whether clients must be sent another one.
    are_outdated: bool,
    /// When all clients were last sent one, or were found to know it.
    sent_at: Now,
    /// Clients that send nothing for a plan learn when it begins.
    #[serde(skip)]
    announces_plans: bool,
}

impl SentStates {
    /// Clients that send nothing for a plan learn when it begins.
    pub(super) fn announce_plans(&mut self) {
        self.announces_plans = true;
    }

    /// Whether they do.
    pub(super) fn announces_plans(&self) -> bool {
        self.announces_plans
    }

    /// The state is another one now.
    pub(super) fn outdated(&mut self) {
        self.are_outdated = true;
    }

    /// Whether it is another one than clients were sent. The caller sends it: the next call returns false.
    pub(super) fn take_outdated(&mut self) -> bool {
        std::mem::take(&mut self.are_outdated)
    }

    /// A state is sent: it has the next number.
    fn begin(&mut self) {
        self.sequence += 1;
    }

    fn begin_for_all(&mut self, now: Now) {
        self.sent_at = now;
        self.begin();
    }

    /// The number of the newest state that was sent.
    pub(super) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// When all clients were last sent one.
    pub(super) fn sent_at(&self) -> Now {
        self.sent_at
    }

    /// Clients of a coordinator that was taken over at `now` come back by themselves.
    pub(super) fn taken_over(&mut self, now: Now) {
        self.sent_at = now;
    }
}

impl CoordinatorCore {
    /// The state of the job for one client, without its number.
    pub fn state(&self, id: ClientId, now: Now) -> JobState {
        let learners = self.clients.get(&id).map(|client| client.learners.keys());
        let view = |learner: &LearnerId| {
            self.core.member(*learner, now).map(|view| LearnerState {
                learner: *learner,
                incarnation: view.incarnation,
                step: view.step,
                unpublished: view.unpublished,
                published_in: view.published_in,
                joined_at: view.joined_at,
                attached: view.attached,
            })
        };
        let late = self.core.late(now).map(|(_, late)| late).unwrap_or_default();
        JobState {
            sequence: 0,
            version: self.core.version(),
            over: self.over(),
            acked_through: self.clients.get(&id).and_then(|client| client.requests.acked_through()),
            controls: self.core.controls().clone(),
            phase: self.doing(),
            learners: learners.into_iter().flatten().filter_map(view).collect(),
            members: self.core.members(now).len() as u32,
            committed: self.core.committed() as u32,
            contributions: self.core.contributions_taken(),
            late: late.learners,
            late_more: late.more as u32,
            away: self.health.away().to_vec(),
            norm: self.core.norm(),
            own_weights: self.made_from.weights_of(id),
            made_by: self.made_from.plan(),
            newest_of: self.core.newest_of(),
            grace_window: self.core.grace_window(),
            rate: self.core.rate(),
            replicas_since: self.core.replicas_since(),
            meta: self.core.meta().clone(),
            readers: self.core.readers_revision(),
            held_by: self.core.held_by(),
            durable: self.core.durable(),
        }
    }

    /// Tells all clients what has changed in the readers. States that come after this name it.
    pub(super) fn tell_reader_news(&mut self, actions: &mut Vec<Action>) {
        let news = self.core.take_reader_news(&self.connected());
        actions.extend(news.into_iter().map(|(client, message)| Action::ToClient(client, 0, message)));
    }

    /// There is a snapshot of this version in the job's store.
    pub fn is_durable(&mut self, version: Version, now: Now, actions: &mut Vec<Action>) {
        self.core.set_durable(version);
        self.send_state_to_all(now, actions);
    }

    pub(super) fn send_state(&mut self, id: ClientId, now: Now, actions: &mut Vec<Action>) {
        self.states.begin();
        self.send_states(&[id], |_, _| true, now, actions);
    }

    pub(super) fn send_state_to_all(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.states.begin_for_all(now);
        self.send_states(&self.connected(), |_, _| true, now, actions);
    }

    /// Sends the state to clients that do not know it, and repeats it to the others, less and less often.
    pub(super) fn resend_states(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.states.begin_for_all(now);
        self.send_states(&self.connected(), |client, state| client.needs_state(state, now), now, actions);
    }

    fn connected(&self) -> Vec<ClientId> {
        self.clients.iter().filter(|(_, client)| client.connected).map(|(&id, _)| id).collect()
    }

    fn send_states(
        &mut self,
        clients: &[ClientId],
        whether: impl Fn(&Client, &JobState) -> bool,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        // Most jobs have nothing to tell.
        let mut news = None;
        for &id in clients {
            let state = self.state(id, now);
            if let Some(client) = self.clients.get_mut(&id)
                && whether(client, &state)
            {
                // A client hears of the learners before it hears of the version.
                if client.told_learners != Some(state.version)
                    && let Some(news) = news.get_or_insert_with(|| self.core.tell_learners())
                {
                    actions.push(Action::ToClient(id, 0, news.clone()));
                    client.told_learners = Some(state.version);
                }
                let numbered = JobState { sequence: self.states.sequence(), ..state.clone() };
                actions.push(Action::ToClient(id, 0, Message::State(Box::new(numbered))));
                client.sent(state, now);
            }
        }
    }
}
