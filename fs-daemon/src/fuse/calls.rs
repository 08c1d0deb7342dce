//! Calls on open files, with what is known of the threads and processes that make them.
//!
//! The tree ([`crate::fs`]) defines what the files do. This module has the concerns of a kernel's binding:
//! who has a file open and whose close counts (`users`, `endings`, `closing`), what the end of a process means
//! (`watches`, `pending_exits`), and waits that a signal ends (`waits`).

mod closing;
mod opening;
mod renaming;

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use libmodelio::client::Event;
use libmodelio::contributor::Wrote;
use libmodelio::vocabulary::ids::LearnerId;
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::shard_error::{ROLLED_BACK, ShardError};
use libmodelio::vocabulary::weight::Weight;
use parking_lot::Mutex;

use super::lookups::{MemoryLookups, SecondLookups};
use super::open_files::{OpenFiles, ProgramFile};
use super::pending_exits::{PendingExits, Settling, settle};
use super::process::is_making_directory;
use super::users::Holder;
use super::waits::{CHECK_INTERVAL, Waits};
use super::watches::Watches;
use crate::fs::Access;
use crate::fs::Announced;
use crate::fs::Attributes;
use crate::fs::Fs;
use crate::fs::OpenFile;
use crate::fs::WantedChanges;
use crate::fs::model_tree::Kernel;
use crate::fs::model_tree::ModelTree;
use crate::fs::node::{File, Node, ROOT_INO};
use crate::fs::text::MountStatus;
use crate::own_thread::on_own_thread;
use crate::session::error::{CallError, CallResult, Done};
use crate::session::model::Model;
use crate::session::wait_log::WaitLog;

pub use opening::Opened;

/// Somebody polls a file; called once when it is ready.
pub type Wake = Box<dyn FnOnce() + Send>;

/// By open file: the index of a model, and what of it wakes the poller.
type Pollers = Arc<Mutex<HashMap<u64, ((u8, Announced), Wake)>>>;

/// Work for the thread that may talk to the kernel on its own accord.
pub(super) enum Chore {
    /// The model of this index has a new version.
    Published(u8),
    /// Something else than its versions has changed, which files announce.
    Announced(u8, Announced),
    /// A learner of it is out of the job.
    Left(u8, LearnerId, LeaveReason),
    /// A model goes on in another life.
    Restored,
    /// A file with something unfinished was closed.
    Settle(Arc<ProgramFile>, Settling),
}

/// The filesystem as programs use it.
pub struct Calls {
    /// The tree.
    pub fs: Arc<Fs>,
    pub(super) files: Arc<OpenFiles>,
    pub(super) watches: Arc<Watches>,
    pub(super) pending_exits: Arc<PendingExits>,
    pub(super) waits: Arc<Waits>,
    pub(super) second_lookups: SecondLookups,
    pub(super) memory_lookups: MemoryLookups,
    /// The programs that poll.
    pub(super) pollers: Pollers,
    pub(super) chores: mpsc::Sender<Chore>,
}

/// Calls whose chores still need somebody who can talk to the kernel.
pub struct Started {
    /// The calls.
    pub calls: Arc<Calls>,
    pub(super) inbox: mpsc::Receiver<Chore>,
}

/// Whether it is enough that the kernel is told of a new version at the next look at leftovers
/// ([`Fs::drop_leftovers`]). A small model's program most often looks the name up before that, and the old inode goes
/// by itself.
///
/// Nobody misses the version. It is shown by now, and who begins to poll, or has the kernel keep `tensors`, notes that
/// first and looks at the newest version then.
fn can_wait(tree: &ModelTree, pollers: &Pollers) -> bool {
    tree.model.is_small()
        && !tree.model.job.keeps_old_versions()
        && !tree.tensors_name.is_known()
        && !pollers.lock().values().any(|(of, _)| *of == (tree.index, Announced::Versions))
}

