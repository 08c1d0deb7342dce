//! Several learners of a synchronous job write at the same time. Their blocks are reduced as soon as all have them.

use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use libmodelio::contributor::{ContributeError, Share};
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::shard_error::ShardError;

use crate::common::{Job, LONG, Learner, decode, encode, floats_layout, initial_weights};

const BLOCKS: usize = 32;

/// A job of these learners, with reducer `sum` unless another one is set.
fn job(learners: usize, more: &[(&str, &str)]) -> (Job, Vec<Learner>) {
    let count = learners.to_string();
    let settings = [&[("reducer", "sum"), ("learners", &*count)], more].concat();
    let job = Job::with(floats_layout(BLOCKS << 14), &settings);
    let learners = (0..learners).map(|i| job.join(&format!("l{i}"))).collect();
    (job, learners)
}

/// Waits until the job has reduced as many blocks as it can without a commit. It takes four at a time.
#[track_caller]
fn wait_for_most_blocks(job: &Job, writes: impl FnOnce()) {
    job.wait_for_sent(BLOCKS - 3, writes);
}

/// What the job's weights have on top of the first ones, if that is one value.
#[track_caller]
fn added(job: &Job) -> f32 {
    let (weights, first) =
        (decode(&job.layout, &job.weights()), decode(&job.layout, &initial_weights(&job.layout)));
    let added = weights[0] - first[0];
    let wrong = weights.iter().zip(&first).position(|(weight, first)| weight - first != added);
    assert_eq!(wrong, None, "{added} is added elsewhere");
    added
}

fn begin_commit(learner: &Learner) -> Receiver<Result<(), ContributeError>> {
    let (sender, receiver) = channel();
    learner.writes.commit(Share::None, LONG, move |result| drop(sender.send(result)));
    receiver
}

#[test]
fn blocks_are_reduced_before_any_learner_commits() {
    for (count, settings) in
        [(2, &[][..]), (3, &[]), (2, &[("deterministic", "true")]), (3, &[("deterministic", "true")])]
    {
        let (job, learners) = job(count, settings);
        let ones = encode(&job.layout, 0, |_| 1.0);
        for step in 1..=4u64 {
            wait_for_most_blocks(&job, || {
                learners[0].write_in_pieces(&ones, 4 * 5_001);
                learners[1..].iter().for_each(|learner| learner.write(0, &ones).unwrap());
            });
            assert_eq!(job.shard.version(), Version(step - 1), "nothing is committed");
            let commits: Vec<_> = learners.iter().map(begin_commit).collect();
            commits.iter().for_each(|commit| commit.recv_timeout(LONG).unwrap().unwrap());
            assert_eq!(job.wait(&learners[0]), Version(step));
            assert_eq!(added(&job), (step as usize * count) as f32);
        }
    }
}

#[test]
fn an_optimizer_takes_one_step_for_blocks_that_come_before_the_commits() {
    let run = |early: bool| {
        let (job, learners) =
            job(2, &[("reducer", "adam"), ("learning_rate", "0.5"), ("deterministic", "true")]);
        for step in 0..5 {
            let scales = [0.25, -1.0];
            let gradients =
                scales.map(|scale| encode(&job.layout, 0, |i| scale * (1 + (i + step) % 7) as f32));
            let write =
                || learners.iter().zip(&gradients).for_each(|(of, bytes)| of.write(0, bytes).unwrap());
            if early {
                wait_for_most_blocks(&job, write);
                let commits: Vec<_> = learners.iter().map(begin_commit).collect();
                commits.iter().for_each(|commit| commit.recv_timeout(LONG).unwrap().unwrap());
            } else {
                std::thread::scope(|scope| {
                    for (of, bytes) in learners.iter().zip(&gradients) {
                        scope.spawn(|| of.commit_mapped(bytes).unwrap());
                    }
                });
            }
            job.wait(&learners[0]);
        }
        job.weights()
    };
    assert!(run(true) == run(false));
}

