//! The description of a snapshot: its head, and where its pieces lie. It is written last, so packs without one are no
//! snapshot.

use serde::{Deserialize, Serialize};

use super::places::Places;
use crate::snapshot::manifest::{seal, unseal};
use crate::snapshot::{Head, SnapshotError, kinds, pieces};

/// The number of this format.
pub(super) const FORMAT: u64 = 2;

/// All of a snapshot but its packs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Description {
    format: u64,
    /// The subject.
    #[serde(flatten)]
    pub head: Head,
    /// When it was taken, in seconds since 1970.
    pub taken: u64,
    /// The number of snapshots since the last one without a base.
    #[serde(default)]
    pub after_full: u32,
    /// Where its pieces lie.
    pub places: Places,
}

impl Description {
    /// The description of a snapshot of which all parts are written.
    ///
    /// # Errors
    /// [`SnapshotError::Invalid`] names what is missing.
    pub fn new(
        head: Head,
        taken: u64,
        (places, after_full): (Places, u32),
    ) -> Result<Description, SnapshotError> {
        let description = Description { format: FORMAT, head, taken, after_full, places };
        description.check()?;
        Ok(description)
    }

    /// Every piece of the model has a place, of its length.
    fn check(&self) -> Result<(), SnapshotError> {
        let layout = self.head.layout(self.head.block_size)?;
        for piece in pieces(&layout, kinds(&self.head.record)) {
            let range = crate::partition::store::kept_range(&layout, piece.0, piece.1);
            let found = self.places.of(piece).map(|(place, _)| u64::from(place.bytes));
            if found != Some(range.end - range.start) {
                let (block, kind) = piece;
                let why = format!(
                    "it has {found:?} bytes of {kind:?} of block {block}, not {}",
                    range.end - range.start
                );
                return Err(SnapshotError::Invalid(why));
            }
        }
        Ok(())
    }

    /// The text of the object.
    ///
    /// # Errors
    /// [`SnapshotError::Invalid`].
    pub fn encode(&self) -> Result<String, SnapshotError> {
        serde_json::to_string(self).map(seal).map_err(|error| SnapshotError::Invalid(error.to_string()))
    }

    /// Reads an object of this name.
    ///
    /// # Errors
    /// [`SnapshotError::Damaged`], [`SnapshotError::Format`].
    pub fn decode(name: &str, bytes: Vec<u8>) -> Result<Description, SnapshotError> {
        let text = unseal(name.as_ref(), bytes, FORMAT)?;
        let damaged = |why: String| SnapshotError::damaged(name.as_ref(), why);
        let description: Description =
            serde_json::from_str(&text).map_err(|error| damaged(format!("it cannot be read: {error}")))?;
        description
            .head
            .controls()
            .and(description.check())
            .map_err(|error| damaged(format!("it describes no snapshot: {error}")))?;
        Ok(description)
    }
}
