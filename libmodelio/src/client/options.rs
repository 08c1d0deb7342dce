//! What a client is told, what it tells, and why none comes about.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::registry::Registry;
use crate::transport::rdma::RdmaOptions;
use crate::transport::reactor::Choice;
use crate::transport::{LeaveReason, Region, ShardError, TransportKind};
use crate::vocabulary::ids::{LearnerId, ShardId, Version};
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
    /// The first, and then those that somebody waits for ([`Client::await_step`], [`Client::await_newest`]): for who
    /// contributes more often than it reads.
    Awaited,
}

/// What a client may be told to do otherwise.
#[derive(Clone)]
pub struct ClientOptions {
    /// Threads that move bytes.
    pub threads: usize,
    /// By which way.
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

/// What happens to a client, for whoever shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientEvent {
    /// A version is shown here.
    Published(Version),
    /// A learner of this client is no longer in the job.
    Left(LearnerId, LeaveReason),
    /// The coordinator has told the state of the job.
    State,
}

/// Called once for every event, with no lock held and without blocking.
pub type ClientListener = Box<dyn Fn(ClientEvent) + Send + Sync>;

/// Called once with the outcome of a request.
pub type Answered = Box<dyn FnOnce(Result<Message, Refusal>) + Send>;
/// Called once with the outcome of a wait for a version.
pub type Awaited = Box<dyn FnOnce(Result<Version, ShardError>) + Send>;

/// Where a contribution lies.
#[derive(Clone, Debug)]
pub struct Staged {
    /// The memory.
    pub region: Region,
    /// Nobody stores into it while it may be read. False where a program has it mapped: until the contribution is answered
    /// it should not, but it can; then the memory is its own, whatever the answer is.
    pub steady: bool,
    /// What of its blocks was written, where that is not all. `None` if that is in more than
    /// [`MAX_PIECES`](crate::vocabulary::partly::MAX_PIECES) pieces.
    pub partly: Option<PartlyWritten>,
}

impl From<Region> for Staged {
    fn from(region: Region) -> Staged {
        Staged { region, steady: true, partly: Some(PartlyWritten::default()) }
    }
}

/// A shard as its client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerView {
    /// Its number.
    pub shard: ShardId,
    /// How many of the model's blocks it owns.
    pub blocks: u32,
    /// Where it listens; `None` where it is part of this process.
    pub address: Option<String>,
    /// Whether it can be reached just now.
    pub connected: bool,
    /// For how long it cannot be reached for blocks, or, if it coordinates the job, for requests.
    pub gone: Option<Duration>,
    /// Which way blocks go.
    pub transport: TransportKind,
    /// Why they do not go through shared memory, where they might.
    pub no_memory: Option<String>,
    /// Why they do not go by RDMA, where they might.
    pub no_rdma: Option<String>,
    /// Why a connection to it was last lost, or did not come about.
    pub lost: Option<String>,
}

impl PeerView {
    /// A shard in this process that owns so many blocks.
    pub(super) fn here(shard: ShardId, blocks: u32) -> PeerView {
        PeerView {
            shard,
            blocks,
            address: None,
            connected: true,
            gone: None,
            transport: TransportKind::InProcess,
            no_memory: None,
            no_rdma: None,
            lost: None,
        }
    }
}

/// What became of a block that was offered where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offered {
    /// It was reduced.
    Reduced,
    /// It holds NaN or Inf, which is refused.
    NonFinite,
    /// Its learner is no longer in the job.
    UnknownLearner,
    /// It was offered before.
    Again,
    /// It is to be staged, and read when it is committed.
    Stage,
}
