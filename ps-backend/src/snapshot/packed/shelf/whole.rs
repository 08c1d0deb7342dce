//! A snapshot whose data are all in one process.

use std::time::{SystemTime, UNIX_EPOCH};

use libmodelio::vocabulary::ids::Generation;

use super::Shelf;
use crate::snapshot::packed::part::{Pace, Stepping, write_part};
use crate::snapshot::{Copied, Head, SnapshotError};

/// The number of the only writer.
const WRITER: u32 = 0;

impl Shelf {
    /// Writes a snapshot of this number of a model's life, which has the store. Returns the number of bytes that were written.
    ///
    /// # Errors
    /// [`SnapshotError`]; nothing is left of it then.
    pub fn write_whole(
        &self,
        (snapshot, generation): (u64, Generation),
        (head, copied): (Head, &Copied),
        is_stepping: Stepping<'_>,
    ) -> Result<u64, SnapshotError> {
        let written = self.write_alone((snapshot, generation), (head, copied), is_stepping);
        match &written {
            Ok(_) => self.end(snapshot, [].into_iter())?,
            Err(_) => drop(self.abandon(snapshot)),
        }
        written
    }

    fn write_alone(
        &self,
        (snapshot, generation): (u64, Generation),
        (head, copied): (Head, &Copied),
        is_stepping: Stepping<'_>,
    ) -> Result<u64, SnapshotError> {
        self.begin(snapshot, generation)?;
        let base = self.base(head.controls()?.snapshots.full_every)?;
        let name = Shelf::pack_name(snapshot, WRITER);
        let pace = (&Pace::default(), is_stepping);
        let part = write_part(&**self.store(), &name, &base.places, pace, copied.pieces(), &|_| Ok(()))?;
        self.check_packs(&part.places)?;
        let claim = self.own_claim(generation)?;
        self.add((snapshot, claim), head, now(), (part.places, base.after_full))?;
        Ok(part.written)
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
