//! The shard's memory: version buffers, optimizer state, the accumulator, and the work on one block.
//!
//! This is one of the modules that may hold `unsafe`: it turns shared mappings into slices. What makes
//! that sound is block ownership. A version that is published is never written; the buffer of the next
//! version is written block by block, and the core hands a block to one thread at a time (a plan's
//! blocks are each visited once, a block reduced on arrival is in flight once).

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use libmodelio::ids::{BlockId, LearnerId, Version};
use libmodelio::layout::{DType, ModelLayout, Segment};
use libmodelio::mmap::Mapping;
use libmodelio::transport::{Region, RegionKey};
use smallvec::SmallVec;

use crate::core::{Plan, Work};
use crate::kernels::{self, Input, Output, Source, Wire};
use crate::reducer::{self, Reducer};

/// A block whose bytes belong to no version.
const VOID: u64 = u64::MAX;

/// A buffer of the model's size that is, was or becomes a version.
#[derive(Debug)]
pub struct VersionBuffer {
    region: Region,
    /// The version whose value each block holds, or `VOID`.
    stamps: Vec<AtomicU64>,
}

impl VersionBuffer {
    fn new(region: Region, blocks: u32, stamp: u64) -> VersionBuffer {
        VersionBuffer { region, stamps: (0..blocks).map(|_| AtomicU64::new(stamp)).collect() }
    }

    /// The memory, for transports and for passthrough.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Bytes of a *published* version. The caller holds a pin on it.
    pub fn bytes(&self, range: Range<u64>) -> &[u8] {
        // SAFETY: a published version is immutable, and a pinned one is not recycled.
        unsafe { self.region.memory().bytes(range.start as usize..range.end as usize) }
    }
}

/// Optimizer state and fp32 masters of one version, in the order of reducible elements.
#[derive(Debug, Default)]
pub struct StateBuffer {
    master: Option<Mapping>,
    slots: [Option<Mapping>; 2],
    /// As in [`VersionBuffer`].
    stamps: Vec<AtomicU64>,
}

/// A published version.
#[derive(Debug)]
struct Published {
    buffer: Arc<VersionBuffer>,
    at: SystemTime,
    pins: u64,
}

/// All memory of one model's shard.
#[derive(Debug)]
pub struct RegionStore {
    layout: Arc<ModelLayout>,
    has_halves: bool,
    versions: BTreeMap<Version, Published>,
    back: Option<Arc<VersionBuffer>>,
    free: Vec<Arc<VersionBuffer>>,
    /// Buffers in existence.
    live: usize,
    next_key: u64,
    /// State of the newest version, and of the next.
    state: [Arc<StateBuffer>; 2],
    /// The version in which each block last changed.
    changed: Arc<[AtomicU64]>,
    accumulator: Option<Arc<Mapping>>,
    /// The optimizer's slots are no longer zero.
    slots_used: bool,
}

/// Everything that computing blocks of one plan needs; built once a version.
#[derive(Debug)]
pub struct Job {
    layout: Arc<ModelLayout>,
    plan: Arc<Plan<Region>>,
    front: Arc<VersionBuffer>,
    back: Arc<VersionBuffer>,
    state: [Arc<StateBuffer>; 2],
    changed: Arc<[AtomicU64]>,
    accumulator: Option<Arc<Mapping>>,
    check: bool,
}

fn wire(dtype: DType) -> Option<Wire> {
    match dtype {
        DType::F32 => Some(Wire::F32),
        DType::F16 => Some(Wire::F16),
        DType::BF16 => Some(Wire::BF16),
        DType::Opaque(_) => None,
    }
}

fn span(bytes: &Range<u64>) -> Range<usize> {
    bytes.start as usize..bytes.end as usize
}

/// A segment's elements in fp32 arrays.
fn element_span(segment: &Segment, wire: Wire) -> Range<usize> {
    let count = (segment.bytes.end - segment.bytes.start) as usize / wire.size();
    segment.element as usize..segment.element as usize + count
}

