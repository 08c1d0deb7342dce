//! A life of the job at its coordinator. The product's core decides.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::groups::Contents;
use libmodelio::vocabulary::ids::{ClientId, Generation, LearnerId, Step, Version};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::vocabulary::weight::Weight;
use libmodelio::wire::Lineage;
use ps_backend::core::{
    Action, Contribution as Payload, JobCore, JobPlan, JobRecord, Now, Source, Ticket, Work,
};
use ps_backend::snapshot::Places;

use super::content::{Content, Contribution};
use super::store::Store;

/// A learner's request to a life.
#[derive(Clone)]
pub(super) struct Commit {
    pub(super) of: Contribution,
    pub(super) generation: Generation,
    pub(super) shard: usize,
    pub(super) id: LearnerId,
    pub(super) step: Step,
    /// The learner's number for this request.
    pub(super) request: u64,
}

/// A snapshot that is being written.
pub(super) struct Writing {
    pub(super) id: u64,
    pub(super) record: JobRecord,
    pub(super) content: Content,
    pub(super) stage: Stage,
}

pub(super) enum Stage {
    /// The version is copied.
    Copied,
    /// All parts are in the store.
    Written,
    /// The parts are read, and the store was still that of this life, under a claim of this number.
    Claimed(u64, Places),
}

pub(super) type Answers = Vec<(Ticket, Result<(), ShardError>)>;

pub(super) struct Job {
    pub(super) generation: Generation,
    pub(super) owners: Vec<usize>,
    pub(super) lineage: Lineage,
    core: JobCore,
    /// All blocks of the model.
    all: FixedBitSet,
    /// So many numbers of versions were left out.
    ahead: u64,
    pub(super) content: Content,
    /// What was acknowledged in this life.
    acknowledged: Content,
    /// The core's number of each learner, and the number of its first contribution here.
    members: BTreeMap<u8, (LearnerId, u32)>,
    /// The version that is being made.
    plan: Option<Arc<JobPlan>>,
    requests: BTreeMap<Ticket, (Contribution, u64)>,
    /// Whether clients know this life.
    pub(super) is_known: bool,
    pub(super) writes: Option<Writing>,
    /// The newest snapshot: its version, its content, and whether it is called durable.
    pub(super) saved: Option<(u64, Content, bool)>,
}

impl Job {
    pub(super) fn new(
        store: &Store,
        (generation, lineage): (Generation, Lineage),
        owners: Vec<usize>,
        (record, content): (JobRecord, Content),
    ) -> Job {
        let mut core = JobCore::new(store.layout.blocks(), 1, store.controls.clone());
        core.restore(record).unwrap();
        let all = (0..store.layout.blocks() as usize).collect();
        let mut job = Job {
            generation,
            owners,
            lineage,
            core,
            all,
            ahead: 0,
            content,
            acknowledged: Content::default(),
            members: BTreeMap::new(),
            plan: None,
            requests: BTreeMap::new(),
            is_known: false,
            writes: None,
            saved: None,
        };
        job.reserve(Now::ZERO);
        job
    }

    /// The number of the newest version.
    pub(super) fn version(&self) -> u64 {
        self.core.version().0 + self.ahead
    }

    /// The step that a learner has committed last.
    pub(super) fn step_of(&self, id: LearnerId) -> Option<Step> {
        self.core.member(id, Now::ZERO).map(|member| member.step)
    }

    /// The core hears which numbers the registry has confirmed. Before there is a store, it may use all.
    pub(super) fn reserve(&mut self, now: Now) -> Answers {
        let mut actions = Vec::new();
        if !self.lineage.store.is_empty() {
            let limit = Version(self.lineage.reserved.0 - self.ahead);
            self.core.set_reserved(Some(limit), now, &mut actions);
        }
        self.carry_out(actions)
    }

