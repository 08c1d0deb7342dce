//! The history of a run, and whether it was allowed. A run fails by a panic that names the fault.

pub mod sets;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Add;

use libmodelio::vocabulary::controls::{Consistency, NonFinite};
use libmodelio::vocabulary::groups::{GroupId, Groups, TensorReducers};
use libmodelio::vocabulary::ids::{ClientId, Incarnation, LearnerId, PlanId, Step, Version};
use libmodelio::vocabulary::meta::Meta;
use libmodelio::vocabulary::norm::{Norm, TensorFactors, TensorNorms};
use libmodelio::vocabulary::reducer::{self, Reducer};
use libmodelio::wire::{Granted, JobState, Work};
use ps_backend::core::MemberView;

use crate::optimizer::Optimizer;
use crate::settings::{Settings, first_tensor, tensors_of};
use crate::state::{Block, Step as OptimizerStep, mix, squares};
use sets::{PartRecord, Sets};

/// One contribution, or one write of weights.
pub type Uid = u32;

/// What the publisher of new weights says of them.
pub fn meta_of(uid: Uid) -> Meta {
    Meta::try_from(BTreeMap::from([("uid".to_owned(), uid.to_string())])).expect("it is short")
}

/// The value of reads from memory that its owner has taken back.
pub const GARBAGE: Uid = 0;

/// A block of a version: what this version has added, and a digest of all that was added before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    digest: u64,
    added: Vec<Uid>,
}

impl Content {
    /// These contributions were added, and this is all that there is then.
    pub fn of(digest: u64, added: &[Uid]) -> Content {
        Content { digest, added: added.to_vec() }
    }

    /// The block of the next version, with other values.
    pub fn replaced(added: &[Uid]) -> Content {
        Content::of(added.iter().fold(1, |digest, uid| mix(digest, u64::from(*uid))), added)
    }

    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// What this version has added.
    pub fn added(&self) -> &[Uid] {
        &self.added
    }

    /// Whether this version has added it.
    pub fn adds(&self, uid: Uid) -> bool {
        self.added.contains(&uid)
    }

    /// The block of the next version where nothing happens to it.
    pub fn same(&self) -> Content {
        Content { digest: self.digest, added: Vec::new() }
    }
}

/// How a commit has ended for its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Its outcome is unknown.
    Unknown,
    /// It counts.
    Acknowledged,
    /// It does not.
    Refused,
}

#[derive(Debug)]
pub struct Record {
    /// None for a write of weights.
    pub of: Option<(LearnerId, Step)>,
    pub blocks: BTreeSet<u32>,
    /// The tensors that are written. A block that has another one, too, is written in part.
    pub tensors: BTreeSet<usize>,
    /// Where it holds NaN.
    pub bad: Option<u32>,
    /// A commit of it was asked for.
    pub offered: bool,
    /// A commit of it has ended without anybody's knowing whether it counts.
    pub unsure: bool,
    pub outcome: Outcome,
    pub version: Option<Version>,
    /// It is a part of new weights.
    pub part: Option<PartRecord>,
}

impl Record {
    /// Whether all of the block is written.
    pub fn is_whole(&self, block: u32) -> bool {
        tensors_of(block).all(|tensor| self.tensors.contains(&tensor))
    }
}

/// A plan as the coordinator has sent it to shards and clients.
#[derive(Clone, Debug)]
struct Planned {
    /// Contributions to it are still written.
    provisional: bool,
    /// From so many clients.
    open: usize,
    work: Work,
    ordered: bool,
    /// By client, in the order of the plan.
    sources: Vec<ClientId>,
    granted: BTreeMap<ClientId, Granted>,
    /// Learners that took part, and had not committed, when it began.
    missing: usize,
    /// Tensors whose reducers were set again before it, so that their state may begin at zero.
    may_begin_anew: BTreeSet<usize>,
    /// The parts that it publishes, if there are any.
    parts: Vec<Uid>,
}

#[derive(Debug)]
struct Made {
    plan: PlanId,
    partitions: BTreeSet<usize>,
    blocks: Vec<Option<Block>>,
}

