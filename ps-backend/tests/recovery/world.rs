//! Shards, a job's lives, its store and the registry, and what befalls them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use libmodelio::registry::table::RegistryCore;
use libmodelio::vocabulary::block_map::BlockMap;
use libmodelio::vocabulary::ids::{Epoch, Generation, ShardId, Version};
use libmodelio::wire::{
    Fate, HeldPartition, Lineage, ModelRecord, RegistryAnswer, RegistryRequest, ShardRecord,
};
use ps_backend::core::JobRecord;
use ps_backend::losses::LossWatch;

use super::content::Content;
use super::counts::Counts;
use super::job::{Commit, Job};
use super::learners::Learner;
use super::mounts::Shown;
use super::promises::Promises;
use super::restoring::Restoring;
use super::store::Store;

pub(super) const MODEL: &str = "m";
const LEASE_MS: u32 = 10_000;
const TICK: u64 = 100;
/// The registry does not answer, or refuses.
pub(super) enum Unanswered {
    Silence,
    Refused,
}

pub(super) struct Shard {
    pub(super) number: ShardId,
    pub(super) is_alive: bool,
    /// It does nothing until then.
    pub(super) stopped_until: u64,
    /// Neither the registry nor other shards hear it until then.
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
    pub(super) store: Store,
    /// Numbers of lives and snapshots.
    generations: u64,
    pub(super) learners: Vec<Learner>,
    /// Commits that are under way, and when they arrive.
    pub(super) flying: Vec<(u64, Commit)>,
    pub(super) promises: Promises,
    /// Whether newer weights of mounts count at a restoration, and what mounts show.
    takes_newest: bool,
    pub(super) mounts: Vec<Shown>,
    pub(super) counts: Counts,
}

pub(super) fn address(shard: usize) -> String {
    format!("node{shard}:7070")
}

