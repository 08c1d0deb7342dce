//! Files that programs have open, by the number the kernel knows them by.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use super::users::FileUsers;
use crate::fs::open_file::OpenFile;
use crate::session::error::{CallError, CallResult};

/// A file that programs have open.
pub struct ProgramFile {
    /// The file's function.
    pub file: OpenFile,
    /// The thread that opened it.
    pub opener: u32,
    /// The file's writers, if contributions or weights are written.
    pub users: Option<FileUsers>,
}

/// All open files.
#[derive(Default)]
pub struct OpenFiles {
    next: AtomicU64,
    open: RwLock<HashMap<u64, Arc<ProgramFile>>>,
}

/// Most files open at once.
const MAX_OPEN: usize = 1 << 20;

impl OpenFiles {
    /// Takes a file in; `None` when there are too many.
    pub fn insert(&self, file: Arc<ProgramFile>) -> Option<u64> {
        let mut open = self.open.write();
        if open.len() >= MAX_OPEN {
            return None;
        }
        let fh = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        open.insert(fh, file);
        Some(fh)
    }

    /// The file with this number.
    ///
    /// # Errors
    /// EBADF.
    pub fn get(&self, fh: u64) -> CallResult<Arc<ProgramFile>> {
        let file = self.open.read().get(&fh).cloned();
        file.ok_or_else(|| CallError::new(libc::EBADF, format!("no open file {fh}")))
    }

    /// Closes it.
    pub fn remove(&self, fh: u64) -> Option<Arc<ProgramFile>> {
        self.open.write().remove(&fh)
    }

    /// Files open now.
    pub fn len(&self) -> usize {
        self.open.read().len()
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<ProgramFile>> {
        self.open.read().values().cloned().collect()
    }
}
