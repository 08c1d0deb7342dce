//! The two sums of each block: the sealed one, of concluded plans, and the open one, of the running plan.
//!
//! This module holds `unsafe`; the module above explains why it is sound.
//!
//! There are two accumulators, and each block has a mark for which of them is the open one. So changing the mark
//! makes a plan's sum part of the sealed sum. Bytes must be added only if both accumulators hold something.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::surplus::UNUSED_FOR;
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::vocabulary::ranges;
use parking_lot::Mutex;

use super::accumulator::Accumulator;

/// Set if the block's open sum is in the second accumulator.
const TURNED: u8 = 1;
/// The block has a sealed sum.
const SEALED: u8 = 2;

/// A block's marks are read and written only by the thread that has claimed it, and by the store between jobs.
#[derive(Debug)]
pub(super) struct Sums {
    layout: Arc<ModelLayout>,
    accumulators: [Accumulator; 2],
    /// Whether each accumulator has memory.
    used: [AtomicBool; 2],
    /// The number of versions that were made since each accumulator was last used.
    idle: [AtomicU32; 2],
    /// Whether bytes that are not reduced were ever kept.
    raw: AtomicBool,
    blocks: Box<[AtomicU8]>,
    /// Where values replace each other, the written ranges of blocks of which an accumulator does not hold all. Most
    /// blocks have no entry.
    partly: [Mutex<BTreeMap<BlockId, Vec<Range<u32>>>>; 2],
    /// Whether there is any entry.
    any_partly: AtomicBool,
}

impl Sums {
    /// Two empty sums. They take only address space.
    pub(super) fn new(layout: Arc<ModelLayout>) -> io::Result<Sums> {
        let accumulators = [Accumulator::new(&layout)?, Accumulator::new(&layout)?];
        let blocks = (0..layout.blocks()).map(|_| AtomicU8::new(0)).collect();
        let (keeps_raw, any_partly) = (AtomicBool::new(false), AtomicBool::new(false));
        let (used, idle, partly) = Default::default();
        Ok(Sums { layout, accumulators, used, idle, raw: keeps_raw, blocks, partly, any_partly })
    }

    fn note(&self, block: BlockId) -> u8 {
        self.blocks[block.index()].load(Ordering::Relaxed)
    }

    fn open_at(&self, block: BlockId) -> usize {
        usize::from(self.note(block) & TURNED)
    }

    /// The ranges of `block` that the open sum holds, if it does not hold everything.
    pub(super) fn open_written(&self, block: BlockId) -> Option<Vec<Range<u32>>> {
        self.written(self.open_at(block), block)
    }

    /// The ranges of `block` that the sealed sum holds, if it does not hold everything.
    pub(super) fn sealed_written(&self, block: BlockId) -> Option<Vec<Range<u32>>> {
        self.written(1 - self.open_at(block), block)
    }

    fn written(&self, at: usize, block: BlockId) -> Option<Vec<Range<u32>>> {
        if !self.any_partly.load(Ordering::Relaxed) {
            return None;
        }
        self.partly[at].lock().get(&block).cloned()
    }

    /// The open sum now holds the `written` ranges of `block`, or all of it. If it `held` something before, it holds
    /// that, too.
    pub(super) fn holds_too(&self, block: BlockId, held: bool, written: Option<&[Range<u32>]>) {
        self.note_written(self.open_at(block), block, held, written);
    }

    fn note_written(&self, at: usize, block: BlockId, held: bool, written: Option<&[Range<u32>]>) {
        if written.is_none() && !self.any_partly.load(Ordering::Relaxed) {
            return;
        }
        self.any_partly.store(true, Ordering::Relaxed);
        let mut partly = self.partly[at].lock();
        match (written, partly.get_mut(&block)) {
            (Some(written), Some(there)) if held => {
                written.iter().for_each(|range| ranges::insert(there, range.clone()));
            }
            // The sum already holds everything.
            (Some(_), None) if held => {}
            (Some(written), _) => drop(partly.insert(block, written.to_vec())),
            (None, _) => drop(partly.remove(&block)),
        }
    }

    /// The accumulator of the running plan.
    pub(super) fn open(&self, block: BlockId) -> &Accumulator {
        let at = self.open_at(block);
        if !self.used[at].load(Ordering::Relaxed) {
            self.used[at].store(true, Ordering::Relaxed);
        }
        if self.idle[at].load(Ordering::Relaxed) != 0 {
            self.idle[at].store(0, Ordering::Relaxed);
        }
        &self.accumulators[at]
    }

    /// The memory of both.
    pub(super) fn memory(&self) -> [&Arc<Mapping>; 2] {
        self.accumulators.each_ref().map(Accumulator::memory)
    }

    /// From now on, bytes that are not reduced are kept, too.
    pub(super) fn keep_raw(&self) {
        self.raw.store(true, Ordering::Relaxed);
    }

    /// The sum of concluded plans.
    pub(super) fn sealed(&self, block: BlockId) -> Option<&Accumulator> {
        let note = self.note(block);
        (note & SEALED != 0).then(|| &self.accumulators[1 - usize::from(note & TURNED)])
    }

    /// The open sum becomes the sealed one. The old sealed sum is dropped.
    pub(super) fn seal(&self, block: BlockId) {
        self.blocks[block.index()].store((self.note(block) ^ TURNED) | SEALED, Ordering::Relaxed);
    }

    /// Merges the open sum of `block` into the sealed one, if there is one: adds it, or with `assign` replaces the
    /// written ranges.
    ///
    /// # Safety
    /// Nobody else may use the block's sums meanwhile.
    pub(super) unsafe fn merge(&self, block: BlockId) {
        let Some(sealed) = self.sealed(block) else { return };
        let written = self.open_written(block);
        // SAFETY: the caller is alone with the block.
        unsafe {
            match &written {
                Some(written) => sealed.overlay_from(&self.layout, block, self.open(block), written),
                None => sealed.add(&self.layout, block, self.open(block)),
            }
        }
        if written.is_some() {
            self.note_written(1 - self.open_at(block), block, true, written.as_deref());
        }
    }

    /// Drops all sums. Every version begins with the first accumulator, so the second one is not touched unless it is
    /// needed. The memory of an accumulator that no plan has needed for some versions goes back to the system.
    pub(super) fn clear(&self) {
        if self.any_partly.swap(false, Ordering::Relaxed) {
            self.partly.iter().for_each(|partly| partly.lock().clear());
        }
        for note in &self.blocks {
            note.store(0, Ordering::Relaxed);
        }
        for (at, idle) in self.idle.iter().enumerate() {
            let versions = idle.load(Ordering::Relaxed) + 1;
            idle.store(versions.min(UNUSED_FOR + 1), Ordering::Relaxed);
            if versions > UNUSED_FOR
                && self.used[at].load(Ordering::Relaxed)
                && self.accumulators[at].give_back()
            {
                self.used[at].store(false, Ordering::Relaxed);
            }
        }
    }

    /// The bytes that are taken from the system.
    pub(super) fn taken(&self) -> u64 {
        self.accumulators.iter().map(Accumulator::taken).sum()
    }

    /// The size of the accumulators that were ever used.
    pub(super) fn bytes(&self) -> u64 {
        let used = self.accumulators.iter().zip(&self.used).filter(|(_, used)| used.load(Ordering::Relaxed));
        let raw = self.raw.load(Ordering::Relaxed);
        used.map(|(accumulator, _)| accumulator.bytes(&self.layout, raw)).sum()
    }
}
