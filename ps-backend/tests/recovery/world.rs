//! Shards, a job's lives, its store and the registry, and what befalls them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use libmodelio::registry::table::RegistryCore;
use libmodelio::vocabulary::block_map::BlockMap;
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::{Epoch, Generation, ShardId, Version};
use libmodelio::vocabulary::layout::{DType, MIN_BLOCK_SIZE, ModelLayout};
use libmodelio::wire::{
    Fate, HeldPartition, Lineage, ModelRecord, RegistryAnswer, RegistryRequest, ShardRecord,
};
use ps_backend::losses::LossWatch;

use super::restoring::Restoring;

pub(super) const MODEL: &str = "m";
const LEASE_MS: u32 = 10_000;
const TICK: u64 = 100;
/// The learners contribute one number after the other.
pub(super) type Content = BTreeSet<u32>;

/// The registry does not answer, or refuses.
pub(super) enum Unanswered {
    Silence,
    Refused,
}

#[derive(Clone)]
pub(super) struct Snapshot {
    /// The number of the claim under which it was written.
    pub(super) claim: u32,
    pub(super) version: u64,
    pub(super) content: Content,
}

/// A life of the job, at its coordinator.
pub(super) struct Job {
    pub(super) generation: Generation,
    pub(super) owners: Vec<usize>,
    pub(super) version: u64,
    pub(super) content: Content,
    pub(super) lineage: Lineage,
    /// Versions have numbers below this one.
    pub(super) limit: u64,
    /// A snapshot that is being written, and whether the claim was looked at.
    pub(super) writes: Option<(Snapshot, bool)>,
    /// The newest one in the store, and whether it is called durable.
    pub(super) saved: Option<(Snapshot, bool)>,
}

pub(super) struct Shard {
    pub(super) number: ShardId,
    pub(super) is_alive: bool,
    /// It does nothing until then.
    pub(super) stopped_until: u64,
    /// The registry does not hear it until then.
    cut_until: u64,
    watch: LossWatch,
    pub(super) held: BTreeSet<Generation>,
    pub(super) job: Option<Job>,
    pub(super) restoring: Option<Restoring>,
}

impl Shard {
    fn new() -> Shard {
        Shard {
            number: ShardId(0),
            is_alive: true,
            stopped_until: 0,
            cut_until: 0,
            watch: LossWatch::default(),
            held: BTreeSet::new(),
            job: None,
            restoring: None,
        }
    }
}

pub(super) struct World {
    pub(super) random: fastrand::Rng,
    pub(super) now: u64,
    says: bool,
    is_well: bool,
    registry: RegistryCore,
    registry_away_until: u64,
    pub(super) shards: Vec<Shard>,
    pub(super) snapshots: Vec<Snapshot>,
    /// Whose the store is, and how often that life's model was restored.
    pub(super) claim: (Generation, u32),
    generations: u64,
    contributions: u32,
    shown: BTreeMap<u64, Content>,
    /// Lives that clients know.
    pub(super) known: BTreeSet<Generation>,
    durable: Content,
    /// Whether newer weights of mounts count at a restoration, and what mounts show.
    pub(super) takes_newest: bool,
    pub(super) mounts: Vec<(u64, Content)>,
    pub(super) brought: u64,
    pub(super) restored: u64,
    pub(super) told: u64,
    pub(super) refused_zombies: u64,
}

pub(super) fn address(shard: usize) -> String {
    format!("node{shard}:7070")
}

impl World {
    pub(super) fn new(seed: u64, says: bool) -> World {
        let mut random = fastrand::Rng::with_seed(seed);
        let shards = (0..random.usize(1..5)).map(|_| Shard::new()).collect();
        World {
            random,
            now: 1000,
            says,
            is_well: true,
            registry: RegistryCore::new(),
            registry_away_until: 0,
            shards,
            snapshots: Vec::new(),
            claim: (Generation(1), 0),
            generations: 0,
            contributions: 0,
            shown: BTreeMap::new(),
            known: BTreeSet::new(),
            durable: Content::new(),
            takes_newest: seed % 2 == 1,
            mounts: vec![Default::default(); 3],
            brought: 0,
            restored: 0,
            told: 0,
            refused_zombies: 0,
        }
    }

    pub(super) fn say(&self, what: std::fmt::Arguments<'_>) {
        if self.says {
            println!("{:>7}  {what}", self.now);
        }
    }

    pub(super) fn time(&self) -> Duration {
        Duration::from_millis(self.now)
    }

