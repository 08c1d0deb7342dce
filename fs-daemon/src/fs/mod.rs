//! What the mount's files mean, apart from how the kernel asks for them.
//!
//! The FUSE adapter turns requests into calls here and outcomes into replies; an NBD server or a test
//! can make the same calls. Nothing here blocks for long: what has to wait takes a callback.

pub mod access;
pub mod errno;
pub mod handle;
pub mod model;
pub mod node;
pub mod text;

mod attr;
mod beside;
mod cached;
mod doubts;
mod io;
mod kept;
mod late;
mod names;
mod open;
mod paths;
mod refusal;
mod settings;
mod waits;
mod xattr;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant, SystemTime};

use libmodelio::transport::LeaveReason;
use libmodelio::vocabulary::ids::LearnerId;
use parking_lot::Mutex;
use ps_backend::job::Event;

use self::access::Access;
use self::cached::{CachedNames, Fate};
use self::doubts::Settled;
use self::errno::{FsError, FsResult};
use self::handle::{Handle, Handles};
use self::model::Model;
use self::node::{File, Node};
use self::waits::{SecondLooks, Waits};
use crate::fuse::process::{Exit, Watcher};

pub use attr::{Attributes, Keep};
pub use open::{Opened, Way};

/// Called with the outcome, perhaps from another thread.
pub type Done<T> = Box<dyn FnOnce(FsResult<T>) + Send>;

/// Who makes a request.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// The thread, as the daemon's PID namespace numbers it; 0 where it does not.
    pub tid: u32,
}

/// How the binding tells the kernel about changes. Never called from within a request.
pub trait Kernel: Send + Sync {
    /// `name` in directory `parent` leads elsewhere now.
    fn forget_name(&self, parent: u64, name: &str);
}

/// Somebody polls a file; called once when it is ready.
pub type Wake = Box<dyn FnOnce() + Send>;

/// The mount's own state, for `status.json`.
pub(crate) struct MountStatus {
    pub(crate) passthrough: bool,
    pub(crate) open_files: usize,
    pub(crate) watched_processes: usize,
}

/// Work for the thread that may talk to the kernel on its own accord.
enum Chore {
    Published(u8),
    Left(u8, LearnerId, LeaveReason),
    /// A handle with an unfinished contribution was closed.
    Settle(Arc<Handle>, Option<Settled>),
}

/// The filesystem of one mount.
pub struct Fs {
    models: Vec<Arc<Model>>,
    handles: Handles,
    /// Whether reads and mappings may bypass the daemon.
    passthrough: bool,
    access: Access,
    started: SystemTime,
    pollers: Mutex<HashMap<u64, (u8, Wake)>>,
    waits: Arc<Waits>,
    /// Said once that some program's end cannot be seen.
    warned_of_strangers: AtomicBool,
    second_looks: SecondLooks,
    cached: CachedNames,
    chores: mpsc::Sender<Chore>,
    watcher: OnceLock<Watcher>,
    next_watch: AtomicU64,
}

/// How long a process that closes its files by ending may take to be gone.
const DEATH_PATIENCE: Duration = Duration::from_millis(500);