    /// A learner joins, or asks again whether it has. `next` is the number of its next contribution.
    pub(super) fn join(&mut self, learner: u8, next: u32, now: Now) -> LearnerId {
        if let Some((id, _)) = self.members.get(&learner) {
            return *id;
        }
        let mut actions = Vec::new();
        let (id, _) = self.core.join(&format!("l{learner}"), now, &mut actions).unwrap();
        self.members.insert(learner, (id, next));
        assert!(self.carry_out(actions).is_empty());
        id
    }

    pub(super) fn commit(&mut self, ticket: Ticket, commit: &Commit, now: Now) -> Answers {
        if self.step_of(commit.id).is_some_and(|step| step.next() == commit.step) {
            assert_eq!(self.core.open(commit.id, now).unwrap().step, commit.step);
        }
        let (learner, number) = commit.of;
        let payload = Payload {
            learner: commit.id,
            sent: self.all.clone(),
            tensors: FixedBitSet::from_iter([0]),
            partly: None,
            contents: Contents::default(),
            weight: Weight::ONE,
            base: None,
            source: Source::of_contribution(ClientId(learner.into()), Step(number.into())),
            steady: false,
            lent: false,
        };
        self.requests.insert(ticket, (commit.of, commit.request));
        let (mut actions, deadline) = (Vec::new(), now + Duration::from_secs(3600));
        self.core.commit(ticket, commit.step, payload, deadline, now, &mut actions);
        self.carry_out(actions)
    }

    /// The version under way is made, if one is. Nobody looks at so many numbers before it.
    pub(super) fn make(&mut self, jump: u64, now: Now) -> Option<Answers> {
        let plan = self.plan.take()?;
        let next = self.version() + 1;
        self.ahead += (next + jump).min(self.lineage.reserved.0 - 1).saturating_sub(next);
        let mut answers = self.reserve(now);
        for input in &plan.inputs {
            self.content.add((input.source.client.0 as u8, input.source.name as u32));
        }
        let mut actions = Vec::new();
        self.core.reduced(true, now, &mut actions);
        answers.extend(self.carry_out(actions));
        self.check();
        Some(answers)
    }

    fn carry_out(&mut self, actions: Vec<Action>) -> Answers {
        let mut answers = Vec::new();
        for action in actions {
            match action {
                Action::Begin(plan) => {
                    assert!(matches!(plan.work, Work::Reduce { .. }), "{:?}", plan.work);
                    assert!(self.plan.replace(plan).is_none(), "two versions are made at once");
                }
                Action::Reply(ticket, outcome) => answers.push((ticket, outcome)),
                Action::Published(_) => {}
                other => panic!("the core wants {other:?}"),
            }
        }
        answers
    }

    /// A request is answered. Returns what it was about.
    pub(super) fn answered(&mut self, ticket: Ticket, is_taken: bool) -> (Contribution, u64) {
        let (of, request) = self.requests.remove(&ticket).expect("each request has one answer");
        if is_taken && !self.acknowledged.has(of) {
            self.acknowledged.add(of);
        }
        self.check();
        (of, request)
    }

    /// What was acknowledged counts, and nothing counts twice.
    fn check(&self) {
        let generation = self.generation;
        self.content.check();
        let lost = self.content.lacks(&self.acknowledged);
        assert!(lost.is_empty(), "life {generation} lacks {lost:?}, which it has acknowledged");
    }

    /// The record of the newest version, which says of each learner where it goes on.
    pub(super) fn record(&self) -> JobRecord {
        let record = JobRecord { version: Version(self.version()), ..self.core.record() };
        assert_eq!(record.contributions, self.content.len());
        for (learner, (_, first)) in &self.members {
            let of = record.learners.iter().find(|of| of.name == format!("l{learner}")).unwrap();
            let counted = u64::from(self.content.last_of(*learner) + 1 - first);
            assert_eq!(of.step, Some(Step(counted)), "the record of learner {learner}");
        }
        record
    }
}
