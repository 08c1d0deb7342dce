//! open(2): it waits for the version that it must show, and for the outcome of programs that are ending just now.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Instant;

use libmodelio::client::LastCommit;
use libmodelio::vocabulary::ids::LearnerId;

use super::Calls;
use crate::fs::OpenFile;
use crate::fs::TENSORS_LINK;
use crate::fs::stale;
use crate::fs::{OpenRequest, Way};
use crate::fuse::open_files::ProgramFile;
use crate::fuse::users::FileUsers;
use crate::own_thread::on_own_thread;
use crate::session::error::{CallError, CallResult, Done};
use crate::session::learner::Learner;
use crate::session::times::Waits;

/// An opened file, and how the kernel should treat it.
#[derive(Clone, Debug)]
pub struct Opened {
    /// Its number.
    pub fh: u64,
    /// The way of its bytes.
    pub way: Way,
}

impl Calls {
    /// Opens an inode with open(2)'s `flags`, for thread `tid`. Waits, through `done`, for the version that it must
    /// show, the one with the learner's last step for example, at most `control/timeout`.
    pub fn open(self: &Arc<Self>, ino: u64, flags: i32, tid: u32, done: Done<Opened>) {
        let mut request = match self.fs.open_request(ino, flags) {
            Ok(request) => request,
            Err(error) => return done(Err(error)),
        };
        self.memory_lookups.arrived(tid);
        if let Some(other) = request.other_inode() {
            // A thread that cannot be seen cannot be led to the memory: msync ships for it all the same.
            let is_led = request.maps_memory && self.memory_lookups.lead(tid, ino, other);
            if is_led || !request.maps_memory {
                let what = "mapped with O_DIRECT and without are two inodes: open gradients by its path";
                return done(Err(CallError::new(libc::ESTALE, what)));
            }
        }
        request.is_own = request.own_learner().is_some_and(|own| self.watches.is_user(&own, tid));
        let Some((tree, file)) = request.file() else { return done(self.open_now(&request, tid)) };
        if let Some(learner) = request.attends() {
            self.watches.attended(&tree.model, &learner, tid);
        }
        let (tree, named) = (Arc::clone(tree), file.version());
        let done = request.done_when_shown(done);
        let is_second_lookup = |learner: &Option<LearnerId>| {
            let is_expected = |version| self.second_lookups.is_expected(tid, tree.index, *learner, version);
            named.is_some_and(is_expected)
        };
        let Some(learner) = request.shows_newest_to().filter(|learner| !is_second_lookup(learner)) else {
            return self.open_when_settled(request, tid, done);
        };
        match (tree.model.job.freshness(learner), named) {
            (LastCommit::In(version), Some(named)) if named < version => {
                // The version with its step came out between the lookup of the name and this.
                let newest = tree.model.job.version();
                self.second_lookups.expect(tid, tree.index, learner, named, newest);
                done(Err(stale()));
            }
            (LastCommit::In(_), _) => self.open_when_settled(request, tid, done),
            (LastCommit::Waits, _) if request.is_nonblocking => {
                done(Err(CallError::new(
                    libc::EAGAIN,
                    "the version that this open must show is not here yet",
                )));
            }
            (LastCommit::Waits, _) => {
                let waits = learner.and_then(|learner| tree.model.learner(learner).ok());
                let done = match waits {
                    Some(learner) => learner.times.until(Waits::Open, done),
                    None => done,
                };
                let (this, done) = (Arc::clone(self), self.guard_open(tid, done));
                let model = Arc::clone(&tree.model);
                let answer = move |outcome| match (outcome, named) {
                    (Ok(newest), Some(named)) => {
                        this.second_lookups.expect(tid, tree.index, learner, named, newest);
                        done(Err(stale()));
                    }
                    (Ok(_), None) => this.open_when_settled(request, tid, done),
                    (Err(error), _) => done(Err(error)),
                };
                model.await_fresh(learner, Box::new(answer));
            }
        }
    }

    /// Opens a file, but not to write into a contribution of which it is not yet known whether it counts: its
    /// program is ending just now.
    fn open_when_settled(self: &Arc<Self>, request: OpenRequest, tid: u32, done: Done<Opened>) {
        let learner = request.file().zip(request.contributes_as());
        let pending = learner.map(|((tree, _), learner)| (Arc::clone(tree), (tree.index, learner.id)));
        let Some((tree, learner)) = pending.filter(|(_, learner)| self.pending_exits.is_any(*learner)) else {
            return self.open_soon(request, tid, done);
        };
        if request.is_nonblocking {
            let what = "a program that has ended is still being settled";
            return done(Err(CallError::new(libc::EAGAIN, what)));
        }
        let deadline = Instant::now() + tree.model.timeout();
        let (this, done) = (Arc::clone(self), self.guard_open(tid, done));
        let open = move |outcome| match outcome {
            Ok(()) => this.open_soon(request, tid, done),
            Err(error) => done(Err(error)),
        };
        if let Some(open) = self.pending_exits.wait(learner, None, deadline, Box::new(open)) {
            open(Ok(()));
        }
    }

