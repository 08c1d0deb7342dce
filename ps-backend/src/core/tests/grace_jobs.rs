//! Promises of jobs whose versions wait a while for late contributions.

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::bench::{BLOCKS, Bench, Id, Uid, blocks, everything, formed, ok, open};

/// A formed job, in which nobody has contributed yet.
fn grace(settings: &[(&str, &str)], consistency: &str, names: &[&str]) -> (Bench, Vec<Id>) {
    let (mut bench, ids) =
        formed(&[&[("consistency", consistency), ("lease", "10")], settings].concat(), names);
    bench.attach(&ids);
    (bench, ids)
}

/// These contribute, the next one always so many milliseconds later.
fn after(bench: &mut Bench, ids: &[Id], millis: u64) -> Vec<Uid> {
    let contribute = |&id| {
        bench.tick(millis);
        everything(bench, id, true).0
    };
    ids.iter().map(contribute).collect()
}

#[test]
fn a_late_contribution_counts_if_it_comes_within_the_window() {
    let (mut bench, ids) = grace(&[], "grace(2, 0.5)", &["a", "b", "c", "d"]);
    let mut uids = after(&mut bench, &ids[..2], 100);
    // The second of them came after 200 ms.
    assert_eq!(bench.core.grace_window(), Some(Now::from_millis(100)));
    uids.extend(after(&mut bench, &ids[2..3], 99));
    assert!(bench.running.is_none(), "d is missing");
    bench.tick(1);
    bench.makes(1, &uids);
    assert_eq!((bench.core.version(), bench.core.newest_of()), (Version(1), 3));
    // d is late, and counts in the next version.
    let late = after(&mut bench, &ids[3..], 1);
    let next = after(&mut bench, &ids[..1], 1);
    assert!(bench.running.is_none());
    bench.tick(1_000);
    bench.reduce_done(true);
    assert_eq!(bench.versions_of(&[late[0], next[0]]), [Some(Version(2)); 2]);
}

#[test]
fn when_nobody_is_missing_the_version_is_made_at_once() {
    let (mut bench, ids) = grace(&[], "grace(1, 10)", &["a", "b"]);
    after(&mut bench, &ids, 30);
    assert!(bench.running.is_some());
    bench.reduce_done(true);
    assert_eq!(bench.core.newest_of(), 2);
    // Fewer learners than k are enough if they are all.
    let (mut bench, ids) = grace(&[], "grace(5, 10)", &["a", "b"]);
    after(&mut bench, &ids[..1], 30);
    assert!(bench.running.is_none());
    after(&mut bench, &ids[1..], 30);
    bench.reduce_done(true);
    assert_eq!((bench.core.newest_of(), bench.core.grace_window()), (2, None));
}

#[test]
fn the_window_is_a_share_of_the_mean_time_of_earlier_steps() {
    let (mut bench, ids) = grace(&[], "grace(1, 0.1)", &["a", "b"]);
    for (step, window) in [(400, 40), (800, 40), (400, 50), (400, 48)] {
        after(&mut bench, &ids[..1], step);
        let within = |length: Now| {
            (length.as_secs_f64() * 1e3 - f64::from(window)).abs() < 1.0 && bench.running.is_none()
        };
        assert!(bench.core.grace_window().is_some_and(within), "{window}: {:?}", bench.core.grace_window());
        bench.tick(60);
        assert!(bench.running.is_some());
        bench.reduce_done(true);
    }
}

#[test]
fn a_learner_that_leaves_or_dies_within_the_window_ends_it() {
    for dies in [false, true] {
        let (mut bench, ids) = grace(&[], "grace(2, 10)", &["a", "b", "c"]);
        let uids = after(&mut bench, &ids[..2], 50);
        assert!(bench.running.is_none());
        match dies {
            true => bench.lose(&[ids[2].0]),
            false => bench.leave(ids[2].0),
        }
        bench.makes(1, &uids);
    }
}

#[test]
fn a_joiner_is_not_waited_for_but_counts() {
    let (mut bench, ids) = grace(&[], "grace(2, 1)", &["a", "b", "c"]);
    let mut uids = after(&mut bench, &ids[..2], 50);
    let d = bench.join("d").unwrap();
    uids.extend(after(&mut bench, &[d], 10));
    assert!(bench.running.is_none(), "c is missing");
    uids.extend(after(&mut bench, &ids[2..], 10));
    bench.makes(1, &uids);
}

#[test]
fn nobody_waits_within_the_window_for_a_contribution_that_is_written() {
    let begins: [fn(Bench) -> Bench; 2] = [Bench::in_process, Bench::on_a_network];
    for begins in begins {
        let (mut bench, ids) = grace(&[], "grace(2, 1)", &["a", "b", "c"]);
        bench = begins(bench);
        let uids = after(&mut bench, &ids[..2], 50);
        let (step, late) = open(&mut bench, ids[2]);
        assert!(!bench.comes(ids[2].0, late, 0), "a plan would have to be dropped at the window's end");
        bench.tick(100);
        bench.makes(1, &uids);
        let ticket = bench.commit(ids[2].0, step, late, blocks(0..BLOCKS), true, 1_000);
        let next = after(&mut bench, &ids[..1], 50);
        bench.tick(1_000);
        bench.answers(ticket);
        assert_eq!(bench.versions_of(&[late, next[0]]), [Some(Version(2)); 2]);
    }
}

