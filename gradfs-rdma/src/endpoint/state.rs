//! The stages of making a connection.

use std::sync::{Arc, Weak};
use std::time::Instant;

use super::requests::{Accept, Wish};
use crate::queue_pair::QueuePair;
use crate::verbs::CmId;

/// The stage of a connection.
pub(super) enum State {
    Listening { _cm_id: CmId, accept: Accept },
    Resolving { cm_id: CmId, wish: Wish },
    Connecting { queue_pair: Arc<QueuePair>, wish: Wish },
    Accepting { queue_pair: Arc<QueuePair>, deadline: Instant, number: usize, listener: u64 },
    Up(Weak<QueuePair>),
}

impl State {
    /// The deadline for the next stage.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            State::Resolving { wish, .. } | State::Connecting { wish, .. } => Some(wish.deadline),
            State::Accepting { deadline, .. } => Some(*deadline),
            State::Listening { .. } | State::Up(_) => None,
        }
    }

    /// Whether the deadline has passed, or nobody holds the connection any more.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        match self {
            State::Up(queue_pair) => queue_pair.strong_count() == 0,
            other => other.deadline().is_some_and(|deadline| now >= deadline),
        }
    }

    /// Reports to the caller that the connection could not be made.
    pub(super) fn end(self, why: &str) {
        match self {
            State::Resolving { wish, .. } | State::Connecting { wish, .. } => wish.fail(why),
            State::Accepting { .. } | State::Listening { .. } | State::Up(_) => {}
        }
    }
}
