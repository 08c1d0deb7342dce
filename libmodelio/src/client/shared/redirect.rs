//! A change of the block map. A shard reports that the model has moved; if no such shard is left, the registry does.
//! Another map is then in force, and all connections are opened anew.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::client::core::{Action, ClientCore, Now};
use crate::client::options::Event;
use crate::client::peers::inquiry::{IN_QUESTION, Inquiry, Unconfirmed};
use crate::client::peers::routes::{Route, Routes, ShardRoute, overtaken};
use crate::client::shared::Shared;
use crate::registry::{Registry, RegistryError};
use crate::transport::stream::Close;
use crate::vocabulary::block_map::BlockMap;
use crate::vocabulary::ids::ShardId;
use crate::vocabulary::shard_error::{ROLLED_BACK, ShardError};
use crate::wire::{ModelRecord, Moved, Refusal, ShardRecord};

/// A shard that is out of reach for so long may have been stopped after its blocks moved. The registry is then asked,
/// and again after growing pauses that begin with this one.
const GONE: Duration = Duration::from_secs(2);
/// The longest pause between two questions.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// The longest pause where newer weights of mounts count when the model is restored.
const OFFERS_SOON: Duration = Duration::from_secs(1);
/// The pause before the registry is asked again whether a model is restored.
const RESTORING: Duration = Duration::from_millis(250);
/// The longest wait for an answer of the registry's.
const ANSWER: Duration = Duration::from_secs(5);

fn in_question() -> Close {
    Close::Asked(IN_QUESTION.into())
}

/// The source of a new block map.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Authority {
    /// The registry, or a shard if there is no registry.
    Good,
    /// Only a shard.
    Unconfirmed,
    /// The registry, which contradicts a shard.
    Corrects,
}

impl Shared {
    /// Like [`Shared::with_core`], for a message of a connection.
    ///
    /// # Errors
    /// If the connection was opened under an older map. Then nothing is changed, and the connection must end.
    pub(in crate::client) fn with_core_by(
        &self,
        route: &Route,
        change: impl FnOnce(&mut ClientCore, Now, &mut Vec<Action>),
    ) -> Result<(), Close> {
        let mut inner = self.inner.lock();
        if !inner.peers.is_in_force(route) {
            return Err(overtaken());
        }
        let mut actions = Vec::new();
        change(&mut inner.core, self.now(), &mut actions);
        self.act(inner, actions);
        Ok(())
    }

    /// # Errors
    /// If a connection was opened under a map that is no longer in force.
    pub(in crate::client) fn check_in_force(&self, route: &Route) -> Result<(), Close> {
        self.inner.lock().peers.check_in_force(route)
    }

    /// A shard reports where the model is now.
    ///
    /// # Errors
    /// The connection must end: it belongs to an older map, or the report makes no sense.
    pub(in crate::client) fn on_moved(&self, route: &Route, bytes: &[u8]) -> Result<(), Close> {
        let bad = |why: &dyn std::fmt::Display| {
            Close::Asked(
                format!("what the shard says of where the model is now makes no sense: {why}").into(),
            )
        };
        let moved = Moved::decode(bytes).map_err(|error| bad(&error))?;
        if self.options.registry.is_none() {
            self.moved(&moved, Authority::Good).map_err(|why| bad(&why))?;
            return self.check_in_force(route);
        }
        self.sense_of(&moved.record, &moved.shards).map_err(|why| bad(&why))?;
        let ask = {
            let mut inner = self.inner.lock();
            if !inner.peers.is_in_force(route) {
                return Err(overtaken());
            }
            let epoch = moved.record.epoch;
            if epoch <= inner.peers.routes.epoch {
                return Ok(());
            }
            let inquiry = &mut inner.peers.inquiry;
            if inquiry.refused.is_some_and(|(refused, until)| refused == epoch && until > Instant::now()) {
                return Err(Close::Asked(
                    format!("the shard says that block map {epoch} is in force, the registry does not")
                        .into(),
                ));
            }
            if inquiry.report.as_ref().is_none_or(|(known, _)| known.record.epoch <= epoch) {
                inquiry.report = Some((moved, route.address().to_owned()));
            }
            !std::mem::replace(&mut inquiry.under_way, true)
        };
        if ask {
            self.ask_registry();
        }
        Err(in_question())
    }

    /// A process at the coordinator's address knows nothing of the job. So the job has failed, unless the model has
    /// moved. The registry is asked about that.
    pub(in crate::client) fn coordinator_has_not(&self, route: &Route, refusal: &Refusal) {
        {
            let mut inner = self.inner.lock();
            if !inner.peers.is_in_force(route) || !inner.peers.coordinator.met || inner.core.is_abandoned() {
                return;
            }
            inner.peers.inquiry.lost = Some(format!(
                "{} coordinated the job and does not have it any more, because the model was deleted or that shard was \
                 started again: {refusal}",
                route.address()
            ));
            if self.options.registry.is_some() && std::mem::replace(&mut inner.peers.inquiry.under_way, true)
            {
                return;
            }
        }
        match self.options.registry {
            Some(_) => self.ask_registry(),
            None => self.fail_if_lost(),
        }
    }