impl RegionStore {
    /// Memory for a model: version 0 (zeros until [`Self::initial`] is filled and
    /// [`Self::initialised`] called) and the next version's buffer, both pre-faulted.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn new(layout: Arc<ModelLayout>) -> io::Result<RegionStore> {
        let blocks = layout.blocks();
        let has_halves = layout.tensors().iter().any(|t| matches!(t.dtype, DType::F16 | DType::BF16));
        let mut store = RegionStore {
            has_halves,
            versions: BTreeMap::new(),
            back: None,
            free: Vec::new(),
            live: 0,
            next_key: 1,
            state: [Arc::default(), Arc::default()],
            changed: (0..blocks).map(|_| AtomicU64::new(0)).collect(),
            accumulator: None,
            slots_used: false,
            layout,
        };
        let front = store.allocate(0)?;
        front.region.memory().prefault()?;
        let published = Published { buffer: front, at: SystemTime::now(), pins: 0 };
        store.versions.insert(Version(0), published);
        let back = store.allocate(VOID)?;
        back.region.memory().prefault()?;
        store.back = Some(back);
        Ok(store)
    }

    /// A new buffer whose blocks hold version `stamp`. Its pages are taken when touched.
    fn allocate(&mut self, stamp: u64) -> io::Result<Arc<VersionBuffer>> {
        let memory = Mapping::memfd("gradfs-version", self.layout.size() as usize)?;
        // Programs get this memory through passthrough; none of them may ever change it.
        memory.seal()?;
        let memory = Arc::new(memory);
        let region = Region::new(memory, RegionKey(self.next_key));
        self.next_key += 1;
        self.live += 1;
        Ok(Arc::new(VersionBuffer::new(region, self.layout.blocks(), stamp)))
    }

    /// Version 0's memory, to load the model into before anything else is done.
    pub fn initial(&self) -> Option<Arc<Mapping>> {
        self.versions.get(&Version(0)).map(|published| Arc::clone(published.buffer.region.memory()))
    }

    /// Version 0 is loaded: make the fp32 masters of half-precision tensors.
    ///
    /// # Errors
    /// When their memory cannot be had.
    pub fn initialised(&mut self) -> io::Result<()> {
        self.prepare(Reducer::Sum, false)?;
        if let (true, Some(front)) = (self.has_halves, self.newest()) {
            for block in (0..self.layout.blocks()).map(BlockId) {
                for segment in self.layout.segments(block) {
                    widen(segment, &front, &self.state[0]);
                }
            }
        }
        Ok(())
    }

    /// Makes sure that both state buffers have what `reducer` needs, pre-faulted; `fresh` starts its
    /// slots from zero. Not while a job exists.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn prepare(&mut self, reducer: Reducer, fresh: bool) -> io::Result<()> {
        let fresh = fresh && self.slots_used;
        let bytes = self.layout.elements() as usize * 4;
        if bytes == 0 {
            return Ok(());
        }
        let new = || -> io::Result<Mapping> {
            let mapping = Mapping::anonymous(bytes)?;
            mapping.prefault()?;
            Ok(mapping)
        };
        for (side, shared) in self.state.iter_mut().enumerate() {
            let blocks = self.layout.blocks();
            // Jobs hold clones only while they run; between them this is the one owner.
            let Some(state) = Arc::get_mut(shared) else {
                return Err(io::Error::other("optimizer state is in use"));
            };
            if state.stamps.is_empty() {
                let stamp = if side == 0 { 0 } else { VOID };
                state.stamps = (0..blocks).map(|_| AtomicU64::new(stamp)).collect();
            }
            if self.has_halves && state.master.is_none() {
                state.master = Some(new()?);
            }
            for (i, slot) in state.slots.iter_mut().enumerate() {
                if i >= reducer.state_slots() {
                    *slot = None;
                } else if slot.is_none() || fresh {
                    // Give the old one back first: both together may not fit.
                    *slot = None;
                    *slot = Some(new()?);
                }
            }
        }
        self.slots_used &= !fresh;
        Ok(())
    }

    /// The newest version's buffer.
    pub fn newest(&self) -> Option<Arc<VersionBuffer>> {
        self.versions.last_key_value().map(|(_, published)| Arc::clone(&published.buffer))
    }

    /// The buffer of `version` and when it was published, if it still exists.
    pub fn get(&self, version: Version) -> Option<(Arc<VersionBuffer>, SystemTime)> {
        self.versions.get(&version).map(|published| (Arc::clone(&published.buffer), published.at))
    }

    /// Numbers of all versions in memory, the merely pinned ones included.
    pub fn versions(&self) -> impl DoubleEndedIterator<Item = Version> {
        self.versions.keys().copied()
    }

    /// Buffers in existence, and those nobody needs.
    pub fn buffers(&self) -> (usize, usize) {
        (self.live, self.free.len())
    }

    /// Keeps `version` from being recycled. False when it is gone.
    pub fn pin(&mut self, version: Version) -> bool {
        self.versions.get_mut(&version).map(|published| published.pins += 1).is_some()
    }

    /// Takes `count` pins back.
    pub fn unpin(&mut self, version: Version, count: u64) {
        if let Some(published) = self.versions.get_mut(&version) {
            debug_assert!(published.pins >= count, "{version} has {} pins", published.pins);
            published.pins = published.pins.saturating_sub(count);
        }
    }

    /// Recycles versions that are neither retained nor pinned, and finds the next version's buffer if
    /// it has none. Returns whether it has one now.
    pub fn recycle(&mut self, retain: usize, max: usize) -> bool {
        let keep = self.versions.keys().rev().nth(retain).copied().unwrap_or(Version(0));
        let idle: Vec<Version> = self
            .versions
            .range(..keep)
            .filter(|(_, published)| published.pins == 0)
            .map(|(&version, _)| version)
            .collect();
        for version in idle {
            if let Some(published) = self.versions.remove(&version) {
                self.free.push(published.buffer);
            }
        }
        if self.back.is_none() {
            self.back = self.free.pop();
        }
        if self.back.is_none() && self.live < max {
            match self.allocate(VOID) {
                Ok(buffer) => self.back = Some(buffer),
                Err(error) => tracing::error!(%error, "no memory for another version"),
            }
        }
        // Buffers beyond what the present bound allows go back to the system.
        while self.live > max && self.free.pop().is_some() {
            self.live -= 1;
        }
        self.back.is_some()
    }

    /// A buffer for a write of `weights`.
    ///
    /// # Errors
    /// When `max` exist already, or there is no memory.
    pub fn take_buffer(&mut self, max: usize) -> io::Result<Region> {
        if let Some(buffer) = self.free.pop() {
            self.live -= 1;
            return Ok(buffer.region.clone());
        }
        if self.live >= max {
            return Err(io::Error::other(format!(
                "all {max} version buffers (control/max_versions) are in use"
            )));
        }
        let buffer = self.allocate(VOID)?;
        self.live -= 1;
        Ok(buffer.region.clone())
    }

    /// Whether a spare buffer would save the next version from first touches.
    pub fn wants_spare(&self, max: usize) -> bool {
        self.free.is_empty() && self.live < max
    }

    /// A new buffer to pre-fault outside and hand to [`Self::add_spare`].
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new_spare(&mut self) -> io::Result<Arc<VersionBuffer>> {
        self.allocate(VOID)
    }

    /// Takes a pre-faulted buffer in.
    pub fn add_spare(&mut self, buffer: Arc<VersionBuffer>) {
        self.free.push(buffer);
    }

    /// The memory for computing `plan`. `resume` goes on with what was reduced on arrival.
    ///
    /// # Errors
    /// When the accumulator's memory cannot be had, or there is no buffer for the version.
    pub fn job(&mut self, plan: Arc<Plan<Region>>, resume: bool, check: bool) -> io::Result<Job> {
        let missing = || io::Error::other("no buffer for the next version");
        let front = self.newest().ok_or_else(missing)?;
        let back = match &plan.work {
            Work::Reduce { step, fresh_state, .. } => {
                if !resume {
                    self.prepare(step.reducer, *fresh_state)?;
                }
                self.back.clone().ok_or_else(missing)?
            }
            Work::Assign { buffer, .. } => {
                Arc::new(VersionBuffer::new(buffer.clone(), self.layout.blocks(), VOID))
            }
        };
        if !resume {
            // Blocks that a dropped contribution left behind are of no version.
            let newest = plan.version.0 - 1;
            for stamp in back.stamps.iter().chain(&self.state[1].stamps) {
                if stamp.load(Ordering::Relaxed) > newest {
                    stamp.store(VOID, Ordering::Relaxed);
                }
            }
        }
        Ok(Job {
            layout: Arc::clone(&self.layout),
            plan,
            front,
            back,
            state: self.state.clone(),
            changed: Arc::clone(&self.changed),
            accumulator: self.accumulator.clone(),
            check,
        })
    }

    /// The accumulator, made at its first use.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn accumulator(&mut self) -> io::Result<Arc<Mapping>> {
        if let Some(accumulator) = &self.accumulator {
            return Ok(Arc::clone(accumulator));
        }
        let accumulator = Arc::new(Mapping::anonymous((self.layout.elements() as usize * 4).max(4))?);
        self.accumulator = Some(Arc::clone(&accumulator));
        Ok(accumulator)
    }

    /// The job's version is complete and becomes the newest.
    pub fn publish(&mut self, job: &Job) {
        let version = job.plan.version;
        for (stamp, changed) in job.back.stamps.iter().zip(self.changed.iter()) {
            if stamp.load(Ordering::Relaxed) == version.0 {
                changed.store(version.0, Ordering::Relaxed);
            }
        }
        match &job.plan.work {
            Work::Reduce { step, .. } => {
                self.back = None;
                self.slots_used |= step.reducer.state_slots() > 0;
            }
            Work::Assign { .. } => self.live += 1,
        }
        self.state.swap(0, 1);
        let published = Published { buffer: Arc::clone(&job.back), at: SystemTime::now(), pins: 0 };
        self.versions.insert(version, published);
    }
}

