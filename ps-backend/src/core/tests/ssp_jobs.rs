//! Promises of jobs with bounded staleness.

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::members::{Attached, LeaveReason};
use libmodelio::vocabulary::shard_error::ShardError;

use super::sim::{Id, Sim, blocks, everything, ok, open};

fn ssp(s: u32, names: &[&str]) -> (Sim, Vec<Id>) {
    let learners = names.len().to_string();
    let mut sim =
        Sim::new(&[("consistency", &format!("ssp({s})")), ("learners", &learners), ("patience", "1")]);
    let ids: Vec<Id> = names.iter().map(|name| sim.join(name).unwrap()).collect();
    for id in &ids {
        sim.core.touch(id.0, Some(Attached::Yes), sim.now);
    }
    (sim.with_fixed_consistency(), ids)
}

/// Makes one contribution; returns whether it was taken at once.
fn step(sim: &mut Sim, id: Id) -> bool {
    let (_, ticket) = everything(sim, id, true);
    sim.reduce_done(true);
    sim.check_coordinator();
    !sim.is_waiting(ticket)
}

#[test]
fn every_commit_makes_a_version() {
    let (mut sim, ids) = ssp(3, &["a", "b"]);
    let uids = [0, 1, 1].map(|i| {
        let (uid, _) = everything(&mut sim, ids[i], true);
        sim.reduce_done(true);
        uid
    });
    assert_eq!(sim.versions_of(&uids), [1, 2, 3].map(|version| Some(Version(version))));
}

#[test]
fn a_learner_more_than_s_steps_ahead_waits_for_the_slowest() {
    for s in 0..4 {
        let (mut sim, ids) = ssp(s, &["a", "b", "c"]);
        for _ in 0..=s {
            assert!(step(&mut sim, ids[0]));
        }
        let (_, ticket) = everything(&mut sim, ids[0], true);
        assert!(sim.is_waiting(ticket), "{s}");
        assert!(step(&mut sim, ids[1]) && sim.is_waiting(ticket), "c is still behind");
        everything(&mut sim, ids[2], true);
        sim.reduce_done(true);
        assert!(sim.running.is_some(), "the slowest has moved");
        sim.reduce_done(true);
        assert!(ok(&sim, ticket));
    }
}

#[test]
fn ssp_of_zero_is_lock_step() {
    let (mut sim, ids) = ssp(0, &["a", "b"]);
    for round in 0..3 {
        assert!(step(&mut sim, ids[round % 2]));
        let (_, ahead) = everything(&mut sim, ids[round % 2], true);
        assert!(sim.is_waiting(ahead));
        sim.withdraw(ids[round % 2].0);
        assert_eq!(sim.replies[&ahead], Err(ShardError::Interrupted));
        sim.abort(ids[round % 2].0);
        assert!(step(&mut sim, ids[1 - round % 2]));
    }
    assert_eq!(sim.core.version(), Version(6));
}

#[test]
fn a_commit_that_waits_for_the_slowest_times_out_and_can_be_sent_again() {
    let (mut sim, ids) = ssp(0, &["a", "b"]);
    step(&mut sim, ids[0]);
    let (of, uid) = open(&mut sim, ids[0]);
    let what = blocks([0]);
    let ticket = sim.commit(ids[0].0, of, uid, what.clone(), true, 100);
    sim.tick(100);
    let Err(ShardError::TimedOut(why)) = &sim.replies[&ticket] else { panic!("{:?}", sim.replies) };
    assert!(why.contains("slowest"), "{why}");
    step(&mut sim, ids[1]);
    let again = sim.commit(ids[0].0, of, uid, what, true, 100);
    sim.reduce_done(true);
    assert!(ok(&sim, again));
}

#[test]
fn others_go_on_while_one_waits() {
    let (mut sim, ids) = ssp(1, &["a", "b", "c"]);
    step(&mut sim, ids[0]);
    step(&mut sim, ids[0]);
    let (_, ticket) = everything(&mut sim, ids[0], true);
    assert!(sim.is_waiting(ticket));
    assert!(step(&mut sim, ids[1]) && step(&mut sim, ids[1]));
    assert!(sim.is_waiting(ticket));
}

