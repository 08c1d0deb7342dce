//! Where a model's blocks are, and by which way each shard is reached: one block map with its shards' addresses.
//! Replaced as a whole when the model moves. Every connection keeps the one that it was opened under, so that what it
//! still says, and its end, mean nothing to those that came after it.

use std::sync::Arc;

use super::memory::TransportChoice;
use crate::block_map::BlockMap;
use crate::client::core::Part;
use crate::ids::{Epoch, ShardId};
use crate::net::Threads;
use crate::shm;
use crate::wire::ShardRecord;

/// A block map, and where its shards are.
pub(super) struct Whereabouts {
    pub(super) epoch: Epoch,
    /// Which part leads the job.
    pub(super) lead: Part,
    /// In the order of the core's parts.
    pub(super) parts: Vec<Place>,
    /// Of connections through shared memory.
    pub(super) threads: Arc<Threads>,
}

/// One shard.
pub(super) struct Place {
    pub(super) record: ShardRecord,
    /// How many blocks it owns.
    pub(super) blocks: u32,
    /// It is reached through shared memory, if that comes about.
    pub(super) by_memory: bool,
    /// Why it must not be reached by the only way there is.
    pub(super) barred: Option<String>,
}

impl Whereabouts {
    /// Of `map`; each shard has up to `connections` for blocks.
    ///
    /// # Errors
    /// For an owner that is not among `shards`.
    pub(super) fn new(
        map: &BlockMap,
        lead: ShardId,
        shards: &[ShardRecord],
        transport: TransportChoice,
        connections: usize,
    ) -> Result<Whereabouts, String> {
        let here = shm::host();
        let place = |(shard, blocks): (ShardId, u32)| {
            let record = shards.iter().find(|record| record.shard == shard);
            let record = record.ok_or_else(|| format!("shard {shard} is not there"))?.clone();
            let is_here = record.host == here;
            let barred = (transport == TransportChoice::SharedMemory && !is_here).then(|| {
                let address = &record.address;
                format!("shard {shard} at {address} is on another host, with no memory in common")
            });
            Ok(Place { record, blocks, by_memory: is_here && transport != TransportChoice::Tcp, barred })
        };
        let parts = map.shares().into_iter().map(place).collect::<Result<Vec<Place>, String>>()?;
        let lead = parts.iter().position(|place| place.record.shard == lead);
        let lead = lead.ok_or("the shard that leads it owns no block of it")?;
        // Connections that end may still be there when those in their place begin.
        let threads = Threads::new(2 * parts.len() * connections);
        Ok(Whereabouts { epoch: map.epoch(), lead, parts, threads })
    }

    pub(super) fn address(&self, part: Part) -> &str {
        &self.parts[part].record.address
    }
}

/// What a connection is for, and the block map that it was opened under.
#[derive(Clone)]
pub(in crate::client) struct Way {
    pub(super) map: Arc<Whereabouts>,
    /// Blocks of this part; none for control.
    pub(super) part: Option<Part>,
    /// Which of its kind, while it is there.
    pub(super) number: usize,
}

impl Way {
    pub(in crate::client) fn epoch(&self) -> Epoch {
        self.map.epoch
    }

    /// Where it leads.
    pub(super) fn address(&self) -> &str {
        self.map.address(self.part.unwrap_or(self.map.lead))
    }
}
