//! On a network a contribution that is being written holds nobody up, though a plan has begun with its blocks.

use libmodelio::vocabulary::ids::{Step, Version};
use libmodelio::vocabulary::members::{Attached, LeaveReason};
use libmodelio::vocabulary::reducer::Reducer;

use super::sim::{BLOCKS, Id, Sim, Uid, blocks, everything, ok, open};

/// A job of one learner, which has written a block that is part of a plan.
fn writing(settings: &[(&str, &str)]) -> (Sim, Id, (Step, Uid)) {
    let mut sim = Sim::new(settings).on_a_network();
    let slow = sim.join("slow").unwrap();
    let (step, uid) = open(&mut sim, slow);
    assert!(sim.provisional.is_none(), "nothing is whole");
    assert!(sim.comes(slow.0, uid, 0));
    (sim, slow, (step, uid))
}

/// It commits what it has written, which is part of this version.
fn commits(sim: &mut Sim, slow: Id, (step, uid): (Step, Uid), version: u64) {
    let ticket = sim.commit(slow.0, step, uid, blocks([0, 1]), true, 1_000);
    sim.reduce_done(true);
    assert!(ok(sim, ticket));
    assert_eq!(sim.versions_of(&[uid]), [Some(Version(version))]);
}

#[test]
fn a_commit_does_not_wait_for_one_that_writes() {
    for consistency in ["quorum(1)", "quorum(2)", "async", "ssp(9)"] {
        let (mut sim, slow, written) = writing(&[("consistency", consistency)]);
        let quick = ["a", "b"].map(|name| sim.join(name).unwrap());
        for step in 1..=3 {
            let of: Vec<_> = quick.iter().map(|&id| everything(&mut sim, id, true)).collect();
            sim.finish_work();
            assert!(of.iter().all(|(_, ticket)| ok(&sim, *ticket)), "{consistency}");
            let together = consistency == "quorum(2)";
            let versions = if together { [step, step] } else { [2 * step - 1, 2 * step] };
            let uids = [of[0].0, of[1].0];
            assert_eq!(
                sim.versions_of(&uids),
                versions.map(|version| Some(Version(version))),
                "{consistency}"
            );
        }
        assert!(!sim.comes(slow.0, written.1, 1), "another commit would have to drop it again");
        assert_eq!(sim.left, []);
        if consistency == "quorum(2)" {
            sim.set("consistency", "quorum(1)");
        }
        let version = sim.core.version().0 + 1;
        commits(&mut sim, slow, written, version);
    }
}

#[test]
fn the_next_contribution_is_reduced_early_again() {
    let (mut sim, slow, written) = writing(&[("consistency", "quorum(1)")]);
    let quick = sim.join("quick").unwrap();
    everything(&mut sim, quick, true);
    sim.reduce_done(true);
    sim.leave(quick.0);
    commits(&mut sim, slow, written, 2);
    let (step, uid) = open(&mut sim, slow);
    assert!(sim.comes(slow.0, uid, 0));
    commits(&mut sim, slow, (step, uid), 3);
}

#[test]
fn a_commit_that_waits_for_the_version_anyway_drops_no_plan() {
    let mut sim = Sim::new(&[("consistency", "quorum(2)"), ("learners", "2")]).on_a_network();
    let [quick, slow] = ["quick", "slow"].map(|name| sim.join(name).unwrap());
    let (first, _) = everything(&mut sim, quick, true);
    let (step, uid) = open(&mut sim, slow);
    assert!(sim.comes(slow.0, uid, 0));
    let (second, ticket) = everything(&mut sim, quick, true);
    assert!(sim.is_waiting(ticket) && sim.provisional.is_some());
    commits(&mut sim, slow, (step, uid), 1);
    assert_eq!(sim.versions_of(&[first, second]), [Some(Version(1)), None]);
}

#[test]
fn new_weights_do_not_wait_for_one_that_writes() {
    let (mut sim, slow, written) = writing(&[]);
    let ticket = sim.assign(1_000);
    assert!(sim.running.is_some() && sim.provisional.is_none());
    sim.reduce_done(true);
    assert!(ok(&sim, ticket));
    commits(&mut sim, slow, written, 2);
}

#[test]
fn a_hold_does_not_wait_for_one_that_writes() {
    let (mut sim, slow, written) = writing(&[]);
    sim.hold();
    assert!(sim.core.is_held() && sim.provisional.is_none());
    let ticket = sim.commit(slow.0, written.0, written.1, blocks([0, 1]), true, 1_000);
    assert!(sim.running.is_none());
    sim.release();
    sim.reduce_done(true);
    assert!(ok(&sim, ticket));
    assert_eq!(sim.versions_of(&[written.1]), [Some(Version(1))]);
}

#[test]
fn another_consistency_frees_who_waits_for_one_that_writes() {
    let mut sim = Sim::new(&[("learners", "2")]).on_a_network();
    let [quick, slow] = ["quick", "slow"].map(|name| sim.join(name).unwrap());
    let (first, _) = everything(&mut sim, quick, true);
    let written = open(&mut sim, slow);
    assert!(sim.comes(slow.0, written.1, 0));
    sim.set("learning_rate", "0.5");
    assert!(sim.provisional.is_some(), "others count from the next version");
    sim.set("consistency", "quorum(1)");
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[first]), [Some(Version(1))]);
    commits(&mut sim, slow, written, 2);
}

#[test]
fn settings_that_were_written_meanwhile_count_once_the_plan_has_given_way() {
    let (mut sim, slow, written) = writing(&[("consistency", "async"), ("reducer", "sgd")]);
    sim.set("reducer", "sum");
    assert_eq!(sim.core.params().0, Reducer::Sgd, "a block was computed");
    let quick = sim.join("quick").unwrap();
    everything(&mut sim, quick, true);
    assert_eq!(sim.core.params().0, Reducer::Sum);
    sim.reduce_done(true);
    commits(&mut sim, slow, written, 2);
}

#[test]
fn nobody_waits_for_a_learner_that_is_silent_for_long() {
    let (mut sim, slow, _) = writing(&[("consistency", "async"), ("patience", "1")]);
    let quick = sim.join("quick").unwrap();
    for id in [slow, quick] {
        sim.core.touch(id.0, Some(Attached::Yes), sim.now);
    }
    let all = blocks(0..BLOCKS);
    for _ in 0..5 {
        let (step, uid) = open(&mut sim, quick);
        let ticket = sim.commit(quick.0, step, uid, all.clone(), true, 1_000);
        sim.tick(400);
        sim.reduce_done(true);
        assert!(ok(&sim, ticket));
    }
    assert!(!sim.left.contains(&(slow.0, LeaveReason::PatienceOver)), "it holds nobody up");
}
