//! The writers of an open file. The way in which they end tells whether they meant the writes that they left
//! open.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use super::process::Process;

/// Threads of one file that are remembered; more are looked up again.
const MAX_THREADS: usize = 256;

/// The process that opened a file to write, and everyone who has written to it.
pub struct FileUsers {
    /// The process that opened it, if it can be seen.
    opener: Option<u32>,
    /// The thread of the last write: looked at without a lock.
    last_writer: AtomicU32,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    /// Threads already looked up, and the process each belongs to.
    threads: HashMap<u32, u32>,
    processes: Vec<Arc<Process>>,
}

impl Seen {
    /// Notes the process of thread `tid`; returns its ID, or `None` when it cannot be seen.
    fn note(&mut self, tid: u32) -> Option<u32> {
        if let Some(&tgid) = self.threads.get(&tid) {
            return Some(tgid);
        }
        let process = Process::of_thread(tid)?;
        let tgid = process.tgid();
        if self.threads.len() >= MAX_THREADS {
            self.threads.clear();
        }
        self.threads.insert(tid, tgid);
        if !self.processes.iter().any(|known| known.tgid() == tgid) {
            self.processes.push(Arc::new(process));
        }
        Some(tgid)
    }
}

impl FileUsers {
    /// Thread `tid` of `process`, if that can be seen, has opened the file.
    pub fn new(tid: u32, process: Option<Arc<Process>>) -> FileUsers {
        let opener = process.as_ref().map(|process| process.tgid());
        let threads = opener.map(|opener| (tid, opener)).into_iter().collect();
        let seen = Seen { threads, processes: process.into_iter().collect() };
        FileUsers { opener, last_writer: AtomicU32::new(tid), seen: Mutex::new(seen) }
    }

    /// Notes who writes; nearly free when it is the one who wrote last.
    pub fn note_writer(&self, tid: u32) {
        if self.last_writer.swap(tid, Ordering::Relaxed) != tid {
            self.seen.lock().note(tid);
        }
    }

    /// Whether `tid` is of the process that opened the file.
    pub fn is_opener(&self, tid: u32) -> bool {
        self.opener == self.seen.lock().note(tid)
    }

    /// Whether a close by `tid` is the opener's own. (A caller asks first whether the opener's death closes
    /// it.)
    pub fn closes_as_opener(&self, tid: u32) -> bool {
        let mut seen = self.seen.lock();
        let (Some(opener), Some(caller)) = (self.opener, seen.note(tid)) else { return true };
        // A child that was handed the file and outlived its parent is its owner now.
        let has_ended = |process: &Arc<Process>| process.tgid() == opener && process.exited().is_some();
        caller == opener || seen.processes.iter().any(has_ended)
    }

    /// The processes.
    pub fn processes(&self) -> Vec<Arc<Process>> {
        self.seen.lock().processes.clone()
    }
}
