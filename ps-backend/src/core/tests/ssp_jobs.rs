//! Promises of jobs with bounded staleness.

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::shard_error::ShardError;

use super::bench::{Bench, Id, blocks, completes, everything, formed, ok, open};

fn ssp(s: u32, names: &[&str]) -> (Bench, Vec<Id>) {
    let (mut bench, ids) = formed(&[("consistency", &format!("ssp({s})")), ("patience", "1")], names);
    bench.attach(&ids);
    (bench, ids)
}

/// Makes one contribution; returns whether it was taken at once.
fn step(bench: &mut Bench, id: Id) -> bool {
    let (_, ticket) = everything(bench, id, true);
    bench.reduce_done(true);
    !bench.is_waiting(ticket)
}

#[test]
fn every_commit_makes_a_version() {
    let (mut bench, ids) = ssp(3, &["a", "b"]);
    let uids = [0, 1, 1].map(|i| {
        let (uid, _) = everything(&mut bench, ids[i], true);
        bench.reduce_done(true);
        uid
    });
    assert_eq!(bench.versions_of(&uids), [1, 2, 3].map(|version| Some(Version(version))));
}

#[test]
fn a_learner_more_than_s_steps_ahead_waits_for_the_slowest() {
    for s in 0..4 {
        let (mut bench, ids) = ssp(s, &["a", "b", "c"]);
        for _ in 0..=s {
            assert!(step(&mut bench, ids[0]));
        }
        let (_, ticket) = everything(&mut bench, ids[0], true);
        assert!(bench.is_waiting(ticket), "{s}");
        assert!(step(&mut bench, ids[1]) && bench.is_waiting(ticket), "c is still behind");
        completes(&mut bench, ids[2]);
        assert!(bench.running.is_some(), "the slowest has moved");
        bench.answers(ticket);
    }
}

#[test]
fn a_commit_that_waits_for_the_slowest_times_out_and_can_be_sent_again() {
    let (mut bench, ids) = ssp(0, &["a", "b"]);
    step(&mut bench, ids[0]);
    let (of, uid) = open(&mut bench, ids[0]);
    let what = blocks([0]);
    let ticket = bench.commit(ids[0].0, of, uid, what.clone(), true, 100);
    bench.tick(100);
    let Err(ShardError::TimedOut(why)) = &bench.replies[&ticket] else { panic!("{:?}", bench.replies) };
    assert!(why.contains("slowest"), "{why}");
    step(&mut bench, ids[1]);
    let again = bench.commit(ids[0].0, of, uid, what, true, 100);
    bench.answers(again);
}

#[test]
fn the_slowest_that_leaves_frees_the_others() {
    let (mut bench, ids) = ssp(0, &["a", "b"]);
    step(&mut bench, ids[0]);
    let (uid, _) = everything(&mut bench, ids[0], true);
    bench.leave(ids[1].0);
    bench.makes(2, &[uid]);
}

#[test]
fn a_joiner_starts_where_the_slowest_is() {
    let (mut bench, ids) = ssp(1, &["a", "b"]);
    for _ in 0..10 {
        assert!(step(&mut bench, ids[0]) && step(&mut bench, ids[1]));
    }
    // It holds nobody up that was not held up before, and does not run ahead.
    step(&mut bench, ids[0]);
    let joiner = bench.join("c").unwrap();
    assert!(step(&mut bench, ids[0]));
    assert!(step(&mut bench, joiner) && step(&mut bench, joiner));
    assert!(!step(&mut bench, joiner), "b is behind");
}

#[test]
fn a_commit_that_is_taken_back_is_no_step() {
    let (mut bench, ids) = ssp(0, &["a", "b"]);
    let (of, uid) = open(&mut bench, ids[0]);
    // A contribution in which NaN is found.
    let what = blocks([0]);
    bench.commit(ids[0].0, of, uid, what, false, 1_000);
    assert!(bench.reduce_refused());
    bench.abort(ids[0].0);
    assert!(step(&mut bench, ids[0]), "it had not moved");
    assert!(!step(&mut bench, ids[0]));
}

#[test]
fn the_silent_learner_that_is_waited_for_leaves_and_no_other() {
    let (mut bench, ids) = ssp(1, &["a", "b", "c", "d"]);
    // c has done a step more than d; both are silent from here on.
    step(&mut bench, ids[2]);
    step(&mut bench, ids[0]);
    step(&mut bench, ids[0]);
    let (step_of_a, uid) = open(&mut bench, ids[0]);
    let what = blocks([0]);
    bench.commit(ids[0].0, step_of_a, uid, what, true, 60_000);
    step(&mut bench, ids[1]);
    for _ in 0..3 {
        bench.tick(200);
        step(&mut bench, ids[1]);
    }
    assert_eq!(bench.left, []);
    // Versions that others make meanwhile do not count as d moving.
    bench.tick(600);
    assert_eq!(bench.left, [(ids[3].0, LeaveReason::PatienceOver)]);
}

#[test]
fn a_learner_that_moves_now_and_then_is_given_time() {
    let (mut bench, ids) = ssp(0, &["a", "b"]);
    for _ in 0..10 {
        step(&mut bench, ids[0]);
        let (_, ticket) = everything(&mut bench, ids[0], true);
        bench.tick(900);
        assert!(bench.is_waiting(ticket));
        everything(&mut bench, ids[1], true);
        bench.finish_work();
        assert!(ok(&bench, ticket));
        bench.tick(50);
        assert!(step(&mut bench, ids[1]));
    }
    assert_eq!(bench.left, []);
}

#[test]
fn the_coordinator_that_was_gained_before_is_forgotten() {
    let (mut bench, ids) = formed(&[("consistency", "async")], &["a", "b"]);
    for _ in 0..5 {
        step(&mut bench, ids[0]);
    }
    bench.set("consistency", "ssp(0)");
    assert!(step(&mut bench, ids[0]));
    assert!(!step(&mut bench, ids[0]));
}

#[test]
fn new_weights_while_a_contribution_is_measured_are_no_step() {
    let (mut bench, ids) = formed(&[("consistency", "ssp(0)"), ("clip_norm", "1")], &["a", "b"]);
    let (uid, ticket) = everything(&mut bench, ids[0], true);
    let weights = bench.assign(1_000);
    bench.reduce_done(true);
    assert!(ok(&bench, weights) && bench.is_waiting(ticket));
    // It is measured again.
    bench.accumulate_done(false);
    bench.accumulate_done(true);
    bench.makes(2, &[uid]);
    let (_, ahead) = everything(&mut bench, ids[0], true);
    assert!(bench.is_waiting(ahead), "it is a step ahead");
    everything(&mut bench, ids[1], true);
    bench.finish_work();
    assert!(ok(&bench, ahead));
}