    pub(super) fn new_generation(&mut self) -> Generation {
        self.generations += 1;
        Generation(self.generations)
    }

    pub(super) fn run(&mut self) {
        self.begin();
        // Before its first snapshot a job is not restored.
        while self.told == 0 {
            self.tick();
        }
        self.is_well = false;
        for _ in 0..1500 {
            self.befall();
            self.tick();
        }
        self.is_well = true;
        self.registry_away_until = 0;
        for shard in 0..self.shards.len() {
            (self.shards[shard].stopped_until, self.shards[shard].cut_until) = (0, 0);
            self.revive(shard);
        }
        let before = self.contributions;
        for _ in 0..3000 {
            self.tick();
            if self.contributions > before + 3 {
                return;
            }
        }
        let numbers: Vec<ShardId> = self.shards.iter().map(|shard| shard.number).collect();
        let held: Vec<_> =
            self.shards.iter().map(|shard| (shard.held.clone(), shard.job.is_some())).collect();
        let record = self.ask(0, &RegistryRequest::Model { name: MODEL.to_owned() }, &[]);
        let record = record.ok().map(|(_, bytes)| ModelRecord::decode(&bytes).unwrap());
        let life = record.map(|of| (of.generation, of.ready, of.owners, of.lineage));
        panic!("the job does not go on: shards {numbers:?} hold {held:?}, and the registry has {life:?}");
    }

    /// All is well, and there is a model on all shards.
    fn begin(&mut self) {
        (0..self.shards.len()).for_each(|shard| self.announce(shard));
        let owners: Vec<usize> = (0..self.shards.len()).collect();
        let generation = self.new_generation();
        let record = ModelRecord { ready: true, ..self.record(generation, &owners, None) };
        let put = RegistryRequest::Put { replaces: None };
        assert!(self.ask(0, &put, &record.encode().unwrap()).is_ok());
        for shard in &owners {
            self.shards[*shard].held.insert(generation);
        }
        self.known.insert(generation);
        self.begin_job(0, generation, owners, (0, Content::new()), record.lineage);
    }

    /// The record of a life on these shards.
    pub(super) fn record(
        &self,
        generation: Generation,
        owners: &[usize],
        lineage: Option<Lineage>,
    ) -> ModelRecord {
        let numbers: Vec<ShardId> = owners.iter().map(|shard| self.shards[*shard].number).collect();
        let tensors = vec![("w".to_owned(), DType::F32, vec![100_000])];
        let layout = ModelLayout::new(tensors, MIN_BLOCK_SIZE).unwrap();
        let map = BlockMap::striped(layout.blocks(), &numbers).unwrap();
        let controls = Controls::default();
        let record =
            ModelRecord::new(MODEL, generation, &layout, BTreeMap::new(), &map, numbers[0], controls)
                .unwrap();
        ModelRecord { lineage: lineage.unwrap_or(record.lineage.clone()), ..record }
    }

    pub(super) fn begin_job(
        &mut self,
        shard: usize,
        generation: Generation,
        owners: Vec<usize>,
        (version, content): (u64, Content),
        lineage: Lineage,
    ) {
        self.show(version, &content);
        let limit = lineage.reserved.0;
        self.shards[shard].job =
            Some(Job { generation, owners, version, content, lineage, limit, writes: None, saved: None });
    }

    fn show(&mut self, version: u64, content: &Content) {
        let before = self.shown.insert(version, content.clone());
        assert!(before.is_none_or(|before| before == *content), "version {version} has two contents");
    }

    /// Whether a shard runs.
    pub(super) fn runs(&self, shard: usize) -> bool {
        let of = &self.shards[shard];
        of.is_alive && of.stopped_until <= self.now
    }

    /// A shard asks the registry.
    pub(super) fn ask(
        &mut self,
        shard: usize,
        request: &RegistryRequest,
        payload: &[u8],
    ) -> Result<(RegistryAnswer, Vec<u8>), Unanswered> {
        let is_away = self.registry_away_until > self.now || self.shards[shard].cut_until > self.now;
        let is_lost = |world: &mut World| !world.is_well && world.random.u8(..) < 6;
        if is_away || is_lost(self) {
            return Err(Unanswered::Silence);
        }
        let answer = self.registry.handle(request, payload, self.time());
        if is_lost(self) {
            return Err(Unanswered::Silence);
        }
        let answer = answer.map_err(|_| Unanswered::Refused)?;
        Ok((answer.message, answer.payload.map(|bytes| bytes.to_vec()).unwrap_or_default()))
    }

