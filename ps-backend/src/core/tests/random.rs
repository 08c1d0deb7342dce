//! Random schedules. Whatever comes in whatever order: each contribution that was taken is in one version,
//! whole and once; every request is answered once; and the job goes on when all have committed.

use std::collections::{BTreeMap, BTreeSet};

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::ids::{LearnerId, Step};
use libmodelio::vocabulary::members::Attached;
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use super::super::*;
use super::sim::{BLOCKS, Sim, Uid, blocks};

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

#[derive(Clone, Debug)]
enum Op {
    Join(usize),
    Leave(usize),
    /// The payloads of this client are gone, and those of the next if the flag says so.
    Lose(usize, bool),
    Open(usize),
    /// A block is whole.
    Comes(usize, u32),
    /// The blocks that came early are of another contribution.
    Stale(usize),
    /// With the blocks that were written in part.
    Commit(usize, u32, bool, u64),
    Abort(usize),
    Withdraw(usize),
    AccumulateDone(bool),
    ReduceDone(bool),
    ReduceRefused,
    Buffer,
    Assign(u64),
    Control(usize),
    Touch(usize, Attached),
    Tick(u64),
}

const CONTROLS: [(&str, &str); 41] = [
    ("tensors", ""),
    ("tensors", "head reducer=momentum"),
    ("tensors", "*y reducer=adam weight_decay=0"),
    ("tensors", "head learning_rate_scale=0.5"),
    ("tensors", "head reducer=average"),
    ("tensors", "head reducer=average\nbody reducer=momentum"),
    ("reducer", "sgd"),
    ("reducer", "adam"),
    ("reducer", "assign"),
    ("reducer", "momentum"),
    ("learning_rate", "0.5"),
    ("learning_rate", "0.25"),
    ("consistency", "sync"),
    ("consistency", "async"),
    ("consistency", "quorum(2)"),
    ("consistency", "quorum(3)"),
    ("consistency", "grace(2, 1)"),
    ("consistency", "ssp(0)"),
    ("consistency", "ssp(2)"),
    ("deterministic", "true"),
    ("deterministic", "false"),
    ("learners", "1"),
    ("learners", "2"),
    ("learners", "3"),
    ("min_learners", "1"),
    ("min_learners", "2"),
    ("lease", "0"),
    ("lease", "0.1"),
    ("patience", "0"),
    ("patience", "0.1"),
    ("nonfinite", "accept"),
    ("clip_norm", "1"),
    ("clip_norm", "0"),
    ("reducer", "lars"),
    ("tensors", "head reducer=lamb"),
    ("warmup", "2"),
    ("warmup", "0"),
    ("schedule", "linear(5)"),
    ("schedule", "constant"),
    ("staleness_aware", "true"),
    ("staleness_aware", "false"),
];

fn op() -> impl Strategy<Value = Op> {
    let who = 0..NAMES.len();
    prop_oneof![
        3 => who.clone().prop_map(Op::Join),
        1 => who.clone().prop_map(Op::Leave),
        1 => (who.clone(), any::<bool>()).prop_map(|(who, two)| Op::Lose(who, two)),
        6 => who.clone().prop_map(Op::Open),
        14 => (who.clone(), 0..BLOCKS).prop_map(|(who, block)| Op::Comes(who, block)),
        1 => who.clone().prop_map(Op::Stale),
        8 => (who.clone(), 0..16u32, prop::bool::weighted(0.6), 1..200u64)
            .prop_map(|(who, parts, steady, timeout)| Op::Commit(who, parts, steady, timeout)),
        1 => who.clone().prop_map(Op::Abort),
        2 => who.clone().prop_map(Op::Withdraw),
        4 => prop::bool::weighted(0.9).prop_map(Op::AccumulateDone),
        6 => prop::bool::weighted(0.7).prop_map(Op::ReduceDone),
        2 => Just(Op::ReduceRefused),
        3 => Just(Op::Buffer),
        1 => (1..200u64).prop_map(Op::Assign),
        2 => (0..CONTROLS.len()).prop_map(Op::Control),
        2 => (who, attached()).prop_map(|(who, attached)| Op::Touch(who, attached)),
        2 => (1..60u64).prop_map(Op::Tick),
    ]
}

