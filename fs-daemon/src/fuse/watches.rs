//! Processes that use learners, and still live. A learner leaves with the last process that is killed of those that
//! have, or had, its `gradients` open. Before there is one, its lease waits for those that have opened its `weights`.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use libmodelio::vocabulary::ids::LearnerId;
use libmodelio::vocabulary::members::LeaveReason;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use super::process::{Exit, MAX_WATCHED, Process, Watcher, thread_group};
use crate::session::learner::{Learner, LearnerUse};
use crate::session::model::Model;

/// The processes of all learners.
#[derive(Default)]
pub struct Watches {
    /// By the watcher's key.
    watched: Mutex<HashMap<u64, Watched>>,
    next_key: AtomicU64,
    /// Held from before a program gets its learner until its process is watched, and while it is decided whether a
    /// learner is alone. So a program that is just opening counts.
    opening: RwLock<()>,
    watcher: OnceLock<Watcher>,
    /// Said once that some program's end cannot be seen.
    warned_of_strangers: AtomicBool,
}

struct Watched {
    model: Arc<Model>,
    uses: Uses,
    process: Arc<Process>,
}

/// What a process uses.
enum Uses {
    /// A learner whose `gradients` it has opened.
    Contributes(Arc<Learner>),
    /// A learner whose `weights` it has opened.
    Attends(Arc<Learner>),
    /// A learner that was dropped: the process hears why for as long as it lives.
    Dropped(LearnerId),
}

impl Uses {
    /// The learner, as long as it is in its job.
    fn learner(&self) -> Option<&Arc<Learner>> {
        match self {
            Uses::Contributes(learner) | Uses::Attends(learner) => Some(learner),
            Uses::Dropped(_) => None,
        }
    }
}

impl Watched {
    fn contributes_as(&self, learner: &Arc<Learner>) -> bool {
        matches!(&self.uses, Uses::Contributes(one) if Arc::ptr_eq(one, learner))
    }

    fn is_of(&self, learner: &Arc<Learner>) -> bool {
        self.uses.learner().is_some_and(|one| Arc::ptr_eq(one, learner))
    }

    fn is_of_dropped(&self, model: &Model, learner: LearnerId) -> bool {
        matches!(self.uses, Uses::Dropped(one) if one == learner) && std::ptr::eq(&*self.model, model)
    }
}

