//! Holding a job between two versions, and taking it elsewhere.

use libmodelio::vocabulary::members::{Attached, LifeSign};
use libmodelio::vocabulary::reducer::Combine;
use proptest::prelude::*;

use super::*;

fn release(bench: &mut Bench) {
    bench.coordinator.release(bench.now, &mut bench.said);
}

/// A shard that is ready at once, until it has nothing to do.
fn shard_works(bench: &mut Bench) {
    for _ in 0..8 {
        let Some((plan, _)) = bench.coordinator.running() else { return };
        bench.carries_out(plan);
    }
}

#[test]
fn a_job_is_held_when_its_step_is_out_and_goes_on_when_it_is_released() {
    let mut bench = Bench::new();
    // The first one's contribution is in a sum that the shards keep.
    bench.commit(A, 1, 1, 2);
    bench.pass(PATIENCE);
    shard_works(&mut bench);
    assert!(bench.sent_to(A).contains(&(3, Message::Done)));
    bench.hold();
    assert!(!bench.coordinator.is_held());
    assert_eq!(bench.coordinator.held_up_by(), "version 1 waits for the learner(s) b");
    assert!(bench.coordinator.hand_over().is_err());
    bench.sent_to_partition();
    bench.commit(B, 2, 1, 2);
    let plan = bench.started();
    assert!(
        bench.coordinator.held_up_by().starts_with("plan 2 is under way"),
        "{}",
        bench.coordinator.held_up_by()
    );
    bench.partition(0, Message::Ready { plan: plan.plan });
    assert!(!bench.coordinator.is_held(), "the shard may not know yet that the plan counts");
    bench.partition(plan.plan.0, Message::Done);
    assert!(bench.coordinator.is_held());
    assert_eq!(bench.coordinator.job().version(), Version(1));
    // The next step is whole, and waits.
    bench.sent_to_partition();
    bench.commit(A, 1, 2, 4);
    bench.pass(PATIENCE);
    bench.commit(B, 2, 2, 4);
    bench.pass(PATIENCE);
    assert!(bench.sent_to_partition().is_empty());
    assert!(bench.coordinator.is_held());
    release(&mut bench);
    assert!(matches!(bench.started().work, Work::Reduce { .. }));
}

#[test]
fn nothing_is_added_up_ahead_while_a_job_is_to_be_held() {
    let (mut bench, plan) = Bench::both_committed();
    bench.hold();
    bench.carries_out(plan.plan);
    bench.sent_to_partition();
    bench.commit(A, 1, 2, 4);
    for _ in 0..10 {
        bench.pass(PATIENCE);
    }
    assert!(bench.sent_to_partition().is_empty());
    release(&mut bench);
    assert_eq!(bench.started().work, Work::Add { combine: Combine::Sum });
}

#[test]
fn deadlines_go_on_while_a_job_is_held() {
    let mut bench = Bench::new();
    bench.hold();
    bench.commit(A, 1, 1, 2);
    bench.pass(Now::from_secs(10));
    let answers = bench.sent_to(A);
    let timed_out = |answer: &(u64, Message)| {
        matches!(answer, (3, Message::Refused(Refusal::Shard(ShardError::TimedOut(_)))))
    };
    assert!(answers.iter().any(timed_out), "{answers:?}");
    // The state was not taken, so it may come again.
    release(&mut bench);
    bench.commit(A, 1, 1, 4);
    bench.commit(B, 2, 1, 2);
    assert_eq!(bench.started().sources.len(), 2);
}

#[test]
fn new_weights_wait_while_a_job_is_held() {
    let mut bench = Bench::new();
    bench.hold();
    bench.client(A, 2, assign(7, 10_000));
    assert!(bench.sent_to_partition().is_empty());
    release(&mut bench);
    assert_eq!(bench.started().work, Work::Assign { token: 7 });
}

#[test]
fn nobodys_lease_ends_because_the_job_is_held() {
    let mut bench = Bench::new();
    bench.hold();
    bench.client(A, 2, commit_message(1, 1, ALL, 1 << 30, false));
    // A living program that does nothing, as far as anybody knows.
    bench.client(
        B,
        0,
        Message::Touch { learners: vec![LearnerId(2)], sign: LifeSign::Process(Attached::Yes) },
    );
    for _ in 0..200 {
        bench.pass(Now::from_secs(1));
        bench.coordinator.client_alive(A, bench.now);
        bench.coordinator.client_alive(B, bench.now);
    }
    assert_eq!(bench.coordinator.job().members(bench.now).len(), 2);
}

