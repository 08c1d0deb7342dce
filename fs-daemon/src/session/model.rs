//! One model: its job, and its learners in this process.

mod durable;
mod freshness;
mod readers;

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use libmodelio::client::{Job, wait_for};
use libmodelio::contributor::{Contributor, Traffic};
use libmodelio::disk::Disk;
use libmodelio::vocabulary::ids::{LearnerId, Version};
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::reducer::Content;
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::MAX_SMALL_MODEL;
use parking_lot::Mutex;
use ps_backend::server::local::LocalShard;

use super::error::LastRefusal;
use super::error::{CallError, CallResult};
use super::learner::{Learner, PROMPT};
use super::times::ModelTimes;
use super::written_view::WrittenView;
pub use readers::not_applied;

/// Name of the own learner of a mount that has its job to itself.
pub const OWN_LEARNER: &str = "mount";

/// Learners that can join in the life of this process, and the bound of their numbers.
pub const MAX_JOINS: u32 = 1 << 20;

/// The parties that can take a snapshot of a model.
pub enum Snapshots {
    /// Its shard, in this process.
    Here(Weak<LocalShard>),
    /// Its shards, which the registry at this address knows.
    Registry(String),
    /// Nobody: it is a view of another model, which may be written so.
    Never(Option<Arc<WrittenView>>),
    /// Nobody: it stands in place of this model, of which it shows a part.
    PartOf(Arc<Model>),
}

/// A learner that has been dropped while programs that used it live.
pub struct Dropped {
    /// Its name.
    pub name: String,
    /// User and group that it belonged to.
    pub owner: Option<(u32, u32)>,
    /// When it joined.
    pub joined: SystemTime,
    /// Why it was dropped.
    pub reason: LeaveReason,
    /// The same in words, for its programs.
    pub refusal: Arc<LastRefusal>,
}

impl Dropped {
    /// The error of its programs' calls.
    pub fn error(&self) -> CallError {
        let Dropped { name, reason, .. } = self;
        let what =
            format!("learner {name:?} is no longer in the job: {reason}; join again (mkdir learners/{name})");
        CallError::new(libc::ENOTCONN, what)
    }
}

/// The disk of a model. Its memory stays for the next user, who finds its pages taken.
#[derive(Default)]
pub struct SharedDisk {
    /// The disk, once somebody has used it.
    pub disk: Option<Arc<Disk>>,
    /// The number of its users.
    pub users: usize,
}

/// A file that came with a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Companion {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub contents: Vec<u8>,
}

/// Something of which one is there at a time.
#[derive(Default)]
pub struct OnlyOne(Mutex<Weak<()>>);

impl OnlyOne {
    /// What the one is there with; none while another one is.
    pub fn take(&self) -> Option<Arc<()>> {
        let mut running = self.0.lock();
        (running.strong_count() == 0).then(|| {
            let only = Arc::new(());
            *running = Arc::downgrade(&only);
            only
        })
    }
}

/// One model.
pub struct Model {
    /// Its name.
    pub name: String,
    /// Tensors and blocks.
    pub layout: Arc<ModelLayout>,
    /// Its versions, its settings and its learners.
    pub job: Arc<Job>,
    /// Bytes that went through this process.
    pub traffic: Arc<Traffic>,
    /// What its learners in this process wait for.
    pub times: Arc<ModelTimes>,
    /// `__metadata__` of the file it came from.
    pub metadata: BTreeMap<String, String>,
    /// Files that came with the model: configuration, tokenizer.
    pub companions: Vec<Companion>,
    /// Why the last call of the mount's own learner failed, whether it is in the job or not.
    pub own_refusal: Arc<LastRefusal>,
    /// Name of the mount's own learner, which joins when it is first needed.
    pub own_name: String,
    /// The party that can take a snapshot of the model.
    pub snapshots: Snapshots,
    /// The model as a disk.
    pub(super) disk: Mutex<SharedDisk>,
    /// Lives as long as the snapshot that is open.
    pub(super) open_snapshot: OnlyOne,
    learners: Mutex<BTreeMap<LearnerId, Arc<Learner>>>,
    /// Learners that were dropped, as long as their programs may ask why.
    dropped: Mutex<BTreeMap<LearnerId, Arc<Dropped>>>,
    /// Held while the mount's own learner joins.
    joining: Mutex<()>,
}

impl Model {
    /// A model over its job. `own_name` names the mount's own learner: mounts that share a job need different
    /// names.
    pub fn new(
        name: String,
        job: Job,
        metadata: BTreeMap<String, String>,
        own_name: String,
        snapshots: Snapshots,
    ) -> Model {
        Model {
            name,
            layout: Arc::clone(job.layout()),
            job: Arc::new(job),
            traffic: Arc::default(),
            times: Arc::default(),
            metadata,
            companions: Vec::new(),
            own_refusal: Arc::default(),
            own_name,
            snapshots,
            disk: Mutex::default(),
            open_snapshot: OnlyOne::default(),
            learners: Mutex::default(),
            dropped: Mutex::default(),
            joining: Mutex::default(),
        }
    }