    fn announce(&mut self, shard: usize) {
        let of = &self.shards[shard];
        let record = ShardRecord {
            shard: of.number,
            address: address(shard),
            host: String::new(),
            draining: false,
            rdma: String::new(),
        };
        let request = RegistryRequest::Announce { record, lease_ms: LEASE_MS, bound: !of.held.is_empty() };
        if let Ok((RegistryAnswer::Shard(number), _)) = self.ask(shard, &request, &[]) {
            self.shards[shard].number = number;
        }
    }

    /// What a shard reports of its partitions. It drops those of lives that are over.
    fn report(&mut self, shard: usize) {
        let held: Vec<Generation> = self.shards[shard].held.iter().copied().collect();
        let life = |generation: &Generation| HeldPartition {
            model: MODEL.to_owned(),
            generation: *generation,
            epoch: Epoch(1),
        };
        let (number, held_here) = (self.shards[shard].number, held.iter().map(life).collect());
        let request = RegistryRequest::Holding { shard: number, held: held_here, deleted: Vec::new() };
        let Ok((RegistryAnswer::Fates { fates, .. }, _)) = self.ask(shard, &request, &[]) else { return };
        for (generation, fate) in held.into_iter().zip(fates) {
            if fate == Fate::Deleted {
                self.drop_life(shard, generation);
            }
        }
    }

    pub(super) fn drop_life(&mut self, shard: usize, generation: Generation) {
        self.shards[shard].held.remove(&generation);
        self.shards[shard].job.take_if(|job| job.generation == generation);
    }

    /// The coordinator tells the registry, and calls its newest snapshot durable if that has answered.
    fn keep(&mut self, shard: usize) {
        let Some(job) = &self.shards[shard].job else { return };
        if job.saved.is_none() && job.lineage.store.is_empty() {
            return;
        }
        let (generation, reserved) = (job.generation, Lineage::reserved_for(Version(job.version)));
        let reserved = reserved.max(job.lineage.reserved);
        let (model, store, newest) = (MODEL.to_owned(), "/s".to_owned(), self.takes_newest);
        let request = RegistryRequest::Keep { model, generation, epoch: Epoch(1), reserved, store, newest };
        let kept = self.ask(shard, &request, &[]);
        if let Err(Unanswered::Refused) = kept {
            self.refused_zombies += 1;
        }
        if kept.is_err() {
            return;
        }
        let Some(job) = &mut self.shards[shard].job else { return };
        (job.lineage.reserved, job.lineage.store, job.limit) = (reserved, "/s".to_owned(), reserved.0);
        if let Some((snapshot, is_durable)) = &mut job.saved
            && !std::mem::replace(is_durable, true)
        {
            self.durable = snapshot.content.clone();
            self.told += 1;
            let version = snapshot.version;
            self.say(format_args!("version {version} of life {generation} is durable"));
        }
    }

    fn tick(&mut self) {
        self.now += TICK;
        for shard in 0..self.shards.len() {
            if !self.runs(shard) {
                continue;
            }
            let phase = self.now + 700 * shard as u64;
            if phase.is_multiple_of(2500) {
                self.announce(shard);
                self.report(shard);
                self.keep(shard);
            }
            if phase.is_multiple_of(500) {
                self.look(shard);
            }
            self.work(shard);
            Restoring::step(self, shard);
        }
    }

    /// A shard probes others, and asks for losses.
    fn look(&mut self, shard: usize) {
        let me = self.shards[shard].number;
        // It has not started before it has one.
        if me == ShardId(0) {
            return;
        }
        for of in self.shards[shard].watch.watched(me) {
            let there = (0..self.shards.len()).find(|other| address(*other) == of.address);
            let is_refused = there.is_some_and(|other| !self.shards[other].is_alive);
            if self.shards[shard].watch.probed(of.shard, is_refused) {
                let _ = self.ask(shard, &RegistryRequest::Withdraw { shard: of.shard }, &[]);
            }
        }
        let held = self.shards[shard].held.iter().copied().collect();
        let makes = self.shards[shard].restoring.iter().flat_map(|of| of.makes).collect();
        let answer = self.ask(shard, &RegistryRequest::Lost { shard: me, held, makes }, &[]);
        let Ok((RegistryAnswer::Losses(losses), _)) = answer else { return };
        let now = self.time();
        for lost in self.shards[shard].watch.lost(me, losses, now) {
            self.say(format_args!("shard {shard} restores life {} of {:?}", lost.generation, lost.shards));
            self.shards[shard].restoring = Some(Restoring::new(lost.generation));
        }
    }

