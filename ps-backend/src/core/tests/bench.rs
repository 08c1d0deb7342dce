//! Coordinator, partition and clients in one, without bytes: the core's actions are carried out on sets of
//! contributions instead of numbers. So every version can be asked for its contributions, and the invariants
//! are checked at every step.

use libmodelio::vocabulary::groups::Groups;
use libmodelio::vocabulary::groups::TensorReducers;
use libmodelio::vocabulary::reducer::Reducer;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Add;
use std::sync::Arc;

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::groups::{AveragedMark, Contents, GroupId};
use libmodelio::vocabulary::ids::ClientId;
use libmodelio::vocabulary::ids::{BlockId, Incarnation, LearnerId, Step, Version};
use libmodelio::vocabulary::layout::DType;
use libmodelio::vocabulary::members::{Attached, LeaveReason, LifeSign};
use libmodelio::vocabulary::norm::{ExactSum, Norm, Quantity, Squares, TensorNorms, TensorSquares};
use libmodelio::vocabulary::reducer;
use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use crate::reducers;

pub(super) const BLOCKS: u32 = 4;

/// Tensors of two blocks each: `head` and `body`.
pub(super) const TENSORS: usize = 2;

/// The tensor of a block.
fn tensor_of(block: u32) -> usize {
    block as usize / 2
}

/// A contribution, under a name of its own.
pub(super) type Uid = u32;

/// The payload of a contribution, or new weights, of this number.
pub(super) fn payload(uid: Uid) -> Source {
    Source::of_contribution(ClientId(0), Step(uid.into()))
}

/// The number of a contribution's payload.
pub(super) fn uid(contribution: &Contribution) -> Uid {
    Uid::try_from(contribution.source.name).unwrap()
}
pub(super) type Reply = Result<(), ShardError>;
type Content = Vec<Uid>;

#[derive(Clone, Debug, Default)]
pub(super) struct Record {
    pub sent: BTreeSet<u32>,
    pub steady: bool,
    /// Its commit was answered with success.
    pub taken: bool,
    /// A commit of it was sent.
    pub offered: bool,
    pub learner: Option<LearnerId>,
}

#[derive(Debug)]
struct Request {
    deadline: Now,
    /// For a commit.
    uid: Option<Uid>,
}

#[derive(Debug)]
pub(super) struct Bench {
    pub core: JobCore,
    pub now: Now,
    next_ticket: Ticket,
    next_uid: Uid,
    requests: BTreeMap<Ticket, Request>,
    pub replies: BTreeMap<Ticket, Reply>,
    pub records: BTreeMap<Uid, Record>,
    /// Contributions that are being accumulated.
    pub accumulations: Vec<Vec<Arc<Contribution>>>,
    /// The accumulator is measured after that.
    measures: Option<(Quantity, reducer::Step)>,
    /// The norms of tensors, if they were measured for the coming version.
    norms: Option<(usize, Vec<TensorNorms>)>,
    pub running: Option<Arc<JobPlan>>,
    pub accumulator: BTreeMap<u32, Content>,
    /// Contributions of which a block has come early, by block.
    back: BTreeMap<u32, BTreeSet<Uid>>,
    pub has_buffer: bool,
    /// The version that a commit names.
    base: Option<Version>,
    /// The averaged tensors that a commit names, if not those of now.
    begun_with: Option<AveragedMark>,
    /// The contributions that each version added, block by block.
    pub versions: Vec<BTreeMap<u32, Content>>,
    /// The reducer of each tensor whose state there is.
    state_of: TensorReducers,
    /// With which reducer each tensor has changed last.
    last_reducers: [Option<Reducer>; TENSORS],
    /// Versions that have changed each tensor since the state was zero.
    steps: [u64; TENSORS],
    /// The steps of the tensors of blocks that came early, and the factors.
    early: BTreeMap<u32, (u64, Option<f64>)>,
    /// The provisional plan under way.
    pub provisional: Option<Arc<JobPlan>>,
    pub left: Vec<(LearnerId, LeaveReason)>,
    accumulated: BTreeSet<Uid>,
    /// Contributions whose payload was lost.
    gone: BTreeSet<Uid>,
}

