//! Redirects: the new places of models that have moved away. A peer with an older block map gets one.

use std::collections::VecDeque;
use std::sync::Arc;

use libmodelio::vocabulary::ids::{Epoch, Generation};
use libmodelio::wire::Refusal;
use parking_lot::Mutex;

/// The most models that have moved away and are remembered.
const MAX_GONE: usize = 1024;

/// The place of a model after a move, for peers with an older block map.
#[derive(Clone, Debug)]
pub(super) struct Redirect {
    pub generation: Generation,
    pub epoch: Epoch,
    /// A [`Moved`](libmodelio::wire::Moved).
    pub payload: Arc<[u8]>,
}

/// Why a peer is turned away.
pub(super) enum TurnedAway {
    /// Its greeting is refused.
    Refused(Refusal),
    /// Its block map is older: the model has moved.
    Moved(Redirect),
}

impl From<Refusal> for TurnedAway {
    fn from(refusal: Refusal) -> TurnedAway {
        TurnedAway::Refused(refusal)
    }
}

/// The redirects of models that have moved away, the newest ones.
#[derive(Default)]
pub(super) struct Gone(Mutex<VecDeque<(String, Redirect)>>);

impl Gone {
    /// A model has moved away.
    pub(super) fn add(&self, name: &str, to: Redirect) {
        let mut gone = self.0.lock();
        let newer = |(known, at): &(String, Redirect)| {
            known == name && at.generation == to.generation && at.epoch >= to.epoch
        };
        if gone.iter().any(newer) {
            return;
        }
        gone.retain(|(known, _)| known != name);
        if gone.len() >= MAX_GONE {
            gone.pop_front();
        }
        gone.push_back((name.to_owned(), to));
    }

    /// A model of this name is here again.
    pub(super) fn is_back(&self, name: &str) {
        self.0.lock().retain(|(gone, _)| gone != name);
    }

    /// The redirect of a model that has moved away.
    pub(super) fn of(&self, name: &str, generation: Generation) -> Option<Redirect> {
        let gone = self.0.lock();
        let found = gone.iter().find(|(known, to)| known == name && to.generation == generation);
        found.map(|(_, to)| to.clone())
    }

    /// The names of models that were here and have moved away.
    pub(super) fn names(&self) -> Vec<String> {
        self.0.lock().iter().map(|(name, _)| name.clone()).collect()
    }
}
