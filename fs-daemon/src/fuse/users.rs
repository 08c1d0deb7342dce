//! The writers of an open file. The way in which they end tells whether they meant the writes that they left
//! open.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::Mutex;

use super::endings::{Closer, Owner};
use super::process::{Exit, Process, is_ending_or_kernel, is_killed_or_kernel, thread_group};

/// Threads of one file that are remembered; more are looked up again.
const MAX_THREADS: usize = 256;

/// Who holds a descriptor that a request comes through.
#[derive(Clone, Copy, Debug)]
pub struct Holder {
    /// The thread, 0 if it cannot be seen.
    pub tid: u32,
    /// The lock owner: one for each table of descriptors.
    pub lock: u64,
}

/// The process that opened a file to write, and everyone who has written to it.
pub struct FileUsers {
    /// The process that opened it, if it can be seen.
    pub opener: Option<u32>,
    /// The thread of the last write: looked at without a lock.
    last_writer: AtomicU32,
    /// A close has ended what was written: its process has no descriptor left. The kernel says later that nobody has.
    closed: AtomicBool,
    /// A process has closed it by dying.
    saw_death: AtomicBool,
    seen: Mutex<Seen>,
}

struct Seen {
    owner: Owner,
    /// Threads already looked up, and the process each belongs to.
    threads: HashMap<u32, u32>,
    /// The opener, and those who have written.
    processes: Vec<Arc<Process>>,
}

impl Seen {
    /// Notes that thread `tid` writes.
    fn note(&mut self, tid: u32) {
        if self.threads.contains_key(&tid) {
            return;
        }
        let Some(process) = Process::of_thread(tid) else { return };
        let tgid = process.tgid();
        if self.threads.len() >= MAX_THREADS {
            self.threads.clear();
        }
        self.threads.insert(tid, tgid);
        if !self.processes.iter().any(|known| known.tgid() == tgid) {
            // Those who have exited by themselves meant what they wrote: there is no more to know.
            self.keep(|known| !matches!(known.exited(), Some(Exit::Code(_))));
            self.processes.push(Arc::new(process));
        }
    }

    /// Forgets all other processes and their threads, whose numbers may become others'. Returns whether there were any.
    fn keep(&mut self, is_kept: impl Fn(&Process) -> bool) -> bool {
        let gone: Vec<Arc<Process>> = self.processes.extract_if(.., |known| !is_kept(known)).collect();
        for process in &gone {
            self.threads.retain(|_, of| *of != process.tgid());
        }
        !gone.is_empty()
    }

    /// The process of thread `tid`, if that can be seen.
    fn process_of(&self, tid: u32) -> Option<u32> {
        self.threads.get(&tid).copied().or_else(|| thread_group(tid))
    }

    /// Whether process `tgid`, which has used the file, has ended.
    fn has_ended(&self, tgid: u32) -> bool {
        let known = self.processes.iter().find(|process| process.tgid() == tgid);
        known.is_none_or(|process| process.exited().is_some())
    }
}

impl FileUsers {
    /// Thread `tid` of `process`, if that can be seen, has opened the file.
    pub fn new(tid: u32, process: Option<Arc<Process>>) -> FileUsers {
        let opener = process.as_ref().map(|process| process.tgid());
        let owner = opener.map_or(Owner::Lock(None), Owner::Process);
        let threads = opener.map(|opener| (tid, opener)).into_iter().collect();
        let seen = Seen { owner, threads, processes: process.into_iter().collect() };
        let (closed, saw_death) = (AtomicBool::new(false), AtomicBool::new(false));
        FileUsers { opener, last_writer: AtomicU32::new(tid), closed, saw_death, seen: Mutex::new(seen) }
    }

    /// Notes who writes; nearly free when it is the one who wrote last, and can be seen.
    pub fn note_writer(&self, by: Holder) {
        if by.tid == 0 {
            self.seen.lock().owner.note(by.lock);
        } else if self.last_writer.swap(by.tid, Ordering::Relaxed) != by.tid {
            self.seen.lock().note(by.tid);
        }
    }