    /// How it is written, if it is a view of another model.
    pub fn written_view(&self) -> Option<&Arc<WrittenView>> {
        match &self.snapshots {
            Snapshots::Never(written) => written.as_ref(),
            Snapshots::Here(_) | Snapshots::Registry(_) | Snapshots::PartOf(_) => None,
        }
    }

    /// The model in whose place it stands, or itself: the one that has shards, settings and readers.
    pub fn whole(&self) -> &Model {
        match &self.snapshots {
            Snapshots::PartOf(whole) => whole,
            Snapshots::Here(_) | Snapshots::Registry(_) | Snapshots::Never(_) => self,
        }
    }

    /// The error of all calls, if the model was restored and this is the life before.
    pub fn goes_on_elsewhere(&self) -> Option<CallError> {
        let lost = self.whole().job.lost().filter(|lost| matches!(lost, ShardError::RolledBack(_)));
        lost.map(CallError::from)
    }

    /// Whether the model can be used as a disk: whole new values replace the old ones.
    pub fn is_disk(&self) -> bool {
        self.job.controls().reducer.takes_weights()
    }

    /// Whether the time of a step lies in messages and threads that wake each other, more than in bytes.
    pub fn is_small(&self) -> bool {
        self.layout.size() <= u64::from(MAX_SMALL_MODEL)
    }

    /// Longest wait for a version, or for a commit.
    pub fn timeout(&self) -> Duration {
        self.job.controls().timeout
    }

    /// How long to wait for the answer to what is answered at once, unless the job is out of reach.
    pub fn prompt(&self) -> Duration {
        self.timeout().clamp(Duration::from_secs(1), PROMPT)
    }

    /// Learners in the job, by number.
    pub fn learners(&self) -> Vec<Arc<Learner>> {
        self.learners.lock().values().cloned().collect()
    }

    /// The learner with this number.
    ///
    /// # Errors
    /// When it is not in the job: ENOTCONN if it was dropped and its programs live, else ENOENT.
    pub fn learner(&self, id: LearnerId) -> CallResult<Arc<Learner>> {
        let known = self.learners.lock().get(&id).cloned();
        let dropped = || self.dropped(id).map_or_else(CallError::not_found, |dropped| dropped.error());
        known.ok_or_else(dropped)
    }

    /// A learner that was dropped, if its programs live.
    pub fn dropped(&self, id: LearnerId) -> Option<Arc<Dropped>> {
        self.dropped.lock().get(&id).cloned()
    }

    /// The last one of this name.
    pub fn dropped_named(&self, name: &str) -> Option<(LearnerId, Arc<Dropped>)> {
        let dropped = self.dropped.lock();
        dropped.iter().rfind(|(_, one)| one.name == name).map(|(id, one)| (*id, Arc::clone(one)))
    }

    /// The learner was dropped, and programs that have used it live: they hear why until [`Self::forget_dropped`].
    pub fn keep_dropped(&self, learner: &Learner, reason: LeaveReason) {
        // The mount's own learner joins again by itself.
        if learner.name == self.own_name {
            return;
        }
        let refusal = Arc::<LastRefusal>::default();
        let (name, owner, joined) = (learner.name.clone(), learner.owner, learner.joined);
        let dropped = Dropped { name, owner, joined, reason, refusal };
        dropped.refusal.note(&dropped.error(), false);
        self.dropped.lock().insert(learner.id, Arc::new(dropped));
    }

    /// Nobody is left who would ask about a dropped learner, or it joins again or was removed.
    pub fn forget_dropped(&self, is_one: impl Fn(LearnerId, &Dropped) -> bool) {
        self.dropped.lock().retain(|id, one| !is_one(*id, one));
    }

    /// The learner of this name, if it is in the job.
    pub fn learner_named(&self, name: &str) -> Option<Arc<Learner>> {
        self.learners.lock().values().find(|learner| learner.name == name).cloned()
    }

    /// The mount's own learner, if it is in the job.
    pub fn own_learner(&self) -> Option<Arc<Learner>> {
        self.learner_named(&self.own_name).filter(|learner| self.job.has_learner(learner.id))
    }