/// The record of a run.
#[derive(Debug)]
pub struct History {
    blocks: u32,
    partitions: usize,
    /// NaN is refused.
    pub reject: bool,
    /// Of the whole run, if it is one throughout.
    consistency: Option<Consistency>,
    pub records: BTreeMap<Uid, Record>,
    next_uid: Uid,
    versions: Vec<Made>,
    /// Versions that all partitions have.
    complete: usize,
    plans: BTreeMap<PlanId, Planned>,
    /// For each client, the plans with contributions of its own that count.
    counted: BTreeMap<ClientId, BTreeSet<PlanId>>,
    /// Grants that told a client of such a plan.
    pub told_counted: u64,
    /// Plans whose sums were kept for the coming version, and the partitions that have.
    sealed: BTreeMap<PlanId, BTreeSet<usize>>,
    /// Plans that were begun while their last contribution was written, and sealed.
    pub sealed_plans: u64,
    /// Of these, those that several clients were still writing to when they began.
    pub sealed_together: u64,
    /// Versions whose steps had to know the norms of tensors.
    pub layerwise: u64,
    /// Versions whose steps had to know a norm.
    pub measured: u64,
    /// Versions that have enough contributions with `grace`, and that did not wait for all.
    pub without_the_late: u64,
    /// By plan: whose blocks were sent for it while they were written.
    ahead: BTreeMap<PlanId, BTreeSet<Uid>>,
    /// The numbers of plans that were dropped.
    in_vain: BTreeSet<Uid>,
    /// Of each learner, the last step that is in a version, and which.
    last: BTreeMap<LearnerId, (Step, Version)>,
    names: BTreeMap<(LearnerId, Step), Uid>,
    /// Of each life of a learner, how many steps it has in versions, counted from where the slowest was when it joined.
    paces: BTreeMap<(LearnerId, Incarnation), u64>,
    /// Where that is for one who joins now.
    slowest: u64,
    pub optimizer: Optimizer,
    /// The newest version that each client has shown.
    shown: BTreeMap<ClientId, Version>,
    /// Versions that clients have shown from their own new weights, perhaps before all partitions had them.
    own: Vec<(ClientId, Version, Content)>,
    /// The newest version that the coordinator has announced.
    announced: Version,
    /// What it has said of each version.
    metas: BTreeMap<Version, Meta>,
    /// Blocks of announced versions that clients have shown before all partitions had the version.
    shown_ahead: Vec<(ClientId, Version, usize, Content)>,
    /// Contributions that learners have found in such versions.
    held_ahead: Vec<(Version, Uid)>,
    pub sets: Sets,
}

impl History {
    pub fn new(partitions: usize, settings: &Settings) -> History {
        let blocks = settings.blocks;
        let first = Made {
            plan: PlanId(0),
            partitions: (0..partitions).collect(),
            blocks: vec![Some(Block::default()); blocks as usize],
        };
        History {
            blocks,
            partitions,
            consistency: settings.consistency_throughout(),
            reject: settings.controls.nonfinite == NonFinite::Reject,
            records: BTreeMap::new(),
            next_uid: 1,
            versions: vec![first],
            complete: 1,
            plans: BTreeMap::new(),
            counted: BTreeMap::new(),
            told_counted: 0,
            sealed: BTreeMap::new(),
            sealed_plans: 0,
            sealed_together: 0,
            layerwise: 0,
            measured: 0,
            without_the_late: 0,
            ahead: BTreeMap::new(),
            in_vain: BTreeSet::new(),
            last: BTreeMap::new(),
            names: BTreeMap::new(),
            paces: BTreeMap::new(),
            slowest: 0,
            optimizer: Optimizer::new(settings),
            shown: BTreeMap::new(),
            own: Vec::new(),
            announced: Version(0),
            metas: BTreeMap::new(),
            shown_ahead: Vec::new(),
            held_ahead: Vec::new(),
            sets: Sets::default(),
        }
    }

    pub fn record(&mut self, uid: Uid) -> &mut Record {
        self.records.get_mut(&uid).expect("a known contribution")
    }

