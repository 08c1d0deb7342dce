//! On a network, the learners of a synchronous job write to one plan at the same time.

use libmodelio::vocabulary::ids::{Step, Version};
use libmodelio::vocabulary::members::{Attached, LeaveReason};
use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::sim::{Id, Sim, Uid, blocks, everything, ok, open};

type Written = (Step, Uid);

fn two() -> (Sim, [Id; 2]) {
    let mut sim = Sim::new(&[("learners", "2"), ("lease", "0")]).on_a_network();
    let ids = ["a", "b"].map(|name| sim.join(name).unwrap());
    (sim, ids)
}

fn commit(sim: &mut Sim, id: Id, (step, uid): Written, timeout: u64) -> Ticket {
    sim.commit(id.0, step, uid, blocks([0, 1]), false, timeout)
}

/// Of 40 versions, few have a plan that begins early and is dropped.
#[track_caller]
fn are_seldom(begins: &[bool]) {
    let began = begins.iter().filter(|begins| **begins).count();
    assert!(begins.len() == 40 && (2..8).contains(&began), "{began} of 40 contributions were sent twice");
}

/// Both write a block, commit and are in a version.
fn step_together(sim: &mut Sim, ids: [Id; 2]) {
    let written = ids.map(|id| open(sim, id));
    for (id, (_, uid)) in ids.iter().zip(written) {
        sim.comes(id.0, uid, 0);
    }
    let tickets: Vec<_> = ids.iter().zip(written).map(|(id, of)| commit(sim, *id, of, 60_000)).collect();
    sim.finish_work();
    assert!(tickets.iter().all(|ticket| ok(sim, *ticket)));
}

/// A plan of both begins, if one does, and the first learner drops its contribution. Then both are in a version.
fn step_with_a_failure(sim: &mut Sim, ids: [Id; 2]) -> bool {
    let (_, dropped) = open(sim, ids[0]);
    let begins = sim.comes(ids[0].0, dropped, 0);
    sim.abort(ids[0].0);
    assert!(sim.provisional.is_none());
    for id in ids {
        everything(sim, id, false);
    }
    sim.finish_work();
    begins
}

#[test]
fn a_plan_takes_blocks_of_all_learners_and_counts_when_all_have_committed() {
    let (mut sim, [a, b]) = two();
    let (of_a, of_b) = (open(&mut sim, a), open(&mut sim, b));
    assert!(sim.comes(a.0, of_a.1, 0) && sim.comes(b.0, of_b.1, 1) && sim.comes(b.0, of_b.1, 0));
    let first = commit(&mut sim, a, of_a, 60_000);
    assert!(sim.is_waiting(first) && sim.provisional.is_some());
    assert!(sim.comes(b.0, of_b.1, 2));
    let second = sim.commit(b.0, of_b.0, of_b.1, blocks([0, 1, 2]), false, 60_000);
    assert!(sim.provisional.is_none() && sim.running.is_some());
    sim.reduce_done(true);
    assert!(ok(&sim, first) && ok(&sim, second));
    assert_eq!(sim.versions_of(&[of_a.1, of_b.1]), [Some(Version(1)); 2]);
}

#[test]
fn a_contribution_that_is_dropped_takes_the_plan_with_it_and_commits_stay() {
    for leaves in [false, true] {
        let (mut sim, [a, b]) = two();
        let (of_a, of_b) = (open(&mut sim, a), open(&mut sim, b));
        assert!(sim.comes(a.0, of_a.1, 0) && sim.comes(b.0, of_b.1, 0));
        let first = commit(&mut sim, a, of_a, 60_000);
        if leaves {
            sim.leave(b.0);
        } else {
            sim.abort(b.0);
            assert!(sim.provisional.is_none() && sim.is_waiting(first));
            everything(&mut sim, b, false);
        }
        sim.finish_work();
        assert!(ok(&sim, first));
        assert_eq!(sim.versions_of(&[of_a.1, of_b.1]), [Some(Version(1)), None], "{leaves}");
    }
}

#[test]
fn a_learner_that_leaves_before_it_has_written_is_not_waited_for() {
    let (mut sim, [a, b]) = two();
    let of_a = open(&mut sim, a);
    assert!(sim.comes(a.0, of_a.1, 0));
    let first = commit(&mut sim, a, of_a, 60_000);
    sim.leave(b.0);
    sim.finish_work();
    assert!(ok(&sim, first));
    assert_eq!(sim.left, [(b.0, LeaveReason::Asked)]);
}

