//! Mounts, which show a version of a life that they know, and offer it where a model is restored.

use libmodelio::vocabulary::ids::{ClientId, Generation, Incarnation, Version};
use libmodelio::wire::Brings;
use ps_backend::core::JobRecord;
use ps_backend::offers::{KnownOf, Offers};

use super::world::World;

/// What a mount shows.
#[derive(Clone)]
pub(super) struct Shown {
    version: u64,
    known: KnownOf,
}

impl Default for Shown {
    fn default() -> Shown {
        let (learners, unlisted, meta) = (Vec::new(), Incarnation(0), Default::default());
        let known = KnownOf { contributions: 0, learners, unlisted, meta };
        Shown { version: 0, known }
    }
}

impl World {
    /// A mount shows the newest version.
    pub(super) fn pull(&mut self, shard: usize) {
        let at = self.random.usize(0..self.mounts.len());
        let Some(job) = &self.shards[shard].job else { return };
        // It never goes back.
        if self.mounts[at].version < job.version() {
            let JobRecord { version, contributions, learners, unlisted, meta, .. } = job.record();
            let known = KnownOf { contributions, learners, unlisted, meta };
            self.mounts[at] = Shown { version: version.0, known };
        }
    }

    /// Mounts that hear of a restoration offer what they show.
    pub(super) fn offer(&mut self, generation: Generation, offers: &mut Offers) {
        for at in 0..self.mounts.len() {
            if self.random.u8(0..4) == 0 {
                let Shown { version, known } = self.mounts[at].clone();
                let of = (ClientId(at as u64), Version(version), known);
                let _ = offers.offered(generation, of, Brings::Soon, self.time());
            }
        }
    }
}