    /// A program begins a contribution, or a write of weights.
    pub fn begins(&mut self, of: Option<(LearnerId, Step)>) -> Uid {
        let uid = self.next_uid;
        self.next_uid += 1;
        let record = Record {
            of,
            blocks: BTreeSet::new(),
            tensors: BTreeSet::new(),
            bad: None,
            offered: false,
            unsure: false,
            outcome: Outcome::Unknown,
            version: None,
            part: None,
        };
        self.records.insert(uid, record);
        uid
    }

    /// Its commit is asked for.
    pub fn offered(&mut self, uid: Uid) {
        let record = self.record(uid);
        record.offered = true;
        if let Some(key) = record.of {
            self.names.insert(key, uid);
        }
    }

    pub fn acknowledged(&mut self, uid: Uid) {
        let record = self.record(uid);
        assert_ne!(record.outcome, Outcome::Refused, "contribution {uid} was refused, then acknowledged");
        record.outcome = Outcome::Acknowledged;
    }

    pub fn refused(&mut self, uid: Uid, why: &dyn std::fmt::Display) {
        let record = self.record(uid);
        assert_eq!(record.version, None, "contribution {uid} is in a version, but was refused: {why}");
        assert_ne!(
            record.outcome,
            Outcome::Acknowledged,
            "contribution {uid} was acknowledged, then refused: {why}"
        );
        record.outcome = Outcome::Refused;
    }

    /// The model is on other shards from now on, so many. They have room for what this reducer keeps.
    pub fn moved(&mut self, partitions: usize, reducer: Reducer) {
        assert!(
            self.sealed.is_empty(),
            "sums wait for the coming version, and the model moves: {:?}",
            self.sealed
        );
        assert_eq!(
            self.complete,
            self.versions.len(),
            "the newest version is not complete, and the model moves"
        );
        self.partitions = partitions;
        if reducer.state_slots() == 0 {
            let made = self.versions.last_mut().into_iter().flat_map(|made| &mut made.blocks).flatten();
            for (block, made) in (0..).zip(made) {
                let lost = std::mem::take(&mut made.state.slots);
                for (tensor, lost) in tensors_of(block).zip(lost) {
                    let is_missed = lost != 0 && !self.optimizer.may_lose(tensor);
                    assert!(!is_missed, "the model moves, and leaves behind the state of tensor {tensor}");
                }
            }
        }
    }

    // -- what the coordinator says

    /// The coordinator sends a plan to a shard. So many learners take part in the coming version and have not committed.
    pub fn started(&mut self, plan: &libmodelio::wire::Plan, missing: usize) {
        let open = plan.sources.iter().filter(|source| source.provisional).count();
        let provisional = open > 0;
        let planned = Planned {
            provisional,
            open,
            work: plan.work.clone(),
            ordered: plan.ordered,
            sources: plan.sources.iter().map(|source| source.client).collect(),
            granted: BTreeMap::new(),
            missing,
            may_begin_anew: BTreeSet::new(),
            parts: self.parts_of(plan),
        };
        let known = self.plans.entry(plan.plan).or_insert_with(|| planned.clone());
        if known.provisional && !provisional {
            assert_eq!(known.sources, planned.sources, "{plan:?} is sealed with other clients");
            self.sealed_plans += 1;
            self.sealed_together += u64::from(known.open > 1);
            *known = planned;
        } else {
            assert_eq!(known.provisional, provisional, "{plan:?} was sealed before");
        }
    }

    /// A version of contributions that these plans have made has begun with what its consistency waits for. If its step is
    /// measured, it has begun with the measurement.
    fn check_beginning(&self, version: Version, plans: &[PlanId], contributions: usize) {
        let measures = |plan: &&PlanId| matches!(self.plans[*plan].work, Work::Measure { .. });
        let Some(first) = plans.iter().find(measures).or(plans.last()) else { return };
        let missing = self.plans[first].missing;
        let waits_for = match self.consistency {
            Some(Consistency::Async | Consistency::Ssp(_)) => {
                return assert_eq!(contributions, 1, "version {version}: each contribution makes one");
            }
            Some(Consistency::Sync) => missing + contributions,
            Some(Consistency::Quorum(quorum) | Consistency::Grace(quorum, _)) => {
                (missing + contributions).min(quorum as usize)
            }
            None => return,
        };
        assert!(
            contributions >= waits_for,
            "version {version} has {contributions}, and not those of {missing} learners"
        );
    }

