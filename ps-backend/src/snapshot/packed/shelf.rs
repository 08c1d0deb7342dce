//! All snapshots of a store.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::description::Description;
use super::places::Places;
use crate::snapshot::{Head, SnapshotError};
use crate::stores::{self, Existing, Objects, StoreError};

/// The folder of descriptions. Their names rise.
const DESCRIPTIONS: &str = "snapshots";
/// The folder of packs.
const PACKS: &str = "packs";

/// Which snapshots stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// The number of the newest ones that stay.
    pub newest: usize,
    /// The first one of each span of this length stays, too. If it is zero, there are no spans.
    pub every: Duration,
}

/// The snapshots of a store.
#[derive(Clone, Debug)]
pub struct Shelf {
    store: Arc<dyn Objects>,
}

impl Shelf {
    /// The snapshots at an address.
    ///
    /// # Errors
    /// [`StoreError::Url`].
    pub fn open(url: &str) -> Result<Shelf, StoreError> {
        Ok(Shelf { store: stores::open(url)? })
    }

    /// The store.
    pub fn store(&self) -> &Arc<dyn Objects> {
        &self.store
    }

    /// The names of the snapshots, the oldest first.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn names(&self) -> Result<Vec<String>, StoreError> {
        let listed = self.store.list(DESCRIPTIONS)?.into_iter();
        let name = |name: &str| Some(name.rsplit('/').next()?.strip_suffix(".json")?.to_owned());
        Ok(listed.filter_map(|object| name(&object.name)).collect())
    }

    /// The description of a snapshot.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn description(&self, name: &str) -> Result<Description, SnapshotError> {
        let object = format!("{DESCRIPTIONS}/{name}.json");
        Description::decode(&format!("{}/{object}", self.store.url()), self.store.get(&object)?)
    }

    /// The name of packs of one writer of a snapshot.
    pub fn pack_name(snapshot: u64, writer: u32) -> String {
        format!("{PACKS}/{snapshot:016x}-{writer}")
    }

    /// All parts of a snapshot are written: it counts from now on. Returns its name.
    ///
    /// # Errors
    /// [`SnapshotError`]; there is no snapshot then.
    pub fn add(
        &self,
        snapshot: u64,
        head: Head,
        taken: u64,
        places: Places,
    ) -> Result<String, SnapshotError> {
        let name = format!("v{:020}-{snapshot:016x}", head.record.version.0);
        let text = Description::new(head, taken, places)?.encode()?;
        self.store.put(&format!("{DESCRIPTIONS}/{name}.json"), &[text.as_bytes()], Existing::Kept)?;
        Ok(name)
    }

    /// Removes the snapshots that need not stay, and then the packs that no snapshot names. Nobody may write meanwhile.
    ///
    /// # Errors
    /// [`SnapshotError`]; no pack of a snapshot that stays was removed.
    pub fn collect(&self, keep: Keep) -> Result<(), SnapshotError> {
        let mut described = Vec::new();
        for name in self.names()? {
            let description = self.description(&name)?;
            described.push((name, description));
        }
        let taken: Vec<u64> = described.iter().map(|(_, description)| description.taken).collect();
        let stay = staying(&taken, keep);
        let mut named: BTreeSet<String> = BTreeSet::new();
        let mut leave = Vec::new();
        for ((name, description), stays) in described.into_iter().zip(stay) {
            if stays {
                named.extend(description.places.packs().iter().map(|pack| pack.name.clone()));
            } else {
                leave.push(name);
            }
        }
        for name in leave {
            self.store.delete(&format!("{DESCRIPTIONS}/{name}.json"))?;
        }
        for pack in self.store.list(PACKS)?.iter().filter(|pack| !named.contains(&pack.name)) {
            self.store.delete(&pack.name)?;
        }
        [DESCRIPTIONS, PACKS].into_iter().try_for_each(|folder| Ok(self.store.tidy(folder)?))
    }
}

/// Which of the snapshots that were taken at these times stay; the oldest is the first.
pub(super) fn staying(taken: &[u64], keep: Keep) -> Vec<bool> {
    let newest = taken.len().saturating_sub(keep.newest.max(1));
    let every = keep.every.as_secs();
    let mut before = None;
    let stays = |(at, taken): (usize, &u64)| {
        let slot = taken.checked_div(every);
        let is_first = slot.is_some() && slot != std::mem::replace(&mut before, slot);
        is_first || at >= newest
    };
    taken.iter().enumerate().map(stays).collect()
}