/// The coordinator goes on at another shard, where its clients come to it.
fn taken_over(bench: &Bench, partitions: usize) -> Bench {
    let bytes = bench.coordinator.hand_over().unwrap();
    let coordinator = CoordinatorCore::taken_over(&bytes, &layout(4), partitions, bench.now).unwrap();
    Bench { coordinator, now: bench.now, said: Vec::new() }
}

#[test]
fn a_coordinator_that_is_taken_over_goes_on_with_the_steps_of_each_tensor() {
    let mut bench = Bench::new();
    let steps = |plan: Plan| match plan.work {
        Work::Reduce { tensors, .. } => tensors,
        other => panic!("{other:?}"),
    };
    // The second tensor has one step behind it, the first two.
    for (step, tensors) in [(1, 0..2), (2, 0..1)] {
        bench.commit_of(A, 1, step, 2 * step, (0..2, tensors.clone()));
        bench.commit_of(B, 2, step, 2 * step, (0..2, 0..1));
        let plan = bench.started();
        let expected = if step == 1 { vec![(2, 1)] } else { vec![(1, 2), (1, 0)] };
        assert_eq!(steps(plan).runs(), expected, "those of both learners together");
        shard_works(&mut bench);
        bench.sent_to_partition();
    }
    bench.hold();
    let mut there = taken_over(&bench, 1);
    there.coordinator.go_on(there.now, &mut there.said);
    there.commit_of(A, 1, 3, 6, (0..2, 0..1));
    there.commit_of(B, 2, 3, 6, (2..4, 1..2));
    assert_eq!(steps(there.started()).runs(), [(1, 3), (1, 2)]);
}