    /// A block of a contribution is sent while that is written.
    pub fn sent_ahead(&mut self, plan: PlanId, uid: Uid) {
        self.ahead.entry(plan).or_default().insert(uid);
    }

    /// The payloads of this plan never count.
    pub fn dropped(&mut self, plan: PlanId) {
        if self.plans.get(&plan).is_some_and(|planned| planned.provisional) {
            self.in_vain.extend(self.ahead.remove(&plan).unwrap_or_default());
        }
    }

    /// The plan counts from now on.
    pub fn counts(&mut self, plan: PlanId) {
        let planned = self.plans.get(&plan).expect("it has begun");
        for client in planned.sources.iter().filter(|_| !matches!(planned.work, Work::Assign { .. })) {
            self.counted.entry(*client).or_default().insert(plan);
        }
    }

    /// The coordinator tells a client which of its plans was the last to count. What coded blocks have lost depends on
    /// it.
    pub fn begins_plan(&mut self, client: ClientId, plan: PlanId, counted: PlanId) {
        let newest = self.counted.get(&client).and_then(|plans| plans.range(..plan).next_back());
        assert_eq!(counted, newest.copied().unwrap_or_default(), "before plan {plan} of client {client}");
        self.told_counted += u64::from(counted > PlanId(0));
    }

    /// Contributions of which blocks were sent in vain, and which are in a version all the same.
    pub fn sent_again(&self) -> u64 {
        self.in_vain.iter().filter(|uid| self.records[uid].version.is_some()).count() as u64
    }

    pub fn granted(&mut self, client: ClientId, plan: PlanId, payload: &Granted) {
        let plan = self.plans.get_mut(&plan).expect("a grant belongs to a plan that has begun");
        assert!(plan.sources.contains(&client), "a grant to a client that the shards do not expect");
        plan.granted.insert(client, payload.clone());
    }

    /// A learner asks to join these.
    pub fn joins(&mut self, members: &[MemberView]) {
        // A taken step counts for the pace, though its version may not be out.
        let pace = |member: &MemberView| {
            let pace = self.paces.get(&(member.learner, member.incarnation));
            pace.copied().unwrap_or_default() + u64::from(member.unpublished)
        };
        self.slowest = members.iter().map(pace).min().unwrap_or_default();
    }

    /// It is in.
    pub fn joined(&mut self, life: (LearnerId, Incarnation)) {
        self.paces.entry(life).or_insert(self.slowest);
    }

    /// The coordinator has a version: nobody in it is further ahead than the consistency allows. Its commit was taken
    /// when it was at most so many steps ahead of the slowest, and those of the others were all out.
    pub fn decided(&mut self, version: Version, plan: PlanId, members: &[MemberView]) {
        // New weights are nobody's step: contributions that are added up already count with the version after them.
        if matches!(self.plans[&plan].work, Work::Assign { .. }) {
            return;
        }
        let kept = self.sealed.keys().copied();
        let plans: Vec<PlanId> = kept.chain([plan]).collect();
        let of: Vec<LearnerId> = plans
            .iter()
            .flat_map(|&plan| self.contributions(plan))
            .flatten()
            .map(|(learner, _)| learner)
            .collect();
        for member in members.iter().filter(|member| of.contains(&member.learner)) {
            *self.paces.entry((member.learner, member.incarnation)).or_default() += 1;
        }
        let planned = self.plans.get_mut(&plan).expect("it has begun");
        if let Work::Reduce { step, tensors, groups, .. } = &planned.work {
            let reducers = TensorReducers::new(tensors.tensors() as usize, step.reducer, groups);
            planned.may_begin_anew = self.optimizer.decided(&reducers);
        }
        let Some(Consistency::Ssp(most)) = self.consistency else { return };
        let pace = |member: &MemberView| self.paces.get(&(member.learner, member.incarnation)).copied();
        let slowest = members.iter().filter_map(pace).min().unwrap_or_default();
        for member in members.iter().filter(|member| of.contains(&member.learner)) {
            let ahead = pace(member).unwrap_or_default() - slowest;
            assert!(
                ahead <= u64::from(most) + 1,
                "version {version}: learner {} gets {ahead} steps ahead of the slowest with ssp({most})",
                member.learner
            );
        }
    }

