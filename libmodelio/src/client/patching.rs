//! Pulling what has changed instead of all: the buffer of the next version is first brought up to the version that is
//! shown, and then patched.
//!
//! A buffer holds a version that was shown earlier. What the versions after it have changed was kept when they were
//! pulled, so as much is copied from the one that is shown. If that is not known, the block is copied whole. A patched
//! block counts only if it has the checksum of the shard's.
//!
//! This module holds `unsafe`; each place says why it is sound.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::bytes::block::span;
use crate::bytes::changes::{Changed, PatchError, Union};
use crate::bytes::crc32c::crc32c;
use crate::bytes::mmap::Mapping;
use crate::bytes::region::RegionKey;
use crate::transport::stream::Target;
use crate::vocabulary::ids::{BlockId, Version};
use crate::vocabulary::layout::ModelLayout;

/// The most versions of which it is kept what they have changed. A buffer of an older one is filled by copying.
const KEPT: usize = 4;

/// Why a patched block does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotPatched {
    /// The patch is broken.
    #[error(transparent)]
    Patch(#[from] PatchError),
    /// The block is not the shard's.
    #[error("the patched block has another checksum than the shard's")]
    Checksum,
}

/// What a version has changed in the one that was shown before.
#[derive(Debug)]
pub(super) struct Step {
    base: Version,
    blocks: Box<[Mutex<Changed>]>,
}

impl Step {
    /// The version that was shown before.
    pub(super) fn base(&self) -> Version {
        self.base
    }

    /// The blocks that came whole.
    fn whole(&self) -> usize {
        self.blocks.iter().filter(|changed| matches!(*changed.lock(), Changed::Whole)).count()
    }

    /// The patch that makes these bytes of a block from the version before, if it is shorter than they are.
    pub(super) fn patch(&self, block: BlockId, bytes: &[u8]) -> Option<Vec<u8>> {
        let mut patch = Vec::new();
        self.blocks[block.index()].lock().patch(bytes, &mut patch).then_some(patch)
    }
}

/// The filling of a buffer with the next version.
#[derive(Debug)]
pub(super) struct Patching {
    /// The version that is shown meanwhile, and its memory. It is pinned.
    base: Version,
    front: Arc<Mapping>,
    /// The buffer.
    back: RegionKey,
    /// What the buffer lacks of the base; none if all of it.
    lacks: Option<Vec<Arc<Step>>>,
    /// The blocks of the buffer that were written already. They hold nothing that is known.
    touched: Box<[AtomicBool]>,
    pulled: Arc<Step>,
}

impl Patching {
    /// The version that is shown meanwhile.
    pub(super) fn base(&self) -> Version {
        self.base
    }

    /// What the version changes, as far as its blocks have come.
    pub(super) fn pulled(&self) -> &Arc<Step> {
        &self.pulled
    }

    /// A block is about to be written, as a whole.
    pub(super) fn comes_whole(&self, block: BlockId) {
        self.touched[block.index()].store(true, Ordering::Relaxed);
        *self.pulled.blocks[block.index()].lock() = Changed::Whole;
    }

    /// Makes a block the one of the base, in its room in the buffer.
    fn bring_up(&self, layout: &ModelLayout, block: BlockId, room: &mut [u8]) {
        // SAFETY: the base is pinned, and a version that is shown does not change.
        let front = unsafe { self.front.bytes(span(&layout.block_bytes(block))) };
        let was_touched = self.touched[block.index()].swap(true, Ordering::Relaxed);
        match &self.lacks {
            Some(steps) if !was_touched => match &steps[..] {
                [] => {}
                [step] => step.blocks[block.index()].lock().copy(front, room),
                steps => {
                    let mut union = Union::new(room.len(), layout.unit(block));
                    steps.iter().for_each(|step| union.add(&step.blocks[block.index()].lock()));
                    union.all().copy(front, room);
                }
            },
            _ => room.copy_from_slice(front),
        }
    }

    /// Makes a block the one of the base, which the version has not changed.
    fn keep(&self, layout: &ModelLayout, block: BlockId, room: &mut [u8]) {
        self.bring_up(layout, block, room);
        *self.pulled.blocks[block.index()].lock() = Changed::Nothing;
    }

    /// Makes a block from the one of the base by `patch`, in its room in the buffer. It has this checksum then, or none if
    /// nothing has changed.
    fn patch(
        &self,
        layout: &ModelLayout,
        block: BlockId,
        room: &mut [u8],
        (patch, crc): (&[u8], Option<u32>),
    ) -> Result<(), NotPatched> {
        self.bring_up(layout, block, room);
        let changed = Changed::apply(patch, room)?;
        let is_right = match crc {
            Some(crc) => crc32c(room) == crc,
            None => changed == Changed::Nothing,
        };
        *self.pulled.blocks[block.index()].lock() = changed;
        if is_right { Ok(()) } else { Err(NotPatched::Checksum) }
    }
}

