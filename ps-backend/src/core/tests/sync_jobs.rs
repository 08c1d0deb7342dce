//! Promises of synchronous jobs, and of behaviour that both kinds of job share.

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::ids::{BlockId, Step, Version};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::bench::{
    BLOCKS, Bench, TENSORS, blocks, completes, early_job, everything, job, ok, open, patient,
};

#[test]
fn a_version_needs_all_learners() {
    let (mut bench, ids) = job("2", &["a", "b"]);
    let (a, first) = everything(&mut bench, ids[0], true);
    assert!(ok(&bench, first) && bench.running.is_none(), "safe where it is, but b is missing");
    let (b, second) = everything(&mut bench, ids[1], true);
    assert!(!ok(&bench, second) && bench.running.is_some());
    bench.answers(second);
    assert_eq!(bench.versions_of(&[a, b]), [Some(Version(1)), Some(Version(1))]);
}

#[test]
fn an_assignment_in_mid_step_leaves_the_step_as_it_is() {
    let (mut bench, ids) = job("2", &["a", "b"]);
    let (a, _) = everything(&mut bench, ids[0], true);
    bench.join("c").unwrap();
    let assigned = bench.assign(1_000);
    bench.answers(assigned);
    let (b, _) = completes(&mut bench, ids[1]);
    // c was not waited for, and the committed contributions are on top of the assigned weights.
    assert_eq!(bench.versions_of(&[a, b]), [Some(Version(2)); 2]);
}

#[test]
fn in_one_process_a_plan_of_all_gives_way_to_the_last_learner_if_that_has_no_block() {
    let (mut bench, ids) = early_job("2", &["a", "b"]);
    let opened = |bench: &Bench| bench.provisional.as_ref().and_then(|plan| plan.provisional.clone());
    let (step, a) = open(&mut bench, ids[0]);
    assert!(bench.comes(ids[0].0, a, 0));
    assert_eq!(opened(&bench), Some([ids[0].0, ids[1].0].into()));
    bench.commit(ids[0].0, step, a, blocks([0, 1]), true, 1_000);
    assert_eq!(opened(&bench), None);
    let (step, b) = open(&mut bench, ids[1]);
    assert!(bench.comes(ids[1].0, b, 0));
    assert_eq!(opened(&bench), Some([ids[1].0].into()));
    bench.commit(ids[1].0, step, b, blocks([0, 1]), true, 1_000);
    bench.makes(1, &[a, b]);
}

#[test]
fn in_one_process_a_plan_of_all_goes_on_with_a_learner_that_has_a_block() {
    let (mut bench, ids) = early_job("2", &["a", "b"]);
    let (_, b) = open(&mut bench, ids[1]);
    assert!(bench.comes(ids[1].0, b, 0));
    let (step, a) = open(&mut bench, ids[0]);
    assert!(bench.comes(ids[0].0, a, 1));
    let first = bench.commit(ids[0].0, step, a, blocks([0, 1]), true, 1_000);
    assert!(ok(&bench, first) && bench.provisional.is_some(), "its payload stays where it is");
    bench.commit(ids[1].0, step, b, blocks([0, 1]), true, 1_000);
    bench.makes(1, &[a, b]);
}

#[test]
fn a_block_comes_early_beside_a_committed_contribution() {
    let (mut bench, ids) = early_job("2", &["a", "b"]);
    let (step, a) = open(&mut bench, ids[0]);
    everything(&mut bench, ids[1], true);
    assert!(bench.comes(ids[0].0, a, 1));
    bench.commit(ids[0].0, step, a, blocks([0, 1]), true, 1_000);
    bench.makes(1, &[a]);
}

#[test]
fn a_commit_counts_once_however_often_it_is_sent() {
    let (mut bench, ids) = job("2", &["a", "b"]);
    let (a, _) = everything(&mut bench, ids[0], false);
    let all = || blocks(0..BLOCKS);
    let again = bench.commit(ids[0].0, Step(1), a, all(), false, 1_000);
    assert!(bench.is_waiting(again), "being accumulated");
    bench.accumulate_done(true);
    assert!(ok(&bench, again));
    completes(&mut bench, ids[1]);
    let late = bench.commit(ids[0].0, Step(1), a, all(), false, 1_000);
    assert!(ok(&bench, late) && bench.running.is_none());
    assert_eq!(bench.core.contributions_taken(), 2);
}

#[test]
fn a_commit_must_not_name_a_block_that_the_model_does_not_have() {
    let (mut bench, ids) = job("1", &["a"]);
    let (step, a) = open(&mut bench, ids[0]);
    let short = bench.commit(ids[0].0, step, a, FixedBitSet::new(), true, 1_000);
    assert!(matches!(bench.replies[&short], Err(ShardError::NotAllowed(_))));
}

