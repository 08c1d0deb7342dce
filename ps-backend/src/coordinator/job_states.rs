//! The job's state, as it is sent to clients.
use libmodelio::vocabulary::ids::{ClientId, LearnerId};
use libmodelio::wire::{JobState, LearnerState, Message};

use super::clients::Client;
use super::{Action, CoordinatorCore};
use crate::core::Now;

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
            away: self.away.clone(),
            norm: self.core.norm(),
            own_weights: self.weights_of.filter(|(client, _)| *client == id).map(|(_, token)| token),
            made_by: self.made_by,
            newest_of: self.core.newest_of(),
            grace_window: self.core.grace_window(),
            rate: self.core.rate(),
            replicas_since: self.core.replicas_since(),
        }
    }

    pub(super) fn send_state(&mut self, id: ClientId, now: Now, actions: &mut Vec<Action>) {
        self.sequence += 1;
        self.send_states(&[id], |_, _| true, now, actions);
    }

    pub(super) fn send_state_to_all(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.states_sent_at = now;
        self.sequence += 1;
        self.send_states(&self.connected(), |_, _| true, now, actions);
    }

    /// Sends the state to clients that do not know it, and repeats it to the others, less and less often.
    pub(super) fn resend_states(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.states_sent_at = now;
        self.sequence += 1;
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
        for &id in clients {
            let state = self.state(id, now);
            if let Some(client) = self.clients.get_mut(&id)
                && whether(client, &state)
            {
                let numbered = JobState { sequence: self.sequence, ..state.clone() };
                actions.push(Action::ToClient(id, 0, Message::State(Box::new(numbered))));
                client.sent(state, now);
            }
        }
    }
}