impl Job {
    /// The plan it computes.
    pub fn plan(&self) -> &Arc<Plan<Region>> {
        &self.plan
    }

    /// Computes `block` of the next version, with `own` payload (the whole block) from a request buffer
    /// besides what the plan lists. False when `own` holds NaN or Inf and is to be refused; the block is
    /// void then.
    pub fn block(&self, block: BlockId, own: Option<(LearnerId, &[u8])>) -> bool {
        let Work::Reduce { step, inputs, accumulated, .. } = &self.plan.work else {
            return self.assign_block(block);
        };
        let accumulated = accumulated.contains(block.index());
        let any = own.is_some()
            || accumulated
            || inputs.iter().any(|contribution| contribution.deferred.contains(block.index()));
        if !any && is_inert(step) {
            self.carry(block);
            return true;
        }
        self.mark(block, VOID);
        let start = self.layout.block_bytes(block).start;
        let mut finite = true;
        for segment in self.layout.segments(block) {
            let range = span(&segment.bytes);
            // SAFETY: this thread has the block of the next version to itself.
            let output = unsafe { self.back.region.memory().bytes_mut(range.clone()) };
            let weights = self.front.bytes(segment.bytes.clone());
            let Some(wire) = wire(segment.dtype) else {
                let assigned = if step.reducer == Reducer::Assign { own } else { None };
                match assigned {
                    Some((_, payload)) => {
                        let offset = (segment.bytes.start - start) as usize;
                        output.copy_from_slice(&payload[offset..offset + output.len()]);
                    }
                    None => kernels::stream_copy(self.opaque_source(step, block, &range, weights), output),
                }
                continue;
            };
            let elements = element_span(segment, wire);
            let mut sources: SmallVec<[Source<'_>; 16]> = SmallVec::new();
            if let (true, Some(accumulator)) = (accumulated, &self.accumulator) {
                // SAFETY: folding is over before a plan that reads the accumulator begins.
                sources.push(Source::Acc(unsafe { accumulator.floats(elements.clone()) }));
            }
            let mut own_bytes = own.map(|(learner, payload)| {
                let offset = (segment.bytes.start - start) as usize;
                (learner, &payload[offset..offset + range.len()])
            });
            for contribution in inputs {
                // In the order of learners, so that the sum does not depend on who came last.
                if let Some((_, bytes)) = own_bytes.take_if(|(learner, _)| *learner < contribution.learner) {
                    sources.push(Source::Wire(bytes));
                }
                if contribution.deferred.contains(block.index()) {
                    // SAFETY: the payload is lent until the version is made: nobody writes it.
                    sources.push(Source::Wire(unsafe { contribution.source.memory().bytes(range.clone()) }));
                }
            }
            if let Some((_, bytes)) = own_bytes {
                sources.push(Source::Wire(bytes));
            }
            // SAFETY: states and masters are owned by block like the buffers they belong to.
            finite &= unsafe { self.reduce(wire, step, &sources, elements, weights, output) };
        }
        if finite {
            self.mark(block, self.plan.version.0);
        }
        finite
    }

    /// # Safety
    /// The elements' block is this thread's alone in the next version.
    unsafe fn reduce(
        &self,
        wire: Wire,
        step: &reducer::Step,
        sources: &[Source<'_>],
        elements: Range<usize>,
        weights: &[u8],
        output: &mut [u8],
    ) -> bool {
        let [old, new] = &self.state;
        let halves = wire != Wire::F32;
        let none = || -> &mut [f32] { &mut [] };
        // SAFETY: the old state is immutable while its version is the newest; the new one's elements
        // belong to this thread.
        unsafe {
            let slot = |state: &StateBuffer, i: usize| -> Option<&[f32]> {
                let wanted = i < step.reducer.state_slots();
                state.slots[i]
                    .as_ref()
                    .filter(|_| wanted)
                    .map(|m| &*(m.floats(elements.clone()) as *const [f32]))
            };
            let slot_mut = |i: usize| {
                let wanted = i < step.reducer.state_slots();
                new.slots[i].as_ref().filter(|_| wanted).map_or_else(none, |m| m.floats_mut(elements.clone()))
            };
            let input = Input {
                weights,
                master: old.master.as_ref().filter(|_| halves).map(|m| m.floats(elements.clone())),
                slots: [slot(old, 0).unwrap_or_default(), slot(old, 1).unwrap_or_default()],
            };
            let output = Output {
                weights: output,
                master: new.master.as_ref().filter(|_| halves).map(|m| m.floats_mut(elements.clone())),
                slots: [slot_mut(0), slot_mut(1)],
            };
            kernels::apply(wire, step, sources, input, output, self.check)
        }
    }

    /// What an opaque segment becomes: its old bytes, or with `assign` the last contribution's.
    fn opaque_source<'a>(
        &'a self,
        step: &reducer::Step,
        block: BlockId,
        range: &Range<usize>,
        weights: &'a [u8],
    ) -> &'a [u8] {
        let Work::Reduce { inputs, .. } = &self.plan.work else { return weights };
        inputs
            .iter()
            .rev()
            .filter(|_| step.reducer == Reducer::Assign)
            .find(|contribution| contribution.deferred.contains(block.index()))
            // SAFETY: the payload is lent until the version is made.
            .map_or(weights, |c| unsafe { c.source.memory().bytes(range.clone()) })
    }

