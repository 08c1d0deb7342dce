//! Promises of synchronous jobs, and of behaviour that both kinds of job share.

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::ids::{BlockId, Step, Version};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::sim::{BLOCKS, Sim, TENSORS, blocks, early_job, everything, job, ok, open};

#[test]
fn a_version_needs_all_learners() {
    let (mut sim, ids) = job("2", &["a", "b"]);
    let (a, first) = everything(&mut sim, ids[0], true);
    assert!(ok(&sim, first) && sim.running.is_none(), "safe where it is, but b is missing");
    let (b, second) = everything(&mut sim, ids[1], true);
    assert!(!ok(&sim, second) && sim.running.is_some());
    sim.reduce_done(true);
    assert!(ok(&sim, second));
    assert_eq!(sim.versions_of(&[a, b]), [Some(Version(1)), Some(Version(1))]);
}

#[test]
fn an_assignment_in_mid_step_leaves_the_step_as_it_is() {
    let (mut sim, ids) = job("2", &["a", "b"]);
    let (a, _) = everything(&mut sim, ids[0], true);
    sim.join("c").unwrap();
    let assigned = sim.assign(1_000);
    sim.reduce_done(true);
    assert!(ok(&sim, assigned));
    let (b, _) = everything(&mut sim, ids[1], true);
    sim.reduce_done(true);
    // c was not waited for, and the committed contributions are on top of the assigned weights.
    assert_eq!(sim.versions_of(&[a, b]), [Some(Version(2)); 2]);
}

#[test]
fn in_one_process_a_plan_of_all_gives_way_to_the_last_learner_if_that_has_no_block() {
    let (mut sim, ids) = early_job("2", &["a", "b"]);
    let opened = |sim: &Sim| sim.provisional.as_ref().and_then(|plan| plan.provisional.clone());
    let (step, a) = open(&mut sim, ids[0]);
    assert!(sim.comes(ids[0].0, a, 0));
    assert_eq!(opened(&sim), Some([ids[0].0, ids[1].0].into()));
    sim.commit(ids[0].0, step, a, blocks([0, 1]), true, 1_000);
    assert_eq!(opened(&sim), None);
    let (step, b) = open(&mut sim, ids[1]);
    assert!(sim.comes(ids[1].0, b, 0));
    assert_eq!(opened(&sim), Some([ids[1].0].into()));
    sim.commit(ids[1].0, step, b, blocks([0, 1]), true, 1_000);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[a, b]), [Some(Version(1)); 2]);
}

#[test]
fn in_one_process_a_plan_of_all_goes_on_with_a_learner_that_has_a_block() {
    let (mut sim, ids) = early_job("2", &["a", "b"]);
    let (_, b) = open(&mut sim, ids[1]);
    assert!(sim.comes(ids[1].0, b, 0));
    let (step, a) = open(&mut sim, ids[0]);
    assert!(sim.comes(ids[0].0, a, 1));
    let first = sim.commit(ids[0].0, step, a, blocks([0, 1]), true, 1_000);
    assert!(ok(&sim, first) && sim.provisional.is_some(), "its payload stays where it is");
    sim.commit(ids[1].0, step, b, blocks([0, 1]), true, 1_000);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[a, b]), [Some(Version(1)); 2]);
}

#[test]
fn a_block_comes_early_beside_a_committed_contribution() {
    let (mut sim, ids) = early_job("2", &["a", "b"]);
    let (step, a) = open(&mut sim, ids[0]);
    everything(&mut sim, ids[1], true);
    assert!(sim.comes(ids[0].0, a, 1));
    sim.commit(ids[0].0, step, a, blocks([0, 1]), true, 1_000);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[a]), [Some(Version(1))]);
}

#[test]
fn a_commit_counts_once_however_often_it_is_sent() {
    let (mut sim, ids) = job("2", &["a", "b"]);
    let (a, _) = everything(&mut sim, ids[0], false);
    let all = || blocks(0..BLOCKS);
    let again = sim.commit(ids[0].0, Step(1), a, all(), false, 1_000);
    assert!(sim.is_waiting(again), "being accumulated");
    sim.accumulate_done(true);
    assert!(ok(&sim, again));
    everything(&mut sim, ids[1], true);
    sim.reduce_done(true);
    let late = sim.commit(ids[0].0, Step(1), a, all(), false, 1_000);
    assert!(ok(&sim, late) && sim.running.is_none());
    assert_eq!(sim.core.contributions_taken(), 2);
}

#[test]
fn a_commit_must_not_name_a_block_that_the_model_does_not_have() {
    let (mut sim, ids) = job("1", &["a"]);
    let (step, a) = open(&mut sim, ids[0]);
    let short = sim.commit(ids[0].0, step, a, FixedBitSet::new(), true, 1_000);
    assert!(matches!(sim.replies[&short], Err(ShardError::NotAllowed(_))));
}

