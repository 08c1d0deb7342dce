//! Snapshots that are being written into stores, shards' parts of them, and the loading of such parts. Each has a thread of its own. Whoever has
//! begun one asks again and again how far it is.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::{Generation, Version};
use libmodelio::wire::{Message, Refusal};
use parking_lot::{Condvar, Mutex};

/// The longest wait for the end before it is told how far a save is.
const PROMPT: Duration = Duration::from_millis(500);
/// A save that has ended is forgotten when nobody has asked for it for so long. So is a shard's part given up.
const UNASKED: Duration = Duration::from_secs(60);
/// A save that goes no further for so long has failed. Before its first byte, shards may take minutes for their memory.
const STALLED: Duration = Duration::from_secs(600);
/// The most saves of a process that go on.
const MAX_SAVES: usize = 64;

/// What is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
    /// This shard's copy of a snapshot.
    Copy,
    /// A whole snapshot, of which this shard has the coordinator.
    Job,
    /// The loading of this shard's blocks from a snapshot.
    Load,
}

/// A model's life, a snapshot of it, and what of that.
pub(super) type SaveName = (Generation, u64, Subject);

/// A save under way, or one that has ended.
#[derive(Debug)]
pub(super) struct Save {
    version: AtomicU64,
    dealt: AtomicU64,
    of: AtomicU64,
    written: AtomicU64,
    /// When it was asked for last. None if nobody wants it any more.
    asked: Mutex<Option<Instant>>,
    /// Whether somebody waits for it.
    hurries: AtomicBool,
    /// How many bytes were dealt with when that was looked at, and since when it has been as many.
    stood: Mutex<(u64, Instant)>,
    outcome: Mutex<Option<Result<(), Refusal>>>,
    ends: Condvar,
}

impl Save {
    fn new() -> Arc<Save> {
        let ([version, dealt, of, written], now) = (Default::default(), Instant::now());
        let (asked, stood) = (Mutex::new(Some(now)), Mutex::new((0, now)));
        let hurries = AtomicBool::new(false);
        let (outcome, ends) = (Mutex::default(), Condvar::new());
        Arc::new(Save { version, dealt, of, written, asked, hurries, stood, outcome, ends })
    }

    /// It is of this version, and has so many bytes.
    pub(super) fn is_of(&self, version: Version, bytes: u64) {
        self.version.store(version.0, Ordering::Relaxed);
        self.of.store(bytes, Ordering::Relaxed);
    }

    /// So many bytes more are dealt with.
    pub(super) fn goes_on(&self, bytes: u64) {
        self.dealt.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So many bytes are dealt with, and so many of them were written.
    pub(super) fn is_at(&self, dealt: u64, written: u64) {
        self.dealt.store(dealt, Ordering::Relaxed);
        self.written.store(written, Ordering::Relaxed);
    }

    /// Somebody asks for it.
    fn is_asked(&self) {
        if let Some(asked) = &mut *self.asked.lock() {
            *asked = Instant::now();
        }
    }

    /// Whether somebody has asked for it lately.
    pub(super) fn is_wanted(&self) -> bool {
        self.asked.lock().is_some_and(|asked| asked.elapsed() < UNASKED)
    }

    /// Whether somebody waits for it.
    pub(super) fn hurries(&self) -> bool {
        self.hurries.load(Ordering::Relaxed)
    }

    /// All its bytes, and those that were written.
    pub(super) fn bytes(&self) -> (u64, u64) {
        (self.of.load(Ordering::Relaxed), self.written.load(Ordering::Relaxed))
    }

    /// Whether it has gone no further for too long: its store hangs.
    fn has_stalled(&self) -> bool {
        let (dealt, mut stood) = (self.dealt.load(Ordering::Relaxed), self.stood.lock());
        if stood.0 != dealt {
            *stood = (dealt, Instant::now());
        }
        stood.1.elapsed() > STALLED
    }

    fn is_running(&self) -> bool {
        self.outcome.lock().is_none() && !self.has_stalled()
    }

    fn end(&self, outcome: Result<(), Refusal>) {
        *self.outcome.lock() = Some(outcome);
        self.ends.notify_all();
    }

    /// How far it is, at its end or after `within`.
    fn state(&self, within: Duration) -> Result<Message, Refusal> {
        let mut outcome = self.outcome.lock();
        if outcome.is_none() {
            self.ends.wait_for(&mut outcome, within);
        }
        let ended = outcome.clone().transpose()?.is_some();
        if !ended && self.has_stalled() {
            let why = format!("it has gone no further for {} s: its store may hang", STALLED.as_secs());
            return Err(Refusal::other(why));
        }
        let number = |of: &AtomicU64| of.load(Ordering::Relaxed);
        let (version, dealt) = (Version(number(&self.version)), number(&self.dealt));
        Ok(Message::Saved { version, dealt, of: number(&self.of), written: number(&self.written), ended })
    }
}

/// All saves of a process.
#[derive(Debug, Default)]
pub(super) struct Saves(Mutex<BTreeMap<SaveName, Arc<Save>>>);

impl Saves {
    /// How far a save is that was begun.
    ///
    /// # Errors
    /// Why it has failed. [`Refusal::Other`] if it is not known.
    pub(super) fn told(&self, name: SaveName) -> Result<Message, Refusal> {
        let save = self.0.lock().get(&name).cloned();
        let save = save.ok_or_else(|| Refusal::other("no such snapshot is being saved"))?;
        save.is_asked();
        save.state(Duration::ZERO)
    }

