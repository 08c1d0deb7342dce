//! What has changed in each of the newest versions, block by block, for those who hold an older one.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libmodelio::bytes::block::span;
use libmodelio::bytes::changes::{Changed, Union};
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::layout::ModelLayout;
use parking_lot::{Mutex, MutexGuard};

use super::pinned::PinnedVersion;

/// The records of all versions take this share of the model's bytes at most.
const SHARE: u64 = 10;

/// Somebody is sent patches if one of so many versions before was sent as a patch.
const LATELY: usize = 2;

/// What has changed in one version. A block that nothing is said of has changed on the whole.
#[derive(Debug)]
pub(crate) struct VersionChanges {
    blocks: Box<[Mutex<Changed>]>,
    /// Whether a block's checksum is made while the block is compared, and so in the cache. If not, it is made when the
    /// block's first patch is sent.
    pub(crate) makes_checksums: bool,
    /// Whether somebody was sent a patch, which needs the checksum of the block.
    was_sent: AtomicBool,
}

impl VersionChanges {
    pub(crate) fn new(blocks: u32, makes_checksums: bool) -> Arc<VersionChanges> {
        let blocks = (0..blocks).map(|_| Mutex::new(Changed::Whole)).collect();
        Arc::new(VersionChanges { blocks, makes_checksums, was_sent: AtomicBool::new(false) })
    }

    /// Says what has changed in a block.
    pub(crate) fn set(&self, block: BlockId, changed: Changed) {
        *self.blocks[block.index()].lock() = changed;
    }

    /// What has changed in a block. Nobody else asks or says it meanwhile.
    pub(crate) fn of(&self, block: BlockId) -> MutexGuard<'_, Changed> {
        self.blocks[block.index()].lock()
    }

    /// Appends the patch that makes the block from the one before. False if all of it may have changed.
    pub(crate) fn patch(&self, block: BlockId, bytes: &[u8], out: &mut Vec<u8>) -> bool {
        self.sends(self.of(block).patch(bytes, out), out)
    }

    /// Somebody is sent this patch, if it `is_known`.
    fn sends(&self, is_known: bool, patch: &[u8]) -> bool {
        if is_known && patch.len() > Changed::NOTHING_BYTES {
            // Relaxed suffices: it is a hint, of which nothing else depends.
            self.was_sent.store(true, Ordering::Relaxed);
        }
        is_known
    }

    fn taken(&self) -> u64 {
        self.blocks.iter().map(|block| block.lock().taken() as u64).sum()
    }
}

/// What has changed after one version until another, and the bytes that this takes.
#[derive(Debug)]
struct Record {
    base: Version,
    version: Version,
    changes: Arc<VersionChanges>,
    taken: u64,
}

/// The records of the newest versions, without a gap: each begins where the one before ends.
#[derive(Debug)]
pub(crate) struct ChangeLog {
    /// The newest one is the last.
    records: VecDeque<Record>,
    /// The number of versions.
    keep: usize,
    /// The bytes of the records, and the most that they may be.
    taken: u64,
    most: u64,
}

impl ChangeLog {
    /// No records yet, of a partition of this size.
    pub(crate) fn new(bytes: u64, keep: usize) -> ChangeLog {
        ChangeLog { records: VecDeque::new(), keep, taken: 0, most: bytes / SHARE }
    }

    /// From now on, the records of so many versions are kept.
    pub(crate) fn keep(&mut self, versions: usize) {
        self.keep = versions;
        self.trim();
    }

    /// Whether records are kept.
    pub(crate) fn are_kept(&self) -> bool {
        self.keep > 0
    }

    /// The record of the next version, if one is kept.
    pub(crate) fn next(&self, blocks: u32) -> Option<Arc<VersionChanges>> {
        self.are_kept().then(|| VersionChanges::new(blocks, self.makes_checksums()))
    }

    /// Whether the checksums of the next version's blocks are made with them: who follows by patches needs them.
    pub(crate) fn makes_checksums(&self) -> bool {
        let mut lately = self.records.iter().rev().take(LATELY);
        lately.any(|of| of.changes.was_sent.load(Ordering::Relaxed))
    }

    /// A version is published. `changes` say what has changed since the number before it, if anybody knows.
    pub(crate) fn publish(&mut self, version: Version, changes: Option<Arc<VersionChanges>>) {
        self.publish_after(Version(version.0.saturating_sub(1)), version, changes);
    }

    /// The same of a version that comes after `base`, perhaps with other numbers between.
    pub(crate) fn publish_after(
        &mut self,
        base: Version,
        version: Version,
        changes: Option<Arc<VersionChanges>>,
    ) {
        match changes {
            Some(changes) => {
                let taken = changes.taken();
                self.taken += taken;
                self.records.push_back(Record { base, version, changes, taken });
            }
            None => {
                self.records.clear();
                self.taken = 0;
            }
        }
        self.trim();
    }

