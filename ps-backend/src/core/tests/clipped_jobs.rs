//! Promises of jobs whose steps must know the norm of their gradient. The simulation checks each norm.

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::norm::Norm;
use libmodelio::vocabulary::phase::JobPhase;
use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::sim::{BLOCKS, Id, Sim, blocks, everything, ok, open};

fn job(settings: &[(&str, &str)], names: &[&str]) -> (Sim, Vec<Id>) {
    let learners = names.len().to_string();
    let mut sim = Sim::new(&[("clip_norm", "1"), ("learners", &learners)]);
    settings.iter().for_each(|(name, value)| sim.set(name, value));
    let ids = names.iter().map(|name| sim.join(name).unwrap()).collect();
    (sim, ids)
}

/// How many contributions are being added up.
fn coming(sim: &Sim) -> Vec<usize> {
    sim.accumulations.iter().map(Vec::len).collect()
}

#[test]
fn all_sums_are_measured_before_a_version_is_made() {
    for deterministic in ["true", "false"] {
        let (mut sim, ids) = job(&[("deterministic", deterministic)], &["a", "b"]);
        let (a, _) = everything(&mut sim, ids[0], true);
        assert!(sim.accumulations.is_empty());
        let (b, ticket) = everything(&mut sim, ids[1], true);
        assert_eq!((coming(&sim), sim.core.state()), (vec![2], JobPhase::Reducing));
        sim.accumulate_done(true);
        let plan = sim.running.clone().unwrap();
        assert!(matches!(&plan.work, Work::Reduce { .. }) && plan.inputs.is_empty());
        assert!(!ok(&sim, ticket), "it is answered with its version");
        sim.reduce_done(true);
        assert!(ok(&sim, ticket));
        assert_eq!(sim.versions_of(&[a, b]), [Some(Version(1)); 2]);
        let blocks = f64::from(BLOCKS * (a + b));
        assert_eq!(sim.core.norm(), Some(Norm::new(0.5 * blocks.sqrt())), "of the mean");
    }
}

#[test]
fn no_plan_begins_while_a_contribution_is_written() {
    let (sim, ids) = job(&[], &["a"]);
    let mut sim = sim.in_process();
    let (step, uid) = open(&mut sim, ids[0]);
    assert!(!sim.comes(ids[0].0, uid, 0));
    sim.commit(ids[0].0, step, uid, blocks([0]), true, 1_000);
    sim.finish_work();
    assert_eq!(sim.versions_of(&[uid]), [Some(Version(1))]);
}

#[test]
fn what_comes_while_the_sums_are_measured_is_measured_too() {
    let (mut sim, ids) = job(&[("consistency", "quorum(1)")], &["a", "b"]);
    let (a, _) = everything(&mut sim, ids[0], true);
    let (b, _) = everything(&mut sim, ids[1], true);
    assert_eq!(coming(&sim), [1]);
    sim.accumulate_done(true);
    assert_eq!(coming(&sim), [1]);
    assert!(sim.running.is_none());
    sim.accumulate_done(true);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[a, b]), [Some(Version(1)); 2]);
}

#[test]
fn sums_of_before_are_measured_without_any_contribution() {
    let (mut sim, ids) = job(&[], &["a", "b"]);
    let (a, ticket) = everything(&mut sim, ids[0], false);
    sim.accumulate_done(true);
    assert!(ok(&sim, ticket), "its memory is needed back");
    sim.leave(ids[1].0);
    assert_eq!(coming(&sim), [0]);
    // Nothing is begun twice meanwhile.
    sim.tick(1);
    assert_eq!(coming(&sim), [0]);
    sim.finish_work();
    assert_eq!(sim.versions_of(&[a]), [Some(Version(1))]);
}

#[test]
fn a_learner_that_is_lost_or_refused_is_not_in_the_norm() {
    for lost in [true, false] {
        let (mut sim, ids) = job(&[("deterministic", "true")], &["a", "b"]);
        let (a, ticket) = everything(&mut sim, ids[0], false);
        let (b, _) = everything(&mut sim, ids[1], true);
        assert_eq!(coming(&sim), [2]);
        if lost {
            sim.lose(&[ids[0].0]);
        } else {
            sim.accumulate_done(false);
            assert_eq!(sim.replies[&ticket], Err(ShardError::OutOfMemory("test".into())));
            sim.abort(ids[0].0);
            sim.leave(ids[0].0);
        }
        assert_eq!(coming(&sim), [1]);
        sim.accumulate_done(true);
        sim.reduce_done(true);
        assert_eq!(sim.versions_of(&[a, b]), [None, Some(Version(1))]);
    }
}

#[test]
fn the_setting_counts_from_the_next_step_of_which_nothing_is_computed() {
    let (mut sim, ids) = job(&[], &["a"]);
    everything(&mut sim, ids[0], true);
    sim.set("clip_norm", "0");
    sim.finish_work();
    assert!(sim.core.norm().is_some());
    everything(&mut sim, ids[0], true);
    assert!(sim.accumulations.is_empty() && sim.running.is_some());
    sim.set("clip_norm", "2");
    sim.reduce_done(true);
    assert_eq!((sim.core.version(), sim.core.norm()), (Version(2), None));
}

#[test]
fn what_is_measured_is_safe_whatever_becomes_of_the_version() {
    let (mut sim, ids) = job(&[], &["a"]);
    let (a, ticket) = everything(&mut sim, ids[0], false);
    sim.accumulate_done(true);
    assert!(sim.is_waiting(ticket) && sim.running.is_some());
    sim.tick(1_000);
    assert!(ok(&sim, ticket), "at its deadline");
    sim.lose(&[ids[0].0]);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[a]), [Some(Version(1))]);
}