#[test]
fn a_learner_that_begins_anew_or_leaves_takes_its_blocks_along() {
    let (job, mut learners) = job(3, &[]);
    let [ones, bad] = [1.0, 1000.0].map(|value| encode(&job.layout, 0, |_| value));
    let mut sum = 0.0;
    for step in 1..=12u64 {
        for learner in &learners {
            learner.write(0, &bad[..bad.len() / 2]).unwrap();
            assert!(learner.writes.abort());
        }
        learners[0].write(0, &ones).unwrap();
        learners[1].write(0, &bad).unwrap();
        learners[2].write(0, &ones[..ones.len() / 2]).unwrap();
        assert!(learners[1].writes.abort());
        learners[1].write(0, &ones).unwrap();
        learners[0].commit().unwrap();
        learners[2].write(ones.len() / 2, &ones[ones.len() / 2..]).unwrap();
        let commits: Vec<_> = learners[1..].iter().map(begin_commit).collect();
        commits.iter().for_each(|commit| commit.recv_timeout(LONG).unwrap().unwrap());
        assert_eq!(job.wait(&learners[0]), Version(step));
        sum += 3.0;
        assert_eq!(added(&job), sum);
    }
    // The others wait for the one that leaves in mid-write.
    learners.iter().for_each(|learner| learner.write(0, &ones).unwrap());
    let gone = learners.pop().unwrap();
    let commits: Vec<_> = learners.iter().map(begin_commit).collect();
    job.leave(&gone, LeaveReason::Asked);
    commits.iter().for_each(|commit| commit.recv_timeout(LONG).unwrap().unwrap());
    job.wait(&learners[0]);
    assert_eq!(added(&job), sum + 2.0);
}

#[test]
fn nan_is_refused_to_its_learner_alone_and_counts_nowhere() {
    let (job, learners) = job(2, &[]);
    let ones = encode(&job.layout, 0, |_| 1.0);
    let poisoned = encode(&job.layout, 0, |i| if i == 40_000 { f32::NAN } else { 1000.0 });
    for step in 1..=3u64 {
        learners[0].write(0, &ones).unwrap();
        let refused = learners[1].write(0, &poisoned);
        assert!(matches!(refused, Err(ContributeError::Shard(ShardError::NonFinite(_)))), "{refused:?}");
        assert!(learners[1].commit().is_err());
        assert!(learners[1].writes.abort());
        learners[1].contribute(&ones).unwrap();
        learners[0].commit().unwrap();
        assert_eq!(job.wait(&learners[0]), Version(step));
        assert_eq!(added(&job), 2.0 * step as f32);
    }
}

#[test]
fn the_last_learner_to_begin_has_its_blocks_reduced_without_staging() {
    let (job, learners) = job(3, &[]);
    let ones = encode(&job.layout, 0, |_| 1.0);
    let until = Instant::now() + LONG;
    let (mut step, mut steps) = (0, 0);
    while steps < 3 {
        let before = job.shard.status().blocks_on_arrival;
        step += 1;
        for learner in &learners {
            learner.write(0, &ones[..ones.len() / 2]).unwrap();
            learner.write(ones.len() / 2, &ones[ones.len() / 2..]).unwrap();
            learner.commit().unwrap();
        }
        assert_eq!(job.wait(&learners[0]), Version(step));
        assert_eq!(added(&job), 3.0 * step as f32);
        let on_arrival = job.shard.status().blocks_on_arrival - before;
        assert!(on_arrival <= BLOCKS as u64, "{on_arrival} of one learner");
        // What comes while another thread speaks with the coordinator is staged, and is reduced later.
        steps += usize::from(on_arrival == BLOCKS as u64);
        assert!(Instant::now() < until, "all blocks of {steps} steps were reduced as they came");
    }
}

#[test]
fn a_learner_that_does_not_write_keeps_no_mapped_contribution_waiting() {
    let (job, learners) = job(3, &[("timeout", "60")]);
    let ones = encode(&job.layout, 0, |_| 1.0);
    learners[0].write(0, &ones[..ones.len() / 2]).unwrap();
    let begun = Instant::now();
    learners[1].commit_mapped(&ones).unwrap();
    assert!(begun.elapsed() < LONG / 4, "it has waited for {:?}", begun.elapsed());
    learners[0].write(ones.len() / 2, &ones[ones.len() / 2..]).unwrap();
    learners[0].commit().unwrap();
    learners[2].contribute(&ones).unwrap();
    job.wait(&learners[1]);
    assert_eq!(added(&job), 3.0);
}