#[test]
fn blocks_of_the_last_contribution_that_is_needed_are_reduced_early() {
    let (bench, ids) = grace(&[], "grace(3, 1)", &["a", "b", "c"]);
    let mut bench = bench.in_process();
    let mut uids = after(&mut bench, &ids[..2], 50);
    let (step, last) = open(&mut bench, ids[2]);
    assert!(bench.comes(ids[2].0, last, 0));
    bench.commit(ids[2].0, step, last, blocks(0..BLOCKS), true, 1_000);
    bench.reduce_done(true);
    uids.push(last);
    assert_eq!(bench.versions_of(&uids), [Some(Version(1)); 3]);
}

#[test]
fn a_plan_that_gives_way_to_a_joiner_opens_the_window() {
    let (bench, ids) = grace(&[], "grace(2, 1)", &["a", "b"]);
    let mut bench = bench.on_a_network();
    let mut uids = after(&mut bench, &ids[..1], 50);
    let c = bench.join("c").unwrap();
    // c has left again, so b is the only one who is missing when it begins.
    bench.leave(c.0);
    let (_, of_b) = open(&mut bench, ids[1]);
    assert!(bench.comes(ids[1].0, of_b, 0));
    let d = bench.join("d").unwrap();
    uids.extend(after(&mut bench, &[d], 0));
    assert!(bench.provisional.is_none() && bench.running.is_none());
    bench.tick(100);
    bench.finish_work();
    assert_eq!(bench.versions_of(&uids), [Some(Version(1)); 2]);
}

#[test]
fn the_window_is_half_of_the_timeout_at_most() {
    let (mut bench, ids) = grace(&[("timeout", "1")], "grace(1, 10)", &["a", "b"]);
    after(&mut bench, &ids[..1], 900);
    assert_eq!(bench.core.grace_window(), Some(Now::from_millis(500)));
    bench.tick(500);
    assert!(bench.running.is_some());
}

#[test]
fn a_commit_that_is_taken_back_closes_the_window() {
    let (mut bench, ids) = grace(&[], "grace(2, 1)", &["a", "b", "c"]);
    bench = bench.in_process();
    after(&mut bench, &ids[..1], 50);
    bench.tick(50);
    let (_, ticket) = everything(&mut bench, ids[1], false);
    assert!(bench.core.is_in_grace());
    // Its accumulation fails.
    bench.accumulate_done(false);
    assert!(matches!(bench.replies[&ticket], Err(ShardError::OutOfMemory(_))));
    bench.tick(1_000);
    assert!(bench.running.is_none(), "one contribution is not enough");
}

#[test]
fn without_a_buffer_the_window_does_not_open() {
    let (mut bench, ids) = grace(&[], "grace(1, 1)", &["a", "b"]);
    after(&mut bench, &ids[..1], 50);
    after(&mut bench, &ids[1..], 20);
    bench.reduce_done(false);
    let (uid, ticket) = everything(&mut bench, ids[0], true);
    bench.tick(100);
    assert!(bench.is_waiting(ticket) && !bench.core.is_in_grace());
    bench.give_buffer();
    assert!(ok(&bench, ticket) && bench.core.is_in_grace());
    bench.tick(200);
    bench.makes(2, &[uid]);
}

#[test]
fn another_consistency_ends_the_window() {
    let (mut bench, ids) = grace(&[], "grace(2, 1)", &["a", "b", "c"]);
    after(&mut bench, &ids[..2], 50);
    bench.set("consistency", "quorum(2)");
    bench.reduce_done(true);
    assert_eq!(bench.core.newest_of(), 2);
    // And a new one opens it: b's step took no time yet.
    after(&mut bench, &ids[..1], 50);
    bench.set("consistency", "grace(1, 1)");
    assert!(bench.core.is_in_grace() && bench.running.is_none());
    bench.tick(50);
    assert!(bench.running.is_some());
}

#[test]
fn a_held_job_makes_its_version_when_it_is_released() {
    let (mut bench, ids) = grace(&[], "grace(2, 1)", &["a", "b", "c"]);
    bench.hold();
    let uids = after(&mut bench, &ids[..2], 50);
    bench.tick(500);
    assert!(bench.core.is_held() && bench.running.is_none());
    bench.release();
    bench.makes(1, &uids);
}

#[test]
fn another_coordinator_knows_the_mean_and_opens_the_window_anew() {
    for steps in 0..2 {
        let (mut bench, ids) = grace(&[], "grace(1, 1)", &["a", "b"]);
        for _ in 0..steps {
            after(&mut bench, &ids[..1], 100);
            after(&mut bench, &ids[1..], 50);
            bench.reduce_done(true);
        }
        bench.hold();
        after(&mut bench, &ids[..1], 70);
        let bytes = postcard::to_stdvec(&bench.core).unwrap();
        bench.core = postcard::from_bytes(&bytes).unwrap();
        // Its clock is another one.
        bench.now = Now::ZERO;
        bench.core.taken_over(bench.now);
        bench.hold();
        bench.release();
        // Without an earlier step nobody knows how long to wait.
        assert_eq!(bench.core.grace_window(), Some(Now::from_millis(100 * steps)));
        assert_eq!(bench.running.is_some(), steps == 0);
        bench.tick(100);
        bench.reduce_done(true);
        assert_eq!((bench.core.version(), bench.core.newest_of()), (Version(steps + 1), 1));
    }
}

#[test]
fn new_weights_do_not_wait_for_the_window() {
    let (mut bench, ids) = grace(&[("reducer", "assign")], "grace(1, 1)", &["a", "b"]);
    after(&mut bench, &ids[..1], 100);
    let ticket = bench.assign(1_000);
    bench.reduce_done(true);
    assert!(ok(&bench, ticket) && bench.core.is_in_grace());
    assert_eq!((bench.core.version(), bench.core.newest_of()), (Version(1), 0));
    bench.tick(100);
    bench.reduce_done(true);
    assert_eq!((bench.core.version(), bench.core.newest_of()), (Version(2), 1));
}
