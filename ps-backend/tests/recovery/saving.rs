//! Snapshots, in the steps of `ps-backend/src/server/snapshots.rs`: the writer may end, or stand still, between any two.

use std::time::Duration;

use libmodelio::vocabulary::ids::Version;
use ps_backend::snapshot::Keep;

use super::content::Content;
use super::job::{Stage, Writing};
use super::store::Torn;
use super::world::{MODEL, World};

/// So many snapshots stay.
const KEEP: Keep = Keep { newest: 2, every: Duration::ZERO };

impl World {
    /// One more step of writing a snapshot.
    pub(super) fn save(&mut self, shard: usize) {
        let id = self.new_generation().0;
        let Some(job) = &mut self.shards[shard].job else { return };
        let (generation, shelf) = (job.generation, &self.store.shelf);
        let Some(mut writes) = job.writes.take() else {
            match shelf.claim((MODEL, generation, &job.lineage), false) {
                Err(_) => self.counts.refused_lives += 1,
                Ok(()) => {
                    shelf.begin(id, generation).unwrap();
                    let (record, content) = (job.record(), job.content.clone());
                    job.writes = Some(Writing { id, record, content, stage: Stage::Copied });
                }
            }
            return;
        };
        writes.stage = match writes.stage {
            Stage::Copied => {
                self.store.write_part(writes.id, &writes.record, &writes.content);
                Stage::Written
            }
            Stage::Written => match shelf.check_claim(generation) {
                // Nobody else removes parts from the store of this life.
                Ok(claim) => Stage::Claimed(claim, shelf.parts(writes.id, [0].into_iter()).unwrap()),
                Err(_) => {
                    self.counts.refused_lives += 1;
                    return shelf.abandon(writes.id).unwrap();
                }
            },
            // Another life may have claimed the store since that was looked at.
            Stage::Claimed(claim, places) => {
                let name = self.store.describe((writes.id, claim), writes.record.clone(), places);
                return self.described(shard, writes.id, name, (writes.record.version, writes.content));
            }
        };
        job.writes = Some(writes);
    }

    /// The description is written, unless its writer ends, or nobody tells it that it is there.
    fn described(&mut self, shard: usize, id: u64, name: String, (version, content): (Version, Content)) {
        let torn = match self.random.u8(0..16) {
            _ if self.is_well() => None,
            0 => Some(Some(Torn::Cut)),
            1 => Some(Some(Torn::Changed)),
            2 => Some(None),
            _ => None,
        };
        if let Some(torn) = torn {
            self.counts.torn += 1;
            self.say(format_args!("the writer of {name} is not told that it is there"));
            let at = self.random.usize(..);
            torn.into_iter().for_each(|torn| self.store.tear(&name, torn, at));
            match self.random.bool() {
                true => self.kill(shard),
                false => self.store.shelf.abandon(id).unwrap(),
            }
            return;
        }
        let shelf = &self.store.shelf;
        shelf.end(id, [0].into_iter()).unwrap();
        let Some(job) = &mut self.shards[shard].job else { return };
        job.saved = Some((version.0, content, false));
        let generation = job.generation;
        let _ = shelf.check_claim(generation).and_then(|_| shelf.collect(KEEP, generation));
        self.keep(shard);
    }
}
