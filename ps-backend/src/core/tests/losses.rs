//! Contributions that are accumulated together, and payloads that are lost.

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::phase::JobPhase;
use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::sim::{Id, Sim, Uid, everything, job, ok, uid};

/// A job of these whose core accumulations after `millis`.
fn patient(learners: &str, names: &[&str], millis: u64) -> (Sim, Vec<Id>) {
    let mut sim = Sim::patient(&[("learners", learners)], millis);
    let ids = names.iter().map(|name| sim.join(name).unwrap()).collect();
    (sim, ids)
}

fn accumulating(sim: &Sim) -> Vec<Uid> {
    sim.accumulations.iter().flatten().map(|c| uid(c)).collect()
}

fn reducing(sim: &Sim) -> Vec<Uid> {
    sim.running.iter().flat_map(|plan| &plan.inputs).map(|input| uid(input)).collect()
}

#[test]
fn a_batch_has_all_that_wait_in_the_order_of_learners() {
    let (mut sim, ids) = patient("4", &["a", "b", "c", "d"], 20);
    let (of_c, _) = everything(&mut sim, ids[2], false);
    sim.tick(10);
    let (of_a, _) = everything(&mut sim, ids[0], false);
    assert!(!sim.core.is_accumulating());
    sim.tick(10);
    assert_eq!(accumulating(&sim), [of_a, of_c]);
    assert!(sim.core.is_accumulating());
    // Contributions that come while these are added up wait for the next batch.
    let (of_b, _) = everything(&mut sim, ids[1], false);
    sim.accumulate_done(true);
    sim.tick(20);
    assert_eq!(accumulating(&sim), [of_b]);
    sim.accumulate_done(true);
    everything(&mut sim, ids[3], false);
    sim.finish_work();
    assert_eq!(sim.versions_of(&[of_a, of_b, of_c]), [Some(Version(1)); 3]);
}

#[test]
fn of_a_batch_that_failed_the_rest_is_accumulated_anew() {
    let (mut sim, ids) = patient("4", &["a", "b", "c", "d"], 20);
    let (_, bad) = everything(&mut sim, ids[0], false);
    let (of_b, good) = everything(&mut sim, ids[1], false);
    sim.tick(20);
    sim.accumulate_done(false);
    assert!(matches!(sim.replies[&bad], Err(ShardError::OutOfMemory(_))));
    assert_eq!(accumulating(&sim), [of_b]);
    assert!(!ok(&sim, good));
    sim.accumulate_done(true);
    assert!(ok(&sim, good));
}

#[test]
fn a_lost_payload_voids_the_plan_that_reads_it() {
    let (mut sim, ids) = patient("3", &["a", "b", "c"], 20);
    let commits: Vec<_> = ids.iter().map(|&id| everything(&mut sim, id, false)).collect();
    assert!(sim.running.is_some());
    assert_eq!(sim.core.next_deadline(), Some(Now::from_millis(1_000)));
    sim.lose(&[ids[1].0]);
    // The others' are all there: the same version again, without it.
    assert_eq!(reducing(&sim), [commits[0].0, commits[2].0]);
    assert_eq!(sim.replies[&commits[1].1], Err(ShardError::UnknownLearner(ids[1].0)));
    assert_eq!(sim.left, [(ids[1].0, LeaveReason::Died)]);
    sim.reduce_done(true);
    assert!(ok(&sim, commits[0].1) && ok(&sim, commits[2].1));
    assert_eq!(sim.versions_of(&[commits[1].0]), [None]);
    let view = sim.core.member(ids[0].0, sim.now).unwrap();
    assert_eq!((view.step.0, view.unpublished, view.published_in), (1, false, Version(1)));
}

#[test]
fn a_lost_payload_voids_its_accumulation() {
    let (mut sim, ids) = patient("3", &["a", "b", "c"], 20);
    let (of_a, at_a) = everything(&mut sim, ids[0], false);
    let (of_b, _) = everything(&mut sim, ids[1], false);
    sim.tick(20);
    assert_eq!(accumulating(&sim), [of_a, of_b]);
    sim.lose(&[ids[1].0]);
    assert_eq!(accumulating(&sim), [of_a]);
    sim.accumulate_done(true);
    assert!(ok(&sim, at_a));
    let (of_c, _) = everything(&mut sim, ids[2], false);
    sim.finish_work();
    assert_eq!(sim.versions_of(&[of_a, of_b, of_c]), [Some(Version(1)), None, Some(Version(1))]);
}