    /// A restoration has ended.
    pub(super) fn restoration_ends(&mut self, shard: usize, is_restored: bool) {
        let now = self.time();
        self.shards[shard].restoring = None;
        self.shards[shard].watch.ended(MODEL, is_restored, now);
    }

    /// The job takes a contribution, or goes on with a snapshot.
    fn work(&mut self, shard: usize) {
        let Some(job) = &self.shards[shard].job else { return };
        let (generation, is_known) = (job.generation, self.known.contains(&job.generation));
        let is_there = |of: &usize| self.runs(*of) && self.shards[*of].held.contains(&generation);
        if !is_known || !job.owners.iter().all(is_there) {
            return;
        }
        let has_number = job.version + 1 < job.limit || job.lineage.store.is_empty() && job.saved.is_none();
        match self.random.u8(0..8) {
            0 | 1 if has_number => {
                self.contributions += 1;
                let contribution = self.contributions;
                let jump = self.random.u64(0..300_000);
                let Some(job) = &mut self.shards[shard].job else { return };
                // Versions nobody looks at in between.
                job.version = (job.version + 1).max((job.version + jump).min(job.limit.saturating_sub(1)));
                job.content.insert(contribution);
                let (version, content) = (job.version, job.content.clone());
                self.show(version, &content);
            }
            2 => self.save(shard),
            3 => {
                let (version, content) = (job.version, job.content.clone());
                self.pull(version, &content);
            }
            _ => {}
        }
    }

    /// One more step of writing a snapshot.
    fn save(&mut self, shard: usize) {
        let claim = self.claim;
        let Some(job) = &mut self.shards[shard].job else { return };
        match job.writes.take() {
            None => {
                let (version, content) = (job.version, job.content.clone());
                let snapshot = Snapshot { claim: 0, version, content };
                job.writes = Some((snapshot, false));
            }
            Some((snapshot, false)) if claim.0 == job.generation => {
                job.writes = Some((Snapshot { claim: claim.1, ..snapshot }, true));
            }
            Some((_, false)) => self.refused_zombies += 1,
            // Another life may have claimed the store since that was looked at.
            Some((snapshot, true)) => {
                job.saved = Some((snapshot.clone(), false));
                self.snapshots.push(snapshot);
                self.keep(shard);
            }
        }
    }

    /// A life begins at a snapshot.
    pub(super) fn restored_from(&mut self, generation: Generation, snapshot: &Snapshot) {
        let lost: Vec<&u32> = self.durable.difference(&snapshot.content).collect();
        assert!(lost.is_empty(), "life {generation} lacks {lost:?}, which were durable");
        self.restored += 1;
        self.say(format_args!("life {generation} begins at version {}", snapshot.version));
    }

    fn revive(&mut self, shard: usize) {
        if !self.shards[shard].is_alive {
            self.say(format_args!("shard {shard} is started anew"));
            self.shards[shard] = Shard::new();
            self.announce(shard);
        }
    }

    /// Something happens, perhaps.
    fn befall(&mut self) {
        if self.random.u8(..) > 12 {
            return;
        }
        let shard = self.random.usize(0..self.shards.len());
        let until = self.now + self.random.u64(200..15_000);
        match self.random.u8(0..10) {
            0..=2 => {
                self.say(format_args!("shard {shard} is killed"));
                self.shards[shard].is_alive = false;
                (self.shards[shard].job, self.shards[shard].restoring) = (None, None);
                self.shards[shard].held.clear();
            }
            3..=5 => self.revive(shard),
            6 => {
                self.say(format_args!("shard {shard} is stopped until {until}"));
                self.shards[shard].stopped_until = until;
            }
            7 => {
                self.say(format_args!("shard {shard} is cut off until {until}"));
                self.shards[shard].cut_until = until;
            }
            8 => {
                self.say(format_args!("the registry is away until {until}"));
                self.registry_away_until = until;
            }
            _ => {
                // From its state file, and as etcd has it.
                let is_hint = self.random.bool();
                self.say(format_args!("the registry is started anew"));
                let (kept, lease) = (self.registry.kept(self.time()), Duration::from_secs(10));
                self.registry = RegistryCore::of(&kept, self.time(), lease, is_hint);
            }
        }
    }
}