fn attached() -> impl Strategy<Value = Attached> {
    prop_oneof![Just(Attached::No), Just(Attached::Yes), Just(Attached::Exited)]
}

#[derive(Debug)]
struct OpenContribution {
    step: Step,
    uid: Uid,
    /// The whole blocks.
    blocks: BTreeSet<u32>,
    /// The notice of the last commit, if one was sent.
    notice: Option<(FixedBitSet, bool)>,
}

#[derive(Debug)]
struct Client {
    id: LearnerId,
    open: Option<OpenContribution>,
    commit: Option<Ticket>,
    /// The contributions that were taken, as far as the client knows.
    taken: Vec<Uid>,
}

#[derive(Debug)]
struct World {
    sim: Sim,
    /// The consistency, if it is never changed.
    fixed: Option<String>,
    clients: BTreeMap<usize, Client>,
    /// Learners that left.
    former: BTreeMap<usize, Vec<LearnerId>>,
}

impl World {
    fn apply(&mut self, op: &Op) {
        let sim = &mut self.sim;
        match *op {
            Op::Join(who) => {
                if let Ok((id, _)) = sim.join(NAMES[who]) {
                    self.clients.insert(who, Client { id, open: None, commit: None, taken: Vec::new() });
                }
            }
            Op::Leave(who) => {
                if let Some(client) = self.clients.remove(&who) {
                    sim.leave(client.id);
                    self.former.entry(who).or_default().push(client.id);
                }
            }
            Op::Lose(who, two) => {
                let last = who + usize::from(two);
                let lost: Vec<_> = (who..=last).filter_map(|who| self.clients.remove(&who)).collect();
                let mut ids: Vec<_> = lost.iter().map(|client| client.id).collect();
                // Some deaths are learnt only when the learners have left already.
                ids.extend(self.former.remove(&who).into_iter().flatten());
                sim.lose(&ids);
            }
            Op::AccumulateDone(ok) => sim.accumulate_done(ok),
            Op::ReduceDone(buffer) => sim.reduce_done(buffer),
            Op::ReduceRefused => {
                if !sim.reduce_refused() {
                    sim.provisional_refused();
                }
            }
            Op::Buffer => sim.give_buffer(),
            Op::Assign(timeout) => {
                sim.assign(timeout);
            }
            Op::Control(which) => {
                let (name, value) = CONTROLS[which];
                if self.fixed.is_none() || name != "consistency" {
                    sim.set(name, value);
                }
            }
            Op::Tick(millis) => sim.tick(millis),
            Op::Open(who)
            | Op::Comes(who, _)
            | Op::Stale(who)
            | Op::Commit(who, ..)
            | Op::Abort(who)
            | Op::Withdraw(who)
            | Op::Touch(who, _) => {
                if let Some(client) = self.clients.get_mut(&who) {
                    client.apply(sim, op);
                }
            }
        }
        self.look_around();
    }

    /// Clients get the shard's answers, and learn who has left.
    fn look_around(&mut self) {
        self.sim.check_coordinator();
        let left = &self.sim.left;
        self.clients.retain(|_, client| left.iter().all(|(id, _)| *id != client.id));
        for client in self.clients.values_mut() {
            client.reads_its_own_steps(&self.sim);
            let Some(reply) = client.commit.and_then(|ticket| self.sim.replies.get(&ticket)) else {
                continue;
            };
            client.commit = None;
            if reply.is_ok()
                && let Some(open) = client.open.take()
            {
                client.taken.push(open.uid);
            }
        }
    }

