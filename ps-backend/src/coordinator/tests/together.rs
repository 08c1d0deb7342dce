//! Provisional plans of several learners, as the coordinator begins, seals and drops them.

use super::*;

/// A job of two learners on clients of their own. Its first version is decided, and the shard has yet to conclude it.
/// Both learners write their next step, and the plan for that waits.
fn waiting() -> (Bench, PlanId) {
    let Bench { coordinator, now, said } = Bench::new();
    let mut bench = Bench { coordinator: coordinator.with_provisional_plans(), now, said };
    let plan = bench.both_commit(false).plan;
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
    Message::Leave {
        learner: LearnerId(learner),
        reason: libmodelio::vocabulary::members::LeaveReason::Asked,
    }
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
        let mut bench = Bench { coordinator: coordinator.with_local_shard(), now, said };
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
