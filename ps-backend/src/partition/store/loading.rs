//! Loading the first version: weights, or all data of another partition.
//!
//! This module holds `unsafe`; the module above explains why it is sound.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use libmodelio::bytes::mmap::Mapping;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::DataKind;

use super::newest::Newest;
use super::places::kept_range;
use super::{PartitionError, PartitionStore, check_block};

/// A thread is loading a part of the block.
const COMING: u8 = 1;
/// The block's weights are there.
const THERE: u8 = 2;

/// The mark of a kind of data.
fn mark_of(what: DataKind) -> u8 {
    match what {
        DataKind::Weights => THERE,
        DataKind::Masters => 4,
        DataKind::Slot(0) => 8,
        DataKind::Slot(_) => 16,
    }
}

impl PartitionStore {
    fn loading(&self) -> Result<Arc<Newest>, PartitionError> {
        self.shared.inner.lock().loading.clone().ok_or(PartitionError::Loaded)
    }

    /// Loads a block of version 0. False, without effect, if it was loaded before or is being loaded.
    ///
    /// # Errors
    /// [`PartitionError::NoBlock`], [`PartitionError::Length`], [`PartitionError::Loaded`].
    pub fn load(&self, block: BlockId, bytes: &[u8]) -> Result<bool, PartitionError> {
        self.load_piece(block, DataKind::Weights, bytes)
    }

    /// Fills all of version 0, whose blocks lie one behind the other in memory. Then it is complete.
    ///
    /// # Errors
    /// The errors of `fill`; [`PartitionError::Loaded`], [`PartitionError::Busy`] while a block is being loaded,
    /// [`PartitionError::Device`].
    pub fn load_whole(&self, fill: impl FnOnce(&Mapping) -> io::Result<()>) -> Result<(), PartitionError> {
        let loading = self.loading()?;
        let mark = |from: u8, to: u8| {
            let set = |mark: &AtomicU8| {
                mark.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            };
            self.shared.loaded.iter().all(set)
        };
        if !mark(0, COMING) {
            return Err(PartitionError::Busy);
        }
        fill(loading.memory())?;
        // SAFETY: the marks make all blocks this thread's, and version 0 is shown only when they are loaded.
        (0..self.layout().blocks()).try_for_each(|block| unsafe { loading.filled(BlockId(block)) })?;
        drop(loading);
        mark(COMING, THERE);
        self.finish_loading()
    }

    /// Whether version 0 is complete.
    pub fn is_loaded(&self) -> bool {
        self.shared.inner.lock().loading.is_none()
    }

    /// Version 0 is complete: it can be read, and plans can begin. A second call does nothing.
    ///
    /// # Errors
    /// [`PartitionError::NotLoaded`] names the first block that has not come. [`PartitionError::Busy`] while a block
    /// that came twice is being handled. [`PartitionError::Memory`] if pages cannot be taken.
    pub fn finish_loading(&self) -> Result<(), PartitionError> {
        self.take_pages()?;
        let mut inner = self.shared.inner.lock();
        let loads_state = inner.loads_state;
        let Some(loading) = &mut inner.loading else { return Ok(()) };
        let is_missing = |(block, mark): &(BlockId, &AtomicU8)| {
            let state = if loads_state { loading.wants(*block) } else { Vec::new() };
            let wanted = state.into_iter().fold(THERE, |marks, what| marks | mark_of(what));
            let mark = mark.load(Ordering::Acquire);
            mark & COMING != 0 || mark & wanted != wanted
        };
        if let Some((missing, _)) = (0..).map(BlockId).zip(&self.shared.loaded).find(is_missing) {
            return Err(PartitionError::NotLoaded(missing));
        }
        if Arc::get_mut(loading).is_none() {
            return Err(PartitionError::Busy);
        }
        inner.loading = None;
        inner.versions.complete();
        Ok(())
    }

    /// Takes the pages of optimizer state that were not loaded, and those of later versions.
    fn take_pages(&self) -> io::Result<()> {
        let memory: Vec<_> = {
            let inner = self.shared.inner.lock();
            inner.loading.iter().flat_map(|_| inner.state.memory()).cloned().collect()
        };
        memory.iter().try_for_each(|memory| memory.prefault())?;
        self.take_later_pages()
    }

    /// Takes the pages of later versions, before version 0 is complete: whoever loads it waits for a disk meanwhile.
    ///
    /// # Errors
    /// ENOMEM when the memory is not there.
    pub fn take_later_pages(&self) -> io::Result<()> {
        let later: Vec<_> = {
            let inner = self.shared.inner.lock();
            inner.loading.iter().flat_map(|_| inner.versions.memory_to_come()).cloned().collect()
        };
        later.iter().try_for_each(|memory| memory.prefault())
    }