#[test]
fn early_blocks_of_a_dropped_contribution_do_not_count_for_the_next_one() {
    let (mut bench, ids) = early_job("1", &["a"]);
    let (_, dropped) = open(&mut bench, ids[0]);
    assert!(bench.comes(ids[0].0, dropped, 0));
    bench.abort(ids[0].0);
    assert!(bench.provisional.is_none());
    let (step, next) = open(&mut bench, ids[0]);
    assert!(bench.comes(ids[0].0, next, 1));
    bench.commit(ids[0].0, step, next, blocks([0, 1]), true, 1_000);
    bench.reduce_done(true);
    assert_eq!(bench.versions_of(&[dropped, next]), [None, Some(Version(1))]);
}

#[test]
fn an_aborted_commit_is_not_taken_later() {
    let (mut bench, ids) = job("2", &["a", "b"]);
    everything(&mut bench, ids[0], true);
    let (ahead, commit) = everything(&mut bench, ids[0], true);
    assert!(bench.is_waiting(commit));
    bench.abort(ids[0].0);
    assert!(bench.replies[&commit].is_err());
    completes(&mut bench, ids[1]);
    assert_eq!((bench.core.committed(), bench.versions_of(&[ahead])), (0, vec![None]));
}

#[test]
fn the_next_contribution_may_be_written_before_the_last_is_published() {
    let (mut bench, ids) = job("2", &["a", "b"]);
    everything(&mut bench, ids[0], true);
    let opening = bench.open(ids[0].0).unwrap();
    assert_eq!(opening, Opening { step: Step(2), staging_lent: true });
    let (_, ahead) = everything(&mut bench, ids[0], true);
    assert!(bench.is_waiting(ahead), "its step is not current");
    completes(&mut bench, ids[1]);
    assert!(ok(&bench, ahead) && bench.core.committed() == 1);
}

#[test]
fn mapped_memory_is_given_back_before_the_commit_is_answered() {
    let (mut bench, ids) = job("3", &["a", "b", "c"]);
    let (a, first) = everything(&mut bench, ids[0], false);
    let (b, second) = everything(&mut bench, ids[1], false);
    assert!(bench.is_waiting(first) && bench.is_waiting(second));
    bench.accumulate_done(true);
    assert!(ok(&bench, first) && bench.is_waiting(second));
    bench.accumulate_done(true);
    assert!(ok(&bench, second));
    // The last one completes the version: it is read where it is, and answered when that is done.
    let (c, third) = everything(&mut bench, ids[2], false);
    assert!(bench.accumulations.is_empty() && bench.is_waiting(third));
    bench.makes(1, &[a, b, c]);
}

#[test]
fn without_memory_for_accumulating_the_contribution_stays_open() {
    let (mut bench, ids) = job("2", &["a", "b"]);
    let (a, ticket) = everything(&mut bench, ids[0], false);
    bench.accumulate_done(false);
    assert!(matches!(bench.replies[&ticket], Err(ShardError::OutOfMemory(_))));
    assert_eq!(bench.core.committed(), 0);
    let all = blocks(0..BLOCKS);
    bench.commit(ids[0].0, Step(1), a, all, false, 1_000);
    bench.accumulate_done(true);
    everything(&mut bench, ids[1], true);
    bench.makes(1, &[a]);
}

#[test]
fn a_commit_that_is_not_accumulated_in_time_times_out_and_can_be_retried() {
    let (mut bench, ids) = job("3", &["a", "b", "c"]);
    everything(&mut bench, ids[0], false);
    let (b, ticket) = everything(&mut bench, ids[1], false);
    bench.tick(1_000);
    assert!(matches!(bench.replies[&ticket], Err(ShardError::TimedOut(_))));
    assert_eq!(bench.core.committed(), 1, "b's was not taken; a's is being accumulated");
    let all = blocks(0..BLOCKS);
    bench.commit(ids[1].0, Step(1), b, all, false, 1_000);
    bench.accumulate_done(true);
    bench.accumulate_done(true);
    everything(&mut bench, ids[2], false);
    bench.makes(1, &[b]);
}

