//! The options of a client, its events, and its errors.

use std::sync::Arc;
use std::time::Duration;

use strum::{EnumString, VariantNames};

use crate::bytes::region::Region;
use crate::client::relay::RelayPort;
use crate::registry::Registry;
use crate::transport::rdma::RdmaOptions;
use crate::transport::reactor::{Choice, Reactor};
use crate::vocabulary::controls::{ControlError, PullPolicy};
use crate::vocabulary::ids::{LearnerId, Step, Version};
use crate::vocabulary::members::LeaveReason;
use crate::vocabulary::partly::PartlyWritten;
use crate::vocabulary::shard_error::ShardError;
use crate::wire::{Checksum, Message, Refusal};

/// The transport of blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumString, VariantNames)]
#[strum(serialize_all = "lowercase")]
pub enum TransportChoice {
    /// Shared memory to shards on this host, and RDMA to other shards that offer it. TCP where that does not come
    /// about; the log then says why.
    #[default]
    Auto,
    /// TCP to all shards.
    Tcp,
    /// Shared memory, and no other transport.
    #[strum(serialize = "shm")]
    SharedMemory,
    /// RDMA, and no other transport.
    Rdma,
}

/// The options of a client.
#[derive(Clone)]
pub struct ClientOptions {
    /// Threads that move bytes through sockets. Several clients may share them. Without it, a client starts its own.
    pub reactor: Option<Arc<Reactor>>,
    /// The number of threads that a client starts.
    pub threads: usize,
    /// The system calls that those threads move bytes with.
    pub io: Choice,
    /// The transport.
    pub transport: TransportChoice,
    /// Whether blocks are sent with a checksum.
    pub checksum: Checksum,
    /// The number of connections to each shard for blocks.
    pub connections: usize,
    /// The most bytes that may be asked for and on their way from one shard. They are received where they belong, so
    /// they cost no memory. With too few, a shard is without work while this end is not running.
    pub window: usize,
    /// Whether versions are pulled and shown. Without, the client knows the number of the newest one, and holds nothing of
    /// it: [`Job::read_parts`](super::Job::read_parts) asks the shards. It takes no learners, and publishes nothing.
    pub holds_versions: bool,
    /// When versions are pulled, whatever the job's settings say. On demand is at first, and then when a request waits
    /// for a newer version ([`Job::await_step`](super::Job::await_step),
    /// [`Job::await_newest`](super::Job::await_newest)).
    pub pulls: Option<PullPolicy>,
    /// How RDMA is used, where it is.
    pub rdma: RdmaOptions,
    /// The longest wait for shards, and for some of the first version, when connecting.
    pub patience: Duration,
    /// Takes the connections of clients that pull from this one. Then it is a relay among those of the model, and pulls
    /// by the one that the coordinator names, unless `via` says by which.
    pub relay: Option<Arc<RelayPort>>,
    /// The address of the relay that versions are pulled by.
    pub via: Option<String>,
    /// Whoever has the job hears when the model goes on in another life ([`Event::Restored`]), begins a job there, and then
    /// ends this one ([`Job::roll_back`](super::Job::roll_back)). Otherwise it ends by itself.
    pub is_followed: bool,
    /// The registry that is asked for the model's place when shards are out of reach. Without it, a client does not
    /// find a model that has moved while no shard was left at the old place.
    pub registry: Option<Arc<dyn Registry>>,
}

impl Default for ClientOptions {
    fn default() -> ClientOptions {
        ClientOptions {
            reactor: None,
            threads: 2,
            io: Choice::Auto,
            transport: TransportChoice::Auto,
            checksum: Checksum::On,
            connections: 2,
            window: 64 << 20,
            holds_versions: true,
            pulls: None,
            rdma: RdmaOptions::default(),
            patience: Duration::from_secs(10),
            relay: None,
            via: None,
            is_followed: false,
            registry: None,
        }
    }
}

/// Why a client could not connect.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The record of the model cannot be used.
    #[error("model {model}: {why}")]
    Record {
        /// The model.
        model: String,
        /// What is wrong with it.
        why: String,
    },
    /// No threads or memory.
    #[error("cannot start: {0}")]
    Start(String),
    /// Blocks cannot go by the required transport.
    #[error("model {model}: {why}")]
    Transport {
        /// The model.
        model: String,
        /// The reason.
        why: String,
    },
    /// A shard does not answer, or not as it should.
    #[error("model {model}: {why}")]
    Unreachable {
        /// The model.
        model: String,
        /// The newest error.
        why: String,
    },
}

/// An event in a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A version is complete. Opens from now on see it, and may have to wait until it is here.
    Published(Version),
    /// A learner is no longer in the job.
    Left(LearnerId, LeaveReason),
    /// Readers have begun, applied a version, or ended.
    Readers,
    /// There is a snapshot of a newer version in the job's store.
    Durable,
    /// Blocks were lost, and the model goes on in another life: see [`ClientOptions::is_followed`]. It may be told again. It
    /// is told before that life is there, too, where newer weights of clients count.
    Restored,
}

/// A function that is called once for every [`Event`], with no lock held, before waiting requests are answered. It
/// takes milliseconds at most. Two events that follow closely may come from two threads and in either order: ask the
/// job for the newest version.
pub type Listener = Box<dyn Fn(Event) + Send + Sync>;

/// A completion. It is called once with the outcome, perhaps from another thread, and perhaps before the call that
/// took it returns. It must not block.
pub type Done<T> = Box<dyn FnOnce(Result<T, ShardError>) + Send>;

/// Like [`Done`], with the coordinator's answer.
pub type Answered = Box<dyn FnOnce(Result<Message, Refusal>) + Send>;

/// Why a setting was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetError {
    /// The value does not fit. Nothing has changed.
    #[error(transparent)]
    Refused(#[from] ControlError),
    /// The outcome is unknown: [`ShardError::TimedOut`] or [`ShardError::Unreachable`]. The value may still take
    /// effect. Setting the same value again does no harm.
    #[error(transparent)]
    Unanswered(#[from] ShardError),
}

/// Like [`Done`], for a setting.
pub type SetDone = Box<dyn FnOnce(Result<(), SetError>) + Send>;

/// An open contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The step.
    pub step: Step,
    /// The staging region still holds the last contribution, so this one must be staged elsewhere.
    pub staging_lent: bool,
}

/// The memory of a contribution.
#[derive(Clone, Debug)]
pub(super) struct Staged {
    /// The memory.
    pub(super) region: Region,
    /// Nobody stores into the memory while it may be read. False if a program has it mapped: the program should not
    /// store before its fsync returns, but it can. After that the memory is the program's.
    pub(super) steady: bool,
    /// The written ranges of partly written blocks. `None` if there are more than
    /// [`MAX_PIECES`](crate::vocabulary::partly::MAX_PIECES) pieces.
    pub(super) partly: Option<PartlyWritten>,
}
