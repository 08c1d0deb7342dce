//! Numbers that learners reduce among themselves.

use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::wire::ReduceOp;

use super::*;

fn numbers(learner: u32, value: f64) -> Message {
    Message::AllReduce {
        learner: LearnerId(learner),
        op: ReduceOp::Sum,
        values: vec![value],
        timeout_ms: 2_000,
    }
}

fn results(value: f64) -> Message {
    Message::AllReduced { values: vec![value] }
}

#[test]
fn each_learner_has_the_results_once_and_again_if_it_asks_again() {
    let mut bench = Bench::new();
    bench.client(A, 2, numbers(1, 1.5));
    assert_eq!(bench.sent_to(A), []);
    bench.client(A, 2, numbers(1, 1.5));
    bench.client(B, 2, numbers(2, 2.0));
    assert_eq!((bench.sent_to(A), bench.sent_to(B)), (vec![(2, results(3.5))], vec![(2, results(3.5))]));
    bench.client(B, 2, numbers(2, 2.0));
    assert_eq!(bench.sent_to(B), [(2, results(3.5))], "the answer was lost");
    bench.client(B, 3, numbers(2, 7.0));
    assert_eq!(bench.sent_to(B), [], "the next round");
}

#[test]
fn a_learner_gives_only_its_own_numbers_and_waits_for_those_who_are_in_the_job() {
    let mut bench = Bench::new();
    bench.client(A, 2, numbers(2, 1.0));
    assert!(matches!(&bench.sent_to(A)[..], [(2, Message::Refused(_))]));
    bench.client(A, 3, numbers(1, 1.0));
    bench.pass(Now::from_secs(2));
    assert!(matches!(&bench.sent_to(A)[..], [(3, Message::Refused(_))]), "the deadline is over");
    bench.client(A, 4, numbers(1, 1.0));
    bench.client(B, 2, Message::Leave { learner: LearnerId(2), reason: LeaveReason::Asked });
    assert_eq!(bench.sent_to(A), [(4, results(1.0))]);
}