pub(super) fn blocks(of: impl IntoIterator<Item = u32>) -> FixedBitSet {
    let mut set = FixedBitSet::with_capacity(BLOCKS as usize);
    set.extend(of.into_iter().map(|block| block as usize));
    set
}

impl Bench {
    pub(super) fn new(settings: &[(&str, &str)]) -> Bench {
        let controls = Controls::default().with_all(settings.iter().copied()).unwrap();
        Bench {
            state_of: TensorReducers::new(TENSORS, controls.reducer, &Groups::default()),
            core: JobCore::new(BLOCKS, TENSORS, controls),
            now: Now::ZERO,
            next_ticket: 1,
            next_uid: 1,
            requests: BTreeMap::new(),
            replies: BTreeMap::new(),
            records: BTreeMap::new(),
            accumulations: Vec::new(),
            measures: None,
            norms: None,
            running: None,
            accumulator: BTreeMap::new(),
            back: BTreeMap::new(),
            has_buffer: true,
            base: None,
            begun_with: None,
            versions: vec![BTreeMap::new()],
            last_reducers: [None; TENSORS],
            steps: [0; TENSORS],
            early: BTreeMap::new(),
            provisional: None,
            left: Vec::new(),
            accumulated: BTreeSet::new(),
            gone: BTreeSet::new(),
        }
    }

    /// Its core begins plans when their last contribution has a whole block, as in one process.
    pub(super) fn in_process(self) -> Bench {
        Bench { core: self.core.with_provisional_plans(), ..self }
    }

    /// Such plans give way, as on a network.
    pub(super) fn on_a_network(self) -> Bench {
        Bench { core: self.core.with_provisional_plans().of_staged_blocks(), ..self }
    }

    /// Contribution `uid` of `learner` has a whole block; whether that is reduced early.
    pub(super) fn comes(&mut self, learner: LearnerId, uid: Uid, block: u32) -> bool {
        let Some(step) = self.core.member(learner, self.now).map(|member| member.step.next()) else {
            return false;
        };
        self.call(|core, now, actions| core.is_whole(learner, step, now, actions));
        let open = self.provisional.as_ref().and_then(|plan| plan.provisional.as_ref());
        // A block of a later step is not part of the plan.
        let Some(open) = open.filter(|_| self.core.writes_provisionally(learner)) else { return false };
        let Some(Work::Reduce { tensors, factors, .. }) = self.provisional.as_ref().map(|plan| &plan.work)
        else {
            return false;
        };
        let tensor = tensor_of(block);
        let early = (tensors.of(tensor), factors.of(tensor));
        let came = self.back.entry(block).or_default();
        came.insert(uid);
        // When all have come that may come, the block is computed.
        if came.len() == open.len() {
            self.early.insert(block, early);
        }
        true
    }

    /// A contribution of `learner` is open.
    pub(super) fn open(&mut self, learner: LearnerId) -> Result<Opening, ShardError> {
        self.core.open(learner, self.now)
    }

    pub(super) fn uid(&mut self) -> Uid {
        self.next_uid += 1;
        self.records.insert(self.next_uid, Record::default());
        self.next_uid
    }