    /// The model is not elsewhere, so the job fails.
    fn fail_if_lost(&self) {
        let mut inner = self.inner.lock();
        let Some(why) = inner.peers.inquiry.lost.take() else { return };
        tracing::error!(model = %self.model, "the job has failed: {why}");
        let mut actions = Vec::new();
        inner.core.fail(ShardError::Lost(why), self.now(), &mut actions);
        self.act(inner, actions);
    }

    /// Checks that `record` is of this model and leads to shards.
    fn sense_of(
        &self,
        record: &ModelRecord,
        shards: &[ShardRecord],
    ) -> Result<(BlockMap, Arc<Routes>), String> {
        self.check_same(record)?;
        let map = record.block_map().map_err(|error| error.to_string())?;
        let (transport, connections) = (self.options.transport, self.options.connections);
        let routes = Routes::new(&map, record.coordinator, shards, transport, connections)?;
        Ok((map, Arc::new(routes)))
    }

    /// Puts the block map of `moved` in force if it is newer than the present one, or if it corrects the present one.
    /// True if it did.
    ///
    /// # Errors
    /// `moved` is of another model, or its record leads nowhere. Then nothing has changed.
    fn moved(&self, moved: &Moved, authority: Authority) -> Result<bool, String> {
        let (map, new) = self.sense_of(&moved.record, &moved.shards)?;
        let mut inner = self.inner.lock();
        let mut actions = Vec::new();
        let now = self.now();
        // Another connection may have brought the same report.
        let taken = !self.lifetime.is_stopping()
            && match authority {
                Authority::Corrects => inner.core.corrected(&map, now, &mut actions),
                Authority::Good | Authority::Unconfirmed => inner.core.moved(&map, now, &mut actions),
            };
        if !taken {
            return Ok(false);
        }
        let met = inner.peers.coordinator.met;
        let before = inner.peers.replace(&new);
        // The new coordinator has taken over the job that was reached before, unless the report is wrong.
        let met = met || inner.peers.unconfirmed.take().is_some_and(|before| before.met);
        match authority {
            Authority::Unconfirmed => {
                inner.peers.unconfirmed =
                    Some(Unconfirmed { moved: moved.clone(), since: Instant::now(), met });
            }
            Authority::Good | Authority::Corrects => inner.peers.coordinator.met = met,
        }
        inner.peers.inquiry = Inquiry { under_way: inner.peers.inquiry.under_way, ..Inquiry::default() };
        self.act(inner, actions);
        // The old connections end by themselves, and nobody waits for them.
        let _ = before.threads.shut_down(Duration::ZERO);
        let at: Vec<String> = new
            .partitions
            .iter()
            .map(|place| format!("shard {} at {}", place.record.shard, place.record.address))
            .collect();
        tracing::info!(model = %self.model, epoch = %new.epoch, "the model has moved: {}", at.join(", "));
        for why in new.partitions.iter().filter_map(|place| place.barred.as_ref()) {
            tracing::error!(
                model = %self.model,
                "{why}: requests that need it end at their deadlines; connect anew without asking for shared memory alone"
            );
        }
        self.lifetime.rouse();
        Ok(true)
    }

    fn check_same(&self, record: &ModelRecord) -> Result<(), String> {
        let known = &self.record;
        if (&record.name, record.generation) != (&known.name, known.generation) {
            return Err(format!(
                "it is of model {} of generation {}, not {} of generation {}",
                record.name, record.generation, known.name, known.generation
            ));
        }
        if (&record.tensors, record.block_size) != (&known.tensors, known.block_size) {
            return Err(format!("it has other tensors, or other blocks, than model {} has", known.name));
        }
        Ok(())
    }

    // -- the registry

    /// Asks the registry for the model's place if shards have been out of reach for long, or if only a shard has
    /// reported a move.
    pub(in crate::client) fn inquire(&self) {
        if self.options.registry.is_none() {
            return;
        }
        {
            let mut inner = self.inner.lock();
            let Some(since) = inner.peers.inquires_since() else { return };
            let at = inner.peers.inquiry.next.unwrap_or(since + GONE);
            if inner.peers.inquiry.under_way || at > Instant::now() {
                return;
            }
            inner.peers.inquiry.under_way = true;
        }
        self.ask_registry();
    }

