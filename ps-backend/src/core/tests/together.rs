//! On a network, the learners of a synchronous job write to one plan at the same time.

use libmodelio::vocabulary::ids::{Step, Version};
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::bench::{Bench, Id, Uid, blocks, everything, ok, open, patient};

type Written = (Step, Uid);

fn two() -> (Bench, [Id; 2]) {
    let mut bench = Bench::new(&[("learners", "2"), ("lease", "0")]).on_a_network();
    let ids = ["a", "b"].map(|name| bench.join(name).unwrap());
    (bench, ids)
}

fn commit(bench: &mut Bench, id: Id, (step, uid): Written, timeout: u64) -> Ticket {
    bench.commit(id.0, step, uid, blocks([0, 1]), false, timeout)
}

/// Of 40 versions, few have a plan that begins early and is dropped.
#[track_caller]
fn are_seldom(begins: &[bool]) {
    let began = begins.iter().filter(|begins| **begins).count();
    assert!(begins.len() == 40 && (2..8).contains(&began), "{began} of 40 contributions were sent twice");
}

/// Both write a block, commit and are in a version.
fn step_together(bench: &mut Bench, ids: [Id; 2]) {
    let written = ids.map(|id| open(bench, id));
    for (id, (_, uid)) in ids.iter().zip(written) {
        bench.comes(id.0, uid, 0);
    }
    let tickets: Vec<_> = ids.iter().zip(written).map(|(id, of)| commit(bench, *id, of, 60_000)).collect();
    bench.finish_work();
    assert!(tickets.iter().all(|ticket| ok(bench, *ticket)));
}

/// A plan of both begins, if one does, and the first learner drops its contribution. Then both are in a version.
fn step_with_a_failure(bench: &mut Bench, ids: [Id; 2]) -> bool {
    let (_, dropped) = open(bench, ids[0]);
    let begins = bench.comes(ids[0].0, dropped, 0);
    bench.abort(ids[0].0);
    assert!(bench.provisional.is_none());
    for id in ids {
        everything(bench, id, false);
    }
    bench.finish_work();
    begins
}

#[test]
fn a_plan_takes_blocks_of_all_learners_and_counts_when_all_have_committed() {
    let (mut bench, [a, b]) = two();
    let (of_a, of_b) = (open(&mut bench, a), open(&mut bench, b));
    assert!(bench.comes(a.0, of_a.1, 0) && bench.comes(b.0, of_b.1, 1) && bench.comes(b.0, of_b.1, 0));
    let first = commit(&mut bench, a, of_a, 60_000);
    assert!(bench.is_waiting(first) && bench.provisional.is_some());
    assert!(bench.comes(b.0, of_b.1, 2));
    let second = bench.commit(b.0, of_b.0, of_b.1, blocks([0, 1, 2]), false, 60_000);
    assert!(bench.provisional.is_none() && bench.running.is_some());
    bench.reduce_done(true);
    assert!(ok(&bench, first) && ok(&bench, second));
    assert_eq!(bench.versions_of(&[of_a.1, of_b.1]), [Some(Version(1)); 2]);
}

#[test]
fn a_contribution_that_is_dropped_takes_the_plan_with_it_and_commits_stay() {
    for leaves in [false, true] {
        let (mut bench, [a, b]) = two();
        let (of_a, of_b) = (open(&mut bench, a), open(&mut bench, b));
        assert!(bench.comes(a.0, of_a.1, 0) && bench.comes(b.0, of_b.1, 0));
        let first = commit(&mut bench, a, of_a, 60_000);
        if leaves {
            bench.leave(b.0);
        } else {
            bench.abort(b.0);
            assert!(bench.provisional.is_none() && bench.is_waiting(first));
            everything(&mut bench, b, false);
        }
        bench.finish_work();
        assert!(ok(&bench, first));
        assert_eq!(bench.versions_of(&[of_a.1, of_b.1]), [Some(Version(1)), None], "{leaves}");
    }
}

#[test]
fn a_learner_that_leaves_before_it_has_written_is_not_waited_for() {
    let (mut bench, [a, b]) = two();
    let of_a = open(&mut bench, a);
    assert!(bench.comes(a.0, of_a.1, 0));
    let first = commit(&mut bench, a, of_a, 60_000);
    bench.leave(b.0);
    bench.finish_work();
    assert!(ok(&bench, first));
    assert_eq!(bench.left, [(b.0, LeaveReason::Asked)]);
}

