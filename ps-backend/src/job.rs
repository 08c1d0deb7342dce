//! A job as a mount sees it: one model, wherever its shards are.
//!
//! What learners say goes through a [`Channel`](libmodelio::transport::Channel); a [`Job`] is what remains for
//! whoever shows the model as files: which versions there are, pinned and in this process's memory, the settings,
//! who is in the job. [`EmbeddedShard`](crate::embedded::EmbeddedShard) is one in this process. One on a network
//! keeps a mirror of what the model's coordinator tells, and answers from that.
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use libmodelio::client::LastCommit;
use libmodelio::transport::tally::Payloads;
use libmodelio::transport::{Attached, LeaveReason, Region, ShardError, TransportKind};
use libmodelio::vocabulary::controls::{ControlError, Controls};
use libmodelio::vocabulary::ids::{LearnerId, ShardId, Version};
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::vocabulary::phase::JobPhase;

use crate::core::{MemberView, WaitedFor};

/// What happens in a job, for whoever shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A version is complete; opens from now on see it.
    Published(Version),
    /// A learner is no longer in the job.
    Left(LearnerId, LeaveReason),
}

/// Called once for every [`Event`], with no lock held, before those who wait for it are answered. It takes milliseconds
/// at most. Events that follow each other closely may come from two threads and in either order: ask the job what is
/// newest.
pub type Listener = Box<dyn Fn(Event) + Send + Sync>;

/// The memory of a version, here in this process.
pub trait VersionMemory: fmt::Debug + Send + Sync {
    /// The memory itself, a memfd of the model's size that nobody else may write: for passthrough.
    fn region(&self) -> &Region;

    /// Its bytes, as [`Self::region`] holds them. The caller holds a pin on the version.
    ///
    /// # Panics
    /// When `range` leaves the model.
    fn bytes(&self, range: Range<u64>) -> &[u8];
}

/// A version that is in memory.
#[derive(Clone, Debug)]
pub struct VersionView {
    /// Its bytes stay what they are only while it is the newest or pinned.
    pub memory: Arc<dyn VersionMemory>,
    /// When it was published.
    pub published: SystemTime,
}

/// One of the shards that a model is striped over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardView {
    /// Its number in the model's block map.
    pub shard: ShardId,
    /// Its host and port; `None` where it is part of this process.
    pub address: Option<String>,
    /// Which way bytes go to it and come from it.
    pub transport: TransportKind,
    /// Blocks of the model that it owns.
    pub blocks: u32,
    /// Why that is not shared memory, though the shard is on this host.
    pub no_memory: Option<String>,
    /// Why that is not RDMA, though the shard takes such connections, or though it must be.
    pub no_rdma: Option<String>,
    /// Why a connection to it was last lost, or did not come about.
    pub lost: Option<String>,
    /// Whether there is a connection to it now.
    pub connected: bool,
    /// For how long it has not been reached, by this process or by the coordinator, if that is long.
    pub away: Option<Duration>,
}

/// What a job has done since its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobStatus {
    /// What it is doing.
    pub state: JobPhase,
    /// Learners that others have been waiting for, and for how long, if that is long.
    pub late: Option<(WaitedFor, Duration)>,
    /// The newest version.
    pub version: Version,
    /// Learners in the job, those of other mounts included.
    pub members: Vec<MemberView>,
    /// Of them, those whose contribution to the coming version is in.
    pub committed: usize,
    /// Contributions that are part of a version.
    pub contributions: u64,
    /// Blocks reduced straight from the buffer that they came in.
    pub blocks_on_arrival: u64,
    /// Version buffers in this process, and the free ones of them.
    pub buffers: (usize, usize),
    /// Versions in this process's memory.
    pub versions: Vec<Version>,
    /// Where the model's blocks are, by number of the shard; at least one.
    pub shards: Vec<ShardView>,
}

