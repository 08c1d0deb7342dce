//! Contributions that are accumulated together, and payloads that are lost.

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::members::{Attached, LeaveReason, LifeSign};
use libmodelio::vocabulary::phase::JobPhase;
use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::bench::{Bench, Uid, everything, formed, job, ok, patient, uid};

fn accumulating(bench: &Bench) -> Vec<Uid> {
    bench.accumulations.iter().flatten().map(|c| uid(c)).collect()
}

fn reducing(bench: &Bench) -> Vec<Uid> {
    bench.running.iter().flat_map(|plan| &plan.inputs).map(|input| uid(input)).collect()
}

#[test]
fn a_batch_has_all_that_wait_in_the_order_of_learners() {
    let (mut bench, ids) = patient(&[], &["a", "b", "c", "d"], 20);
    let (of_c, _) = everything(&mut bench, ids[2], false);
    bench.tick(10);
    let (of_a, _) = everything(&mut bench, ids[0], false);
    assert!(!bench.core.is_accumulating());
    bench.tick(10);
    assert_eq!(accumulating(&bench), [of_a, of_c]);
    assert!(bench.core.is_accumulating());
    // Contributions that come while these are added up wait for the next batch.
    let (of_b, _) = everything(&mut bench, ids[1], false);
    bench.accumulate_done(true);
    bench.tick(20);
    assert_eq!(accumulating(&bench), [of_b]);
    bench.accumulate_done(true);
    everything(&mut bench, ids[3], false);
    bench.finish_work();
    assert_eq!(bench.versions_of(&[of_a, of_b, of_c]), [Some(Version(1)); 3]);
}

#[test]
fn of_a_batch_that_failed_the_rest_is_accumulated_anew() {
    let (mut bench, ids) = patient(&[], &["a", "b", "c", "d"], 20);
    let (_, bad) = everything(&mut bench, ids[0], false);
    let (of_b, good) = everything(&mut bench, ids[1], false);
    bench.tick(20);
    bench.accumulate_done(false);
    assert!(matches!(bench.replies[&bad], Err(ShardError::OutOfMemory(_))));
    assert_eq!(accumulating(&bench), [of_b]);
    assert!(!ok(&bench, good));
    bench.accumulate_done(true);
    assert!(ok(&bench, good));
}

#[test]
fn a_lost_payload_voids_the_plan_that_reads_it() {
    let (mut bench, ids) = patient(&[], &["a", "b", "c"], 20);
    let commits: Vec<_> = ids.iter().map(|&id| everything(&mut bench, id, false)).collect();
    assert!(bench.running.is_some());
    assert_eq!(bench.core.next_deadline(), Some(Now::from_millis(1_000)));
    bench.lose(&[ids[1].0]);
    // The others' are all there: the same version again, without it.
    assert_eq!(reducing(&bench), [commits[0].0, commits[2].0]);
    assert_eq!(bench.replies[&commits[1].1], Err(ShardError::UnknownLearner(ids[1].0)));
    assert_eq!(bench.left, [(ids[1].0, LeaveReason::Died)]);
    bench.reduce_done(true);
    assert!(ok(&bench, commits[0].1) && ok(&bench, commits[2].1));
    assert_eq!(bench.versions_of(&[commits[1].0]), [None]);
    let view = bench.core.member(ids[0].0, bench.now).unwrap();
    assert_eq!((view.step.0, view.unpublished, view.published_in), (1, false, Version(1)));
}

#[test]
fn a_lost_payload_voids_its_accumulation() {
    let (mut bench, ids) = patient(&[], &["a", "b", "c"], 20);
    let (of_a, at_a) = everything(&mut bench, ids[0], false);
    let (of_b, _) = everything(&mut bench, ids[1], false);
    bench.tick(20);
    assert_eq!(accumulating(&bench), [of_a, of_b]);
    bench.lose(&[ids[1].0]);
    assert_eq!(accumulating(&bench), [of_a]);
    bench.accumulate_done(true);
    assert!(ok(&bench, at_a));
    let (of_c, _) = everything(&mut bench, ids[2], false);
    bench.finish_work();
    assert_eq!(bench.versions_of(&[of_a, of_b, of_c]), [Some(Version(1)), None, Some(Version(1))]);
}