#[test]
fn early_blocks_of_a_dropped_contribution_do_not_count_for_the_next_one() {
    let (mut sim, ids) = early_job("1", &["a"]);
    let (_, dropped) = open(&mut sim, ids[0]);
    assert!(sim.comes(ids[0].0, dropped, 0));
    sim.abort(ids[0].0);
    assert!(sim.provisional.is_none());
    let (step, next) = open(&mut sim, ids[0]);
    assert!(sim.comes(ids[0].0, next, 1));
    sim.commit(ids[0].0, step, next, blocks([0, 1]), true, 1_000);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[dropped, next]), [None, Some(Version(1))]);
}

#[test]
fn an_aborted_commit_is_not_taken_later() {
    let (mut sim, ids) = job("2", &["a", "b"]);
    everything(&mut sim, ids[0], true);
    let (ahead, commit) = everything(&mut sim, ids[0], true);
    assert!(sim.is_waiting(commit));
    sim.abort(ids[0].0);
    assert!(sim.replies[&commit].is_err());
    everything(&mut sim, ids[1], true);
    sim.reduce_done(true);
    assert_eq!((sim.core.committed(), sim.versions_of(&[ahead])), (0, vec![None]));
}

#[test]
fn the_next_contribution_may_be_written_before_the_last_is_published() {
    let (mut sim, ids) = job("2", &["a", "b"]);
    everything(&mut sim, ids[0], true);
    let opening = sim.open(ids[0].0).unwrap();
    assert_eq!(opening, Opening { step: Step(2), staging_lent: true });
    let (_, ahead) = everything(&mut sim, ids[0], true);
    assert!(sim.is_waiting(ahead), "its step is not current");
    everything(&mut sim, ids[1], true);
    sim.reduce_done(true);
    assert!(ok(&sim, ahead) && sim.core.committed() == 1);
}

#[test]
fn mapped_memory_is_given_back_before_the_commit_is_answered() {
    let (mut sim, ids) = job("3", &["a", "b", "c"]);
    let (a, first) = everything(&mut sim, ids[0], false);
    let (b, second) = everything(&mut sim, ids[1], false);
    assert!(sim.is_waiting(first) && sim.is_waiting(second));
    sim.accumulate_done(true);
    assert!(ok(&sim, first) && sim.is_waiting(second));
    sim.accumulate_done(true);
    assert!(ok(&sim, second));
    // The last one completes the version: it is read where it is, and answered when that is done.
    let (c, third) = everything(&mut sim, ids[2], false);
    assert!(sim.accumulations.is_empty() && sim.is_waiting(third));
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[a, b, c]), [Some(Version(1)); 3]);
}

#[test]
fn without_memory_for_accumulating_the_contribution_stays_open() {
    let (mut sim, ids) = job("2", &["a", "b"]);
    let (a, ticket) = everything(&mut sim, ids[0], false);
    sim.accumulate_done(false);
    assert!(matches!(sim.replies[&ticket], Err(ShardError::OutOfMemory(_))));
    assert_eq!(sim.core.committed(), 0);
    let all = blocks(0..BLOCKS);
    sim.commit(ids[0].0, Step(1), a, all, false, 1_000);
    sim.accumulate_done(true);
    everything(&mut sim, ids[1], true);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[a]), [Some(Version(1))]);
}

#[test]
fn a_commit_that_is_not_accumulated_in_time_times_out_and_can_be_retried() {
    let (mut sim, ids) = job("3", &["a", "b", "c"]);
    everything(&mut sim, ids[0], false);
    let (b, ticket) = everything(&mut sim, ids[1], false);
    sim.tick(1_000);
    assert!(matches!(sim.replies[&ticket], Err(ShardError::TimedOut(_))));
    assert_eq!(sim.core.committed(), 1, "b's was not taken; a's is being accumulated");
    let all = blocks(0..BLOCKS);
    sim.commit(ids[1].0, Step(1), b, all, false, 1_000);
    sim.accumulate_done(true);
    sim.accumulate_done(true);
    everything(&mut sim, ids[2], false);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[b]), [Some(Version(1))]);
}

#[test]
fn a_commit_that_is_being_reduced_at_its_deadline_counts_and_can_be_asked_for() {
    let (mut sim, ids) = job("1", &["a"]);
    let (a, ticket) = everything(&mut sim, ids[0], false);
    sim.tick(1_000);
    assert!(matches!(sim.replies[&ticket], Err(ShardError::TimedOut(_))));
    let all = || blocks(0..BLOCKS);
    let again = sim.commit(ids[0].0, Step(1), a, all(), false, 1_000);
    assert!(sim.is_waiting(again));
    sim.reduce_done(true);
    assert!(ok(&sim, again));
    assert_eq!(sim.versions_of(&[a]), [Some(Version(1))]);
}