    /// A learner joins, for `owner`. Waits for the job's answer.
    ///
    /// # Errors
    /// EEXIST for a name in use, EDQUOT when the job is full, ENOMEM.
    pub fn join(&self, name: &str, owner: Option<(u32, u32)>) -> CallResult<Arc<Learner>> {
        let prompt = self.prompt();
        let (id, incarnation) = wait_for(prompt, |done| self.job.join(name.to_owned(), prompt, done))?;
        if id.0 >= MAX_JOINS {
            self.send_leave(id, LeaveReason::Asked);
            return Err(CallError::new(
                libc::EDQUOT,
                format!("{MAX_JOINS} learners have joined: mount again"),
            ));
        }
        let (job, traffic) = (Arc::clone(&self.job), Arc::clone(&self.traffic));
        let contributor = Contributor::new(job, (id, incarnation), traffic)
            .inspect_err(|_| self.send_leave(id, LeaveReason::Asked))?;
        // Everybody reads the weights that the mount's own learner reads.
        let contributor = if name == self.own_name { contributor.without_own_weights() } else { contributor };
        let refusal = if name == self.own_name { Arc::clone(&self.own_refusal) } else { Arc::default() };
        let job = Arc::clone(&self.job);
        let times = Arc::clone(&self.times);
        let learner = Arc::new(Learner::new(name.to_owned(), contributor, job, owner, refusal, times));
        self.learners.lock().insert(id, Arc::clone(&learner));
        self.forget_dropped(|_, one| one.name == name);
        tracing::info!(model = self.name, learner = name, "joined");
        Ok(learner)
    }

    /// Whether one more learner of a user, of many who use this mount, is within the user's share: half of the learners
    /// that may be in the job, or as many as it waits for if that is more.
    ///
    /// # Errors
    /// EDQUOT.
    pub fn check_share(&self, user: u32) -> CallResult<()> {
        let controls = self.job.controls();
        let share = controls.learners.max(controls.max_learners / 2) as usize;
        let is_its = |learner: &&Arc<Learner>| learner.owner.is_some_and(|(owner, _)| owner == user);
        if self.learners.lock().values().filter(is_its).count() < share {
            return Ok(());
        }
        let what = format!("user {user} has {share} learners already, the share of one user");
        Err(CallError::new(libc::EDQUOT, what))
    }

    /// The mount's own learner would contribute a replica, and can have none.
    ///
    /// # Errors
    /// EACCES says what to do.
    pub fn refuse_own_replica(&self) -> CallResult<()> {
        if self.job.content() != Content::Replica {
            return Ok(());
        }
        let what = format!(
            "with reducer {} each learner has a replica of its own: mkdir learners/NAME, and use the files in it",
            self.job.reducer().0
        );
        Err(CallError::new(libc::EACCES, what))
    }

    /// The mount's own learner, joining if it is not in the job. Waits for the job's answer then.
    ///
    /// # Errors
    /// Fails as [`Self::join`] does.
    pub fn join_own(&self) -> CallResult<Arc<Learner>> {
        // Several programs may need it for the first time at once.
        let _joining = self.joining.lock();
        if let Some(learner) = self.own_learner() {
            return Ok(learner);
        }
        if let Some(gone) = self.learner_named(&self.own_name) {
            // Its lease is over, and the message about that is still under way.
            self.learners.lock().remove(&gone.id);
        }
        self.join(&self.own_name, None)
    }

    /// Refuses a program that is no learner and opens `version`, if programs hold as many others as they may.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn refuse_reader(&self, version: Version) -> CallResult<()> {
        self.job.refuses_reader(version).map_or(Ok(()), |why| Err(CallError::new(libc::ENOMEM, why)))
    }

    /// A program opens this version as the newest one, as `learner` or as none.
    pub fn opened(&self, version: Version, learner: Option<&Learner>) {
        learner.inspect(|learner| learner.contributor.begins_from(version));
        let staleness = self.job.staleness(version);
        self.times.staleness.add(staleness.versions);
        if let Some(learner) = learner {
            learner.times.opened(staleness);
            self.job.has_opened(learner.id, version);
        }
    }

    /// A learner leaves the job. Waits for the job's answer.
    ///
    /// # Errors
    /// ENOENT when it is not in it.
    pub fn leave(&self, id: LearnerId, reason: LeaveReason) -> CallResult<()> {
        let prompt = self.prompt();
        Ok(wait_for(prompt, |done| self.job.leave(id, reason, prompt, done))?)
    }

    /// A learner leaves the job, whenever the job hears of it.
    pub fn send_leave(&self, learner: LearnerId, reason: LeaveReason) {
        self.job.leave(learner, reason, PROMPT, Box::new(|_| {}));
    }

    /// The job says that a learner is out of it. Returns the learner, unless that was known.
    pub fn left(&self, id: LearnerId, reason: LeaveReason) -> Option<Arc<Learner>> {
        let learner = self.learners.lock().remove(&id)?;
        match reason {
            LeaveReason::Asked => tracing::info!(model = self.name, learner = learner.name, "left"),
            _ => tracing::warn!(model = self.name, learner = learner.name, "out of the job: {reason}"),
        }
        Some(learner)
    }
}