    /// Notes who closes.
    pub fn note_closer(&self, by: Holder) {
        if self.opener.is_none() {
            self.seen.lock().owner.note(by.lock);
        }
    }

    /// Who closes. Whoever closes alone is not kept.
    pub fn closer(&self, by: Holder) -> Closer {
        if by.tid != 0 && is_killed_or_kernel(by.tid) {
            self.saw_death.store(true, Ordering::Relaxed);
            return Closer::Dying;
        }
        let seen = self.seen.lock();
        seen.owner
            .closes(seen.process_of(by.tid), by.lock, || self.opener.is_none_or(|of| seen.has_ended(of)))
    }

    /// The process whose descriptors matter at a close by the file's owner, and then the one that it has them from: the
    /// opener, or whoever has outlived it. Empty if none can be seen.
    pub fn owners(&self, by: Holder) -> Vec<u32> {
        let Some(opener) = self.opener else { return Vec::new() };
        let seen = self.seen.lock();
        let heir = seen.has_ended(opener).then(|| seen.process_of(by.tid)).flatten();
        heir.into_iter().chain([opener]).collect()
    }

    /// A close or fsync ends what was written. Writers that have ended are forgotten: how they ended matters no more.
    pub fn note_end(&self) {
        let is_kept = |known: &Process| Some(known.tgid()) == self.opener || known.exited().is_none();
        if self.seen.lock().keep(is_kept) {
            self.last_writer.store(0, Ordering::Relaxed);
        }
    }

    /// The process that opened the file has no descriptor of it left.
    pub fn note_closed(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Whether the process that opened it closes, and not because it ends: then an heir may have it.
    pub fn is_living_opener(&self, by: Holder) -> bool {
        self.opener.is_some_and(|opener| self.seen.lock().process_of(by.tid) == Some(opener))
            && !is_ending_or_kernel(by.tid)
    }

    /// Whether its process has no descriptor of it left, as far as that is known.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Whether a process has closed it by dying.
    pub fn saw_death(&self) -> bool {
        self.saw_death.load(Ordering::Relaxed)
    }

    /// The processes.
    pub fn processes(&self) -> Vec<Arc<Process>> {
        self.seen.lock().processes.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn users() -> FileUsers {
        let pid = std::process::id();
        FileUsers::new(pid, Process::of_thread(pid).map(Arc::new))
    }

    #[test]
    fn children_that_close_are_not_kept() {
        let users = users();
        for lock in 0..20 {
            let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
            assert_eq!(users.closer(Holder { tid: child.id(), lock }), Closer::Other);
            drop(child.stdin.take());
            child.wait().unwrap();
        }
        assert_eq!(users.closer(Holder { tid: std::process::id(), lock: 99 }), Closer::Owner);
        assert_eq!(users.processes().len(), 1);
    }

    #[test]
    fn children_that_wrote_are_kept_until_they_have_exited() {
        let users = users();
        for lock in 0..20 {
            let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
            users.note_writer(Holder { tid: child.id(), lock });
            drop(child.stdin.take());
            child.wait().unwrap();
        }
        assert_eq!(users.processes().len(), 2, "this process and the last one");
    }

    #[test]
    fn killed_children_are_not_kept_when_what_they_wrote_has_ended() {
        let users = users();
        for lock in 0..20 {
            let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
            users.note_writer(Holder { tid: child.id(), lock });
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(users.processes().len(), 21, "the next end may have to know");
        users.note_end();
        assert_eq!(users.processes().len(), 1);
        let seen = users.seen.lock();
        assert_eq!((seen.threads.len(), seen.processes.len()), (1, 1), "their numbers may be others' soon");
        assert_eq!(users.last_writer.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn the_opener_that_nobody_sees_is_who_writes_first() {
        let users = FileUsers::new(0, None);
        let by = |lock| Holder { tid: 0, lock };
        users.note_writer(by(1));
        users.note_closer(by(2));
        assert_eq!((users.closer(by(1)), users.closer(by(2))), (Closer::Owner, Closer::Other));
    }
}