    /// Opens a file; where that takes long, on a thread of its own.
    fn open_soon(self: &Arc<Self>, mut request: OpenRequest, tid: u32, done: Done<Opened>) {
        request.may_wait = request.takes_long();
        if !request.may_wait {
            return done(self.open_now(&request, tid));
        }
        let this = Arc::clone(self);
        on_own_thread("gradfs-open", move || done(this.open_now(&request, tid)));
    }

    fn open_now(&self, request: &OpenRequest, tid: u32) -> CallResult<Opened> {
        refuse_reader(request, tid)?;
        request.prepare()?;
        let _opening = request.contributes().then(|| self.watches.opening());
        let (file, way) = self.fs.open(request)?;
        let process = file.is_writable().then(|| self.watches.process_of(tid)).flatten();
        let users = file.is_writable().then(|| FileUsers::new(tid, process.clone()));
        let open = Arc::new(ProgramFile { file, ino: request.ino(), opener: tid, users });
        let contribution = match &open.file {
            OpenFile::Contribution { tree, contribution } => Some((tree, contribution)),
            _ => None,
        };
        let Some(fh) = self.files.insert(Arc::clone(&open)) else {
            contribution.inspect(|(_, contribution)| contribution.closed());
            return Err(CallError::new(libc::ENFILE, "too many open files in this mount"));
        };
        if let (Some((tree, _)), Some(learner)) = (request.file(), request.shows_newest_to()) {
            let of = learner.and_then(|learner| tree.model.learner(learner).ok());
            if let Some(version) = open.file.shown_version() {
                tree.model.opened(version, of.as_deref());
            }
            tree.model.job.version_opened(learner);
        }
        if let Some((tree, contribution)) = contribution {
            self.watches.opened(&tree.model, contribution.learner(), tid, process.as_ref());
        }
        Ok(Opened { fh, way })
    }

    /// Where a learner's `tensors` lead, for thread `tid`. That waits, as an open of the learner's `weights` does, for the
    /// version with its last step. Who looks at a program's learner from outside waits for nothing.
    pub fn read_link(self: &Arc<Self>, ino: u64, tid: u32, done: Done<&'static str>) {
        let (tree, learner) = match self.fs.link_of(ino) {
            Ok(found) => found,
            Err(error) => return done(Err(error)),
        };
        let is_outside = !self.watches.is_user(&learner, tid) && self.watches.has_users(&learner);
        let is_in = matches!(tree.model.job.freshness(Some(learner.id)), LastCommit::In(_));
        if is_outside || is_in {
            return tree.done_when_shown(done)(Ok(TENSORS_LINK));
        }
        let done = self.waits.guard(tid, learner.times.until(Waits::Open, done), None, |_| {});
        let answer = tree.done_when_shown(done);
        tree.model.await_fresh(Some(learner.id), Box::new(move |fresh| answer(fresh.map(|_| TENSORS_LINK))));
    }

    fn guard_open(self: &Arc<Self>, tid: u32, done: Done<Opened>) -> Done<Opened> {
        let this = Arc::clone(self);
        self.waits.guard(tid, done, None, move |opened: Opened| this.release(opened.fh))
    }
}

/// Refuses the open of a version if programs hold as many others as they may. Users read their own learners' files at
/// any time: whoever only reads stops no training.
fn refuse_reader(request: &OpenRequest, tid: u32) -> CallResult<()> {
    let Some(((tree, _), version)) = request.file().zip(request.holds()) else { return Ok(()) };
    let refused = tree.model.refuse_reader(version);
    if refused.is_ok() {
        return refused;
    }
    let learner = request.shows_newest_to().flatten().and_then(|id| tree.model.learner(id).ok());
    // Where the thread is not seen, it gets what its learner gets.
    let user = std::fs::metadata(format!("/proc/{tid}")).map_or(0, |thread| thread.uid());
    let is_its = |learner: &Learner| learner.owner.is_none_or(|(owner, _)| owner == user || user == 0);
    if learner.as_deref().is_some_and(is_its) { Ok(()) } else { refused }
}