impl World {
    pub(super) fn new(seed: u64, says: bool) -> World {
        let mut random = fastrand::Rng::with_seed(seed);
        let shards = (0..random.usize(1..5)).map(|_| Shard::new()).collect();
        let learners = (0..random.usize(1..4)).map(|_| Learner::default()).collect();
        World {
            random,
            now: 1000,
            says,
            is_well: true,
            registry: RegistryCore::new(),
            registry_away_until: 0,
            shards,
            store: Store::new(),
            generations: 0,
            learners,
            flying: Vec::new(),
            promises: Promises::default(),
            takes_newest: seed % 2 == 1,
            mounts: vec![Shown::default(); 3],
            counts: Counts::default(),
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
        while self.counts.durable == 0 {
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
        let before: Vec<u64> = self.learners.iter().map(|learner| learner.acknowledged).collect();
        for _ in 0..3000 {
            self.tick();
            // Each of them is told something new.
            if self.learners.iter().zip(&before).all(|(learner, before)| learner.acknowledged > before + 2) {
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
        let begun = (self.store.begun(), Content::default());
        self.begin_job(0, (generation, record.lineage), owners, begun);
    }

    /// The record of a life on these shards.
    pub(super) fn record(
        &self,
        generation: Generation,
        owners: &[usize],
        lineage: Option<Lineage>,
    ) -> ModelRecord {
        let numbers: Vec<ShardId> = owners.iter().map(|shard| self.shards[*shard].number).collect();
        let layout = &self.store.layout;
        let map = BlockMap::striped(layout.blocks(), &numbers).unwrap();
        let controls = self.store.controls.clone();
        let record =
            ModelRecord::new(MODEL, generation, layout, BTreeMap::new(), &map, numbers[0], controls).unwrap();
        ModelRecord { lineage: lineage.unwrap_or(record.lineage.clone()), ..record }
    }

    pub(super) fn begin_job(
        &mut self,
        shard: usize,
        of: (Generation, Lineage),
        owners: Vec<usize>,
        (record, content): (JobRecord, Content),
    ) {
        self.promises.shows(record.version.0, &content);
        self.shards[shard].job = Some(Job::new(&self.store, of, owners, (record, content)));
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
        self.tell(self.is_cut(shard), request, payload)
    }

    /// Whether a shard is cut off from the registry and from other shards.
    pub(super) fn is_cut(&self, shard: usize) -> bool {
        self.shards[shard].cut_until > self.now
    }

    /// A shard or a client asks the registry.
    pub(super) fn tell(
        &mut self,
        is_cut: bool,
        request: &RegistryRequest,
        payload: &[u8],
    ) -> Result<(RegistryAnswer, Vec<u8>), Unanswered> {
        if is_cut || self.registry_away_until > self.now || self.is_lost() {
            return Err(Unanswered::Silence);
        }
        let answer = self.registry.handle(request, payload, self.time());
        if self.is_lost() {
            return Err(Unanswered::Silence);
        }
        let answer = answer.map_err(|_| Unanswered::Refused)?;
        Ok((answer.message, answer.payload.map(|bytes| bytes.to_vec()).unwrap_or_default()))
    }

    /// Whether a message is lost.
    pub(super) fn is_lost(&mut self) -> bool {
        !self.is_well && self.random.u8(..) < 6
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
                self.counts.old_blocks += 1;
                self.drop_life(shard, generation);
            }
        }
    }

    pub(super) fn drop_life(&mut self, shard: usize, generation: Generation) {
        self.shards[shard].held.remove(&generation);
        self.shards[shard].job.take_if(|job| job.generation == generation);
    }

    /// The coordinator tells the registry, and calls its newest snapshot durable if that has answered.
    pub(super) fn keep(&mut self, shard: usize) {
        let Some(job) = &self.shards[shard].job else { return };
        if job.saved.is_none() && job.lineage.store.is_empty() {
            return;
        }
        let (generation, reserved) = (job.generation, Lineage::reserved_for(Version(job.version())));
        let reserved = reserved.max(job.lineage.reserved);
        let (model, store, newest) = (MODEL.to_owned(), "/s".to_owned(), self.takes_newest);
        let request = RegistryRequest::Keep { model, generation, epoch: Epoch(1), reserved, store, newest };
        let kept = self.ask(shard, &request, &[]);
        if let Err(Unanswered::Refused) = kept {
            self.counts.refused_lives += 1;
        }
        if kept.is_err() {
            return;
        }
        let now = self.time();
        let Some(job) = &mut self.shards[shard].job else { return };
        (job.lineage.reserved, job.lineage.store) = (reserved, "/s".to_owned());
        if let Some((version, content, is_durable)) = &mut job.saved
            && !std::mem::replace(is_durable, true)
        {
            let version = *version;
            self.promises.is_durable(generation, content);
            self.counts.durable += 1;
            self.say(format_args!("version {version} of life {generation} is durable"));
        }
        let Some(job) = &mut self.shards[shard].job else { return };
        let answers = job.reserve(now);
        self.answer(shard, answers);
    }

    fn tick(&mut self) {
        self.now += TICK;
        self.deliver();
        (0..self.learners.len()).for_each(|at| self.learn(at));
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
            self.counts.rivals += u64::from(self.shards.iter().any(|of| of.restoring.is_some()));
            self.shards[shard].restoring = Some(Restoring::new(lost.generation));
        }
    }

    /// Clients hear of a life.
    pub(super) fn restored(&mut self, generation: Generation, passed_over: bool) {
        for of in &mut self.shards {
            of.job.iter_mut().filter(|job| job.generation == generation).for_each(|job| job.is_known = true);
        }
        self.counts.restored += 1;
        self.counts.passed_over += u64::from(passed_over);
        self.say(format_args!("life {generation} begins"));
    }

    pub(super) fn is_well(&self) -> bool {
        self.is_well
    }

    /// A restoration has ended.
    pub(super) fn restoration_ends(&mut self, shard: usize, is_restored: bool) {
        let now = self.time();
        self.shards[shard].restoring = None;
        self.shards[shard].watch.ended(MODEL, is_restored, now);
    }

    /// The job goes on with a version, or with a snapshot.
    fn work(&mut self, shard: usize) {
        let (now, random) = (self.time(), self.random.u8(0..8));
        let Some(job) = &self.shards[shard].job else { return };
        let is_there = |of: &usize| self.runs(*of) && self.shards[*of].held.contains(&job.generation);
        if !job.is_known || !job.owners.iter().all(is_there) {
            return;
        }
        match random {
            0..=2 => {
                let jump = if self.random.u8(0..4) == 0 { self.random.u64(0..300_000) } else { 0 };
                let Some(job) = &mut self.shards[shard].job else { return };
                if let Some(answers) = job.make(jump, now) {
                    self.promises.shows(job.version(), &job.content);
                    self.answer(shard, answers);
                }
            }
            3 => self.save(shard),
            4 => self.pull(shard),
            _ => {}
        }
    }

    pub(super) fn kill(&mut self, shard: usize) {
        self.say(format_args!("shard {shard} is killed"));
        let of = &mut self.shards[shard];
        of.is_alive = false;
        (of.job, of.restoring) = (None, None);
        of.held.clear();
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
            0..=2 => self.kill(shard),
            3..=5 => self.revive(shard),
            6 => {
                let until = until + 10_000;
                self.say(format_args!("shard {shard} is stopped until {until}"));
                self.shards[shard].stopped_until = until;
            }
            7 => {
                let until = until + 10_000;
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