#[test]
fn hyper_parameters_are_frozen_once_a_plan_has_begun() {
    let rate_and_reducer = |plan: &Plan| match &plan.work {
        Work::Reduce { step, .. } => (step.hyper.learning_rate, step.reducer),
        _ => panic!(),
    };
    let (mut sim, ids) = early_job("1", &["a"]);
    let (step, a) = open(&mut sim, ids[0]);
    sim.set("learning_rate", "0.5");
    assert!(sim.comes(ids[0].0, a, 0));
    sim.set("learning_rate", "0.25");
    sim.set("reducer", "adam");
    sim.commit(ids[0].0, step, a, blocks([0]), true, 1_000);
    let plan = sim.running.clone().unwrap();
    assert_eq!(rate_and_reducer(&plan), (0.5, Reducer::Sgd));
    sim.reduce_done(true);
    everything(&mut sim, ids[0], true);
    let plan = sim.running.clone().unwrap();
    assert_eq!(rate_and_reducer(&plan), (0.25, Reducer::Adam));
    let Work::Reduce { step, fresh_state: true, .. } = &plan.work else { panic!() };
    assert_eq!(step.t, 1, "changing the reducer starts its state anew, when it takes effect");
}

#[test]
fn contributions_are_reduced_by_the_reducer_under_which_they_were_accumulated() {
    let (mut sim, ids) = job("2", &["a", "b"]);
    sim.set("reducer", "assign");
    everything(&mut sim, ids[0], false);
    sim.set("reducer", "sum");
    sim.accumulate_done(true);
    everything(&mut sim, ids[1], true);
    let plan = sim.running.clone().unwrap();
    assert!(matches!(&plan.work, Work::Reduce { step, .. } if step.reducer == Reducer::Assign));
}

#[test]
fn changing_the_reducer_and_back_starts_its_state_anew() {
    let (mut sim, ids) = job("1", &["a"]);
    sim.set("reducer", "adam");
    for t in 1..=3 {
        everything(&mut sim, ids[0], true);
        sim.reduce_done(true);
        assert_eq!(sim.core.recipe.steps().runs(), [(TENSORS as u32, t)]);
    }
    sim.set("reducer", "sgd");
    sim.set("reducer", "adam");
    assert_eq!(sim.core.recipe.steps().runs(), [(TENSORS as u32, 0)]);
}

#[test]
fn a_completing_commit_waits_for_a_buffer_and_can_be_retried() {
    let (mut sim, ids) = early_job("1", &["a"]);
    everything(&mut sim, ids[0], true);
    sim.reduce_done(false);
    let (step, uid) = open(&mut sim, ids[0]);
    assert!(!sim.comes(ids[0].0, uid, 0), "there is nowhere to reduce it to");
    let notice = || blocks([0]);
    let ticket = sim.commit(ids[0].0, step, uid, notice(), true, 50);
    sim.tick(50);
    assert!(matches!(sim.replies[&ticket], Err(ShardError::TimedOut(_))));
    let ticket = sim.commit(ids[0].0, step, uid, notice(), true, 50);
    sim.give_buffer();
    sim.reduce_done(true);
    assert!(ok(&sim, ticket));
}

#[test]
fn new_weights_wait_for_a_contribution_of_which_blocks_were_reduced() {
    let (mut sim, ids) = early_job("1", &["a"]);
    sim.set("reducer", "assign");
    let (step, uid) = open(&mut sim, ids[0]);
    assert!(sim.comes(ids[0].0, uid, 0));
    let late = sim.assign(10);
    let ticket = sim.assign(1_000);
    sim.tick(10);
    assert!(matches!(sim.replies[&late], Err(ShardError::TimedOut(_))));
    assert!(sim.is_waiting(ticket) && sim.running.is_none(), "the contribution is still open");
    sim.commit(ids[0].0, step, uid, blocks([0]), true, 1_000);
    sim.reduce_done(true);
    sim.reduce_done(true);
    assert!(ok(&sim, ticket));
    assert_eq!((sim.core.version(), sim.versions_of(&[uid])), (Version(2), vec![Some(Version(1))]));
}

#[test]
fn initial_weights_that_come_too_late_are_refused() {
    let (mut sim, ids) = early_job("1", &["a"]);
    let (step, uid) = open(&mut sim, ids[0]);
    assert!(sim.comes(ids[0].0, uid, 0));
    let ticket = sim.assign(1_000);
    sim.commit(ids[0].0, step, uid, blocks([0]), true, 1_000);
    sim.reduce_done(true);
    assert!(matches!(sim.replies[&ticket], Err(ShardError::NotAllowed(_))), "{:?}", sim.replies);
}