/// Hears of the versions of a model, and of learners that leave it.
fn listen_to(tree: &Arc<ModelTree>, chores: mpsc::Sender<Chore>, pollers: Pollers) {
    let (index, of_listener) = (tree.index, Arc::downgrade(tree));
    let listener = move |event| {
        let chore = match event {
            Event::Published(_) => {
                let tree = of_listener.upgrade();
                tree.iter().for_each(|tree| tree.views.wake());
                if tree.is_some_and(|tree| can_wait(&tree, &pollers)) {
                    return;
                }
                Chore::Published(index)
            }
            Event::Left(learner, reason) => Chore::Left(index, learner, reason),
            Event::Readers => Chore::Announced(index, Announced::Readers),
            Event::Durable => Chore::Announced(index, Announced::Durable),
            Event::Restored => Chore::Restored,
        };
        // The receiver only goes when the mount does.
        let _ = chores.send(chore);
    };
    tree.model.job.subscribe(Box::new(listener));
}

impl Calls {
    /// The calls on a filesystem with these models. Starts the thread that watches processes.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(models: Vec<Arc<Model>>, passthrough: bool, access: Access) -> io::Result<Started> {
        let (chores, inbox) = mpsc::channel();
        let (files, watches) = (Arc::<OpenFiles>::default(), Watches::start()?);
        let status = {
            let (files, watches) = (Arc::clone(&files), Arc::clone(&watches));
            move || MountStatus { passthrough, open_files: files.len(), watched_processes: watches.len() }
        };
        let fs = Arc::new(Fs::new(models, passthrough, access, Box::new(status)));
        let calls = Arc::new(Calls {
            fs,
            files,
            watches,
            pending_exits: Arc::default(),
            waits: Arc::default(),
            second_lookups: SecondLookups::default(),
            memory_lookups: MemoryLookups::default(),
            pollers: Pollers::default(),
            chores,
        });
        calls.fs.trees().iter().for_each(|tree| calls.listen_to(tree));
        Ok(Started { calls, inbox })
    }

    /// [`Fs::lookup`] for thread `tid`: who opens `gradients` for its memory is led there.
    ///
    /// # Errors
    /// As that has them.
    pub fn lookup(&self, parent: u64, name: &OsStr, tid: u32) -> CallResult<Attributes> {
        let found = self.fs.lookup(parent, name)?;
        Ok(Attributes { ino: self.memory_lookups.led(tid, found.ino), ..found })
    }

    /// [`Fs::lookup`] for thread `tid`, of a file for which the shards have to be asked first.
    pub fn look_up_changes(
        &self,
        parent: u64,
        name: OsString,
        wanted: WantedChanges,
        tid: u32,
        done: Done<Attributes>,
    ) {
        let (fs, late) = (Arc::clone(&self.fs), Arc::clone(&self.fs));
        let done = self.waits.guard(tid, done, None, move |found: Attributes| late.forget(found.ino, 1));
        on_own_thread("gradfs-changes", move || {
            done(wanted.find().and_then(|_found| fs.lookup(parent, &name)))
        });
    }

    /// [`Fs::lookup_dropped`] for thread `tid`. A directory of the same name can be made: the learner joins again.
    pub fn lookup_dropped(&self, parent: u64, name: &OsStr, tid: u32) -> Option<CallResult<Attributes>> {
        self.fs.lookup_dropped(parent, name, |model, learner| {
            self.watches.has_used(model, learner, tid) && !is_making_directory(tid)
        })
    }

    /// The mount has this device, if that is known: descriptors of other mounts are told apart by it.
    pub fn mounted_as(&self, device: Option<String>) {
        self.files.mounted_as(device);
    }

    /// Hears of the versions of a model, and of learners that leave it, and shows its views.
    fn listen_to(&self, tree: &Arc<ModelTree>) {
        let (fs, chores, pollers) =
            (Arc::downgrade(&self.fs), self.chores.clone(), Arc::clone(&self.pollers));
        listen_to(tree, chores.clone(), Arc::clone(&pollers));
        tree.views.shown_by(Box::new(move |view, home| {
            let tree = fs.upgrade()?.add_at(view, Some(home))?;
            listen_to(&tree, chores.clone(), Arc::clone(&pollers));
            Some(tree)
        }));
    }

    /// Shows one more model. False if the mount has shown as many as it can.
    pub fn add(&self, model: Arc<Model>) -> bool {
        self.fs.add(model).inspect(|tree| self.listen_to(tree)).is_some()
    }

    /// A model is gone: its name disappears, and what is open of it fails as its job does. Must not be called from
    /// within a request.
    pub fn remove(&self, model: &Model, kernel: &dyn Kernel) {
        if self.fs.hide(model) {
            tracing::warn!(model = model.name, "deleted: not shown any more");
            kernel.forget_name(ROOT_INO, &model.name);
        }
    }

    /// A model goes on in another life, which takes the place of the one before. Its learners of this mount join again, and
    /// its readers begin again. What is open of the life before keeps its version, and all else that is asked of it fails.
    /// Must not be called from within a request.
    pub fn replace(&self, before: &Model, model: Arc<Model>, kernel: &dyn Kernel) {
        let name = model.name.clone();
        model.own_refusal.note(&CallError::from(ShardError::RolledBack(ROLLED_BACK.to_owned())), false);
        let is_before = |tree: &&Arc<ModelTree>| std::ptr::eq(&*tree.model, before);
        let tree_before = self.fs.shown().iter().find(is_before).cloned();
        let tree = self.fs.add(Arc::clone(&model)).inspect(|tree| self.listen_to(tree));
        if tree.is_none() {
            tracing::warn!(model = name, "restored, and not shown: mount again");
        }
        for learner in before.learners().iter().filter(|of| of.name != before.own_name) {
            let joined = model.join(&learner.name, learner.owner);
            let weight = Some(learner.weight()).filter(|weight| *weight != Weight::default());
            let joined = joined.and_then(|new| Ok(weight.map_or(Ok(()), |weight| new.set_weight(weight))?));
            if let Err(error) = joined {
                tracing::warn!(model = name, learner = learner.name, "does not join as it was: {error}");
            }
        }
        if let (Some(tree), Some(before)) = (&tree, &tree_before) {
            self.fs.take_views(tree, before);
        }
        drop(model);
        let index = tree_before.as_ref().map(|tree| tree.index);
        self.fs.hide(before);
        kernel.forget_name(ROOT_INO, &name);
        before.whole().job.roll_back();
        before.job.roll_back();
        // Who polls looks again.
        for what in [Announced::Versions, Announced::Readers, Announced::Durable] {
            index.iter().for_each(|index| self.wake(*index, what));
        }
        tracing::warn!(model = name, "restored: shown in its new life");
        // Nobody waits for these.
        if let (Some(tree), Some(before)) = (tree, tree_before) {
            tree.take_readers(&before);
        }
    }

    /// Ends the jobs of models that are gone, once nobody uses their files. Must not be called from within a request.
    pub fn end_unused(&self, kernel: &dyn Kernel) {
        for tree in self.fs.take_unused() {
            // A lookup that was under way when the name was dropped has brought it back.
            kernel.forget_name(ROOT_INO, &tree.model.name);
            for learner in tree.model.learners() {
                self.watches.left(&tree.model, learner.id, false);
            }
            tree.model.job.shut_down();
        }
    }

    /// Reads up to `len` bytes at `offset` and gives them to `with`, without a copy where possible.
    pub fn read<R>(&self, fh: u64, offset: u64, len: usize, with: impl FnOnce(CallResult<&[u8]>) -> R) -> R {
        match self.files.get(fh) {
            Ok(open) => self.fs.read(&open.file, offset, len, with),
            Err(error) => with(Err(error)),
        }
    }

    /// Writes, for `by`. `from_mapping`: the kernel writes back pages that a program stored through mmap. The first
    /// write of a step that only the coordinator knows is answered when that has answered, or a signal ends the wait.
    /// So is a value of a setting. All else is answered before this returns.
    ///
    /// # Errors
    /// Fails as [`OpenFile::write`] does.
    pub fn write(
        &self,
        fh: u64,
        offset: u64,
        data: &[u8],
        from_mapping: bool,
        by: Holder,
        done: impl FnOnce(CallResult<()>) + Send + 'static,
    ) {
        let open = match self.files.get(fh) {
            Ok(open) => open,
            Err(error) => return done(Err(error)),
        };
        if let Some(users) = &open.users
            && !from_mapping
        {
            users.note_writer(by);
        }
        if let OpenFile::AllReduce(of) = &open.file {
            return of.give(offset, data, self.waits.guard(by.tid, Box::new(done), None, |()| {}));
        }
        match (open.file.write(offset, data, from_mapping), &open.file) {
            (Ok(Wrote::Asks), OpenFile::Contribution { contribution, .. }) => {
                let guarded = |named| self.waits.guard(by.tid, named, None, |()| {});
                contribution.write_later(offset, data.to_vec(), guarded, Box::new(done));
            }
            (Ok(Wrote::Asks), OpenFile::Text(text)) => {
                let (of, len) = (Arc::clone(&open), data.len());
                let done = self.waits.guard(by.tid, Box::new(done), None, |()| {});
                if text.is_plan() {
                    return text.make_written(Box::new(move |made: CallResult<()>| match &of.file {
                        OpenFile::Text(text) => done(made.map_err(|error| text.not_made(error))),
                        _ => done(made),
                    }));
                }
                text.await_settings(move |known| match &of.file {
                    OpenFile::Text(text) => done(text.judge(len, known)),
                    _ => done(Ok(())),
                });
            }
            (outcome, _) => done(outcome.map(drop)),
        }
    }

    /// fallocate(2), which takes no space here: mode 0 declares bytes of mapped gradients final. It waits for nothing.
    ///
    /// # Errors
    /// EOPNOTSUPP for other modes, and as [`OpenFile::declare_final`]. It is never ENOSYS: the kernel would not ask
    /// again as long as the mount lasts.
    pub fn fallocate(&self, fh: u64, mode: i32, offset: u64, len: u64) -> CallResult<()> {
        let open = self.files.get(fh)?;
        if mode != 0 {
            return Err(CallError::new(libc::EOPNOTSUPP, "sizes are fixed: only mode 0 means something"));
        }
        open.file.declare_final(offset, len, open.maps_memory())
    }

    /// truncate(2), ftruncate(2) and the truncation of open(2). The size is fixed. A truncation to nothing begins a new
    /// write, and takes back what was written through the file that it names. One to the fixed size means that holes
    /// are zeros. Only what is taken back may wait: for the coordinator, or until a signal ends that.
    ///
    /// EINVAL, EACCES, EBUSY for what is being committed, EIO for what counts all the same, or may count.
    pub fn truncate(&self, ino: u64, fh: Option<u64>, size: u64, tid: u32, done: Done<()>) {
        let open =
            self.fs.check_truncation(ino, size).and_then(|()| fh.map(|fh| self.files.get(fh)).transpose());
        match (open, size) {
            (Err(error), _) => return done(Err(error)),
            (Ok(_), size) if let Some(file) = self.fs.temporary_of(ino) => return done(file.resize(size)),
            (Ok(Some(open)), 0) => {
                return open.file.take_back(self.waits.guard(tid, done, None, |()| {}));
            }
            (Ok(Some(open)), _) => open.file.extended(),
            (Ok(None), 0) => self.files.truncated(ino, tid).iter().for_each(|open| open.file.truncated()),
            (Ok(None), _) => {}
        }
        done(Ok(()));
    }

    /// Whether a read would show something new; if not, `wake` is called when it would. One call wakes every
    /// poller of that open file, so a later `wake` replaces an earlier one.
    ///
    /// # Errors
    /// EBADF.
    pub fn poll(&self, fh: u64, wake: Option<Wake>) -> CallResult<bool> {
        let open = self.files.get(fh)?;
        let OpenFile::Text(text) = &open.file else { return Ok(true) };
        if !text.has_news()
            && let (Some(wake), Some((what, tree))) = (wake, text.announces())
        {
            self.pollers.lock().insert(fh, ((tree.index, what), wake));
        }
        // Asked again: a version may have come between the look and the registration.
        Ok(text.has_news())
    }

    /// Ties the wait of fsync or close to its thread: when the thread is interrupted, the request is
    /// withdrawn, so that an answer says whether it counts. A success announces the version that it has made.
    pub(super) fn guard_end(&self, file: &OpenFile, tid: u32, done: Done<()>) -> Done<()> {
        let done = match file.written_tree() {
            Some(tree) => tree.done_when_shown(done),
            None => done,
        };
        self.waits.guard(tid, done, file.withdrawal(), |()| {})
    }

    /// Fails what waits and ends the jobs.
    pub fn shut_down(&self) {
        for tree in self.fs.trees() {
            tree.model.job.shut_down();
        }
    }
}

