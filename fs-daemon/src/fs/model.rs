//! One model of the mount: its job, its headers, and its learners as directories.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use libmodelio::contributor::{Contributor, Traffic, request};
use libmodelio::formats::npy;
use libmodelio::transport::{Attached, Channel, Device, LeaveReason, Message, Reply};
use libmodelio::vocabulary::ids::{LearnerId, Version};
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::vocabulary::layout::header;
use parking_lot::Mutex;
use ps_backend::job::Job;

use super::Done;
use super::access::Owner;
use super::doubts::Doubts;
use super::errno::{FsError, FsResult};
use super::kept::KeptName;
use super::node::{File, MAX_JOINS};
use super::paths::TensorPaths;
use super::refusal::LastRefusal;
use crate::fuse::process::{Process, Watcher};

/// Directory name of the own learner of a mount that has its job to itself.
pub const OWN_LEARNER: &str = "mount";

/// Longest answer to wait for where a request has no deadline of its own.
pub const PROMPT: Duration = Duration::from_secs(10);

/// A learner that is in the job.
pub struct Learner {
    /// Its number.
    pub id: LearnerId,
    /// Its directory's name.
    pub name: String,
    /// Its way to the shard.
    pub contributor: Arc<Contributor>,
    /// When it joined.
    pub joined: SystemTime,
    /// The mapped region has its pages.
    pub mapped_ready: AtomicBool,
    /// The staging region has its pages, or gets them.
    staging_ready: AtomicBool,
    /// Programs that are dying with something written.
    pub doubts: Doubts,
    /// Who made it; `None` for the mount's own.
    pub owner: Option<Owner>,
    /// Why its last call failed.
    pub refusal: Arc<LastRefusal>,
    use_: Mutex<Use>,
}

/// Who uses a learner: what keeps it attached.
#[derive(Default)]
struct Use {
    handles: u32,
    /// Processes that have had `gradients` open and still live.
    processes: Vec<u32>,
    /// One of them has ended, and no other one has come since.
    ended: bool,
    /// Some that have had it open cannot be watched: whether they live is not known.
    strangers: bool,
}

impl Use {
    /// Whether a process uses the learner, which has something `unsettled` or not.
    fn attached(&self, unsettled: bool) -> Attached {
        match self.handles > 0 || !self.processes.is_empty() {
            true => Attached::Yes,
            // What it has left open may be about to count.
            false if self.ended && !self.strangers && !unsettled => Attached::Exited,
            false => Attached::No,
        }
    }
}

/// One model.
pub struct Model {
    /// Its directory's name.
    pub name: String,
    /// Its index in the mount.
    pub index: u8,
    /// Tensors and blocks.
    pub layout: Arc<ModelLayout>,
    /// Its versions, its settings and who is in it.
    pub job: Arc<dyn Job>,
    /// The transport to where it is aggregated.
    pub device: Arc<dyn Device>,
    /// The connection to there.
    pub channel: Arc<dyn Channel>,
    /// Bytes that went through the mount.
    pub traffic: Arc<Traffic>,
    /// When it was mounted.
    pub started: SystemTime,
    /// `__metadata__` of the file it came from.
    pub metadata: BTreeMap<String, String>,
    /// Header of `tensors/<name>.npy`, by tensor.
    pub npy_headers: Vec<Arc<[u8]>>,
    /// Directories below `tensors/`.
    pub paths: TensorPaths,
    /// The name `tensors` in the kernel.
    pub(super) tensors_name: KeptName,
    /// Why the last call of the mount's own learner failed, whether it is in the job or not.
    pub own_refusal: Arc<LastRefusal>,
    /// Name of the mount's own learner, which joins with the first open of `gradients`.
    pub own_name: String,
    learners: Mutex<BTreeMap<LearnerId, Arc<Learner>>>,
    /// Held while the mount's own learner joins.
    joining: Mutex<()>,
    /// Watcher keys of this model's learners: key → (learner, process).
    watched: Mutex<HashMap<u64, (LearnerId, u32)>>,
    header_len: AtomicU64,
}

impl Model {
    /// A model over its job, reached by `device`. `own_name` is what the mount's own learner is called: mounts that
    /// share a job need different ones.
    ///
    /// # Errors
    /// When the device does not connect.
    pub fn new(
        name: String,
        index: u8,
        job: Arc<dyn Job>,
        device: Arc<dyn Device>,
        metadata: BTreeMap<String, String>,
        own_name: String,
    ) -> FsResult<Model> {
        let layout = Arc::clone(job.layout());
        let npy_headers = layout.tensors().iter().map(|tensor| npy::npy_header(tensor).into()).collect();
        let paths = TensorPaths::new(layout.tensors());
        let model = Model {
            name,
            index,
            channel: device.connect()?,
            device,
            layout,
            job,
            traffic: Arc::default(),
            started: SystemTime::now(),
            metadata,
            npy_headers,
            paths,
            tensors_name: KeptName::default(),
            own_refusal: Arc::default(),
            own_name,
            learners: Mutex::default(),
            joining: Mutex::default(),
            watched: Mutex::default(),
            header_len: AtomicU64::new(0),
        };
        // The version in it has a fixed width, so that the length never changes.
        let len = model.safetensors_header(Version(0)).len() as u64;
        model.header_len.store(len, Ordering::Relaxed);
        Ok(model)
    }