/// A block of a buffer that is to be patched.
pub(super) struct Patched {
    room: Target,
    by: Arc<Patching>,
    version: Version,
    block: BlockId,
}

impl Patched {
    /// A block of this version.
    ///
    /// # Safety
    /// The room is that of the block in the buffer, and belongs to whoever has this.
    pub(super) unsafe fn new(room: Target, by: Arc<Patching>, version: Version, block: BlockId) -> Patched {
        Patched { room, by, version, block }
    }

    /// The version, and the block.
    pub(super) fn place(&self) -> (Version, BlockId) {
        (self.version, self.block)
    }

    /// Makes the block by `patch`. It has this checksum then, or none if nothing has changed. Returns its bytes.
    ///
    /// # Errors
    /// [`NotPatched`]. Then the block is void.
    pub(super) fn patch(
        self,
        layout: &ModelLayout,
        patch: (&[u8], Option<u32>),
    ) -> Result<usize, NotPatched> {
        self.fill(|by, block, room| by.patch(layout, block, room, patch).map(|()| room.len()))
    }

    /// Makes the block the one of the base, which the version has not changed. Returns its bytes.
    pub(super) fn keep(self, layout: &ModelLayout) -> usize {
        self.fill(|by, block, room| {
            by.keep(layout, block, room);
            room.len()
        })
    }

    fn fill<R>(self, fill: impl FnOnce(&Patching, BlockId, &mut [u8]) -> R) -> R {
        let (start, len) = self.room.raw();
        // SAFETY: the block is its holder's, and the target keeps its memory.
        let room = unsafe { std::slice::from_raw_parts_mut(start, len) };
        fill(&self.by, self.block, room)
    }

    /// The block is not patched, but comes as a whole: the place to receive it into.
    pub(super) fn whole(self) -> Target {
        self.by.comes_whole(self.block);
        self.room
    }
}

/// What the newest versions have changed, what free buffers hold, and how the next version's is filled.
#[derive(Debug, Default)]
pub(super) struct Patches {
    steps: BTreeMap<Version, Arc<Step>>,
    /// The versions that buffers hold which are not shown any more.
    holds: Vec<(RegionKey, Version)>,
    now: Option<Arc<Patching>>,
    /// The blocks of the last pulled version that came whole. None if all did.
    whole: Option<usize>,
}

impl Patches {
    /// This buffer is free, and holds a version.
    pub(super) fn frees(&mut self, buffer: RegionKey, version: Version) {
        self.holds.push((buffer, version));
    }

    /// This buffer is written by others, or is no more.
    pub(super) fn forget(&mut self, buffer: RegionKey) {
        self.holds.retain(|(of, _)| *of != buffer);
    }

    /// The buffers are these from now on.
    pub(super) fn retain(&mut self, is_there: impl Fn(RegionKey) -> bool) {
        self.holds.retain(|(of, _)| is_there(*of));
    }

    /// The filling of the next version's buffer, if it is patched.
    pub(super) fn now(&self) -> Option<&Arc<Patching>> {
        self.now.as_ref()
    }

    /// What a version that is shown has changed, if that is kept.
    pub(super) fn step(&self, version: Version) -> Option<&Arc<Step>> {
        self.steps.get(&version)
    }

    /// The buffer is filled beside the shown version `base`, which the caller has pinned. Returns a base that was pinned
    /// for an earlier filling.
    pub(super) fn begin(
        &mut self,
        (base, front): (Version, Arc<Mapping>),
        back: RegionKey,
        blocks: u32,
    ) -> (Arc<Patching>, Option<Version>) {
        let before = self.end();
        let each = || (0..blocks).map(|_| Mutex::new(Changed::Whole)).collect();
        let holds = self.holds.iter().find(|(of, _)| *of == back).map(|(_, version)| *version);
        let patching = Arc::new(Patching {
            base,
            front,
            back,
            lacks: holds.and_then(|holds| self.since(holds, base)),
            touched: (0..blocks).map(|_| AtomicBool::new(false)).collect(),
            pulled: Arc::new(Step { base, blocks: each() }),
        });
        self.now = Some(Arc::clone(&patching));
        (patching, before)
    }

    /// The filling is given up. What the buffer holds then is unknown. Returns the base, which need not be pinned any
    /// more.
    pub(super) fn end(&mut self) -> Option<Version> {
        let before = self.now.take()?;
        self.forget(before.back);
        Some(before.base)
    }