#[test]
fn a_commit_that_is_being_reduced_at_its_deadline_counts_and_can_be_asked_for() {
    let (mut bench, ids) = job("1", &["a"]);
    let (a, ticket) = everything(&mut bench, ids[0], false);
    bench.tick(1_000);
    assert!(matches!(bench.replies[&ticket], Err(ShardError::TimedOut(_))));
    let all = || blocks(0..BLOCKS);
    let again = bench.commit(ids[0].0, Step(1), a, all(), false, 1_000);
    assert!(bench.is_waiting(again));
    bench.answers(again);
    assert_eq!(bench.versions_of(&[a]), [Some(Version(1))]);
}

#[test]
fn hyper_parameters_are_frozen_once_a_plan_has_begun() {
    let rate_and_reducer = |plan: &JobPlan| match &plan.work {
        Work::Reduce { step, .. } => (step.hyper.learning_rate, step.reducer),
        _ => panic!(),
    };
    let (mut bench, ids) = early_job("1", &["a"]);
    let (step, a) = open(&mut bench, ids[0]);
    bench.set("learning_rate", "0.5");
    assert!(bench.comes(ids[0].0, a, 0));
    bench.set("learning_rate", "0.25");
    bench.set("reducer", "adam");
    bench.commit(ids[0].0, step, a, blocks([0]), true, 1_000);
    let plan = bench.running.clone().unwrap();
    assert_eq!(rate_and_reducer(&plan), (0.5, Reducer::Sgd));
    bench.reduce_done(true);
    everything(&mut bench, ids[0], true);
    let plan = bench.running.clone().unwrap();
    assert_eq!(rate_and_reducer(&plan), (0.25, Reducer::Adam));
    let Work::Reduce { step, fresh_state: true, .. } = &plan.work else { panic!() };
    assert_eq!(step.t, 1, "changing the reducer starts its state anew, when it takes effect");
}

#[test]
fn contributions_are_reduced_by_the_reducer_under_which_they_were_accumulated() {
    let (mut bench, ids) = job("2", &["a", "b"]);
    bench.set("reducer", "assign");
    everything(&mut bench, ids[0], false);
    bench.set("reducer", "sum");
    bench.accumulate_done(true);
    everything(&mut bench, ids[1], true);
    let plan = bench.running.clone().unwrap();
    assert!(matches!(&plan.work, Work::Reduce { step, .. } if step.reducer == Reducer::Assign));
}

#[test]
fn changing_the_reducer_and_back_starts_its_state_anew() {
    let (mut bench, ids) = job("1", &["a"]);
    bench.set("reducer", "adam");
    for t in 1..=3 {
        completes(&mut bench, ids[0]);
        assert_eq!(bench.core.recipe.steps().runs(), [(TENSORS as u32, t)]);
    }
    bench.set("reducer", "sgd");
    bench.set("reducer", "adam");
    assert_eq!(bench.core.recipe.steps().runs(), [(TENSORS as u32, 0)]);
}

#[test]
fn a_completing_commit_waits_for_a_buffer_and_can_be_retried() {
    let (mut bench, ids) = early_job("1", &["a"]);
    everything(&mut bench, ids[0], true);
    bench.reduce_done(false);
    let (step, uid) = open(&mut bench, ids[0]);
    assert!(!bench.comes(ids[0].0, uid, 0), "there is nowhere to reduce it to");
    let notice = || blocks([0]);
    let ticket = bench.commit(ids[0].0, step, uid, notice(), true, 50);
    bench.tick(50);
    assert!(matches!(bench.replies[&ticket], Err(ShardError::TimedOut(_))));
    let ticket = bench.commit(ids[0].0, step, uid, notice(), true, 50);
    bench.give_buffer();
    bench.answers(ticket);
}

#[test]
fn new_weights_wait_for_a_contribution_of_which_blocks_were_reduced() {
    let (mut bench, ids) = early_job("1", &["a"]);
    bench.set("reducer", "assign");
    let (step, uid) = open(&mut bench, ids[0]);
    assert!(bench.comes(ids[0].0, uid, 0));
    let late = bench.assign(10);
    let ticket = bench.assign(1_000);
    bench.tick(10);
    assert!(matches!(bench.replies[&late], Err(ShardError::TimedOut(_))));
    assert!(bench.is_waiting(ticket) && bench.running.is_none(), "the contribution is still open");
    bench.commit(ids[0].0, step, uid, blocks([0]), true, 1_000);
    bench.reduce_done(true);
    bench.answers(ticket);
    assert_eq!((bench.core.version(), bench.versions_of(&[uid])), (Version(2), vec![Some(Version(1))]));
}

