//! What must be true of a job that a killed process has ended: its state is `failed`, or nobody coordinates it. Nothing
//! restores it, but nothing that was acknowledged has vanished before, either.

use libmodelio::vocabulary::controls::PullPolicy;
use libmodelio::vocabulary::ids::Version;

use crate::history::Outcome;
use crate::moving::Life;
use crate::world::{Node, World};

impl World {
    /// Everybody has had time to hear of it.
    pub fn check_ended(&mut self) {
        self.check_shards();
        self.check_mounts();
    }

    /// Every shard that lives has all that was acknowledged: in the newest version, or in what was added up for the
    /// next one. What the killed one had of that is lost, and nothing else.
    fn check_shards(&self) {
        let course = &self.courses[self.current()];
        let living = || {
            course
                .partitions
                .iter()
                .map(|&partition| (partition, &self.shards[partition]))
                .filter(|(_, s)| s.life == Life::Live)
        };
        for (partition, shard) in living() {
            for (block, front, _) in shard.known() {
                self.history.made_block(partition, shard.newest(), block.0, front);
            }
        }
        for (uid, record) in self.history.records.iter().filter(|(_, r)| r.outcome == Outcome::Acknowledged) {
            for (partition, shard) in living() {
                if let Some(version) = record.version {
                    let newest = shard.newest();
                    assert!(
                        newest >= version,
                        "partition {partition} is at version {newest}, contribution {uid} in {version}"
                    );
                    continue;
                }
                // Where values replace each other, an earlier one may be gone from what waits.
                for (block, front, known) in
                    shard.known().filter(|(block, ..)| record.blocks.contains(&block.0))
                {
                    let replaced = known.replaces() || self.history.replaces(shard.newest());
                    let there = front.weights.adds(*uid) || known.holds(*uid) || replaced;
                    assert!(
                        there,
                        "partition {partition} has lost block {block} of {uid}, which was acknowledged: {record:?}"
                    );
                }
            }
        }
    }

    /// Every mount shows a whole version, which holds all that its programs know it to hold, and no older one than
    /// before; and says that the job has failed, if somebody is left to tell it. Where all shards live, it shows all
    /// that it knows of: a version that a killed shard had alone, or first, is lost with its blocks.
    fn check_mounts(&mut self) {
        let (coordinated, course) = (self.coordinated, self.current());
        let failed = self.is_coordinated() && self.coordinator.failed().is_some();
        let whole = self.courses[course]
            .partitions
            .iter()
            .all(|&partition| self.life(Node::Partition(partition)) == Life::Live);
        for index in (0..self.clients.len()).filter(|&index| self.clients[index].alive) {
            let client = &self.clients[index];
            let (id, version, state) = (client.id, client.core.version(), client.core.state());
            let (known, said) = (state.version, state.phase);
            self.history.shows(id, version, self.clients[index].front());
            let here = self.clients[index].course == coordinated;
            assert!(
                !failed || !here || said == libmodelio::vocabulary::phase::JobPhase::Failed,
                "client {index} takes the job to be {said}"
            );
            let pulls_all = client.core.pull_report().0 == PullPolicy::Eager;
            let known = if whole && here && pulls_all { known } else { Version(0) };
            assert!(
                version >= known,
                "client {index} shows version {version}, knew {known}, and all shards live"
            );
        }
    }
}
