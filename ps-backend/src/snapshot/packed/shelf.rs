//! All snapshots of a store.

mod claims;
mod whole;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use libmodelio::vocabulary::ids::{Generation, Version};
use libmodelio::vocabulary::snapshots::{Every, SnapshotSettings};
use serde::{Deserialize, Serialize};

use super::description::{Description, FORMAT};
use super::places::{Pack, Places};
use crate::snapshot::manifest::{seal, unseal};
use crate::snapshot::{Head, SnapshotError};
use crate::stores::{self, Existing, Objects, StoreError};
pub(crate) use whole::now;

/// The folder of descriptions. Their names rise.
const DESCRIPTIONS: &str = "snapshots";
/// The folder of packs.
const PACKS: &str = "packs";
/// What the mark of a snapshot that begins ends with.
const BEGUN: &str = ".begun";

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

/// The snapshot that the next one may have data in common with. Without a name it has none.
#[derive(Clone, Debug, Default)]
pub struct Base {
    /// Its name.
    pub name: String,
    /// Where its pieces lie.
    pub places: Places,
    /// The [`Description::after_full`] of the next one.
    pub after_full: u32,
}

/// The snapshots of a store.
#[derive(Clone, Debug)]
pub struct Shelf {
    store: Arc<dyn Objects>,
}