#[test]
fn a_lost_payload_takes_the_plan_with_it() {
    let (mut bench, [a, b]) = two();
    let (of_a, of_b) = (open(&mut bench, a), open(&mut bench, b));
    assert!(bench.comes(a.0, of_a.1, 0) && bench.comes(b.0, of_b.1, 0));
    commit(&mut bench, a, of_a, 60_000);
    bench.lose(&[a.0]);
    let open = bench.provisional.as_ref().and_then(|plan| plan.provisional.clone());
    assert_eq!(open, Some([b.0].into()), "another one begins, for the learner that is left");
    let second = commit(&mut bench, b, of_b, 60_000);
    bench.finish_work();
    assert!(ok(&bench, second));
    assert_eq!(bench.versions_of(&[of_a.1, of_b.1]), [None, Some(Version(1))]);
}

#[test]
fn a_commit_waits_about_as_long_as_the_plan_has_lasted() {
    // How long the plan has lasted, whether b is writing, and how long a waits.
    for (lasted, writes, patience) in
        [(100, true, 1_000), (3_000, true, 3_000), (100, false, 1_000), (50_000, true, 30_000)]
    {
        let (mut bench, [a, b]) = two();
        let (of_a, of_b) = (open(&mut bench, a), open(&mut bench, b));
        assert!(bench.comes(a.0, of_a.1, 0));
        if writes {
            assert!(bench.comes(b.0, of_b.1, 0));
        }
        bench.tick(lasted);
        let first = commit(&mut bench, a, of_a, 60_000);
        bench.tick(patience - 1);
        assert!(bench.provisional.is_some() && bench.is_waiting(first), "{lasted} ms");
        bench.tick(1);
        assert!(bench.provisional.is_none() && !bench.accumulations.is_empty(), "{lasted} ms");
        bench.accumulate_done(true);
        assert!(ok(&bench, first));
        commit(&mut bench, b, of_b, 60_000);
        bench.finish_work();
        assert_eq!(bench.versions_of(&[of_a.1, of_b.1]), [Some(Version(1)); 2]);
    }
}

#[test]
fn a_commit_waits_for_half_of_its_deadline_at_most_however_many_commit_after_it() {
    let mut bench = Bench::new(&[("learners", "5"), ("lease", "0")]).on_a_network();
    let ids = ["a", "b", "c", "d", "e"].map(|name| bench.join(name).unwrap());
    let written = ids.map(|id| open(&mut bench, id));
    for (id, (_, uid)) in ids.iter().zip(written) {
        assert!(bench.comes(id.0, uid, 0));
    }
    bench.tick(60_000);
    let first = commit(&mut bench, ids[0], written[0], 60_000);
    for at in 1..4 {
        bench.tick(7_000);
        commit(&mut bench, ids[at], written[at], 60_000);
    }
    bench.tick(9_000);
    assert!(bench.provisional.is_none() && !bench.accumulations.is_empty(), "30 s have gone");
    bench.accumulate_done(true);
    assert!(ok(&bench, first));
}

#[test]
fn a_commit_that_others_keep_past_its_deadline_is_taken_back() {
    let (mut bench, [a, b]) = two();
    let (of_a, of_b) = (open(&mut bench, a), open(&mut bench, b));
    assert!(bench.comes(a.0, of_a.1, 0) && bench.comes(b.0, of_b.1, 0));
    let first = commit(&mut bench, a, of_a, 60_000);
    // The clock jumps.
    bench.tick(60_000);
    assert!(matches!(bench.replies[&first], Err(ShardError::TimedOut(_))) && bench.provisional.is_none());
    let again = commit(&mut bench, a, of_a, 60_000);
    commit(&mut bench, b, of_b, 60_000);
    bench.finish_work();
    assert!(ok(&bench, again));
    assert_eq!(bench.versions_of(&[of_a.1, of_b.1]), [Some(Version(1)); 2]);
}

/// An asynchronous job in which the first learner has written a block, which may be part of a plan.
fn asynchronous() -> (Bench, [Id; 2], Written) {
    let mut bench = Bench::new(&[("consistency", "async"), ("lease", "0")]).on_a_network();
    let ids = ["a", "b"].map(|name| bench.join(name).unwrap());
    let written = open(&mut bench, ids[0]);
    assert!(bench.comes(ids[0].0, written.1, 0), "nobody else writes");
    (bench, ids, written)
}

#[test]
fn the_only_learner_of_an_asynchronous_job_that_writes_has_a_plan() {
    let (mut bench, [a, b], of_a) = asynchronous();
    let (_, of_b) = open(&mut bench, b);
    assert!(!bench.comes(b.0, of_b, 0), "the plan is a's");
    let first = commit(&mut bench, a, of_a, 60_000);
    bench.answers(first);
    assert!(bench.comes(b.0, of_b, 1) || bench.provisional.is_some(), "b is the only one that writes now");
    assert_eq!(bench.versions_of(&[of_a.1]), [Some(Version(1))]);
}

