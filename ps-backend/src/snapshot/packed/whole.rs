//! A snapshot whose data are all in one process.

use std::time::{SystemTime, UNIX_EPOCH};

use super::part::write_part;
use super::places::Places;
use super::shelf::{Keep, Shelf};
use crate::snapshot::{Copied, Head, SnapshotError};

/// The number of the only writer.
const WRITER: u32 = 0;

impl Shelf {
    /// Writes a snapshot of this name, and removes the older ones that need not stay. Calls `done` with the number of bytes
    /// that are dealt with; it can return an interruption. Returns the number of bytes that were written.
    ///
    /// # Errors
    /// [`SnapshotError`]; the snapshots before are still there then.
    pub fn write_whole(
        &self,
        snapshot: u64,
        (head, copied): (Head, &Copied),
        keep: Keep,
        done: &(dyn Fn(u64) -> Result<(), SnapshotError> + Sync),
    ) -> Result<u64, SnapshotError> {
        let before = match self.names()?.pop() {
            Some(name) => self.description(&name)?.places,
            None => Places::default(),
        };
        let name = Shelf::pack_name(snapshot, WRITER);
        let part = write_part(&**self.store(), &name, &before, copied.pieces(), done)?;
        self.add(snapshot, head, now(), part.places)?;
        self.collect(keep)?;
        Ok(part.written)
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
