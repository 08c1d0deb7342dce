//! The coordinator's clients, with their learners, requests and states; within, what they ask for.

mod requests;

use std::collections::{BTreeMap, VecDeque};

use libmodelio::vocabulary::ids::{ClientId, LearnerId, PlanId, Version};
use libmodelio::wire::{JobState, Message};
use serde::{Deserialize, Serialize};

use super::requests::{Asked, Requests};
use super::{Action, CoordinatorCore, REPEAT, REPEAT_SELDOM};
use crate::core::Now;

/// One client.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Client {
    pub(super) connected: bool,
    last_seen: Now,
    /// Its learners, each with the newest request about it.
    pub(super) learners: BTreeMap<LearnerId, Asked>,
    pub(super) requests: Requests,
    /// The newest plan with contributions of this client's that counts, or 0.
    pub(super) counted: PlanId,
    #[serde(skip)]
    sent_state: Option<SentState>,
    /// When it was told of all readers, on its connection.
    #[serde(skip)]
    told_readers: Option<Now>,
    /// The version as of which it was last told of learners, on its connection.
    #[serde(skip)]
    pub(super) told_learners: Option<Version>,
}

/// What is remembered of a client that was given up.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct GivenUp {
    /// Its highest request number. Requests up to it come too late.
    newest: u64,
    /// The newest plan with contributions of the client's that counts, or 0.
    pub(super) counted: PlanId,
}

/// The last state that a client was sent, without its number.
#[derive(Debug)]
struct SentState {
    state: JobState,
    at: Now,
    /// When the client was first sent the same state.
    since: Now,
}

impl Client {
    /// A client that was given up before, or never was here.
    fn new(before: GivenUp) -> Client {
        let requests = Requests::new(before.newest);
        Client {
            connected: false,
            last_seen: Now::ZERO,
            learners: BTreeMap::new(),
            requests,
            counted: before.counted,
            sent_state: None,
            told_readers: None,
            told_learners: None,
        }
    }

    /// Whether the client may be told of all readers now. One that asks again and again is told as seldom as of states.
    pub(super) fn asks_for_readers(&mut self, now: Now) -> bool {
        let may = self.told_readers.is_none_or(|at| now >= at + REPEAT);
        self.told_readers = if may { Some(now) } else { self.told_readers };
        may
    }

    pub(super) fn answers(&self) -> usize {
        self.requests.kept()
    }

    /// The client has to connect to another shard. Its lease begins anew.
    pub(super) fn taken_over(&mut self, now: Now) {
        self.connected = false;
        self.last_seen = now;
    }

    /// Whether the client must be sent the state, because it is new to the client or was sent long enough ago.
    pub(super) fn needs_state(&self, state: &JobState, now: Now) -> bool {
        self.sent_state.as_ref().is_none_or(|sent| {
            let known = sent.at.saturating_sub(sent.since);
            sent.state != *state || now >= sent.at + known.clamp(REPEAT, REPEAT_SELDOM)
        })
    }

    pub(super) fn sent(&mut self, state: JobState, now: Now) {
        let since =
            self.sent_state.as_ref().filter(|sent| sent.state == state).map_or(now, |sent| sent.since);
        self.sent_state = Some(SentState { state, at: now, since });
    }

    pub(super) fn forget(&mut self, learner: LearnerId) {
        self.learners.remove(&learner);
    }
}

/// The place of a client among those that were given up.
pub(super) fn given_up_at(all: &VecDeque<(ClientId, GivenUp)>, id: ClientId) -> Option<usize> {
    all.iter().rposition(|(known, _)| *known == id)
}

impl CoordinatorCore {
    pub(super) fn answer(&mut self, id: ClientId, asked: Asked, answer: Message, actions: &mut Vec<Action>) {
        // In one process no answer is lost.
        let kept = !self.local_shard.is_there();
        if let Some(client) = self.clients.get_mut(&id)
            && client.requests.answers(asked, &answer, kept)
        {
            actions.push(Action::ToClient(id, asked.number, answer));
        }
    }

    /// The newest plan with contributions of a client's that counts, or 0. The client may have been given up just now.
    pub(super) fn newest_counted(&self, id: ClientId) -> PlanId {
        match self.clients.get(&id) {
            Some(client) => client.counted,
            None => given_up_at(&self.given_up, id).map_or(PlanId(0), |at| self.given_up[at].1.counted),
        }
    }
}
