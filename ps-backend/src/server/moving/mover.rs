//! Moving a model's blocks off a shard: what its lead does, step by step, on a thread of its own.
//!
//! Until the record at the registry is replaced, whatever goes wrong ends the move and changes nothing. From then on
//! nothing does: shards are told until they know, and those that nobody tells ask the registry.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::block_map::MapError;
use libmodelio::ids::ShardId;
use libmodelio::registry::RegistryError;
use libmodelio::wire::{
    Adoption, Fate, Message, ModelRecord, Moved, Refusal, RegistryAnswer, RegistryRequest, ShardRecord,
};

use super::told::{Told, Trouble, request_all};
use super::{Progress, Shared};
use crate::controls::SETTINGS;
use crate::server::AdminAnswer;
use crate::server::lead::Lead;

/// For what is answered at once.
const PROMPT: Duration = Duration::from_secs(10);
/// Longest wait for a shard that takes memory.
const PATIENT: Duration = Duration::from_secs(300);
/// How often the state of things is looked at.
const LOOK: Duration = Duration::from_millis(5);
/// What is not answered is said again after this time.
const AGAIN: Duration = Duration::from_millis(500);
/// For how long shards that do not answer are told that nothing comes of a move.
const ABANDONING: Duration = Duration::from_secs(60);
/// A piece of the lead's state.
const PIECE: usize = 8 << 20;
/// As long a shard is told to switch before the next one is.
const SWITCHING: Duration = Duration::from_secs(3);

/// A move that can be carried out.
struct Move<'a> {
    shared: &'a Arc<Shared>,
    lead: &'a Arc<Lead>,
    off: ShardId,
    deadline: Instant,
    /// As it is.
    before: ModelRecord,
    /// As it is to be.
    after: ModelRecord,
    attempt: u64,
    /// Shards of the new map.
    owners: Vec<Told>,
    /// The shard that is left, unless it owns blocks under the new map.
    leaving: Told,
    /// Encoded.
    adoption: Vec<u8>,
    moved: Vec<u8>,
}

/// Moves the model of `lead` off a shard.
pub(super) fn run(shared: &Arc<Shared>, lead: &Arc<Lead>, off: ShardId, timeout: Duration) -> AdminAnswer {
    let deadline = Instant::now() + timeout;
    let Some(_alone) = lead.mover.try_lock_until(deadline) else {
        let other = lead.moving.lock().as_ref().map_or(off, |moving| moving.off);
        return Err(Refusal::other(format!(
            "the model is being moved off shard {other}: when that is over, run the command again"
        )));
    };
    if let Some(to) = lead.moved() {
        let moved = Moved::decode(&to.payload).map_err(Refusal::other)?;
        return match moved.record.owners.iter().any(|(owner, _)| *owner == off) {
            true => Err(Refusal::other("the model has moved meanwhile: ask its lead")),
            false => Ok((Message::Done, None)),
        };
    }
    let outcome = match Move::plan(shared, lead, off, deadline) {
        Ok(None) => Ok((Message::Done, None)),
        Ok(Some(plan)) => plan.carry_out().map(|()| (Message::Done, None)),
        Err(refusal) => Err(refusal),
    };
    *lead.moving.lock() = None;
    match &outcome {
        Ok(_) => tracing::info!(model = %lead.model, %off, "moved"),
        Err(refusal) => tracing::warn!(model = %lead.model, %off, %refusal, "not moved"),
    }
    outcome
}

fn said(error: RegistryError) -> Refusal {
    Refusal::other(format!("the registry cannot be asked, or refuses: {error}"))
}