#[test]
fn an_aborted_commit_that_fails_later_leaves_nothing_open() {
    let (mut sim, ids) = job("2", &["a", "b"]);
    let (step, a) = open(&mut sim, ids[0]);
    sim.commit(ids[0].0, step, a, blocks([2]), false, 1_000);
    sim.abort(ids[0].0);
    sim.accumulate_done(false);
    assert_eq!(sim.core.member(ids[0].0, sim.now).unwrap().phase, "idle");
    assert_eq!(open(&mut sim, ids[0]).0, step, "a new contribution to the same step");
}

#[test]
fn mapped_memory_waits_for_the_others_as_long_as_patience_lasts() {
    let mut sim = Sim::patient(&[("learners", "3")], 20);
    let ids: Vec<_> = ["a", "b", "c"].iter().map(|name| sim.join(name).unwrap()).collect();
    let (a, first) = everything(&mut sim, ids[0], false);
    sim.tick(15);
    assert!(sim.accumulations.is_empty() && sim.is_waiting(first));
    assert_eq!(sim.core.next_deadline(), Some(Now::from_millis(20)));
    sim.tick(10);
    assert_eq!(sim.accumulations.len(), 1, "a has waited long enough");
    let (b, second) = everything(&mut sim, ids[1], false);
    sim.accumulate_done(true);
    assert!(ok(&sim, first) && sim.accumulations.is_empty(), "b has not");
    let (c, third) = everything(&mut sim, ids[2], false);
    assert!(sim.accumulations.is_empty() && sim.is_waiting(second) && sim.is_waiting(third));
    sim.reduce_done(true);
    assert!(ok(&sim, second) && ok(&sim, third));
    assert_eq!(sim.versions_of(&[a, b, c]), [Some(Version(1)); 3]);
}

#[test]
fn patience_leaves_time_to_accumulate_before_the_deadline() {
    let mut sim = Sim::patient(&[("learners", "2")], 10_000);
    let ids: Vec<_> = ["a", "b"].iter().map(|name| sim.join(name).unwrap()).collect();
    let (_, ticket) = everything(&mut sim, ids[0], false);
    sim.tick(250);
    sim.accumulate_done(true);
    assert!(ok(&sim, ticket), "its deadline is at 1,000");
}

#[test]
fn a_commit_with_nan_that_is_found_in_the_version_is_taken_back() {
    let mut sim = Sim::patient(&[("learners", "2")], 20);
    let ids: Vec<_> = ["a", "b"].iter().map(|name| sim.join(name).unwrap()).collect();
    let (a, first) = everything(&mut sim, ids[0], false);
    let (b, second) = everything(&mut sim, ids[1], false);
    assert!(sim.reduce_refused());
    assert_eq!(sim.replies[&first], Err(ShardError::NonFinite(BlockId(0))));
    assert!(sim.is_waiting(second) && sim.core.committed() == 1 && sim.core.version() == Version(0));
    // b is safe once it is accumulated; a tries again.
    sim.tick(20);
    sim.accumulate_done(true);
    assert!(ok(&sim, second));
    let all = blocks(0..BLOCKS);
    let third = sim.commit(ids[0].0, Step(1), a, all, false, 1_000);
    sim.reduce_done(true);
    assert!(ok(&sim, third));
    assert_eq!(sim.versions_of(&[a, b]), [Some(Version(1)); 2]);
}

#[test]
fn a_withdrawn_commit_is_open_again_and_one_that_is_taken_stays() {
    let mut sim = Sim::patient(&[("learners", "2")], 20);
    let ids: Vec<_> = ["a", "b"].iter().map(|name| sim.join(name).unwrap()).collect();
    let all = || blocks(0..BLOCKS);
    // Taken, but nothing of it was read.
    let (a, mapped) = everything(&mut sim, ids[0], false);
    sim.withdraw(ids[0].0);
    assert_eq!(sim.replies[&mapped], Err(ShardError::Interrupted));
    assert_eq!(sim.core.committed(), 0);
    // Taken and answered.
    let ticket = sim.commit(ids[0].0, Step(1), a, all(), true, 1_000);
    sim.withdraw(ids[0].0);
    assert!(ok(&sim, ticket) && sim.core.committed() == 1);
    // The commit is not taken: it is the step after the one that waits.
    let (ahead, ticket) = everything(&mut sim, ids[0], true);
    sim.withdraw(ids[0].0);
    assert_eq!(sim.replies[&ticket], Err(ShardError::Interrupted));
    everything(&mut sim, ids[1], true);
    sim.reduce_done(true);
    let ticket = sim.commit(ids[0].0, Step(2), ahead, all(), true, 1_000);
    assert!(ok(&sim, ticket));
    assert_eq!(sim.versions_of(&[a, ahead]), [Some(Version(1)), None]);
}
