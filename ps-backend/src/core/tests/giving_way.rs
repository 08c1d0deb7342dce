//! On a network a contribution that is being written holds nobody up, though a plan has begun with its blocks.

use libmodelio::vocabulary::ids::{Step, Version};
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::reducer::Reducer;

use super::bench::{BLOCKS, Bench, Id, Uid, blocks, everything, ok, open};

/// A job of one learner, which has written a block that is part of a plan.
fn writing(settings: &[(&str, &str)]) -> (Bench, Id, (Step, Uid)) {
    let mut bench = Bench::new(settings).on_a_network();
    let slow = bench.join("slow").unwrap();
    let (step, uid) = open(&mut bench, slow);
    assert!(bench.provisional.is_none(), "nothing is whole");
    assert!(bench.comes(slow.0, uid, 0));
    (bench, slow, (step, uid))
}

/// It commits what it has written, which is part of this version.
fn commits(bench: &mut Bench, slow: Id, (step, uid): (Step, Uid), version: u64) {
    let ticket = bench.commit(slow.0, step, uid, blocks([0, 1]), true, 1_000);
    bench.reduce_done(true);
    assert!(ok(bench, ticket));
    assert_eq!(bench.versions_of(&[uid]), [Some(Version(version))]);
}

#[test]
fn a_commit_does_not_wait_for_one_that_writes() {
    for consistency in ["quorum(1)", "quorum(2)", "async", "ssp(9)"] {
        let (mut bench, slow, written) = writing(&[("consistency", consistency)]);
        let quick = ["a", "b"].map(|name| bench.join(name).unwrap());
        for step in 1..=3 {
            let of: Vec<_> = quick.iter().map(|&id| everything(&mut bench, id, true)).collect();
            bench.finish_work();
            assert!(of.iter().all(|(_, ticket)| ok(&bench, *ticket)), "{consistency}");
            let together = consistency == "quorum(2)";
            let versions = if together { [step, step] } else { [2 * step - 1, 2 * step] };
            let uids = [of[0].0, of[1].0];
            assert_eq!(
                bench.versions_of(&uids),
                versions.map(|version| Some(Version(version))),
                "{consistency}"
            );
        }
        assert!(!bench.comes(slow.0, written.1, 1), "another commit would have to drop it again");
        assert_eq!(bench.left, []);
        if consistency == "quorum(2)" {
            bench.set("consistency", "quorum(1)");
        }
        let version = bench.core.version().0 + 1;
        commits(&mut bench, slow, written, version);
    }
}

#[test]
fn the_next_contribution_is_reduced_early_again() {
    let (mut bench, slow, written) = writing(&[("consistency", "quorum(1)")]);
    let quick = bench.join("quick").unwrap();
    everything(&mut bench, quick, true);
    bench.reduce_done(true);
    bench.leave(quick.0);
    commits(&mut bench, slow, written, 2);
    let (step, uid) = open(&mut bench, slow);
    assert!(bench.comes(slow.0, uid, 0));
    commits(&mut bench, slow, (step, uid), 3);
}

#[test]
fn a_commit_that_waits_for_the_version_anyway_drops_no_plan() {
    let mut bench = Bench::new(&[("consistency", "quorum(2)"), ("learners", "2")]).on_a_network();
    let [quick, slow] = ["quick", "slow"].map(|name| bench.join(name).unwrap());
    let (first, _) = everything(&mut bench, quick, true);
    let (step, uid) = open(&mut bench, slow);
    assert!(bench.comes(slow.0, uid, 0));
    let (second, ticket) = everything(&mut bench, quick, true);
    assert!(bench.is_waiting(ticket) && bench.provisional.is_some());
    commits(&mut bench, slow, (step, uid), 1);
    assert_eq!(bench.versions_of(&[first, second]), [Some(Version(1)), None]);
}

#[test]
fn new_weights_do_not_wait_for_one_that_writes() {
    let (mut bench, slow, written) = writing(&[]);
    let ticket = bench.assign(1_000);
    assert!(bench.running.is_some() && bench.provisional.is_none());
    bench.answers(ticket);
    commits(&mut bench, slow, written, 2);
}

#[test]
fn a_hold_does_not_wait_for_one_that_writes() {
    let (mut bench, slow, written) = writing(&[]);
    bench.hold();
    assert!(bench.core.is_held() && bench.provisional.is_none());
    let ticket = bench.commit(slow.0, written.0, written.1, blocks([0, 1]), true, 1_000);
    assert!(bench.running.is_none());
    bench.release();
    bench.answers(ticket);
    assert_eq!(bench.versions_of(&[written.1]), [Some(Version(1))]);
}

#[test]
fn another_consistency_frees_who_waits_for_one_that_writes() {
    let mut bench = Bench::new(&[("learners", "2")]).on_a_network();
    let [quick, slow] = ["quick", "slow"].map(|name| bench.join(name).unwrap());
    let (first, _) = everything(&mut bench, quick, true);
    let written = open(&mut bench, slow);
    assert!(bench.comes(slow.0, written.1, 0));
    bench.set("learning_rate", "0.5");
    assert!(bench.provisional.is_some(), "others count from the next version");
    bench.set("consistency", "quorum(1)");
    bench.makes(1, &[first]);
    commits(&mut bench, slow, written, 2);
}

#[test]
fn settings_that_were_written_meanwhile_count_once_the_plan_has_given_way() {
    let (mut bench, slow, written) = writing(&[("consistency", "async"), ("reducer", "sgd")]);
    bench.set("reducer", "sum");
    assert_eq!(bench.core.params().0, Reducer::Sgd, "a block was computed");
    let quick = bench.join("quick").unwrap();
    everything(&mut bench, quick, true);
    assert_eq!(bench.core.params().0, Reducer::Sum);
    bench.reduce_done(true);
    commits(&mut bench, slow, written, 2);
}

#[test]
fn nobody_waits_for_a_learner_that_is_silent_for_long() {
    let (mut bench, slow, _) = writing(&[("consistency", "async"), ("patience", "1")]);
    let quick = bench.join("quick").unwrap();
    bench.attach(&[slow, quick]);
    let all = blocks(0..BLOCKS);
    for _ in 0..5 {
        let (step, uid) = open(&mut bench, quick);
        let ticket = bench.commit(quick.0, step, uid, all.clone(), true, 1_000);
        bench.tick(400);
        bench.answers(ticket);
    }
    assert!(!bench.left.contains(&(slow.0, LeaveReason::PatienceOver)), "it holds nobody up");
}
