//! What a client is told, what it tells, and why none comes about.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::registry::Registry;
use crate::transport::rdma::RdmaOptions;
use crate::transport::reactor::{Choice, Reactor};
use crate::transport::{Region, ShardError};
use crate::vocabulary::controls::ControlError;
use crate::vocabulary::ids::{LearnerId, Step, Version};
use crate::vocabulary::members::LeaveReason;
use crate::vocabulary::partly::PartlyWritten;
use crate::wire::{Message, Refusal};

/// Which way bytes are to go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// Shared memory to shards on this host; RDMA to others that take it; TCP where neither comes about, and the log says
    /// why.
    #[default]
    Auto,
    /// TCP, to all of them.
    Tcp,
    /// Shared memory, or not at all.
    SharedMemory,
    /// RDMA, or not at all.
    Rdma,
}

/// When a client pulls versions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pulls {
    /// Each, as soon as it is published: whoever opens it finds it here.
    #[default]
    Published,
    /// The first, and then those that somebody waits for ([`Job::await_step`](super::Job::await_step), [`Job::await_newest`](super::Job::await_newest)): for who
    /// contributes more often than it reads.
    Awaited,
}

/// What a client may be told to do otherwise.
#[derive(Clone)]
pub struct ClientOptions {
    /// Threads that move bytes through sockets, which several clients may share. Without, a client starts its own.
    pub reactor: Option<Arc<Reactor>>,
    /// How many threads of its own a client starts.
    pub threads: usize,
    /// The way of moving bytes of the threads that it starts.
    pub io: Choice,
    /// Whether they go through sockets at all.
    pub transport: TransportChoice,
    /// Connections to each shard for blocks.
    pub connections: usize,
    /// Bytes that may be asked for and on their way from one shard. They are received where they belong, so it costs no
    /// memory; too few leave a shard without work while this end is not running.
    pub window: usize,
    /// When versions are pulled.
    pub pulls: Pulls,
    /// How RDMA is used, where it is.
    pub rdma: RdmaOptions,
    /// How long to wait for shards, and the first version, when connecting.
    pub patience: Duration,
    /// Who is asked where the model is now when shards are out of reach. Without one, a client does not find a model
    /// that has moved while nobody was left where it was.
    pub registry: Option<Arc<dyn Registry>>,
}

impl fmt::Debug for ClientOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientOptions")
            .field("threads", &self.threads)
            .field("io", &self.io)
            .field("transport", &self.transport)
            .field("connections", &self.connections)
            .field("window", &self.window)
            .field("pulls", &self.pulls)
            .field("rdma", &self.rdma)
            .field("patience", &self.patience)
            .field("registry", &self.registry.as_ref().map(|_| ".."))
            .finish()
    }
}

impl Default for ClientOptions {
    fn default() -> ClientOptions {
        ClientOptions {
            reactor: None,
            threads: 2,
            io: Choice::Auto,
            transport: TransportChoice::Auto,
            connections: 2,
            window: 64 << 20,
            pulls: Pulls::Published,
            rdma: RdmaOptions::default(),
            patience: Duration::from_secs(10),
            registry: None,
        }
    }
}

/// Why no client came about.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The record of the model cannot be used.
    #[error("model {model}: {why}")]
    Record {
        /// Which.
        model: String,
        /// What is wrong with it.
        why: String,
    },
    /// No threads or memory.
    #[error("cannot start: {0}")]
    Start(String),
    /// Bytes cannot go the way that is asked for.
    #[error("model {model}: {why}")]
    Transport {
        /// Which.
        model: String,
        /// Why not.
        why: String,
    },
    /// A shard does not answer, or not as it should.
    #[error("model {model}: {why}")]
    Unreachable {
        /// Which.
        model: String,
        /// What was seen last.
        why: String,
    },
}

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

/// Called once with the outcome, perhaps from another thread, perhaps before the call that it was given to returns. It
/// must not block.
pub type Done<T> = Box<dyn FnOnce(Result<T, ShardError>) + Send>;

/// The same, with the coordinator's words.
pub type Answered = Box<dyn FnOnce(Result<Message, Refusal>) + Send>;

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

/// As [`Done`], for a setting.
pub type SetDone = Box<dyn FnOnce(Result<(), SetError>) + Send>;

/// A contribution is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// Which step it is.
    pub step: Step,
    /// The staging region still holds the last contribution: stage this one elsewhere.
    pub staging_lent: bool,
}

/// Where a contribution lies.
#[derive(Clone, Debug)]
pub(super) struct Staged {
    /// The memory.
    pub(super) region: Region,
    /// Nobody stores into it while it may be read. False where a program has it mapped: until the contribution is answered
    /// it should not, but it can; then the memory is its own, whatever the answer is.
    pub(super) steady: bool,
    /// What of its blocks was written, where that is not all. `None` if that is in more than
    /// [`MAX_PIECES`](crate::vocabulary::partly::MAX_PIECES) pieces.
    pub(super) partly: Option<PartlyWritten>,
}
