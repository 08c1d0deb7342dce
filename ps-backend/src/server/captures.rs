//! Copies of a partition's newest version, for snapshots. First the version is pinned, so that no plan begins. When
//! the coordinator has found all shards at one version, it is copied, and the job goes on. `gradfs save` fetches from
//! the copy.
//!
//! Nobody can hold a job up for long. Its pins end a while after the first of them, whoever renews them. Then the job
//! runs for at least as long as it has stood still. A copy ends if nobody fetches from it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::{Generation, Version};
use libmodelio::vocabulary::layout::PartitionLayout;
use libmodelio::wire::{DataKind, Refusal};
use parking_lot::Mutex;

use crate::partition::executor::Executor;
use crate::partition::store::{PartitionStore, PinnedState};
use crate::snapshot::{Copied, Piece};

/// All pins of a model end this long after the first, so a job stands still no longer for a failed snapshot.
pub(super) const PINNED: Duration = Duration::from_secs(10);
/// Memory for a copy that is not made is given up after this. Other shards may take a while for theirs.
const RESERVED: Duration = Duration::from_secs(330);
/// A copy that nobody fetches from is given up after this.
const UNUSED: Duration = Duration::from_secs(60);
/// The most copies on a shard.
const MAX_CAPTURES: usize = 4;

/// The model's generation, and the number of the snapshot.
pub(super) type Name = (Generation, u64);

/// All captures of a shard.
#[derive(Default)]
pub(super) struct Captures(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    all: BTreeMap<Name, Capture>,
    /// The models that pins hold up, or have held up lately.
    holds: BTreeMap<Generation, Hold>,
}

/// The time for which pins hold a model up.
struct Hold {
    since: Instant,
    ended: Option<Instant>,
}

impl Hold {
    /// When the model may be held up again.
    fn is_over(&self) -> Option<Instant> {
        self.ended.map(|ended| ended + (ended - self.since))
    }
}

impl Inner {
    /// A model is held up now. Returns until when.
    fn holds(&mut self, model: Generation, now: Instant) -> Result<Instant, Refusal> {
        self.holds.retain(|_, hold| hold.is_over().is_none_or(|over| now < over));
        let hold = self.holds.entry(model).or_insert(Hold { since: now, ended: None });
        match hold.is_over() {
            None => Ok(hold.since + PINNED),
            Some(over) => Err(Refusal::other(format!(
                "the job has just stood still for a snapshot: run the command again in {:.0} s",
                (over - now).as_secs_f64().ceil()
            ))),
        }
    }

    /// Notes which models no pin holds up any more.
    fn end_holds(&mut self, now: Instant) {
        for (model, hold) in self.holds.iter_mut().filter(|(_, hold)| hold.ended.is_none()) {
            // A pin that is being renewed, or copied, is busy.
            let holds = |stage: &Stage| matches!(stage, Stage::Busy | Stage::Pinned(..));
            let is_held = self.all.iter().any(|((of, _), capture)| of == model && holds(&capture.stage));
            hold.ended = (!is_held).then_some(now);
        }
    }
}

struct Capture {
    partition: PartitionLayout,
    stage: Stage,
    until: Instant,
}

enum Stage {
    /// Memory is being taken.
    Reserving,
    /// Somebody works on it.
    Busy,
    Reserved(Box<Copied>),
    Pinned(Box<Copied>, PinnedState),
    Copied(Arc<Copied>),
}

/// The kinds of data that a snapshot needs of a partition.
fn kinds(slots: u8) -> impl Iterator<Item = DataKind> {
    [DataKind::Weights].into_iter().chain((0..slots.min(2)).map(DataKind::Slot)).chain([DataKind::Masters])
}

fn unknown() -> Refusal {
    Refusal::other("this shard has no such copy: it was given up, or the shard was restarted")
}

