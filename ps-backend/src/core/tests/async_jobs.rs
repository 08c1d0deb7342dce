//! Promises of asynchronous jobs.

use libmodelio::vocabulary::ids::{Step, Version};
use libmodelio::vocabulary::members::{Attached, LeaveReason, LifeSign};
use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::bench::{Bench, Id, Uid, blocks, early_job, joined, open};

fn job(names: &[&str]) -> (Bench, Vec<Id>) {
    let bench = Bench::new(&[("consistency", "async"), ("patience", "1")]).in_process();
    let (mut bench, ids) = joined(bench, names);
    bench.attach(&ids);
    (bench, ids)
}

fn commit(bench: &mut Bench, id: Id, timeout: u64) -> (Uid, Ticket) {
    let (step, uid) = open(bench, id);
    (uid, bench.commit(id.0, step, uid, blocks([0]), true, timeout))
}

#[test]
fn every_commit_makes_a_version_one_after_the_other() {
    let (mut bench, ids) = job(&["a", "b"]);
    let (a, _) = commit(&mut bench, ids[0], 1_000);
    let (b, second) = commit(&mut bench, ids[1], 1_000);
    assert!(bench.is_waiting(second));
    bench.reduce_done(true);
    bench.reduce_done(true);
    assert_eq!(bench.versions_of(&[a, b]), [Some(Version(1)), Some(Version(2))]);
}

#[test]
fn blocks_are_reduced_early_only_when_the_learner_is_alone() {
    let (mut bench, ids) = job(&["a"]);
    let (step, a) = open(&mut bench, ids[0]);
    assert!(bench.comes(ids[0].0, a, 0));
    let b = bench.join("b").unwrap();
    assert!(bench.comes(ids[0].0, a, 1), "it began alone");
    let (_, of_b) = open(&mut bench, b);
    assert!(!bench.comes(b.0, of_b, 0));
    bench.commit(ids[0].0, step, a, blocks([0, 1]), true, 1_000);
    bench.reduce_done(true);
    let (_, a) = open(&mut bench, ids[0]);
    assert!(!bench.comes(ids[0].0, a, 0));
}

#[test]
fn a_commit_waits_while_another_contribution_is_partly_reduced() {
    let (mut bench, ids) = job(&["a"]);
    let (_, a) = open(&mut bench, ids[0]);
    assert!(bench.comes(ids[0].0, a, 1));
    let b = bench.join("b").unwrap();
    let (of_b, ticket) = commit(&mut bench, b, 100);
    bench.tick(100);
    assert!(matches!(bench.replies[&ticket], Err(ShardError::TimedOut(_))));
    // The contribution is still open: sent again, it goes in as soon as the other is done.
    let again = bench.commit(b.0, Step(1), of_b, blocks([0]), true, 1_000);
    bench.abort(ids[0].0);
    bench.answers(again);
    assert_eq!(bench.versions_of(&[a, of_b]), [None, Some(Version(1))]);
}

#[test]
fn a_silent_learner_that_holds_up_a_commit_leaves() {
    let (mut bench, ids) = job(&["a"]);
    let (_, a) = open(&mut bench, ids[0]);
    assert!(bench.comes(ids[0].0, a, 1));
    let b = bench.join("b").unwrap();
    bench.core.touch(b.0, LifeSign::Process(Attached::Yes), bench.now);
    let (of_b, _) = commit(&mut bench, b, 60_000);
    bench.tick(1_000);
    assert_eq!(bench.left, [(ids[0].0, LeaveReason::PatienceOver)]);
    bench.makes(1, &[of_b]);
}

#[test]
fn an_idle_learner_holds_nobody_up_and_stays() {
    let (mut bench, ids) = job(&["a", "b"]);
    bench.tick(900);
    commit(&mut bench, ids[0], 60_000);
    bench.tick(900);
    bench.reduce_done(true);
    assert_eq!(bench.left, []);
}

#[test]
fn nothing_is_taken_before_the_job_is_formed() {
    let mut bench = Bench::new(&[("consistency", "async"), ("learners", "2")]);
    let first = bench.join("a").unwrap();
    let (a, ticket) = commit(&mut bench, first, 1_000);
    assert!(bench.is_waiting(ticket));
    bench.join("b").unwrap();
    bench.makes(1, &[a]);
}

#[test]
fn consistency_changes_between_contributions_only() {
    let (mut bench, ids) = early_job("2", &["a", "b"]);
    let (of_b, _) = commit(&mut bench, ids[1], 1_000);
    let (step, a) = open(&mut bench, ids[0]);
    assert!(bench.comes(ids[0].0, a, 1));
    bench.set("consistency", "async");
    assert!(bench.running.is_none(), "a's block is in the buffer");
    assert!(bench.comes(ids[0].0, a, 2));
    bench.commit(ids[0].0, step, a, blocks([1, 2]), true, 1_000);
    bench.makes(1, &[a, of_b]);
    let (next, _) = commit(&mut bench, ids[1], 1_000);
    bench.makes(2, &[next]);
}

#[test]
fn a_step_is_unpublished_until_its_version() {
    let (mut bench, ids) = job(&["a", "b"]);
    let step = |bench: &Bench| {
        let view = bench.core.member(ids[0].0, bench.now).unwrap();
        (view.step, view.unpublished, view.published_in)
    };
    commit(&mut bench, ids[0], 1_000);
    assert_eq!(step(&bench), (Step(1), true, Version(0)));
    bench.reduce_done(true);
    assert_eq!(step(&bench), (Step(1), false, Version(1)));
}
