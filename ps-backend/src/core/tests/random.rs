//! Random schedules: whatever comes in whatever order, each contribution that was taken is in one version,
//! whole and once; every request is answered once; and the job goes on when all have committed.

use std::collections::BTreeMap;

use fixedbitset::FixedBitSet;
use libmodelio::transport::Attached;
use libmodelio::vocabulary::ids::{Incarnation, LearnerId, Step};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use super::super::*;
use super::sim::{BLOCKS, Sim, Uid, blocks, slot};

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

#[derive(Clone, Debug)]
enum Op {
    Join(usize),
    Leave(usize),
    /// The payloads of this one, and of the next if the flag says so, are gone.
    Lose(usize, bool),
    Open(usize),
    Arrive(usize, u32),
    /// A block of an earlier step, an earlier life, or a step that was not opened.
    Stray(usize, u32, u8),
    FuseDone(usize, bool),
    /// With the blocks that were written in part.
    Commit(usize, u32, bool, u64),
    Abort(usize),
    Withdraw(usize),
    Await(usize, u64),
    FoldDone(bool),
    ReduceDone(bool),
    ReduceRefused,
    Buffer,
    Assign(u64),
    Control(usize),
    Touch(usize, Attached),
    Tick(u64),
}

const CONTROLS: [(&str, &str); 22] = [
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
    ("nonfinite", "accept"),
];

