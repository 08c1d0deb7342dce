//! Where a model's blocks are, and by which way each shard is reached: one block map with its shards' addresses.
//! Replaced as a whole when the model moves. Every connection keeps the one that it was opened under, so that what it
//! still says, and its end, mean nothing to those that came after it.

use std::sync::Arc;

use super::fallback::FastPath;
use super::options::TransportChoice;
use crate::client::core::Part;
use crate::transport::shm;
use crate::transport::shm::Threads;
use crate::transport::stream::Close;
use crate::vocabulary::block_map::BlockMap;
use crate::vocabulary::ids::{Epoch, ShardId};
use crate::wire::{Role, ShardRecord};

/// A block map, and where its shards are.
pub(super) struct Routes {
    pub(super) epoch: Epoch,
    /// Which part coordinates the job.
    pub(super) coordinator: Part,
    /// In the order of the core's parts.
    pub(super) parts: Vec<ShardRoute>,
    /// Of connections through shared memory.
    pub(super) threads: Arc<Threads>,
}

/// One shard.
pub(super) struct ShardRoute {
    pub(super) record: ShardRecord,
    /// How many blocks it owns.
    pub(super) blocks: u32,
    /// Those, as runs.
    #[cfg(feature = "rdma")]
    pub(super) owned: Vec<std::ops::Range<u32>>,
    /// By which path better than TCP it is reached, if that comes about.
    pub(super) fast: Option<FastPath>,
    /// Why it must not be reached by the only way there is.
    pub(super) barred: Option<String>,
}

impl Routes {
    /// Of `map`; each shard has up to `connections` for blocks.
    ///
    /// # Errors
    /// For an owner that is not among `shards`.
    pub(super) fn new(
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
            Ok(ShardRoute {
                record,
                blocks,
                #[cfg(feature = "rdma")]
                owned: runs(map, shard),
                fast,
                barred,
            })
        };
        let parts = map.shares().into_iter().map(place).collect::<Result<Vec<ShardRoute>, String>>()?;
        let coordinator = parts.iter().position(|place| place.record.shard == coordinator);
        let coordinator = coordinator.ok_or("the shard that coordinates it owns no block of it")?;
        // Connections that end may still be there when those in their place begin.
        let threads = Threads::new(2 * parts.len() * connections);
        Ok(Routes { epoch: map.epoch(), coordinator, parts, threads })
    }

    /// Of a shard in this process, which no connection leads to.
    pub(super) fn here(epoch: Epoch) -> Routes {
        Routes { epoch, coordinator: 0, parts: Vec::new(), threads: Threads::new(0) }
    }

    pub(super) fn address(&self, part: Part) -> &str {
        &self.parts[part].record.address
    }
}

/// The blocks of a shard, as runs.
#[cfg(feature = "rdma")]
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

/// What a connection is for, and the routes that it was opened under.
#[derive(Clone)]
pub(super) struct Route {
    pub(super) routes: Arc<Routes>,
    /// [`Role::Control`] to the coordinator, or [`Role::Data`].
    pub(super) role: Role,
    /// To whom.
    pub(super) part: Part,
    /// Which of its kind, while it is there.
    pub(super) number: usize,
}

impl Route {
    pub(super) fn epoch(&self) -> Epoch {
        self.routes.epoch
    }

    /// Where it leads.
    pub(super) fn address(&self) -> &str {
        self.routes.address(self.part)
    }
}

/// Why a connection ends that was opened under an older map.
pub(super) fn overtaken() -> Close {
    Close::Asked("the model has moved".into())
}