    /// The data to load is of this version instead of version 0, with the state of `reducer`. Data that was loaded
    /// before is void.
    ///
    /// # Errors
    /// [`PartitionError::Loaded`], [`PartitionError::Busy`] while a block is being loaded,
    /// [`PartitionError::Memory`], [`PartitionError::Device`].
    pub fn begin_at(&self, version: Version, reducer: Reducer) -> Result<(), PartitionError> {
        let mut inner = self.shared.inner.lock();
        let loading = inner.loading.as_mut().ok_or(PartitionError::Loaded)?;
        if Arc::get_mut(loading).is_none() {
            return Err(PartitionError::Busy);
        }
        inner.loading = None;
        inner.loads_state = true;
        // No thread is loading a block: beginning one takes the lock.
        self.shared.loaded.iter().for_each(|mark| mark.store(0, Ordering::Relaxed));
        inner.versions.begin_at(version);
        for stamp in &inner.state.copies[0].stamps {
            stamp.store(version.0, Ordering::Relaxed);
        }
        let prepared = inner.state.prepare(reducer, false);
        inner.loading = inner.newest(self.layout()).map(Arc::new);
        prepared.map(drop)
    }

    /// The kinds of data of a block that must be loaded in addition to its weights.
    ///
    /// # Errors
    /// [`PartitionError::NoBlock`], [`PartitionError::Loaded`].
    pub fn wants(&self, block: BlockId) -> Result<Vec<DataKind>, PartitionError> {
        check_block(self.layout(), block)?;
        Ok(self.loading()?.wants(block))
    }

    /// Whether a piece of a block was loaded, so that it need not come again.
    pub fn has_loaded(&self, block: BlockId, what: DataKind) -> bool {
        let mark = self.shared.loaded.get(block.index()).map_or(0, |mark| mark.load(Ordering::Acquire));
        mark & mark_of(what) != 0
    }

    /// Loads a piece of another partition's data of a block: its weights first, and then all kinds that
    /// [`Self::wants`] names. Optimizer state without bytes is zero, and masters without bytes are made of the weights.
    /// Returns false, without effect, if the piece was loaded before.
    ///
    /// # Errors
    /// [`PartitionError::NoBlock`], [`PartitionError::Length`], [`PartitionError::State`],
    /// [`PartitionError::Loaded`]; [`PartitionError::NotLoaded`] if the weights have not come,
    /// [`PartitionError::Claimed`] while another piece comes; [`PartitionError::Device`].
    pub fn load_piece(&self, block: BlockId, what: DataKind, bytes: &[u8]) -> Result<bool, PartitionError> {
        check_block(self.layout(), block)?;
        let loading = self.loading()?;
        let place = kept_range(self.layout(), block, what);
        let (expected, got) = ((place.end - place.start) as usize, bytes.len());
        let is_made = got == 0 && what != DataKind::Weights;
        match what {
            DataKind::Weights if got != expected => {
                return Err(PartitionError::Length { block, expected, got });
            }
            DataKind::Weights => {}
            // No reducer needs them here: they are made of the weights when one does.
            DataKind::Masters if (got == expected || is_made) && !loading.wants(block).contains(&what) => {
                return Ok(false);
            }
            _ if loading.wants(block).contains(&what) && (got == expected || is_made) => {}
            _ => return Err(PartitionError::State { block, got }),
        }
        let mark = &self.shared.loaded[block.index()];
        let before = mark.load(Ordering::Relaxed);
        if before & mark_of(what) != 0 {
            return Ok(false);
        }
        if before & (COMING | THERE) == 0 && what != DataKind::Weights {
            return Err(PartitionError::NotLoaded(block));
        }
        if before & COMING != 0
            || mark.compare_exchange(before, before | COMING, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            // The weights are those that come, whoever brings them.
            return if what == DataKind::Weights { Ok(false) } else { Err(PartitionError::Claimed(block)) };
        }
        let loaded = match is_made && what == DataKind::Masters {
            // They came with the weights.
            true => Ok(()),
            // SAFETY: the mark makes the block this thread's, and the version is shown only when all blocks are loaded.
            false => unsafe { loading.load(block, what, bytes) },
        };
        if loaded.is_ok() && !bytes.is_empty() && matches!(what, DataKind::Slot(_)) {
            self.shared.inner.lock().state.slots_used = true;
        }
        // The handle is dropped before the block counts: a thread that sees all blocks loaded finds no other thread
        // at the memory.
        drop(loading);
        let there = if loaded.is_ok() { mark_of(what) } else { 0 };
        mark.store(before | there, Ordering::Release);
        Ok(loaded.map(|()| true)?)
    }
}
