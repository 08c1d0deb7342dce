//! Processes that have `gradients` open, or had, and still live: a learner leaves with the last of them that is killed.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use libmodelio::transport::LeaveReason;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use super::process::{Exit, Process, Watcher};
use crate::session::learner::Learner;
use crate::session::model::Model;

/// The processes of all learners.
#[derive(Default)]
pub struct Watches {
    /// By the watcher's key.
    watched: Mutex<HashMap<u64, Watched>>,
    next_key: AtomicU64,
    /// Held from before a program gets its learner until its process is watched, and while it is decided whether a learner
    /// is alone. So a program that is just opening counts.
    opening: RwLock<()>,
    watcher: OnceLock<Watcher>,
    /// Said once that some program's end cannot be seen.
    warned_of_strangers: AtomicBool,
}

struct Watched {
    model: Arc<Model>,
    learner: Arc<Learner>,
    process: Arc<Process>,
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

    /// Thread `tid` of `process`, if that can be seen, has opened the learner's `gradients`: the violent end of its process
    /// is the learner's.
    pub fn opened(
        &self,
        model: &Arc<Model>,
        learner: &Arc<Learner>,
        tid: u32,
        process: Option<&Arc<Process>>,
    ) {
        if let (Some(watcher), Some(process)) = (self.watcher.get(), process) {
            let (is_known, is_users) = {
                let watched = self.watched.lock();
                let same = |one: &&Watched| one.process.tgid() == process.tgid();
                let is_users = watched.values().filter(same).any(|one| Arc::ptr_eq(&one.learner, learner));
                (watched.values().any(|one| Arc::ptr_eq(&one.process, process)), is_users)
            };
            // For another learner of the process, the watcher needs another pidfd.
            let another = || Process::of_thread(tid).map(Arc::new);
            let process = if is_known { another() } else { Some(Arc::clone(process)) };
            if let Some(process) = process.filter(|_| !is_users) {
                self.watch(watcher, model, learner, process);
            }
        }
        if tid != 0 {
            return;
        }
        learner.has_unseen_user();
        if !self.warned_of_strangers.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "a learner runs in a PID namespace that this daemon cannot see: if it is killed, what it has \
                 written by then counts. Start gradfs in a namespace that contains its learners"
            );
        }
    }

    /// The process of thread `tid`, as [`Process::of_thread`] has it, but for a process that is watched without a look at
    /// `/proc`, if `tid` is its first thread.
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

    fn watch(&self, watcher: &Watcher, model: &Arc<Model>, learner: &Arc<Learner>, process: Arc<Process>) {
        let tgid = process.tgid();
        let key = self.next_key.fetch_add(1, Ordering::Relaxed);
        {
            let mut watched = self.watched.lock();
            let is_same = |one: &Watched| one.process.tgid() == tgid && Arc::ptr_eq(&one.learner, learner);
            if watched.values().any(is_same) {
                return;
            }
            let (model, learner, process) = (Arc::clone(model), Arc::clone(learner), Arc::clone(&process));
            watched.insert(key, Watched { model, learner, process });
        }
        learner.user_came();
        if let Err(error) = watcher.watch(process, key) {
            tracing::warn!(%error, model = model.name, learner = learner.name, pid = tgid, "its process cannot be watched; the lease decides");
            learner.has_unseen_user();
            self.unwatch(key);
        }
    }

    /// Takes back a watch: the learner it was of, and whether no other process uses that.
    fn unwatch(&self, key: u64) -> Option<(Watched, bool)> {
        let (ended, alone) = {
            let mut watched = self.watched.lock();
            let ended = watched.remove(&key)?;
            let alone = !watched.values().any(|other| Arc::ptr_eq(&other.learner, &ended.learner));
            (ended, alone)
        };
        ended.learner.user_ended();
        Some((ended, alone))
    }

    /// A watched process ended. A killed process takes its learner with it. A process that exits by itself
    /// may have been one of many (a shell's `dd`): `control/linger` and the lease decide.
    fn ended(&self, key: u64, exit: Exit) {
        let _nobody_opens = self.opening.write();
        let Some((Watched { model, learner, process }, alone)) = self.unwatch(key) else { return };
        // Others that share the learner go on. The contribution that the victim left open is settled with its
        // file.
        if let (Exit::Signal(_), true, true) = (exit, alone, model.learner(learner.id).is_ok()) {
            let pid = process.tgid();
            tracing::warn!(model = model.name, learner = learner.name, pid, "its process {exit}");
            // The learner may have left by itself meanwhile.
            model.send_leave(learner.id, LeaveReason::Died);
        }
    }

    /// The learner is out of its job: nobody watches its processes any more.
    pub fn forget(&self, is_out: impl Fn(&Model, &Learner) -> bool) {
        let mut watched = self.watched.lock();
        for (key, _) in watched.extract_if(|_, one| is_out(&one.model, &one.learner)) {
            if let Some(watcher) = self.watcher.get() {
                watcher.forget(key);
            }
        }
    }
}
