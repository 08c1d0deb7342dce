//! Conversations of a coordinator with two clients and one shard, as they read in `docs/operate/network.md`.

#![allow(clippy::single_range_in_vec_init)] // Lists of ranges of blocks.

mod all_reduce;
mod moving;
mod open_weights;
mod readers;
mod remembering;
mod sets;
mod strangers;
mod together;

use std::ops::Range;

use libmodelio::vocabulary::ids::Step;
use libmodelio::vocabulary::layout::DType;
use libmodelio::vocabulary::norm::{ExactSum, Quantity, Squares};
use libmodelio::vocabulary::reducer::Combine;
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::{Granted, Plan, Work};

use super::*;

const A: ClientId = ClientId(10);
const B: ClientId = ClientId(20);
const PATIENCE: Now = Now::from_millis(100);

/// A model of this many blocks, with a tensor for each two of them.
fn layout(blocks: usize) -> ModelLayout {
    let tensor = |i| (format!("t{i}"), DType::F32, vec![(64 << 10) / 4 * 2.min(blocks - 2 * i)]);
    ModelLayout::new((0..blocks.div_ceil(2)).map(tensor).collect(), 64 << 10).unwrap()
}

struct Bench {
    coordinator: CoordinatorCore,
    now: Now,
    /// The coordinator's actions since the last check.
    said: Vec<Action>,
}

impl Bench {
    /// Two clients, with learner 1 on the first and learner 2 on the second.
    fn new() -> Bench {
        let controls = Controls::default().with("learners", "2").unwrap();
        let coordinator = CoordinatorCore::new(&layout(4), 1, controls, PATIENCE).unwrap();
        let mut bench = Bench { coordinator, now: Now::ZERO, said: Vec::new() };
        for (client, name) in [(A, "a"), (B, "b")] {
            bench.coordinator.client_up(client, bench.now, &mut bench.said).unwrap();
            bench.client(client, 1, Message::Join { name: name.into() });
        }
        bench.said.clear();
        bench
    }

    /// Both have committed their first step, and a plan has it.
    fn both_committed() -> (Bench, Plan) {
        Bench::both_committed_as(false)
    }

    /// The first of them may have lent its memory.
    fn both_committed_as(lent: bool) -> (Bench, Plan) {
        let mut bench = Bench::new();
        let plan = bench.both_commit(lent);
        (bench, plan)
    }

    /// Both have committed their first step under a lease of 3 s.
    fn both_committed_under_a_lease() -> Bench {
        let mut bench = Bench::new();
        bench.client(A, 2, Message::SetControl { name: "lease".into(), value: "3".into() });
        bench.commit(A, 1, 1, 3);
        bench.commit(B, 2, 1, 2);
        bench
    }

    fn client(&mut self, client: ClientId, request: u64, message: Message) {
        self.coordinator.from_client(client, request, message, self.now, &mut self.said);
    }

    fn partition(&mut self, request: u64, message: Message) {
        self.coordinator.from_partition(0, request, message, self.now, &mut self.said);
    }

    fn hold(&mut self) {
        self.coordinator.hold(self.now, &mut self.said);
    }

    fn pass(&mut self, time: Now) {
        self.now += time;
        self.coordinator.tick(self.now, &mut self.said);
    }

    /// A learner opens its step and commits all of it, under requests `from` and the one after.
    fn commit(&mut self, client: ClientId, learner: u32, step: u64, from: u64) {
        self.commit_as(client, learner, step, from, false);
    }

    fn commit_as(&mut self, client: ClientId, learner: u32, step: u64, from: u64, lent: bool) {
        self.client(client, from, Message::Open { learner: LearnerId(learner) });
        let timeout_ms = 10_000;
        self.client(client, from + 1, commit_message(learner, step, ALL, timeout_ms, lent));
    }

    /// A learner commits these blocks and tensors.
    fn commit_of(&mut self, client: ClientId, learner: u32, step: u64, request: u64, of: Parts) {
        self.client(client, request, commit_message(learner, step, of, 10_000, false));
    }

