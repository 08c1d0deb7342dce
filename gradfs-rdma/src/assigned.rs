//! The queue pairs that a thread serves, and those that it will serve.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use super::queue_pair::QueuePair;

/// The queue pairs that a thread serves, by their numbers.
#[derive(Default)]
pub(super) struct Assigned(RwLock<HashMap<u32, Arc<QueuePair>>>);

impl Assigned {
    /// The thread handles the queue pair's completions from now on.
    pub(super) fn enter(&self, queue_pair: &Arc<QueuePair>) {
        self.0.write().insert(queue_pair.number(), Arc::clone(queue_pair));
    }

    /// The thread ignores the queue pair's completions from now on.
    pub(super) fn leave(&self, queue_pair: &QueuePair) {
        self.0.write().remove(&queue_pair.number());
    }

    /// The queue pair of this number.
    pub(super) fn get(&self, number: u32) -> Option<Arc<QueuePair>> {
        self.0.read().get(&number).cloned()
    }
}

/// The queue pairs that a thread will serve, by the descriptor that stands for each, with the other end of
/// that descriptor.
pub(super) type Expected = Mutex<HashMap<RawFd, (Arc<QueuePair>, UnixStream)>>;