impl<'a> Move<'a> {
    /// Where the blocks go; `None` if there are none on the shard.
    fn plan(
        shared: &'a Arc<Shared>,
        lead: &'a Arc<Lead>,
        off: ShardId,
        deadline: Instant,
    ) -> Result<Option<Move<'a>>, Refusal> {
        let shards = shared.registry(|registry, deadline| registry.shards(deadline)).map_err(said)?;
        let before = shared.registry(|registry, deadline| registry.model(&lead.model, deadline));
        let before = before.map_err(said)?;
        let (generation, epoch) = lead.life();
        if before.generation != generation {
            let (model, expected) = (lead.model.clone(), before.generation);
            return Err(Refusal::Generation { model, expected, got: generation });
        }
        if before.epoch != epoch {
            return Err(Refusal::Epoch { expected: before.epoch, got: epoch });
        }
        if let Some(why) = lead.failed() {
            return Err(Refusal::other(format!("{why}: nothing of it can be moved, delete it")));
        }
        if !before.ready {
            return Err(Refusal::other("the model is still being loaded: run the command again"));
        }
        let map = before.block_map().map_err(Refusal::other)?;
        if !map.shares().contains_key(&off) {
            return Ok(None);
        }
        let takers: Vec<ShardId> =
            shards.iter().filter(|shard| !shard.draining).map(|shard| shard.shard).collect();
        let others = map.successors(off, &takers, generation.0).map_err(|error| match error {
            MapError::NoShards => Refusal::other("no other shard takes blocks: start another shard first"),
            other => Refusal::other(other),
        })?;
        let new = map.without(off, &others).map_err(Refusal::other)?;
        let owners = new.shares();
        let leads = if before.lead == off {
            let able: Vec<ShardId> =
                others.iter().copied().filter(|other| owners.contains_key(other)).collect();
            let at = generation.0.checked_rem(able.len() as u64);
            at.map(|at| able[at as usize])
                .ok_or_else(|| Refusal::other("no shard is left to lead the model"))?
        } else {
            before.lead
        };
        let (_, _, controls) = lead.facts();
        let mut after = before.moved(&new, leads).map_err(Refusal::other)?;
        after.controls =
            SETTINGS.iter().filter_map(|(name, _)| Some(((*name).to_owned(), controls.get(name)?))).collect();
        let find = |wanted: ShardId| -> Result<&ShardRecord, Refusal> {
            let found = shards.iter().find(|shard| shard.shard == wanted);
            found.ok_or_else(|| {
                Refusal::other(format!(
                    "shard {wanted}, which owns blocks of the model, is not announced: it is stopped or cut off"
                ))
            })
        };
        let known = owners.keys().chain([&off]).map(|&shard| find(shard).cloned());
        let known: Vec<ShardRecord> = known.collect::<Result<_, _>>()?;
        let attempt = u64::try_from(lead.now().as_nanos()).unwrap_or(u64::MAX);
        let (record, shards) = (after.clone(), known.clone());
        let adoption = Adoption { attempt, record, epoch, owners: before.owners.clone(), shards };
        let too_long = |error| Refusal::other(format!("the model's block map cannot be told: {error}"));
        let moved = Moved { record: after.clone(), shards: known.clone() };
        Ok(Some(Move {
            shared,
            lead,
            off,
            deadline,
            before,
            after,
            attempt,
            owners: known.iter().filter(|shard| owners.contains_key(&shard.shard)).map(Told::new).collect(),
            leaving: Told::new(find(off)?),
            adoption: adoption.encode().map_err(too_long)?,
            moved: moved.encode().map_err(too_long)?,
        }))
    }

    fn tell(&self, stage: &'static str, blocks: u32, of: u32) {
        *self.lead.moving.lock() = Some(Progress { off: self.off, stage, blocks, of });
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn carry_out(mut self) -> Result<(), Refusal> {
        let prepared = self.prepare();
        if let Err(refusal) = prepared {
            if self.shared.is_stopping() {
                // Perhaps the new map is in force. Those who have it find out.
                return Err(refusal);
            }
            self.lead.thaw();
            self.lead.release();
            self.abandon();
            return Err(refusal);
        }
        self.tell("switching", 0, 0);
        self.switch()
    }

    /// All up to the moment when the new map is in force. If it fails, it never will be.
    fn prepare(&mut self) -> Result<(), Refusal> {
        self.tell("taking memory", 0, 0);
        let trouble = |trouble: Trouble| Refusal::other(trouble);
        let within = self.left().min(PATIENT);
        request_all(self.shared, &mut self.owners, &Message::Adopt, &self.adoption, within)
            .map_err(trouble)?;
        self.tell("waiting for the step", 0, 0);
        self.lead.hold();
        while let Some(why) = self.lead.held_up_by() {
            self.check_wanted()?;
            if self.left().is_zero() {
                return Err(Refusal::other(format!(
                    "the step that is under way does not end: {why}: see to that, and run the command again"
                )));
            }
            std::thread::sleep(LOOK);
        }
        self.fill()?;
        self.hand_over()?;
        // Whoever was started anew meanwhile has lost what it was given.
        let asked = self.adopting_message();
        request_all(self.shared, &mut self.owners, &asked, &[], PROMPT).map_err(trouble)?;
        self.check_wanted()?;
        self.put()
    }

    fn adopting_message(&self) -> Message {
        Message::Adopting { generation: self.after.generation, attempt: self.attempt }
    }

    /// Whether the model is still there.
    fn check_wanted(&self) -> Result<(), Refusal> {
        match self.lead.is_stopping() {
            true => Err(Refusal::NoModel(self.lead.model.clone())),
            false => Ok(()),
        }
    }

    fn fill(&mut self) -> Result<(), Refusal> {
        let (version, reducer, _) = self.lead.facts();
        let (generation, attempt) = (self.after.generation, self.attempt);
        let fill = Message::Fill { generation, attempt, version, reducer: reducer.to_string() };
        let trouble = |trouble: Trouble| Refusal::other(trouble);
        request_all(self.shared, &mut self.owners, &fill, &[], PROMPT).map_err(trouble)?;
        loop {
            self.check_wanted()?;
            let asked = self.adopting_message();
            let answers = request_all(self.shared, &mut self.owners, &asked, &[], PROMPT).map_err(trouble)?;
            let (mut there, mut all) = (0, 0);
            for answer in answers {
                let Message::Adopted { blocks, of } = answer else {
                    return Err(Refusal::other(format!("a shard answers with {}", answer.name())));
                };
                there += blocks;
                all += of;
            }
            self.tell("moving blocks", there, all);
            if there == all {
                return Ok(());
            }
            if self.left().is_zero() {
                return Err(Refusal::other(format!(
                    "{there} of {all} blocks were moved in time: give it longer (--timeout)"
                )));
            }
            std::thread::sleep(2 * LOOK);
        }
    }

    /// The lead's state goes to whoever is to lead. From here on this one does nothing more, unless the move fails.
    fn hand_over(&mut self) -> Result<(), Refusal> {
        self.tell("handing over", 0, 0);
        let (bytes, now) = self.lead.freeze().map_err(Refusal::other)?;
        let leads = self.after.lead;
        let told = self.owners.iter_mut().find(|told| told.shard() == leads);
        let told = told.ok_or_else(|| Refusal::other("nobody is to lead the model"))?;
        let (generation, attempt) = (self.after.generation, self.attempt);
        let (of, now) = (bytes.len() as u64, u64::try_from(now.as_nanos()).unwrap_or(u64::MAX));
        for (at, piece) in (0..).step_by(PIECE).zip(bytes.chunks(PIECE)) {
            let piece_of = Message::HandOver { generation, attempt, at, of, now };
            told.request(self.shared, &piece_of, piece, PROMPT).map_err(Refusal::other)?;
        }
        Ok(())
    }

    /// Replaces the record. Once the request may have been carried out there is no way back but by an answer that says
    /// that it was not and never will be: it is said again until there is one.
    fn put(&self) -> Result<(), Refusal> {
        let mut sent = false;
        let mut said_so = false;
        let owners = self.owners.iter().map(|told| told.record.clone()).collect();
        let restore = RegistryRequest::Restore { shards: owners };
        let mut request = RegistryRequest::Put { replaces: Some(self.before.epoch) };
        loop {
            match put_once(self.shared, &request, &self.after) {
                Put::Done => return Ok(()),
                // It was carried out, and whoever leads now has moved the model again. In any case the old map is not
                // in force any more.
                Put::Refused(RegistryError::Epoch { expected, .. })
                    if sent && expected >= self.after.epoch =>
                {
                    return Ok(());
                }
                // A registry that was started anew since, or a model that was deleted. It may have been carried out, and
                // new owners may have heard: there is no way but ahead.
                Put::Refused(RegistryError::NoModel(_)) if sent && request != restore => {
                    request = restore.clone();
                    continue;
                }
                Put::Refused(error @ (RegistryError::Exists(_) | RegistryError::Generation { .. }))
                    if sent =>
                {
                    tracing::warn!(model = %self.lead.model, %error, "it has moved, and the registry has lost it");
                    return Ok(());
                }
                // That is the answer to the first one, too: the model is gone, or the record is none.
                Put::Refused(error) => return Err(said(error)),
                Put::NotSent(error) if !sent => return Err(said(error)),
                Put::NotSent(error) => {
                    if !std::mem::replace(&mut said_so, true) {
                        tracing::warn!(model = %self.lead.model, %error, "whether the model has moved is not known");
                    }
                }
                Put::Unknown(error) => {
                    tracing::warn!(model = %self.lead.model, %error, "whether the model has moved is not known");
                    sent = true;
                    self.tell("asking the registry", 0, 0);
                }
            }
            if self.shared.is_stopping() {
                return Err(Refusal::other("the shard shuts down"));
            }
            std::thread::sleep(AGAIN);
        }
    }

    /// Those who were to own blocks forget them; who does not answer is told for a while.
    fn abandon(self) {
        let (generation, attempt) = (self.after.generation, self.attempt);
        let (shared, mut left) = (Arc::downgrade(self.shared), self.owners);
        let tells = move || {
            let until = Instant::now() + ABANDONING;
            while Instant::now() < until {
                let Some(shared) = shared.upgrade().filter(|shared| !shared.is_stopping()) else { return };
                let abandon = Message::Abandon { generation, attempt };
                left.retain_mut(|told| told.request(&shared, &abandon, &[], SWITCHING).is_err());
                if left.is_empty() {
                    return;
                }
                drop(shared);
                std::thread::sleep(AGAIN);
            }
            tracing::warn!(
                "shards that were to take blocks do not answer; they keep their memory until they do"
            );
        };
        if let Err(error) = std::thread::Builder::new().name("abandons".into()).spawn(tells) {
            tracing::warn!(%error, "shards that were to take blocks are not told that they need not");
        }
    }

    /// The new map is in force: everybody is told until they know. New owners come first, so that whoever hears of the
    /// map finds them; the one who leads now comes last.
    fn switch(self) -> Result<(), Refusal> {
        let Move { shared, lead, deadline, after, leaving, owners, moved, .. } = self;
        let me = *shared.shard.lock();
        let new_owners: Vec<ShardRecord> = owners.iter().map(|told| told.record.clone()).collect();
        let mut left = owners;
        if !left.iter().any(|told| told.shard() == leaving.shard()) {
            left.push(leaving);
        }
        let off = self.off;
        left.sort_by_key(|told| (told.shard() == me, told.shard() == off, told.shard() == after.lead));
        let mut answered_at = Instant::now();
        loop {
            let mut trouble = None;
            left.retain_mut(|told| match told.request(shared, &Message::Switch, &moved, SWITCHING) {
                Ok(_) => false,
                Err(why) => {
                    trouble = Some(why);
                    true
                }
            });
            if forgotten(shared, &after) {
                // It was deleted meanwhile; who was told of that before the switch knows no more of it.
                let delete = Message::Delete { model: after.name.clone(), generation: after.generation };
                for owner in &new_owners {
                    delete_at(shared, owner, &delete);
                }
                return Err(Refusal::NoModel(after.name));
            }
            let Some(trouble) = trouble else { return Ok(()) };
            if answered_at.elapsed() > PROMPT {
                answered_at = Instant::now();
                tracing::warn!(model = %after.name, %trouble, "does not know yet that the model has moved");
            }
            // One that has only to forget, and that nobody can reach any more, needs not be told.
            if left.iter().all(|told| told.shard() == off) && is_lost(shared, off) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                go_on_telling(shared, lead, left, moved);
                return Err(Refusal::other(format!(
                    "the model has moved, but not all shards know: {trouble}: they are told when they answer"
                )));
            }
            if shared.is_stopping() {
                return Err(Refusal::other("the shard shuts down; the others complete the move"));
            }
            std::thread::sleep(AGAIN);
        }
    }
}