impl Fs {
    /// A filesystem with these models. Starts its two helper threads.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn start(models: Vec<Arc<Model>>, passthrough: bool, access: Access) -> std::io::Result<Started> {
        let (chores, inbox) = mpsc::channel();
        let fs = Arc::new(Fs {
            models,
            handles: Handles::default(),
            passthrough,
            access,
            started: SystemTime::now(),
            pollers: Mutex::default(),
            waits: Arc::default(),
            warned_of_strangers: AtomicBool::new(false),
            second_looks: SecondLooks::default(),
            cached: CachedNames::default(),
            chores,
            watcher: OnceLock::new(),
            next_watch: AtomicU64::new(1),
        });
        for model in &fs.models {
            let (index, chores) = (model.index, fs.chores.clone());
            model.job.subscribe(Box::new(move |event| {
                // The receiver only goes when the mount does.
                let _ = chores.send(match event {
                    Event::Published(_) => Chore::Published(index),
                    Event::Left(learner, reason) => Chore::Left(index, learner, reason),
                });
            }));
        }
        let of_watcher = Arc::downgrade(&fs);
        let watcher = Watcher::start(move |key, exit| {
            if let Some(fs) = of_watcher.upgrade() {
                fs.process_ended(key, exit);
            }
        })?;
        let _ = fs.watcher.set(watcher);
        Ok(Started { fs, inbox })
    }

    /// The models, in the order of their indices.
    pub fn models(&self) -> &[Arc<Model>] {
        &self.models
    }

    /// Whether reads and mappings may bypass the daemon.
    pub fn is_passthrough(&self) -> bool {
        self.passthrough
    }

    /// Whether the name in `parent` that led to this inode leads to it for good.
    pub fn is_fixed(&self, parent: u64, ino: u64) -> bool {
        match (Node::from_ino(parent), Node::from_ino(ino)) {
            (_, Some(Node::Model(_, File::Learner(_))) | None) => false,
            // The kernel is told to drop it in time.
            (_, Some(Node::Model(_, File::Tensors(..)))) => true,
            // A version's own directory never changes.
            (Some(Node::Model(_, dir)), _) if dir.version().is_some() => true,
            (_, Some(Node::Model(_, file))) => file.version().is_none(),
            (_, Some(_)) => true,
        }
    }

    /// What `status.json` tells of the mount besides the model.
    pub(crate) fn mount_status(&self) -> MountStatus {
        MountStatus {
            passthrough: self.passthrough,
            open_files: self.handles.len(),
            watched_processes: self.watcher.get().map_or(0, Watcher::watched),
        }
    }

    fn model(&self, index: u8) -> FsResult<&Arc<Model>> {
        self.models.get(usize::from(index)).ok_or_else(FsError::not_found)
    }

    fn node(&self, ino: u64) -> FsResult<Node> {
        Node::from_ino(ino).ok_or_else(FsError::not_found)
    }

    fn handle(&self, fh: u64) -> FsResult<Arc<Handle>> {
        self.handles.get(fh).ok_or_else(|| FsError::new(libc::EBADF, format!("no open file {fh}")))
    }

    /// The kernel forgets `count` lookups of an inode.
    pub fn forget(&self, ino: u64, count: u64) {
        if let Some(Node::Model(index, file)) = Node::from_ino(ino)
            && let (Some(version), Ok(model)) = (file.version(), self.model(index))
        {
            self.cached.forgotten(index, version, ino, count);
            if let Some(version) = file.pins() {
                model.job.unpin(version, count);
            }
        }
    }

    /// A watched process ended. A killed one takes its learner with it. One that exits by itself may have been one of many
    /// (a shell's `dd`): `control/linger` and the lease decide.
    fn process_ended(&self, key: u64, exit: Exit) {
        for model in &self.models {
            let Some((learner, alone)) = model.unwatch(key) else { continue };
            // Others that share the learner go on; what the victim left open is settled with its handle.
            if let (Exit::Signal(_), true) = (exit, alone) {
                tracing::warn!(model = model.name, learner = learner.name, "its process {exit}");
                // It may have left by itself meanwhile.
                model.send_leave(learner.id, LeaveReason::Died);
            }
        }
    }

    /// Calls `wake` at the model's next version. One call wakes everybody who polls that open file, so a
    /// later one takes an earlier one's place.
    fn wake_later(&self, model: u8, fh: u64, wake: Wake) {
        self.pollers.lock().insert(fh, (model, wake));
    }

    /// Fails what waits and ends the jobs.
    pub fn shut_down(&self) {
        for model in &self.models {
            model.job.shut_down();
        }
    }
}

/// A filesystem whose chores still need somebody who can talk to the kernel.
pub struct Started {
    /// The filesystem.
    pub fs: Arc<Fs>,
    inbox: mpsc::Receiver<Chore>,
}

