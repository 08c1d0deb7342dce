//! Promises of jobs whose versions wait a while for late contributions.

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::members::Attached;
use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::sim::{BLOCKS, Id, Sim, Uid, blocks, everything, ok, open};

/// A formed job, in which nobody has contributed yet.
fn grace(settings: &[(&str, &str)], consistency: &str, names: &[&str]) -> (Sim, Vec<Id>) {
    let learners = names.len().to_string();
    let first = [("consistency", consistency), ("learners", &learners[..]), ("lease", "10")];
    let mut sim = Sim::new(&[&first, settings].concat());
    let ids: Vec<Id> = names.iter().map(|name| sim.join(name).unwrap()).collect();
    for id in &ids {
        sim.core.touch(id.0, Some(Attached::Yes), sim.now);
    }
    (sim, ids)
}

/// These contribute, the next one always so many milliseconds later.
fn after(sim: &mut Sim, ids: &[Id], millis: u64) -> Vec<Uid> {
    let contribute = |&id| {
        sim.tick(millis);
        everything(sim, id, true).0
    };
    ids.iter().map(contribute).collect()
}

#[test]
fn a_late_contribution_counts_if_it_comes_within_the_window() {
    let (mut sim, ids) = grace(&[], "grace(2, 0.5)", &["a", "b", "c", "d"]);
    let mut uids = after(&mut sim, &ids[..2], 100);
    // The second of them came after 200 ms.
    assert_eq!(sim.core.grace_window(), Some(Now::from_millis(100)));
    uids.extend(after(&mut sim, &ids[2..3], 99));
    assert!(sim.running.is_none(), "d is missing");
    sim.tick(1);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&uids), [Some(Version(1)); 3]);
    assert_eq!((sim.core.version(), sim.core.newest_of()), (Version(1), 3));
    // d is late, and counts in the next version.
    let late = after(&mut sim, &ids[3..], 1);
    let next = after(&mut sim, &ids[..1], 1);
    assert!(sim.running.is_none());
    sim.tick(1_000);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[late[0], next[0]]), [Some(Version(2)); 2]);
}

#[test]
fn when_nobody_is_missing_the_version_is_made_at_once() {
    let (mut sim, ids) = grace(&[], "grace(1, 10)", &["a", "b"]);
    after(&mut sim, &ids, 30);
    assert!(sim.running.is_some());
    sim.reduce_done(true);
    assert_eq!(sim.core.newest_of(), 2);
    // Fewer learners than k are enough if they are all.
    let (mut sim, ids) = grace(&[], "grace(5, 10)", &["a", "b"]);
    after(&mut sim, &ids[..1], 30);
    assert!(sim.running.is_none());
    after(&mut sim, &ids[1..], 30);
    sim.reduce_done(true);
    assert_eq!((sim.core.newest_of(), sim.core.grace_window()), (2, None));
}

#[test]
fn the_window_is_a_share_of_the_mean_time_of_earlier_steps() {
    let (mut sim, ids) = grace(&[], "grace(1, 0.1)", &["a", "b"]);
    for (step, window) in [(400, 40), (800, 40), (400, 50), (400, 48)] {
        after(&mut sim, &ids[..1], step);
        let within = |length: Now| {
            (length.as_secs_f64() * 1e3 - f64::from(window)).abs() < 1.0 && sim.running.is_none()
        };
        assert!(sim.core.grace_window().is_some_and(within), "{window}: {:?}", sim.core.grace_window());
        sim.tick(60);
        assert!(sim.running.is_some());
        sim.reduce_done(true);
    }
}

#[test]
fn a_learner_that_leaves_or_dies_within_the_window_ends_it() {
    for dies in [false, true] {
        let (mut sim, ids) = grace(&[], "grace(2, 10)", &["a", "b", "c"]);
        let uids = after(&mut sim, &ids[..2], 50);
        assert!(sim.running.is_none());
        match dies {
            true => sim.lose(&[ids[2].0]),
            false => sim.leave(ids[2].0),
        }
        sim.reduce_done(true);
        assert_eq!(sim.versions_of(&uids), [Some(Version(1)); 2]);
    }
}