    /// A block that nothing changes: brought up to date if the buffer's copy is old.
    fn carry(&self, block: BlockId) {
        let i = block.index();
        let changed = self.changed[i].load(Ordering::Relaxed);
        let fresh = |stamp: &AtomicU64| {
            let stamp = stamp.load(Ordering::Relaxed);
            stamp != VOID && stamp >= changed
        };
        if !fresh(&self.back.stamps[i]) {
            let range = self.layout.block_bytes(block);
            // SAFETY: this thread has the block of the next version to itself.
            let output = unsafe { self.back.region.memory().bytes_mut(span(&range)) };
            kernels::stream_copy(self.front.bytes(range), output);
            self.back.stamps[i].store(self.plan.version.0 - 1, Ordering::Relaxed);
        }
        self.carry_state(block, fresh);
    }

    fn carry_state(&self, block: BlockId, fresh: impl Fn(&AtomicU64) -> bool) {
        let [old, new] = &self.state;
        let Some(stamp) = new.stamps.get(block.index()).filter(|stamp| !fresh(stamp)) else { return };
        let parts =
            [(&old.master, &new.master), (&old.slots[0], &new.slots[0]), (&old.slots[1], &new.slots[1])];
        for segment in self.layout.segments(block) {
            let Some(wire) = wire(segment.dtype) else { continue };
            let elements = element_span(segment, wire);
            let bytes = elements.start * 4..elements.end * 4;
            for (from, to) in parts {
                if let (Some(from), Some(to)) = (from, to) {
                    // SAFETY: as in `reduce`.
                    unsafe { kernels::stream_copy(from.bytes(bytes.clone()), to.bytes_mut(bytes.clone())) };
                }
            }
        }
        stamp.store(self.plan.version.0 - 1, Ordering::Relaxed);
    }