    fn trim(&mut self) {
        while self.records.len() > self.keep || self.taken > self.most {
            let Some(Record { taken, .. }) = self.records.pop_front() else { break };
            self.taken -= taken;
        }
    }

    /// The bytes that the records take.
    pub(crate) fn taken(&self) -> u64 {
        self.taken
    }

    /// What has changed after `base` until `version`, if that is known.
    pub(crate) fn since(&self, base: Version, version: Version) -> Option<Since> {
        let first = self.records.iter().position(|of| of.base == base)?;
        let last = self.records.iter().position(|of| of.version == version).filter(|last| *last >= first)?;
        let records = self.records.range(first..=last).map(|of| Arc::clone(&of.changes)).collect();
        Some(Since { base, records })
    }
}

/// What has changed since an older version.
#[derive(Clone, Debug)]
pub struct Since {
    base: Version,
    records: Vec<Arc<VersionChanges>>,
}

impl Since {
    /// The older version.
    pub fn base(&self) -> Version {
        self.base
    }

    /// Whether a block of the partition is the same as before.
    ///
    /// # Panics
    /// If the partition has no such block.
    pub fn is_same(&self, block: BlockId) -> bool {
        self.records.iter().all(|record| *record.of(block) == Changed::Nothing)
    }

    /// What has changed in a block of the partition.
    ///
    /// # Panics
    /// If the partition has no such block.
    pub fn changed(&self, layout: &ModelLayout, block: BlockId) -> Changed {
        match &self.records[..] {
            [record] => record.of(block).clone(),
            records => union_of(records, layout, block),
        }
    }

    /// The patch that brings a block of the partition up to `pinned`, with the checksum of the block if it changes
    /// anything. None if the block is sent on the whole.
    ///
    /// # Panics
    /// If the partition has no such block.
    pub fn patch(
        &self,
        layout: &ModelLayout,
        block: BlockId,
        pinned: &PinnedVersion,
    ) -> Option<(Vec<u8>, Option<u32>)> {
        let (bytes, mut patch) = (pinned.block(block), Vec::new());
        let is_known = match &self.records[..] {
            [record] => record.patch(block, bytes, &mut patch),
            [.., newest] => {
                let is_known = union_of(&self.records, layout, block).patch(bytes, &mut patch);
                newest.sends(is_known, &patch)
            }
            [] => false,
        };
        let changes = patch.len() > Changed::NOTHING_BYTES;
        is_known.then(|| (patch, changes.then(|| pinned.checksum(block))))
    }
}

/// What has changed in a block in all of these versions.
fn union_of(records: &[Arc<VersionChanges>], layout: &ModelLayout, block: BlockId) -> Changed {
    let mut union = Union::new(span(&layout.block_bytes(block)).len(), layout.unit(block));
    records.iter().for_each(|record| union.add(&record.of(block)));
    union.all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_records_are_kept_within_their_share_and_the_oldest_go_first() {
        let record = |bytes: usize| {
            let record = VersionChanges::new(1, false);
            let (old, mut new) = (vec![0; bytes * 100], vec![0; bytes * 100]);
            new.iter_mut().step_by(100).for_each(|byte| *byte = 1);
            record.set(BlockId(0), Changed::between(&old, &new, 1));
            Some(record)
        };
        let mut log = ChangeLog::new(10 << 10, 3);
        assert!(log.since(Version(0), Version(1)).is_none());
        for version in (1..=4).map(Version) {
            log.publish(version, record(20));
        }
        let known = |log: &ChangeLog, base, version| log.since(Version(base), Version(version)).is_some();
        assert!(known(&log, 1, 4) && known(&log, 2, 3) && !known(&log, 0, 4));
        assert!(!known(&log, 3, 3) && !known(&log, 4, 3) && !known(&log, 3, 5));
        assert!(!known(&log, u64::MAX, 4) && !known(&log, 0, u64::MAX));
        // One that takes nearly all of the share drives the others out, and one that takes more is not kept.
        log.publish(Version(5), record(1010));
        assert!(known(&log, 4, 5) && !known(&log, 3, 5));
        log.publish(Version(6), record(2000));
        assert!(!known(&log, 5, 6) && log.taken() == 0);
        log.publish(Version(7), record(20));
        log.publish(Version(8), None);
        assert!(!known(&log, 6, 7) && !known(&log, 7, 8));
        log.publish(Version(9), record(20));
        assert!(known(&log, 8, 9));
        log.keep(0);
        assert!(!known(&log, 8, 9) && log.next(1).is_none());
    }
}
