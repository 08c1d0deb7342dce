//! What has changed from one version to another, as the shards know it.

use std::time::{Duration, Instant};

use super::Job;
use crate::admin::{AdminError, AdminPeer};
use crate::bytes::block::span;
use crate::bytes::changes::{Changed, decode_blocks};
use crate::vocabulary::ids::{BlockId, Version};
use crate::wire::{Message, Refusal};

/// The pause before a shard is asked again that is behind.
const AGAIN: Duration = Duration::from_millis(20);

/// Why it is not known what has changed.
#[derive(Debug, thiserror::Error)]
pub enum ChangesError {
    /// The shards have no record of it, or none any more.
    #[error(
        "the shards have no record of it (they keep it of control/changes versions, as far as a tenth of the bytes of the model goes)"
    )]
    Unknown,
    /// A shard cannot be asked, or answers with something else.
    #[error(transparent)]
    Asking(#[from] AdminError),
    /// The shards have not answered for all blocks. The model may be moving.
    #[error("the shards have not answered for all blocks: try again")]
    Incomplete,
}

impl Job {
    /// What has changed in each block after `base` until `version`. Asks all shards of the model, one after the other, and
    /// waits until `deadline` at most.
    ///
    /// # Errors
    /// [`ChangesError`].
    pub fn changed_since(
        &self,
        base: Version,
        version: Version,
        deadline: Instant,
    ) -> Result<Vec<Changed>, ChangesError> {
        if let Some(local) = self.shared.shards.local() {
            return local.shard.changed_since(base, version).ok_or(ChangesError::Unknown);
        }
        let mut all = vec![None; self.layout().blocks() as usize];
        for address in self.shards().into_iter().filter_map(|shard| shard.address) {
            self.ask_shard(&address, (base, version), deadline, &mut all)?;
        }
        all.into_iter().collect::<Option<Vec<_>>>().ok_or(ChangesError::Incomplete)
    }

    fn ask_shard(
        &self,
        address: &str,
        (base, version): (Version, Version),
        deadline: Instant,
        all: &mut [Option<Changed>],
    ) -> Result<(), ChangesError> {
        let (layout, generation) = (self.layout(), self.generation());
        let len =
            |block: BlockId| (block.0 < layout.blocks()).then(|| span(&layout.block_bytes(block)).len());
        let mut peer = AdminPeer::connect(address, deadline)?;
        let mut next = Some(BlockId(0));
        while let Some(first) = next {
            let ask = Message::ChangedSince { generation, base, version, first };
            let payload = match peer.request(&ask, &[], deadline) {
                Ok((Message::ChangedBlocks { next: after }, payload)) => {
                    // Every answer goes on, so that a peer that errs is not asked for ever.
                    next = after.filter(|after| *after > first);
                    payload
                }
                // A client may show a version before its shards know that it counts.
                Err(AdminError::Refusal(Refusal::NoVersion { newest, .. }))
                    if newest < version && Instant::now() + AGAIN < deadline =>
                {
                    std::thread::sleep(AGAIN);
                    continue;
                }
                Err(AdminError::Refusal(Refusal::NoVersion { .. })) => return Err(ChangesError::Unknown),
                Ok(_) => return Err(ChangesError::Incomplete),
                Err(error) => return Err(error.into()),
            };
            let blocks = decode_blocks(&payload, len).map_err(|_| ChangesError::Incomplete)?;
            for (block, changed) in blocks {
                all[block.index()] = Some(changed);
            }
        }
        Ok(())
    }
}