impl Captures {
    /// Takes memory for a copy. `starts_expiry` starts a thread that calls [`Self::expire`].
    pub(super) fn reserve(
        &self,
        name: Name,
        store: &PartitionStore,
        slots: u8,
        starts_expiry: impl FnOnce() -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        {
            let all = &mut self.0.lock().all;
            // The request was repeated.
            if all.contains_key(&name) {
                return Ok(());
            }
            if all.len() >= MAX_CAPTURES {
                let why = format!("{MAX_CAPTURES} snapshots are being saved: run the command again later");
                return Err(Refusal::other(why));
            }
            let partition = store.partition().clone();
            all.insert(name, Capture { partition, stage: Stage::Reserving, until: Instant::now() });
        }
        let copied = starts_expiry()
            .and_then(|()| Copied::reserve(store.partition().layout(), kinds(slots)).map_err(Refusal::other));
        self.put(
            name,
            Instant::now() + RESERVED,
            copied.map(|copied| ((), Stage::Reserved(Box::new(copied)))),
        )
    }

    /// Whether the model runs on for now before it may be held up again.
    pub(super) fn rests(&self, model: Generation, now: Instant) -> bool {
        let over = self.0.lock().holds.get(&model).and_then(Hold::is_over);
        over.is_some_and(|over| now < over)
    }

    /// Lets no plan begin from now on. The returned version stays the newest, unless a plan that has begun makes
    /// another one.
    pub(super) fn pin(&self, name: Name, store: &PartitionStore) -> Result<Version, Refusal> {
        let (copied, before) = match self.take(name)?.1 {
            Stage::Reserved(copied) => (copied, None),
            Stage::Pinned(copied, kept) => (copied, Some(kept)),
            Stage::Copied(copied) => {
                self.put(name, Instant::now() + UNUSED, Ok(((), Stage::Copied(copied))))?;
                return Err(Refusal::other("the copy is made"));
            }
            Stage::Reserving | Stage::Busy => return Err(unknown()),
        };
        let until = self.0.lock().holds(name.0, Instant::now());
        let kept = until.clone().and_then(|_| store.keep_instead_of(before).map_err(Refusal::other));
        let until = until.unwrap_or_else(|_| Instant::now());
        self.put(name, until, kept.map(|kept| (kept.version(), Stage::Pinned(copied, kept))))
    }

    /// Copies the pinned version, and the job goes on.
    pub(super) fn copy(
        &self,
        name: Name,
        version: Version,
        slots: u8,
        executor: &dyn Executor,
    ) -> Result<(), Refusal> {
        let copied = match self.take(name)?.1 {
            Stage::Pinned(mut copied, kept) => match kept.version() {
                pinned if pinned == version => copied
                    .fill(&kept, kinds(slots), executor)
                    .map(|()| Arc::new(*copied))
                    .map_err(Refusal::other),
                newest => Err(Refusal::NoVersion { wanted: version, newest }),
            },
            // The request was repeated.
            Stage::Copied(copied) => Ok(copied),
            Stage::Reserved(_) | Stage::Reserving | Stage::Busy => Err(unknown()),
        };
        self.put(name, Instant::now() + UNUSED, copied.map(|copied| ((), Stage::Copied(copied))))
    }

    /// Drops a capture that nobody needs any more.
    pub(super) fn release(&self, name: Name) {
        let mut inner = self.0.lock();
        inner.all.remove(&name);
        inner.end_holds(Instant::now());
    }

    /// Takes a capture's stage out, so that no other thread works on it.
    fn take(&self, name: Name) -> Result<(PartitionLayout, Stage), Refusal> {
        let all = &mut self.0.lock().all;
        let capture = all.get_mut(&name).ok_or_else(unknown)?;
        match std::mem::replace(&mut capture.stage, Stage::Busy) {
            Stage::Reserving | Stage::Busy => Err(Refusal::other("the copy is being made")),
            stage => Ok((capture.partition.clone(), stage)),
        }
    }

    /// Puts a capture's stage back, with a new deadline. On an error the capture is dropped.
    fn put<T>(&self, name: Name, until: Instant, now: Result<(T, Stage), Refusal>) -> Result<T, Refusal> {
        let mut inner = self.0.lock();
        let put = now.inspect_err(|_| drop(inner.all.remove(&name))).and_then(|(answer, stage)| {
            // It may have been released meanwhile.
            let capture = inner.all.get_mut(&name).ok_or_else(unknown)?;
            (capture.stage, capture.until) = (stage, until);
            Ok(answer)
        });
        inner.end_holds(Instant::now());
        put
    }