    /// The shard is ready with the plan, hears that it counts, and is done with it.
    fn carries_out(&mut self, plan: PlanId) {
        self.partition(0, Message::Ready { plan });
        self.partition(plan.0, Message::Done);
    }

    /// Both commit their first step; the plan that has it.
    fn both_commit(&mut self, lent: bool) -> Plan {
        self.commit_as(A, 1, 1, 2, lent);
        self.commit(B, 2, 1, 2);
        self.started()
    }

    /// The messages to a client, without the state of the job.
    fn sent_to(&mut self, client: ClientId) -> Vec<(u64, Message)> {
        let said =
            self.said.extract_if(.., |action| matches!(action, Action::ToClient(id, ..) if *id == client));
        let said = said.filter_map(|action| match action {
            Action::ToClient(_, request, message) => Some((request, message)),
            _ => None,
        });
        said.filter(|(_, message)| !matches!(message, Message::State(_))).collect()
    }

    fn sent_to_partition(&mut self) -> Vec<Message> {
        let said = self.said.extract_if(.., |action| matches!(action, Action::ToPartition(..)));
        said.filter_map(|action| match action {
            Action::ToPartition(_, _, message) => Some(message),
            _ => None,
        })
        .collect()
    }

    fn started(&mut self) -> Plan {
        match self.sent_to_partition().pop() {
            Some(Message::Start(plan)) => *plan,
            other => panic!("a start is expected, not {other:?}"),
        }
    }
}

/// Ranges of blocks and of tensors.
type Parts = (Range<u32>, Range<u32>);

const ALL: Parts = (0..4, 0..2);

fn commit_message(learner: u32, step: u64, of: Parts, timeout_ms: u32, lent: bool) -> Message {
    Message::Commit {
        learner: LearnerId(learner),
        step: Step(step),
        blocks: vec![of.0],
        tensors: vec![of.1],
        partly: Some(Default::default()),
        contents: Default::default(),
        weight: Default::default(),
        timeout_ms,
        lent,
        given_up: None,
        base: None,
    }
}

fn assign(token: u64, timeout_ms: u32) -> Message {
    Message::Assign { token, blocks: vec![0..4], timeout_ms, ahead: None, meta: Default::default() }
}

/// The clients whose contributions a plan has.
fn clients(plan: &Plan) -> Vec<ClientId> {
    plan.sources.iter().map(|source| source.client).collect()
}

fn grant(plan: PlanId, of: &[(u32, u64)]) -> (u64, Message) {
    let of = of.iter().map(|&(learner, step)| (LearnerId(learner), Step(step))).collect();
    (
        0,
        Message::Grant {
            plan,
            payload: Granted::Contributions { of, replaces: false, open: None },
            counted: PlanId(0),
        },
    )
}

/// The times, in milliseconds from now, when a client is sent the state, and its count of commits, if the
/// clock ticks every 100 ms.
fn sent(bench: &mut Bench, client: ClientId, millis: u64) -> Vec<(u64, u32)> {
    let begun = bench.now;
    let mut sent = Vec::new();
    while bench.now < begun + Now::from_millis(millis) {
        for alive in [A, B] {
            bench.coordinator.client_alive(alive, bench.now);
        }
        bench.pass(Now::from_millis(100));
        sent.extend(bench.said.drain(..).filter_map(|action| match action {
            Action::ToClient(id, _, Message::State(state)) if id == client => {
                Some(((bench.now - begun).as_millis() as u64, state.committed))
            }
            _ => None,
        }));
    }
    sent
}

