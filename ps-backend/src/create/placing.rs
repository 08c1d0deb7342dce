//! Which shards a new model gets: those that have room for their part, and of these the ones that hold the least.
//! Pure: what the shards say goes in.

use libmodelio::wire::ShardRecord;
use serde::Deserialize;

/// A shard that takes models.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    /// Its record.
    pub record: ShardRecord,
    /// What it says of itself; `None` if it gave no answer in time.
    pub standing: Option<Standing>,
}

/// The part of a shard's status that decides about its place.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Standing {
    /// Bytes of memory that it can still take, if its system tells.
    #[serde(default)]
    pub memory_available: Option<u64>,
    /// Its partitions.
    pub models: Vec<PartitionBytes>,
}

/// A partition that a shard has.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct PartitionBytes {
    /// Bytes of its blocks.
    pub bytes: u64,
}

impl Candidate {
    /// Whether it has room for `needed` bytes. A shard whose memory nobody knows says so itself, when it is asked to
    /// take the model.
    fn has_room(&self, needed: u64) -> bool {
        let available = self.standing.as_ref().and_then(|standing| standing.memory_available);
        available.is_none_or(|available| needed <= available)
    }

    /// The less, the better. A shard that does not answer comes last.
    fn load(&self) -> (bool, u64, usize) {
        let held = |standing: &Standing| {
            standing.models.iter().fold(0, |sum: u64, model| sum.saturating_add(model.bytes))
        };
        match &self.standing {
            Some(standing) => (false, held(standing), standing.models.len()),
            None => (true, 0, 0),
        }
    }
}

/// The shards for a model that takes `needed` bytes on all of them together: `wanted`, or as many as answer and have
/// room for their part, and at most `most`. The first one is to coordinate it. Shards that are alike are taken in their
/// order. Where too few have room, shards without room are among the chosen ones, and say so when they are asked. So
/// are those that do not answer, where no others can take the model.
pub(super) fn choose(
    mut candidates: Vec<Candidate>,
    wanted: Option<usize>,
    most: usize,
    needed: u64,
) -> Vec<ShardRecord> {
    let part = |shards: usize| needed.div_ceil(shards.max(1) as u64);
    let all = candidates.len().min(most);
    let fits = |shards: &usize| {
        let can_take = |one: &&Candidate| one.standing.is_some() && one.has_room(part(*shards));
        candidates.iter().filter(can_take).count() >= *shards
    };
    let shards = wanted.unwrap_or_else(|| (1..=all).rev().find(fits).unwrap_or(all)).min(all);
    candidates.sort_by_key(|candidate| (!candidate.has_room(part(shards)), candidate.load()));
    candidates.into_iter().take(shards).map(|candidate| candidate.record).collect()
}

#[cfg(test)]
mod tests {
    use libmodelio::vocabulary::ids::ShardId;

    use super::*;

    /// A shard with so much memory left, and with partitions of so many bytes.
    fn shard(number: u16, memory_available: u64, held: &[u64]) -> Candidate {
        let models = held.iter().map(|&bytes| PartitionBytes { bytes }).collect();
        let record = ShardRecord {
            shard: ShardId(number),
            address: format!("node{number}:7070"),
            host: String::new(),
            draining: false,
            rdma: String::new(),
        };
        Candidate { record, standing: Some(Standing { memory_available: Some(memory_available), models }) }
    }

    fn silent(number: u16) -> Candidate {
        Candidate { standing: None, ..shard(number, 0, &[]) }
    }

    fn chosen(candidates: &[Candidate], wanted: Option<usize>, most: usize, needed: u64) -> Vec<u16> {
        let chosen = choose(candidates.to_vec(), wanted, most, needed);
        chosen.into_iter().map(|record| record.shard.0).collect()
    }

    #[test]
    fn new_models_go_to_shards_with_room_and_little_load() {
        let alike = [shard(1, 100, &[]), shard(2, 100, &[]), shard(3, 100, &[])];
        assert_eq!(chosen(&alike, Some(1), 9, 10), [1], "in their order");
        let loaded = [shard(1, 100, &[5, 5]), shard(2, 100, &[10]), shard(3, 100, &[20])];
        assert_eq!(chosen(&loaded, Some(1), 9, 10), [2], "as many bytes, fewer models");
        assert_eq!(chosen(&loaded, Some(3), 9, 10), [2, 1, 3], "the least loaded one coordinates");
        let full = [shard(1, 9, &[]), shard(2, 100, &[50]), shard(3, 10, &[70])];
        assert_eq!(chosen(&full, Some(1), 9, 10), [2]);
        assert_eq!(chosen(&full, Some(2), 9, 20), [2, 3]);
        assert_eq!(chosen(&full, Some(3), 9, 60), [2, 1, 3], "who has no room says so when it is asked");
    }

    #[test]
    fn without_a_number_a_model_is_striped_over_all_shards_with_room() {
        let shards = [shard(1, 20, &[]), shard(2, 100, &[]), shard(3, 100, &[])];
        assert_eq!(chosen(&shards, None, 9, 60), [1, 2, 3]);
        assert_eq!(chosen(&shards, None, 9, 90), [2, 3], "a third of it does not fit on the first");
        assert_eq!(chosen(&shards, None, 1, 90), [2], "of one block");
        assert_eq!(chosen(&shards, None, 9, 1_000), [1, 2, 3], "none has room: they say so");
    }

    #[test]
    fn a_shard_that_does_not_answer_comes_last() {
        let shards = [silent(1), shard(2, 100, &[90])];
        assert_eq!(chosen(&shards, Some(1), 9, 10), [2]);
        assert_eq!(chosen(&shards, None, 9, 10), [2], "the other one can take the model");
        assert_eq!(chosen(&shards, Some(2), 9, 10), [2, 1], "it may answer yet");
        assert_eq!(chosen(&shards, None, 9, 1_000), [1, 2], "none has room: they say so");
        assert_eq!(chosen(&shards[..1], None, 9, 10), [1], "there is no other");
    }
}