#[test]
fn a_lost_payload_takes_the_plan_with_it() {
    let (mut sim, [a, b]) = two();
    let (of_a, of_b) = (open(&mut sim, a), open(&mut sim, b));
    assert!(sim.comes(a.0, of_a.1, 0) && sim.comes(b.0, of_b.1, 0));
    commit(&mut sim, a, of_a, 60_000);
    sim.lose(&[a.0]);
    let open = sim.provisional.as_ref().and_then(|plan| plan.provisional.clone());
    assert_eq!(open, Some([b.0].into()), "another one begins, for the learner that is left");
    let second = commit(&mut sim, b, of_b, 60_000);
    sim.finish_work();
    assert!(ok(&sim, second));
    assert_eq!(sim.versions_of(&[of_a.1, of_b.1]), [None, Some(Version(1))]);
}

#[test]
fn a_commit_waits_about_as_long_as_the_plan_has_lasted() {
    // How long the plan has lasted, whether b is writing, and how long a waits.
    for (lasted, writes, patience) in
        [(100, true, 1_000), (3_000, true, 3_000), (100, false, 1_000), (50_000, true, 30_000)]
    {
        let (mut sim, [a, b]) = two();
        let (of_a, of_b) = (open(&mut sim, a), open(&mut sim, b));
        assert!(sim.comes(a.0, of_a.1, 0));
        if writes {
            assert!(sim.comes(b.0, of_b.1, 0));
        }
        sim.tick(lasted);
        let first = commit(&mut sim, a, of_a, 60_000);
        sim.tick(patience - 1);
        assert!(sim.provisional.is_some() && sim.is_waiting(first), "{lasted} ms");
        sim.tick(1);
        assert!(sim.provisional.is_none() && !sim.accumulations.is_empty(), "{lasted} ms");
        sim.accumulate_done(true);
        assert!(ok(&sim, first));
        commit(&mut sim, b, of_b, 60_000);
        sim.finish_work();
        assert_eq!(sim.versions_of(&[of_a.1, of_b.1]), [Some(Version(1)); 2]);
    }
}

#[test]
fn a_commit_waits_for_half_of_its_deadline_at_most_however_many_commit_after_it() {
    let mut sim = Sim::new(&[("learners", "5"), ("lease", "0")]).on_a_network();
    let ids = ["a", "b", "c", "d", "e"].map(|name| sim.join(name).unwrap());
    let written = ids.map(|id| open(&mut sim, id));
    for (id, (_, uid)) in ids.iter().zip(written) {
        assert!(sim.comes(id.0, uid, 0));
    }
    sim.tick(60_000);
    let first = commit(&mut sim, ids[0], written[0], 60_000);
    for at in 1..4 {
        sim.tick(7_000);
        commit(&mut sim, ids[at], written[at], 60_000);
    }
    sim.tick(9_000);
    assert!(sim.provisional.is_none() && !sim.accumulations.is_empty(), "30 s have gone");
    sim.accumulate_done(true);
    assert!(ok(&sim, first));
}

#[test]
fn a_commit_that_others_keep_past_its_deadline_is_taken_back() {
    let (mut sim, [a, b]) = two();
    let (of_a, of_b) = (open(&mut sim, a), open(&mut sim, b));
    assert!(sim.comes(a.0, of_a.1, 0) && sim.comes(b.0, of_b.1, 0));
    let first = commit(&mut sim, a, of_a, 60_000);
    // The clock jumps.
    sim.tick(60_000);
    assert!(matches!(sim.replies[&first], Err(ShardError::TimedOut(_))) && sim.provisional.is_none());
    let again = commit(&mut sim, a, of_a, 60_000);
    commit(&mut sim, b, of_b, 60_000);
    sim.finish_work();
    assert!(ok(&sim, again));
    assert_eq!(sim.versions_of(&[of_a.1, of_b.1]), [Some(Version(1)); 2]);
}

/// An asynchronous job in which the first learner has written a block, which may be part of a plan.
fn asynchronous() -> (Sim, [Id; 2], Written) {
    let mut sim = Sim::new(&[("consistency", "async"), ("lease", "0")]).on_a_network();
    let ids = ["a", "b"].map(|name| sim.join(name).unwrap());
    let written = open(&mut sim, ids[0]);
    assert!(sim.comes(ids[0].0, written.1, 0), "nobody else writes");
    (sim, ids, written)
}

#[test]
fn the_only_learner_of_an_asynchronous_job_that_writes_has_a_plan() {
    let (mut sim, [a, b], of_a) = asynchronous();
    let (_, of_b) = open(&mut sim, b);
    assert!(!sim.comes(b.0, of_b, 0), "the plan is a's");
    let first = commit(&mut sim, a, of_a, 60_000);
    sim.reduce_done(true);
    assert!(ok(&sim, first));
    assert!(sim.comes(b.0, of_b, 1) || sim.provisional.is_some(), "b is the only one that writes now");
    assert_eq!(sim.versions_of(&[of_a.1]), [Some(Version(1))]);
}

