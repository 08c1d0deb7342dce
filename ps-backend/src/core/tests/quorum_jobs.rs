//! Promises of jobs whose versions need a quorum.

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::members::LeaveReason;

use super::bench::{Bench, Id, blocks, completes, everything, formed, ok, open};

fn quorum(k: u32, names: &[&str]) -> (Bench, Vec<Id>) {
    let (bench, ids) = formed(&[("consistency", &format!("quorum({k})")), ("patience", "1")], names);
    let mut bench = bench.in_process();
    bench.attach(&ids);
    (bench, ids)
}

#[test]
fn a_version_is_made_when_as_many_are_in() {
    let (mut bench, ids) = quorum(2, &["a", "b", "c"]);
    let (a, _) = everything(&mut bench, ids[0], true);
    assert!(bench.running.is_none());
    let (c, _) = everything(&mut bench, ids[2], true);
    bench.makes(1, &[a, c]);
}

#[test]
fn all_that_are_in_by_then_are_part_of_it() {
    let (mut bench, ids) = quorum(2, &["a", "b", "c", "d"]);
    let first: Vec<_> = ids[..2].iter().map(|&id| everything(&mut bench, id, true).0).collect();
    // These come while it is made; together they are more than it takes.
    let next: Vec<_> = [2, 3, 0].map(|i| everything(&mut bench, ids[i], true).0).into();
    bench.reduce_done(true);
    bench.reduce_done(true);
    assert_eq!(bench.versions_of(&first), [Some(Version(1)); 2]);
    assert_eq!(bench.versions_of(&next), [Some(Version(2)); 3]);
}

#[test]
fn a_late_contribution_counts_in_the_next_version() {
    let (mut bench, ids) = quorum(2, &["a", "b", "c"]);
    let (step, late) = open(&mut bench, ids[2]);
    assert!(!bench.comes(ids[2].0, late, 0));
    for _ in 0..3 {
        everything(&mut bench, ids[0], true);
        completes(&mut bench, ids[1]);
    }
    let ticket = bench.commit(ids[2].0, step, late, blocks([0]), true, 1_000);
    assert!(ok(&bench, ticket) && bench.running.is_none());
    everything(&mut bench, ids[1], true);
    bench.makes(4, &[late]);
}

#[test]
fn a_learner_counts_once_in_a_version() {
    let (mut bench, ids) = quorum(2, &["a", "b"]);
    let (first, _) = everything(&mut bench, ids[0], true);
    let (second, ticket) = everything(&mut bench, ids[0], true);
    assert!(bench.is_waiting(ticket) && bench.running.is_none(), "one learner is no quorum");
    let (of_b, _) = completes(&mut bench, ids[1]);
    assert_eq!(bench.versions_of(&[first, second, of_b]), [Some(Version(1)), None, Some(Version(1))]);
    assert!(ok(&bench, ticket));
}

#[test]
fn fewer_learners_than_the_quorum_are_enough_when_all_are_in() {
    let (mut bench, ids) = quorum(5, &["a", "b", "c"]);
    let (a, _) = everything(&mut bench, ids[0], true);
    let (b, _) = everything(&mut bench, ids[1], true);
    assert!(bench.running.is_none());
    bench.leave(ids[2].0);
    bench.makes(1, &[a, b]);
}

#[test]
fn a_leavers_contribution_counts_towards_the_quorum() {
    let (mut bench, ids) = quorum(2, &["a", "b", "c"]);
    let (a, _) = everything(&mut bench, ids[0], true);
    bench.leave(ids[0].0);
    let (b, _) = everything(&mut bench, ids[1], true);
    bench.makes(1, &[a, b]);
}

#[test]
fn a_joiner_is_not_waited_for_and_may_contribute_at_once() {
    let (mut bench, ids) = quorum(3, &["a", "b"]);
    everything(&mut bench, ids[0], true);
    bench.join("c").unwrap();
    everything(&mut bench, ids[1], true);
    assert!(bench.running.is_some(), "both that take part are in");
    bench.reduce_done(true);
    // a writes, for long; c need not wait for it.
    let (mut bench, ids) = quorum(1, &["a"]);
    let b = bench.join("b").unwrap();
    open(&mut bench, ids[0]);
    let c = bench.join("c").unwrap();
    for id in [b, c] {
        let (uid, ticket) = everything(&mut bench, id, true);
        bench.reduce_done(true);
        assert!(ok(&bench, ticket) && bench.versions_of(&[uid]) != [None]);
    }
}

#[test]
fn blocks_are_reduced_early_only_when_all_others_are_in() {
    let (mut bench, ids) = quorum(3, &["a", "b", "c"]);
    everything(&mut bench, ids[0], true);
    let (step, uid) = open(&mut bench, ids[2]);
    assert!(!bench.comes(ids[2].0, uid, 0), "b may still come in");
    everything(&mut bench, ids[1], true);
    assert!(bench.comes(ids[2].0, uid, 1));
    // A joiner could add to what was computed: it waits.
    let d = bench.join("d").unwrap();
    let (of_d, waits) = everything(&mut bench, d, true);
    assert!(bench.is_waiting(waits));
    bench.commit(ids[2].0, step, uid, blocks([0, 1]), true, 1_000);
    bench.reduce_done(true);
    assert_eq!(bench.versions_of(&[uid, of_d]), [Some(Version(1)), None]);
    assert!(ok(&bench, waits));
}

#[test]
fn a_joiner_that_may_come_in_keeps_blocks_of_others_from_being_reduced_early() {
    let (mut bench, ids) = quorum(2, &["a", "b"]);
    everything(&mut bench, ids[0], true);
    bench.join("c").unwrap();
    let (_, uid) = open(&mut bench, ids[1]);
    assert!(!bench.comes(ids[1].0, uid, 0));
}

#[test]
fn a_silent_learner_leaves_only_when_the_quorum_waits_for_it() {
    // Two of three are enough: c holds nobody up, however long it is silent.
    let (mut bench, ids) = quorum(2, &["a", "b", "c"]);
    for _ in 0..10 {
        everything(&mut bench, ids[0], true);
        bench.tick(400);
        completes(&mut bench, ids[1]);
    }
    assert_eq!(bench.left, []);
    // b does not come either: now a waits for one of the two.
    everything(&mut bench, ids[0], true);
    for _ in 0..2 {
        bench.tick(600);
    }
    assert_eq!(bench.left, [1, 2].map(|i| (ids[i].0, LeaveReason::PatienceOver)));
    assert!(bench.running.is_some());
}

#[test]
fn a_smaller_quorum_and_no_quorum_at_all_free_a_step_that_waits() {
    for (from, to) in [("quorum(2)", "quorum(1)"), ("sync", "async")] {
        let (mut bench, ids) = formed(&[("consistency", from)], &["a", "b"]);
        let (a, _) = everything(&mut bench, ids[0], true);
        bench.set("consistency", to);
        bench.reduce_done(true);
        assert_eq!(bench.versions_of(&[a]), [Some(Version(1))], "{to}");
    }
}