#[test]
fn a_state_that_stays_the_same_is_repeated_ever_more_seldom() {
    let mut bench = Bench::new();
    let repeated = sent(&mut bench, A, 20_000);
    assert_eq!(repeated, [500, 1000, 2000, 4000, 8000, 12_000, 16_000, 20_000].map(|at| (at, 0)));
    // A new state is sent within half a second, and once more soon.
    bench.commit(B, 2, 1, 2);
    let news = sent(&mut bench, A, 4_000);
    assert!(news[0].0 <= 500 && news.iter().all(|&(_, committed)| committed == 1), "{news:?}");
    assert!(news[1].0 <= news[0].0 + 500 && news.len() <= 5, "{news:?}");
    // A client that comes back is sent the state at once.
    bench.coordinator.client_down(A, bench.now, &mut bench.said);
    bench.said.clear();
    bench.coordinator.client_up(A, bench.now, &mut bench.said).unwrap();
    assert!(bench.said.iter().any(|said| matches!(said, Action::ToClient(A, 0, Message::State(_)))));
}

#[test]
fn a_step_of_two_clients() {
    let mut bench = Bench::new();
    bench.commit(A, 1, 1, 2);
    assert!(bench.sent_to_partition().is_empty(), "the others of the step are waited for");
    bench.commit(B, 2, 1, 2);
    let plan = bench.started();
    assert!(matches!(plan.work, Work::Reduce { .. }));
    assert_eq!(clients(&plan), [A, B]);
    assert!(bench.sent_to(A).contains(&grant(plan.plan, &[(1, 1)])));
    assert!(bench.sent_to(B).contains(&grant(plan.plan, &[(2, 1)])));

    bench.partition(0, Message::Ready { plan: plan.plan });
    assert_eq!(bench.sent_to_partition(), [Message::Conclude { plan: plan.plan }]);
    assert!(bench.said.contains(&Action::Published(Version(1))));
    let over = |said: &Action| matches!(said, Action::ToClient(A, 0, Message::State(state)) if state.over == plan.plan);
    assert!(bench.said.iter().any(over));
    assert_eq!(bench.sent_to(A), [(3, Message::Done)]);
    bench.partition(plan.plan.0, Message::Done);
    assert_eq!(bench.coordinator.running(), None);
}

/// The clock jumps. So a contribution is granted in the moment in which its client's lease ends.
#[test]
fn a_client_that_is_given_up_hears_which_of_its_plans_counts() {
    let mut bench = Bench::new();
    bench.commit(A, 1, 1, 2);
    bench.commit(B, 2, 1, 2);
    let counts = bench.started().plan;
    bench.carries_out(counts);
    bench.commit(A, 1, 2, 3);
    bench.said.clear();
    bench.pass(Now::from_secs(61));
    assert_eq!(bench.coordinator.client_count().0, 0);
    let granted = bench.sent_to(A).into_iter().find_map(|(_, message)| match message {
        Message::Grant { counted, .. } => Some(counted),
        _ => None,
    });
    assert_eq!(granted, Some(counts));
}

/// Learner 1's client commits and pings, and sends nothing of what it is granted.
#[test]
fn a_client_that_withholds_its_grant_holds_the_job_up_for_the_lease_alone() {
    let mut bench = Bench::both_committed_under_a_lease();
    let plan = bench.started().plan;
    let begun = bench.now;
    let mut lacking = 4;
    while bench.coordinator.client_count().0 == 2 {
        [A, B].into_iter().for_each(|client| bench.coordinator.client_alive(client, bench.now));
        bench.said.clear();
        bench.pass(REPEAT);
        // One block comes, and then no other one.
        lacking -= u32::from(bench.now == begun + 2 * REPEAT);
        bench.partition(0, Message::Lacking { plan, clients: vec![(A, lacking)] });
        assert!(bench.now <= begun + Now::from_secs(9), "it is still in the job");
    }
    assert_eq!(bench.now, begun + Now::from_secs(8), "the lease, and 4 s, run from its last block");
    let close = bench.said.iter().find_map(|said| match said {
        Action::Close(A, why) => Some(why.to_string()),
        _ => None,
    });
    assert!(close.is_some_and(|why| why.contains("the client of a was granted")), "it is named");
    assert_eq!(bench.sent_to_partition().last(), Some(&Message::Drop { plan }));
    bench.partition(plan.0, Message::Done);
    bench.pass(PATIENCE);
    let next = bench.started();
    assert_eq!(clients(&next), [B]);
}