/// Digits of the number of a snapshot.
const DIGITS: usize = 16;
/// Snapshots of each claim have so many numbers.
const EACH_CLAIM: u64 = 10_000_000_000;

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

    /// The names of the snapshots, the oldest first. Files of others have none.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn names(&self) -> Result<Vec<String>, StoreError> {
        let listed = self.store.list(DESCRIPTIONS)?.into_iter();
        let name = |name: &str| Some(name.rsplit('/').next()?.strip_suffix(".json")?.to_owned());
        Ok(listed.filter_map(|object| name(&object.name)).filter(|name| is_name(name)).collect())
    }

    /// The newest snapshot that can be read, and whose packs are there. Of each `full_every` snapshots, one has no base, if
    /// that is not 0.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn base(&self, full_every: u32) -> Result<Base, StoreError> {
        let (names, there) = (self.names()?, self.packs()?);
        let read = |name: &String| {
            let Description { places, after_full, .. } = self.description(name).ok()?;
            Some(Base { name: name.clone(), places, after_full: after_full.saturating_add(1) })
        };
        let is_whole = |base: &Base| lost(&base.places, &there).is_none();
        let newest = names.iter().rev().filter_map(read).find(is_whole);
        let is_due = |base: &Base| full_every > 0 && base.after_full >= full_every;
        Ok(newest.filter(|base| !is_due(base)).unwrap_or_default())
    }

    /// The objects in the folder of packs, with their lengths.
    fn packs(&self) -> Result<BTreeSet<(String, u64)>, StoreError> {
        Ok(self.store.list(PACKS)?.into_iter().map(|of| (of.name, of.bytes)).collect())
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

    /// The number of a snapshot of this name.
    pub fn number_of(name: &str) -> Option<u64> {
        u64::from_str_radix(name.rsplit('-').next()?, 16).ok()
    }

    /// The name of packs of one writer of a snapshot.
    pub fn pack_name(snapshot: u64, writer: u32) -> String {
        format!("{PACKS}/{snapshot:016x}-{writer}")
    }

    /// Leaves a mark that a snapshot of a model's life begins here. Its writers look for it.
    ///
    /// # Errors
    /// [`StoreError`]; [`StoreError::Exists`] also if there is a snapshot of this number.
    pub fn begin(&self, snapshot: u64, generation: Generation) -> Result<(), StoreError> {
        if let Some(name) =
            self.names()?.into_iter().find(|name| name.ends_with(&format!("-{snapshot:016x}")))
        {
            return Err(StoreError::Exists(name));
        }
        // A repeated request finds what the first one has put: nobody else has this number.
        self.store.put(&begun(snapshot), &[generation.to_string().as_bytes()], Existing::Replaced)
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

    /// All parts of a snapshot are written: it counts from now on. Returns its name, which comes behind those of claims
    /// before, however late these are added.
    ///
    /// # Errors
    /// [`SnapshotError`]; there is no snapshot then.
    pub fn add(
        &self,
        (snapshot, claim): (u64, u64),
        head: Head,
        taken: u64,
        (places, after_full): (Places, u32),
    ) -> Result<String, SnapshotError> {
        // A job that goes on from an older version takes snapshots of lower ones again: the last one is the newest.
        let number = |name: &String| name.split('-').next()?.parse::<u64>().ok();
        let names = self.names()?;
        let of_claim = names.iter().filter_map(number).filter(|number| number / EACH_CLAIM == claim);
        let last = of_claim.max().unwrap_or(claim.saturating_mul(EACH_CLAIM));
        let name = format!("{:0DIGITS$}-v{}-{snapshot:016x}", last + 1, head.record.version);
        let text = Description::new(head, taken, (places, after_full))?.encode()?;
        let object = format!("{DESCRIPTIONS}/{name}.json");
        match self.store.put(&object, &[text.as_bytes()], Existing::Kept) {
            // The answer to the first of two requests was lost: nobody else has this number.
            Err(StoreError::Exists(_)) if self.store.get(&object)? == text.as_bytes() => Ok(name),
            outcome => Ok(outcome.map(|()| name)?),
        }
    }

    /// Whether all packs are there that these places name, in their whole length.
    ///
    /// # Errors
    /// [`SnapshotError::Invalid`] names one that is not.
    pub fn check_packs(&self, places: &Places) -> Result<(), SnapshotError> {
        lost(places, &self.packs()?).map_or(Ok(()), |pack| {
            Err(SnapshotError::Invalid(format!(
                "{} is not in {} any more, or not whole",
                pack.name,
                self.url()
            )))
        })
    }

    /// Removes the snapshots that need not stay, and then the packs that no snapshot names, for the life of a model that has
    /// the store ([`Self::check_claim`]). What another snapshot of it is being written into stays. Files of others are left
    /// alone.
    ///
    /// # Errors
    /// [`SnapshotError`]; no pack of a snapshot that stays was removed.
    pub fn collect(&self, keep: Keep, generation: Generation) -> Result<(), SnapshotError> {
        // In this order: a snapshot that ends meanwhile has its mark still, or its description already.
        let listed = self.store.list(PACKS)?;
        let ours: Vec<_> = listed.iter().filter_map(|of| Some((snapshot_of(&of.name)?, &of.name))).collect();
        let mut running = BTreeSet::new();
        for (snapshot, mark) in ours.iter().filter(|(_, name)| name.ends_with(BEGUN)) {
            match self.store.get(mark) {
                Ok(of) if of == generation.to_string().as_bytes() => drop(running.insert(*snapshot)),
                Ok(_) | Err(StoreError::Missing(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let (mut described, mut unread, mut damaged) = (Vec::new(), None, Vec::new());
        for name in self.names()? {
            // A mark that was left behind protects nothing.
            Shelf::number_of(&name).map(|snapshot| running.remove(&snapshot));
            match self.description(&name) {
                Ok(description) => described.push((name, description)),
                // Nobody can go on from it, so it needs nothing.
                Err(error) if error.is_damage() => damaged.push((name, described.len())),
                Err(error) => unread = Some(error),
            }
        }
        // It goes when as many newer ones are there as are kept.
        for (name, _) in damaged.iter().filter(|(_, at)| described.len() - at >= keep.newest.max(1)) {
            self.store.delete(&format!("{DESCRIPTIONS}/{name}.json"))?;
        }
        let taken: Vec<u64> = described.iter().map(|(_, description)| description.taken).collect();
        let stay = staying(&taken, keep);
        let mut named: BTreeSet<String> = BTreeSet::new();
        for ((name, description), stays) in described.into_iter().zip(stay) {
            if stays {
                named.extend(description.places.packs().iter().map(|pack| pack.name.clone()));
                continue;
            }
            // Its mark goes first, or it would count as one that is being written.
            Shelf::number_of(&name).map_or(Ok(()), |snapshot| self.store.delete(&begun(snapshot)))?;
            self.store.delete(&format!("{DESCRIPTIONS}/{name}.json"))?;
        }
        // It may name any pack.
        if let Some(error) = unread {
            return Err(error);
        }
        for (_, name) in ours.iter().filter(|(of, name)| !running.contains(of) && !named.contains(*name)) {
            self.store.delete(name)?;
        }
        [DESCRIPTIONS, PACKS].into_iter().try_for_each(|folder| Ok(self.store.tidy(folder)?))
    }

    /// Removes all that was written of a snapshot that is none.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn abandon(&self, snapshot: u64) -> Result<(), StoreError> {
        let listed = self.store.list(PACKS)?;
        let mut of_snapshot = listed.iter().filter(|of| snapshot_of(&of.name) == Some(snapshot));
        of_snapshot.try_for_each(|of| self.store.delete(&of.name))
    }
}

/// The first pack of these places that is not among those that are there.
fn lost<'a>(places: &'a Places, there: &BTreeSet<(String, u64)>) -> Option<&'a Pack> {
    places.packs().iter().find(|pack| !there.contains(&(pack.name.clone(), pack.bytes)))
}

/// The number of the claim under which a snapshot of this name was written.
fn claim_of(name: &str) -> Option<u64> {
    Some(name.split('-').next()?.parse::<u64>().ok()? / EACH_CLAIM)
}

/// Whether this is the name of a snapshot.
fn is_name(name: &str) -> bool {
    let parts: Vec<&str> = name.split('-').collect();
    let [number, _, id] = parts[..] else { return false };
    let is_number = number.len() == DIGITS && number.bytes().all(|byte| byte.is_ascii_digit());
    is_number && Shelf::version_of(name).is_some() && id.len() == 16 && u64::from_str_radix(id, 16).is_ok()
}

/// The snapshot that an object in the folder of packs belongs to. None for files of others.
fn snapshot_of(name: &str) -> Option<u64> {
    let name = name.strip_prefix(PACKS)?.strip_prefix('/')?;
    let (id, rest) = name.split_at_checked(16)?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_ours = rest == BEGUN
        || rest.strip_prefix('-').is_some_and(|rest| match rest.strip_suffix(".json") {
            Some(writer) => is_number(writer),
            None => rest.split_once('-').is_some_and(|(writer, at)| is_number(writer) && is_number(at)),
        });
    let id = u64::from_str_radix(id, 16).ok().filter(|of| format!("{of:016x}") == id);
    id.filter(|_| is_ours)
}

/// The mark of a snapshot that begins.
fn begun(snapshot: u64) -> String {
    format!("{PACKS}/{snapshot:016x}{BEGUN}")
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
