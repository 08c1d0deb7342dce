//! The data of this partition for another shard, and the data that a new partition is made of.
//!
//! This module holds `unsafe`; the module above explains why it is sound. The data belongs to the newest version. A
//! running plan does not write it, unless there is one copy of the state: then [`PartitionStore::make`] waits while the
//! data is being read. The next plan would, too, so [`PartitionStore::begin`] refuses it.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::Kept;
use parking_lot::MutexGuard;

use super::{COMING, Inner, PartitionError, PartitionStore, StoreShared, THERE, mark_of};
use crate::region_store::Keeping;

/// The newest version with its masters and optimizer state. While this lives, no plan begins, and no state is changed in
/// place.
#[derive(Debug)]
pub struct KeptState {
    shared: Arc<StoreShared>,
    keeping: Keeping,
    version: Version,
}

impl KeptState {
    /// The version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The data of a block of the partition, copied from a device if it is there. It is empty if the block has none of
    /// that kind.
    ///
    /// # Errors
    /// [`PartitionError::NoBlock`], [`PartitionError::Device`].
    pub fn bytes(&self, block: BlockId, what: Kept) -> Result<Cow<'_, [u8]>, PartitionError> {
        let blocks = self.shared.partition.layout().blocks();
        if block.0 >= blocks {
            return Err(PartitionError::NoBlock { block, blocks });
        }
        Ok(self.keeping.bytes(block, what)?)
    }
}

impl Drop for KeptState {
    fn drop(&mut self) {
        let mut inner = self.shared.inner.lock();
        inner.store.unpin(self.version, 1);
        inner.readers -= 1;
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
    pub fn keep(&self) -> Result<KeptState, PartitionError> {
        self.keep_instead_of(None)
    }

    /// Like [`Self::keep`], and drops another handle. No plan begins in between.
    ///
    /// # Errors
    /// The errors of [`Self::keep`].
    pub fn keep_instead_of(&self, before: Option<KeptState>) -> Result<KeptState, PartitionError> {
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

    fn keep_now(&self, mut inner: MutexGuard<'_, Inner>) -> Result<KeptState, PartitionError> {
        if inner.loading.is_some() {
            return Err(PartitionError::Loading);
        }
        if inner.making {
            return Err(PartitionError::Busy);
        }
        let version = inner.store.versions().next_back().ok_or(PartitionError::Loading)?;
        let keeping = inner.store.keeping().ok_or(PartitionError::Loading)?;
        inner.store.pin(version);
        inner.readers += 1;
        Ok(KeptState { shared: Arc::clone(&self.shared), keeping, version })
    }

    /// The data to load is of this version instead of version 0, with the state of `reducer`. Data that was loaded
    /// before is void.
    ///
    /// # Errors
    /// [`PartitionError::Loaded`], [`PartitionError::Busy`] while a block is being loaded,
    /// [`PartitionError::Memory`], [`PartitionError::Device`].
    pub fn begin_at(&self, version: Version, reducer: Reducer) -> Result<(), PartitionError> {
        let mut inner = self.shared.inner.lock();
        let loading = inner.loading.take().ok_or(PartitionError::Loaded)?;
        if let Err(loading) = Arc::try_unwrap(loading).map(drop) {
            inner.loading = Some(loading);
            return Err(PartitionError::Busy);
        }
        inner.loads_state = true;
        // No thread is loading a block: beginning one takes the lock.
        self.shared.loaded.iter().for_each(|mark| mark.store(0, Ordering::Relaxed));
        inner.store.begin_at(version);
        let prepared = inner.store.prepare(reducer, false);
        inner.loading = inner.store.loading().map(Arc::new);
        Ok(prepared?)
    }

    /// The kinds of data of a block that must be loaded in addition to its weights.
    ///
    /// # Errors
    /// [`PartitionError::NoBlock`], [`PartitionError::Loaded`].
    pub fn wants(&self, block: BlockId) -> Result<Vec<Kept>, PartitionError> {
        let blocks = self.layout().blocks();
        if block.0 >= blocks {
            return Err(PartitionError::NoBlock { block, blocks });
        }
        let loading = self.shared.inner.lock().loading.clone().ok_or(PartitionError::Loaded)?;
        Ok(loading.wants(block))
    }

    /// Loads a piece of another partition's data of a block: its weights first, and then all kinds that
    /// [`Self::wants`] names. Optimizer state without bytes is zero. Returns false, without effect, if the piece was
    /// loaded before.
    ///
    /// # Errors
    /// [`PartitionError::NoBlock`], [`PartitionError::Length`], [`PartitionError::State`],
    /// [`PartitionError::Loaded`]; [`PartitionError::NotLoaded`] if the weights have not come,
    /// [`PartitionError::Claimed`] while another piece comes; [`PartitionError::Device`].
    pub fn load_piece(&self, block: BlockId, what: Kept, bytes: &[u8]) -> Result<bool, PartitionError> {
        if what == Kept::Weights {
            return self.load(block, bytes);
        }
        let wanted = self.wants(block)?.contains(&what);
        let loading = self.shared.inner.lock().loading.clone().ok_or(PartitionError::Loaded)?;
        if !wanted || !loading.fits(block, what, bytes) {
            return Err(PartitionError::State { block, got: bytes.len() });
        }
        let mark = &self.shared.loaded[block.index()];
        let before = mark.load(Ordering::Relaxed);
        if before & mark_of(what) != 0 {
            return Ok(false);
        }
        if before & COMING != 0 {
            return Err(PartitionError::Claimed(block));
        }
        if before & THERE == 0 {
            return Err(PartitionError::NotLoaded(block));
        }
        if mark.compare_exchange(before, before | COMING, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return Err(PartitionError::Claimed(block));
        }
        // SAFETY: the mark makes the block this thread's, and the version is shown only when all blocks are loaded.
        let loaded = unsafe { loading.load_state(block, what, bytes) };
        if let Err(error) = loaded {
            mark.store(before, Ordering::Release);
            return Err(error.into());
        }
        if matches!(what, Kept::Slot(_)) && !bytes.is_empty() {
            self.shared.inner.lock().store.state_loaded();
        }
        drop(loading);
        mark.store(before | mark_of(what), Ordering::Release);
        Ok(true)
    }
}
