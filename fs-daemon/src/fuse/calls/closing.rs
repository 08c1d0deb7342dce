//! fsync(2), close(2), and the contributions that a program has left open when it ends.

use std::sync::Arc;
use std::time::Instant;

use super::{Calls, Chore};
use crate::fs::OpenFile;
use crate::fuse::endings::{AtClose, Closer, at_close};
use crate::fuse::open_files::ProgramFile;
use crate::fuse::pending_exits::{OfLearner, Settling};
use crate::fuse::users::{FileUsers, Holder};
use crate::session::contribution::Ending;
use crate::session::error::{CallResult, Done};

impl Calls {
    /// fsync(2): ends the contribution, whoever calls.
    pub fn fsync(&self, fh: u64, tid: u32, done: Done<()>) {
        match self.files.get(fh) {
            Ok(open) => {
                open.users.iter().for_each(FileUsers::note_end);
                self.end_when_settled(fh, open, Ending::Step, tid, done);
            }
            Err(error) => done(Err(error)),
        }
    }

    /// close(2) of one descriptor: [`at_close`] decides. What a program leaves to its exit is settled when the last
    /// descriptor is gone.
    pub fn flush(&self, fh: u64, by: Holder, done: Done<()>) {
        let open = match self.files.get(fh) {
            Ok(open) => open,
            Err(error) => return done(Err(error)),
        };
        let Some(users) = &open.users else { return self.flush_renamed(&open, by.tid, done) };
        users.note_closer(by);
        // Where descriptors cannot be seen, a file that was truncated alone may still be written: a shell's `>` closes
        // it first. The close of another process says nothing then.
        let seen = || self.files.has_duplicate(fh, open.ino, &users.owners(by));
        let has_duplicate =
            |closer| seen().unwrap_or_else(|| closer == Closer::Other || !open.file.is_written());
        let is_pending = open.file.is_pending();
        match at_close(is_pending, || users.closer(by), has_duplicate) {
            AtClose::Nothing => {
                // A child may still have the file. The opener has not, so it must not count as one of the opener's.
                let is_contribution = matches!(open.file, OpenFile::Contribution { .. });
                if is_contribution && !is_pending && users.is_living_opener(by) && seen() == Some(false) {
                    users.note_closed();
                }
                done(Ok(()));
            }
            AtClose::Ends => {
                users.note_end();
                users.note_closed();
                self.end_when_settled(fh, Arc::clone(&open), Ending::Close, by.tid, done);
            }
            AtClose::Waits => {
                if let Some(learner) = learner_of(&open.file) {
                    self.pending_exits.begin(learner, fh, Instant::now());
                }
                done(Ok(()));
            }
        }
    }

    /// Ends the contribution of a file, once the fate of a program that shared it and is ending just now is
    /// settled.
    fn end_when_settled(&self, fh: u64, open: Arc<ProgramFile>, ending: Ending, tid: u32, done: Done<()>) {
        let done = self.guard_end(&open.file, tid, done);
        let OpenFile::Contribution { tree, contribution } = &open.file else {
            return open.file.end(ending, done);
        };
        let tree = Arc::clone(tree);
        let learner = (tree.index, contribution.learner().id);
        let deadline = Instant::now() + tree.model.timeout();
        let refusal = Arc::clone(&contribution.learner().refusal);
        let then = move |outcome: CallResult<()>| match outcome {
            Ok(()) => open.file.end(ending, tree.model.done_with_version(learner.1, done)),
            Err(error) => {
                refusal.note(&error, true);
                done(Err(error));
            }
        };
        if let Some(then) = self.pending_exits.wait(learner, Some(fh), deadline, Box::new(then)) {
            then(Ok(()));
        }
    }

    /// The last descriptor of an open file is gone.
    pub fn release(&self, fh: u64) {
        let Some(open) = self.files.remove(fh) else { return };
        self.pollers.lock().remove(&fh);
        match &open.file {
            OpenFile::Contribution { contribution, .. } => contribution.closed(),
            OpenFile::Temporary { tree, file } => tree.temporaries.closed(file),
            _ => {}
        }
        if open.users.is_some() {
            let is_unfinished = open.file.is_unfinished();
            if let Some(learner) = learner_of(&open.file).filter(|_| is_unfinished) {
                self.pending_exits.begin(learner, fh, Instant::now());
            }
            let settling = Settling::new(&self.pending_exits, fh);
            if is_unfinished {
                // Finding out how the program ended may take a moment.
                let _ = self.chores.send(Chore::Settle(open, settling));
            }
        }
    }
}

/// The learner that contributes through a file.
fn learner_of(file: &OpenFile) -> Option<OfLearner> {
    match file {
        OpenFile::Contribution { tree, contribution } => Some((tree.index, contribution.learner().id)),
        _ => None,
    }
}