#[test]
fn accumulated_or_steady_payload_cannot_be_lost() {
    let (mut sim, ids) = patient("3", &["a", "b", "c"], 0);
    let (accumulated, _) = everything(&mut sim, ids[0], false);
    sim.accumulate_done(true);
    let (lent, at) = everything(&mut sim, ids[1], true);
    assert!(ok(&sim, at));
    sim.lose(&[ids[0].0, ids[1].0]);
    assert_eq!(sim.left.len(), 2);
    let (last, _) = everything(&mut sim, ids[2], false);
    assert_eq!(reducing(&sim), [lent, last]);
    sim.finish_work();
    assert_eq!(sim.versions_of(&[accumulated, lent, last]), [Some(Version(1)); 3]);
}

#[test]
fn a_plan_without_what_is_lost_goes_on() {
    let (mut sim, ids) = patient("2", &["a", "b"], 0);
    let (accumulated, _) = everything(&mut sim, ids[0], false);
    sim.accumulate_done(true);
    let (last, _) = everything(&mut sim, ids[1], false);
    sim.lose(&[ids[0].0]);
    assert_eq!(reducing(&sim), [last]);
    sim.finish_work();
    assert_eq!(sim.versions_of(&[accumulated, last]), [Some(Version(1)); 2]);
}

#[test]
fn a_job_forms_again_after_the_last_learners_lose_their_payload() {
    let (mut sim, ids) = patient("2", &["a", "b"], 0);
    everything(&mut sim, ids[0], false);
    everything(&mut sim, ids[1], false);
    sim.leave(ids[0].0);
    sim.leave(ids[1].0);
    sim.lose(&[ids[0].0, ids[1].0]);
    assert_eq!((sim.core.state(), sim.core.committed()), (JobPhase::Forming, 0));
    assert!(!sim.core.making.is_under_way() && !sim.core.is_accumulating());
    let ids: Vec<_> = ["a", "b"].map(|name| sim.join(name).unwrap()).into();
    let uids: Vec<_> = ids.iter().map(|&id| everything(&mut sim, id, false).0).collect();
    sim.finish_work();
    assert_eq!(sim.versions_of(&uids), [Some(Version(1)); 2]);
}

#[test]
fn an_assignment_that_failed_leaves_the_version() {
    let (mut sim, _) = job("1", &["a"]);
    let ticket = sim.assign(1_000);
    assert!(sim.core.making.is_under_way());
    sim.assign_failed();
    assert!(matches!(sim.replies[&ticket], Err(ShardError::Unreachable)));
    assert_eq!((sim.core.version(), sim.core.making.is_under_way()), (Version(0), false));
}

#[test]
fn a_contribution_can_be_taken_back_though_a_plan_reads_it_but_not_once_it_counts() {
    let (mut sim, ids) = patient("2", &["a", "b"], 20);
    let (back, at_back) = everything(&mut sim, ids[0], false);
    let (other, at_other) = everything(&mut sim, ids[1], false);
    assert_eq!(reducing(&sim), [back, other]);
    sim.recall(ids[0].0);
    sim.abort(ids[0].0);
    assert_eq!(sim.replies[&at_back], Err(ShardError::Interrupted));
    assert_eq!(sim.core.member(ids[0].0, sim.now).unwrap().step.0, 0);
    let (again, at_again) = everything(&mut sim, ids[0], false);
    sim.finish_work();
    assert!(ok(&sim, at_other) && ok(&sim, at_again));
    assert_eq!(sim.versions_of(&[back, other, again]), [None, Some(Version(1)), Some(Version(1))]);
    // What counts, or is answered, stays, and so does the step before one that is written.
    sim.recall(ids[0].0);
    sim.abort(ids[0].0);
    let (ahead, at_ahead) = everything(&mut sim, ids[0], false);
    sim.tick(20);
    sim.accumulate_done(true);
    sim.recall(ids[0].0);
    sim.abort(ids[0].0);
    assert!(ok(&sim, at_ahead));
    assert_eq!(sim.core.member(ids[0].0, sim.now).unwrap().step.0, 2);
    everything(&mut sim, ids[1], false);
    sim.finish_work();
    assert_eq!(sim.versions_of(&[again, ahead]), [Some(Version(1)), Some(Version(2))]);
}