    fn contributions(&self, plan: PlanId) -> Vec<Vec<(LearnerId, Step)>> {
        let plan = &self.plans[&plan];
        let of = |client: &ClientId| match plan.granted.get(client) {
            Some(Granted::Contributions { of, .. }) => of.clone(),
            _ => Vec::new(),
        };
        plan.sources.iter().map(of).collect()
    }

    // -- what the shards do

    /// A partition keeps the sums of a plan for the coming version: of a stranger's plan there are none.
    pub fn sealed(&mut self, partition: usize, plan: PlanId) {
        if self.plans.contains_key(&plan) {
            self.sealed.entry(plan).or_default().insert(partition);
        }
    }

    /// A partition has published a version.
    pub fn published(&mut self, partition: usize, version: Version, plan: PlanId, blocks: Vec<(u32, Block)>) {
        let at = version.0 as usize;
        if at == self.versions.len() {
            assert_eq!(
                self.complete, at,
                "partition {partition} is at version {version}, others have not all made the one before"
            );
            let blank = vec![None; self.blocks as usize];
            self.versions.push(Made { plan, partitions: BTreeSet::new(), blocks: blank });
        }
        let made = self.versions.get_mut(at).expect("versions come one after another");
        assert_eq!(made.plan, plan, "partition {partition} makes version {version} of another plan");
        assert!(made.partitions.insert(partition), "partition {partition} publishes version {version} twice");
        for (block, content) in blocks {
            made.blocks[block as usize] = Some(content);
        }
        if made.partitions.len() == self.partitions {
            self.complete += 1;
            self.check_version(version);
            self.check_shown_ahead(version);
        }
    }

    /// The coordinator announces a version: it counts, whatever the partitions know of that.
    pub fn announced(&mut self, version: Version, meta: Meta) {
        self.announced = self.announced.max(version);
        self.metas.insert(version, meta);
    }

    /// A client shows a version, and has this state of the job.
    pub fn knows(&self, client: ClientId, version: Version, state: &JobState) {
        assert!(
            state.version >= version,
            "client {client} shows version {version}, of which it has been told nothing"
        );
        if state.version == version {
            let said = self.metas.get(&version).cloned().unwrap_or_default();
            assert_eq!(state.meta, said, "what client {client} knows of version {version}");
        }
    }

    /// All partitions have a version that clients may have shown before.
    fn check_shown_ahead(&mut self, version: Version) {
        let of_version: Vec<_> = self.shown_ahead.extract_if(.., |(_, of, ..)| *of == version).collect();
        for (client, _, block, shown) in of_version {
            let made = self.versions[version.0 as usize].blocks[block].as_ref().map(|made| &made.weights);
            assert_eq!(
                Some(&shown),
                made,
                "block {block} that client {client} has shown as of version {version} before that was made"
            );
        }
        let held: Vec<_> = self.held_ahead.extract_if(.., |(of, _)| *of == version).collect();
        for (_, uid) in held {
            self.holds(version, uid);
        }
    }

    fn check_version(&mut self, version: Version) {
        let plan = self.versions[version.0 as usize].plan;
        let planned = self.plans.get(&plan).expect("a version is made by a plan").clone();
        let blocks = |version: Version| -> Vec<Block> {
            self.versions[version.0 as usize]
                .blocks
                .iter()
                .map(|b| b.clone().expect("all partitions are in"))
                .collect()
        };
        let (before, after) = (blocks(Version(version.0 - 1)), blocks(version));
        let meta =
            self.metas.get(&version).expect("a version is announced before shards know that it counts");
        match &planned.work {
            Work::Assign { .. } if !planned.parts.is_empty() => {
                let meta = meta.clone();
                self.check_laid(version, &planned, (&before, &after), &meta);
            }
            Work::Assign { token } => {
                assert_eq!(*meta, meta_of(*token as Uid), "the metadata of version {version}");
                self.check_assigned(version, &before, &after);
            }
            Work::Reduce { step, groups, factors, .. } => {
                assert!(meta.is_empty(), "nobody has published version {version}, which has {meta}");
                self.check_factors((step, groups), factors, &after);
                self.check_reduced(version, plan, &planned, &before, &after);
            }
            Work::Add { .. } | Work::Measure { .. } => {
                panic!("version {version} is made by plan {plan}, which only adds")
            }
        }
    }