    /// A block of a version that was written to `weights`: bytes that were not written keep their
    /// value.
    fn assign_block(&self, block: BlockId) -> bool {
        let Work::Assign { written, .. } = &self.plan.work else { return false };
        let range = self.layout.block_bytes(block);
        let mut at = range.start;
        let mut touched = false;
        let first = written.partition_point(|w| w.end <= range.start);
        let copy = |gap: Range<u64>| {
            // SAFETY: the buffer is sealed, and this thread has the block to itself.
            let output = unsafe { self.back.region.memory().bytes_mut(span(&gap)) };
            kernels::stream_copy(self.front.bytes(gap), output);
        };
        for w in written[first..].iter().take_while(|w| w.start < range.end) {
            touched = true;
            if w.start > at {
                copy(at..w.start);
            }
            at = w.end.min(range.end).max(at);
        }
        if at < range.end {
            copy(at..range.end);
        }
        let [old, new] = &self.state;
        if !new.stamps.is_empty() {
            let _ = old;
            self.carry_state(block, |_| false);
            for segment in self.layout.segments(block).iter().filter(|_| touched) {
                widen(segment, &self.back, new);
            }
        }
        self.mark(block, self.plan.version.0);
        true
    }

    fn mark(&self, block: BlockId, stamp: u64) {
        self.back.stamps[block.index()].store(stamp, Ordering::Relaxed);
        if let Some(state) = self.state[1].stamps.get(block.index()) {
            state.store(stamp, Ordering::Relaxed);
        }
    }
}

