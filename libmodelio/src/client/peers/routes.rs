//! The routes: one block map, with the address of each shard and the path to it.
//!
//! They are replaced as a whole when the model moves. Each connection keeps the routes that it was opened under. Its
//! messages and its end therefore do not affect later connections.

use std::sync::Arc;

use crate::client::options::TransportChoice;
use crate::client::peers::fallback::FastPath;
use crate::transport::shm;
use crate::transport::shm::Threads;
use crate::transport::stream::Close;
use crate::vocabulary::block_map::{BlockMap, PartitionIndex};
use crate::vocabulary::ids::{Epoch, ShardId};
use crate::wire::{Role, ShardRecord};

/// A block map, with its shards.
pub(in crate::client) struct Routes {
    pub(in crate::client) epoch: Epoch,
    /// The shard that coordinates the job.
    pub(in crate::client) coordinator: PartitionIndex,
    /// The routes to the shards, by [`PartitionIndex`].
    pub(in crate::client) partitions: Vec<ShardRoute>,
    /// The threads of connections through shared memory.
    pub(in crate::client) threads: Arc<Threads>,
}

/// The route to one shard.
pub(in crate::client) struct ShardRoute {
    pub(in crate::client) record: ShardRecord,
    /// The number of blocks that it owns.
    pub(in crate::client) blocks: u32,
    /// Its blocks, as runs.
    pub(in crate::client) owned: Vec<std::ops::Range<u32>>,
    /// The path to it that is better than TCP, if there may be one.
    pub(in crate::client) fast: Option<FastPath>,
    /// Why the only path to it is forbidden.
    pub(in crate::client) barred: Option<String>,
}

impl Routes {
    /// The routes of `map`. Each shard has up to `connections` for blocks.
    ///
    /// # Errors
    /// When an owner is not among `shards`.
    pub(in crate::client) fn new(
        map: &BlockMap,
        coordinator: ShardId,
        shards: &[ShardRecord],
        transport: TransportChoice,
        connections: usize,
    ) -> Result<Routes, String> {
        let here = shm::host();
        let place = |(shard, blocks): (ShardId, u32)| {
            let record = shards.iter().find(|record| record.shard == shard);
            let record = record.ok_or_else(|| format!("shard {shard} is not there"))?.clone();
            let is_here = record.host == here;
            let address = &record.address;
            let barred = match transport {
                TransportChoice::SharedMemory if !is_here => {
                    Some(format!("shard {shard} at {address} is on another host, with no memory in common"))
                }
                TransportChoice::Rdma if record.rdma.is_empty() => Some(format!(
                    "shard {shard} at {address} takes no RDMA connections (start it with --rdma on)"
                )),
                _ => None,
            };
            let fast = match transport {
                TransportChoice::SharedMemory => Some(FastPath::SharedMemory),
                TransportChoice::Rdma => Some(FastPath::Rdma),
                TransportChoice::Tcp => None,
                TransportChoice::Auto if is_here => Some(FastPath::SharedMemory),
                TransportChoice::Auto => (!record.rdma.is_empty()).then_some(FastPath::Rdma),
            };
            Ok(ShardRoute { record, blocks, owned: runs(map, shard), fast, barred })
        };
        let partitions = map.shares().into_iter().map(place).collect::<Result<Vec<ShardRoute>, String>>()?;
        let coordinator = partitions.iter().position(|place| place.record.shard == coordinator);
        let coordinator = coordinator.ok_or("the shard that coordinates it owns no block of it")?;
        // Old connections may still exist when new ones begin.
        let threads = Threads::new(2 * partitions.len() * connections);
        Ok(Routes { epoch: map.epoch(), coordinator, partitions, threads })
    }

    /// The routes to a shard in this process, which need no connection.
    pub(in crate::client) fn here(epoch: Epoch) -> Routes {
        Routes { epoch, coordinator: 0, partitions: Vec::new(), threads: Threads::new(0) }
    }

    pub(in crate::client) fn address(&self, partition: PartitionIndex) -> &str {
        &self.partitions[partition].record.address
    }
}

/// A shard's blocks, as runs.
fn runs(map: &BlockMap, shard: ShardId) -> Vec<std::ops::Range<u32>> {
    let mut runs: Vec<std::ops::Range<u32>> = Vec::new();
    for block in map.blocks_of(shard) {
        match runs.last_mut() {
            Some(run) if run.end == block.0 => run.end += 1,
            _ => runs.push(block.0..block.0 + 1),
        }
    }
    runs
}

/// The purpose of a connection, and its routes.
#[derive(Clone)]
pub(in crate::client) struct Route {
    pub(in crate::client) routes: Arc<Routes>,
    /// [`Role::Control`] to the coordinator, [`Role::Data`], or [`Role::Relay`].
    pub(in crate::client) role: Role,
    /// The partition that it leads to.
    pub(in crate::client) partition: PartitionIndex,
    /// Its number among connections of its kind. It is free again when the connection has ended.
    pub(in crate::client) number: usize,
    /// The address of the relay, if it leads to one.
    pub(in crate::client) relay: Option<Arc<str>>,
}

impl Route {
    pub(in crate::client) fn epoch(&self) -> Epoch {
        self.routes.epoch
    }

    /// The address that it leads to.
    pub(in crate::client) fn address(&self) -> &str {
        self.relay.as_deref().unwrap_or_else(|| self.routes.address(self.partition))
    }
}

/// The reason for ending a connection that was opened under an older map.
pub(in crate::client) fn overtaken() -> Close {
    Close::Asked("the model has moved".into())
}
