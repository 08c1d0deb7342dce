//! A partition, the payloads of its sources, and the expected result.

use std::sync::Arc;

use common::{BLOCK, Reference, decode, elements, encode, encode_block, initial_weights, noise};
use libmodelio::bytes::kernels::{self, Wire};
use libmodelio::vocabulary::coding::{Coding, Form};
use libmodelio::vocabulary::groups::Groups;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout, PartitionLayout};
use libmodelio::vocabulary::reducer::{Combine, Hyper, Reducer, Step};
use libmodelio::vocabulary::tensor_steps::TensorSteps;
use libmodelio::wire::Work;
use ps_backend::partition::store::{
    BlockInput, Home, Limits, Merge, PartitionError, PartitionJob, PartitionStore, Payload,
};
use ps_backend::state_copies::StateCopies;
use test_devices::one_by_one::OneByOne;

use crate::common;
use crate::watching::Watcher;
use test_devices::fp8;

/// Several blocks of each type, and blocks in which types change.
pub fn model() -> ModelLayout {
    let i64 = DType::parse("I64").unwrap();
    let tensors = vec![
        ("ids".to_owned(), i64, vec![10_001]),
        ("w".to_owned(), DType::F32, vec![60_003]),
        ("b".to_owned(), DType::BF16, vec![70_001]),
        ("h".to_owned(), DType::F16, vec![50_011]),
        ("e".to_owned(), DType::E4M3, vec![70_007]),
        ("f".to_owned(), DType::E5M2, vec![30_005]),
    ];
    ModelLayout::new(tensors, BLOCK).unwrap()
}

pub fn partition_of(model: &ModelLayout, is_mine: impl Fn(u32) -> bool) -> PartitionLayout {
    let blocks: Vec<_> = (0..model.blocks()).filter(|&block| is_mine(block)).map(BlockId).collect();
    model.partition(&blocks).unwrap()
}

/// A store that nothing is loaded into yet.
pub fn empty(partition: PartitionLayout, reducer: Reducer) -> PartitionStore {
    PartitionStore::new(partition, reducer, Limits::default(), Home::default()).unwrap()
}

/// A store of all of a model, with these weights.
pub fn loaded(model: &ModelLayout, reducer: Reducer, weights: &[u8]) -> PartitionStore {
    loaded_with(partition_of(model, |_| true), reducer, Limits::default(), Home::default(), weights)
}

/// A store of a partition, with these weights.
pub fn loaded_with(
    partition: PartitionLayout,
    reducer: Reducer,
    limits: Limits,
    home: Home,
    weights: &[u8],
) -> PartitionStore {
    let layout = Arc::clone(partition.layout());
    let store = PartitionStore::new(partition, reducer, limits, home).unwrap();
    for block in (0..layout.blocks()).map(BlockId) {
        assert!(store.load(block, &weights[bytes_of(&layout, block)]).unwrap());
    }
    store.finish_loading().unwrap();
    store
}

/// The first step of so many contributions, with the defaults of its settings.
pub fn step(reducer: Reducer, contributions: u32) -> Step {
    Step { reducer, hyper: Hyper::default(), contributions, t: 1, ..Step::default() }
}

/// A payload that is written as a whole.
pub fn checked(bytes: &[u8]) -> BlockInput<'_> {
    BlockInput { payload: Payload::Plain(bytes), written: None, check: true }
}

/// How a block is sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    Plain,
    Wide,
    /// As wide, at an address that is no multiple of four.
    Shifted,
    /// As wide, into the memory of the sum where that is possible.
    InPlace,
    /// In a form that loses nothing of these numbers. As plain if values replace others.
    Coded,
}

pub const WAYS: [Way; 5] = [Way::Plain, Way::Wide, Way::Shifted, Way::InPlace, Way::Coded];

/// The noise as an element of the type has it.
fn number(dtype: DType, seed: usize, i: usize) -> f32 {
    let exact = noise(seed, i);
    match Wire::of(dtype) {
        Some(wire) if wire.size() == 1 => fp8::value(wire, fp8::code(wire, exact.into())) as f32,
        _ => exact,
    }
}