#[test]
fn a_joiner_is_not_waited_for_but_counts() {
    let (mut sim, ids) = grace(&[], "grace(2, 1)", &["a", "b", "c"]);
    let mut uids = after(&mut sim, &ids[..2], 50);
    let d = sim.join("d").unwrap();
    uids.extend(after(&mut sim, &[d], 10));
    assert!(sim.running.is_none(), "c is missing");
    uids.extend(after(&mut sim, &ids[2..], 10));
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&uids), [Some(Version(1)); 4]);
}

#[test]
fn nobody_waits_within_the_window_for_a_contribution_that_is_written() {
    let begins: [fn(Sim) -> Sim; 2] = [Sim::in_process, Sim::on_a_network];
    for begins in begins {
        let (mut sim, ids) = grace(&[], "grace(2, 1)", &["a", "b", "c"]);
        sim = begins(sim);
        let uids = after(&mut sim, &ids[..2], 50);
        let (step, late) = open(&mut sim, ids[2]);
        assert!(!sim.comes(ids[2].0, late, 0), "a plan would have to be dropped at the window's end");
        sim.tick(100);
        sim.reduce_done(true);
        assert_eq!(sim.versions_of(&uids), [Some(Version(1)); 2]);
        let ticket = sim.commit(ids[2].0, step, late, blocks(0..BLOCKS), true, 1_000);
        let next = after(&mut sim, &ids[..1], 50);
        sim.tick(1_000);
        sim.reduce_done(true);
        assert!(ok(&sim, ticket));
        assert_eq!(sim.versions_of(&[late, next[0]]), [Some(Version(2)); 2]);
    }
}

#[test]
fn blocks_of_the_last_contribution_that_is_needed_are_reduced_early() {
    let (sim, ids) = grace(&[], "grace(3, 1)", &["a", "b", "c"]);
    let mut sim = sim.in_process();
    let mut uids = after(&mut sim, &ids[..2], 50);
    let (step, last) = open(&mut sim, ids[2]);
    assert!(sim.comes(ids[2].0, last, 0));
    sim.commit(ids[2].0, step, last, blocks(0..BLOCKS), true, 1_000);
    sim.reduce_done(true);
    uids.push(last);
    assert_eq!(sim.versions_of(&uids), [Some(Version(1)); 3]);
}

#[test]
fn a_plan_that_gives_way_to_a_joiner_opens_the_window() {
    let (sim, ids) = grace(&[], "grace(2, 1)", &["a", "b"]);
    let mut sim = sim.on_a_network();
    let mut uids = after(&mut sim, &ids[..1], 50);
    let c = sim.join("c").unwrap();
    // c has left again, so b is the only one who is missing when it begins.
    sim.leave(c.0);
    let (_, of_b) = open(&mut sim, ids[1]);
    assert!(sim.comes(ids[1].0, of_b, 0));
    let d = sim.join("d").unwrap();
    uids.extend(after(&mut sim, &[d], 0));
    assert!(sim.provisional.is_none() && sim.running.is_none());
    sim.tick(100);
    sim.finish_work();
    assert_eq!(sim.versions_of(&uids), [Some(Version(1)); 2]);
}

#[test]
fn the_window_is_half_of_the_timeout_at_most() {
    let (mut sim, ids) = grace(&[("timeout", "1")], "grace(1, 10)", &["a", "b"]);
    after(&mut sim, &ids[..1], 900);
    assert_eq!(sim.core.grace_window(), Some(Now::from_millis(500)));
    sim.tick(500);
    assert!(sim.running.is_some());
}