/// The shard has each plan dropped sooner than it is asked what it lacks.
#[test]
fn a_client_that_withholds_its_grant_is_given_up_also_if_plans_are_dropped_all_the_time() {
    let mut bench = Bench::both_committed_under_a_lease();
    let begun = bench.now;
    while bench.coordinator.client_count().0 == 2 {
        let plan = bench.started().plan;
        [A, B].into_iter().for_each(|client| bench.coordinator.client_alive(client, bench.now));
        bench.said.clear();
        bench.pass(REPEAT / 5);
        bench.partition(0, Message::Torn { plan });
        assert_eq!(bench.sent_to_partition(), [Message::Drop { plan }]);
        bench.partition(0, Message::Lacking { plan, clients: vec![(A, 4), (B, 0)] });
        bench.partition(plan.0, Message::Done);
        assert!(bench.now <= begun + Now::from_secs(9), "it is still in the job");
    }
    assert_eq!(bench.now, begun + Now::from_secs(7), "the lease, and 4 s");
    assert!(bench.said.iter().any(|said| matches!(said, Action::Close(A, _))));
}

/// Plans that wait for it are dropped. New weights of the other client are made between two of them.
#[test]
fn a_client_that_withholds_its_grant_is_given_up_also_if_new_weights_come_meanwhile() {
    let mut bench = Bench::both_committed_under_a_lease();
    let (begun, mut published) = (bench.now, 0);
    while bench.coordinator.client_count().0 == 2 {
        let Plan { plan, work, .. } = bench.started();
        if let Work::Assign { .. } = work {
            bench.partition(0, Message::Ready { plan });
            published += 1;
        } else {
            if bench.now == begun + Now::from_secs(3) {
                bench.client(B, 4, assign(4, 100_000));
            }
            [A, B].into_iter().for_each(|client| bench.coordinator.client_alive(client, bench.now));
            bench.pass(REPEAT / 5);
            bench.partition(0, Message::Torn { plan });
            bench.partition(0, Message::Lacking { plan, clients: vec![(A, 4), (B, 0)] });
        }
        bench.said.clear();
        bench.partition(plan.0, Message::Done);
        assert!(bench.now <= begun + Now::from_secs(9), "it is still in the job");
    }
    assert_eq!((bench.now, published), (begun + Now::from_secs(7), 1), "the lease, and 4 s");
}

#[test]
fn a_contribution_that_is_alone_for_long_is_added_up_and_answered() {
    let mut bench = Bench::new();
    bench.commit(A, 1, 1, 2);
    bench.pass(PATIENCE);
    let plan = bench.started();
    assert_eq!(plan.work, Work::Add { combine: Combine::Sum });
    bench.carries_out(plan.plan);
    assert!(bench.sent_to(A).contains(&(3, Message::Done)), "it is at the shards for good");
    // The other one makes the version, from its own and what is kept.
    bench.commit(B, 2, 1, 2);
    let next = bench.started();
    let Work::Reduce { step, .. } = &next.work else { panic!("{next:?}") };
    assert_eq!(step.contributions, 2);
    assert_eq!(clients(&next), [B]);
}

