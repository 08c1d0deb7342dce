//! What somebody says who is not of the job: numbers that nobody has reached, in the name of a client or of a shard.

use libmodelio::wire::MAX_SKIPPED;

use super::*;

const FAR: [u64; 3] = [1 << 63, u64::MAX - 1, u64::MAX];

#[test]
fn a_number_that_nobody_has_reached_does_not_make_the_coordinator_deaf() {
    for number in FAR.into_iter().chain([2 + MAX_SKIPPED]) {
        let mut bench = Bench::new();
        bench.client(A, 2, Message::Open { learner: LearnerId(1) });
        let answers = bench.heard_by(A);
        // Neither word changes anything, and both are answered.
        bench.client(A, number, Message::Abort { learner: LearnerId(1) });
        let why = format!("request {number} is too far ahead: the newest of the client is 2");
        if number == 2 + MAX_SKIPPED {
            assert_eq!(bench.heard_by(A)[0].1.name(), "Done", "so many may have been given up");
            continue;
        }
        assert_eq!(bench.heard_by(A), [(number, Message::Refused(Refusal::Other(why.clone())))]);
        bench.client(A, 0, Message::Heard { request: number });
        assert_eq!(bench.said, [Action::Close(A, Refusal::Other(why))]);
        bench.said.clear();
        bench.client(A, 2, Message::Open { learner: LearnerId(1) });
        assert_eq!(bench.heard_by(A), answers, "what was not heard is said again");
        bench.commit(A, 1, 1, 3);
        bench.commit(B, 2, 1, 2);
        assert_eq!(bench.started().sources.len(), 2);
    }
}

#[test]
fn requests_that_were_given_up_before_they_came_stop_no_later_one() {
    let mut bench = Bench::new();
    bench.client(A, 0, Message::Heard { request: 1000 });
    assert_eq!(bench.said, []);
    bench.commit(A, 1, 1, 2);
    bench.commit(B, 2, 1, 2);
    assert_eq!(bench.started().sources.len(), 2);
}

#[test]
fn a_plan_that_a_shard_takes_for_past_is_begun_again_under_the_next_number() {
    let mut bench = Bench::new();
    bench.commit(A, 1, 1, 2);
    bench.commit(B, 2, 1, 2);
    let plan = bench.started();
    bench.said.clear();
    let past = |plan: PlanId, newest| Message::Refused(Refusal::Plan { plan, newest });
    // Of another one, or one whose turn has not come there: it is said again.
    bench.part(77, past(PlanId(77), PlanId(99)));
    bench.part(plan.plan.0, past(plan.plan, PlanId(plan.plan.0 - 1)));
    assert_eq!(bench.heard_by_part(), []);
    bench.part(plan.plan.0, past(plan.plan, plan.plan));
    assert_eq!(bench.heard_by_part(), [Message::Drop { plan: plan.plan }]);
    bench.part(plan.plan.0, Message::Done);
    let next = bench.started();
    assert_eq!(next, libmodelio::wire::Plan { plan: PlanId(plan.plan.0 + 1), ..plan });
    // Once it is concluded, no such word changes anything.
    bench.part(0, Message::Ready { plan: next.plan });
    bench.part(next.plan.0, past(next.plan, next.plan));
    assert!(bench.lead.failed().is_none());
    assert_eq!(bench.lead.job().version(), libmodelio::ids::Version(1));
}

#[test]
fn a_refusal_of_what_is_over_does_not_fail_the_job() {
    let mut bench = Bench::new();
    bench.commit(A, 1, 1, 2);
    bench.commit(B, 2, 1, 2);
    let plan = bench.started();
    bench.part(plan.plan.0 + 5, Message::Refused(Refusal::other("another one")));
    bench.part(0, Message::Spoilt { plan: PlanId(u64::MAX), client: A, block: libmodelio::ids::BlockId(0) });
    bench.part(
        0,
        Message::Spoilt { plan: plan.plan, client: ClientId(99), block: libmodelio::ids::BlockId(0) },
    );
    bench.part(0, Message::Ready { plan: PlanId(u64::MAX) });
    assert!(bench.lead.failed().is_none());
    assert_eq!(bench.lead.running(), Some((plan.plan, vec![0])));
    bench.part(plan.plan.0, Message::Refused(Refusal::other("this one")));
    assert!(bench.lead.failed().is_some());
}

#[test]
fn a_shard_that_comes_back_hears_which_plan_is_meant_before_what_becomes_of_it() {
    let mut bench = Bench::new();
    bench.commit(A, 1, 1, 2);
    bench.commit(B, 2, 1, 2);
    let plan = bench.started();
    assert_eq!(bench.lead.over(), PlanId(0));
    bench.part(0, Message::Ready { plan: plan.plan });
    assert_eq!(bench.heard_by_part(), [Message::Conclude { plan: plan.plan }]);
    assert_eq!(bench.lead.over(), plan.plan);
    bench.lead.part_up(0, &mut bench.said);
    let both = [Message::Start(plan.clone()), Message::Conclude { plan: plan.plan }];
    assert_eq!(bench.heard_by_part(), both);
    bench.pass(Now::from_millis(600));
    assert_eq!(bench.heard_by_part(), both);
}