    /// New weights: all of one write, everything else as it was.
    fn check_assigned(&mut self, version: Version, before: &[Block], after: &[Block]) {
        let uids: BTreeSet<Uid> =
            after.iter().flat_map(|block| block.weights.added.iter().copied()).collect();
        assert!(uids.len() <= 1, "version {version} is of several writes: {uids:?}");
        for (block, (before, after)) in before.iter().zip(after).enumerate() {
            let holds = uids.iter().find(|uid| self.records[uid].blocks.contains(&(block as u32)));
            let holds = holds.map(|uid| [*uid]);
            let expected = before.assigned(holds.as_ref().map(<[Uid; 1]>::as_slice));
            assert_eq!(*after, expected, "block {block} of version {version}, which is written by {uids:?}");
        }
        for uid in uids {
            self.goes_in(uid, version);
        }
    }

    fn check_reduced(
        &mut self,
        version: Version,
        plan: PlanId,
        planned: &Planned,
        before: &[Block],
        after: &[Block],
    ) {
        let Work::Reduce { step, tensors, groups, fresh_state, .. } = &planned.work else {
            unreachable!("a version of contributions")
        };
        let replaces = step.reducer == Reducer::Assign;
        let mut plans: Vec<PlanId> = Vec::new();
        for (kept, partitions) in std::mem::take(&mut self.sealed) {
            assert_eq!(
                partitions.len(),
                self.partitions,
                "plan {kept} counts at some partitions only, but version {version} is made"
            );
            plans.push(kept);
        }
        plans.push(plan);
        let name = |key: &(LearnerId, Step)| *self.names.get(key).expect("what is granted was committed");
        let of: Vec<Vec<Vec<Uid>>> = plans
            .iter()
            .map(|plan| self.contributions(*plan).iter().map(|of| of.iter().map(name).collect()).collect())
            .collect();
        let all: Vec<Uid> = of.iter().flatten().flatten().copied().collect();
        let unique: BTreeSet<Uid> = all.iter().copied().collect();
        assert_eq!(unique.len(), all.len(), "version {version}: a contribution is planned twice: {of:?}");
        assert_eq!(
            all.len() as u32,
            step.contributions,
            "version {version} counts {} of {of:?}",
            step.contributions
        );
        assert!(!planned.provisional, "version {version} is made of a plan that was not sealed");
        let is_grace = matches!(self.consistency, Some(Consistency::Grace(..)));
        self.without_the_late += u64::from(is_grace && planned.missing > 0);
        self.check_beginning(version, &plans, all.len());
        let reducers = TensorReducers::new(tensors.tensors() as usize, step.reducer, groups);
        let written = all.iter().flat_map(|uid| &self.records[uid].tensors).copied().collect();
        let anew = (*fresh_state, &planned.may_begin_anew);
        self.optimizer.steps(version, (&reducers, tensors), anew, &written);
        let of_tensor = |tensor| (reducers.of(tensor).expect("a tensor"), tensors.of(tensor));
        for (block, (before, after)) in before.iter().zip(after).enumerate() {
            let holds = |uid: &Uid| self.records[uid].blocks.contains(&(block as u32));
            let expected = &OptimizerStep::of(block as u32, *fresh_state, of_tensor);
            let added = &after.weights.added;
            let bad = added.iter().find(|&&uid| uid == GARBAGE || !self.records.contains_key(&uid));
            assert_eq!(bad, None, "block {block} of version {version} holds memory that was given back");
            // Where blocks replace each other, NaN may be in one that does not count.
            let is_nan = |uid: &&Uid| self.records[uid].bad == Some(block as u32);
            let bad = added.iter().find(is_nan).filter(|_| self.reject);
            assert_eq!(bad, None, "block {block} of version {version} holds NaN");
            if replaces {
                // The highest learner counts, whichever plan it is in.
                let last = all.iter().copied().filter(holds).max_by_key(|uid| self.records[uid].of);
                let last = last.map(|uid| [uid]);
                let expected = before.replaced(expected, last.as_ref().map(<[Uid; 1]>::as_slice));
                assert_eq!(*after, expected, "block {block} of version {version}");
                continue;
            }
            assert_eq!(
                *after,
                before.stepped(expected, added),
                "block {block} of version {version} is not made from the one before by {expected:?}"
            );
            self.check_sum(version, block, &plans, &of, added);
        }
        let added = |(block, after): (usize, &Block)| squares(block as u32, &after.weights.added);
        let norm = step.scale() * after.iter().enumerate().map(added).fold(0.0, f64::add).sqrt();
        let norm = step.reducer.measures(&step.hyper).then(|| Norm::new(norm));
        assert_eq!(step.norm, norm, "the norm of version {version}, which is of {of:?}");
        self.measured += u64::from(norm.is_some());
        for uid in all {
            self.goes_in(uid, version);
        }
    }

