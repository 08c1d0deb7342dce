//! Requests to the thread that makes connections.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::mpsc::Sender;
use std::time::Instant;

use nix::sys::eventfd::EventFd;
use parking_lot::Mutex;

use crate::queue_pair::QueuePair;
use crate::verbs::VerbsError;
use modelio_base::transport::stream::Stream;

/// The reason for refusing requests after the shutdown.
pub(super) const OVER: &str = "RDMA is shut down";

/// The state that the thread shares with its callers.
#[derive(Clone)]
pub(super) struct Shared {
    /// The sender of commands. `None` once nothing receives them any more.
    pub commands: Arc<Mutex<Option<Sender<Command>>>>,
    /// Wakes the thread.
    pub wake: Arc<EventFd>,
    /// The thread must end.
    pub over: Arc<AtomicBool>,
    /// The number of connections.
    pub connections: Arc<AtomicUsize>,
}

/// Returns the stream to serve on a queue pair that a peer has asked for, or `None` to hang up.
pub(super) type Accept =
    Box<dyn FnMut(&Arc<QueuePair>, Option<SocketAddr>) -> Option<Box<dyn Stream>> + Send>;
/// Returns the stream to serve on a requested queue pair, or takes the error.
pub(super) type Then = Box<dyn FnOnce(Result<&Arc<QueuePair>, String>) -> Option<Box<dyn Stream>> + Send>;

pub(super) enum Command {
    Listen { at: SocketAddr, accept: Accept, answer: Sender<Result<SocketAddr, VerbsError>> },
    Connect(Wish),
}

/// A connection that a caller wants.
pub(super) struct Wish {
    pub to: SocketAddr,
    pub deadline: Instant,
    /// The number of the queue.
    pub number: usize,
    /// How often another port may be tried.
    pub ports: u32,
    pub then: Then,
}

impl Wish {
    /// Reports that the connection could not be made.
    pub(super) fn fail(self, why: impl std::fmt::Display) {
        drop((self.then)(Err(format!("{}: {why}", self.to))));
    }
}

impl Command {
    /// Reports that the thread has ended.
    pub(super) fn refuse(self) {
        match self {
            Command::Listen { answer, .. } => drop(answer.send(Err(VerbsError::Broken(OVER.into())))),
            Command::Connect(wish) => wish.fail(OVER),
        }
    }
}