#[test]
fn the_slowest_that_leaves_frees_the_others() {
    let (mut sim, ids) = ssp(0, &["a", "b"]);
    step(&mut sim, ids[0]);
    let (uid, _) = everything(&mut sim, ids[0], true);
    sim.leave(ids[1].0);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[uid]), [Some(Version(2))]);
}

#[test]
fn a_joiner_starts_where_the_slowest_is() {
    let (mut sim, ids) = ssp(1, &["a", "b"]);
    for _ in 0..10 {
        assert!(step(&mut sim, ids[0]) && step(&mut sim, ids[1]));
    }
    // It holds nobody up that was not held up before, and does not run ahead.
    step(&mut sim, ids[0]);
    let joiner = sim.join("c").unwrap();
    assert!(step(&mut sim, ids[0]));
    assert!(step(&mut sim, joiner) && step(&mut sim, joiner));
    assert!(!step(&mut sim, joiner), "b is behind");
}

#[test]
fn a_commit_that_is_taken_back_is_no_step() {
    let (mut sim, ids) = ssp(0, &["a", "b"]);
    let (of, uid) = open(&mut sim, ids[0]);
    // A contribution in which NaN is found.
    let what = blocks([0]);
    sim.commit(ids[0].0, of, uid, what, false, 1_000);
    assert!(sim.reduce_refused());
    sim.abort(ids[0].0);
    assert!(step(&mut sim, ids[0]), "it had not moved");
    assert!(!step(&mut sim, ids[0]));
}

#[test]
fn the_silent_learner_that_is_waited_for_leaves_and_no_other() {
    let (mut sim, ids) = ssp(1, &["a", "b", "c", "d"]);
    // c has done a step more than d; both are silent from here on.
    step(&mut sim, ids[2]);
    step(&mut sim, ids[0]);
    step(&mut sim, ids[0]);
    let (step_of_a, uid) = open(&mut sim, ids[0]);
    let what = blocks([0]);
    sim.commit(ids[0].0, step_of_a, uid, what, true, 60_000);
    step(&mut sim, ids[1]);
    for _ in 0..3 {
        sim.tick(200);
        step(&mut sim, ids[1]);
    }
    assert_eq!(sim.left, []);
    // Versions that others make meanwhile do not count as d moving.
    sim.tick(600);
    assert_eq!(sim.left, [(ids[3].0, LeaveReason::PatienceOver)]);
}

#[test]
fn a_learner_that_moves_now_and_then_is_given_time() {
    let (mut sim, ids) = ssp(0, &["a", "b"]);
    for _ in 0..10 {
        step(&mut sim, ids[0]);
        let (_, ticket) = everything(&mut sim, ids[0], true);
        sim.tick(900);
        assert!(sim.is_waiting(ticket));
        everything(&mut sim, ids[1], true);
        sim.finish_work();
        assert!(ok(&sim, ticket));
        sim.tick(50);
        assert!(step(&mut sim, ids[1]));
    }
    assert_eq!(sim.left, []);
}

#[test]
fn the_coordinator_that_was_gained_before_is_forgotten() {
    let mut sim = Sim::new(&[("consistency", "async"), ("learners", "2")]);
    let ids = ["a", "b"].map(|name| sim.join(name).unwrap());
    for _ in 0..5 {
        step(&mut sim, ids[0]);
    }
    sim.set("consistency", "ssp(0)");
    assert!(step(&mut sim, ids[0]));
    assert!(!step(&mut sim, ids[0]));
}

#[test]
fn new_weights_while_a_contribution_is_measured_are_no_step() {
    let mut sim = Sim::new(&[("consistency", "ssp(0)"), ("clip_norm", "1"), ("learners", "2")]);
    let ids = ["a", "b"].map(|name| sim.join(name).unwrap());
    let mut sim = sim.with_fixed_consistency();
    let (uid, ticket) = everything(&mut sim, ids[0], true);
    let weights = sim.assign(1_000);
    sim.reduce_done(true);
    assert!(ok(&sim, weights) && sim.is_waiting(ticket));
    // It is measured again.
    sim.accumulate_done(false);
    sim.accumulate_done(true);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[uid]), [Some(Version(2))]);
    let (_, ahead) = everything(&mut sim, ids[0], true);
    assert!(sim.is_waiting(ahead), "it is a step ahead");
    everything(&mut sim, ids[1], true);
    sim.finish_work();
    assert!(ok(&sim, ahead));
}
