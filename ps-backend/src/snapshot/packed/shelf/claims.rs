//! Whose snapshots a store has. Each claim is an object that only one writer can make, and the last one counts: a job that
//! goes on from a snapshot takes the store over, and the job before is refused from then on.

use libmodelio::vocabulary::ids::Generation;
use libmodelio::wire::Lineage;
use serde::{Deserialize, Serialize};

use super::{DESCRIPTIONS, FORMAT, PACKS, Shelf, claim_of, snapshot_of};
use crate::snapshot::SnapshotError;
use crate::snapshot::manifest::{seal, unseal};
use crate::stores::{Existing, StoreError};

/// The folder of claims. Their names rise.
const CLAIMS: &str = "claims";
/// How often a claim is tried while others claim the store, too.
const TRIES: usize = 10;

/// A claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Claim {
    format: u64,
    /// The model's name.
    model: String,
    /// Its life.
    generation: Generation,
    /// The first of the lives that it goes on from, and how often it was restored since.
    first: Generation,
    restored: u32,
}

impl Shelf {
    /// The numbers of all claims and their objects, the last one at the end.
    fn claims(&self) -> Result<Vec<(u64, String)>, StoreError> {
        let number = |name: &str| name.rsplit('/').next()?.strip_suffix(".json")?.parse::<u64>().ok();
        let listed = self.store().list(CLAIMS)?.into_iter();
        let mut claims: Vec<_> = listed.filter_map(|of| Some((number(&of.name)?, of.name))).collect();
        claims.sort();
        Ok(claims)
    }

    /// The number of the last claim, and what it says.
    fn last_claim(&self) -> Result<Option<(u64, Claim)>, SnapshotError> {
        let Some((number, name)) = self.claims()?.pop() else { return Ok(None) };
        let text = unseal(name.as_ref(), self.store().get(&name)?, FORMAT)?;
        let claim = serde_json::from_str(&text);
        let damaged = |error: serde_json::Error| SnapshotError::damaged(name.as_ref(), error.to_string());
        Ok(Some((number, claim.map_err(damaged)?)))
    }

    /// Whether the store still is that of this life. Returns the number of its claim.
    ///
    /// # Errors
    /// [`SnapshotError::Claimed`] if it is not.
    pub fn check_claim(&self, generation: Generation) -> Result<u64, SnapshotError> {
        match self.last_claim()? {
            Some((_, claim)) if claim.generation != generation => Err(self.claimed(claim)),
            last => Ok(last.map_or(0, |(number, _)| number)),
        }
    }

    /// The number of this life's claim, which it has made before.
    ///
    /// # Errors
    /// [`SnapshotError::Claimed`]; [`SnapshotError::Nothing`] if all snapshots were removed since ([`Self::clear`]).
    pub fn own_claim(&self, generation: Generation) -> Result<u64, SnapshotError> {
        let cleared = || SnapshotError::Nothing(format!("the snapshots of {} were removed", self.url()));
        Some(self.check_claim(generation)?).filter(|number| *number > 0).ok_or_else(cleared)
    }

    fn claimed(&self, Claim { model, generation, .. }: Claim) -> SnapshotError {
        SnapshotError::Claimed { store: self.url().to_owned(), model, generation }
    }

    /// Has the store for the snapshots of a model's life. If somebody has claimed it before, it is taken over or refused. Only
    /// a life of a model of the same name takes it over, and nobody does from a later life of the same lineage. Whoever may
    /// take the store over does so as well where the last claim is damaged.
    ///
    /// # Errors
    /// [`SnapshotError::Claimed`] names whose it is. [`SnapshotError::Nothing`] for a store that lets two make one object.
    pub fn claim(
        &self,
        (model, generation, lineage): (&str, Generation, &Lineage),
        takes_over: bool,
    ) -> Result<(), SnapshotError> {
        let Lineage { first, restored, .. } = *lineage;
        for _ in 0..TRIES {
            let number = match self.last_claim() {
                Ok(Some((_, claim))) if claim.generation == generation => return Ok(()),
                Ok(Some((_, claim)))
                    if !takes_over
                        || claim.model != model
                        || claim.first == first && claim.restored >= restored =>
                {
                    return Err(self.claimed(claim));
                }
                Ok(Some((number, _))) => number + 1,
                Err(error) if takes_over && error.is_damage() => {
                    self.claims()?.last().map_or(1, |(number, _)| number + 1)
                }
                Err(error) => return Err(error),
                // Snapshots that are there, as whoever removed their claims left them, are older ones.
                Ok(None) => self.names()?.last().and_then(|name| claim_of(name)).unwrap_or(0) + 1,
            };
            let claim = Claim { format: FORMAT, model: model.to_owned(), generation, first, restored };
            let text = serde_json::to_string(&claim).map(seal);
            let text = text.map_err(|error| SnapshotError::Invalid(error.to_string()))?;
            let name = format!("{CLAIMS}/{number:010}.json");
            let put = || self.store().put(&name, &[text.as_bytes()], Existing::Kept);
            match put() {
                // Somebody else was first.
                Err(StoreError::Exists(_)) => continue,
                outcome => outcome?,
            }
            return match put() {
                Err(StoreError::Exists(_)) => Ok(()),
                Err(error) => Err(error.into()),
                Ok(()) => {
                    self.store().delete(&name)?;
                    Err(SnapshotError::Nothing(format!(
                        "{} lets two writers make one object (it ignores if-none-match), and so may lose snapshots",
                        self.url()
                    )))
                }
            };
        }
        Err(SnapshotError::Nothing(format!("{} is being claimed by others, again and again", self.url())))
    }

    /// Removes all snapshots of a model's life that is over and has the store, and then its claims. Files of others are left
    /// alone. Returns how many there were.
    ///
    /// # Errors
    /// [`SnapshotError::Claimed`] if another one has the store; nothing is removed then.
    pub fn clear(&self, generation: Generation) -> Result<usize, SnapshotError> {
        let last = self.check_claim(generation)?;
        if last == 0 {
            return Ok(0);
        }
        let names = self.names()?;
        names.iter().try_for_each(|name| self.store().delete(&format!("{DESCRIPTIONS}/{name}.json")))?;
        let packs = self.store().list(PACKS)?;
        let mut ours = packs.iter().filter(|of| snapshot_of(&of.name).is_some());
        ours.try_for_each(|of| self.store().delete(&of.name))?;
        [DESCRIPTIONS, PACKS].into_iter().try_for_each(|folder| self.store().tidy(folder))?;
        // The last one at the end. Whoever has claimed the store meanwhile keeps it.
        let claims = self.claims()?;
        let mut ours = claims.iter().filter(|(number, _)| *number <= last);
        ours.try_for_each(|(_, name)| self.store().delete(name))?;
        Ok(names.len())
    }
}