impl Watches {
    /// Starts the thread that notices their ends.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start() -> io::Result<Arc<Watches>> {
        let watches = Arc::new(Watches::default());
        let of_watcher = Arc::downgrade(&watches);
        let watcher = Watcher::start(move |key, exit| {
            if let Some(watches) = of_watcher.upgrade() {
                watches.ended(key, exit);
            }
        })?;
        let _ = watches.watcher.set(watcher);
        Ok(watches)
    }

    /// How many processes are watched.
    pub fn len(&self) -> usize {
        self.watcher.get().map_or(0, Watcher::watched)
    }

    /// A program is about to open some learner's `gradients`. No learner is found to be alone until the guard goes.
    pub fn opening(&self) -> RwLockReadGuard<'_, ()> {
        // An open may wait for the job, and others do not wait behind it.
        self.opening.read_recursive()
    }

    /// Thread `tid` of `process`, if that can be seen, has opened the learner's `gradients`: the violent end of its
    /// process is the learner's.
    pub fn opened(
        &self,
        model: &Arc<Model>,
        learner: &Arc<Learner>,
        tid: u32,
        process: Option<&Arc<Process>>,
    ) {
        if let Some(process) = process {
            self.uses(model, learner, tid, process, Uses::Contributes(Arc::clone(learner)));
        }
        if tid != 0 {
            return;
        }
        learner.note(LearnerUse::Unseen);
        if !self.warned_of_strangers.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                model = model.name,
                learner = learner.name,
                "a learner runs in a PID namespace that this daemon cannot see: if it is killed, what it has \
                 written by then counts. Start gradfs in a namespace that contains its learners"
            );
        }
    }

    /// Thread `tid` opens the learner's `weights`. This is nearly free once a process contributes. Processes that only
    /// read take half of the places at most, so that those which contribute find one.
    pub fn attended(&self, model: &Arc<Model>, learner: &Arc<Learner>, tid: u32) {
        if !learner.wants_attendants(model.job.controls().lease) || self.len() >= MAX_WATCHED / 2 {
            return;
        }
        if let Some(process) = self.process_of(tid) {
            self.uses(model, learner, tid, &process, Uses::Attends(Arc::clone(learner)));
            learner.report_use();
            // The learner may have left meanwhile.
            if model.learner(learner.id).is_err() {
                self.left(model, learner.id, false);
            }
        }
    }

    /// Thread `tid` of `process` uses the learner from now on.
    fn uses(&self, model: &Arc<Model>, learner: &Arc<Learner>, tid: u32, process: &Arc<Process>, uses: Uses) {
        let Some(watcher) = self.watcher.get() else { return };
        let is_known = {
            let mut watched = self.watched.lock();
            let is_its = |one: &&mut Watched| one.process.tgid() == process.tgid() && one.is_of(learner);
            if let Some(known) = watched.values_mut().find(is_its) {
                if let (Uses::Attends(_), Uses::Contributes(_)) = (&known.uses, &uses) {
                    known.uses = uses;
                    learner.note(LearnerUse::Contributes);
                }
                return;
            }
            watched.values().any(|one| Arc::ptr_eq(&one.process, process))
        };
        // For another learner of the process, the watcher needs another pidfd.
        let another = || Process::of_thread(tid).map(Arc::new);
        if let Some(process) = if is_known { another() } else { Some(Arc::clone(process)) } {
            self.watch(watcher, model, learner, process, uses);
        }
    }

    /// The process of thread `tid`, as [`Process::of_thread`] has it, but for a process that is watched without a look
    /// at `/proc`, if `tid` is its first thread.
    ///
    /// The number of a first thread is the process's own, and nobody else gets it before the process is reaped. So as
    /// long as the pidfd says that the process has not ended, a request of that number is the process's. The number of
    /// another thread may go to another process meanwhile, so other threads are looked up each time.
    pub fn process_of(&self, tid: u32) -> Option<Arc<Process>> {
        let known = {
            let watched = self.watched.lock();
            watched.values().find(|one| one.process.tgid() == tid).map(|one| Arc::clone(&one.process))
        };
        let lives = known.filter(|process| process.exited().is_none());
        lives.or_else(|| Process::of_thread(tid).map(Arc::new))
    }

    /// Whether thread `tid` is of a process that uses the learner: one that has opened its `gradients`. Processes that
    /// cannot be seen are not told apart.
    pub fn is_user(&self, learner: &Arc<Learner>, tid: u32) -> bool {
        if tid == 0 {
            return learner.has_unseen_users();
        }
        self.is_of_one(tid, |one| one.contributes_as(learner))
    }

    /// Whether a process is watched that contributes as the learner.
    pub fn has_users(&self, learner: &Arc<Learner>) -> bool {
        self.watched.lock().values().any(|one| one.contributes_as(learner))
    }

    /// Whether thread `tid` is of a process that has used a learner that was dropped since.
    pub fn has_used(&self, model: &Model, learner: LearnerId, tid: u32) -> bool {
        self.is_of_one(tid, |one| one.is_of_dropped(model, learner))
    }

    /// Whether thread `tid` is of a watched process of this kind.
    fn is_of_one(&self, tid: u32, is_one: impl Fn(&Watched) -> bool) -> bool {
        let processes: Vec<u32> = {
            let watched = self.watched.lock();
            watched.values().filter(|one| is_one(one)).map(|one| one.process.tgid()).collect()
        };
        // Most ask with their first thread, whose number is the process's.
        processes.contains(&tid)
            || !processes.is_empty() && thread_group(tid).is_some_and(|of| processes.contains(&of))
    }

    fn watch(
        &self,
        watcher: &Watcher,
        model: &Arc<Model>,
        learner: &Arc<Learner>,
        process: Arc<Process>,
        uses: Uses,
    ) {
        let (tgid, contributes) = (process.tgid(), matches!(uses, Uses::Contributes(_)));
        let key = self.next_key.fetch_add(1, Ordering::Relaxed);
        {
            let mut watched = self.watched.lock();
            let is_same = |one: &Watched| one.process.tgid() == tgid && one.is_of(learner);
            if watched.values().any(is_same) {
                return;
            }
            watched.insert(key, Watched { model: Arc::clone(model), uses, process: Arc::clone(&process) });
            learner.note(if contributes { LearnerUse::Comes } else { LearnerUse::Attends });
        }
        if let Err(error) = watcher.watch(process, key) {
            tracing::warn!(%error, model = model.name, learner = learner.name, pid = tgid, "its process cannot be watched; the lease decides");
            if contributes {
                learner.note(LearnerUse::Unseen);
            }
            self.unwatch(key);
        }
    }

    /// Takes back a watch: what it was of, the learner if the process contributed, and whether no other process does.
    /// None if the learner was dropped before.
    fn unwatch(&self, key: u64) -> Option<(Watched, Arc<Learner>, bool)> {
        let (ended, alone) = {
            let mut watched = self.watched.lock();
            let ended = watched.remove(&key)?;
            let is_other = |other: &Watched| match &ended.uses {
                Uses::Contributes(learner) | Uses::Attends(learner) => other.contributes_as(learner),
                Uses::Dropped(id) => other.is_of_dropped(&ended.model, *id),
            };
            let alone = !watched.values().any(is_other);
            (ended, alone)
        };
        match &ended.uses {
            Uses::Contributes(learner) => {
                let learner = Arc::clone(learner);
                learner.note(LearnerUse::Ends);
                Some((ended, learner, alone))
            }
            Uses::Attends(learner) => {
                learner.note(LearnerUse::Leaves);
                None
            }
            Uses::Dropped(gone) => {
                if alone {
                    ended.model.forget_dropped(|id, _| id == *gone);
                }
                None
            }
        }
    }

    /// A watched process ended. A killed process that contributed takes its learner with it. A process that exits by
    /// itself may have been one of many (a shell's `dd`): `control/linger` and the lease decide.
    fn ended(&self, key: u64, exit: Exit) {
        let _nobody_opens = self.opening.write();
        let Some((Watched { model, process, .. }, learner, alone)) = self.unwatch(key) else { return };
        // Others that share the learner go on. The contribution that the victim left open is settled with its
        // file.
        if let (Exit::Signal(_), true, true) = (exit, alone, model.learner(learner.id).is_ok()) {
            let pid = process.tgid();
            tracing::warn!(model = model.name, learner = learner.name, pid, "its process {exit}");
            // The learner may have left by itself meanwhile.
            model.send_leave(learner.id, LeaveReason::Died);
        }
    }

    /// The learner is out of its job. Its processes are not watched any more, unless it was `dropped`: then they are to
    /// hear why. Returns whether there are such.
    pub fn left(&self, model: &Model, learner: LearnerId, dropped: bool) -> bool {
        let mut watched = self.watched.lock();
        // Of one that was dropped before, nobody may ask any more.
        let is_over = |one: &Watched| match &one.uses {
            Uses::Contributes(of) | Uses::Attends(of) => {
                !dropped && of.id == learner && std::ptr::eq(&*one.model, model)
            }
            Uses::Dropped(id) => one.model.dropped(*id).is_none(),
        };
        for (key, _) in watched.extract_if(|_, one| is_over(one)) {
            if let Some(watcher) = self.watcher.get() {
                watcher.forget(key);
            }
        }
        let mut any = false;
        for one in watched.values_mut() {
            if one.uses.learner().is_some_and(|of| of.id == learner) && std::ptr::eq(&*one.model, model) {
                one.uses = Uses::Dropped(learner);
                any = true;
            }
        }
        any
    }
}