    /// Nobody is slow any more: everybody commits and all work ends.
    fn come_to_an_end(&mut self) -> TestCaseResult {
        let consistency = self.fixed.clone().unwrap_or("sync".into());
        for (name, value) in [
            ("deterministic", "false"),
            ("min_learners", "1"),
            ("consistency", &consistency),
            ("lease", "0"),
            ("patience", "0"),
            ("learners", "4"),
        ] {
            self.sim.set(name, value);
        }
        self.sim.finish_work();
        self.sim.tick(1_000);
        self.sim.finish_work();
        self.look_around();
        for who in 0..NAMES.len() {
            self.apply(&Op::Join(who));
        }
        prop_assert_eq!(self.clients.len(), NAMES.len());
        let mut taken = Vec::new();
        for round in 0..3 {
            let before = self.sim.core.version();
            if round == 2 {
                // A learner that had a contribution in already is a step ahead.
                prop_assert!(self.sim.versions_of(&taken[..4]).iter().all(Option::is_some), "{:?}", taken);
            }
            for who in 0..NAMES.len() {
                self.apply(&Op::Abort(who));
                self.apply(&Op::Open(who));
                self.apply(&Op::Comes(who, who as u32));
                taken.push(self.clients[&who].open.as_ref().map(|open| open.uid).unwrap());
                self.sim.finish_work();
                self.apply(&Op::Commit(who, 0, who % 2 == 0, 10_000));
                self.sim.finish_work();
            }
            // Past everybody's patience: a commit waits for others in a plan for half of its time.
            self.sim.tick(5_100);
            self.sim.finish_work();
            self.look_around();
            prop_assert!(self.sim.core.version() > before, "{:#?}", self.sim.core);
            prop_assert_eq!(self.sim.outstanding(), 0);
        }
        for (uid, record) in &self.sim.records {
            let found = self.sim.versions_of(&[*uid])[0].is_some() || taken[8..].contains(uid);
            prop_assert!(found || !record.taken || record.sent.is_empty(), "{} was lost", uid);
        }
        Ok(())
    }
}

impl Client {
    fn apply(&mut self, sim: &mut Sim, op: &Op) {
        match *op {
            Op::Open(_) if self.open.is_none() && self.commit.is_none() => {
                let Ok(opening) = sim.open(self.id) else { return };
                let unpublished = self.taken.iter().filter(|&&uid| sim.versions_of(&[uid]) == [None]);
                let is_lent = |uid: &&Uid| sim.records[uid].steady && !sim.records[uid].sent.is_empty();
                let lent = unpublished.filter(|uid| is_lent(uid) && !sim.is_in(**uid));
                if lent.count() > 0 {
                    assert!(opening.staging_lent, "the last contribution is still to be read");
                }
                let uid = sim.uid();
                self.open =
                    Some(OpenContribution { step: opening.step, uid, blocks: BTreeSet::new(), notice: None });
            }
            Op::Comes(_, block) if self.commit.is_none() => {
                if let Some(open) = self.open.as_mut().filter(|open| open.notice.is_none())
                    && open.blocks.insert(block)
                {
                    sim.comes(self.id, open.uid, block);
                }
            }
            Op::Stale(_) if self.commit.is_none() => sim.is_stale(self.id),
            Op::Commit(_, parts, steady, timeout) if self.commit.is_none() => {
                let Some(open) = &mut self.open else { return };
                let (sent, steady) = open.notice.get_or_insert_with(|| {
                    let in_part = (0..BLOCKS).filter(|b| parts & (1 << b) != 0);
                    (blocks(in_part.chain(open.blocks.iter().copied())), steady)
                });
                self.commit = Some(sim.commit(self.id, open.step, open.uid, sent.clone(), *steady, timeout));
            }
            Op::Abort(_) => {
                sim.abort(self.id);
                self.open = None;
            }
            Op::Withdraw(_) => sim.withdraw(self.id),
            Op::Touch(_, attached) => sim.core.touch(self.id, Some(attached), sim.now),
            _ => {}
        }
    }

