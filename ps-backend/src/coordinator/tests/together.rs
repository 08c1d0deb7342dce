//! Provisional plans of several learners, as the coordinator begins, seals and drops them.

use super::*;

/// A job of two learners on clients of their own. Its first version is decided, and the shard has yet to conclude it.
/// Both learners write their next step, and the plan for that waits.
fn waiting() -> (Bench, PlanId) {
    let Bench { coordinator, now, said } = Bench::new();
    let mut bench = Bench { coordinator: coordinator.with_provisional_plans(), now, said };
    bench.commit(A, 1, 1, 2);
    bench.commit(B, 2, 1, 2);
    let plan = bench.started().plan;
    bench.partition(0, Message::Ready { plan });
    for (client, learner) in [(A, 1), (B, 2)] {
        let learner = LearnerId(learner);
        bench.client(client, 4, Message::Open { learner });
        bench.client(client, 0, Message::WholeBlock { learner, step: Step(2) });
    }
    bench.said.clear();
    (bench, plan)
}

fn leave(learner: u32) -> Message {
    Message::Leave { learner: LearnerId(learner), reason: libmodelio::transport::LeaveReason::Asked }
}

#[test]
fn a_learner_that_has_committed_to_a_waiting_plan_and_left_is_part_of_it() {
    let (mut bench, before) = waiting();
    bench.commit_of(A, 1, 2, 5, (0..4, 0..2));
    bench.client(A, 6, leave(1));
    bench.said.clear();
    bench.partition(before.0, Message::Done);
    let plan = bench.started();
    let clients = |plan: &libmodelio::wire::Plan| {
        plan.sources.iter().map(|source| (source.client, source.provisional)).collect::<Vec<_>>()
    };
    assert_eq!(clients(&plan), [(A, true), (B, true)]);
    bench.said.clear();
    bench.commit_of(B, 2, 2, 5, (0..4, 0..2));
    let sealed = bench.started();
    assert_eq!((sealed.plan, clients(&sealed)), (plan.plan, vec![(A, false), (B, false)]));
    bench.partition(0, Message::Ready { plan: plan.plan });
    assert!(bench.sent_to(A).contains(&(5, Message::Done)));
    assert!(bench.sent_to(B).contains(&(5, Message::Done)));
}

/// The turns in the grants and notices to a client, since they were last forgotten.
fn turns(bench: &mut Bench, client: ClientId) -> Vec<Vec<std::ops::Range<u32>>> {
    let turn = |(_, message): (u64, Message)| match message {
        Message::Grant { payload: Granted::Contributions { turn, .. }, .. } => turn,
        Message::Turn { blocks, .. } => Some(blocks),
        _ => None,
    };
    bench.sent_to(client).into_iter().filter_map(turn).collect()
}

#[test]
fn the_clients_of_a_deterministic_job_take_turns_if_the_order_matters() {
    const C: ClientId = ClientId(30);
    for (third, nonfinite) in [(false, "reject"), (true, "reject"), (false, "accept")] {
        let in_order = third || nonfinite == "accept";
        let Bench { coordinator, now, said } = Bench::new();
        let mut bench = Bench { coordinator: coordinator.with_provisional_plans(), now, said };
        let set = |name: &str, value: &str| Message::SetControl { name: name.into(), value: value.into() };
        bench.client(A, 2, set("deterministic", "true"));
        bench.client(A, 3, set("nonfinite", nonfinite));
        if third {
            bench.coordinator.client_up(C, bench.now, &mut bench.said).unwrap();
            bench.client(C, 1, Message::Join { name: "c".into() });
        }
        bench.said.clear();
        let learners = [(B, 2), (A, 1), (C, 3)];
        let learners = &learners[..if third { 3 } else { 2 }];
        for &(client, learner) in learners {
            let learner = LearnerId(learner);
            bench.client(client, 4, Message::Open { learner });
            bench.client(client, 0, Message::WholeBlock { learner, step: Step(1) });
        }
        let plan = bench.started();
        assert_eq!((plan.ordered, plan.sources[0].client), (in_order, A));
        if in_order {
            assert_eq!(turns(&mut bench, A), [vec![0..4]], "all may be sent first");
            assert_eq!(turns(&mut bench, B), [vec![]]);
        } else {
            assert!(turns(&mut bench, A).is_empty() && turns(&mut bench, B).is_empty());
        }
        bench.said.clear();
        let sent = |blocks| Message::SentAhead { plan: plan.plan, blocks };
        bench.client(A, 0, sent(vec![1..3]));
        bench.client(A, 0, sent(vec![1..4]));
        bench.client(A, 0, sent(vec![0..9]));
        let none = Vec::<Vec<_>>::new();
        assert_eq!(turns(&mut bench, B), if in_order { vec![vec![1..3], vec![3..4]] } else { none.clone() });
        bench.said.clear();
        bench.client(B, 0, sent(vec![2..3]));
        assert_eq!(turns(&mut bench, C), if third { vec![vec![2..3]] } else { none.clone() });
        // Another plan's blocks, and those of strangers, mean nothing.
        bench.said.clear();
        bench.client(A, 0, Message::SentAhead { plan: PlanId(plan.plan.0 + 1), blocks: vec![0..1] });
        bench.client(ClientId(99), 0, sent(vec![0..1]));
        assert_eq!((turns(&mut bench, B), turns(&mut bench, C)), (none.clone(), none.clone()));
        // Notices that were lost are in the repeated grant.
        bench.coordinator.client_down(B, bench.now, &mut bench.said);
        bench.coordinator.client_up(B, bench.now, &mut bench.said).unwrap();
        assert_eq!(turns(&mut bench, B), if in_order { vec![vec![1..4]] } else { none });
        for &(client, learner) in learners {
            bench.commit_of(client, learner, 1, 5, (0..4, 0..2));
        }
        assert_eq!(bench.started().ordered, in_order);
    }
}