#[test]
fn where_others_commit_meanwhile_an_asynchronous_job_does_without_such_plans() {
    let (mut sim, [a, b], of_a) = asynchronous();
    let (_, committed) = everything(&mut sim, b, false);
    assert!(sim.provisional.is_none() && sim.running.is_some());
    sim.reduce_done(true);
    assert!(ok(&sim, committed));
    commit(&mut sim, a, of_a, 60_000);
    sim.reduce_done(true);
    let mut begins = Vec::new();
    for _ in 0..40 {
        let of_a = open(&mut sim, a);
        begins.push(sim.comes(a.0, of_a.1, 0));
        everything(&mut sim, b, false);
        sim.reduce_done(true);
        commit(&mut sim, a, of_a, 60_000);
        sim.reduce_done(true);
    }
    are_seldom(&begins);
    assert_eq!(sim.core.version(), Version(82));
}

#[test]
fn where_one_commits_long_before_the_other_its_contribution_is_seldom_sent_in_vain() {
    let mut sim = Sim::patient(&[("learners", "2"), ("lease", "0")], 50).on_a_network();
    let [a, b] = ["a", "b"].map(|name| sim.join(name).unwrap());
    let mut begins = Vec::new();
    for _ in 0..40 {
        let (of_a, of_b) = (open(&mut sim, a), open(&mut sim, b));
        let first = commit(&mut sim, a, of_a, 60_000);
        sim.tick(40);
        begins.push(sim.comes(b.0, of_b.1, 0));
        sim.tick(10_000);
        sim.finish_work();
        assert!(ok(&sim, first), "it does not wait for b");
        commit(&mut sim, b, of_b, 60_000);
        sim.finish_work();
    }
    are_seldom(&begins);
    assert_eq!(sim.core.version(), Version(40));
}

#[test]
fn where_one_is_always_slow_plans_of_all_are_seldom_tried_and_the_slow_one_has_its_own() {
    let (mut sim, [a, b]) = two();
    let mut begins = Vec::new();
    for _ in 0..40 {
        let (of_a, of_b) = (open(&mut sim, a), open(&mut sim, b));
        sim.comes(b.0, of_b.1, 0);
        begins.push(sim.comes(a.0, of_a.1, 0));
        sim.tick(100);
        let first = commit(&mut sim, a, of_a, 60_000);
        sim.tick(5_000);
        sim.finish_work();
        assert!(ok(&sim, first), "it does not wait for b");
        let open = sim.provisional.as_ref().and_then(|plan| plan.provisional.clone());
        assert_eq!(open, Some([b.0].into()));
        commit(&mut sim, b, of_b, 60_000);
        sim.finish_work();
    }
    are_seldom(&begins);
    assert_eq!(sim.core.version(), Version(40));
}

#[test]
fn nobody_leaves_because_of_a_plan_that_others_do_not_wait_for() {
    let mut sim = Sim::new(&[("consistency", "ssp(1)"), ("learners", "3"), ("lease", "60")]).on_a_network();
    let [a, b, c] = ["a", "b", "c"].map(|name| sim.join(name).unwrap());
    for id in [a, b, c] {
        sim.core.touch(id.0, Some(Attached::Yes), sim.now);
    }
    for id in [a, b, b] {
        everything(&mut sim, id, false);
        sim.finish_work();
    }
    let of_a = open(&mut sim, a);
    assert!(sim.comes(a.0, of_a.1, 0));
    let of_b = open(&mut sim, b);
    let ahead = commit(&mut sim, b, of_b, 120_000);
    assert!(sim.is_waiting(ahead), "b is two steps ahead of c");
    sim.tick(40_000);
    open(&mut sim, c);
    sim.tick(40_000);
    assert_eq!(sim.left, [], "b waits for c, which was heard of 40 s ago");
    commit(&mut sim, a, of_a, 60_000);
    sim.finish_work();
    assert_eq!(sim.versions_of(&[of_a.1]), [Some(Version(4))]);
}

#[test]
fn after_failures_in_a_row_more_and_more_versions_are_made_without_such_a_plan() {
    let (mut sim, ids) = two();
    let begins: Vec<bool> = (0..12).map(|_| step_with_a_failure(&mut sim, ids)).collect();
    let began: Vec<usize> = (0..12).filter(|&at| begins[at]).collect();
    assert_eq!(began, [0, 1, 3, 7]);
    for _ in 0..4 {
        step_together(&mut sim, ids);
    }
    // One that counts makes good for all.
    assert!(step_with_a_failure(&mut sim, ids) && step_with_a_failure(&mut sim, ids));
}
