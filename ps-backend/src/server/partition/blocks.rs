//! Sending versions block by block, and reporting to a client which of its blocks are missing.
//!
//! This module holds `unsafe`: it lends memory of versions to connections.

use std::sync::Arc;

use libmodelio::transport::frames::{Link, Outgoing};
use libmodelio::transport::stream::{Guard, Piece};
use libmodelio::transport::tally::Flow;
use libmodelio::vocabulary::block_ranges;
use libmodelio::vocabulary::ids::{BlockId, ClientId, PlanId, Version};
use libmodelio::wire::{Message, Refusal};

use super::Partition;
use crate::partition::store::PinnedVersion;

impl Partition {
    /// The blocks that `client` has not sent yet. None if that is not known yet.
    pub(in crate::server) fn missing(&self, client: ClientId, plan: PlanId) -> Option<Message> {
        let missing = self.state.lock().core.missing(client, plan)?;
        let mine = self.store.partition().blocks();
        let mut blocks = block_ranges::BlockRanges::new();
        for block in missing.ones().map(|block| mine[block].0).take(block_ranges::MAX_RANGES) {
            match blocks.last_mut() {
                Some(last) if last.end == block => last.end += 1,
                _ => blocks.push(block..block + 1),
            }
        }
        Some(Message::Missing { plan, blocks })
    }

    /// A version to read from. `None` if it is not here yet: the connection is woken when it may be.
    pub(in crate::server) fn version(
        &self,
        wanted: Version,
        link: &Link,
    ) -> Result<Option<Arc<PinnedVersion>>, Refusal> {
        if let Some(version) = self.store.version(wanted) {
            return Ok(Some(Arc::new(version)));
        }
        let mut state = self.state.lock();
        let newest = state.core.version();
        if wanted > newest {
            state.wait(link);
            return Ok(None);
        }
        drop(state);
        // The version may have come in between.
        match self.store.version(wanted) {
            Some(version) => Ok(Some(Arc::new(version))),
            None => Err(Refusal::NoVersion { wanted, newest }),
        }
    }

    /// A block of a version, as a payload.
    pub(in crate::server) fn block(&self, version: &Arc<PinnedVersion>, block: BlockId) -> Option<Outgoing> {
        let local = self.store.partition().local(block)?;
        let crc = version.checksum(local);
        let guard = Arc::clone(version) as Guard;
        // SAFETY: a pinned version's bytes do not change, and the guard pins it.
        let piece = unsafe { Piece::new(version.block(local), Some(crc), guard) };
        self.store.tally().moved(Flow::Pull, version.block(local).len());
        let message = Message::Block { version: version.version(), block };
        Some(Outgoing { message, request: 0, epoch: self.epoch, payload: Some(piece) })
    }
}
