//! The form of blocks on their way.

use super::*;
use crate::vocabulary::coding::Coding;

fn set(bench: &mut Bench, sequence: u64, wire: &str) {
    let controls = bench.core.state().controls.with("wire", wire).unwrap();
    let learners = bench.core.state().learners.clone();
    let state = JobState { sequence, learners, controls, ..JobState::default() };
    bench.coordinator(0, Message::State(Box::new(state)));
}

#[test]
fn a_new_form_counts_from_the_next_plan_and_not_for_values_that_replace_others() {
    let mut bench = Bench::committed();
    assert_eq!(bench.core.coding(), None);
    bench.grant(1);
    set(&mut bench, 2, "int8");
    assert_eq!(bench.core.coding(), None);
    bench.said.clear();
    let grant = |plan, replaces| {
        let payload = Granted::Contributions { of: vec![(L, Step(1))], replaces, open: None };
        Message::Grant { plan: PlanId(plan), payload, counted: PlanId(1) }
    };
    bench.coordinator(0, grant(2, false));
    assert_eq!(bench.core.coding(), Some(Coding::Int8));
    let begins = Action::Begins { plan: PlanId(2), counted: PlanId(1) };
    assert_eq!(bench.said.iter().filter(|said| **said == begins).count(), 1);
    // A grant that is repeated begins nothing.
    bench.said.clear();
    bench.coordinator(0, grant(2, false));
    assert!(!bench.said.contains(&begins));
    set(&mut bench, 3, "full");
    assert_eq!(bench.core.coding(), Some(Coding::Int8));
    set(&mut bench, 4, "fp16");
    bench.coordinator(0, grant(3, true));
    assert_eq!(bench.core.coding(), None);
}
