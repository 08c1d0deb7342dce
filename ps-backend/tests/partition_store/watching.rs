//! Watchers learn of exactly the versions that there are, and no version is written while it is published.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use common::{BLOCK, floats_layout};
use libmodelio::bytes::crc32c::crc32c;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::region::Region;
use libmodelio::transport::rdma::published::{Absent, DIRECTORY, Directory, ENTRY, find};
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::reducer::{Hyper, Reducer, Step};
use libmodelio::wire::DataKind;
use libmodelio::wire::Work;
use parking_lot::Mutex;
use proptest::prelude::*;
use ps_backend::partition::store::{
    Home, Limits, PartitionError, PartitionJob, PartitionStore, Payload, PinnedState, PinnedVersion,
    VersionWatch,
};
use ps_backend::state_copies::StateCopies;
use test_devices::one_by_one::OneByOne;

use crate::common;
use crate::driver::{bytes_of, partition_of, reduces_all};

/// What lies there, as somebody outside of the process would find it.
fn outside(memory: &Mapping, at: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let got = nix::sys::uio::pread(memory.fd().expect("a memfd"), &mut bytes, at as i64);
    assert_eq!(got, Ok(len));
    bytes
}

fn sum_of(memory: &Region) -> u32 {
    crc32c(&outside(memory.memory(), 0, memory.memory().len()))
}

/// Records the published versions and their contents.
#[derive(Debug, Default)]
pub struct Watcher {
    there: Mutex<BTreeMap<Version, (Region, u32)>>,
}

impl VersionWatch for Watcher {
    fn published(&self, version: Version, memory: &Region) {
        let mut there = self.there.lock();
        assert!(there.keys().all(|&known| known < version), "{version} is published after newer ones");
        let distinct = |(known, _): &(Region, u32)| {
            known.key() != memory.key() && !Arc::ptr_eq(known.memory(), memory.memory())
        };
        assert!(there.values().all(distinct), "{version} lies where another version does");
        there.insert(version, (memory.clone(), sum_of(memory)));
    }

    fn retired(&self, version: Version) {
        let (memory, sum) = self.there.lock().remove(&version).expect("what is retired was published");
        assert_eq!(sum_of(&memory), sum, "{version} was written before it was retired");
    }
}

impl Watcher {
    /// Attached to `store`.
    pub fn of(store: &PartitionStore) -> Arc<Watcher> {
        let watcher = Arc::<Watcher>::default();
        store.watch(Arc::clone(&watcher) as Arc<dyn VersionWatch>);
        watcher
    }

    /// It knows exactly the versions of `store`, and their contents have not changed.
    pub fn check(&self, store: &PartitionStore) {
        let there = self.there.lock();
        let known: Vec<Version> = there.keys().copied().collect();
        assert_eq!(known, if store.is_loaded() { store.versions() } else { Vec::new() });
        for (version, (memory, sum)) in &*there {
            assert_eq!(sum_of(memory), *sum, "{version} was written while it was published");
        }
    }

    pub fn knows_nothing(&self) -> bool {
        self.there.lock().is_empty()
    }
}

const BLOCKS: u32 = 3;

/// A partition of a few blocks of floats, to be loaded.
fn to_be_loaded(limits: Limits) -> PartitionStore {
    let model = floats_layout((BLOCKS * BLOCK) as usize / 4 - 100);
    PartitionStore::new(
        partition_of(&model, |_| true),
        Reducer::Momentum,
        limits,
        Home::Host(StateCopies::Double),
    )
    .unwrap()
}

fn payload(store: &PartitionStore, block: u32, value: f32) -> Vec<u8> {
    let len = bytes_of(store.partition().layout(), BlockId(block)).len();
    value.to_le_bytes().repeat(len / 4)
}