    /// Drops captures whose deadline has passed. False if none is left.
    pub(super) fn expire(&self, now: Instant) -> bool {
        let mut inner = self.0.lock();
        inner.all.retain(|(generation, snapshot), capture| {
            let lasts = matches!(capture.stage, Stage::Reserving | Stage::Busy) || now < capture.until;
            if !lasts {
                tracing::warn!(
                    generation = generation.0,
                    snapshot,
                    "a snapshot was given up: nobody reads it"
                );
            }
            lasts
        });
        inner.end_holds(now);
        !inner.all.is_empty()
    }

    /// A copy, and which blocks of the model it is of. It stays for a while from now on.
    pub(super) fn copied(&self, name: Name) -> Result<(Arc<Copied>, PartitionLayout), Refusal> {
        let all = &mut self.0.lock().all;
        let capture = all.get_mut(&name).ok_or_else(unknown)?;
        let Stage::Copied(copied) = &capture.stage else { return Err(unknown()) };
        capture.until = Instant::now() + UNUSED;
        Ok((Arc::clone(copied), capture.partition.clone()))
    }

    /// A piece of a copy.
    pub(super) fn fetch(&self, name: Name, (block, what): Piece) -> Result<Vec<u8>, Refusal> {
        let (copied, local) = {
            let all = &mut self.0.lock().all;
            let capture = all.get_mut(&name).ok_or_else(unknown)?;
            let local = capture.partition.local(block).ok_or(Refusal::NotMine { block })?;
            let Stage::Copied(copied) = &capture.stage else { return Err(unknown()) };
            capture.until = Instant::now() + UNUSED;
            (Arc::clone(copied), local)
        };
        Ok(copied.bytes(local, what).to_vec())
    }
}

#[cfg(test)]
mod tests {
    use libmodelio::vocabulary::ids::BlockId;
    use libmodelio::vocabulary::layout::{DType, ModelLayout};
    use libmodelio::vocabulary::reducer::Reducer;

    use super::*;
    use crate::partition::executor::Pool;
    use crate::partition::store::{Home, Limits, PartitionError};

    const NAME: Name = (Generation(1), 7);

    /// Blocks 1 and 2 of three, at version 0.
    fn store() -> PartitionStore {
        let layout = ModelLayout::blank(3 << 16, DType::F32, 1 << 16).unwrap();
        let partition = layout.partition(&[BlockId(1), BlockId(2)]).unwrap();
        let store =
            PartitionStore::new(partition, Reducer::Momentum, Limits::default(), Home::default()).unwrap();
        for block in [0, 1] {
            store.load(BlockId(block), &[block as u8 + 1; 1 << 16]).unwrap();
        }
        store.finish_loading().unwrap();
        store
    }

    fn begins(store: &PartitionStore) -> bool {
        match store.begin(Version(0), libmodelio::wire::Work::Assign { token: 0 }, false) {
            Ok(job) => {
                job.give_up();
                true
            }
            Err(PartitionError::Busy) => false,
            Err(error) => panic!("{error}"),
        }
    }

    fn cpu() -> Arc<dyn Executor> {
        Pool::start(1, None).unwrap()
    }

    #[test]
    fn a_job_stands_still_from_the_pin_to_the_copy_and_no_longer() {
        let (captures, store, cpu) = (Captures::default(), store(), cpu());
        captures.reserve(NAME, &store, 1, || Ok(())).unwrap();
        assert!(begins(&store), "memory alone holds nobody up");
        for _ in 0..2 {
            assert_eq!(captures.pin(NAME, &store).unwrap(), Version(0));
            assert!(!begins(&store));
        }
        captures.copy(NAME, Version(0), 1, &*cpu).unwrap();
        assert!(begins(&store));
        // Said again, and said too late.
        captures.copy(NAME, Version(0), 1, &*cpu).unwrap();
        captures.pin(NAME, &store).unwrap_err();
        assert!(begins(&store));
        for block in [1, 2] {
            let weights = captures.fetch(NAME, (BlockId(block), DataKind::Weights)).unwrap();
            assert_eq!(weights, [block as u8; 1 << 16]);
            assert_eq!(captures.fetch(NAME, (BlockId(block), DataKind::Slot(0))).unwrap(), [0; 1 << 16]);
            assert!(captures.fetch(NAME, (BlockId(block), DataKind::Masters)).unwrap().is_empty());
        }
        assert_eq!(
            captures.fetch(NAME, (BlockId(0), DataKind::Weights)),
            Err(Refusal::NotMine { block: BlockId(0) })
        );
        captures.release(NAME);
        captures.fetch(NAME, (BlockId(1), DataKind::Weights)).unwrap_err();
    }

