//! Promises of jobs whose steps must know norms of tensors. The bench checks each factor.

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::norm::Quantity;
use libmodelio::vocabulary::phase::JobPhase;

use super::super::*;
use super::bench::{Bench, Id, everything, formed, ok};

fn job(settings: &[(&str, &str)], names: &[&str]) -> (Bench, Vec<Id>) {
    let (mut bench, ids) = formed(&[], names);
    settings.iter().for_each(|(name, value)| bench.set(name, value));
    (bench, ids)
}

#[test]
fn tensors_are_measured_before_a_version_is_made() {
    for (settings, factors) in [
        (&[("reducer", "lars")][..], &[(2, true)][..]),
        (&[("reducer", "lamb")], &[(2, true)]),
        (&[("tensors", "body reducer=lars")], &[(1, false), (1, true)]),
        (&[("reducer", "lars"), ("tensors", "head reducer=momentum")], &[(1, false), (1, true)]),
    ] {
        let (mut bench, ids) = job(settings, &["a", "b"]);
        everything(&mut bench, ids[0], true);
        let (_, ticket) = everything(&mut bench, ids[1], true);
        assert_eq!((bench.measured(), bench.core.state()), (Some(Quantity::Tensors), JobPhase::Reducing));
        assert_eq!(bench.accumulations.iter().map(Vec::len).collect::<Vec<_>>(), [2]);
        bench.accumulate_done(true);
        let plan = bench.running.clone().unwrap();
        let Work::Reduce { factors: got, .. } = &plan.work else { panic!() };
        assert!(plan.inputs.is_empty() && !ok(&bench, ticket));
        // The two tensors differ in what was contributed to them, and a run may have both.
        let has: Vec<bool> =
            got.runs().iter().flat_map(|(count, factor)| vec![factor.is_some(); *count as usize]).collect();
        let wanted: Vec<bool> = factors.iter().flat_map(|(count, has)| vec![*has; *count as usize]).collect();
        assert_eq!(has, wanted, "{settings:?}");
        bench.answers(ticket);
    }
}

#[test]
fn tensors_are_measured_behind_the_gradient() {
    let (mut bench, ids) = job(&[("reducer", "lamb"), ("clip_norm", "1")], &["a"]);
    let (a, _) = everything(&mut bench, ids[0], true);
    assert_eq!(bench.measured(), Some(Quantity::Gradient));
    bench.accumulate_done(true);
    assert_eq!(bench.measured(), Some(Quantity::Tensors));
    assert_eq!(bench.accumulations.iter().map(Vec::len).collect::<Vec<_>>(), [0]);
    bench.accumulate_done(true);
    assert!(bench.core.norm().is_none() && bench.running.is_some());
    bench.reduce_done(true);
    assert!(bench.core.norm().is_some());
    assert_eq!(bench.versions_of(&[a]), [Some(Version(1))]);
    // Without the limit, the next step measures tensors alone.
    bench.set("clip_norm", "0");
    everything(&mut bench, ids[0], true);
    assert_eq!(bench.measured(), Some(Quantity::Tensors));
    bench.finish_work();
    assert_eq!((bench.core.version(), bench.core.norm()), (Version(2), None));
}

#[test]
fn what_comes_meanwhile_is_measured_from_the_gradient_on() {
    let (mut bench, ids) =
        job(&[("reducer", "lars"), ("clip_norm", "1"), ("consistency", "quorum(1)")], &["a", "b"]);
    let (a, _) = everything(&mut bench, ids[0], true);
    bench.accumulate_done(true);
    assert_eq!(bench.measured(), Some(Quantity::Tensors));
    let (b, _) = everything(&mut bench, ids[1], true);
    bench.accumulate_done(true);
    for quantity in [Quantity::Gradient, Quantity::Tensors] {
        assert!(bench.running.is_none());
        assert_eq!(bench.measured(), Some(quantity));
        bench.accumulate_done(true);
    }
    bench.makes(1, &[a, b]);
}

#[test]
fn new_weights_are_measured_anew() {
    let (mut bench, ids) = job(&[("reducer", "lars")], &["a"]);
    everything(&mut bench, ids[0], true);
    let assign = bench.assign(1_000);
    bench.accumulate_done(true);
    // The new weights are version 1. Then the step begins again, and measures them.
    bench.answers(assign);
    assert_eq!((bench.measured(), bench.core.version()), (Some(Quantity::Tensors), Version(1)));
    bench.finish_work();
    assert_eq!(bench.core.version(), Version(2));
}

#[test]
fn a_measuring_that_fails_is_done_again() {
    let (mut bench, ids) = job(&[("reducer", "lars"), ("clip_norm", "1")], &["a"]);
    let (a, _) = everything(&mut bench, ids[0], true);
    bench.accumulate_done(true);
    bench.accumulate_done(false);
    bench.finish_work();
    assert_eq!(bench.versions_of(&[a]), [Some(Version(1))]);
}
