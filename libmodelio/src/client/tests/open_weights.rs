//! New weights whose blocks are sent while others are still written.

use super::*;

const TOKEN: u64 = 5;
const PLAN: PlanId = PlanId(1);

/// Two blocks of new weights are whole, and a plan takes them.
fn writing() -> Bench {
    let mut bench = Bench::new();
    for block in [0, 1] {
        bench.core.wrote_weights(TOKEN, BlockId(block), bench.now, &mut bench.said);
    }
    bench.granted(PLAN.0, Granted::OpenWeights(TOKEN));
    bench
}

fn publish(bench: &mut Bench) {
    bench.ask(3, assign(TOKEN, 1), 1);
    let names_the_plan = |action: &Action| {
        matches!(action, Action::ToCoordinator(_, Message::Assign { ahead: Some(PLAN), .. }))
    };
    assert!(bench.said.iter().any(names_the_plan));
    bench.said.clear();
}

/// The client sends nothing more of the weights, and nothing keeps their memory.
#[track_caller]
fn is_over(bench: &Bench) {
    let gone = Action::ToCoordinator(0, Message::SourceGone { plan: PLAN, learner: None });
    assert!(bench.said.contains(&gone), "{:?}", bench.said);
    assert!(bench.said.contains(&Action::ReleaseWeights(TOKEN)), "{:?}", bench.said);
    assert!(bench.core.outgoing().is_none());
}

/// They are not published, or their request is refused or times out before their plan is sealed.
#[test]
fn weights_that_are_written_again_leave_nothing() {
    for published in ["not", "refused", "late"] {
        let mut bench = writing();
        if published != "not" {
            publish(&mut bench);
        }
        match published {
            "refused" => bench.coordinator(3, Message::Refused(ShardError::NotAllowed("no".into()).into())),
            "late" => bench.pass(1001),
            _ => {}
        }
        bench.core.rewrites_weights(TOKEN, &mut bench.said);
        is_over(&bench);
    }
}

#[test]
fn weights_of_a_job_that_has_failed_leave_nothing() {
    let mut bench = writing();
    publish(&mut bench);
    bench.core.fail(ShardError::Lost("its process is gone".into()), bench.now, &mut bench.said);
    assert!(bench.said.contains(&Action::ReleaseWeights(TOKEN)), "{:?}", bench.said);
}