    #[test]
    fn captures_that_nobody_uses_are_given_up() {
        let (captures, store) = (Captures::default(), store());
        captures.reserve(NAME, &store, 1, || Ok(())).unwrap();
        captures.pin(NAME, &store).unwrap();
        assert!(captures.expire(Instant::now()) && !begins(&store));
        assert!(!captures.expire(Instant::now() + PINNED));
        assert!(begins(&store));
        captures.copy(NAME, Version(0), 1, &*cpu()).unwrap_err();
        captures.pin(NAME, &store).unwrap_err();
        // A copy lives longer.
        captures.0.lock().holds.clear();
        captures.reserve(NAME, &store, 1, || Ok(())).unwrap();
        captures.pin(NAME, &store).unwrap();
        captures.copy(NAME, Version(0), 1, &*cpu()).unwrap();
        assert!(captures.expire(Instant::now() + PINNED));
        assert!(!captures.expire(Instant::now() + UNUSED));
    }

    #[test]
    fn whoever_pins_again_and_again_holds_a_job_up_for_half_of_the_time_at_most() {
        let (captures, store) = (Captures::default(), store());
        let others = (NAME.0, NAME.1 + 1);
        for name in [NAME, others] {
            captures.reserve(name, &store, 1, || Ok(())).unwrap();
            captures.pin(name, &store).unwrap();
        }
        let end = captures.0.lock().holds[&NAME.0].since + PINNED;
        // Renewed under either name, the pins end as early.
        captures.pin(others, &store).unwrap();
        captures.pin(NAME, &store).unwrap();
        assert!(captures.expire(end - Duration::from_millis(1)) && !begins(&store));
        assert!(!captures.expire(end));
        assert!(begins(&store));
        captures.reserve(NAME, &store, 1, || Ok(())).unwrap();
        let why = captures.pin(NAME, &store).unwrap_err().to_string();
        assert!(why.contains("has just stood still"), "{why}");
        assert!(begins(&store));
        let last = end + PINNED - Duration::from_millis(1);
        assert!(
            captures.rests(NAME.0, last) && !captures.rests(NAME.0, end + PINNED),
            "who saves again waits"
        );
        let mut inner = captures.0.lock();
        inner.holds(NAME.0, end + PINNED - Duration::from_millis(1)).unwrap_err();
        inner.holds(Generation(NAME.0.0 + 1), end).unwrap();
        inner.holds(NAME.0, end + PINNED).unwrap();
    }

    #[test]
    fn a_failed_capture_holds_nobody_up() {
        let (captures, store) = (Captures::default(), store());
        captures.pin(NAME, &store).unwrap_err();
        captures.reserve(NAME, &store, 1, || Err(Refusal::other("no thread"))).unwrap_err();
        captures.pin(NAME, &store).unwrap_err();
        captures.reserve(NAME, &store, 1, || Ok(())).unwrap();
        captures.pin(NAME, &store).unwrap();
        let another = captures.copy(NAME, Version(1), 1, &*cpu());
        assert_eq!(another, Err(Refusal::NoVersion { wanted: Version(1), newest: Version(0) }));
        assert!(begins(&store));
        let names = (0..MAX_CAPTURES as u64 + 1).map(|snapshot| (Generation(2), snapshot));
        let reserved = names.filter(|name| captures.reserve(*name, &store, 0, || Ok(())).is_ok());
        assert_eq!(reserved.count(), MAX_CAPTURES);
    }
}
