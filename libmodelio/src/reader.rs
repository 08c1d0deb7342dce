//! Reading versions: a version is held open, so that its bytes do not change.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::bytes::loan::Loan;
use crate::bytes::region::Region;
use crate::client::{Job, VersionView};
use crate::transport::stream::{Guard, LentPayload};
use crate::vocabulary::ids::Version;

/// A pinned version. The pin is given back when the reader is dropped.
pub struct Reader {
    job: Arc<Job>,
    version: Version,
    view: VersionView,
}

impl Reader {
    /// Opens `version`; `None` when it is gone.
    pub fn open(job: &Arc<Job>, version: Version) -> Option<Reader> {
        if !job.open_version(version) {
            return None;
        }
        let Some(view) = job.get(version) else {
            job.close_version(version);
            return None;
        };
        Some(Reader { job: Arc::clone(job), version, view })
    }

    /// Opens the newest version.
    pub fn newest(job: &Arc<Job>) -> Option<Reader> {
        Reader::open(job, job.version())
    }

    /// Shows a learner's replica of the model in place of the version's own weights. The replica's memory stays
    /// unchanged for as long as the version is pinned.
    #[must_use]
    pub fn showing(mut self, replica: Region) -> Reader {
        self.view.region = replica;
        self
    }

    /// A range of its bytes.
    ///
    /// # Panics
    /// When `range` leaves the model.
    pub fn bytes(&self, range: Range<u64>) -> &[u8] {
        self.view.bytes(range)
    }

    /// A range of its bytes, to be sent from where they lie. The version is pinned until they are.
    ///
    /// # Panics
    /// When `range` leaves the model.
    pub fn piece(self: &Arc<Self>, range: Range<u64>) -> LentPayload {
        self.view.piece(range, Arc::clone(self) as Guard)
    }

    /// The same version once more.
    pub fn again(&self) -> Option<Reader> {
        let mut again = Reader::open(&self.job, self.version)?;
        again.view = self.view.clone();
        Some(again)
    }

    /// Lends the version's memory to a program outside. The loan is to be given back before the reader is dropped; else
    /// the memory is never used again.
    ///
    /// # Errors
    /// As [`Loan::of`].
    pub fn lend(&self) -> io::Result<(Loan, OwnedFd)> {
        Loan::of(self.region().memory())
    }

    /// The version's number.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The memory that holds them.
    pub fn region(&self) -> &Region {
        &self.view.region
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.job.close_version(self.version);
    }
}
