//! creat(2) and rename(2) of the files that libraries write as a whole.

use std::ffi::OsStr;
use std::sync::Arc;

use super::Calls;
use crate::fs::Way;
use crate::fs::{Attributes, OpenFile, Owner};
use crate::fuse::calls::Opened;
use crate::fuse::open_files::ProgramFile;
use crate::session::error::{CallError, CallResult, Done};

impl Calls {
    /// Makes and opens a file that is to be renamed, for thread `tid`. It is gone with that thread's process.
    ///
    /// # Errors
    /// As [`Fs::make_file`](crate::fs::Fs::make_file) has them, and ENFILE.
    pub fn create(
        &self,
        parent: u64,
        name: &OsStr,
        owner: Owner,
        tid: u32,
    ) -> CallResult<(Attributes, Opened)> {
        let process = self.watches.process_of(tid);
        let maker = process.map(|process| Box::new(move || process.exited().is_none()) as _);
        let (ino, file) = self.fs.make_file(parent, name, owner, maker)?;
        let attributes = self.fs.attributes(ino)?;
        let open = Arc::new(ProgramFile { file, ino, opener: tid, users: None });
        match self.files.insert(open) {
            Some(fh) => Ok((attributes, Opened { fh, way: Way::Direct })),
            None => {
                self.fs.remove_file(parent, name)?;
                Err(CallError::new(libc::ENFILE, "too many open files in this mount"))
            }
        }
    }

    /// Renames such a file, which commits what it has: it waits for no learner.
    pub fn rename(self: &Arc<Self>, from: (u64, &OsStr), to: (u64, &OsStr), tid: u32, done: Done<()>) {
        let this = Arc::clone(self);
        match self.fs.check_rename(from, to) {
            Ok(renaming) => renaming.run(
                move |tree, learner| {
                    let _opening = this.watches.opening();
                    let process = this.watches.process_of(tid);
                    this.watches.opened(&tree.model, learner, tid, process.as_ref());
                },
                done,
            ),
            Err(error) => done(Err(error)),
        }
    }

    /// close(2) of one descriptor of such a file.
    pub(super) fn flush_renamed(&self, open: &ProgramFile, tid: u32, done: Done<()>) {
        match &open.file {
            OpenFile::Temporary { tree, file } => {
                file.closed(self.waits.guard(tid, tree.done_when_shown(done), None, |()| {}));
            }
            _ => done(Ok(())),
        }
    }
}