#[test]
fn final_bytes_of_mappings_are_reduced_before_fsync() {
    for count in [1, 2] {
        let (job, learners) = job(count, &[]);
        let (size, ones) = (job.layout.size(), encode(&job.layout, 0, |_| 1.0));
        for step in 1..=4u64 {
            wait_for_most_blocks(&job, || {
                for learner in &learners {
                    // SAFETY: the shard reads the mapping as memory that its program may change.
                    unsafe { learner.writes.mapped().memory().write(0, &ones) };
                    for at in (0..size).step_by(1 << 15) {
                        learner.writes.declare_final(at, 1 << 15, true).unwrap();
                    }
                }
            });
            assert_eq!(job.shard.version(), Version(step - 1), "nothing is committed");
            std::thread::scope(|scope| {
                learners.iter().for_each(|learner| _ = scope.spawn(|| learner.commit_mapped(&ones).unwrap()));
            });
            assert_eq!(job.wait(&learners[0]), Version(step));
            assert_eq!(added(&job), (step as usize * count) as f32);
        }
    }
}

#[test]
fn final_bytes_that_are_forgotten_or_hold_nan_count_nowhere() {
    let (job, learners) = job(2, &[]);
    let (size, ones) = (job.layout.size(), encode(&job.layout, 0, |_| 1.0));
    for step in 1..=4u64 {
        let [maps, writes] = &learners[..] else { panic!("two learners") };
        writes.write(0, &ones).unwrap();
        for bad in [1000.0, f32::NAN] {
            let bytes = encode(&job.layout, 0, |i| if i == 70_000 { bad } else { 1000.0 });
            // SAFETY: as above.
            unsafe { maps.writes.mapped().memory().write(0, &bytes) };
            maps.writes.declare_final(0, size, true).unwrap();
            std::thread::sleep(Duration::from_millis(10));
            if bad.is_nan() {
                let refused = maps.commit_mapped(&bytes);
                assert!(
                    matches!(refused, Err(ContributeError::Shard(ShardError::NonFinite(_)))),
                    "{refused:?}"
                );
            } else {
                maps.writes.forget_final();
            }
        }
        let committed = begin_commit(writes);
        maps.writes.declare_final(0, 0, true).unwrap();
        maps.commit_mapped(&ones).unwrap();
        committed.recv_timeout(LONG).unwrap().unwrap();
        assert_eq!(job.wait(maps), Version(step));
        assert_eq!(added(&job), 2.0 * step as f32);
    }
}

#[test]
fn blocks_of_contributions_that_were_dropped_leave_no_trace() {
    let optimizer = |name| [("reducer", name), ("learning_rate", "0.5")];
    for settings in [&[("reducer", "sum")][..], &optimizer("adam"), &optimizer("momentum")] {
        let run = |drops: bool| {
            let (job, learners) = job(2, settings);
            let good = encode(&job.layout, 0, |i| 1.0 + (i % 5) as f32);
            let bad = encode(&job.layout, 0, |_| 1000.0);
            for step in 1..=8u64 {
                if drops && step % 2 == 1 {
                    wait_for_most_blocks(&job, || learners.iter().for_each(|of| of.write(0, &bad).unwrap()));
                    learners.iter().for_each(|of| assert!(of.writes.abort()));
                }
                // The other half of the blocks has no contribution.
                let half = good.len() / 2;
                let at = if step % 4 < 2 { 0 } else { half };
                learners.iter().for_each(|of| of.write(at, &good[at..at + half]).unwrap());
                let commits: Vec<_> = learners.iter().map(begin_commit).collect();
                commits.iter().for_each(|commit| commit.recv_timeout(LONG).unwrap().unwrap());
                assert_eq!(job.wait(&learners[0]), Version(step));
            }
            job.weights()
        };
        assert!(run(true) == run(false), "{settings:?}");
    }
}
