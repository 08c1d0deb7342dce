//! Pieces of a version, for clients that hold no more of a model.
//!
//! A client reads a version by many requests. Its connection keeps the version between them, or a job that makes versions
//! fast would never let it finish.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::bytes::crc32c::crc32c;
use libmodelio::transport::tally::Flow;
use libmodelio::vocabulary::ids::{Generation, Version};
use libmodelio::vocabulary::strided::Strided;
use libmodelio::wire::{Message, Refusal};

use super::models;
use super::partition::Partition;
use super::shared::Shared;
use super::unsent::AdminAnswer;
use crate::partition::store::{PinnedVersion, pieces};

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
    /// The pieces, one behind the other, or what has changed in them since `base` if that is shorter.
    pub(super) fn gather(&self, base: Option<Version>, parts: &[Strided]) -> AdminAnswer {
        let packed = pieces::packed(&self.version, self.partition.model_bytes(), parts)?;
        let store = self.partition.store();
        let tally = store.tally();
        tally.copied(Flow::Pull, packed.len());
        let since = base.and_then(|base| store.since(base, self.version.version()));
        let patch = since.and_then(|since| pieces::patch_packed(&since, store.partition(), parts, &packed));
        let patched = patch.as_ref().map(|_| crc32c(&packed));
        let answer = patch.unwrap_or(packed);
        tally.moved(Flow::Pull, answer.len());
        Ok((Message::PartBytes { patched }, Some(answer)))
    }
}