#[test]
fn accumulated_or_steady_payload_cannot_be_lost() {
    let (mut bench, ids) = patient(&[], &["a", "b", "c"], 0);
    let (accumulated, _) = everything(&mut bench, ids[0], false);
    bench.accumulate_done(true);
    let (lent, at) = everything(&mut bench, ids[1], true);
    assert!(ok(&bench, at));
    bench.lose(&[ids[0].0, ids[1].0]);
    assert_eq!(bench.left.len(), 2);
    let (last, _) = everything(&mut bench, ids[2], false);
    assert_eq!(reducing(&bench), [lent, last]);
    bench.finish_work();
    assert_eq!(bench.versions_of(&[accumulated, lent, last]), [Some(Version(1)); 3]);
}

#[test]
fn a_plan_without_what_is_lost_goes_on() {
    let (mut bench, ids) = patient(&[], &["a", "b"], 0);
    let (accumulated, _) = everything(&mut bench, ids[0], false);
    bench.accumulate_done(true);
    let (last, _) = everything(&mut bench, ids[1], false);
    bench.lose(&[ids[0].0]);
    assert_eq!(reducing(&bench), [last]);
    bench.finish_work();
    assert_eq!(bench.versions_of(&[accumulated, last]), [Some(Version(1)); 2]);
}

#[test]
fn a_job_forms_again_after_the_last_learners_lose_their_payload() {
    let (mut bench, ids) = patient(&[], &["a", "b"], 0);
    everything(&mut bench, ids[0], false);
    everything(&mut bench, ids[1], false);
    bench.leave(ids[0].0);
    bench.leave(ids[1].0);
    bench.lose(&[ids[0].0, ids[1].0]);
    assert_eq!((bench.core.state(), bench.core.committed()), (JobPhase::Forming, 0));
    assert!(!bench.core.making.is_under_way() && !bench.core.is_accumulating());
    let ids: Vec<_> = ["a", "b"].map(|name| bench.join(name).unwrap()).into();
    let uids: Vec<_> = ids.iter().map(|&id| everything(&mut bench, id, false).0).collect();
    bench.finish_work();
    assert_eq!(bench.versions_of(&uids), [Some(Version(1)); 2]);
}

#[test]
fn an_assignment_that_failed_leaves_the_version() {
    let (mut bench, _) = job("1", &["a"]);
    let ticket = bench.assign(1_000);
    assert!(bench.core.making.is_under_way());
    bench.assign_failed();
    assert!(matches!(bench.replies[&ticket], Err(ShardError::Unreachable)));
    assert_eq!((bench.core.version(), bench.core.making.is_under_way()), (Version(0), false));
}

#[test]
fn a_contribution_can_be_taken_back_though_a_plan_reads_it_but_not_once_it_counts() {
    let (mut bench, ids) = patient(&[], &["a", "b"], 20);
    let (back, at_back) = everything(&mut bench, ids[0], false);
    let (other, at_other) = everything(&mut bench, ids[1], false);
    assert_eq!(reducing(&bench), [back, other]);
    bench.recall(ids[0].0);
    bench.abort(ids[0].0);
    assert_eq!(bench.replies[&at_back], Err(ShardError::Interrupted));
    assert_eq!(bench.core.member(ids[0].0, bench.now).unwrap().step.0, 0);
    let (again, at_again) = everything(&mut bench, ids[0], false);
    bench.finish_work();
    assert!(ok(&bench, at_other) && ok(&bench, at_again));
    assert_eq!(bench.versions_of(&[back, other, again]), [None, Some(Version(1)), Some(Version(1))]);
    // What counts, or is answered, stays, and so does the step before one that is written.
    bench.recall(ids[0].0);
    bench.abort(ids[0].0);
    let (ahead, at_ahead) = everything(&mut bench, ids[0], false);
    bench.tick(20);
    bench.accumulate_done(true);
    bench.recall(ids[0].0);
    bench.abort(ids[0].0);
    assert!(ok(&bench, at_ahead));
    assert_eq!(bench.core.member(ids[0].0, bench.now).unwrap().step.0, 2);
    everything(&mut bench, ids[1], false);
    bench.finish_work();
    assert_eq!(bench.versions_of(&[again, ahead]), [Some(Version(1)), Some(Version(2))]);
}

