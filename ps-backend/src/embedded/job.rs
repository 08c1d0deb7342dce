//! The shard as a mount sees it: the whole job is in this process, and so is every answer.
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use libmodelio::transport::{Attached, Region, ShardError};
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::{LearnerId, Version};
use libmodelio::vocabulary::layout::ModelLayout;

use super::EmbeddedShard;
use crate::core::LastCommit;
use crate::job::{Job, JobStatus, Listener, SetDone, SetError, VersionMemory, VersionView};
use crate::region_store::VersionBuffer;

impl VersionMemory for VersionBuffer {
    fn region(&self) -> &Region {
        VersionBuffer::region(self)
    }

    fn bytes(&self, range: Range<u64>) -> &[u8] {
        VersionBuffer::bytes(self, range)
    }
}

impl Job for EmbeddedShard {
    fn layout(&self) -> &Arc<ModelLayout> {
        EmbeddedShard::layout(self)
    }

    fn version(&self) -> Version {
        EmbeddedShard::version(self)
    }

    fn pin(&self, version: Version) -> bool {
        EmbeddedShard::pin(self, version)
    }

    fn unpin(&self, version: Version, count: u64) {
        EmbeddedShard::unpin(self, version, count);
    }

    fn get(&self, version: Version) -> Option<VersionView> {
        let (memory, published) = EmbeddedShard::get(self, version)?;
        Some(VersionView { memory, published })
    }

    fn versions(&self) -> Vec<Version> {
        EmbeddedShard::versions(self)
    }

    fn retained(&self) -> Vec<Version> {
        EmbeddedShard::retained(self)
    }

    fn controls(&self) -> Controls {
        EmbeddedShard::controls(self)
    }

    fn set_control(&self, name: &str, value: &str, _timeout: Duration, done: SetDone) {
        done(EmbeddedShard::set_control(self, name, value).map_err(SetError::Refused));
    }

    fn may_assign(&self) -> Result<(), ShardError> {
        EmbeddedShard::may_assign(self)
    }

    fn check_finite(&self, buffer: &Region, written: &[Range<u64>]) -> Result<(), ShardError> {
        EmbeddedShard::check_finite(self, buffer, written)
    }

    fn has_learner(&self, learner: LearnerId) -> bool {
        EmbeddedShard::has_learner(self, learner)
    }

    fn last_commit(&self, learner: LearnerId) -> LastCommit {
        EmbeddedShard::last_commit(self, learner)
    }

    fn touch(&self, learner: LearnerId, attached: Option<Attached>) {
        EmbeddedShard::touch(self, learner, attached);
    }

    fn status(&self) -> JobStatus {
        EmbeddedShard::status(self)
    }

    fn subscribe(&self, listener: Listener) {
        EmbeddedShard::subscribe(self, listener);
    }

    fn shut_down(&self) {
        EmbeddedShard::shut_down(self);
    }
}
