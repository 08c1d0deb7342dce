//! The data of this partition for another shard, or for a snapshot. It belongs to the newest version.
//!
//! A running plan does not write it, unless there is one copy of the state: then [`PartitionStore::make`] waits while the
//! data is being read. The next plan would, too, so [`PartitionStore::begin`] refuses it.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::wire::DataKind;
use parking_lot::MutexGuard;

use super::newest::Newest;
use super::pinned::PinnedVersion;
use super::{Inner, PartitionError, PartitionStore, check_block};

/// The newest version with its masters and optimizer state. While this lives, no plan begins, and no state is changed in
/// place.
#[derive(Debug)]
pub struct PinnedState {
    pinned: PinnedVersion,
    newest: Newest,
}

impl PinnedState {
    /// The version.
    pub fn version(&self) -> Version {
        self.pinned.version()
    }

    /// The data of a block of the partition, copied from a device if it is there. It is empty if the block has none of
    /// that kind.
    ///
    /// # Errors
    /// [`PartitionError::NoBlock`], [`PartitionError::Device`].
    pub fn bytes(&self, block: BlockId, what: DataKind) -> Result<Cow<'_, [u8]>, PartitionError> {
        check_block(self.pinned.shared.partition.layout(), block)?;
        Ok(self.newest.bytes(block, what)?)
    }
}

impl Drop for PinnedState {
    fn drop(&mut self) {
        self.pinned.shared.inner.lock().readers -= 1;
    }
}

/// The longest wait for a version that is being made in place.
const MADE_WITHIN: Duration = Duration::from_secs(30);
/// The pause before the next look.
const CHECK_PAUSE: Duration = Duration::from_millis(1);

impl PartitionStore {
    /// A handle on the data of the newest version. If state is being changed in place, it waits for that.
    ///
    /// # Errors
    /// [`PartitionError::Loading`]; [`PartitionError::Busy`] if that takes too long.
    pub fn keep(&self) -> Result<PinnedState, PartitionError> {
        self.keep_instead_of(None)
    }

    /// Like [`Self::keep`], and drops another handle. No plan begins in between.
    ///
    /// # Errors
    /// The errors of [`Self::keep`].
    pub fn keep_instead_of(&self, before: Option<PinnedState>) -> Result<PinnedState, PartitionError> {
        self.shared.inner.lock().coming_readers += 1;
        drop(before);
        let deadline = Instant::now() + MADE_WITHIN;
        loop {
            let mut inner = self.shared.inner.lock();
            let waits = inner.making && Instant::now() < deadline;
            if !waits {
                inner.coming_readers -= 1;
                return self.keep_now(inner);
            }
            drop(inner);
            std::thread::sleep(CHECK_PAUSE);
        }
    }

    fn keep_now(&self, mut inner: MutexGuard<'_, Inner>) -> Result<PinnedState, PartitionError> {
        if inner.making {
            return Err(PartitionError::Busy);
        }
        let pinned = PinnedVersion::of(&self.shared, &mut inner, None);
        let (pinned, newest) = pinned.zip(inner.newest(self.layout())).ok_or(PartitionError::Loading)?;
        inner.readers += 1;
        Ok(PinnedState { pinned, newest })
    }
}