    /// A layer-wise step has the factors of the norms that shards have measured.
    fn check_factors(
        &mut self,
        (step, groups): (&reducer::Step, &Groups),
        factors: &TensorFactors,
        after: &[Block],
    ) {
        let tensors = (0..after.len() as u32).flat_map(tensors_of).max().map_or(0, |last| last + 1);
        let mut norms = vec![TensorNorms::default(); tensors];
        for (block, after) in (0..).zip(after) {
            let of = &mut norms[first_tensor(block)];
            of.weights += 1.0;
            of.direction += squares(block, &after.weights.added);
        }
        let steps = groups.steps(step);
        let of_runs =
            groups.runs().iter().flat_map(|&(count, group)| std::iter::repeat_n(group, count as usize));
        let of_tensors = of_runs.chain(std::iter::repeat(GroupId::MODEL));
        let factor = |(of, group): (&TensorNorms, GroupId)| {
            let norms = TensorNorms { weights: of.weights.sqrt(), direction: of.direction.sqrt() };
            let step = steps.of_group(group);
            step.reducer.is_layerwise().then(|| ps_backend::reducers::factor(step, norms))
        };
        let expected = TensorFactors::new(norms.iter().zip(of_tensors).map(factor));
        assert_eq!(*factors, expected, "{step:?} {groups:?}");
        self.layerwise += u64::from(groups.are_layerwise(step.reducer));
    }

    /// The block holds what the plans have of it, once each; in their order where that is kept, and always plan by
    /// plan and client by client.
    fn check_sum(
        &self,
        version: Version,
        block: usize,
        plans: &[PlanId],
        of: &[Vec<Vec<Uid>>],
        added: &[Uid],
    ) {
        let mut at = 0;
        for (plan, sources) in plans.iter().zip(of) {
            let holds = |uid: &Uid| self.records[uid].blocks.contains(&(block as u32));
            let mut sums: Vec<Vec<Uid>> =
                sources.iter().map(|sum| sum.iter().copied().filter(holds).collect()).collect();
            sums.retain(|sum: &Vec<Uid>| !sum.is_empty());
            while !sums.is_empty() {
                let next = sums.iter().position(|sum| added[at..].starts_with(sum));
                let Some(next) = next.filter(|&next| next == 0 || !self.plans[plan].ordered) else {
                    panic!(
                        "block {block} of version {version} holds {added:?}, but {of:?} was planned (with {plans:?})"
                    );
                };
                at += sums.remove(next).len();
            }
        }
        assert_eq!(at, added.len(), "block {block} of version {version} holds {added:?}, more than {of:?}");
    }

    fn goes_in(&mut self, uid: Uid, version: Version) {
        let sync = self.consistency == Some(Consistency::Sync);
        let record = self.record(uid);
        assert!(record.offered, "contribution {uid} is in version {version} and was never committed");
        assert_eq!(record.version, None, "contribution {uid} is in version {version}, too");
        assert_ne!(
            record.outcome,
            Outcome::Refused,
            "contribution {uid} is in version {version}, but was refused"
        );
        record.version = Some(version);
        if let Some((learner, step)) = record.of
            && let Some((before, in_version)) = self.last.insert(learner, (step, version))
        {
            assert!(before < step, "step {step} of learner {learner} comes after step {before}");
            assert!(!sync || in_version < version, "learner {learner} is in version {version} twice");
        }
    }