    /// The newest version has all that it has committed, unless it has to wait for that.
    fn reads_its_own_steps(&self, sim: &Sim) {
        let Some(view) = sim.core.member(self.id, sim.now).filter(|view| !view.unpublished) else { return };
        let some = |uid: &&Uid| !sim.records[uid].sent.is_empty();
        let taken: Vec<Uid> = self.taken.iter().filter(some).copied().collect();
        let published = sim.versions_of(&taken);
        assert!(
            published.iter().all(|v| v.is_some_and(|v| v <= view.published_in)),
            "{published:?} {view:?}"
        );
    }
}

/// Runs a schedule on a job of these settings, whose consistency may change in it if it is not `fixed`.
fn run(
    ops: &[Op],
    settings: &[(&str, &str)],
    fixed: bool,
    (patience, begins): (u64, Begins),
) -> TestCaseResult {
    let mut sim = Sim::patient(settings, patience);
    sim = match begins {
        Begins::WhenAllIsCommitted => sim,
        Begins::AndGivesWay => sim.on_a_network(),
        Begins::AtTheFirstBlock => sim.in_process(),
    };
    let consistency = sim.core.controls().consistency.to_string();
    if fixed {
        sim = sim.with_fixed_consistency();
    }
    let fixed = fixed.then_some(consistency);
    let mut world = World { sim, fixed, clients: BTreeMap::new(), former: BTreeMap::new() };
    for op in ops {
        world.apply(op);
    }
    world.come_to_an_end()
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(), 0..120)
}

/// When a plan begins.
#[derive(Clone, Copy, Debug)]
enum Begins {
    WhenAllIsCommitted,
    AtTheFirstBlock,
    AndGivesWay,
}

/// How long a contribution waits to be accumulated, and when plans begin.
fn plans() -> impl Strategy<Value = (u64, Begins)> {
    let begins = [Begins::WhenAllIsCommitted, Begins::AtTheFirstBlock, Begins::AndGivesWay];
    (0..30u64, prop::sample::select(begins.to_vec()))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn synchronous_schedules(ops in ops(), learners in 1..4u32, plans in plans()) {
        run(&ops, &[("learners", &learners.to_string())], true, plans)?;
    }

    #[test]
    fn quorum_schedules(ops in ops(), k in 1..6u32, learners in 1..4u32, plans in plans()) {
        let consistency = format!("quorum({k})");
        run(&ops, &[("consistency", &consistency), ("learners", &learners.to_string())], true, plans)?;
    }

    #[test]
    fn grace_schedules(
        ops in ops(),
        k in 1..6u32,
        factor in prop::sample::select(vec!["0.1", "1", "10"]),
        learners in 1..4u32,
        plans in plans(),
    ) {
        let consistency = format!("grace({k}, {factor})");
        run(&ops, &[("consistency", &consistency), ("learners", &learners.to_string())], true, plans)?;
    }

    #[test]
    fn ssp_schedules(ops in ops(), s in 0..3u32, learners in 1..4u32, plans in plans()) {
        let consistency = format!("ssp({s})");
        run(&ops, &[("consistency", &consistency), ("learners", &learners.to_string())], true, plans)?;
    }

    #[test]
    fn asynchronous_schedules(ops in ops(), plans in plans()) {
        run(&ops, &[("consistency", "async")], true, plans)?;
    }

    #[test]
    fn schedules_in_which_the_consistency_changes(
        ops in ops(),
        first in prop::sample::select(vec!["sync", "quorum(2)", "grace(2, 1)", "ssp(1)", "async"]),
        learners in 1..4u32,
        plans in plans(),
    ) {
        run(&ops, &[("consistency", first), ("learners", &learners.to_string())], false, plans)?;
    }
}
