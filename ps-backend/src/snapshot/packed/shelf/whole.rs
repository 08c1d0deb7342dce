//! A snapshot whose data are all in one process.

use std::time::{SystemTime, UNIX_EPOCH};

use libmodelio::vocabulary::ids::Generation;

use super::{Keep, Places, Shelf};
use crate::snapshot::packed::part::write_part;
use crate::snapshot::{Copied, Head, SnapshotError};

/// The number of the only writer.
const WRITER: u32 = 0;

impl Shelf {
    /// Writes a snapshot of this name of a model's life, which has the store, and removes the older ones that need not stay. Calls `done` with the number of bytes
    /// that are dealt with; it can return an interruption. Returns the number of bytes that were written.
    ///
    /// # Errors
    /// [`SnapshotError`]; the snapshots before are still there then.
    pub fn write_whole(
        &self,
        (snapshot, of): (u64, Generation),
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
        self.check_claim(of)?;
        self.add(snapshot, head, now(), part.places)?;
        self.collect(keep)?;
        Ok(part.written)
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
