//! The coordinator's memory of requests that it has carried out, across hand-overs and after it gave a client
//! up.

use super::*;

/// The answers to client A.
fn answers(bench: &mut Bench) -> Vec<(u64, Message)> {
    bench.sent_to(A).into_iter().filter(|(request, _)| *request > 0).collect()
}

/// A shard carries out one plan; returns the work that it was told to start.
fn shard_works_once(bench: &mut Bench) -> Work {
    let plan = bench.started();
    bench.carries_out(plan.plan);
    plan.work
}

/// The coordinator goes on at another shard, and its clients connect there.
fn taken_over(bench: &mut Bench) -> Bench {
    bench.hold();
    let bytes = bench.coordinator.hand_over().unwrap();
    let coordinator = CoordinatorCore::taken_over(&bytes, &layout(4), 1, bench.now).unwrap();
    let mut there = Bench { coordinator, now: bench.now, said: Vec::new() };
    there.coordinator.go_on(there.now, &mut there.said);
    for client in [A, B] {
        there.coordinator.client_up(client, there.now, &mut there.said).unwrap();
    }
    there.said.clear();
    there
}

#[test]
fn a_coordinator_that_is_taken_over_gives_kept_answers_again_and_carries_out_nothing_twice() {
    let mut bench = Bench::new();
    bench.client(A, 2, assign(7, 100_000));
    assert_eq!(shard_works_once(&mut bench), Work::Assign { token: 7 });
    bench.client(A, 3, Message::Join { name: "late".into() });
    let answers = answers(&mut bench);
    assert_eq!(answers[0], (2, Message::Done));
    assert!(matches!(answers[1], (3, Message::Joined { .. })), "{answers:?}");
    // None of the answers reached the client, which asks the next coordinator for the same.
    let mut there = taken_over(&mut bench);
    there.client(A, 2, assign(7, 100_000));
    there.client(A, 3, Message::Join { name: "late".into() });
    assert_eq!(self::answers(&mut there), answers);
    assert!(there.sent_to_partition().is_empty(), "the weights are written once");
    assert_eq!(there.coordinator.job().members(there.now).len(), 3);
}

/// Client A writes weights, is silent until it is given up, and comes back.
fn given_up() -> Bench {
    let mut bench = Bench::new();
    bench.client(A, 2, assign(7, 100_000));
    assert_eq!(shard_works_once(&mut bench), Work::Assign { token: 7 });
    let lease = bench.coordinator.job().controls().lease;
    bench.coordinator.client_alive(B, bench.now + lease);
    bench.pass(lease);
    assert_eq!(bench.coordinator.client_count(), (1, 1), "the silent client is given up");
    bench
}

/// The client repeats a request that was carried out, and makes a new one.
fn asks_again(bench: &mut Bench) {
    bench.said.clear();
    bench.client(A, 2, assign(7, 100_000));
    let answers = answers(bench);
    let unknown = |answer: &(u64, Message)| {
        matches!(answer, (2, Message::Refused(Refusal::Shard(ShardError::TimedOut(_)))))
    };
    assert!(answers.len() == 1 && answers.iter().all(unknown), "{answers:?}");
    assert!(bench.sent_to_partition().is_empty(), "the weights are written once");
    bench.client(A, 3, Message::Join { name: "again".into() });
    assert!(matches!(self::answers(bench)[..], [(3, Message::Joined { .. })]));
}

#[test]
fn nothing_that_a_client_asked_for_before_it_was_given_up_is_carried_out_twice() {
    let mut bench = given_up();
    bench.coordinator.client_up(A, bench.now, &mut bench.said).unwrap();
    asks_again(&mut bench);
}

#[test]
fn clients_that_were_given_up_are_remembered_by_the_next_coordinator() {
    let mut bench = given_up();
    asks_again(&mut taken_over(&mut bench));
}

#[test]
fn optimizer_steps_go_on_where_they_were_under_the_next_coordinator() {
    let mut bench = Bench::new();
    let set = Message::SetControl { name: "reducer".into(), value: "adam".into() };
    bench.client(A, 2, set);
    let steps = |bench: &mut Bench, step: u64| {
        bench.commit(A, 1, step, 2 * step + 1);
        bench.commit(B, 2, step, 2 * step);
        let Work::Reduce { step, fresh_state, .. } = shard_works_once(bench) else {
            panic!("a step of the optimizer")
        };
        (step.t, fresh_state)
    };
    assert_eq!(steps(&mut bench, 1), (1, true));
    assert_eq!(steps(&mut bench, 2), (2, false));
    let mut there = taken_over(&mut bench);
    assert_eq!(steps(&mut there, 3), (3, false));
}
