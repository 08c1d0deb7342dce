//! Weights that mounts offer for a model that is restored: the newest ones are taken, and the mount that has them is asked
//! to bring them. Pure: what mounts say and `now` go in, and what to tell them comes out.
//!
//! Mounts look for themselves whether a model is being restored, so their offers come one by one. The first one is waited
//! for, and then a little longer, for a newer one.

use std::collections::BTreeMap;
use std::time::Duration;

use libmodelio::vocabulary::ids::{ClientId, Generation, Incarnation, Version};
use libmodelio::vocabulary::meta::Meta;
use libmodelio::wire::{Brings, LearnerRecord, Lineage};
use serde::{Deserialize, Serialize};

use crate::core::{JobRecord, Now};

/// So long offers are waited for. Mounts notice the loss of a shard after two seconds.
const FIRST: Duration = Duration::from_secs(3);
/// So long others are waited for after the first one.
const OTHERS: Duration = Duration::from_secs(1);
/// A mount that says nothing for so long has failed. It says five times a second that it lives.
const SILENT: Duration = Duration::from_secs(10);
/// A mount that has not sent all after this time has failed, too.
const LONGEST: Duration = Duration::from_secs(600);
/// A mount is asked so often, if it says that it has failed: a shard may have died.
const TRIES: u32 = 2;
/// So many mounts that have failed are remembered.
const MAX_FAILED: usize = 64;

/// What the job knew of a version that a mount has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownOf {
    /// Contributions that are part of it or of an earlier one.
    pub contributions: u64,
    /// The names of learners.
    pub learners: Vec<LearnerRecord>,
    /// The highest incarnation of a name that is not listed.
    pub unlisted: Incarnation,
    /// What its publisher has said of it.
    pub meta: Meta,
}

/// Weights that a mount has.
#[derive(Clone, Debug, PartialEq)]
pub struct Offer {
    /// The mount.
    pub client: ClientId,
    /// Their version, as the life before numbered it.
    pub version: Version,
    /// The number that they have in the new life.
    pub number: Version,
    /// What the job knew of that version.
    pub known: KnownOf,
}

impl Offer {
    /// The record of the job that goes on with these weights, and with the optimizer state of a snapshot of this record.
    pub fn goes_on(&self, snapshot: JobRecord) -> JobRecord {
        let KnownOf { contributions, learners, unlisted, meta } = self.known.clone();
        JobRecord { version: self.number, contributions, learners, unlisted, meta, ..snapshot }
    }
}

/// What a mount is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// To ask again.
    Wait,
    /// To bring its weights, to the shards that are encoded here.
    Bring(Vec<u8>),
}

/// How far it is.
#[derive(Debug, PartialEq)]
enum Stage {
    /// Offers are taken.
    Open { first: Option<Now> },
    /// The best one was chosen. Its mount brings the weights to the shards that are encoded here, once there are some.
    Chosen { shards: Vec<u8>, asked: Now, heard: Now, says: Brings },
}

/// A model that is being restored.
#[derive(Debug)]
struct Life {
    lineage: Lineage,
    snapshot: Version,
    since: Now,
    best: Option<Offer>,
    stage: Stage,
}

/// The offers for all models that this shard restores.
#[derive(Debug, Default)]
pub struct Offers {
    lives: BTreeMap<Generation, Life>,
    /// Mounts that have failed, each with how often.
    failed: Vec<(ClientId, u32)>,
}

impl Offers {
    /// A life begins, from this snapshot.
    pub fn begin(&mut self, generation: Generation, lineage: &Lineage, snapshot: Version, now: Now) {
        let (stage, lineage) = (Stage::Open { first: None }, lineage.clone());
        self.lives.insert(generation, Life { lineage, snapshot, since: now, best: None, stage });
    }

