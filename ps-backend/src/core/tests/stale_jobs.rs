//! Promises of jobs whose learning rate depends on the staleness of contributions.

use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::sim::{BLOCKS, Id, Sim, blocks, ok, open};

fn aware(settings: &[(&str, &str)], names: &[&str]) -> (Sim, Vec<Id>) {
    let learners = names.len().to_string();
    let first = [("consistency", "async"), ("staleness_aware", "true"), ("learning_rate", "0.5")];
    let mut sim = Sim::new(&[&first[..], &[("learners", &learners)], settings].concat());
    let ids = names.iter().map(|name| sim.join(name).unwrap()).collect();
    (sim, ids)
}

/// The rate of the plan under way.
fn rate(sim: &Sim) -> f32 {
    match &sim.running.as_ref().unwrap().work {
        Work::Reduce { step, .. } => step.hyper.learning_rate,
        _ => panic!("new weights have no rate"),
    }
}

#[test]
fn the_rate_is_divided_by_the_versions_since_the_opened_one() {
    for consistency in ["async", "ssp(100)"] {
        let (mut sim, ids) = aware(&[("consistency", consistency)], &["a", "b"]);
        // Versions 1 to 4 of a, each from the one before.
        for version in 0..4 {
            sim.commit_from(ids[0].0, Some(version));
            assert_eq!(rate(&sim), 0.5);
            sim.reduce_done(true);
        }
        for (base, expected) in [(4, 0.5), (4, 0.5), (4, 0.25), (4, 0.5 / 3.0), (0, 0.0625), (9, 0.5)] {
            sim.commit_from(ids[1].0, Some(base));
            assert_eq!(rate(&sim), expected, "{base} at {}", sim.core.version());
            sim.reduce_done(true);
            assert_eq!(sim.core.rate(), Some(expected));
        }
    }
}

#[test]
fn a_learner_that_has_opened_nothing_has_the_version_at_which_it_joined() {
    let (mut sim, ids) = aware(&[], &["a"]);
    for version in 0..3 {
        sim.commit_from(ids[0].0, Some(version));
        sim.reduce_done(true);
    }
    let b = sim.join("b").unwrap();
    for expected in [0.5, 0.5, 0.25] {
        sim.commit_from(b.0, None);
        assert_eq!(rate(&sim), expected);
        sim.reduce_done(true);
    }
}

#[test]
fn a_version_that_there_is_not_is_refused_and_changes_nothing() {
    let (mut sim, ids) = aware(&[], &["a"]);
    let ticket = sim.commit_from(ids[0].0, Some(1));
    let Err(ShardError::NotAllowed(why)) = &sim.replies[&ticket] else { panic!("{:?}", sim.replies) };
    assert_eq!(why, "the commit says that its learner has version 1, and the newest is 0");
    assert!(sim.running.is_none());
    let ticket = sim.commit_from(ids[0].0, Some(0));
    sim.reduce_done(true);
    assert!(ok(&sim, ticket));
}

#[test]
fn no_plan_begins_before_the_staleness_is_known() {
    let (sim, ids) = aware(&[], &["a"]);
    let mut sim = sim.in_process();
    let (step, uid) = open(&mut sim, ids[0]);
    assert!(!sim.comes(ids[0].0, uid, 0));
    sim.commit(ids[0].0, step, uid, blocks(0..BLOCKS), true, 1_000);
    sim.reduce_done(true);
    // What has begun before the setting was changed has the whole rate.
    sim.set("staleness_aware", "false");
    let (step, uid) = open(&mut sim, ids[0]);
    assert!(sim.comes(ids[0].0, uid, 0));
    sim.set("staleness_aware", "true");
    sim.commit(ids[0].0, step, uid, blocks(0..BLOCKS), true, 1_000);
    assert_eq!(rate(&sim), 0.5);
    sim.reduce_done(true);
    sim.commit_from(ids[0].0, Some(0));
    assert_eq!(rate(&sim), 0.25);
    sim.reduce_done(true);
}

#[test]
fn elsewhere_the_rate_is_whole() {
    let (mut sim, ids) = aware(&[("staleness_aware", "false")], &["a"]);
    for _ in 0..3 {
        sim.commit_from(ids[0].0, Some(0));
        assert_eq!(rate(&sim), 0.5);
        sim.reduce_done(true);
        assert_eq!(sim.core.rate(), None);
    }
}

#[test]
fn a_schedules_rate_is_divided() {
    let (mut sim, ids) = aware(&[("schedule", "linear(4)")], &["a"]);
    for expected in [0.5, 0.375, 0.125, 0.125 / 3.0] {
        sim.commit_from(ids[0].0, Some(0));
        assert_eq!(rate(&sim), expected);
        sim.reduce_done(true);
    }
}