#[test]
fn a_client_waits_for_no_turn_of_blocks_that_those_before_it_do_not_have() {
    const C: ClientId = ClientId(30);
    let Bench { coordinator, now, said } = Bench::new();
    let mut bench = Bench { coordinator: coordinator.with_provisional_plans(), now, said };
    bench.client(A, 2, Message::SetControl { name: "deterministic".into(), value: "true".into() });
    bench.coordinator.client_up(C, bench.now, &mut bench.said).unwrap();
    bench.client(C, 1, Message::Join { name: "c".into() });
    bench.client(A, 4, Message::Open { learner: LearnerId(1) });
    bench.commit_of(A, 1, 1, 5, (0..2, 0..1));
    bench.said.clear();
    for (client, learner) in [(B, 2), (C, 3)] {
        let learner = LearnerId(learner);
        bench.client(client, 4, Message::Open { learner });
        bench.client(client, 0, Message::WholeBlock { learner, step: Step(1) });
    }
    let plan = bench.started().plan;
    assert_eq!(turns(&mut bench, A), [vec![0..2]]);
    assert_eq!(turns(&mut bench, B), [vec![2..4]], "the first client sends none of these");
    assert_eq!(turns(&mut bench, C), [vec![]]);
    // Whoever speaks out of turn frees nothing before its turn.
    let sent = |blocks| Message::SentAhead { plan, blocks };
    bench.client(B, 0, sent(vec![1..3]));
    assert_eq!(turns(&mut bench, C), [vec![2..3]]);
    bench.client(A, 0, sent(vec![0..2]));
    assert_eq!((turns(&mut bench, B), turns(&mut bench, C)), (vec![vec![0..2]], vec![vec![1..2]]));
}

#[test]
fn whoever_takes_over_knows_how_many_clients_the_learners_have() {
    const C: ClientId = ClientId(30);
    for third in [false, true] {
        let mut bench = Bench::new();
        if third {
            bench.coordinator.client_up(C, bench.now, &mut bench.said).unwrap();
            bench.client(C, 1, Message::Join { name: "c".into() });
        }
        bench.hold();
        let state = bench.coordinator.hand_over().unwrap();
        let taken_over = CoordinatorCore::taken_over(&state, &layout(4), 1, bench.now).unwrap();
        assert_eq!(taken_over.job().order_does_not_matter(), !third);
    }
}

#[test]
fn the_sum_of_a_client_whose_learner_has_committed_and_left_counts_among_the_clients() {
    const C: ClientId = ClientId(30);
    let mut bench = Bench::new();
    bench.coordinator.client_up(C, bench.now, &mut bench.said).unwrap();
    bench.client(C, 1, Message::Join { name: "c".into() });
    bench.commit(C, 3, 1, 2);
    bench.client(C, 4, leave(3));
    assert!(!bench.coordinator.job().order_does_not_matter());
    bench.commit(A, 1, 1, 2);
    bench.commit(B, 2, 1, 2);
    let plan = bench.started();
    assert_eq!(plan.sources.len(), 3);
    bench.partition(0, Message::Ready { plan: plan.plan });
    assert!(bench.coordinator.job().order_does_not_matter(), "the version has it");
}

#[test]
fn a_payload_that_is_gone_fails_the_job_of_one_process_only_if_a_plan_needs_it() {
    // The plan is provisional, dropped, or has all commits, of memory that is lent or not.
    for (commits, drops, lent, fails) in [
        (false, false, false, false),
        (false, true, false, false),
        (true, false, false, true),
        (true, false, true, false),
    ] {
        let Bench { coordinator, now, said } = Bench::new();
        let mut bench = Bench { coordinator: coordinator.in_process(), now, said };
        for (client, learner) in [(A, 1), (B, 2)] {
            let learner = LearnerId(learner);
            bench.client(client, 4, Message::Open { learner });
            bench.client(client, 0, Message::WholeBlock { learner, step: Step(1) });
        }
        let plan = bench.coordinator.provisional_plan().expect("a plan of all");
        if commits {
            bench.commit_as(A, 1, 1, 5, lent);
            bench.commit_as(B, 2, 1, 5, false);
        }
        if drops {
            bench.client(B, 5, Message::Abort { learner: LearnerId(2) });
        }
        bench.client(A, 0, Message::SourceGone { plan, learner: Some(LearnerId(1)) });
        assert_eq!(bench.coordinator.failed().is_some(), fails, "{commits} {drops} {lent}");
    }
}
