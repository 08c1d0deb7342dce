//! Promises of asynchronous jobs.

use libmodelio::vocabulary::ids::{Step, Version};
use libmodelio::vocabulary::members::{Attached, LeaveReason};
use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::sim::{Id, Sim, Uid, blocks, ok, open};

fn job(names: &[&str]) -> (Sim, Vec<Id>) {
    let mut sim = Sim::new(&[("consistency", "async"), ("patience", "1")]).in_process();
    let ids: Vec<Id> = names.iter().map(|name| sim.join(name).unwrap()).collect();
    for id in &ids {
        sim.core.touch(id.0, Some(Attached::Yes), sim.now);
    }
    (sim, ids)
}

fn commit(sim: &mut Sim, id: Id, timeout: u64) -> (Uid, Ticket) {
    let (step, uid) = open(sim, id);
    (uid, sim.commit(id.0, step, uid, blocks([0]), true, timeout))
}

#[test]
fn every_commit_makes_a_version_one_after_the_other() {
    let (mut sim, ids) = job(&["a", "b"]);
    let (a, _) = commit(&mut sim, ids[0], 1_000);
    let (b, second) = commit(&mut sim, ids[1], 1_000);
    assert!(sim.is_waiting(second));
    sim.reduce_done(true);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[a, b]), [Some(Version(1)), Some(Version(2))]);
}

#[test]
fn blocks_are_reduced_early_only_when_the_learner_is_alone() {
    let (mut sim, ids) = job(&["a"]);
    let (step, a) = open(&mut sim, ids[0]);
    assert!(sim.comes(ids[0].0, a, 0));
    let b = sim.join("b").unwrap();
    assert!(sim.comes(ids[0].0, a, 1), "it began alone");
    let (_, of_b) = open(&mut sim, b);
    assert!(!sim.comes(b.0, of_b, 0));
    sim.commit(ids[0].0, step, a, blocks([0, 1]), true, 1_000);
    sim.reduce_done(true);
    let (_, a) = open(&mut sim, ids[0]);
    assert!(!sim.comes(ids[0].0, a, 0));
}

#[test]
fn a_commit_waits_while_another_contribution_is_partly_reduced() {
    let (mut sim, ids) = job(&["a"]);
    let (_, a) = open(&mut sim, ids[0]);
    assert!(sim.comes(ids[0].0, a, 1));
    let b = sim.join("b").unwrap();
    let (of_b, ticket) = commit(&mut sim, b, 100);
    sim.tick(100);
    assert!(matches!(sim.replies[&ticket], Err(ShardError::TimedOut(_))));
    // The contribution is still open: sent again, it goes in as soon as the other is done.
    let again = sim.commit(b.0, Step(1), of_b, blocks([0]), true, 1_000);
    sim.abort(ids[0].0);
    sim.reduce_done(true);
    assert!(ok(&sim, again));
    assert_eq!(sim.versions_of(&[a, of_b]), [None, Some(Version(1))]);
}

#[test]
fn a_silent_learner_that_holds_up_a_commit_leaves() {
    let (mut sim, ids) = job(&["a"]);
    let (_, a) = open(&mut sim, ids[0]);
    assert!(sim.comes(ids[0].0, a, 1));
    let b = sim.join("b").unwrap();
    sim.core.touch(b.0, Some(Attached::Yes), sim.now);
    let (of_b, _) = commit(&mut sim, b, 60_000);
    sim.tick(1_000);
    assert_eq!(sim.left, [(ids[0].0, LeaveReason::PatienceOver)]);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[of_b]), [Some(Version(1))]);
}

#[test]
fn an_idle_learner_holds_nobody_up_and_stays() {
    let (mut sim, ids) = job(&["a", "b"]);
    sim.tick(900);
    commit(&mut sim, ids[0], 60_000);
    sim.tick(900);
    sim.reduce_done(true);
    assert_eq!(sim.left, []);
}

#[test]
fn nothing_is_taken_before_the_job_is_formed() {
    let mut sim = Sim::new(&[("consistency", "async"), ("learners", "2")]);
    let first = sim.join("a").unwrap();
    let (a, ticket) = commit(&mut sim, first, 1_000);
    assert!(sim.is_waiting(ticket));
    sim.join("b").unwrap();
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[a]), [Some(Version(1))]);
}

#[test]
fn consistency_changes_between_contributions_only() {
    let mut sim = Sim::new(&[("learners", "2")]).in_process();
    let ids = [sim.join("a").unwrap(), sim.join("b").unwrap()];
    let (of_b, _) = commit(&mut sim, ids[1], 1_000);
    let (step, a) = open(&mut sim, ids[0]);
    assert!(sim.comes(ids[0].0, a, 1));
    sim.set("consistency", "async");
    assert!(sim.running.is_none(), "a's block is in the buffer");
    assert!(sim.comes(ids[0].0, a, 2));
    sim.commit(ids[0].0, step, a, blocks([1, 2]), true, 1_000);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[a, of_b]), [Some(Version(1)); 2]);
    let (next, _) = commit(&mut sim, ids[1], 1_000);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[next]), [Some(Version(2))]);
}

#[test]
fn asynchronous_frees_a_step_that_waits() {
    let mut sim = Sim::new(&[("learners", "2")]);
    let ids = [sim.join("a").unwrap(), sim.join("b").unwrap()];
    let (a, _) = commit(&mut sim, ids[0], 1_000);
    sim.set("consistency", "async");
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[a]), [Some(Version(1))]);
}

#[test]
fn a_step_is_unpublished_until_its_version() {
    let (mut sim, ids) = job(&["a", "b"]);
    let step = |sim: &Sim| {
        let view = sim.core.member(ids[0].0, sim.now).unwrap();
        (view.step, view.unpublished, view.published_in)
    };
    commit(&mut sim, ids[0], 1_000);
    assert_eq!(step(&sim), (Step(1), true, Version(0)));
    sim.reduce_done(true);
    assert_eq!(step(&sim), (Step(1), false, Version(1)));
}
