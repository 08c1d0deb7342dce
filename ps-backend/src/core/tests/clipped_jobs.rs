//! Promises of jobs whose steps must know the norm of their gradient. The bench checks each norm.

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::norm::Norm;
use libmodelio::vocabulary::phase::JobPhase;
use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::bench::{BLOCKS, Bench, Id, blocks, everything, formed, ok, open};

fn job(settings: &[(&str, &str)], names: &[&str]) -> (Bench, Vec<Id>) {
    formed(&[&[("clip_norm", "1")], settings].concat(), names)
}

/// How many contributions are being added up.
fn coming(bench: &Bench) -> Vec<usize> {
    bench.accumulations.iter().map(Vec::len).collect()
}

#[test]
fn all_sums_are_measured_before_a_version_is_made() {
    for deterministic in ["true", "false"] {
        let (mut bench, ids) = job(&[("deterministic", deterministic)], &["a", "b"]);
        let (a, _) = everything(&mut bench, ids[0], true);
        assert!(bench.accumulations.is_empty());
        let (b, ticket) = everything(&mut bench, ids[1], true);
        assert_eq!((coming(&bench), bench.core.state()), (vec![2], JobPhase::Reducing));
        bench.accumulate_done(true);
        let plan = bench.running.clone().unwrap();
        assert!(matches!(&plan.work, Work::Reduce { .. }) && plan.inputs.is_empty());
        assert!(!ok(&bench, ticket), "it is answered with its version");
        bench.answers(ticket);
        assert_eq!(bench.versions_of(&[a, b]), [Some(Version(1)); 2]);
        let blocks = f64::from(BLOCKS * (a + b));
        assert_eq!(bench.core.norm(), Some(Norm::new(0.5 * blocks.sqrt())), "of the mean");
    }
}

#[test]
fn no_plan_of_a_step_that_is_measured_begins_while_a_contribution_is_written() {
    for (name, value) in [("clip_norm", "1"), ("tensors", "head reducer=lars")] {
        let (bench, ids) = formed(&[], &["a"]);
        let mut bench = bench.in_process();
        bench.set(name, value);
        let (step, uid) = open(&mut bench, ids[0]);
        assert!(!bench.comes(ids[0].0, uid, 0), "{name}");
        bench.commit(ids[0].0, step, uid, blocks([0]), true, 1_000);
        bench.finish_work();
        assert_eq!(bench.versions_of(&[uid]), [Some(Version(1))]);
    }
}

#[test]
fn what_comes_while_the_sums_are_measured_is_measured_too() {
    let (mut bench, ids) = job(&[("consistency", "quorum(1)")], &["a", "b"]);
    let (a, _) = everything(&mut bench, ids[0], true);
    let (b, _) = everything(&mut bench, ids[1], true);
    assert_eq!(coming(&bench), [1]);
    bench.accumulate_done(true);
    assert_eq!(coming(&bench), [1]);
    assert!(bench.running.is_none());
    bench.accumulate_done(true);
    bench.makes(1, &[a, b]);
}

#[test]
fn sums_of_before_are_measured_without_any_contribution() {
    let (mut bench, ids) = job(&[], &["a", "b"]);
    let (a, ticket) = everything(&mut bench, ids[0], false);
    bench.accumulate_done(true);
    assert!(ok(&bench, ticket), "its memory is needed back");
    bench.leave(ids[1].0);
    assert_eq!(coming(&bench), [0]);
    // Nothing is begun twice meanwhile.
    bench.tick(1);
    assert_eq!(coming(&bench), [0]);
    bench.finish_work();
    assert_eq!(bench.versions_of(&[a]), [Some(Version(1))]);
}

#[test]
fn a_learner_that_is_lost_or_refused_is_not_in_the_norm() {
    for lost in [true, false] {
        let (mut bench, ids) = job(&[("deterministic", "true")], &["a", "b"]);
        let (a, ticket) = everything(&mut bench, ids[0], false);
        let (b, _) = everything(&mut bench, ids[1], true);
        assert_eq!(coming(&bench), [2]);
        if lost {
            bench.lose(&[ids[0].0]);
        } else {
            bench.accumulate_done(false);
            assert_eq!(bench.replies[&ticket], Err(ShardError::OutOfMemory("test".into())));
            bench.abort(ids[0].0);
            bench.leave(ids[0].0);
        }
        assert_eq!(coming(&bench), [1]);
        bench.accumulate_done(true);
        bench.reduce_done(true);
        assert_eq!(bench.versions_of(&[a, b]), [None, Some(Version(1))]);
    }
}

#[test]
fn the_setting_counts_from_the_next_step_of_which_nothing_is_computed() {
    let (mut bench, ids) = job(&[], &["a"]);
    everything(&mut bench, ids[0], true);
    bench.set("clip_norm", "0");
    bench.finish_work();
    assert!(bench.core.norm().is_some());
    everything(&mut bench, ids[0], true);
    assert!(bench.accumulations.is_empty() && bench.running.is_some());
    bench.set("clip_norm", "2");
    bench.reduce_done(true);
    assert_eq!((bench.core.version(), bench.core.norm()), (Version(2), None));
}

#[test]
fn what_is_measured_is_safe_whatever_becomes_of_the_version() {
    let (mut bench, ids) = job(&[], &["a"]);
    let (a, ticket) = everything(&mut bench, ids[0], false);
    bench.accumulate_done(true);
    assert!(bench.is_waiting(ticket) && bench.running.is_some());
    bench.tick(1_000);
    assert!(ok(&bench, ticket), "at its deadline");
    bench.lose(&[ids[0].0]);
    bench.makes(1, &[a]);
}