    /// The buffer that is filled is `version` now. Returns the base, which need not be pinned any more.
    pub(super) fn publish(&mut self, version: Version, buffer: RegionKey) -> Option<Version> {
        let is_this = self.now.as_ref().is_some_and(|now| now.back == buffer);
        let pulled = self.now.as_ref().filter(|_| is_this).map(|now| Arc::clone(&now.pulled));
        self.whole = pulled.as_ref().map(|step| step.whole());
        self.steps.extend(pulled.map(|step| (version, step)));
        while self.steps.len() > KEPT {
            self.steps.pop_first();
        }
        self.forget(buffer);
        self.end()
    }

    /// The blocks of the last pulled version that came whole. None if all did.
    pub(super) fn whole(&self) -> Option<usize> {
        self.whole
    }

    /// What has changed after `from` until `to`, if that is kept.
    fn since(&self, from: Version, to: Version) -> Option<Vec<Arc<Step>>> {
        let (mut at, mut steps) = (to, Vec::new());
        while at > from {
            let step = self.steps.get(&at)?;
            at = step.base;
            steps.push(Arc::clone(step));
        }
        (at == from).then_some(steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocabulary::layout::DType;

    const BLOCK: usize = 64 << 10;

    /// A buffer of three blocks.
    fn buffer(values: [u8; 3]) -> Arc<Mapping> {
        let memory = Mapping::memfd("test", 3 * BLOCK).unwrap();
        for (at, value) in values.into_iter().enumerate() {
            // SAFETY: nobody else knows the memory.
            unsafe { memory.bytes_mut(at * BLOCK..(at + 1) * BLOCK) }.fill(value);
        }
        Arc::new(memory)
    }

    fn values(memory: &Mapping) -> [u8; 3] {
        // SAFETY: nobody writes the memory meanwhile.
        std::array::from_fn(|at| unsafe { memory.bytes(at * BLOCK..(at + 1) * BLOCK) }[BLOCK - 1])
    }

    #[test]
    fn a_block_that_is_kept_is_the_bases_and_one_that_comes_whole_is_copied_after_the_next_version() {
        let layout = ModelLayout::blank(3 * BLOCK as u64, DType::F32, BLOCK as u32).unwrap();
        let keys = [RegionKey(1), RegionKey(2)];
        let buffers = [buffer([1, 1, 1]), buffer([8, 8, 8])];
        let block = |by: &Arc<Patching>, version, into: usize, block: u32| {
            let memory = Arc::clone(&buffers[into]);
            // SAFETY: this thread alone writes the buffer, one block at a time, and the target keeps it.
            unsafe {
                let room = memory.bytes_mut(block as usize * BLOCK..(block as usize + 1) * BLOCK);
                let room = Target::new(room.as_mut_ptr(), room.len(), Arc::clone(&memory) as _);
                Patched::new(room, Arc::clone(by), Version(version), BlockId(block))
            }
        };
        let mut patches = Patches::default();
        // Version 2, in the second buffer: what that holds is unknown, so blocks that are kept are copied.
        let (by, _) = patches.begin((Version(1), Arc::clone(&buffers[0])), keys[1], 3);
        // SAFETY: as above.
        unsafe { block(&by, 2, 1, 0).whole().fill(0, &[2; BLOCK]) };
        assert_eq!((1..3).map(|at| block(&by, 2, 1, at).keep(&layout)).sum::<usize>(), 2 * BLOCK);
        assert_eq!(values(&buffers[1]), [2, 1, 1]);
        patches.publish(Version(2), keys[1]);
        assert_eq!(patches.whole(), Some(1));
        // Version 3, in the first one, which has version 1 but for a byte that shows what is copied.
        patches.frees(keys[0], Version(1));
        // SAFETY: as above.
        unsafe { buffers[0].bytes_mut(2 * BLOCK - 1..2 * BLOCK) }.fill(9);
        let (by, _) = patches.begin((Version(2), Arc::clone(&buffers[1])), keys[0], 3);
        assert_eq!((0..2).map(|at| block(&by, 3, 0, at).keep(&layout)).sum::<usize>(), 2 * BLOCK);
        assert_eq!(values(&buffers[0]), [2, 9, 1]);
        // A block that has been begun as a whole holds nothing that is known.
        // SAFETY: as above.
        unsafe { block(&by, 3, 0, 2).whole().fill(0, &[3; BLOCK / 2]) };
        block(&by, 3, 0, 2).keep(&layout);
        assert_eq!(values(&buffers[0]), [2, 9, 1]);
        // SAFETY: as above.
        assert!(unsafe { buffers[0].bytes(2 * BLOCK..3 * BLOCK) }.iter().all(|byte| *byte == 1));
        patches.publish(Version(3), keys[0]);
        assert_eq!(patches.whole(), Some(0));
    }
}