    fn ticket(&mut self, timeout: u64, uid: Option<Uid>) -> (Ticket, Now) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let deadline = self.now + Now::from_millis(timeout);
        self.requests.insert(ticket, Request { deadline, uid });
        (ticket, deadline)
    }

    pub(super) fn call<R>(&mut self, f: impl FnOnce(&mut JobCore, Now, &mut Vec<Action>) -> R) -> R {
        let mut actions = Vec::new();
        let result = f(&mut self.core, self.now, &mut actions);
        for tensor in self.state_of.differing(self.core.recipe.state_of()).ones() {
            (self.steps[tensor], self.last_reducers[tensor]) = (0, None);
        }
        self.state_of = self.core.recipe.state_of().clone();
        for action in actions {
            self.act(action);
        }
        result
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Reply(ticket, reply) => {
                let request = self.requests.remove(&ticket).expect("a ticket is answered once");
                if let (Ok(()), Some(uid)) = (&reply, request.uid) {
                    self.record(uid).taken = true;
                }
                self.replies.insert(ticket, reply);
            }
            Action::Begin(plan) if matches!(plan.work, Work::Add { .. }) => {
                let contributions = plan.inputs.clone();
                assert!(self.accumulations.is_empty(), "one accumulation at a time");
                assert!(self.running.is_none() && self.provisional.is_none());
                assert!(!self.core.controls().deterministic);
                assert!(!contributions.is_empty());
                assert!(contributions.is_sorted_by_key(|contribution| contribution.learner));
                self.accumulations.push(contributions);
            }
            Action::Begin(plan) if matches!(plan.work, Work::Measure { .. }) => {
                let Work::Measure { step, groups, quantity, .. } = &plan.work else { panic!() };
                let (contributions, step, quantity) = (plan.inputs.clone(), step.clone(), *quantity);
                assert!(self.accumulations.is_empty(), "one accumulation at a time");
                assert!(self.running.is_none() && self.provisional.is_none() && self.has_buffer);
                let clips = step.reducer.measures(&step.hyper);
                match quantity {
                    Quantity::Gradient => assert!(clips && step.norm.is_none()),
                    Quantity::Tensors => {
                        assert!(groups.are_layerwise(step.reducer) && clips == step.norm.is_some());
                        assert!(!clips || contributions.is_empty(), "the gradient was measured without them");
                    }
                }
                assert!(contributions.is_sorted_by_key(|contribution| contribution.learner));
                self.accumulations.push(contributions);
                self.measures = Some((quantity, step));
            }
            Action::Begin(plan) if plan.provisional.is_some() => {
                assert!(self.running.is_none() && self.provisional.is_none());
                assert!(self.has_buffer && self.accumulations.is_empty());
                // Blocks that plans before it have left mean nothing.
                self.back.clear();
                self.early.clear();
                self.provisional = Some(plan);
            }
            Action::Seal(plan) => {
                let before = self.provisional.take().expect("a provisional plan is under way");
                assert!(self.running.is_none());
                let (Work::Reduce { step, .. }, Work::Reduce { step: early, .. }) =
                    (&plan.work, &before.work)
                else {
                    panic!("{plan:?} after {before:?}")
                };
                assert_eq!((step.reducer, &step.hyper), (early.reducer, &early.hyper));
                assert_eq!(step.contributions, early.contributions);
                // What came early must be part of the plan's result, and nothing else can be part of a block that is
                // computed.
                let open = before.provisional.as_ref().map_or(0, BTreeSet::len);
                for (block, came) in std::mem::take(&mut self.back) {
                    let sum: BTreeSet<Uid> = self.sum(&plan, block).into_iter().collect();
                    assert!(came.is_subset(&sum), "block {block}: {came:?} came, the sum is {sum:?}");
                    let known: BTreeSet<Uid> = self.sum(&before, block).into_iter().collect();
                    let is_computed = came.len() == open;
                    assert!(!is_computed || sum == &known | &came, "block {block} is computed already");
                }
                self.running = Some(plan);
            }
            Action::Drop => {
                self.provisional.take().expect("a provisional plan is under way");
                self.back.clear();
                self.early.clear();
            }
            Action::Begin(plan) => {
                assert!(self.running.is_none() && self.provisional.is_none());
                if let Work::Reduce { step, groups, factors, .. } = &plan.work {
                    assert!(self.has_buffer && self.accumulations.is_empty());
                    let is_measured = step.reducer.measures(&step.hyper);
                    let blocks = (0..BLOCKS).flat_map(|block| self.sum(&plan, block));
                    let norm = Norm::new(step.scale() * blocks.map(f64::from).fold(0.0, Add::add).sqrt());
                    assert_eq!(step.norm, is_measured.then_some(norm), "{step:?}");
                    let is_layerwise = groups.are_layerwise(step.reducer);
                    let norms = self.norms.take_if(|_| is_layerwise);
                    let runs: Vec<_> = groups.runs().iter().map(|(count, group)| (*count, *group)).collect();
                    let group_of = |tensor: u32| match &runs[..] {
                        [(count, first), ..] if tensor < *count => *first,
                        [_, (_, second)] => *second,
                        _ => GroupId::MODEL,
                    };
                    let averaged: Vec<usize> = groups.averaged(step.reducer).flatten().collect();
                    let of_version =
                        norms.as_ref().is_none_or(|(versions, _)| *versions == self.versions.len());
                    assert!(of_version, "the norms are those of other weights");
                    for (norms, tensor) in norms.iter().flat_map(|(_, norms)| norms).zip(0..) {
                        let step = groups.steps(step).of_group(group_of(tensor)).clone();
                        let factor = step.reducer.is_layerwise().then(|| reducers::factor(&step, *norms));
                        let is_averaged = averaged.contains(&(tensor as usize));
                        assert!(is_averaged || factors.of(tensor as usize) == factor, "{step:?}");
                    }
                    assert_eq!(norms.is_some(), is_layerwise);
                    assert!(is_layerwise || !averaged.is_empty() || factors.runs().is_empty());
                }
                self.running = Some(plan);
            }
            Action::Published(version) => {
                assert_eq!(version.0 as usize, self.versions.len() - 1);
                assert_eq!(version, self.core.version());
            }
            Action::Left { learner, reason } => self.left.push((learner, reason)),
        }
    }

    fn record(&mut self, uid: Uid) -> &mut Record {
        self.records.get_mut(&uid).unwrap()
    }

    /// In which version each contribution is.
    pub(super) fn versions_of(&self, uids: &[Uid]) -> Vec<Option<Version>> {
        let find = |uid: &Uid| self.versions.iter().position(|v| v.values().flatten().any(|u| u == uid));
        uids.iter().map(|uid| find(uid).map(|v| Version(v as u64))).collect()
    }

    pub(super) fn join(&mut self, name: &str) -> Result<(LearnerId, Incarnation), ShardError> {
        self.call(|core, now, actions| core.join(name, now, actions))
    }

    /// A process of each is known to use it.
    pub(super) fn attach(&mut self, ids: &[Id]) {
        ids.iter().for_each(|id| self.core.touch(id.0, LifeSign::Process(Attached::Yes), self.now));
    }

    pub(super) fn leave(&mut self, learner: LearnerId) {
        self.call(|core, now, actions| core.leave(learner, LeaveReason::Asked, now, actions)).unwrap();
    }

    pub(super) fn abort(&mut self, learner: LearnerId) {
        self.call(|core, now, actions| core.abort(learner, now, actions)).unwrap();
    }

    /// The learner takes back its last commit, which the running plan reads, if one runs.
    pub(super) fn recall(&mut self, learner: LearnerId) {
        let reads = self.running.is_some();
        self.void_plan();
        let why = ShardError::Interrupted;
        let void = self.call(|core, now, actions| core.recall(learner, why, now, actions));
        assert_eq!(void, reads);
    }

    pub(super) fn withdraw(&mut self, learner: LearnerId) {
        self.call(|core, now, actions| core.withdraw(learner, now, actions)).unwrap();
    }

    pub(super) fn set(&mut self, name: &str, value: &str) {
        let tensors = ["head", "body"].map(|name| (name, DType::F32));
        if let Ok(controls) = self.core.controls().with(name, value)
            && let Ok((frozen, groups)) = controls.of_tensors(tensors.into_iter())
            && self.core.may_set(&controls, &frozen, &groups).is_ok()
        {
            self.core.set_tensors(frozen, groups);
            self.call(|core, now, actions| core.set_controls(controls, now, actions));
        }
    }

    pub(super) fn give_buffer(&mut self) {
        self.has_buffer = true;
        self.call(|core, now, actions| core.set_buffer_ready(true, now, actions));
    }

    pub(super) fn tick(&mut self, millis: u64) {
        self.now += Now::from_millis(millis);
        self.call(|core, now, actions| core.tick(now, actions));
        let late = self.requests.values().filter(|request| request.deadline <= self.now).count();
        assert_eq!(late, 0, "requests past their deadline");
        let next = self.core.next_deadline();
        assert!(
            next.is_none_or(|at| at > self.now),
            "another tick would do nothing: {next:?} at {:?}",
            self.now
        );
    }

    fn sum(&self, plan: &JobPlan, block: u32) -> Content {
        let mut content = self.accumulator.get(&block).cloned().unwrap_or_default();
        for input in plan.inputs.iter().filter(|input| input.sent.contains(block as usize)) {
            let record = &self.records[&uid(input)];
            assert!(record.steady || !record.taken, "memory is read that was given back: {}", uid(input));
            content.push(uid(input));
        }
        content
    }

    /// What the accumulation under way measures.
    pub(super) fn measured(&self) -> Option<Quantity> {
        self.measures.as_ref().map(|(quantity, _)| *quantity)
    }

    pub(super) fn accumulate_done(&mut self, ok: bool) {
        let Some(contributions) = self.accumulations.pop() else { return };
        let measures = self.measures.take();
        for contribution in &contributions {
            let record = &self.records[&uid(contribution)];
            assert!(record.steady || !record.taken, "memory is accumulated that was given back");
        }
        if !ok {
            // Every other one is to blame.
            let error = ShardError::OutOfMemory("test".into());
            let blamed = contributions.iter().step_by(2).filter(|c| !c.steady);
            let failed = blamed.map(|c| (c.learner, error.clone())).collect();
            return self.call(|core, now, actions| core.accumulate_failed(failed, now, actions));
        }
        for contribution in &contributions {
            assert!(!self.gone.contains(&uid(contribution)), "what is lost is accumulated");
            for block in contribution.sent.ones() {
                self.accumulator.entry(block as u32).or_default().push(uid(contribution));
            }
            self.accumulated.insert(uid(contribution));
        }
        let learners: Vec<_> = contributions.iter().map(|contribution| contribution.learner).collect();
        // A contribution's number stands for the squares of each of its blocks.
        let sum = |blocks: &[&Content]| {
            let mut sum = ExactSum::default();
            blocks.iter().copied().flatten().for_each(|uid| sum.add(f64::from(*uid)));
            sum
        };
        let squares = measures.map(|(quantity, _)| match quantity {
            Quantity::Gradient => Squares::Gradient(sum(&self.accumulator.values().collect::<Vec<_>>())),
            Quantity::Tensors => Squares::Tensors(
                (0..TENSORS)
                    .map(|tensor| {
                        let of = self.accumulator.iter().filter(|(block, _)| tensor_of(**block) == tensor);
                        let mut weights = ExactSum::default();
                        weights.add(9.0);
                        let direction = sum(&of.map(|(_, content)| content).collect::<Vec<_>>());
                        TensorSquares { weights, direction }
                    })
                    .collect(),
            ),
        });
        if let Some(Squares::Tensors(all)) = &squares {
            self.norms = Some((self.versions.len(), all.iter().map(TensorSquares::norms).collect()));
        }
        self.call(|core, now, actions| core.accumulated(&learners, squares.as_ref(), now, actions));
    }

    /// The payloads of these learners are gone, except for those that the shard holds itself.
    pub(super) fn lose(&mut self, learners: &[LearnerId]) {
        let needs = |of: &[Arc<Contribution>]| {
            of.iter().any(|c| !self.records[&uid(c)].steady && learners.contains(&c.learner))
        };
        let plan_is_void = self.running.as_ref().is_some_and(|plan| needs(&plan.inputs));
        // What was committed to a provisional plan is being read.
        let is_read = |committed: &Committed| {
            self.core.is_read_provisionally(committed) && learners.contains(&committed.contribution.learner)
        };
        let early_is_void = self.provisional.is_some() && self.core.committed.iter().any(is_read);
        let accumulation_is_void = self.accumulations.iter().any(|contributions| needs(contributions));
        for (&uid, record) in &self.records {
            let learner = record.learner.filter(|learner| learners.contains(learner));
            // Contributions that were taken are in the accumulator, or a version.
            if learner.is_some() && !record.steady && !record.taken && !self.is_in(uid) {
                self.gone.insert(uid);
            }
        }
        if plan_is_void {
            self.void_plan();
        }
        if early_is_void {
            self.provisional = None;
            self.back.clear();
            self.early.clear();
        }
        if accumulation_is_void {
            self.accumulations.clear();
            self.measures = None;
        }
        let void = self.call(|core, now, actions| core.lost(learners, now, actions));
        assert_eq!(void, plan_is_void || early_is_void || accumulation_is_void);
        assert!(learners.iter().all(|&learner| !self.core.members.contains_key(&learner)));
    }

    /// Whether the contribution can no longer be lost.
    pub(super) fn is_in(&self, uid: Uid) -> bool {
        self.accumulated.contains(&uid) || self.versions_of(&[uid]) != [None]
    }

    /// The running plan is not done.
    fn void_plan(&mut self) {
        if self.running.take().is_some() {
            self.back.clear();
            self.early.clear();
        }
    }

    /// The running plan is done; `buffer` says whether the version after it has a buffer at once.
    pub(super) fn reduce_done(&mut self, buffer: bool) {
        let Some(plan) = self.running.take() else { return };
        let mut version = BTreeMap::new();
        if let Work::Reduce { step, tensors, groups, factors, fresh_state, .. } = &plan.work {
            self.has_buffer = buffer;
            for block in 0..BLOCKS {
                version.insert(block, self.sum(&plan, block));
            }
            self.check_whole(&version, step.contributions);
            if *fresh_state {
                self.steps = [0; TENSORS];
                self.last_reducers = [None; TENSORS];
            }
            let reducers = TensorReducers::new(TENSORS, step.reducer, groups);
            assert_eq!(reducers, self.state_of);
            let is_written =
                |of: usize| version.iter().any(|(&b, uids)| tensor_of(b) == of && !uids.is_empty());
            for (tensor, count) in self.steps.iter_mut().enumerate() {
                let written = is_written(tensor);
                *count += u64::from(written);
                if written {
                    let before = self.last_reducers[tensor];
                    assert!(
                        before.is_none() || before == reducers.of(tensor),
                        "it goes on with another's state"
                    );
                    self.last_reducers[tensor] = reducers.of(tensor);
                }
                let expected = if written { *count } else { 0 };
                assert_eq!(
                    tensors.of(tensor),
                    expected,
                    "tensor {tensor} of version {}",
                    self.versions.len()
                );
            }
            for (block, early) in std::mem::take(&mut self.early) {
                let tensor = tensor_of(block);
                let sealed = (tensors.of(tensor), factors.of(tensor));
                assert_eq!(early, sealed, "the step and factor of block {block}");
            }
            for tensor in groups.averaged(step.reducer).flatten().filter(|&tensor| is_written(tensor)) {
                let of_tensor = version.iter().filter(|(block, _)| tensor_of(**block) == tensor);
                let writers: BTreeSet<Uid> = of_tensor.flat_map(|(_, uids)| uids).copied().collect();
                let factor = factors.of(tensor).unwrap_or(1.0 / f64::from(step.contributions));
                assert_eq!(
                    factor,
                    1.0 / writers.len() as f64,
                    "tensor {tensor} is the mean of what was written"
                );
            }
            self.accumulator.clear();
        }
        self.versions.push(version);
        let ready = self.has_buffer;
        self.call(|core, now, actions| core.reduced(ready, now, actions));
    }

    /// The running plan is done, and this commit is answered.
    #[track_caller]
    pub(super) fn answers(&mut self, ticket: Ticket) {
        self.reduce_done(true);
        assert!(ok(self, ticket));
    }

    /// The running plan is done, and its version is the first to have these contributions.
    #[track_caller]
    pub(super) fn makes(&mut self, version: u64, of: &[Uid]) {
        self.reduce_done(true);
        assert_eq!(self.versions_of(of), vec![Some(Version(version)); of.len()]);
    }

    /// The running plan comes upon NaN in the first contribution whose commit can be taken back; false when there is
    /// none.
    pub(super) fn reduce_refused(&mut self) -> bool {
        let Some(plan) = &self.running else { return false };
        let Some(bad) = plan.inputs.iter().find(|input| !self.records[&uid(input)].steady) else {
            return false;
        };
        let bad = vec![(bad.learner, ShardError::NonFinite(BlockId(0)))];
        self.void_plan();
        self.call(|core, now, actions| core.refused(bad, now, actions));
        true
    }

    /// Every contribution is in with all its blocks, once, and was in no version before.
    fn check_whole(&self, version: &BTreeMap<u32, Content>, contributions: u32) {
        let uids: BTreeSet<Uid> = version.values().flatten().copied().collect();
        let mut learners = BTreeSet::new();
        for &uid in &uids {
            assert_ne!(uid, Uid::MAX, "a refused block is in {version:?}");
            let record = &self.records[&uid];
            assert!(record.offered, "{uid} was never committed");
            assert!(!self.gone.contains(&uid), "{uid} was lost");
            assert_eq!(self.versions_of(&[uid]), [None], "{uid} is in two versions");
            assert!(learners.insert(record.learner), "two contributions of a learner: {version:?}");
            for (block, content) in version {
                let times = content.iter().filter(|&&u| u == uid).count();
                assert_eq!(
                    times,
                    usize::from(record.sent.contains(block)),
                    "{uid}, block {block}: {version:?}"
                );
            }
        }
        // Contributions without a block are in, too.
        assert!(contributions as usize >= uids.len());
    }

    /// The mark of the tensors that are averaged now.
    pub(super) fn averaged(&self) -> AveragedMark {
        let (reducer, _, of_tensors) = self.core.params();
        of_tensors.averaged(reducer)
    }

    /// A contribution that was begun with the tensors averaged that are averaged now.
    pub(super) fn commit(
        &mut self,
        learner: LearnerId,
        step: Step,
        uid: Uid,
        sent: FixedBitSet,
        steady: bool,
        timeout: u64,
    ) -> Ticket {
        let (ticket, deadline) = self.ticket(timeout, Some(uid));
        let record = self.record(uid);
        record.sent = sent.ones().map(|block| block as u32).collect();
        (record.steady, record.offered, record.learner) = (steady, true, Some(learner));
        let mut tensors = FixedBitSet::with_capacity(TENSORS);
        tensors.extend(sent.ones().map(|block| tensor_of(block as u32)));
        let contribution = Contribution {
            learner,
            sent,
            tensors,
            partly: Some(Default::default()),
            contents: Contents {
                averaged: self.begun_with.unwrap_or_else(|| self.averaged()),
                ..Contents::default()
            },
            weight: Default::default(),
            base: self.base,
            source: payload(uid),
            steady,
            lent: false,
        };
        self.call(|core, now, actions| {
            core.commit(ticket, step, contribution, deadline, now, actions);
        });
        ticket
    }

    /// Commits a contribution to all blocks that was begun with these tensors averaged.
    pub(super) fn commit_begun_with(
        &mut self,
        averaged: AveragedMark,
        learner: LearnerId,
        step: Step,
        uid: Uid,
    ) -> Ticket {
        self.begun_with = Some(averaged);
        let ticket = self.commit(learner, step, uid, blocks(0..BLOCKS), true, 1_000);
        self.begun_with = None;
        ticket
    }

    /// Commits a contribution to all blocks, from a learner that had opened this version last.
    pub(super) fn commit_from(&mut self, learner: LearnerId, base: Option<u64>) -> Ticket {
        self.base = base.map(Version);
        let (step, uid) = (self.open(learner).unwrap().step, self.uid());
        let ticket = self.commit(learner, step, uid, blocks(0..BLOCKS), true, 1_000);
        self.base = None;
        ticket
    }

    pub(super) fn assign(&mut self, timeout: u64) -> Ticket {
        let (ticket, deadline) = self.ticket(timeout, None);
        self.call(|core, now, actions| core.assign(ticket, payload(0), deadline, now, actions));
        ticket
    }

    /// The write of `weights` under way has failed.
    pub(super) fn assign_failed(&mut self) {
        self.running = None;
        self.call(|core, now, actions| core.assign_failed(ShardError::Unreachable, now, actions));
    }

    pub(super) fn hold(&mut self) {
        self.call(|core, now, actions| core.hold(now, actions));
    }

    pub(super) fn release(&mut self) {
        self.call(|core, now, actions| core.release(now, actions));
    }

    pub(super) fn is_waiting(&self, ticket: Ticket) -> bool {
        self.requests.contains_key(&ticket)
    }

    /// Lets all work under way end well.
    pub(super) fn finish_work(&mut self) {
        while !self.accumulations.is_empty() || self.running.is_some() || !self.has_buffer {
            self.accumulate_done(true);
            self.reduce_done(true);
            if !self.has_buffer {
                self.give_buffer();
            }
        }
    }
}