/// Whether a block without any contribution keeps its value.
fn is_inert(step: &reducer::Step) -> bool {
    match step.reducer {
        Reducer::Sum => step.hyper.carry == 1.0,
        Reducer::Sgd => step.hyper.weight_decay == 0.0,
        Reducer::Assign => true,
        _ => false,
    }
}

/// Sets the fp32 master of a half-precision segment from its weights.
fn widen(segment: &Segment, weights: &VersionBuffer, state: &StateBuffer) {
    let Some(wire) = wire(segment.dtype).filter(|wire| *wire != Wire::F32) else { return };
    if let Some(master) = &state.master {
        // SAFETY: called while the block belongs to this thread, in both buffers.
        unsafe {
            let bytes = weights.region.memory().bytes(span(&segment.bytes));
            kernels::widen(wire, bytes, master.floats_mut(element_span(segment, wire)));
        }
    }
}

/// Adds the deferred blocks of a contribution into the accumulator; stores where it holds nothing yet.
pub fn fold_block(
    layout: &ModelLayout,
    block: BlockId,
    source: &Region,
    accumulator: &Mapping,
    first: bool,
    replace: bool,
) {
    for segment in layout.segments(block) {
        let Some(wire) = wire(segment.dtype) else { continue };
        // SAFETY: one contribution is folded at a time, each block of it by one thread; the program that
        // has the source mapped waits in fsync.
        unsafe {
            let bytes = source.memory().bytes(span(&segment.bytes));
            let sum = accumulator.floats_mut(element_span(segment, wire));
            kernels::fold(wire, bytes, sum, first || replace, false);
        }
    }
}

/// Whether a whole block, as a program wrote it, holds only finite numbers.
pub fn is_finite(layout: &ModelLayout, block: BlockId, payload: &[u8]) -> bool {
    let start = layout.block_bytes(block).start;
    layout.segments(block).iter().all(|segment| {
        wire(segment.dtype).is_none_or(|wire| {
            kernels::all_finite(
                wire,
                &payload[(segment.bytes.start - start) as usize..(segment.bytes.end - start) as usize],
            )
        })
    })
}

/// As [`is_finite`], for a block in a region that nobody writes.
pub fn region_is_finite(layout: &ModelLayout, block: BlockId, region: &Region) -> bool {
    // SAFETY: the contribution is sealed: its program waits in fsync or close.
    is_finite(layout, block, unsafe { region.memory().bytes(span(&layout.block_bytes(block))) })
}

/// The first block in which one of the `written` byte ranges holds NaN or Inf.
pub fn written_is_finite(layout: &ModelLayout, region: &Region, written: &[Range<u64>]) -> Option<BlockId> {
    for range in written.iter().filter(|range| !range.is_empty()) {
        for block in (layout.block_of(range.start).0..=layout.block_of(range.end - 1).0).map(BlockId) {
            for segment in layout.segments(block) {
                let Some(wire) = wire(segment.dtype) else { continue };
                let size = wire.size() as u64;
                // Whole elements only; one that is written in part is judged when it is read.
                let start = segment.bytes.start
                    + range.start.saturating_sub(segment.bytes.start).next_multiple_of(size);
                let end = segment.bytes.end.min(range.end);
                let end = end.saturating_sub((end.saturating_sub(segment.bytes.start)) % size);
                if start >= end {
                    continue;
                }
                // SAFETY: the writer is in fsync or close, and nobody else knows the buffer.
                if !kernels::all_finite(wire, unsafe { region.memory().bytes(span(&(start..end))) }) {
                    return Some(block);
                }
            }
        }
    }
    None
}