/// What one source sends.
#[derive(Clone, Debug)]
pub struct Source {
    pub seed: usize,
    pub way: Way,
    pub blocks: Vec<BlockId>,
}

impl Source {
    /// The bytes of `block` as they lie in the model.
    pub fn plain(&self, layout: &ModelLayout, block: BlockId) -> Vec<u8> {
        encode_block(layout, block, self.seed as u8, |i| noise(self.seed, i))
    }

    pub fn wide(&self, layout: &ModelLayout, block: BlockId) -> Vec<u8> {
        let (plain, start) = (self.plain(layout, block), layout.block_bytes(block).start);
        let segments = layout.segments(block).iter();
        segments
            .flat_map(|segment| {
                if segment.dtype.is_reducible() {
                    let values = segment.element..segment.element + segment.elements();
                    let dtype = segment.dtype;
                    values.flat_map(|i| number(dtype, self.seed, i as usize).to_le_bytes()).collect()
                } else {
                    let range = segment.bytes.start - start..segment.bytes.end - start;
                    plain[range.start as usize..range.end as usize].to_vec()
                }
            })
            .collect()
    }

    fn coded(&self, coding: Coding, layout: &ModelLayout, block: BlockId) -> Vec<u8> {
        let (plain, start) = (self.plain(layout, block), layout.block_bytes(block).start);
        let segments = layout.segments(block).iter();
        segments
            .flat_map(|segment| {
                let Some(count) = Coding::elements(segment) else {
                    let range = segment.bytes.start - start..segment.bytes.end - start;
                    return plain[range.start as usize..range.end as usize].to_vec();
                };
                let first = segment.element as usize;
                let mut values: Vec<f32> =
                    (first..first + count).map(|i| number(segment.dtype, self.seed, i)).collect();
                let mut out = vec![0; coding.bytes(count)];
                kernels::coded::encode(coding, &mut values, &mut out);
                assert!(values.iter().all(|left| *left == 0.0));
                out
            })
            .collect()
    }

    /// Hands the payload of `block` to `give`.
    fn with<T>(
        &self,
        job: &PartitionJob,
        layout: &ModelLayout,
        block: BlockId,
        give: impl FnOnce(Payload<'_>) -> T,
    ) -> T {
        let replaces = job.work().combine().is_none_or(Combine::replaces);
        match self.way {
            Way::Coded if !replaces => {
                let coding = ["bf16", "fp16", "topk(1)"][self.seed % 3].parse().unwrap();
                give(Payload::Coded(coding, &self.coded(coding, layout, block)))
            }
            Way::Plain | Way::Coded => give(Payload::Plain(&self.plain(layout, block))),
            Way::Wide | Way::InPlace => give(Payload::Wide(&self.wide(layout, block))),
            Way::Shifted => {
                let wide = self.wide(layout, block);
                let mut room = vec![0; wide.len() + 8];
                let at = room.as_ptr().align_offset(4) + 1;
                room[at..at + wide.len()].copy_from_slice(&wide);
                give(Payload::Wide(&room[at..at + wide.len()]))
            }
        }
    }

    pub fn add(&self, job: &Arc<PartitionJob>, layout: &ModelLayout, block: BlockId) {
        if self.way == Way::InPlace
            && let Some(mut target) = job.destination(block, Form::Wide).unwrap()
        {
            // It comes in pieces, after others that were lost.
            target.bytes().fill(0xff);
            let wide = self.wide(layout, block);
            let (first, second) = wide.split_at(wide.len() / 3);
            target.bytes()[..first.len()].copy_from_slice(first);
            target.bytes()[first.len()..].copy_from_slice(second);
            assert!(target.complete(None));
            return;
        }
        assert!(self.with(job, layout, block, |payload| job.add(block, payload)).unwrap());
    }

    pub fn finish(&self, job: &PartitionJob, layout: &ModelLayout, block: BlockId) {
        assert!(self.with(job, layout, block, |payload| job.finish(block, Some(payload))).unwrap());
    }
}

/// Concludes the job, after its version was made if that changes state in place.
pub fn conclude(store: &PartitionStore, job: &Arc<PartitionJob>) -> Result<Option<Merge>, PartitionError> {
    if job.is_in_place() {
        let making = store.make(job)?;
        (0..store.partition().layout().blocks()).try_for_each(|block| making.block(BlockId(block)))?;
    }
    store.conclude(job)
}

pub fn bytes_of(layout: &ModelLayout, block: BlockId) -> std::ops::Range<usize> {
    let range = layout.block_bytes(block);
    range.start as usize..range.end as usize
}

/// A store and its scalar counterpart.
pub struct Twin {
    pub store: PartitionStore,
    pub layout: Arc<ModelLayout>,
    pub reducer: Reducer,
    pub hyper: Hyper,
    reference: Reference,
    /// The expected value of bytes that are not reduced.
    raw: Vec<u8>,
    pub version: Version,
    t: u64,
    /// Contributions of the coming version so far.
    sent: Vec<Source>,
    watcher: Arc<Watcher>,
}

/// A version in which every tensor of the model is written.
pub fn reduces_all(store: &PartitionStore, step: Step, fresh_state: bool) -> Work {
    let tensors = TensorSteps::uniform(store.partition().tensor_ends().len(), step.t);
    Work::Reduce { step, tensors, groups: Groups::default(), factors: Default::default(), fresh_state }
}

impl Twin {
    pub fn new(partition: PartitionLayout, reducer: Reducer, hyper: Hyper, limits: Limits) -> Twin {
        Twin::with_state(partition, reducer, hyper, limits, Home::Host(StateCopies::Double))
    }

