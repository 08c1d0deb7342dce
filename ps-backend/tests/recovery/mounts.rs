//! Mounts, which show a version of a life that they know, and offer it where a model is restored.

use libmodelio::vocabulary::ids::{ClientId, Generation, Incarnation, Version};
use libmodelio::wire::Brings;
use ps_backend::offers::{KnownOf, Offers};

use super::world::{Content, World};

impl World {
    /// A mount shows the newest version.
    pub(super) fn pull(&mut self, version: u64, content: &Content) {
        let at = self.random.usize(0..self.mounts.len());
        // It never goes back.
        if self.mounts[at].0 < version {
            self.mounts[at] = (version, content.clone());
        }
    }

    /// Mounts that hear of a restoration offer what they show.
    pub(super) fn offer(&mut self, generation: Generation, offers: &mut Offers) {
        for at in 0..self.mounts.len() {
            if self.random.u8(0..4) == 0 {
                let (learners, unlisted, meta) = (Vec::new(), Incarnation(0), Default::default());
                let contributions = self.mounts[at].1.len() as u64;
                let known = KnownOf { contributions, learners, unlisted, meta };
                let of = (ClientId(at as u64), Version(self.mounts[at].0), known);
                let _ = offers.offered(generation, of, Brings::Soon, self.time());
            }
        }
    }

    /// What a mount shows.
    pub(super) fn held_by(&self, client: ClientId) -> (u64, Content) {
        self.mounts[client.0 as usize].clone()
    }
}