    /// A mount offers a version, or says that it lives. None if it is to go away.
    pub fn offered(
        &mut self,
        generation: Generation,
        (client, version, known): (ClientId, Version, KnownOf),
        brings: Brings,
        now: Now,
    ) -> Option<Told> {
        let is_out = self.failed.iter().any(|&(of, times)| of == client && times >= TRIES);
        let life = self.lives.get_mut(&generation).filter(|_| !is_out)?;
        let is_best = life.best.as_ref().is_some_and(|best| (best.client, best.version) == (client, version));
        match &mut life.stage {
            Stage::Open { first } => {
                let number = life.lineage.newer(life.snapshot, version)?;
                first.get_or_insert(now);
                if life.best.as_ref().is_none_or(|best| best.version < version) {
                    life.best = Some(Offer { client, version, number, known });
                }
                Some(Told::Wait)
            }
            Stage::Chosen { shards, heard, says, .. } if is_best => {
                *heard = now;
                if !shards.is_empty() && *says == Brings::Soon {
                    *says = brings;
                }
                let waits = *says != Brings::Soon || shards.is_empty();
                Some(if waits { Told::Wait } else { Told::Bring(shards.clone()) })
            }
            Stage::Chosen { .. } => None,
        }
    }

    /// The best offer, once none is waited for any more; `Err` before that.
    ///
    /// # Errors
    /// The time to wait.
    pub fn choose(&mut self, generation: Generation, now: Now) -> Result<Option<Offer>, Duration> {
        let Some(life) = self.lives.get_mut(&generation) else { return Ok(None) };
        if let Stage::Open { first } = life.stage {
            let until = (life.since + FIRST).min(first.map_or(Now::MAX, |first| first + OTHERS));
            if now < until {
                return Err(until - now);
            }
            life.stage = Stage::Chosen { shards: Vec::new(), asked: now, heard: now, says: Brings::Soon };
        }
        Ok(life.best.clone())
    }

    /// These shards can take the weights now.
    pub fn ask(&mut self, generation: Generation, encoded: Vec<u8>, now: Now) {
        let life = self.lives.get_mut(&generation);
        if let Some(Life { stage: Stage::Chosen { shards, asked, heard, .. }, .. }) = life {
            (*shards, *asked, *heard) = (encoded, now, now);
        }
    }

    /// Whether the weights are all there; `Err` if not yet. A mount that has failed is heard no more.
    ///
    /// # Errors
    /// The time after which it has failed if nothing more is heard of it.
    pub fn has_brought(&mut self, generation: Generation, now: Now) -> Result<bool, Duration> {
        let Some(life) = self.lives.get(&generation) else { return Ok(false) };
        let Stage::Chosen { asked, heard, says, .. } = life.stage else { return Ok(false) };
        let until = (heard + SILENT).min(asked + LONGEST);
        let times = match says {
            Brings::Sent => return Ok(true),
            Brings::Soon if now < until => return Err(until - now),
            Brings::Soon => TRIES,
            Brings::Failed => 1,
        };
        let Some(client) = life.best.as_ref().map(|best| best.client) else { return Ok(false) };
        match self.failed.iter_mut().find(|(of, _)| *of == client) {
            Some((_, before)) => *before += times,
            None => {
                if self.failed.len() == MAX_FAILED {
                    self.failed.remove(0);
                }
                self.failed.push((client, times));
            }
        }
        Ok(false)
    }

    /// The life is there, or will never be.
    pub fn end(&mut self, generation: Generation) {
        self.lives.remove(&generation);
    }
}

#[cfg(test)]
mod tests {
    use libmodelio::vocabulary::ids::ShardId;

    use super::*;

    const LIFE: Generation = Generation(8);
    const SNAPSHOT: Version = Version(30);

    fn begun() -> (Offers, Version) {
        let (lineage, begins) = Lineage::new(Generation(7), Version(0)).restored(ShardId(2), SNAPSHOT, true);
        let mut offers = Offers::default();
        offers.begin(LIFE, &lineage, SNAPSHOT, Now::ZERO);
        (offers, begins)
    }

    fn at(millis: u64) -> Now {
        Duration::from_millis(millis)
    }

    fn says(offers: &mut Offers, client: u64, version: u64, brings: Brings, now: Now) -> Option<Told> {
        let (learners, unlisted, meta) = (Vec::new(), Incarnation(0), Meta::default());
        let known = KnownOf { contributions: version, learners, unlisted, meta };
        offers.offered(LIFE, (ClientId(client), Version(version), known), brings, now)
    }

