//! Open files.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use libmodelio::contributor::Share;
use libmodelio::publisher::Publisher;
use libmodelio::vocabulary::ids::Version;
use parking_lot::{Mutex, RwLock};
use ps_backend::job::VersionMemory;

use super::model::{Learner, Model};
use super::node::{File, Node};
use crate::fuse::process::Process;

/// What an open file does.
pub enum Handle {
    /// Reads a pinned version.
    Version(VersionHandle),
    /// Contributes as a learner, and for `device` reads too.
    Contribution(ContributionHandle),
    /// Writes `weights`.
    Publish(PublishHandle),
    /// Reads (and for `control/*` writes) a small text.
    Text(TextHandle),
}

/// A version held open. The pin is given back when the handle is dropped.
pub struct VersionHandle {
    /// Of which model.
    pub model: Arc<Model>,
    /// Which version.
    pub version: Version,
    /// Its memory.
    pub memory: Arc<dyn VersionMemory>,
    /// What stands in front of the bytes in this file.
    pub header: Arc<[u8]>,
    /// The bytes of the model that follow it.
    pub bytes: std::ops::Range<u64>,
}

impl VersionHandle {
    /// Pins `version` for as long as the handle lives; `None` when it is gone.
    pub fn pin(model: &Arc<Model>, version: Version) -> Option<VersionHandle> {
        if !model.job.pin(version) {
            return None;
        }
        let Some(view) = model.job.get(version) else {
            model.job.unpin(version, 1);
            return None;
        };
        let bytes = 0..model.layout.size();
        let model = Arc::clone(model);
        Some(VersionHandle { model, version, memory: view.memory, header: Arc::new([]), bytes })
    }

    /// Pins the newest version.
    pub fn pin_newest(model: &Arc<Model>) -> Option<VersionHandle> {
        VersionHandle::pin(model, model.job.version())
    }
}

impl Drop for VersionHandle {
    fn drop(&mut self) {
        self.model.job.unpin(self.version, 1);
    }
}

/// Who has used a handle: by how they ended it is told whether an unfinished contribution was meant.
#[derive(Default)]
pub struct Users {
    /// Threads already looked up, and the process each belongs to.
    threads: HashMap<u32, u32>,
    processes: Vec<Arc<Process>>,
}

/// Threads of one handle that are remembered; more are looked up again.
const MAX_THREADS: usize = 256;

impl Users {
    /// Notes the process of thread `tid`; returns its ID, or `None` when it cannot be seen.
    pub fn note(&mut self, tid: u32) -> Option<u32> {
        if let Some(&tgid) = self.threads.get(&tid) {
            return Some(tgid);
        }
        let process = Process::of_thread(tid)?;
        let tgid = process.tgid();
        if self.threads.len() >= MAX_THREADS {
            self.threads.clear();
        }
        self.threads.insert(tid, tgid);
        if !self.processes.iter().any(|known| known.tgid() == tgid) {
            self.processes.push(Arc::new(process));
        }
        Some(tgid)
    }

    /// The processes.
    pub fn processes(&self) -> Vec<Arc<Process>> {
        self.processes.clone()
    }
}

/// An open `gradients` or `device`.
pub struct ContributionHandle {
    /// Of which model.
    pub model: Arc<Model>,
    /// Contributing as.
    pub learner: Arc<Learner>,
    /// Its process, if it can be seen.
    pub opener: Option<u32>,
    /// Everyone who wrote.
    pub users: Mutex<Users>,
    /// The thread of the last write: looked at without a lock.
    pub last_writer: AtomicU64,
    /// Something was written through it since the last commit.
    pub wrote: AtomicBool,
    /// Into which of the learner's contributions; 0 for none.
    share: AtomicU64,
    /// An fsync has waited for that as long as it may.
    pub timed_out: AtomicBool,
    /// Opened read-write: it may be mapped.
    pub mappable: bool,
    /// `device`: what it reads.
    pub version: Option<Mutex<Arc<VersionHandle>>>,
}

