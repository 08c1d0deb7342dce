//! Which lines a thread serves, and which it is to serve.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use super::line::Line;

/// Lines that a thread serves, by the numbers of their queue pairs.
#[derive(Default)]
pub(super) struct Lines(RwLock<HashMap<u32, Arc<Line>>>);

impl Lines {
    /// Its news are heard from now on.
    pub(super) fn enter(&self, line: &Arc<Line>) {
        self.0.write().insert(line.number(), Arc::clone(line));
    }

    /// They are passed over.
    pub(super) fn leave(&self, line: &Line) {
        self.0.write().remove(&line.number());
    }

    /// The line of this queue pair.
    pub(super) fn get(&self, number: u32) -> Option<Arc<Line>> {
        self.0.read().get(&number).cloned()
    }
}

/// What is expected of a thread: a line for each descriptor that stands for one.
pub(super) type Expected = Mutex<HashMap<RawFd, (Arc<Line>, UnixStream)>>;