impl Started {
    /// Starts the thread that tells `kernel` what has changed.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn run_chores(self, kernel: Arc<dyn Kernel>) -> std::io::Result<()> {
        let Started { fs, inbox } = self;
        let fs = Arc::downgrade(&fs);
        std::thread::Builder::new().name("gradfs-chores".into()).spawn(move || {
            let mut looked = Instant::now();
            let mut late = late::Late::default();
            loop {
                let chore = inbox.recv_timeout(waits::LOOK.saturating_sub(looked.elapsed()));
                let Some(fs) = fs.upgrade() else { return };
                match chore {
                    Ok(chore) => fs.do_chore(chore, &*kernel),
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                    Err(mpsc::RecvTimeoutError::Disconnected) => return,
                }
                // Also where versions come all the time.
                if looked.elapsed() >= waits::LOOK {
                    looked = Instant::now();
                    fs.waits.release_signalled();
                    fs.tick_doubts();
                    fs.drop_leftovers(&*kernel);
                    late.look(&fs.models);
                }
            }
        })?;
        Ok(())
    }
}

impl Fs {
    fn tick_doubts(&self) {
        let now = Instant::now();
        for learner in self.models.iter().flat_map(|model| model.learners()) {
            learner.doubts.tick(now);
        }
    }

    fn do_chore(&self, chore: Chore, kernel: &dyn Kernel) {
        match chore {
            Chore::Published(index) => self.published(index, kernel),
            Chore::Left(index, learner, reason) => {
                let Ok(model) = self.model(index) else { return };
                if let Some(name) = self.learner_left(model, learner, reason) {
                    kernel.forget_name(Node::Model(index, File::Learners).ino(), &name);
                }
            }
            Chore::Settle(handle, settled) => io::settle(&handle, settled),
        }
    }

    /// A learner is out of the job: its directory goes, and nobody watches its processes any more.
    fn learner_left(&self, model: &Model, learner: LearnerId, reason: LeaveReason) -> Option<String> {
        let (name, watches) = model.left(learner, reason)?;
        if let Some(watcher) = self.watcher.get() {
            watches.into_iter().for_each(|key| watcher.forget(key));
        }
        Some(name)
    }

    fn published(&self, index: u8, kernel: &dyn Kernel) {
        let Ok(model) = self.model(index) else { return };
        model.tensors_name.drop_name(|| kernel.forget_name(Node::Model(index, File::Dir).ino(), "tensors"));
        let ready: Vec<Wake> = {
            let mut pollers = self.pollers.lock();
            pollers.extract_if(|_, (of, _)| *of == index).map(|(_, (_, wake))| wake).collect()
        };
        for wake in ready {
            wake();
        }
        self.drop_moved_names(model, kernel, true);
    }

    /// Names that lead to new inodes are dropped from the kernel's cache. Then it lets go of the old inodes
    /// once nobody has them open or mapped, and their memory can be used again.
    fn drop_moved_names(&self, model: &Model, kernel: &dyn Kernel, patient: bool) {
        let index = model.index;
        let dir = Node::Model(index, File::Dir).ino();
        for name in ["weights", "weights.safetensors"] {
            kernel.forget_name(dir, name);
        }
        for learner in model.learners() {
            kernel.forget_name(Node::Model(index, File::Learner(learner.id)).ino(), "weights");
        }
        let versions = Node::Model(index, File::Versions).ino();
        let retained = model.job.retained();
        for old in model.job.versions() {
            if !retained.contains(&old) {
                kernel.forget_name(versions, &old.to_string());
            }
        }
        self.drop_old_names(model, kernel, patient);
    }

    /// A lookup that was under way while its name was dropped brings the name back: dropped again, for as
    /// long as versions are there that nobody should want any more.
    fn drop_leftovers(&self, kernel: &dyn Kernel) {
        for model in &self.models {
            if model.job.versions().len() > model.job.retained().len() {
                self.drop_moved_names(model, kernel, false);
            }
        }
    }

    /// Makes the kernel let go of names in directories of versions that are no longer retained.
    fn drop_old_names(&self, model: &Model, kernel: &dyn Kernel, patient: bool) {
        let retained = model.job.retained();
        let fate = |version| match model.job.get(version) {
            _ if retained.contains(&version) => Fate::Stays,
            Some(_) => Fate::Held,
            None => Fate::Gone,
        };
        for (parent, name) in self.cached.to_drop(model.index, patient, fate) {
            kernel.forget_name(parent, &name);
        }
    }

    fn watch_key(&self) -> u64 {
        self.next_watch.fetch_add(1, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests;