#[test]
fn initial_weights_that_come_too_late_are_refused() {
    let (mut bench, ids) = early_job("1", &["a"]);
    let (step, uid) = open(&mut bench, ids[0]);
    assert!(bench.comes(ids[0].0, uid, 0));
    let ticket = bench.assign(1_000);
    bench.commit(ids[0].0, step, uid, blocks([0]), true, 1_000);
    bench.reduce_done(true);
    assert!(matches!(bench.replies[&ticket], Err(ShardError::NotAllowed(_))), "{:?}", bench.replies);
}

#[test]
fn an_aborted_commit_that_fails_later_leaves_nothing_open() {
    let (mut bench, ids) = job("2", &["a", "b"]);
    let (step, a) = open(&mut bench, ids[0]);
    bench.commit(ids[0].0, step, a, blocks([2]), false, 1_000);
    bench.abort(ids[0].0);
    bench.accumulate_done(false);
    assert_eq!(bench.core.member(ids[0].0, bench.now).unwrap().phase, "idle");
    assert_eq!(open(&mut bench, ids[0]).0, step, "a new contribution to the same step");
}

#[test]
fn mapped_memory_waits_for_the_others_as_long_as_patience_lasts() {
    let (mut bench, ids) = patient(&[], &["a", "b", "c"], 20);
    let (a, first) = everything(&mut bench, ids[0], false);
    bench.tick(15);
    assert!(bench.accumulations.is_empty() && bench.is_waiting(first));
    assert_eq!(bench.core.next_deadline(), Some(Now::from_millis(20)));
    bench.tick(10);
    assert_eq!(bench.accumulations.len(), 1, "a has waited long enough");
    let (b, second) = everything(&mut bench, ids[1], false);
    bench.accumulate_done(true);
    assert!(ok(&bench, first) && bench.accumulations.is_empty(), "b has not");
    let (c, third) = everything(&mut bench, ids[2], false);
    assert!(bench.accumulations.is_empty() && bench.is_waiting(second) && bench.is_waiting(third));
    bench.reduce_done(true);
    assert!(ok(&bench, second) && ok(&bench, third));
    assert_eq!(bench.versions_of(&[a, b, c]), [Some(Version(1)); 3]);
}

#[test]
fn patience_leaves_time_to_accumulate_before_the_deadline() {
    let (mut bench, ids) = patient(&[], &["a", "b"], 10_000);
    let (_, ticket) = everything(&mut bench, ids[0], false);
    bench.tick(250);
    bench.accumulate_done(true);
    assert!(ok(&bench, ticket), "its deadline is at 1,000");
}

#[test]
fn a_commit_with_nan_that_is_found_in_the_version_is_taken_back() {
    let (mut bench, ids) = patient(&[], &["a", "b"], 20);
    let (a, first) = everything(&mut bench, ids[0], false);
    let (b, second) = everything(&mut bench, ids[1], false);
    assert!(bench.reduce_refused());
    assert_eq!(bench.replies[&first], Err(ShardError::NonFinite(BlockId(0))));
    assert!(bench.is_waiting(second) && bench.core.committed() == 1 && bench.core.version() == Version(0));
    // b is safe once it is accumulated; a tries again.
    bench.tick(20);
    bench.accumulate_done(true);
    assert!(ok(&bench, second));
    let all = blocks(0..BLOCKS);
    let third = bench.commit(ids[0].0, Step(1), a, all, false, 1_000);
    bench.answers(third);
    assert_eq!(bench.versions_of(&[a, b]), [Some(Version(1)); 2]);
}

#[test]
fn a_withdrawn_commit_is_open_again_and_one_that_is_taken_stays() {
    let (mut bench, ids) = patient(&[], &["a", "b"], 20);
    let all = || blocks(0..BLOCKS);
    // Taken, but nothing of it was read.
    let (a, mapped) = everything(&mut bench, ids[0], false);
    bench.withdraw(ids[0].0);
    assert_eq!(bench.replies[&mapped], Err(ShardError::Interrupted));
    assert_eq!(bench.core.committed(), 0);
    // Taken and answered.
    let ticket = bench.commit(ids[0].0, Step(1), a, all(), true, 1_000);
    bench.withdraw(ids[0].0);
    assert!(ok(&bench, ticket) && bench.core.committed() == 1);
    // The commit is not taken: it is the step after the one that waits.
    let (ahead, ticket) = everything(&mut bench, ids[0], true);
    bench.withdraw(ids[0].0);
    assert_eq!(bench.replies[&ticket], Err(ShardError::Interrupted));
    completes(&mut bench, ids[1]);
    let ticket = bench.commit(ids[0].0, Step(2), ahead, all(), true, 1_000);
    assert!(ok(&bench, ticket));
    assert_eq!(bench.versions_of(&[a, ahead]), [Some(Version(1)), None]);
}