impl Started {
    /// Starts the thread; it tells `kernel` what has changed.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn run_chores(self, kernel: Arc<dyn Kernel>) -> io::Result<()> {
        let Started { calls, inbox } = self;
        let calls = Arc::downgrade(&calls);
        let others = calls.clone();
        // A request of the other thread to the kernel may wait for a call, and that call for the other thread. So
        // whatever ends a wait at its deadline is done here.
        std::thread::Builder::new().name("gradfs-late".into()).spawn(move || {
            while let Some(calls) = others.upgrade() {
                let now = Instant::now();
                calls.fs.trees().iter().for_each(|tree| tree.tensors_name.give_up(now));
                calls.waits.release_signalled();
                calls.pending_exits.tick(now);
                drop(calls);
                std::thread::sleep(CHECK_INTERVAL);
            }
        })?;
        std::thread::Builder::new().name("gradfs-chores".into()).spawn(move || {
            let mut checked = Instant::now();
            let mut wait_log = WaitLog::default();
            loop {
                let chore = inbox.recv_timeout(CHECK_INTERVAL.saturating_sub(checked.elapsed()));
                let Some(calls) = calls.upgrade() else { return };
                match chore {
                    Ok(chore) => calls.do_chore(chore, &kernel),
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                    Err(mpsc::RecvTimeoutError::Disconnected) => return,
                }
                // Also where versions come all the time.
                if checked.elapsed() >= CHECK_INTERVAL {
                    checked = Instant::now();
                    calls.fs.drop_leftovers(&*kernel);
                    calls.end_unused(&*kernel);
                    for tree in calls.fs.trees() {
                        let whole = tree.model.whole();
                        whole.times.sample(&whole.job);
                        tree.temporaries.forget_dead(|id| tree.model.learner(id).is_ok());
                        tree.model.learners().iter().for_each(|learner| learner.report_progress());
                    }
                    wait_log.check(calls.fs.shown().iter().map(|tree| &*tree.model));
                }
            }
        })?;
        Ok(())
    }
}