    pub fn with_state(
        partition: PartitionLayout,
        reducer: Reducer,
        hyper: Hyper,
        limits: Limits,
        home: Home,
    ) -> Twin {
        let layout = Arc::clone(partition.layout());
        let store = PartitionStore::new(partition, reducer, limits, home).unwrap();
        let watcher = Watcher::of(&store);
        let weights = initial_weights(&layout);
        for block in (0..layout.blocks()).map(BlockId) {
            assert!(store.newest().is_none());
            assert!(store.load(block, &weights[bytes_of(&layout, block)]).unwrap());
        }
        store.finish_loading().unwrap();
        let reference = Reference::new(&layout);
        let version = Version(0);
        let (t, sent) = (0, Vec::new());
        Twin { store, layout, reducer, hyper, reference, raw: weights, version, t, sent, watcher }
    }

    /// What there is was brought into `store`, which takes the place of the one there was.
    pub fn moved_to(&mut self, store: PartitionStore) {
        self.watcher.check(&self.store);
        self.store = store;
        let before = std::mem::replace(&mut self.watcher, Watcher::of(&self.store));
        assert!(before.knows_nothing());
    }

    pub fn blocks(&self) -> impl Iterator<Item = BlockId> + use<> {
        (0..self.layout.blocks()).map(BlockId)
    }

    /// Another reducer from the next version on.
    pub fn change(&mut self, reducer: Reducer) {
        if reducer != self.reducer {
            self.reducer = reducer;
            self.reference.reset_state();
            self.t = 0;
        }
    }

    pub fn begin_add(&self) -> Result<Arc<PartitionJob>, PartitionError> {
        self.store.begin(self.version, Work::Add { combine: self.reducer.combine() }, true)
    }

    /// `more` contributions come besides those of concluded plans.
    pub fn begin_reduce(&self, more: usize) -> Result<Arc<PartitionJob>, PartitionError> {
        let contributions = (self.sent.len() + more).max(1) as u32;
        let step = Step {
            reducer: self.reducer,
            hyper: self.hyper.clone(),
            contributions,
            t: self.t + 1,
            norm: None,
            ..Step::default()
        };
        let work = reduces_all(&self.store, step, self.t == 0);
        self.store.begin(self.version, work, true)
    }

