//! Where models are that have moved: what is told to whoever speaks of an older block map.

use std::collections::VecDeque;
use std::sync::Arc;

use libmodelio::vocabulary::ids::{Epoch, Generation};
use libmodelio::wire::Refusal;
use parking_lot::Mutex;

/// Models that were here and are remembered.
const MAX_GONE: usize = 1024;

/// Where a model is now: what is told to whoever speaks of an older block map.
#[derive(Clone, Debug)]
pub(super) struct Redirect {
    pub generation: Generation,
    pub epoch: Epoch,
    /// A [`Moved`](libmodelio::wire::Moved).
    pub payload: Arc<[u8]>,
}

/// Why somebody is not welcome.
pub(super) enum TurnedAway {
    /// It is refused.
    Refused(Refusal),
    /// It speaks of an older block map.
    Moved(Redirect),
}

impl From<Refusal> for TurnedAway {
    fn from(refusal: Refusal) -> TurnedAway {
        TurnedAway::Refused(refusal)
    }
}

/// Models that were here, and where they are: the newest ones.
#[derive(Default)]
pub(super) struct Gone(Mutex<VecDeque<(String, Redirect)>>);

impl Gone {
    /// A model is elsewhere now.
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

    /// A model of this name is here.
    pub(super) fn is_back(&self, name: &str) {
        self.0.lock().retain(|(gone, _)| gone != name);
    }

    /// Where a model is that was here.
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
