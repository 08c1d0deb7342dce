//! Promises of jobs whose learning rate depends on the staleness of contributions.

use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::bench::{BLOCKS, Bench, Id, blocks, formed, open};

fn aware(settings: &[(&str, &str)], names: &[&str]) -> (Bench, Vec<Id>) {
    let first = [("consistency", "async"), ("staleness_aware", "true"), ("learning_rate", "0.5")];
    formed(&[&first, settings].concat(), names)
}

/// The rate of the plan under way.
fn rate(bench: &Bench) -> f32 {
    match &bench.running.as_ref().unwrap().work {
        Work::Reduce { step, .. } => step.hyper.learning_rate,
        _ => panic!("new weights have no rate"),
    }
}

#[test]
fn the_rate_is_divided_by_the_versions_since_the_opened_one() {
    for consistency in ["async", "ssp(100)"] {
        let (mut bench, ids) = aware(&[("consistency", consistency)], &["a", "b"]);
        // Versions 1 to 4 of a, each from the one before.
        for version in 0..4 {
            bench.commit_from(ids[0].0, Some(version));
            assert_eq!(rate(&bench), 0.5);
            bench.reduce_done(true);
        }
        for (base, expected) in [(4, 0.5), (4, 0.5), (4, 0.25), (4, 0.5 / 3.0), (0, 0.0625), (9, 0.5)] {
            bench.commit_from(ids[1].0, Some(base));
            assert_eq!(rate(&bench), expected, "{base} at {}", bench.core.version());
            bench.reduce_done(true);
            assert_eq!(bench.core.rate(), Some(expected));
        }
    }
}

#[test]
fn a_learner_that_has_opened_nothing_has_the_version_at_which_it_joined() {
    let (mut bench, ids) = aware(&[], &["a"]);
    for version in 0..3 {
        bench.commit_from(ids[0].0, Some(version));
        bench.reduce_done(true);
    }
    let b = bench.join("b").unwrap();
    for expected in [0.5, 0.5, 0.25] {
        bench.commit_from(b.0, None);
        assert_eq!(rate(&bench), expected);
        bench.reduce_done(true);
    }
}

#[test]
fn a_version_that_there_is_not_is_refused_and_changes_nothing() {
    let (mut bench, ids) = aware(&[], &["a"]);
    let ticket = bench.commit_from(ids[0].0, Some(1));
    let Err(ShardError::NotAllowed(why)) = &bench.replies[&ticket] else { panic!("{:?}", bench.replies) };
    assert_eq!(why, "the commit says that its learner has version 1, and the newest is 0");
    assert!(bench.running.is_none());
    let ticket = bench.commit_from(ids[0].0, Some(0));
    bench.answers(ticket);
}

#[test]
fn no_plan_begins_before_the_staleness_is_known() {
    let (bench, ids) = aware(&[], &["a"]);
    let mut bench = bench.in_process();
    let (step, uid) = open(&mut bench, ids[0]);
    assert!(!bench.comes(ids[0].0, uid, 0));
    bench.commit(ids[0].0, step, uid, blocks(0..BLOCKS), true, 1_000);
    bench.reduce_done(true);
    // What has begun before the setting was changed has the whole rate.
    bench.set("staleness_aware", "false");
    let (step, uid) = open(&mut bench, ids[0]);
    assert!(bench.comes(ids[0].0, uid, 0));
    bench.set("staleness_aware", "true");
    bench.commit(ids[0].0, step, uid, blocks(0..BLOCKS), true, 1_000);
    assert_eq!(rate(&bench), 0.5);
    bench.reduce_done(true);
    bench.commit_from(ids[0].0, Some(0));
    assert_eq!(rate(&bench), 0.25);
    bench.reduce_done(true);
}

#[test]
fn elsewhere_the_rate_is_whole() {
    let (mut bench, ids) = aware(&[("staleness_aware", "false")], &["a"]);
    for _ in 0..3 {
        bench.commit_from(ids[0].0, Some(0));
        assert_eq!(rate(&bench), 0.5);
        bench.reduce_done(true);
        assert_eq!(bench.core.rate(), None);
    }
}

#[test]
fn a_schedules_rate_is_divided() {
    let (mut bench, ids) = aware(&[("schedule", "linear(4)")], &["a"]);
    for expected in [0.5, 0.375, 0.125, 0.125 / 3.0] {
        bench.commit_from(ids[0].0, Some(0));
        assert_eq!(rate(&bench), expected);
        bench.reduce_done(true);
    }
}