impl Calls {
    fn do_chore(&self, chore: Chore, kernel: &Arc<dyn Kernel>) {
        match chore {
            Chore::Published(index) => self.published(index, &**kernel),
            Chore::Announced(index, what) => self.wake(index, what),
            Chore::Restored => self.fs.has_models_looked_for(),
            Chore::Left(index, learner, reason) => {
                let Ok(tree) = self.fs.tree(index) else { return };
                let left = tree.model.left(learner, reason);
                let dropped = left.as_ref().filter(|_| reason != LeaveReason::Asked);
                if let Some(dropped) = dropped {
                    // First, so that its programs find it or the reason at any time.
                    tree.model.keep_dropped(dropped, reason);
                }
                if !self.watches.left(&tree.model, learner, dropped.is_some()) {
                    tree.model.forget_dropped(|id, _| id == learner);
                }
                if let Some(learner) = left {
                    // A mkdir or rmdir in `learners/` has the kernel lock it until the job has answered. Other chores
                    // do not wait for that.
                    let (kernel, learners) = (Arc::clone(kernel), Node::Model(index, File::Learners).ino());
                    on_own_thread("gradfs-forgets", move || kernel.forget_name(learners, &learner.name));
                }
            }
            Chore::Settle(open, settling) => settle(open, settling),
        }
    }

    /// Wakes those who poll this of a model.
    fn wake(&self, index: u8, what: Announced) {
        let ready: Vec<Wake> = {
            let mut pollers = self.pollers.lock();
            pollers.extract_if(|_, (of, _)| *of == (index, what)).map(|(_, (_, wake))| wake).collect()
        };
        for wake in ready {
            wake();
        }
    }

    fn published(&self, index: u8, kernel: &dyn Kernel) {
        let Ok(tree) = self.fs.tree(index) else { return };
        tree.drop_tensors_name(kernel);
        self.wake(index, Announced::Versions);
        self.fs.drop_moved_names(&tree, kernel, true);
    }
}

#[cfg(test)]
mod tests;