    /// The newest version that may be told: who hears of it expects it, or a newer one, below `tensors`.
    pub(super) fn version_to_tell(&self) -> Version {
        self.tensors_name.told(self.job.version())
    }

    /// `done`, which is told of a success once all versions that are there by then may be told.
    pub(super) fn done_when_told<T: Send + 'static>(self: &Arc<Self>, done: Done<T>) -> Done<T> {
        let model = Arc::clone(self);
        Box::new(move |outcome| match outcome {
            Ok(value) => model.tensors_name.when_told(model.job.version(), move || done(Ok(value))),
            Err(error) => done(Err(error)),
        })
    }

    /// Header of `weights.safetensors` of `version`; it names the version in its metadata.
    pub fn safetensors_header(&self, version: Version) -> Arc<[u8]> {
        let mut metadata = self.metadata.clone();
        metadata.insert("gradfs.version".into(), format!("{:010}", version.0));
        header::header_bytes(self.layout.tensors(), &metadata).into()
    }

    /// Length of that header, the same for all versions.
    pub fn safetensors_header_len(&self) -> u64 {
        self.header_len.load(Ordering::Relaxed)
    }

    /// Longest wait of an open, fsync or close.
    pub fn timeout(&self) -> Duration {
        self.job.controls().timeout
    }

    /// Learners in the job, by number.
    pub fn learners(&self) -> Vec<Arc<Learner>> {
        self.learners.lock().values().cloned().collect()
    }

    /// The learner with this number, if it is in the job.
    pub fn learner(&self, id: LearnerId) -> FsResult<Arc<Learner>> {
        self.learners.lock().get(&id).cloned().ok_or_else(FsError::not_found)
    }

    /// The learner of this name, if it is in the job.
    pub fn learner_named(&self, name: &str) -> Option<Arc<Learner>> {
        self.learners.lock().values().find(|learner| learner.name == name).cloned()
    }

    /// The place that keeps why calls on this file failed. Only files of learners have one: of the mount's own, and of
    /// others that are in the job.
    pub fn refusal_of(&self, file: File) -> Option<Arc<LastRefusal>> {
        match file {
            File::Weights(_) | File::Gradients | File::Device | File::Error => {
                Some(Arc::clone(&self.own_refusal))
            }
            file => Some(Arc::clone(&self.learner(file.learner()?).ok()?.refusal)),
        }
    }

    /// A learner joins, for `owner`. Waits for the job's answer.
    ///
    /// # Errors
    /// EEXIST for a name in use, EDQUOT when the job is full, ENOMEM.
    pub fn join(&self, name: &str, owner: Option<Owner>) -> FsResult<Arc<Learner>> {
        let reply = request(&*self.channel, Message::Join { name: name.to_owned() }, self.prompt())?;
        let Reply::Joined { learner: id, incarnation } = reply else {
            return Err(FsError::new(libc::EIO, "the shard did not answer the join"));
        };
        let made = Contributor::new(
            id,
            incarnation,
            Arc::clone(&self.layout),
            Arc::clone(&self.device),
            Arc::clone(&self.channel),
            Arc::clone(&self.traffic),
        );
        let contributor = match made {
            Ok(contributor) => Arc::new(contributor),
            Err(error) => {
                self.send_leave(id, LeaveReason::Asked);
                return Err(error.into());
            }
        };
        if id.0 >= MAX_JOINS {
            self.send_leave(id, LeaveReason::Asked);
            return Err(FsError::new(libc::EDQUOT, format!("{MAX_JOINS} learners have joined: mount again")));
        }
        let learner = Arc::new(Learner {
            id,
            name: name.to_owned(),
            contributor,
            joined: SystemTime::now(),
            mapped_ready: AtomicBool::new(false),
            staging_ready: AtomicBool::new(false),
            doubts: Doubts::default(),
            owner,
            refusal: if name == self.own_name { Arc::clone(&self.own_refusal) } else { Arc::default() },
            use_: Mutex::default(),
        });
        self.learners.lock().insert(id, Arc::clone(&learner));
        tracing::info!(model = self.name, learner = name, "joined");
        Ok(learner)
    }

    /// `learner` is about to write. With others about, blocks will wait in staging: its pages are taken now, beside the
    /// request, for it takes a second a few gigabytes. A shortage shows when they are written.
    pub fn make_staging_ready(&self, learner: &Learner) {
        if self.job.controls().learners < 2 || learner.staging_ready.swap(true, Ordering::Relaxed) {
            return;
        }
        let (contributor, learner) = (Arc::clone(&learner.contributor), learner.name.clone());
        let prefault = move || {
            if let Err(error) = contributor.prefault() {
                tracing::warn!(%error, learner, "pre-faulting the staging region");
            }
        };
        if let Err(error) = std::thread::Builder::new().name("gradfs-prefault".into()).spawn(prefault) {
            tracing::warn!(%error, "no thread to pre-fault a staging region");
        }
    }

    /// The mount's own learner, if it is in the job.
    pub fn own_learner(&self) -> Option<Arc<Learner>> {
        self.learner_named(&self.own_name).filter(|learner| self.job.has_learner(learner.id))
    }

    /// The mount's own learner, joining if it is not in the job. Waits for the job's answer then.
    ///
    /// # Errors
    /// As [`Self::join`].
    pub fn join_own(&self) -> FsResult<Arc<Learner>> {
        // Several programs may open gradients for the first time at once.
        let _joining = self.joining.lock();
        if let Some(learner) = self.own_learner() {
            return Ok(learner);
        }
        if let Some(gone) = self.learner_named(&self.own_name) {
            // Its lease is over, and the word of it still under way.
            self.learners.lock().remove(&gone.id);
        }
        self.join(&self.own_name, None)
    }

    /// How long to wait for the answer to what is answered at once, unless the job is out of reach.
    pub fn prompt(&self) -> Duration {
        self.timeout().clamp(Duration::from_secs(1), PROMPT)
    }

    /// A learner leaves the job. Waits for the job's answer.
    ///
    /// # Errors
    /// ENOENT when it is not in it.
    pub fn leave(&self, id: LearnerId, reason: LeaveReason) -> FsResult<()> {
        request(&*self.channel, Message::Leave { learner: id, reason }, self.prompt())?;
        Ok(())
    }

    /// A learner leaves the job, whenever the job hears of it.
    pub fn send_leave(&self, learner: LearnerId, reason: LeaveReason) {
        self.channel.send(Message::Leave { learner, reason }, PROMPT, Box::new(|_| {}));
    }

    /// The shard says that a learner is gone. Returns its name, and the watches that are no longer
    /// needed; `None` when that was known.
    pub fn left(&self, id: LearnerId, reason: LeaveReason) -> Option<(String, Vec<u64>)> {
        let learner = self.learners.lock().remove(&id)?;
        let keys = self.watched.lock().extract_if(|_, (of, _)| *of == id).map(|(key, _)| key).collect();
        match reason {
            LeaveReason::Asked => tracing::info!(model = self.name, learner = learner.name, "left"),
            _ => tracing::warn!(model = self.name, learner = learner.name, "out of the job: {reason}"),
        }
        Some((learner.name.clone(), keys))
    }

    /// A handle of the learner was opened or closed.
    pub fn count_handle(&self, learner: &Learner, opened: bool) {
        let mut use_ = learner.use_.lock();
        use_.handles = if opened { use_.handles + 1 } else { use_.handles.saturating_sub(1) };
        drop(use_);
        self.tell_use(learner);
    }

    /// Tells the job whether a process uses the learner.
    pub fn tell_use(&self, learner: &Learner) {
        let unsettled = learner.contributor.is_open();
        // Told under the lock: what is told last is what is.
        let use_ = learner.use_.lock();
        self.job.touch(learner.id, Some(use_.attached(unsettled)));
    }

    /// A process that cannot be watched has the learner's `gradients` open.
    pub fn is_used_by_stranger(&self, learner: &Learner) {
        learner.use_.lock().strangers = true;
    }

    /// `process` has the learner's `gradients` open: its violent end is the learner's.
    pub fn watch(&self, learner: &Learner, process: Process, watcher: &Watcher, key: u64) {
        let tgid = process.tgid();
        {
            let mut use_ = learner.use_.lock();
            if use_.processes.contains(&tgid) {
                return;
            }
            use_.processes.push(tgid);
            use_.ended = false;
        }
        self.watched.lock().insert(key, (learner.id, tgid));
        if let Err(error) = watcher.watch(process, key) {
            tracing::warn!(%error, learner = learner.name, "its process cannot be watched; the lease decides");
            self.is_used_by_stranger(learner);
            self.unwatch(key);
        }
    }

    /// Takes back the watch of `key`: the learner it was of, and whether no other process uses it.
    pub fn unwatch(&self, key: u64) -> Option<(Arc<Learner>, bool)> {
        let (id, tgid) = self.watched.lock().remove(&key)?;
        let learner = self.learner(id).ok()?;
        let mut use_ = learner.use_.lock();
        use_.processes.retain(|&process| process != tgid);
        use_.ended = true;
        let alone = use_.processes.is_empty();
        drop(use_);
        self.tell_use(&learner);
        Some((learner, alone))
    }

    /// Bytes the kernel may be told this file has.
    pub fn npy_size(&self, tensor: u32) -> u64 {
        let index = tensor as usize;
        let bytes = &self.layout.tensors()[index].bytes;
        self.npy_headers[index].len() as u64 + (bytes.end - bytes.start)
    }
}
