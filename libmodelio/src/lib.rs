//! A program's part in a model that gradfs serves: learners contribute, readers follow versions, publishers replace
//! weights.
//!
//! What a mount does through files, this library does without a kernel between: blocks go to the shards over TCP,
//! shared memory or RDMA, and versions lie in the program's own memory. [`connect`] finds a model by its name. The rest
//! follows from the [`Job`]:
//!
//! | to | use |
//! |---|---|
//! | train | [`Job::join`], then a [`Contributor`]: [`write`](Contributor::write) gradients at any offset, [`commit`](Contributor::commit) the step |
//! | read | a [`Reader`], which holds one complete version unchanged |
//! | follow | [`Job::subscribe`] to [`Event::Published`], or [`Job::version`] |
//! | publish | a [`Publisher`]: whole new weights, which become a version at once |
//! | set | [`Job::set_control`], with the names of [`Controls`] |
//! | watch | [`Job::status`] |
//! | move many bytes at once | [`aio`]: a queue of requests |
//!
//! A call that needs an answer from elsewhere takes a completion and a timeout, and never blocks. [`wait_for`] makes it
//! one that waits.
//!
//! ```no_run
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use libmodelio::{ClientOptions, Contributor, Reader, Share, Wrote, connect, wait_for};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let patience = Duration::from_secs(30);
//! let job = connect("127.0.0.1:7070", "mymodel", ClientOptions::default())?;
//! let learner = wait_for(patience, |done| job.join("worker-0".into(), patience, done))?;
//! let contributor = Arc::new(Contributor::new(Arc::clone(&job), learner, Arc::default())?);
//!
//! let weights = Reader::newest(&job).ok_or("no version")?;
//! let gradients = vec![0u8; weights.bytes(0..job.layout().size()).len()];
//! let mut share = Share::None;
//! while contributor.write(&mut share, 0, &gradients, patience)? == Wrote::Asks {
//!     wait_for(patience, |done| contributor.ask_step(patience, done))?;
//! }
//! wait_for(patience, |done| contributor.commit(share, patience, done))?;
//! # Ok(()) }
//! ```
//!
//! `examples/` has programs for the first four rows. The other modules are those of the daemon and the shards: they are
//! public for these crates, and change without notice.

#![warn(unreachable_pub)]

#[doc(hidden)]
pub mod admin;
pub mod aio;
#[doc(hidden)]
pub mod client;
#[doc(hidden)]
pub mod contributor;
#[doc(hidden)]
pub mod disk;
#[doc(hidden)]
pub mod explained;
#[doc(hidden)]
pub mod formats;
#[doc(hidden)]
pub mod mapped;
#[doc(hidden)]
pub mod nbd;
#[doc(hidden)]
pub mod observe;
#[doc(hidden)]
pub mod publisher;
#[doc(hidden)]
pub mod reader;
#[doc(hidden)]
pub mod registry;
#[doc(hidden)]
pub mod timer;
#[doc(hidden)]
pub mod tracker;
#[doc(hidden)]
pub mod transport;
#[doc(hidden)]
pub mod view;
#[doc(hidden)]
pub mod wire;

#[doc(hidden)]
pub use modelio_base::{bytes, vocabulary};

use std::sync::Arc;
use std::time::Instant;

pub use client::{
    ClientError, ClientOptions, Done, Event, Job, JobStatus, LastCommit, Listener, SetError, ShardView,
    TransportChoice, VersionView, wait_for,
};
pub use contributor::{ContributeError, Contributor, Share, Traffic, Wrote};
pub use mapped::MappedMemory;
pub use publisher::Publisher;
pub use reader::Reader;
pub use registry::{EtcdUrl, Registry, RegistryError, RemoteRegistry};
pub use tracker::WriteRefused;
pub use transport::reactor::Choice as IoChoice;
pub use vocabulary::controls::{ControlError, Controls, PullPolicy};
pub use vocabulary::ids::{BlockId, Incarnation, LearnerId, ShardId, Step, Version};
pub use vocabulary::layout::{DType, ModelLayout, Tensor};
pub use vocabulary::members::LeaveReason;
pub use vocabulary::meta::{Meta, MetaError};
pub use vocabulary::reducer::Reducer;
pub use vocabulary::shard_error::ShardError;
pub use vocabulary::weight::Weight;
pub use wire::{Checksum, ModelRecord, ShardRecord};

/// Connects to the model `name`, whose place the registry at `registry` (`host:port`, or `etcd://a:2379,b:2379,c:2379`)
/// knows. The job follows the model
/// when it moves to other shards. Returns when a first version is here.
///
/// # Errors
/// [`ConnectError`], after `options.patience` for each of the registry and the shards at the latest.
pub fn connect(registry: &str, name: &str, options: ClientOptions) -> Result<Arc<Job>, ConnectError> {
    let registry = registry::open(registry)?;
    let deadline = Instant::now() + options.patience;
    let record = registry.model(name, deadline)?;
    let shards = registry.shards(deadline)?;
    Ok(Arc::new(Job::connect(&record, &shards, ClientOptions { registry: Some(registry), ..options })?))
}

/// Why [`connect`] failed.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The registry cannot be reached, or knows no such model.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The shards cannot be reached as the options want it.
    #[error(transparent)]
    Client(#[from] ClientError),
}