#[test]
fn a_step_that_needs_its_norm_is_measured_before_it_is_made() {
    let controls = Controls::default().with("learners", "2").unwrap().with("clip_norm", "1").unwrap();
    let mut bench = Bench {
        coordinator: CoordinatorCore::new(&layout(4), 2, controls, PATIENCE).unwrap(),
        ..Bench::new()
    };
    for (client, name) in [(A, "a"), (B, "b")] {
        bench.coordinator.client_up(client, bench.now, &mut bench.said).unwrap();
        bench.client(client, 1, Message::Join { name: name.into() });
    }
    bench.commit(A, 1, 1, 2);
    bench.said.clear();
    bench.commit(B, 2, 1, 2);
    let plan = bench.started();
    let Work::Measure { step, tensors, quantity: Quantity::Gradient, .. } = &plan.work else {
        panic!("{plan:?}")
    };
    assert_eq!((step.contributions, step.norm, tensors.runs()), (2, None, &[(2, 1)][..]));
    assert_eq!(plan.sources.len(), 2);
    let measured = |value: f64| {
        let mut squares = ExactSum::default();
        squares.add(value);
        Message::Measured { plan: plan.plan, squares: Squares::Gradient(squares) }
    };
    let says = |bench: &mut Bench, partition, request, message| {
        bench.coordinator.from_partition(partition, request, message, bench.now, &mut bench.said);
    };
    // A repeated result counts once, and `Ready` is no result.
    says(&mut bench, 0, 0, measured(f64::INFINITY));
    says(&mut bench, 0, 0, measured(1.0));
    says(&mut bench, 1, 0, Message::Ready { plan: plan.plan });
    assert_eq!(bench.sent_to_partition(), []);
    says(&mut bench, 1, 0, measured(f64::NAN));
    says(&mut bench, 1, 0, measured(1.0));
    let concludes = Message::Conclude { plan: plan.plan };
    assert_eq!(bench.sent_to_partition(), [concludes.clone(), concludes]);
    bench.said.clear();
    for partition in [0, 1] {
        says(&mut bench, partition, plan.plan.0, Message::Done);
    }
    let next = bench.started();
    let Work::Reduce { step, .. } = &next.work else { panic!("{next:?}") };
    assert!(step.norm.unwrap().get().is_nan() && next.sources.is_empty());
    bench.pass(REPEAT);
    assert_eq!(bench.started(), next, "it is the same when it is repeated");
    for partition in [0, 1] {
        says(&mut bench, partition, 0, Message::Ready { plan: next.plan });
    }
    assert!(bench.said.contains(&Action::Published(Version(1))));
    assert!(bench.coordinator.state(A, bench.now).norm.unwrap().get().is_nan());
}

#[test]
fn a_client_that_is_lost_in_mid_plan_takes_the_plan_with_it() {
    let (mut bench, plan) = Bench::both_committed();
    bench.pass(Now::from_secs(30));
    bench.client(A, 0, Message::Ping);
    bench.said.clear();
    bench.pass(Now::from_secs(31));
    assert_eq!(bench.sent_to_partition().last(), Some(&Message::Drop { plan: plan.plan }));
    assert_eq!(bench.coordinator.client_count(), (1, 1));
    assert!(bench.sent_to(A).contains(&(0, Message::Over { plan: plan.plan })));
    // The next plan begins when the shard has given up this one.
    bench.partition(plan.plan.0, Message::Done);
    let next = bench.started();
    assert!(next.plan > plan.plan);
    assert_eq!(clients(&next), [A]);
    // Answers about the old plan do not count.
    bench.partition(0, Message::Ready { plan: plan.plan });
    assert_eq!(bench.coordinator.running(), Some((next.plan, vec![0])));
}

#[test]
fn a_request_that_is_repeated_is_carried_out_once() {
    let mut bench = Bench::new();
    bench.commit(A, 1, 1, 2);
    let opened = bench.sent_to(A);
    bench.client(A, 2, Message::Open { learner: LearnerId(1) });
    assert_eq!(bench.sent_to(A), opened, "the same answer");
    bench.client(A, 0, Message::AckThrough { request: 2, newest: 3 });
    bench.client(A, 2, Message::Open { learner: LearnerId(1) });
    assert_eq!(bench.sent_to(A), [], "what was sent is not said again");
    assert_eq!(
        bench.coordinator.kept(),
        (1, 1),
        "the commit waits; the join of the other client was not sent"
    );
}

#[test]
fn a_contribution_with_nan_is_refused_and_the_others_go_on() {
    let (mut bench, plan) = Bench::both_committed();
    bench.said.clear();
    let block = libmodelio::vocabulary::ids::BlockId(3);
    bench.partition(0, Message::NonFinitePayload { plan: plan.plan, client: B, block });
    assert_eq!(bench.sent_to_partition(), [Message::Drop { plan: plan.plan }]);
    let refused = Message::Refused(ShardError::NonFinite(block).into());
    assert!(bench.sent_to(B).contains(&(3, refused)));
    bench.partition(plan.plan.0, Message::Done);
    // Its learner may commit the step again.
    bench.commit(B, 2, 1, 4);
    let next = bench.started();
    assert_eq!(next.sources.len(), 2);
}