    /// Nobody wants this save any more.
    pub(super) fn cancel(&self, name: SaveName) {
        if let Some(save) = self.0.lock().get(&name) {
            *save.asked.lock() = None;
        }
    }

    /// Nobody wants a save of this model any more: it is deleted.
    pub(super) fn give_up(&self, model: Generation) {
        let all = self.0.lock();
        all.iter().filter(|((of, ..), _)| *of == model).for_each(|(_, save)| *save.asked.lock() = None);
    }

    /// Whether a whole snapshot of a model is being saved.
    pub(super) fn is_running(&self, model: Generation) -> bool {
        Saves::find_running(&self.0.lock(), model).is_some()
    }

    fn find_running(all: &BTreeMap<SaveName, Arc<Save>>, model: Generation) -> Option<&Arc<Save>> {
        let of_model = all.iter().filter(|((of, _, what), _)| (*of, *what) == (model, Subject::Job));
        of_model.map(|(_, save)| save).find(|save| save.is_running())
    }

    /// Begins a save by `work`, unless it has begun. Returns how far it is. If it `hurries`, so does one that has begun, also
    /// if this one has to wait for it.
    ///
    /// # Errors
    /// Those of `work`, and [`Refusal::Other`] without a thread, or if there are too many.
    pub(super) fn ask(
        &self,
        name: SaveName,
        hurries: bool,
        work: impl FnOnce(&Save) -> Result<(), Refusal> + Send + 'static,
    ) -> Result<Message, Refusal> {
        let save = {
            let all = &mut *self.0.lock();
            all.retain(|_, save| save.outcome.lock().is_none() || save.is_wanted());
            match all.get(&name) {
                Some(save) => Arc::clone(save),
                None if name.2 == Subject::Job
                    && let Some(running) = Saves::find_running(all, name.0) =>
                {
                    running.hurries.fetch_or(hurries, Ordering::Relaxed);
                    let why = "another snapshot of this model is being saved: run the command again later";
                    return Err(Refusal::other(why));
                }
                None if all.values().filter(|save| save.is_running()).count() >= MAX_SAVES => {
                    return Err(Refusal::other(format!("{MAX_SAVES} snapshots are being saved")));
                }
                None => {
                    let save = Save::new();
                    let ours = Arc::clone(&save);
                    let works = move || {
                        let outcome = catch_unwind(AssertUnwindSafe(|| work(&ours)));
                        ours.end(outcome.unwrap_or_else(|_| Err(Refusal::other("its thread has panicked"))));
                    };
                    let spawned = std::thread::Builder::new().name("saves".into()).spawn(works);
                    spawned.map_err(|error| Refusal::other(format!("no thread to save it: {error}")))?;
                    all.insert(name, Arc::clone(&save));
                    save
                }
            }
        };
        save.hurries.fetch_or(hurries, Ordering::Relaxed);
        save.is_asked();
        save.state(PROMPT)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    const NAME: SaveName = (Generation(1), 7, Subject::Copy);

    #[test]
    fn a_save_is_begun_once_and_tells_how_far_it_is() {
        let (saves, (sender, goes_on)) = (Saves::default(), channel::<()>());
        let told = saves.ask(NAME, false, move |save| {
            save.is_of(Version(3), 10);
            save.goes_on(4);
            goes_on.recv().map_err(Refusal::other)?;
            save.is_at(10, 2);
            Ok(())
        });
        let (version, of) = (Version(3), 10);
        assert_eq!(told, Ok(Message::Saved { version, dealt: 4, of, written: 0, ended: false }));
        sender.send(()).unwrap();
        for _ in 0..2 {
            let told = saves.ask(NAME, false, |_| panic!("it was begun"));
            assert_eq!(told, Ok(Message::Saved { version, dealt: 10, of, written: 2, ended: true }));
        }
    }

    #[test]
    fn who_hurries_hurries_the_snapshot_that_it_waits_for() {
        let (saves, (sender, goes_on)) = (Saves::default(), channel::<()>());
        let (seen, sees) = channel();
        let of = |snapshot| (Generation(1), snapshot, Subject::Job);
        let slow = move |save: &Save| {
            while !save.hurries() && goes_on.try_recv().is_err() {
                std::thread::yield_now();
            }
            seen.send(save.hurries()).map_err(Refusal::other)
        };
        saves.ask(of(1), false, slow).unwrap();
        saves.ask(of(2), true, |_| panic!("one at a time")).unwrap_err();
        assert!(sees.recv_timeout(Duration::from_secs(60)).unwrap());
        drop(sender);
    }

    #[test]
    fn a_save_that_fails_or_panics_is_refused_each_time() {
        let saves = Saves::default();
        for (at, works) in [(1, false), (2, true)] {
            let name = (Generation(1), at, Subject::Job);
            for _ in 0..2 {
                let told = saves.ask(name, false, move |_| match works {
                    false => Err(Refusal::other("the disk is full")),
                    true => panic!("it panics"),
                });
                assert!(matches!(told, Err(Refusal::Other(_))), "{told:?}");
            }
        }
    }
}
