//! What clients were told, and what follows from that.

use std::collections::BTreeMap;

use libmodelio::vocabulary::ids::{Generation, Version};

use super::content::Content;

pub(super) struct Promises {
    /// The content of each version that somebody may have seen.
    shown: BTreeMap<u64, Content>,
    /// What was called durable last.
    durable: Content,
    /// The newest life that clients know.
    pub(super) counts: Generation,
}

impl Default for Promises {
    fn default() -> Promises {
        Promises { shown: BTreeMap::new(), durable: Content::default(), counts: Generation(0) }
    }
}

impl Promises {
    pub(super) fn shows(&mut self, version: u64, content: &Content) {
        content.check();
        let before = self.shown.insert(version, content.clone());
        assert!(before.is_none_or(|before| before == *content), "version {version} has two contents");
    }

    /// What a version shows.
    pub(super) fn shown(&self, version: Version) -> Content {
        self.shown[&version.0].clone()
    }

    /// A snapshot of this life is called durable.
    pub(super) fn is_durable(&mut self, generation: Generation, content: &Content) {
        let lost = content.lacks(&self.durable);
        assert!(lost.is_empty(), "a snapshot of life {generation} lacks {lost:?}, which were durable");
        self.durable = content.clone();
    }

    /// Clients hear of a life.
    pub(super) fn begins(&mut self, generation: Generation, content: &Content) {
        let lost = content.lacks(&self.durable);
        assert!(lost.is_empty(), "life {generation} lacks {lost:?}, which were durable");
        self.counts = self.counts.max(generation);
    }
}