#[test]
fn new_weights_prolong_nobodys_patience() {
    for exits in [false, true] {
        let settings = [("reducer", "assign"), ("patience", "4"), ("linger", "4")];
        let (mut bench, ids) = formed(&settings, &["a", "b"]);
        bench.attach(&ids);
        if exits {
            bench.set("patience", "600");
            bench.core.touch(ids[1].0, LifeSign::Process(Attached::Exited), bench.now);
        }
        let (a, _) = everything(&mut bench, ids[0], true);
        for version in 1..4 {
            bench.tick(1_000);
            let ticket = bench.assign(1_000);
            bench.reduce_done(true);
            assert!(ok(&bench, ticket) && bench.left.is_empty());
            assert_eq!(bench.core.version(), Version(version));
        }
        bench.tick(1_000);
        let why = if exits { LeaveReason::Exited } else { LeaveReason::PatienceOver };
        assert_eq!(bench.left, [(ids[1].0, why)]);
        bench.reduce_done(true);
        assert_eq!(bench.versions_of(&[a]), [Some(Version(4))]);
    }
}

#[test]
fn no_version_is_made_without_a_number_for_it() {
    let (mut bench, ids) = formed(&[("learners", "1")], &["a"]);
    bench.call(|core, now, actions| core.set_reserved(Some(Version(2)), now, actions));
    let (first, _) = everything(&mut bench, ids[0], true);
    bench.makes(1, &[first]);
    let (second, commit) = everything(&mut bench, ids[0], true);
    assert!(bench.is_waiting(commit) && bench.running.is_none(), "it waits for a number");
    bench.call(|core, now, actions| core.set_reserved(Some(Version(3)), now, actions));
    bench.makes(2, &[second]);
}

#[test]
fn a_restored_job_goes_on_without_learners_that_do_not_come_back() {
    let mut bench = Bench::new(&[("learners", "3"), ("min_learners", "2")]);
    bench.core.goes_on_at(bench.now + Now::from_secs(5), bench.now + Now::from_secs(9));
    let a = bench.join("a").unwrap();
    bench.tick(9_000);
    assert_eq!(bench.core.state(), JobPhase::Forming, "there are too few learners");
    let b = bench.join("b").unwrap();
    bench.tick(1);
    assert_eq!(bench.core.state(), JobPhase::Running);
    let of = [everything(&mut bench, a, true).0, everything(&mut bench, b, true).0];
    bench.makes(1, &of);
    bench.leave(a.0);
    bench.leave(b.0);
    assert_eq!(bench.core.state(), JobPhase::Forming, "once");
}

#[test]
fn learners_that_are_lost_are_waited_for_longer_only_if_none_comes_back_soon() {
    let restored = |more: &[(&str, &str)], joins_after| {
        let mut bench = Bench::new(&[&[("learners", "2")], more].concat());
        bench.core.goes_on_at(bench.now + Now::from_secs(5), bench.now + Now::from_secs(60));
        bench.tick(joins_after);
        bench.join("a").unwrap();
        let is_running = |bench: &Bench| bench.core.state() == JobPhase::Running;
        assert!(!is_running(&bench));
        bench.tick(5_000 - joins_after.min(5_000));
        let soon = is_running(&bench);
        bench.tick(55_000);
        assert!(is_running(&bench));
        soon
    };
    assert!(restored(&[], 4_000));
    assert!(!restored(&[], 6_000), "programs are started one after the other");
    assert!(!restored(&[("deterministic", "true")], 4_000), "sums would differ");
}