#[test]
fn where_others_commit_meanwhile_an_asynchronous_job_does_without_such_plans() {
    let (mut bench, [a, b], of_a) = asynchronous();
    let (_, committed) = everything(&mut bench, b, false);
    assert!(bench.provisional.is_none() && bench.running.is_some());
    bench.answers(committed);
    commit(&mut bench, a, of_a, 60_000);
    bench.reduce_done(true);
    let mut begins = Vec::new();
    for _ in 0..40 {
        let of_a = open(&mut bench, a);
        begins.push(bench.comes(a.0, of_a.1, 0));
        everything(&mut bench, b, false);
        bench.reduce_done(true);
        commit(&mut bench, a, of_a, 60_000);
        bench.reduce_done(true);
    }
    are_seldom(&begins);
    assert_eq!(bench.core.version(), Version(82));
}

#[test]
fn where_one_commits_long_before_the_other_its_contribution_is_seldom_sent_in_vain() {
    let (bench, ids) = patient(&[("lease", "0")], &["a", "b"], 50);
    let (mut bench, [a, b]) = (bench.on_a_network(), [ids[0], ids[1]]);
    let mut begins = Vec::new();
    for _ in 0..40 {
        let (of_a, of_b) = (open(&mut bench, a), open(&mut bench, b));
        let first = commit(&mut bench, a, of_a, 60_000);
        bench.tick(40);
        begins.push(bench.comes(b.0, of_b.1, 0));
        bench.tick(10_000);
        bench.finish_work();
        assert!(ok(&bench, first), "it does not wait for b");
        commit(&mut bench, b, of_b, 60_000);
        bench.finish_work();
    }
    are_seldom(&begins);
    assert_eq!(bench.core.version(), Version(40));
}

#[test]
fn where_one_is_always_slow_plans_of_all_are_seldom_tried_and_the_slow_one_has_its_own() {
    let (mut bench, [a, b]) = two();
    let mut begins = Vec::new();
    for _ in 0..40 {
        let (of_a, of_b) = (open(&mut bench, a), open(&mut bench, b));
        bench.comes(b.0, of_b.1, 0);
        begins.push(bench.comes(a.0, of_a.1, 0));
        bench.tick(100);
        let first = commit(&mut bench, a, of_a, 60_000);
        bench.tick(5_000);
        bench.finish_work();
        assert!(ok(&bench, first), "it does not wait for b");
        let open = bench.provisional.as_ref().and_then(|plan| plan.provisional.clone());
        assert_eq!(open, Some([b.0].into()));
        commit(&mut bench, b, of_b, 60_000);
        bench.finish_work();
    }
    are_seldom(&begins);
    assert_eq!(bench.core.version(), Version(40));
}

#[test]
fn nobody_leaves_because_of_a_plan_that_others_do_not_wait_for() {
    let mut bench =
        Bench::new(&[("consistency", "ssp(1)"), ("learners", "3"), ("lease", "60")]).on_a_network();
    let [a, b, c] = ["a", "b", "c"].map(|name| bench.join(name).unwrap());
    bench.attach(&[a, b, c]);
    for id in [a, b, b] {
        everything(&mut bench, id, false);
        bench.finish_work();
    }
    let of_a = open(&mut bench, a);
    assert!(bench.comes(a.0, of_a.1, 0));
    let of_b = open(&mut bench, b);
    let ahead = commit(&mut bench, b, of_b, 120_000);
    assert!(bench.is_waiting(ahead), "b is two steps ahead of c");
    bench.tick(40_000);
    open(&mut bench, c);
    bench.tick(40_000);
    assert_eq!(bench.left, [], "b waits for c, which was heard of 40 s ago");
    commit(&mut bench, a, of_a, 60_000);
    bench.finish_work();
    assert_eq!(bench.versions_of(&[of_a.1]), [Some(Version(4))]);
}

#[test]
fn after_failures_in_a_row_more_and_more_versions_are_made_without_such_a_plan() {
    let (mut bench, ids) = two();
    let begins: Vec<bool> = (0..12).map(|_| step_with_a_failure(&mut bench, ids)).collect();
    let began: Vec<usize> = (0..12).filter(|&at| begins[at]).collect();
    assert_eq!(began, [0, 1, 3, 7]);
    for _ in 0..4 {
        step_together(&mut bench, ids);
    }
    // One that counts makes good for all.
    assert!(step_with_a_failure(&mut bench, ids) && step_with_a_failure(&mut bench, ids));
}
