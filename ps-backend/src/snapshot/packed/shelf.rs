//! All snapshots of a store.

mod claims;
mod whole;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::snapshots::{Every, SnapshotSettings};
use serde::{Deserialize, Serialize};

use super::description::{Description, FORMAT};
use super::places::Places;
use crate::snapshot::manifest::{seal, unseal};
use crate::snapshot::{Head, SnapshotError};
use crate::stores::{self, Existing, Objects, StoreError};
pub(crate) use whole::now;

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

impl Keep {
    /// What the settings of a job say.
    pub fn of(settings: &SnapshotSettings) -> Keep {
        let every = match settings.keep_every {
            Every::Time(time) => time,
            Every::Never | Every::Versions(_) => Duration::ZERO,
        };
        Keep { newest: settings.keep as usize, every }
    }
}

/// The places of one writer's part.
#[derive(Serialize, Deserialize)]
struct PartFile {
    format: u64,
    places: Places,
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

    /// The snapshots of a store.
    pub fn of(store: Arc<dyn Objects>) -> Shelf {
        Shelf { store }
    }

    /// The store.
    pub fn store(&self) -> &Arc<dyn Objects> {
        &self.store
    }

    /// The address of the store.
    pub fn url(&self) -> &str {
        self.store.url()
    }

    /// Whether a local directory has snapshots of this kind.
    pub fn is_in(dir: &Path) -> bool {
        dir.join(DESCRIPTIONS).is_dir()
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

    /// The version of a snapshot of this name.
    pub fn version_of(name: &str) -> Option<Version> {
        name.split('-').nth(1)?.strip_prefix('v')?.parse().ok().map(Version)
    }

    /// The name of packs of one writer of a snapshot.
    pub fn pack_name(snapshot: u64, writer: u32) -> String {
        format!("{PACKS}/{snapshot:016x}-{writer}")
    }

    /// Leaves a mark that a snapshot begins here. Its writers look for it.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn begin(&self, snapshot: u64) -> Result<(), StoreError> {
        self.store.put(&begun(snapshot), &[b"begun"], Existing::Kept)
    }

    /// Whether a snapshot has begun in this very store.
    ///
    /// # Errors
    /// [`StoreError`]; [`StoreError::Missing`] if it has not.
    pub fn check_begun(&self, snapshot: u64) -> Result<(), StoreError> {
        self.store.get(&begun(snapshot)).map(drop)
    }

    /// Leaves the places of one writer's part of a snapshot.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn add_part(&self, snapshot: u64, writer: u32, places: &Places) -> Result<(), SnapshotError> {
        let part = PartFile { format: FORMAT, places: places.clone() };
        let text = serde_json::to_string(&part).map(seal);
        let text = text.map_err(|error| SnapshotError::Invalid(error.to_string()))?;
        Ok(self.store.put(&part_name(snapshot, writer), &[text.as_bytes()], Existing::Replaced)?)
    }

    /// The places of all parts, which these writers have left.
    ///
    /// # Errors
    /// [`SnapshotError`]; [`SnapshotError::Invalid`] if two have a piece.
    pub fn parts(&self, snapshot: u64, writers: impl Iterator<Item = u32>) -> Result<Places, SnapshotError> {
        let mut places = Places::default();
        for writer in writers {
            let name = part_name(snapshot, writer);
            let text = unseal(name.as_ref(), self.store.get(&name)?, FORMAT)?;
            let damaged = |error: serde_json::Error| SnapshotError::damaged(name.as_ref(), error.to_string());
            let part: PartFile = serde_json::from_str(&text).map_err(damaged)?;
            if !places.add_all(&part.places) {
                return Err(SnapshotError::Invalid(format!("{name} has pieces that another part has")));
            }
        }
        Ok(places)
    }

    /// Removes what [`Self::begin`] and [`Self::add_part`] have left.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn end(&self, snapshot: u64, mut writers: impl Iterator<Item = u32>) -> Result<(), StoreError> {
        writers.try_for_each(|writer| self.store.delete(&part_name(snapshot, writer)))?;
        self.store.delete(&begun(snapshot))
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
        // A job that goes on from an older version takes snapshots of lower ones again: the last one is the newest.
        let number = |name: &String| name.split('-').next()?.parse::<u64>().ok();
        let last = self.names()?.last().and_then(number).unwrap_or(0);
        let name = format!("{:010}-v{}-{snapshot:016x}", last + 1, head.record.version);
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

/// The mark of a snapshot that begins.
fn begun(snapshot: u64) -> String {
    format!("{PACKS}/{snapshot:016x}.begun")
}

/// The object with the places of a part.
fn part_name(snapshot: u64, writer: u32) -> String {
    format!("{}.json", Shelf::pack_name(snapshot, writer))
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