#[test]
fn a_client_that_lacks_what_it_was_granted_does_not_hold_the_job_up() {
    let (mut bench, plan) = Bench::both_committed();
    bench.client(B, 0, Message::SourceGone { plan: plan.plan, learner: Some(LearnerId(2)) });
    assert_eq!(bench.sent_to_partition(), [Message::Drop { plan: plan.plan }]);
    assert!(bench.sent_to(B).contains(&(3, Message::Refused(ShardError::Interrupted.into()))));
}

#[test]
fn no_new_weights_of_a_client_that_is_gone_are_waited_for() {
    let mut bench = Bench::new();
    let assign = |token| assign(token, 600_000);
    bench.client(B, 2, Message::SetControl { name: "reducer".into(), value: "assign".into() });
    // Two programs of the first client write weights while a write of the second one is being published.
    bench.client(B, 3, assign(1));
    let running = bench.started();
    bench.client(A, 2, assign(1));
    bench.client(A, 3, assign(2));
    bench.now += bench.coordinator.job().controls().lease;
    bench.coordinator.client_alive(B, bench.now);
    bench.pass(Now::ZERO);
    assert_eq!(bench.coordinator.client_count().1, 1, "the first client is given up");
    bench.said.clear();
    bench.carries_out(running.plan);
    assert_eq!(bench.coordinator.running(), None, "nobody can send what it would wait for");
    assert_eq!(bench.coordinator.job().version(), Version(1));
}

#[test]
fn a_coordinator_that_was_stopped_blames_nobody_for_that_time() {
    let mut bench = Bench::new();
    let lease = bench.coordinator.job().controls().lease;
    // One client's connection did not outlast it.
    bench.coordinator.client_down(A, bench.now, &mut bench.said);
    bench.pass(lease / 2);
    let pause = 10 * lease;
    bench.now += pause;
    bench.coordinator.forgive_silence(pause, bench.now);
    bench.pass(Now::ZERO);
    assert_eq!(bench.coordinator.client_count().1, 2, "their silence was half a lease");
    assert_eq!(bench.coordinator.job().members(bench.now).len(), 2);
    bench.pass(lease / 2);
    assert_eq!(bench.coordinator.client_count().1, 0, "it is forgiven, and no more than that");
    // Clocks of a process that has just begun are not ahead of it.
    bench.coordinator.forgive_silence(Now::MAX, bench.now);
}

fn timed_out(answer: &(u64, Message)) -> bool {
    matches!(answer, (_, Message::Refused(Refusal::Shard(ShardError::TimedOut(_)))))
}

#[test]
fn lent_payload_is_in_no_plan_after_its_commit_has_timed_out() {
    let (mut bench, plan) = Bench::both_committed_as(true);
    assert_eq!(bench.coordinator.next_deadline().min(Now::from_secs(10)), bench.coordinator.next_deadline());
    bench.client(A, 0, Message::Ping);
    bench.said.clear();
    bench.pass(Now::from_secs(10));
    assert_eq!(bench.sent_to_partition().last(), Some(&Message::Drop { plan: plan.plan }));
    let sent = bench.sent_to(A);
    assert!(sent.contains(&(0, Message::Over { plan: plan.plan })) && sent.iter().any(timed_out), "{sent:?}");
    // The other one's stays where it is, and its commit is taken.
    bench.partition(0, Message::Ready { plan: plan.plan });
    assert!(!bench.said.contains(&Action::Published(Version(1))), "it was dropped");
    bench.partition(plan.plan.0, Message::Done);
    bench.pass(PATIENCE);
    let next = bench.started();
    assert_eq!(clients(&next), [B]);
    // Its learner commits the same step anew.
    bench.client(A, 4, Message::Abort { learner: LearnerId(1) });
    bench.commit_as(A, 1, 1, 5, true);
    bench.carries_out(next.plan);
    let last = bench.started();
    assert_eq!(clients(&last), [A]);
}

