//! Promises of jobs whose steps must know norms of tensors. The simulation checks each factor.

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::norm::Quantity;
use libmodelio::vocabulary::phase::JobPhase;

use super::super::*;
use super::sim::{Id, Sim, blocks, everything, ok, open};

fn job(settings: &[(&str, &str)], names: &[&str]) -> (Sim, Vec<Id>) {
    let learners = names.len().to_string();
    let mut sim = Sim::new(&[("learners", &learners)]);
    settings.iter().for_each(|(name, value)| sim.set(name, value));
    let ids = names.iter().map(|name| sim.join(name).unwrap()).collect();
    (sim, ids)
}

#[test]
fn tensors_are_measured_before_a_version_is_made() {
    for (settings, factors) in [
        (&[("reducer", "lars")][..], &[(2, true)][..]),
        (&[("reducer", "lamb")], &[(2, true)]),
        (&[("tensors", "body reducer=lars")], &[(1, false), (1, true)]),
        (&[("reducer", "lars"), ("tensors", "head reducer=momentum")], &[(1, false), (1, true)]),
    ] {
        let (mut sim, ids) = job(settings, &["a", "b"]);
        everything(&mut sim, ids[0], true);
        let (_, ticket) = everything(&mut sim, ids[1], true);
        assert_eq!((sim.measured(), sim.core.state()), (Some(Quantity::Tensors), JobPhase::Reducing));
        assert_eq!(sim.accumulations.iter().map(Vec::len).collect::<Vec<_>>(), [2]);
        sim.accumulate_done(true);
        let plan = sim.running.clone().unwrap();
        let Work::Reduce { factors: got, .. } = &plan.work else { panic!() };
        assert!(plan.inputs.is_empty() && !ok(&sim, ticket));
        // The two tensors differ in what was contributed to them, and a run may have both.
        let has: Vec<bool> =
            got.runs().iter().flat_map(|(count, factor)| vec![factor.is_some(); *count as usize]).collect();
        let wanted: Vec<bool> = factors.iter().flat_map(|(count, has)| vec![*has; *count as usize]).collect();
        assert_eq!(has, wanted, "{settings:?}");
        sim.reduce_done(true);
        assert!(ok(&sim, ticket));
    }
}

#[test]
fn tensors_are_measured_behind_the_gradient() {
    let (mut sim, ids) = job(&[("reducer", "lamb"), ("clip_norm", "1")], &["a"]);
    let (a, _) = everything(&mut sim, ids[0], true);
    assert_eq!(sim.measured(), Some(Quantity::Gradient));
    sim.accumulate_done(true);
    assert_eq!(sim.measured(), Some(Quantity::Tensors));
    assert_eq!(sim.accumulations.iter().map(Vec::len).collect::<Vec<_>>(), [0]);
    sim.accumulate_done(true);
    assert!(sim.core.norm().is_none() && sim.running.is_some());
    sim.reduce_done(true);
    assert!(sim.core.norm().is_some());
    assert_eq!(sim.versions_of(&[a]), [Some(Version(1))]);
    // Without the limit, the next step measures tensors alone.
    sim.set("clip_norm", "0");
    everything(&mut sim, ids[0], true);
    assert_eq!(sim.measured(), Some(Quantity::Tensors));
    sim.finish_work();
    assert_eq!((sim.core.version(), sim.core.norm()), (Version(2), None));
}

#[test]
fn what_comes_meanwhile_is_measured_from_the_gradient_on() {
    let (mut sim, ids) =
        job(&[("reducer", "lars"), ("clip_norm", "1"), ("consistency", "quorum(1)")], &["a", "b"]);
    let (a, _) = everything(&mut sim, ids[0], true);
    sim.accumulate_done(true);
    assert_eq!(sim.measured(), Some(Quantity::Tensors));
    let (b, _) = everything(&mut sim, ids[1], true);
    sim.accumulate_done(true);
    for quantity in [Quantity::Gradient, Quantity::Tensors] {
        assert!(sim.running.is_none());
        assert_eq!(sim.measured(), Some(quantity));
        sim.accumulate_done(true);
    }
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[a, b]), [Some(Version(1)); 2]);
}

#[test]
fn new_weights_are_measured_anew() {
    let (mut sim, ids) = job(&[("reducer", "lars")], &["a"]);
    everything(&mut sim, ids[0], true);
    let assign = sim.assign(1_000);
    sim.accumulate_done(true);
    // The new weights are version 1. Then the step begins again, and measures them.
    sim.reduce_done(true);
    assert!(ok(&sim, assign));
    assert_eq!((sim.measured(), sim.core.version()), (Some(Quantity::Tensors), Version(1)));
    sim.finish_work();
    assert_eq!(sim.core.version(), Version(2));
}

#[test]
fn a_measuring_that_fails_is_done_again() {
    let (mut sim, ids) = job(&[("reducer", "lars"), ("clip_norm", "1")], &["a"]);
    let (a, _) = everything(&mut sim, ids[0], true);
    sim.accumulate_done(true);
    sim.accumulate_done(false);
    sim.finish_work();
    assert_eq!(sim.versions_of(&[a]), [Some(Version(1))]);
}

#[test]
fn no_plan_of_a_layerwise_step_begins_while_a_contribution_is_written() {
    let (sim, ids) = job(&[("tensors", "head reducer=lars")], &["a"]);
    let mut sim = sim.in_process();
    let (step, uid) = open(&mut sim, ids[0]);
    assert!(!sim.comes(ids[0].0, uid, 0));
    sim.commit(ids[0].0, step, uid, blocks([0]), true, 1_000);
    sim.finish_work();
    assert_eq!(sim.versions_of(&[uid]), [Some(Version(1))]);
}