/// A learner.
pub(super) type Id = (LearnerId, Incarnation);

/// A synchronous job of `learners`, in which `names` have joined.
pub(super) fn job(learners: &str, names: &[&str]) -> (Bench, Vec<Id>) {
    joined(Bench::new(&[("learners", learners)]), names)
}

/// A job of all of these.
pub(super) fn formed(settings: &[(&str, &str)], names: &[&str]) -> (Bench, Vec<Id>) {
    let learners = [("learners", &*names.len().to_string())];
    joined(Bench::new(&[&learners, settings].concat()), names)
}

/// The same, which waits for this long before it accumulates.
pub(super) fn patient(settings: &[(&str, &str)], names: &[&str], millis: u64) -> (Bench, Vec<Id>) {
    let (bench, ids) = formed(settings, names);
    let core = bench.core.with_accumulate_patience(Now::from_millis(millis));
    (Bench { core, ..bench }, ids)
}

/// They join.
pub(super) fn joined(mut bench: Bench, names: &[&str]) -> (Bench, Vec<Id>) {
    let ids = names.iter().map(|name| bench.join(name).unwrap()).collect();
    (bench, ids)
}

/// The same, whose plans begin early.
pub(super) fn early_job(learners: &str, names: &[&str]) -> (Bench, Vec<Id>) {
    let (bench, ids) = job(learners, names);
    (bench.in_process(), ids)
}

/// A new contribution.
pub(super) fn open(bench: &mut Bench, id: Id) -> (Step, Uid) {
    (bench.open(id.0).unwrap().step, bench.uid())
}

/// A contribution to all blocks.
pub(super) fn everything(bench: &mut Bench, id: Id, steady: bool) -> (Uid, Ticket) {
    let (step, uid) = open(bench, id);
    (uid, bench.commit(id.0, step, uid, blocks(0..BLOCKS), steady, 1_000))
}

/// The last contribution that a step waits for, whose plan is done.
pub(super) fn completes(bench: &mut Bench, id: Id) -> (Uid, Ticket) {
    let committed = everything(bench, id, true);
    bench.reduce_done(true);
    committed
}

/// Whether a commit was taken.
pub(super) fn ok(bench: &Bench, ticket: Ticket) -> bool {
    bench.replies.get(&ticket) == Some(&Ok(()))
}