/// Why a setting was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetError {
    /// It does not fit; nothing has changed.
    #[error(transparent)]
    Refused(#[from] ControlError),
    /// Nobody said whether it was: [`ShardError::TimedOut`] or [`ShardError::Unreachable`]. It may still take
    /// effect; setting the same value again does no harm.
    #[error(transparent)]
    Unanswered(#[from] ShardError),
}

/// Called once with the outcome, perhaps from another thread, perhaps before the call that it was given to returns.
/// It must not block.
pub type SetDone = Box<dyn FnOnce(Result<(), SetError>) + Send>;

/// A job: one model, its versions in this process's memory, its settings and its learners.
///
/// # What may wait
/// Nothing does. The threads that answer the kernel call all of this, so each call returns from what this process
/// knows already: it takes short locks, asks nobody and waits for nobody. What has to be asked of others has a
/// completion ([`Self::set_control`]) or is only told to them ([`Self::touch`]). [`Self::check_finite`] computes in
/// the calling thread, for as long as a pass over the bytes takes.
///
/// # What a mirror has to keep
/// Where the decisions are made elsewhere, what is known here may be late, but:
/// - [`Self::version`] never goes back, and the version that it names is whole in this process's memory: it can be
///   pinned, got and read.
/// - Once a learner of this process has had its commit answered, [`Self::last_commit`] knows of that commit, and
///   once a request for its version was answered, [`Self::version`] is at least that.
/// - [`Event::Published`] is told after [`Self::version`] shows it, [`Event::Left`] after [`Self::has_learner`] does.
/// - Versions that are pinned here stay, whatever becomes of them elsewhere.
///
/// # What its channel has to keep
/// Requests that the kernel's threads wait for are answered before
/// [`send`](libmodelio::transport::Channel::send) returns, from what is known here: `Open`, `Abort`, `Withdraw`,
/// `WithdrawAssign` and `Allocate`. `Join` and `Leave` may ask others, up to their deadline.
pub trait Job: Send + Sync {
    /// The layout.
    fn layout(&self) -> &Arc<ModelLayout>;

    /// The newest version that can be read here.
    fn version(&self) -> Version;

    /// Payload that has gone to shards elsewhere and come from them; `None` where the model is part of this process.
    fn payload(&self) -> Option<Payloads> {
        None
    }

    /// Pins `version`: it is not recycled before [`Self::unpin`]. False when it is gone.
    fn pin(&self, version: Version) -> bool;

    /// Takes `count` pins of `version` back.
    fn unpin(&self, version: Version, count: u64);

    /// A version in this process's memory.
    fn get(&self, version: Version) -> Option<VersionView>;

    /// Versions in this process's memory, the merely pinned ones included.
    fn versions(&self) -> Vec<Version>;

    /// Versions under `versions/`, the newest first: it and the retained.
    fn retained(&self) -> Vec<Version>;

    /// The settings, as last heard.
    fn controls(&self) -> Controls;

    /// Changes one setting for the whole job; it takes effect at the next version. `done` is called before
    /// `timeout` is over, and [`Self::controls`] shows the new value by the time it is called with success.
    fn set_control(&self, name: &str, value: &str, timeout: Duration, done: SetDone);

    /// Whether `weights` may be written now. It is looked at again when they are published.
    ///
    /// # Errors
    /// [`ShardError::NotAllowed`].
    fn may_assign(&self) -> Result<(), ShardError>;

    /// Looks for NaN and Inf in the `written` ranges of new weights, if they are to be refused. `buffer` is of the
    /// model's size, the ranges are sorted and disjoint.
    ///
    /// # Errors
    /// [`ShardError::NonFinite`].
    fn check_finite(&self, buffer: &Region, written: &[Range<u64>]) -> Result<(), ShardError>;

    /// Whether `learner` is in the job.
    fn has_learner(&self, learner: LearnerId) -> bool;

    /// Where the last commit of `learner`, one of this process's, is.
    fn last_commit(&self, learner: LearnerId) -> LastCommit;

    /// Whether a version with the last commit of `learner` is complete elsewhere, and on its way here.
    fn is_coming(&self, learner: LearnerId) -> bool {
        let _ = learner;
        false
    }

    /// Sign of life from `learner`. `attached` says whether a process uses it, where that is known anew.
    fn touch(&self, learner: LearnerId, attached: Option<Attached>);

    /// What it is doing.
    fn status(&self) -> JobStatus;

    /// Who is told of events, in the place of whoever was before.
    fn subscribe(&self, listener: Listener);

    /// Fails what waits with [`ShardError::Unreachable`] and takes nothing more.
    fn shut_down(&self);
}