fn op() -> impl Strategy<Value = Op> {
    let who = 0..NAMES.len();
    prop_oneof![
        3 => who.clone().prop_map(Op::Join),
        1 => who.clone().prop_map(Op::Leave),
        1 => (who.clone(), any::<bool>()).prop_map(|(who, two)| Op::Lose(who, two)),
        6 => who.clone().prop_map(Op::Open),
        14 => (who.clone(), 0..BLOCKS).prop_map(|(who, block)| Op::Arrive(who, block)),
        1 => (who.clone(), 0..BLOCKS, 0..4u8).prop_map(|(who, block, kind)| Op::Stray(who, block, kind)),
        8 => (0..4usize, prop::bool::weighted(0.9)).prop_map(|(at, ok)| Op::FuseDone(at, ok)),
        8 => (who.clone(), 0..16u32, prop::bool::weighted(0.6), 1..200u64)
            .prop_map(|(who, parts, lendable, timeout)| Op::Commit(who, parts, lendable, timeout)),
        1 => who.clone().prop_map(Op::Abort),
        2 => who.clone().prop_map(Op::Withdraw),
        2 => (who.clone(), 1..200u64).prop_map(|(who, timeout)| Op::Await(who, timeout)),
        4 => prop::bool::weighted(0.9).prop_map(Op::FoldDone),
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placed {
    UnderWay,
    Reduced,
    Deferred,
}

#[derive(Debug)]
struct OpenContribution {
    step: Step,
    uid: Uid,
    blocks: BTreeMap<u32, Placed>,
    /// What the last commit said, if one was sent.
    notice: Option<(FixedBitSet, FixedBitSet, bool)>,
}

#[derive(Debug)]
struct Client {
    id: (LearnerId, Incarnation),
    open: Option<OpenContribution>,
    commit: Option<Ticket>,
    /// What was taken, as far as the client was told.
    taken: Vec<Uid>,
}

#[derive(Debug)]
struct World {
    sim: Sim,
    /// The consistency, if it is never changed.
    fixed: Option<String>,
    clients: BTreeMap<usize, Client>,
    /// Those that left.
    former: BTreeMap<usize, Vec<LearnerId>>,
}

impl World {
    fn apply(&mut self, op: &Op) {
        let sim = &mut self.sim;
        match *op {
            Op::Join(who) => {
                if let Ok(id) = sim.join(NAMES[who]) {
                    self.clients.insert(who, Client { id, open: None, commit: None, taken: Vec::new() });
                }
            }
            Op::Leave(who) => {
                if let Some(client) = self.clients.remove(&who) {
                    sim.leave(client.id.0);
                    self.former.entry(who).or_default().push(client.id.0);
                }
            }
            Op::Lose(who, two) => {
                let last = who + usize::from(two);
                let lost: Vec<_> = (who..=last).filter_map(|who| self.clients.remove(&who)).collect();
                let mut ids: Vec<_> = lost.iter().map(|client| client.id.0).collect();
                // Of some it is learnt when they have left already.
                ids.extend(self.former.remove(&who).into_iter().flatten());
                sim.lose(&ids);
            }
            Op::FuseDone(at, ok) if at < sim.fuses.len() => {
                let fuse = sim.fuses[at].slot;
                sim.fuse_done(at, ok);
                let client = self.clients.values_mut().find(|client| client.id.0 == fuse.learner);
                let open =
                    client.and_then(|client| client.open.as_mut()).filter(|open| open.step == fuse.step);
                if let Some(placed) = open.and_then(|open| open.blocks.get_mut(&fuse.block.0))
                    && *placed == Placed::UnderWay
                {
                    *placed = Placed::Reduced;
                }
                // What was refused is missing: this contribution can only be dropped.
            }
            Op::FoldDone(ok) => sim.fold_done(ok),
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
            Op::FuseDone(..) => {}
            Op::Open(who)
            | Op::Arrive(who, _)
            | Op::Stray(who, ..)
            | Op::Commit(who, ..)
            | Op::Abort(who)
            | Op::Withdraw(who)
            | Op::Await(who, _)
            | Op::Touch(who, _) => {
                if let Some(client) = self.clients.get_mut(&who) {
                    client.apply(sim, op);
                }
            }
        }
        self.look_around();
    }

    /// Clients hear what the shard has answered and who has left.
    fn look_around(&mut self) {
        self.sim.check_coordinator();
        let left = &self.sim.left;
        self.clients.retain(|_, client| left.iter().all(|(id, _)| *id != client.id.0));
        for client in self.clients.values_mut() {
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
                // Whoever had a contribution in already is a step ahead.
                prop_assert!(self.sim.versions_of(&taken[..4]).iter().all(Option::is_some), "{:?}", taken);
            }
            for who in 0..NAMES.len() {
                self.apply(&Op::Abort(who));
                self.apply(&Op::Open(who));
                self.apply(&Op::Arrive(who, who as u32));
                taken.push(self.clients[&who].open.as_ref().map(|open| open.uid).unwrap());
                self.sim.finish_work();
                self.apply(&Op::Commit(who, 0, who % 2 == 0, 10_000));
                self.sim.finish_work();
            }
            // Past everybody's patience.
            self.sim.tick(100);
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
                let Ok(opening) = sim.open(self.id.0) else { return };
                let unpublished = self.taken.iter().filter(|&&uid| sim.versions_of(&[uid]) == [None]);
                let lent =
                    unpublished.filter(|uid| sim.records[uid].lendable && !sim.records[uid].sent.is_empty());
                if lent.count() > 0 {
                    assert!(opening.staging_lent, "the last contribution is still to be read");
                }
                let uid = sim.uid();
                self.open =
                    Some(OpenContribution { step: opening.step, uid, blocks: BTreeMap::new(), notice: None });
            }
            Op::Arrive(_, block) if self.commit.is_none() => {
                let Some(open) = self.open.as_mut().filter(|open| open.notice.is_none()) else { return };
                let known = open.blocks.contains_key(&block);
                if sim.core.provisional {
                    if !known {
                        sim.comes(self.id.0, open.uid, block);
                        open.blocks.insert(block, Placed::Deferred);
                    }
                    return;
                }
                let slot = slot(self.id, open.step, block);
                match sim.arrive(slot, open.uid) {
                    Ok(Arrival::Fuse(_)) => {
                        let before = open.blocks.insert(block, Placed::UnderWay);
                        assert!(before.is_none_or(|before| before != Placed::Deferred));
                    }
                    Ok(Arrival::Defer) => {
                        let before = open.blocks.insert(block, Placed::Deferred);
                        assert!(before.is_none_or(|before| before != Placed::Deferred));
                    }
                    Ok(Arrival::Duplicate) => assert!(known, "{block} was never sent"),
                    Err(ShardError::Stopped { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            Op::Stray(..) if sim.core.provisional => {}
            Op::Stray(_, block, kind) => {
                let open = self.open.as_ref().map(|open| open.step);
                let (id, step) = match kind {
                    0 => ((self.id.0, Incarnation(self.id.1.0 + 7)), open.unwrap_or(Step(1))),
                    1 => (self.id, Step(open.map_or(1, |step| step.0 + 1) + 5)),
                    2 => ((LearnerId(999), self.id.1), Step(1)),
                    _ => (self.id, Step(0)),
                };
                let arrival = sim.arrive(slot(id, step, block), Uid::MAX);
                assert!(matches!(arrival, Err(_) | Ok(Arrival::Duplicate)), "{kind}: {arrival:?}");
            }
            Op::Commit(_, parts, lendable, timeout) if self.commit.is_none() => {
                let Some(open) = &mut self.open else { return };
                let (sent, deferred, lendable) = open.notice.get_or_insert_with(|| {
                    let in_part =
                        (0..BLOCKS).filter(|b| parts & (1 << b) != 0 && !open.blocks.contains_key(b));
                    let in_part = blocks(in_part);
                    let of = |wanted: fn(Placed) -> bool| {
                        blocks(open.blocks.iter().filter(|(_, placed)| wanted(**placed)).map(|(b, _)| *b))
                    };
                    let mut sent = of(|_| true);
                    sent.union_with(&in_part);
                    let mut deferred = of(|placed| placed == Placed::Deferred);
                    deferred.union_with(&in_part);
                    (sent, deferred, lendable)
                });
                let what = (sent.clone(), deferred.clone());
                self.commit = Some(sim.commit(self.id.0, open.step, open.uid, what, *lendable, timeout));
            }
            Op::Abort(_) => {
                sim.abort(self.id.0);
                self.open = None;
            }
            Op::Withdraw(_) => sim.withdraw(self.id.0),
            Op::Await(_, timeout) => {
                let some = |uid: &&Uid| !sim.records[uid].sent.is_empty();
                let after = self.taken.iter().filter(some).copied().collect();
                sim.await_step(self.id.0, after, timeout);
            }
            Op::Touch(_, attached) => sim.core.touch(self.id.0, Some(attached), sim.now),
            _ => {}
        }
    }
}

/// Runs a schedule on a job of these settings, whose consistency may change in it if it is not `fixed`.
fn run(
    ops: &[Op],
    settings: &[(&str, &str)],
    fixed: bool,
    (patience, batch, provisional): (u64, usize, bool),
) -> TestCaseResult {
    let mut sim = Sim::patient(settings, patience).with_fold_batch(batch);
    if provisional {
        sim = sim.with_provisional_plans();
    }
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

/// How long a contribution waits to be folded, how many are folded at once, and whether plans begin before their last
/// commit.
fn folding() -> impl Strategy<Value = (u64, usize, bool)> {
    (0..30u64, prop_oneof![Just(1), Just(2), Just(usize::MAX)], any::<bool>())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn synchronous_schedules(ops in ops(), learners in 1..4u32, folding in folding()) {
        run(&ops, &[("learners", &learners.to_string())], true, folding)?;
    }

    #[test]
    fn quorum_schedules(ops in ops(), k in 1..6u32, learners in 1..4u32, folding in folding()) {
        let consistency = format!("quorum({k})");
        run(&ops, &[("consistency", &consistency), ("learners", &learners.to_string())], true, folding)?;
    }

    #[test]
    fn ssp_schedules(ops in ops(), s in 0..3u32, learners in 1..4u32, folding in folding()) {
        let consistency = format!("ssp({s})");
        run(&ops, &[("consistency", &consistency), ("learners", &learners.to_string())], true, folding)?;
    }

    #[test]
    fn asynchronous_schedules(ops in ops(), folding in folding()) {
        run(&ops, &[("consistency", "async")], true, folding)?;
    }

    #[test]
    fn schedules_in_which_the_consistency_changes(
        ops in ops(),
        first in prop::sample::select(vec!["sync", "quorum(2)", "ssp(1)", "async"]),
        learners in 1..4u32,
        folding in folding(),
    ) {
        run(&ops, &[("consistency", first), ("learners", &learners.to_string())], false, folding)?;
    }
}