    #[test]
    fn the_newest_weights_are_taken_and_their_mount_is_asked_for_them() {
        let (mut offers, begins) = begun();
        assert_eq!(offers.choose(LIFE, at(0)), Err(FIRST));
        assert_eq!(says(&mut offers, 1, 32, Brings::Soon, at(500)), Some(Told::Wait));
        assert_eq!(offers.choose(LIFE, at(500)), Err(OTHERS));
        assert_eq!(says(&mut offers, 2, 35, Brings::Soon, at(600)), Some(Told::Wait));
        assert_eq!(says(&mut offers, 3, 33, Brings::Soon, at(700)), Some(Told::Wait));
        let best = offers.choose(LIFE, at(1500)).unwrap().unwrap();
        assert_eq!((best.client, best.version, best.number.0), (ClientId(2), Version(35), begins.0 + 5));
        assert_eq!(says(&mut offers, 1, 32, Brings::Soon, at(1600)), None, "another one was newer");
        assert_eq!(says(&mut offers, 2, 35, Brings::Sent, at(1600)), Some(Told::Wait), "no shard is ready");
        offers.ask(LIFE, vec![7], at(1700));
        assert_eq!(says(&mut offers, 2, 35, Brings::Soon, at(1800)), Some(Told::Bring(vec![7])));
        assert_eq!(offers.has_brought(LIFE, at(1800)), Err(SILENT));
        assert_eq!(says(&mut offers, 2, 35, Brings::Sent, at(1900)), Some(Told::Wait));
        assert_eq!(offers.has_brought(LIFE, at(1900)), Ok(true));
        offers.end(LIFE);
        assert_eq!(says(&mut offers, 2, 35, Brings::Sent, at(1900)), None);
    }

    #[test]
    fn without_an_offer_the_snapshot_is_taken() {
        let (mut offers, begins) = begun();
        for version in [29, 30, begins.0] {
            assert_eq!(
                says(&mut offers, 1, version, Brings::Soon, at(1)),
                None,
                "{version} is none that is newer"
            );
        }
        assert_eq!(offers.choose(LIFE, FIRST), Ok(None));
        assert_eq!(says(&mut offers, 1, 31, Brings::Soon, FIRST), None, "it is too late");
    }

    #[test]
    fn a_mount_that_falls_silent_is_not_asked_again() {
        let (mut offers, _) = begun();
        says(&mut offers, 1, 31, Brings::Soon, at(0));
        assert!(offers.choose(LIFE, OTHERS).unwrap().is_some());
        offers.ask(LIFE, vec![7], OTHERS);
        assert_eq!(offers.has_brought(LIFE, OTHERS + SILENT / 2), Err(SILENT / 2));
        assert_eq!(offers.has_brought(LIFE, OTHERS + SILENT), Ok(false));
        let lineage = offers.lives[&LIFE].lineage.clone();
        offers.end(LIFE);
        offers.begin(LIFE, &lineage, SNAPSHOT, OTHERS + SILENT);
        assert_eq!(says(&mut offers, 1, 31, Brings::Soon, OTHERS + SILENT), None);
        assert_eq!(says(&mut offers, 2, 31, Brings::Soon, OTHERS + SILENT), Some(Told::Wait));
    }

    #[test]
    fn a_mount_that_says_that_it_has_failed_is_asked_once_more() {
        let (mut offers, _) = begun();
        let lineage = offers.lives[&LIFE].lineage.clone();
        for (turn, then) in [(0, Some(Told::Wait)), (1, None)] {
            offers.begin(LIFE, &lineage, SNAPSHOT, Now::ZERO);
            assert_eq!(says(&mut offers, 1, 31, Brings::Soon, at(0)), Some(Told::Wait), "{turn}");
            assert!(offers.choose(LIFE, OTHERS).unwrap().is_some());
            offers.ask(LIFE, vec![7], OTHERS);
            says(&mut offers, 1, 31, Brings::Failed, OTHERS);
            assert_eq!(offers.has_brought(LIFE, OTHERS), Ok(false), "it need not be waited for");
            offers.begin(LIFE, &lineage, SNAPSHOT, Now::ZERO);
            assert_eq!(says(&mut offers, 1, 31, Brings::Soon, at(0)), then);
        }
    }

    #[test]
    fn a_mount_that_goes_on_and_on_has_failed() {
        let (mut offers, _) = begun();
        says(&mut offers, 1, 31, Brings::Soon, at(0));
        assert!(offers.choose(LIFE, OTHERS).unwrap().is_some());
        offers.ask(LIFE, vec![7], OTHERS);
        let mut now = OTHERS;
        while offers.has_brought(LIFE, now).is_err() {
            says(&mut offers, 1, 31, Brings::Soon, now);
            now += SILENT / 2;
        }
        assert_eq!(now, OTHERS + LONGEST);
    }
}
