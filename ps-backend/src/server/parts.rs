//! Pieces of a version, for clients that hold no more of a model.
//!
//! A client reads a version by many requests. Its connection keeps the version between them, or a job that makes versions
//! fast would never let it finish.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::transport::tally::Flow;
use libmodelio::vocabulary::ids::{BlockId, Generation, Version};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::vocabulary::strided::Strided;
use libmodelio::wire::{Message, Refusal};

use super::models;
use super::partition::Partition;
use super::shared::Shared;
use super::unsent::AdminAnswer;
use crate::partition::store::PinnedVersion;

/// A connection keeps a version for so long after a request for pieces of it.
const KEPT_FOR: Duration = Duration::from_secs(2);

/// The version that a connection reads pieces of.
#[derive(Default)]
pub(super) struct Reading(Option<(Arc<OfVersion>, Instant)>);

/// A pinned version of a model's blocks here.
pub(super) struct OfVersion {
    partition: Arc<Partition>,
    version: PinnedVersion,
}

impl Reading {
    /// The version, which is kept from now on. One that was kept before is let go of.
    pub(super) fn of(
        &mut self,
        shared: &Shared,
        generation: Generation,
        version: Version,
    ) -> Result<Arc<OfVersion>, Refusal> {
        let until = Instant::now() + KEPT_FOR;
        let partition = models::partition_of(shared, generation)?.1;
        if let Some((kept, at)) = &mut self.0
            && kept.version.version() == version
            && Arc::ptr_eq(&kept.partition, &partition)
        {
            *at = until;
            return Ok(Arc::clone(kept));
        }
        self.0 = None;
        let store = partition.store();
        let newest = || store.versions().last().copied().unwrap_or_default();
        let pinned =
            store.version(version).ok_or_else(|| Refusal::NoVersion { wanted: version, newest: newest() })?;
        let of = Arc::new(OfVersion { partition, version: pinned });
        self.0 = Some((Arc::clone(&of), until));
        Ok(of)
    }

    /// Lets go of a version that nobody has asked for lately. Returns when to call again.
    pub(super) fn until(&mut self, now: Instant) -> Option<Instant> {
        self.0.take_if(|(_, until)| *until <= now);
        self.0.as_ref().map(|(_, until)| *until)
    }
}

impl OfVersion {
    /// The pieces, one behind the other.
    pub(super) fn gather(&self, parts: &[Strided]) -> AdminAnswer {
        let (partition, layout) = (self.partition.store().partition(), self.partition.layout());
        let bytes = Strided::total(parts, self.partition.model_bytes()).ok_or(ShardError::OutOfRange)?;
        // The protocol bounds this.
        let mut packed = Vec::with_capacity(bytes as usize);
        let mut around = (0..0, [].as_slice());
        for piece in parts.iter().flat_map(Strided::pieces) {
            let mut at = piece.start;
            while at < piece.end {
                if !around.0.contains(&at) {
                    let block = BlockId((at / u64::from(layout.block_size())) as u32);
                    let local = partition.local(block).ok_or(Refusal::NotMine { block })?;
                    let (start, bytes) =
                        (u64::from(block.0) * u64::from(layout.block_size()), self.version.block(local));
                    around = (start..start + bytes.len() as u64, bytes);
                }
                let end = piece.end.min(around.0.end);
                let start = around.0.start;
                packed.extend_from_slice(&around.1[(at - start) as usize..(end - start) as usize]);
                at = end;
            }
        }
        let tally = self.partition.store().tally();
        tally.moved(Flow::Pull, packed.len());
        tally.copied(Flow::Pull, packed.len());
        Ok((Message::PartBytes, Some(packed)))
    }
}