/// Whether the registry knows that the model is no more.
fn forgotten(shared: &Shared, record: &ModelRecord) -> bool {
    matches!(shared.fate(record), Ok(Fate::Deleted))
}

/// Whether the registry no longer lists a shard.
fn is_lost(shared: &Shared, shard: ShardId) -> bool {
    let shards = shared.registry(|registry, deadline| registry.shards(deadline));
    shards.is_ok_and(|shards| !shards.iter().any(|record| record.shard == shard))
}

fn delete_at(shared: &Arc<Shared>, owner: &ShardRecord, delete: &Message) {
    let Message::Delete { model, generation } = delete else { return };
    if owner.shard == *shared.shard.lock() {
        // Nobody is told.
        let _ = shared.delete(model, *generation);
        return;
    }
    let told = AdminPeer::connect(&owner.address, Instant::now() + PROMPT)
        .and_then(|mut peer| peer.request(delete, &[], Instant::now() + PROMPT));
    if let Err(error) = told {
        tracing::warn!(%model, shard = %owner.shard, %error, "was not told that the model is deleted");
    }
}

/// Shards that have not answered in time are told when they do, as long as this one lives.
fn go_on_telling(shared: &Arc<Shared>, lead: &Lead, mut left: Vec<Told>, moved: Vec<u8>) {
    let (shared, model) = (Arc::downgrade(shared), lead.model.clone());
    let tells = move || {
        while !left.is_empty() {
            let Some(shared) = shared.upgrade().filter(|shared| !shared.is_stopping()) else { return };
            left.retain_mut(|told| {
                let known = told.request(&shared, &Message::Switch, &moved, SWITCHING).is_ok();
                // One that was started anew has a number, but no blocks.
                !known && !is_lost(&shared, told.shard())
            });
            drop(shared);
            std::thread::sleep(2 * AGAIN);
        }
        tracing::info!(%model, "all shards know that the model has moved");
    };
    if let Err(error) = std::thread::Builder::new().name("switches".into()).spawn(tells) {
        tracing::warn!(%error, "shards that do not answer are not told that the model has moved");
    }
}