    /// Adds up what `sources` send and concludes it.
    pub fn add(&mut self, sources: &[Source]) {
        let job = self.begin_add().unwrap();
        for source in sources {
            source.blocks.iter().for_each(|&block| source.add(&job, &self.layout, block));
        }
        let merge = conclude(&self.store, &job).unwrap();
        drop(job);
        if let Some(merge) = merge {
            assert!(matches!(self.begin_add(), Err(PartitionError::Busy)));
            // Some twice, some not at all: those are done by dropping it.
            merge.run(0..merge.len() / 2);
            merge.run(0..merge.len() * 2 / 3);
        }
        self.sent.extend_from_slice(sources);
    }

    /// Makes a version of what `sources` send, block by block, the last of each block finishing it.
    pub fn reduce(&mut self, sources: &[Source]) {
        let job = self.begin_reduce(sources.len()).unwrap();
        for block in self.blocks() {
            self.finish_block(&job, block, sources);
        }
        assert_eq!(self.store.newest().unwrap().version(), self.version, "nothing is shown yet");
        assert!(conclude(&self.store, &job).unwrap().is_none());
        self.published(sources);
    }

    pub fn finish_block(&self, job: &Arc<PartitionJob>, block: BlockId, sources: &[Source]) {
        let senders: Vec<_> = sources.iter().filter(|source| source.blocks.contains(&block)).collect();
        match senders.split_last() {
            None => assert!(job.finish(block, None).unwrap()),
            Some((last, others)) => {
                others.iter().for_each(|source| source.add(job, &self.layout, block));
                last.finish(job, &self.layout, block);
            }
        }
    }

    /// The store concludes a version, and so does the model.
    pub fn concludes(&mut self, job: Arc<PartitionJob>, sources: &[Source]) {
        conclude(&self.store, &job).unwrap();
        drop(job);
        self.published(sources);
    }

    /// The store has concluded the version: so does the model.
    pub fn published(&mut self, sources: &[Source]) {
        self.version = self.version.next();
        self.t += 1;
        self.sent.extend_from_slice(sources);
        let sent = std::mem::take(&mut self.sent);
        let layout = &self.layout;
        let mut merged: Vec<f32> = self.reference.weights.iter().map(|&weight| weight as f32).collect();
        let mut contributions = Vec::new();
        for source in &sent {
            let mut bytes = encode(layout, 0, |_| 0.0);
            for &block in &source.blocks {
                bytes[bytes_of(layout, block)].copy_from_slice(&source.plain(layout, block));
            }
            let values = decode(layout, &bytes);
            if self.reducer == Reducer::Assign {
                for ((at, i, _), value) in elements(layout).zip(&values) {
                    if source.blocks.contains(&layout.block_of(at as u64)) {
                        merged[i] = *value;
                    }
                }
                for &block in &source.blocks {
                    self.raw[bytes_of(layout, block)].copy_from_slice(&source.plain(layout, block));
                }
            }
            contributions.push(values);
        }
        if self.reducer == Reducer::Assign {
            contributions = vec![merged];
        } else if contributions.is_empty() {
            contributions = vec![vec![0.0; self.reference.weights.len()]];
        }
        self.reference.step(self.reducer, &self.hyper, &contributions);
    }

    /// Checks the newest version, its checksums, and the watcher's record.
    pub fn check(&self, what: &str) -> Vec<u8> {
        self.watcher.check(&self.store);
        let newest = self.store.newest().unwrap();
        assert_eq!(newest.version(), self.version, "{what}");
        let bytes: Vec<u8> = self.blocks().flat_map(|block| newest.block(block).to_vec()).collect();
        self.reference.check(&self.layout, &bytes, what);
        for segment in self.blocks().flat_map(|block| self.layout.segments(block)) {
            if !segment.dtype.is_reducible() {
                let range = segment.bytes.start as usize..segment.bytes.end as usize;
                assert!(bytes[range.clone()] == self.raw[range.clone()], "{what}: opaque bytes {range:?}");
            }
        }
        for block in self.blocks() {
            let sum = crc32c(newest.block(block));
            assert_eq!((newest.checksum(block), newest.checksum(block)), (sum, sum), "{what}: block {block}");
        }
        bytes
    }
}

/// As the definition says, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 })
    })
}