#[test]
fn a_commit_that_is_taken_back_closes_the_window() {
    let (mut sim, ids) = grace(&[], "grace(2, 1)", &["a", "b", "c"]);
    sim = sim.in_process();
    after(&mut sim, &ids[..1], 50);
    sim.tick(50);
    let (_, ticket) = everything(&mut sim, ids[1], false);
    assert!(sim.core.is_in_grace());
    // Its accumulation fails.
    sim.accumulate_done(false);
    assert!(matches!(sim.replies[&ticket], Err(ShardError::OutOfMemory(_))));
    sim.tick(1_000);
    assert!(sim.running.is_none(), "one contribution is not enough");
}

#[test]
fn without_a_buffer_the_window_does_not_open() {
    let (mut sim, ids) = grace(&[], "grace(1, 1)", &["a", "b"]);
    after(&mut sim, &ids[..1], 50);
    after(&mut sim, &ids[1..], 20);
    sim.reduce_done(false);
    let (uid, ticket) = everything(&mut sim, ids[0], true);
    sim.tick(100);
    assert!(sim.is_waiting(ticket) && !sim.core.is_in_grace());
    sim.give_buffer();
    assert!(ok(&sim, ticket) && sim.core.is_in_grace());
    sim.tick(200);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[uid]), [Some(Version(2))]);
}

#[test]
fn another_consistency_ends_the_window() {
    let (mut sim, ids) = grace(&[], "grace(2, 1)", &["a", "b", "c"]);
    after(&mut sim, &ids[..2], 50);
    sim.set("consistency", "quorum(2)");
    sim.reduce_done(true);
    assert_eq!(sim.core.newest_of(), 2);
    // And a new one opens it: b's step took no time yet.
    after(&mut sim, &ids[..1], 50);
    sim.set("consistency", "grace(1, 1)");
    assert!(sim.core.is_in_grace() && sim.running.is_none());
    sim.tick(50);
    assert!(sim.running.is_some());
}

#[test]
fn a_held_job_makes_its_version_when_it_is_released() {
    let (mut sim, ids) = grace(&[], "grace(2, 1)", &["a", "b", "c"]);
    sim.hold();
    let uids = after(&mut sim, &ids[..2], 50);
    sim.tick(500);
    assert!(sim.core.is_held() && sim.running.is_none());
    sim.release();
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&uids), [Some(Version(1)); 2]);
}

#[test]
fn another_coordinator_knows_the_mean_and_opens_the_window_anew() {
    for steps in 0..2 {
        let (mut sim, ids) = grace(&[], "grace(1, 1)", &["a", "b"]);
        for _ in 0..steps {
            after(&mut sim, &ids[..1], 100);
            after(&mut sim, &ids[1..], 50);
            sim.reduce_done(true);
        }
        sim.hold();
        after(&mut sim, &ids[..1], 70);
        let bytes = postcard::to_stdvec(&sim.core).unwrap();
        sim.core = postcard::from_bytes(&bytes).unwrap();
        // Its clock is another one.
        sim.now = Now::ZERO;
        sim.core.taken_over(sim.now);
        sim.hold();
        sim.release();
        // Without an earlier step nobody knows how long to wait.
        assert_eq!(sim.core.grace_window(), Some(Now::from_millis(100 * steps)));
        assert_eq!(sim.running.is_some(), steps == 0);
        sim.tick(100);
        sim.reduce_done(true);
        assert_eq!((sim.core.version(), sim.core.newest_of()), (Version(steps + 1), 1));
    }
}

#[test]
fn new_weights_do_not_wait_for_the_window() {
    let (mut sim, ids) = grace(&[("reducer", "assign")], "grace(1, 1)", &["a", "b"]);
    after(&mut sim, &ids[..1], 100);
    let ticket = sim.assign(1_000);
    sim.reduce_done(true);
    assert!(ok(&sim, ticket) && sim.core.is_in_grace());
    assert_eq!((sim.core.version(), sim.core.newest_of()), (Version(1), 0));
    sim.tick(100);
    sim.reduce_done(true);
    assert_eq!((sim.core.version(), sim.core.newest_of()), (Version(2), 1));
}