/// A partition at `version`, which was brought from elsewhere if that is not 0.
fn loaded(version: u64, limits: Limits, watcher: &mut Vec<Arc<Watcher>>) -> PartitionStore {
    let store = to_be_loaded(limits);
    watcher.push(Watcher::of(&store));
    if version > 0 {
        assert!(store.load(BlockId(0), &payload(&store, 0, 9.0)).unwrap());
        store.begin_at(Version(version), Reducer::Momentum).unwrap();
    }
    for block in 0..BLOCKS {
        watcher[0].check(&store);
        assert!(
            watcher[0].knows_nothing() && matches!(store.finish_loading(), Err(PartitionError::NotLoaded(_)))
        );
        assert!(store.load_piece(BlockId(block), DataKind::Weights, &payload(&store, block, 1.0)).unwrap());
        if version > 0 {
            assert!(matches!(store.finish_loading(), Err(PartitionError::NotLoaded(_))));
            assert!(store.load_piece(BlockId(block), DataKind::Slot(0), &[]).unwrap());
        }
    }
    assert!(watcher[0].knows_nothing(), "it is not complete before somebody says so");
    store.finish_loading().unwrap();
    assert_eq!(store.versions(), [Version(version)]);
    store
}

fn reduces(store: &PartitionStore, t: u64) -> Work {
    let step =
        Step { reducer: Reducer::Momentum, hyper: Hyper::default(), contributions: 1, t, ..Step::default() };
    reduces_all(store, step, false)
}

fn finish(store: &PartitionStore, job: &PartitionJob, blocks: u32, value: f32) {
    for block in 0..blocks {
        // Some are carried over.
        let payload = (!(block + value as u32).is_multiple_of(3)).then(|| payload(store, block, value));
        assert!(job.finish(BlockId(block), payload.as_deref().map(Payload::Plain)).unwrap());
    }
}

#[derive(Clone, Copy, Debug)]
enum Move {
    Begin { assigns: bool },
    Add { concludes: bool },
    Finish { blocks: u32 },
    Conclude,
    Drop { gives_up: bool },
    Hold { newest: bool },
    Release(u8),
    Keep,
    Forget,
    Limits { retain: usize, buffers: usize },
    Spare,
    Watch,
}

fn moves() -> impl Strategy<Value = Move> {
    prop_oneof![
        6 => any::<bool>().prop_map(|assigns| Move::Begin { assigns }),
        6 => prop_oneof![Just(BLOCKS), 0..BLOCKS].prop_map(|blocks| Move::Finish { blocks }),
        8 => Just(Move::Conclude),
        1 => any::<bool>().prop_map(|gives_up| Move::Drop { gives_up }),
        1 => any::<bool>().prop_map(|concludes| Move::Add { concludes }),
        2 => any::<bool>().prop_map(|newest| Move::Hold { newest }),
        3 => any::<u8>().prop_map(Move::Release),
        1 => Just(Move::Keep),
        1 => Just(Move::Forget),
        2 => (0..4usize, 0..8usize).prop_map(|(retain, buffers)| Move::Limits { retain, buffers }),
        2 => Just(Move::Spare),
        1 => Just(Move::Watch),
    ]
}

/// A store, and the versions that are held.
struct Play {
    store: PartitionStore,
    job: Option<Arc<PartitionJob>>,
    pins: Vec<PinnedVersion>,
    kept: Vec<PinnedState>,
    value: f32,
}