impl ContributionHandle {
    /// Opened by `opener` to contribute as `learner`.
    pub fn new(
        model: Arc<Model>,
        learner: Arc<Learner>,
        tid: u32,
        mappable: bool,
        version: Option<VersionHandle>,
    ) -> ContributionHandle {
        let mut users = Users::default();
        ContributionHandle {
            model,
            learner,
            opener: users.note(tid),
            users: Mutex::new(users),
            last_writer: AtomicU64::new(u64::from(tid)),
            wrote: AtomicBool::new(false),
            share: AtomicU64::new(0),
            timed_out: AtomicBool::new(false),
            mappable,
            version: version.map(|version| Mutex::new(Arc::new(version))),
        }
    }

    /// What was written through it is part of.
    pub fn share(&self) -> Share {
        match self.share.load(Ordering::Relaxed) {
            0 => Share::None,
            number => Share::Of(number),
        }
    }

    /// Something was written into `share`.
    pub fn set_share(&self, share: Share) {
        if let Share::Of(number) = share {
            self.share.store(number, Ordering::Relaxed);
        }
    }

    /// The contribution has ended, as far as this handle is concerned.
    pub fn ended(&self) {
        self.share.store(0, Ordering::Relaxed);
        self.timed_out.store(false, Ordering::Relaxed);
        self.wrote.store(false, Ordering::Relaxed);
    }

    /// Notes who writes; nearly free when it is the one who wrote last.
    pub fn note_writer(&self, tid: u32) {
        if self.last_writer.swap(u64::from(tid), Ordering::Relaxed) != u64::from(tid) {
            self.users.lock().note(tid);
        }
        if !self.wrote.load(Ordering::Relaxed) {
            self.wrote.store(true, Ordering::Relaxed);
        }
    }
}

/// An open `weights` that is written.
pub struct PublishHandle {
    /// Of which model.
    pub model: Arc<Model>,
    /// Its inode.
    pub ino: u64,
    /// Its process, if it can be seen.
    pub opener: Option<u32>,
    /// Everyone who wrote.
    pub users: Mutex<Users>,
    /// The version being written; a new one after each fsync.
    pub publisher: Mutex<Option<Arc<Publisher>>>,
    /// Truncated at the open: meant to be written whole.
    pub truncated: AtomicBool,
    /// What it reads, if it is open read-write: the version it was opened on.
    pub reads: VersionHandle,
}

/// An open text file.
pub struct TextHandle {
    /// Which.
    pub node: Node,
    /// Its contents as of the last read from the start.
    pub text: Mutex<Arc<str>>,
    /// The version that was last read, for poll.
    pub seen: AtomicU64,
    /// Of which model; `None` for the mount's own README.
    pub model: Option<Arc<Model>>,
    /// The thread that opened it.
    pub opener: u32,
    /// It was emptied, and nothing was written since.
    pub emptied: AtomicBool,
}

impl TextHandle {
    /// The setting's index, for `control/*`.
    pub fn control(&self) -> Option<u32> {
        match self.node {
            Node::Model(_, File::Control(index)) => Some(index),
            _ => None,
        }
    }
}

/// All open files, by the number the kernel knows them by.
#[derive(Default)]
pub struct Handles {
    next: AtomicU64,
    open: RwLock<HashMap<u64, Arc<Handle>>>,
}

/// Most files open at once.
pub const MAX_HANDLES: usize = 1 << 20;

impl Handles {
    /// Takes a handle in; `None` when there are too many.
    pub fn insert(&self, handle: Handle) -> Option<u64> {
        let mut open = self.open.write();
        if open.len() >= MAX_HANDLES {
            return None;
        }
        let fh = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        open.insert(fh, Arc::new(handle));
        Some(fh)
    }

    /// The handle with this number.
    pub fn get(&self, fh: u64) -> Option<Arc<Handle>> {
        self.open.read().get(&fh).cloned()
    }

    /// Closes it.
    pub fn remove(&self, fh: u64) -> Option<Arc<Handle>> {
        self.open.write().remove(&fh)
    }

    /// Files open now.
    pub fn len(&self) -> usize {
        self.open.read().len()
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<Handle>> {
        self.open.read().values().cloned().collect()
    }
}