    // -- what clients show

    /// A client shows these blocks as a version. None that it has shown is taken back.
    pub fn shows(&mut self, client: ClientId, version: Version, blocks: &[Content]) {
        self.shows_after(client, version);
        // A client may know its own new weights to be a version before the partitions do.
        let is_own = self.own.iter().any(|(of, own, _)| (*of, *own) == (client, version));
        assert!(
            version <= self.announced,
            "client {client} shows version {version}, which nobody has announced"
        );
        for (block, shown) in blocks.iter().enumerate() {
            let made = self.versions.get(version.0 as usize).and_then(|made| made.blocks[block].as_ref());
            match made {
                Some(made) => assert_eq!(
                    shown, &made.weights,
                    "block {block} that client {client} shows as of version {version}"
                ),
                None if is_own => {}
                None => self.shown_ahead.push((client, version, block, shown.clone())),
            }
        }
    }

    fn shows_after(&mut self, client: ClientId, version: Version) {
        let before = self.shown.insert(client, version).unwrap_or_default();
        assert!(version >= before, "client {client} shows version {version}, and has shown {before}");
    }

    /// A client shows this version from its own new weights. Returns the blocks.
    pub fn shows_own(&mut self, client: ClientId, version: Version, weights: Uid) -> Vec<Content> {
        self.shows_after(client, version);
        let content = Content::replaced(&[weights]);
        self.own.push((client, version, content.clone()));
        vec![content; self.blocks as usize]
    }

    /// How many versions were shown without being pulled.
    pub fn shown_own(&self) -> u64 {
        self.own.len() as u64
    }

    /// Whether this is the newest version, not all partitions have it, and values took the place of earlier ones in it.
    pub fn replaces(&self, version: Version) -> bool {
        let made = self.versions.get(version.0 as usize..).unwrap_or_default().first();
        let step = made.and_then(|made| match &self.plans.get(&made.plan)?.work {
            Work::Reduce { step, .. } => Some(step.clone()),
            _ => None,
        });
        version.0 as usize >= self.complete && step.is_some_and(|step| step.reducer == Reducer::Assign)
    }

    /// A partition has this block of a version that it has made.
    pub fn made_block(&self, partition: usize, version: Version, block: u32, found: &Block) {
        let made =
            self.versions.get(version.0 as usize).and_then(|made| made.blocks[block as usize].as_ref());
        assert_eq!(Some(found), made, "block {block} of version {version} at partition {partition}");
    }

    /// A client that has committed `uid` learns that this version holds it.
    pub fn holds(&mut self, version: Version, uid: Uid) {
        if version.0 as usize >= self.complete {
            return self.held_ahead.push((version, uid));
        }
        let within = self.records[&uid].version;
        assert!(
            within.is_some_and(|v| v <= version),
            "{uid} is in {within:?}, but version {version} is said to hold it"
        );
    }

    /// Content of version 0.
    pub fn first(&self) -> Vec<Content> {
        vec![Content::default(); self.blocks as usize]
    }

    /// Everything has come to rest.
    pub fn check_end(&self) {
        assert_eq!(self.complete, self.versions.len(), "the newest version is not complete");
        for (client, version, shown) in &self.own {
            let made = &self.versions[version.0 as usize].blocks;
            let is_it = |block: &Option<Block>| block.as_ref().is_some_and(|block| block.weights == *shown);
            assert!(made.iter().all(is_it), "client {client} has shown its own weights as version {version}");
        }
        assert_eq!((self.shown_ahead.len(), self.held_ahead.len()), (0, 0), "versions that nobody has made");
        for (uid, record) in &self.records {
            let lost = record.outcome == Outcome::Acknowledged && record.version.is_none();
            assert!(!lost, "contribution {uid} was acknowledged and is in no version: {record:?}");
        }
    }

    /// Versions made.
    pub fn made(&self) -> usize {
        self.versions.len() - 1
    }
}