#[test]
fn lent_payload_is_in_no_plan_when_nobody_waits_for_it() {
    let learner = LearnerId(1);
    for end in [Message::Abort { learner }, Message::Withdraw { learner }, Message::Open { learner }] {
        let (mut bench, plan) = Bench::both_committed_as(true);
        bench.client(A, 4, end.clone());
        assert_eq!(bench.sent_to_partition(), [Message::Drop { plan: plan.plan }], "{end:?}");
        let sent = bench.sent_to(A);
        assert!(sent.contains(&(3, Message::Refused(ShardError::Interrupted.into()))), "{sent:?}");
        if matches!(end, Message::Open { .. }) {
            assert!(sent.contains(&(4, Message::Opened { step: Step(1), staging_lent: false })), "{sent:?}");
        }
        // Memory that is not lent stays at its client until the plan is over, unless its program takes it back.
        let (mut bench, plan) = Bench::both_committed();
        let dropped = matches!(end, Message::Abort { .. }).then_some(Message::Drop { plan: plan.plan });
        bench.client(A, 4, end);
        assert_eq!(bench.sent_to_partition(), dropped.into_iter().collect::<Vec<_>>());
    }
}

#[test]
fn lent_payload_that_was_read_too_late_is_read_again_and_nobody_is_blamed() {
    let (mut bench, plan) = Bench::both_committed_as(true);
    bench.said.clear();
    bench.partition(0, Message::Torn { plan: plan.plan });
    assert_eq!(bench.sent_to_partition(), [Message::Drop { plan: plan.plan }]);
    bench.partition(0, Message::Torn { plan: plan.plan });
    assert_eq!(bench.sent_to_partition(), [], "said again");
    bench.partition(plan.plan.0, Message::Done);
    let next = bench.started();
    assert_eq!((next.sources, next.work), (plan.sources, plan.work));
    let is_refused =
        |(request, message): &(u64, Message)| *request > 0 && matches!(message, Message::Refused(_));
    let sent = [bench.sent_to(A), bench.sent_to(B)].concat();
    assert!(!sent.iter().any(is_refused), "{sent:?}");
}

#[test]
fn a_commit_that_comes_late_does_not_end_the_wait_of_one_that_was_sent_anew() {
    let mut bench = Bench::new();
    let commit = commit_message(1, 1, ALL, 10_000, false);
    bench.client(A, 4, commit.clone());
    assert!(bench.sent_to(A).is_empty(), "it waits for the other one of the step");
    bench.client(A, 3, commit);
    let interrupted = Message::Refused(ShardError::Interrupted.into());
    assert_eq!(bench.sent_to(A), [(3, interrupted)], "nobody waits for it");
    bench.commit(B, 2, 1, 2);
    let plan = bench.started();
    bench.partition(0, Message::Ready { plan: plan.plan });
    assert!(bench.sent_to(A).contains(&(4, Message::Done)));
}

#[test]
fn an_error_says_which_shards_were_waited_for() {
    let mut bench = Bench::new();
    bench.coordinator = bench.coordinator.on_shards(vec![ShardId(5)]);
    bench.client(A, 2, assign(7, 3000));
    bench.started();
    bench.coordinator.are_away(vec![ShardId(5)], bench.now, &mut bench.said);
    bench.said.clear();
    bench.pass(Now::from_secs(3));
    let said = format!("{:?}", bench.sent_to(A));
    assert!(said.contains("; out of reach: shard 5"), "{said}");
    bench.partition(0, Message::Refused(Refusal::NoModel("m".into())));
    bench.commit(A, 1, 1, 3);
    let said = format!("{:?} {:?}", bench.sent_to(A), bench.coordinator.failed());
    assert_eq!(said.matches("shard 5 does not have this job's blocks any more").count(), 3, "{said}");
}