impl Play {
    fn take(&mut self, step: Move, watchers: &mut Vec<Arc<Watcher>>) {
        let newest = *self.store.versions().last().unwrap();
        self.value += 1.0;
        match step {
            Move::Begin { assigns } => {
                let work =
                    if assigns { Work::Assign { token: 0 } } else { reduces(&self.store, newest.0 + 1) };
                match self.store.begin(newest, work, false) {
                    Ok(job) => self.job = Some(job),
                    Err(error) => assert!(error.is_transient(), "{error}"),
                }
            }
            Move::Add { concludes } => {
                let work = Work::Add { combine: Reducer::Momentum.combine() };
                if let Ok(job) = self.store.begin(newest, work, false) {
                    let payload = payload(&self.store, 1, self.value);
                    assert!(job.add(BlockId(1), Payload::Plain(&payload)).unwrap());
                    if concludes {
                        drop(self.store.conclude(&job).unwrap());
                    }
                }
            }
            Move::Finish { blocks } => {
                if let Some(job) = &self.job {
                    for block in 0..blocks {
                        let payload = payload(&self.store, block, self.value);
                        match job.finish(BlockId(block), Some(Payload::Plain(&payload))) {
                            Ok(finite) => assert!(finite),
                            Err(error) => assert!(matches!(error, PartitionError::Complete(_)), "{error}"),
                        }
                    }
                }
            }
            Move::Conclude => {
                if let Some(job) = &self.job {
                    match self.store.conclude(job) {
                        Ok(merge) => {
                            assert!(merge.is_none());
                            self.job = None;
                            assert_eq!(self.store.versions().last(), Some(&newest.next()));
                        }
                        Err(error) => assert!(matches!(error, PartitionError::Unfinished(_)), "{error}"),
                    }
                }
            }
            Move::Drop { gives_up } => {
                if let Some(job) = self.job.take().filter(|_| gives_up) {
                    job.give_up();
                }
            }
            Move::Hold { newest } => {
                let oldest = self.store.versions()[0];
                self.pins.extend(if newest { self.store.newest() } else { self.store.version(oldest) });
            }
            Move::Release(which) if !self.pins.is_empty() => {
                self.pins.swap_remove(usize::from(which) % self.pins.len());
            }
            Move::Release(_) => {}
            Move::Keep => self.kept.push(self.store.keep().unwrap()),
            Move::Forget => self.kept.clear(),
            Move::Limits { retain, buffers } => self.store.set_limits(Limits { retain, buffers }),
            Move::Spare => drop(self.store.add_spare(2).unwrap()),
            Move::Watch => watchers.push(Watcher::of(&self.store)),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn watchers_know_exactly_the_versions_that_there_are(
        from in prop_oneof![Just(0), 1..1000u64],
        moves in prop::collection::vec(moves(), 10..120),
    ) {
        let mut watchers = Vec::new();
        let store = loaded(from, Limits { retain: 1, buffers: 5 }, &mut watchers);
        watchers.push(Watcher::of(&store));
        let mut play = Play { store, job: None, pins: Vec::new(), kept: Vec::new(), value: 0.0 };
        for step in moves {
            play.take(step, &mut watchers);
            watchers.iter().for_each(|watcher| watcher.check(&play.store));
        }
        let Play { store, job, pins, kept, .. } = play;
        let versions = store.versions();
        drop((store, kept));
        // As long as one version is held, all of them are there.
        for pin in pins {
            prop_assert!(watchers.iter().all(|watcher| watcher.there.lock().keys().eq(&versions)));
            drop(pin);
        }
        prop_assert!(watchers.iter().all(|watcher| watcher.knows_nothing()));
        drop(job);
    }
}

#[test]
fn a_partition_that_was_never_complete_publishes_nothing() {
    let store = to_be_loaded(Limits::default());
    let (early, mut watchers) = (Watcher::of(&store), Vec::new());
    assert!(store.load(BlockId(0), &payload(&store, 0, 1.0)).unwrap());
    watchers.push(Watcher::of(&store));
    store.set_limits(Limits { retain: 0, buffers: 2 });
    drop(store);
    assert!(early.knows_nothing() && watchers[0].knows_nothing());
    // One that is there and complete says so but once.
    let store = loaded(7, Limits::default(), &mut Vec::new());
    let late = Watcher::of(&store);
    store.finish_loading().unwrap();
    late.check(&store);
    assert!(matches!(store.begin_at(Version(9), Reducer::Sgd), Err(PartitionError::Loaded)));
    late.check(&store);
}

/// Shows versions in a directory, as a shard does to those who read past its CPU.
#[derive(Debug)]
struct Shown {
    directory: Mutex<Directory>,
    buffers: Mutex<HashMap<u32, Arc<Mapping>>>,
    sums: Mutex<HashMap<Version, u32>>,
}

impl VersionWatch for Shown {
    fn published(&self, version: Version, memory: &Region) {
        let key = memory.key().0 as u32;
        let bytes = memory.memory().len() as u64;
        self.buffers.lock().insert(key, Arc::clone(memory.memory()));
        self.sums.lock().insert(version, sum_of(memory));
        let address = memory.memory().start().addr().get() as u64;
        self.directory.lock().publish(version, address, key, bytes);
    }

    fn retired(&self, version: Version) {
        self.directory.lock().retire(version);
    }
}

#[derive(Debug, Default)]
struct Counts {
    accepted: u64,
    /// Rejected, and it would have been wrong.
    overwritten: u64,
    late: u64,
}

impl Shown {
    /// Reads a version, and sees whether it has got it. One who dawdles in the middle is overtaken.
    fn read(&self, directory: &Mapping, oldest: bool, dawdles: bool, counts: &mut Counts) {
        let copy = outside(directory, 0, DIRECTORY);
        let Err(Absent { newest: Some(newest), .. }) = find(&copy, Version(u64::MAX)) else { return };
        let wanted = if oldest { newest.0.saturating_sub(1) } else { newest.0 };
        let Ok(seen) = find(&copy, Version(wanted)) else { return };
        let buffer = Arc::clone(&self.buffers.lock()[&seen.key]);
        assert_eq!(seen.place(0, buffer.len() as u64), Some(buffer.start().addr().get() as u64));
        let half = buffer.len() / 2;
        let mut bytes = outside(&buffer, 0, half);
        if dawdles {
            std::thread::sleep(Duration::from_millis(2));
        }
        bytes.extend(outside(&buffer, half, buffer.len() - half));
        fence(Ordering::SeqCst);
        let entry = outside(directory, seen.offset(), ENTRY);
        let is_right = self.sums.lock().get(&seen.version) == Some(&crc32c(&bytes));
        match (seen.still_there(&entry), is_right) {
            (true, true) => counts.accepted += 1,
            (true, false) => panic!("{seen:?} was accepted with bytes of another version"),
            (false, false) => counts.overwritten += 1,
            (false, true) => counts.late += 1,
        }
    }
}

#[test]
fn versions_are_read_past_the_store_while_it_makes_others() {
    let store = loaded(0, Limits { retain: 1, buffers: 3 }, &mut Vec::new());
    let directory = Directory::new().unwrap();
    let memory = Arc::clone(directory.memory());
    let shown = Arc::new(Shown {
        directory: Mutex::new(directory),
        buffers: Mutex::default(),
        sums: Mutex::default(),
    });
    store.watch(Arc::clone(&shown) as Arc<dyn VersionWatch>);
    let deadline = Instant::now() + Duration::from_secs(600);
    let enough = |counts: &Counts| counts.accepted >= 300 && counts.overwritten >= 30;
    let counts = std::thread::scope(|scope| {
        let readers = [1u64, 2].map(|stride| {
            let (shown, memory) = (&shown, &memory);
            scope.spawn(move || {
                let mut counts = Counts::default();
                for round in 0u64.. {
                    if enough(&counts) || Instant::now() > deadline {
                        break;
                    }
                    let (oldest, dawdles) = (round.is_multiple_of(1 + stride), round % 16 == 15);
                    shown.read(memory, oldest, dawdles, &mut counts);
                }
                counts
            })
        });
        for version in 0.. {
            if readers.iter().all(|reader| reader.is_finished()) {
                break;
            }
            let job = store.begin(Version(version), reduces(&store, version + 1), false).unwrap();
            finish(&store, &job, BLOCKS, version as f32 % 1000.0);
            store.conclude(&job).unwrap();
        }
        readers.map(|reader| reader.join().unwrap())
    });
    assert!(counts.iter().all(enough), "{counts:?}");
    assert_eq!(shown.buffers.lock().len(), 3, "buffers are used again and again");
    drop(store);
    let nothing = outside(&memory, 0, DIRECTORY);
    assert_eq!(find(&nothing, Version(0)).unwrap_err().newest, None);
}