/// What has become of the attempt to replace a record.
enum Put {
    Done,
    Refused(RegistryError),
    /// Nobody has heard of it.
    NotSent(RegistryError),
    /// It may have been carried out.
    Unknown(RegistryError),
}

fn put_once(shared: &Shared, request: &RegistryRequest, record: &ModelRecord) -> Put {
    let deadline = Instant::now() + PROMPT;
    let payload = match record.encode() {
        Ok(payload) => payload,
        Err(error) => return Put::Refused(error.into()),
    };
    if let Some(table) = &shared.table {
        return match table.handle(request, &payload) {
            Ok(_) => Put::Done,
            Err(refusal) => Put::Refused(refusal.into()),
        };
    }
    let address = shared.options.registry.clone().unwrap_or_default();
    // Not over a connection that is kept: if that ends, it is not known whether it was before.
    let mut peer = match AdminPeer::connect(&address, deadline) {
        Ok(peer) => peer,
        Err(error) => return Put::NotSent(error.into()),
    };
    match peer.request(&Message::Registry(request.clone()), &payload, deadline) {
        Ok((Message::Registered(RegistryAnswer::Done), _)) => Put::Done,
        Ok((other, _)) => {
            let unexpected = AdminError::Unexpected { address, what: other.name() };
            Put::Unknown(unexpected.into())
        }
        Err(AdminError::Refusal(refusal)) => Put::Refused(refusal.into()),
        Err(error) => Put::Unknown(error.into()),
    }
}