#[test]
fn a_coordinator_that_is_taken_over_remembers_all() {
    let mut bench = Bench::new();
    bench.commit(A, 1, 1, 2);
    bench.commit(B, 2, 1, 2);
    shard_works(&mut bench);
    bench.hold();
    bench.pass(Now::from_secs(50));
    bench.commit(A, 1, 2, 4);
    let mut there = taken_over(&bench, 3);
    assert!(
        CoordinatorCore::taken_over(&bench.coordinator.hand_over().unwrap(), &layout(5), 1, bench.now)
            .is_err()
    );
    assert!(CoordinatorCore::taken_over(b"anything", &layout(4), 1, bench.now).is_err());
    there.coordinator.go_on(there.now, &mut there.said);
    there.pass(PATIENCE);
    // Its lease began anew: clients could not be heard meanwhile.
    there.pass(Now::from_secs(20));
    assert_eq!(there.coordinator.client_count(), (0, 2));
    for client in [A, B] {
        there.coordinator.client_up(client, there.now, &mut there.said).unwrap();
    }
    // A request that was carried out is answered, and not carried out again.
    there.said.clear();
    let leave =
        Message::Leave { learner: LearnerId(1), reason: libmodelio::vocabulary::members::LeaveReason::Asked };
    there.client(A, 3, leave);
    assert_eq!(there.sent_to(A), [(3, Message::Done)], "as the commit was answered");
    assert_eq!(there.coordinator.job().members(there.now).len(), 2);
    // The plan of the commit that waited begins when its time has come, and plans' numbers go on.
    let (plan, partitions) = there.coordinator.running().unwrap();
    assert_eq!((plan, partitions), (PlanId(2), vec![0, 1, 2]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever has happened, a coordinator that takes over answers as the one before it would have.
    #[test]
    fn a_coordinator_goes_on_elsewhere_as_it_would_have_here(
        consistency in prop_oneof![Just("sync"), Just("quorum(1)"), Just("ssp(1)"), Just("async")],
        before in proptest::collection::vec((0..8u8, 0..2usize), 0..40),
        after in proptest::collection::vec((0..8u8, 0..2usize), 1..40),
    ) {
        let mut bench = Bench::new();
        let set = Message::SetControl { name: "consistency".into(), value: consistency.into() };
        bench.client(A, 2, set);
        let mut requests = [2, 1];
        run(&mut bench, &mut requests, &before);
        bench.hold();
        // The step under way comes to its end.
        for _ in 0..4 {
            run(&mut bench, &mut requests, &[(0, 0), (0, 1), (7, 0)]);
        }
        prop_assert!(bench.coordinator.is_held(), "{}", bench.coordinator.held_up_by());
        let mut there = taken_over(&bench, 1);
        for client in [A, B] {
            bench.coordinator.client_down(client, bench.now, &mut bench.said);
            bench.coordinator.client_alive(client, bench.now);
        }
        bench.coordinator.core.taken_over(bench.now);
        bench.coordinator.states.taken_over(bench.now);
        bench.coordinator.made_from = Default::default();
        for one in [&mut bench, &mut there] {
            one.coordinator.go_on(one.now, &mut one.said);
            for client in [A, B] {
                one.coordinator.client_up(client, one.now, &mut one.said).unwrap();
            }
            one.said.clear();
        }
        let mut again = requests;
        for step in after {
            run(&mut bench, &mut requests, &[step]);
            run(&mut there, &mut again, &[step]);
            prop_assert_eq!(&bench.said, &there.said);
            bench.said.clear();
            there.said.clear();
        }
        let bytes = |coordinator: &CoordinatorCore| postcard::to_stdvec(coordinator).unwrap();
        prop_assert_eq!(bytes(&bench.coordinator), bytes(&there.coordinator));
    }
}

/// Clients that do as they please, and a shard that works now and then.
fn run(bench: &mut Bench, requests: &mut [u64; 2], steps: &[(u8, usize)]) {
    for &(what, who) in steps {
        let (client, learner) = ([A, B][who], LearnerId(who as u32 + 1));
        let step = bench.coordinator.job().member(learner, bench.now).map_or(0, |member| member.step.0 + 1);
        requests[who] += 2;
        let request = requests[who];
        match what {
            0..=2 => bench.commit(client, learner.0, step, request - 1),
            3 => bench.client(client, request, Message::Withdraw { learner }),
            4 => bench.client(client, request, Message::Abort { learner }),
            5 => bench.client(
                client,
                0,
                Message::AckThrough { request: request.saturating_sub(4), newest: request },
            ),
            6 => bench.pass(Now::from_millis(40)),
            _ => {
                bench.pass(PATIENCE);
                shard_works(bench);
            }
        }
    }
}

/// A coordinator that has all kinds of things to remember.
fn full() -> Vec<u8> {
    let mut bench = Bench::new();
    let mut requests = [2, 1];
    run(&mut bench, &mut requests, &[(0, 0), (0, 1), (7, 0), (0, 0), (3, 0), (0, 1), (7, 0), (4, 1)]);
    bench.client(
        B,
        100,
        Message::Assign {
            token: 7,
            blocks: vec![0..2],
            timeout_ms: 10_000,
            ahead: None,
            meta: Default::default(),
        },
    );
    bench.hold();
    for _ in 0..4 {
        run(&mut bench, &mut requests, &[(0, 0), (0, 1), (7, 0)]);
    }
    run(&mut bench, &mut requests, &[(0, 0), (0, 1)]);
    bench.coordinator.hand_over().unwrap()
}

/// A state that is taken goes on.
fn take(bytes: &[u8]) {
    let now = Now::from_secs(60);
    let Ok(mut coordinator) = CoordinatorCore::taken_over(bytes, &layout(4), 1, now) else { return };
    let mut actions = Vec::new();
    coordinator.go_on(now, &mut actions);
    for client in [A, B] {
        drop(coordinator.client_up(client, now, &mut actions));
    }
    for after in [0, 1, 1000, 1_000_000] {
        coordinator.tick(now + Now::from_millis(after), &mut actions);
    }
    coordinator.held_up_by();
}

proptest! {
    #[test]
    fn any_bytes_make_no_coordinator_that_panics(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        take(&bytes);
    }

    #[test]
    fn changed_bytes_make_no_coordinator_that_panics(
        changes in proptest::collection::vec((any::<usize>(), 0..3u8, any::<u8>()), 1..6),
    ) {
        let mut bytes = full();
        for (at, what, value) in changes {
            let at = at % (bytes.len() + 1);
            match what {
                0 if at < bytes.len() => bytes[at] = value,
                1 if at < bytes.len() => drop(bytes.remove(at)),
                _ => bytes.insert(at, value),
            }
        }
        take(&bytes);
    }
}