    /// Asks the registry on a thread of its own, so that no connection waits.
    fn ask_registry(&self) {
        let Some(registry) = self.options.registry.clone() else { return };
        let (this, name) = (self.this.clone(), self.model.clone());
        let ask = move || {
            let found = registry_view(&*registry, &name);
            if let Some(shared) = this.upgrade() {
                shared.on_registry_answer(found);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("client-registry".into()).spawn(ask) {
            tracing::warn!(model = %self.model, %error, "no thread to ask the registry");
            self.asked();
        }
    }

    fn on_registry_answer(&self, found: Result<(ModelRecord, Vec<ShardRecord>), RegistryError>) {
        let (report, unconfirmed, known) = {
            let mut inner = self.inner.lock();
            let unconfirmed = inner.peers.unconfirmed.as_ref().map(|unconfirmed| unconfirmed.moved.clone());
            (inner.peers.inquiry.report.take(), unconfirmed, Arc::clone(&inner.peers.routes))
        };
        if let Ok((record, _)) = &found
            && record.lineage.follows(&self.record.lineage)
        {
            self.is_restored(record.ready, !record.ready && record.lineage.newest);
            return;
        }
        if let Ok((record, _)) = &found
            && self.is_to_be_restored(record)
        {
            self.is_restored(false, false);
            return;
        }
        let outcome = match found {
            Ok((record, mut shards)) => {
                // A shard whose lease is over is not listed. If it lives, it is where it was.
                self.is_gone(&record);
                let is_listed =
                    |place: &ShardRoute| shards.iter().any(|shard| shard.shard == place.record.shard);
                let others =
                    known.partitions.iter().filter(|place| unconfirmed.is_none() && !is_listed(place));
                let others: Vec<ShardRecord> = others.map(|place| place.record.clone()).collect();
                shards.extend(others);
                self.confirm_move(Moved { record, shards }, report, unconfirmed)
            }
            Err(RegistryError::Peer(error)) => match report {
                Some((moved, who)) => {
                    let epoch = moved.record.epoch;
                    tracing::warn!(
                        model = %self.model, %epoch, shard = %who,
                        "the model has moved, as a shard says; the registry cannot be asked ({error}), and will be \
                         until it says so, too"
                    );
                    self.moved(&moved, Authority::Unconfirmed).map(drop)
                }
                None => Err(error.to_string()),
            },
            Err(error) => {
                if let Some((moved, who)) = report {
                    self.refuse_report(&moved, &who, &error.to_string());
                }
                Err(error.to_string())
            }
        };
        if let Err(why) = outcome {
            tracing::debug!(model = %self.model, "the registry does not know where the model is: {why}");
        }
        self.fail_if_lost();
        self.asked();
    }

    /// Whether the coordinator has come back without this life of the model, and another one is about to begin.
    fn is_to_be_restored(&self, record: &ModelRecord) -> bool {
        let inner = self.inner.lock();
        let known = &self.record;
        inner.peers.inquiry.lost.is_some()
            && (record.generation, record.epoch) == (known.generation, inner.peers.routes.epoch)
            && !record.lineage.store.is_empty()
    }

    /// Blocks were lost, and the model goes on from a snapshot in another life, or is about to. This job ends then, unless
    /// whoever has it begins another one first, who may be asked to bring (`takes`) weights before.
    fn is_restored(&self, is_there: bool, takes: bool) {
        let mut inner = self.inner.lock();
        inner.peers.inquiry = Inquiry { next: Some(Instant::now() + RESTORING), ..Inquiry::default() };
        let mut actions = Vec::new();
        if inner.core.is_restoring(&mut actions) {
            tracing::warn!(model = %self.model, "blocks are lost: the model is restored from its newest snapshot");
        }
        self.act(inner, actions);
        match (is_there || takes, self.options.is_followed) {
            (true, true) => self.tell(Event::Restored),
            (true, false) if is_there => self.roll_back(),
            _ => {}
        }
    }

    /// The model goes on in another life. All requests to this one fail, once.
    pub(in crate::client) fn roll_back(&self) {
        let mut inner = self.inner.lock();
        if inner.core.is_abandoned() {
            return;
        }
        let mut actions = Vec::new();
        inner.core.fail(ShardError::RolledBack(ROLLED_BACK.to_owned()), self.now(), &mut actions);
        self.act(inner, actions);
    }

    fn tell(&self, event: Event) {
        let listener = self.listener.lock().clone();
        listener.inspect(|listener| listener(event));
    }

    /// The name now belongs to another model. If this one has no coordinator, it is gone.
    fn is_gone(&self, record: &ModelRecord) {
        /// A young registry may not know all models yet, so one answer is not enough.
        const SURE: u32 = 2;
        let mut inner = self.inner.lock();
        let is_other = record.generation != self.record.generation;
        inner.peers.inquiry.other_lives = if is_other { inner.peers.inquiry.other_lives + 1 } else { 0 };
        let is_away = inner.peers.coordinator.gone_since.is_some_and(|since| since.elapsed() >= GONE);
        if is_away && inner.peers.inquiry.other_lives >= SURE && !inner.core.is_abandoned() {
            let (address, now) =
                (inner.peers.routes.address(inner.peers.routes.coordinator), record.generation);
            let why = format!(
                "{address} coordinated the job and is gone, and the name is another model's, of generation {now}"
            );
            inner.peers.inquiry.lost = Some(why);
        }
    }

    /// Puts the registry's record in force, whatever a shard has reported.
    fn confirm_move(
        &self,
        known: Moved,
        report: Option<(Moved, String)>,
        unconfirmed: Option<Moved>,
    ) -> Result<(), String> {
        let Moved { record, shards } = &known;
        if let Some((moved, who)) = report {
            let of_same_life = record.generation == moved.record.generation;
            if !of_same_life || record.epoch < moved.record.epoch {
                let there = format!("block map {} of generation {}", record.epoch, record.generation);
                self.refuse_report(&moved, &who, &there);
            } else if record.epoch == moved.record.epoch && !is_same(record, shards, &moved) {
                tracing::warn!(
                    model = %self.model, shard = %who,
                    "block map {} is not what the shard says: expected {:?}, as the registry has it, got {:?}",
                    record.epoch, places(record, shards), places(&moved.record, &moved.shards)
                );
            }
        }
        let Some(unconfirmed) = unconfirmed else { return self.moved(&known, Authority::Good).map(drop) };
        if is_same(record, shards, &unconfirmed) {
            tracing::info!(model = %self.model, epoch = %record.epoch, "the registry says, too, that the model has moved");
            let mut inner = self.inner.lock();
            let met = inner.peers.unconfirmed.take().is_some_and(|unconfirmed| unconfirmed.met);
            inner.peers.coordinator.met |= met;
            return Ok(());
        }
        self.check_same(record)?;
        if record.epoch <= unconfirmed.record.epoch {
            tracing::warn!(
                model = %self.model,
                "a shard's report was false: expected block map {} on {:?}, as the registry has it, got {} on {:?}",
                record.epoch, places(record, shards),
                unconfirmed.record.epoch, places(&unconfirmed.record, &unconfirmed.shards)
            );
        }
        self.moved(&known, Authority::Corrects).map(drop)
    }

    /// Refuses a shard's report that the registry contradicts.
    fn refuse_report(&self, moved: &Moved, who: &str, there: &str) {
        let epoch = moved.record.epoch;
        tracing::warn!(
            model = %self.model, shard = %who,
            "a shard says that the model has moved, the registry does not: expected {there}, got block map {epoch}; \
             the model is where it was"
        );
        self.inner.lock().peers.inquiry.refused = Some((epoch, Instant::now() + GONE));
    }

    /// A question to the registry has ended. Sets the time of the next one, for the case that shards stay out of
    /// reach.
    fn asked(&self) {
        let mut inner = self.inner.lock();
        // Whoever restores it waits a short time for newer weights.
        let most = match inner.controls().snapshots.restores_newest() {
            true => OFFERS_SOON,
            false => MAX_PAUSE,
        };
        let inquiry = &mut inner.peers.inquiry;
        inquiry.under_way = false;
        inquiry.report = None;
        inquiry.tries += 1;
        let pause = match inquiry.other_lives {
            // The next answer is worth having soon.
            1 => GONE,
            _ => (GONE * 2u32.pow(inquiry.tries.min(5))).min(most),
        };
        inquiry.next = Some(Instant::now() + pause);
    }
}

/// The owners in a record, and their addresses.
fn places<'a>(record: &ModelRecord, shards: &'a [ShardRecord]) -> Vec<(ShardId, &'a str)> {
    let mut owners: Vec<ShardId> = record.owners.iter().map(|(owner, _)| *owner).collect();
    owners.sort_unstable();
    owners.dedup();
    let address =
        |owner| shards.iter().find(|shard| shard.shard == owner).map(|shard| shard.address.as_str());
    owners.into_iter().map(|owner| (owner, address(owner).unwrap_or_default())).collect()
}

/// Whether a shard's report agrees with the registry.
fn is_same(record: &ModelRecord, shards: &[ShardRecord], report: &Moved) -> bool {
    let map =
        |record: &ModelRecord| (record.generation, record.epoch, record.coordinator, record.owners.clone());
    map(record) == map(&report.record) && places(record, shards) == places(&report.record, &report.shards)
}

fn registry_view(
    registry: &dyn Registry,
    name: &str,
) -> Result<(ModelRecord, Vec<ShardRecord>), RegistryError> {
    let deadline = Instant::now() + ANSWER;
    Ok((registry.model(name, deadline)?, registry.shards(deadline)?))
}
