//! Failures leave nothing behind.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use fixedbitset::FixedBitSet;
use libmodelio::client::CommitNotice;
use libmodelio::client::wait_for;
use libmodelio::contributor::{ContributeError, Share};
use libmodelio::vocabulary::block_slot::{BlockSlot, Placement};
use libmodelio::vocabulary::ids::{BlockId, Step, Version};
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::vocabulary::shard_error::ShardError;

use crate::common::{BLOCK, Job, LONG, Reference, decode, encode, floats_layout, gradient};

const SHORT: Duration = Duration::from_millis(60);

fn is_nonfinite(result: Result<(), ContributeError>) -> bool {
    matches!(result, Err(ContributeError::Shard(ShardError::NonFinite(_))))
}

fn is_timeout<T: std::fmt::Debug>(result: Result<T, ContributeError>) -> bool {
    matches!(result, Err(ContributeError::Shard(ShardError::TimedOut(_))))
}

/// A gradient with one bad element in the second block.
fn poisoned(job: &Job) -> Vec<u8> {
    encode(&job.layout, 0, |i| if i == 20_000 { f32::NAN } else { 0.5 })
}

#[test]
fn nan_is_refused_on_every_way_in_and_leaves_the_learner_usable() {
    for others in [false, true] {
        // Alone, blocks are reduced on arrival; with another learner missing they are deferred or accumulated.
        let job = Job::new(&[("reducer", "adam"), ("learners", if others { "2" } else { "1" })]);
        let learner = job.join("a");
        let other = others.then(|| job.join("b"));
        let mut reference = Reference::new(&job.layout);
        let (bad, good) = (poisoned(&job), gradient(&job.layout, 4));
        let bad_at = 808 + 4 * 20_000;
        for way in 0..4 {
            match way {
                0 => {
                    assert!(is_nonfinite(learner.write(0, &bad)));
                    assert!(
                        is_nonfinite(learner.write(0, &good)),
                        "the contribution has failed until it is dropped"
                    );
                    assert!(is_nonfinite(learner.commit()));
                }
                1 => {
                    // In pieces: the block is looked at when it is complete.
                    let (start, end) = (BLOCK as usize, 2 * BLOCK as usize);
                    learner.write(start, &bad[start..bad_at]).unwrap();
                    assert!(is_nonfinite(learner.write(bad_at, &bad[bad_at..end])));
                    assert!(is_nonfinite(learner.commit()));
                }
                2 => {
                    // In part: it is looked at when the contribution ends.
                    learner.write(0, &good[..BLOCK as usize]).unwrap();
                    learner.write(bad_at, &bad[bad_at..bad_at + 4]).unwrap();
                    assert!(is_nonfinite(learner.commit()));
                    assert!(is_nonfinite(learner.commit()), "it is still open");
                }
                _ => assert!(is_nonfinite(learner.commit_mapped(&bad))),
            }
            learner.writes.abort();
            assert!(!learner.writes.is_open());
            learner.contribute(&good).unwrap();
            let mut contributions = vec![decode(&job.layout, &good)];
            if let Some(other) = &other {
                other.contribute(&good).unwrap();
                contributions.push(decode(&job.layout, &good));
            }
            job.wait(&learner);
            reference.step(Reducer::Adam, &job.shard.controls().hyper, &contributions);
            reference.check(&job.layout, &job.weights(), &format!("others: {others}, way {way}"));
        }
    }
}

#[test]
fn nan_in_a_mapping_is_found_wherever_it_is_read_first() {
    // The first is stored in the accumulator, the second added to it, the last read while the version is made.
    for bad_one in 0..3 {
        let job = Job::new(&[("reducer", "adam"), ("learners", "3")]);
        let learners = ["a", "b", "c"].map(|name| job.join(name));
        let mut reference = Reference::new(&job.layout);
        for round in 0..3 {
            let mut contributions = Vec::new();
            for (i, learner) in learners.iter().enumerate() {
                if i == bad_one {
                    assert!(is_nonfinite(learner.commit_mapped(&poisoned(&job))), "{bad_one}");
                    assert_eq!(job.shard.version(), Version(round));
                    assert_eq!(job.shard.status().committed, i, "the others' stay");
                }
                let good = gradient(&job.layout, 4 + i);
                learner.commit_mapped(&good).unwrap();
                contributions.push(decode(&job.layout, &good));
            }
            assert_eq!(job.wait(&learners[0]), Version(round + 1));
            reference.step(Reducer::Adam, &job.shard.controls().hyper, &contributions);
            reference.check(&job.layout, &job.weights(), &format!("bad: {bad_one}, round {round}"));
        }
    }
}

#[test]
fn nan_in_one_of_two_mappings_at_once_fails_that_one() {
    // Large enough that the first waits a moment for the second instead of being accumulated.
    let job = Job::with(floats_layout(4 << 20), &[("reducer", "sum"), ("learners", "2")]);
    let (a, b) = (job.join("a"), job.join("b"));
    let before = decode(&job.layout, &job.weights());
    let good = encode(&job.layout, 0, |_| 1.0);
    let bad = encode(&job.layout, 0, |i| if i == 3 << 20 { f32::NAN } else { 1.0 });
    for turn in 1..4 {
        std::thread::scope(|scope| {
            let first = scope.spawn(|| a.commit_mapped(&good));
            assert!(is_nonfinite(b.commit_mapped(&bad)));
            b.commit_mapped(&good).unwrap();
            first.join().unwrap().unwrap();
        });
        assert_eq!(job.wait(&a), Version(turn));
        let added = 2.0 * turn as f32;
        let now = decode(&job.layout, &job.weights());
        assert!(now.iter().zip(&before).all(|(now, before)| (now - before - added).abs() < 1e-5));
    }
}

#[test]
fn nan_counts_if_the_settings_accept_it() {
    for learners in ["1", "2"] {
        let job = Job::new(&[("nonfinite", "accept"), ("learners", learners)]);
        let all: Vec<_> = (0..learners.parse().unwrap()).map(|i| job.join(&format!("l{i}"))).collect();
        let bad = poisoned(&job);
        all[0].contribute(&bad).unwrap();
        all.iter().skip(1).for_each(|learner| learner.commit_mapped(&bad).unwrap());
        job.wait(&all[0]);
        assert!(decode(&job.layout, &job.weights())[20_000].is_nan());
    }
}

#[test]
fn the_last_learner_does_not_fail_for_the_nan_of_others() {
    let job =
        Job::with(floats_layout(40_000), &[("reducer", "sum"), ("nonfinite", "accept"), ("learners", "2")]);
    let (a, b) = (job.join("a"), job.join("b"));
    a.contribute(&encode(&job.layout, 0, |_| f32::INFINITY)).unwrap();
    job.set("nonfinite", "reject");
    b.contribute(&encode(&job.layout, 0, |_| 1.0)).unwrap();
    assert_eq!(decode(&job.layout, &job.weights())[0], f32::INFINITY);
}

#[test]
fn dropped_contributions_leave_weights_and_optimizer_alone() {
    for by in ["abort", "leave", "abort and assign"] {
        let job = Job::new(&[("reducer", "adam")]);
        let mut learner = job.join("a");
        let mut reference = Reference::new(&job.layout);
        let (good, other) = (gradient(&job.layout, 4), gradient(&job.layout, 5));
        let contributions = [decode(&job.layout, &good)];
        for step in 0..3 {
            learner.contribute(&good).unwrap();
            reference.step(Reducer::Adam, &job.shard.controls().hyper, &contributions);
            reference.check(&job.layout, &job.weights(), by);
            // It is at stake: some of it is reduced before it is dropped.
            job.wait_for_sent(1, || learner.write(0, &other[..job.size() - 10_000]).unwrap());
            if by == "leave" {
                job.leave(&learner, LeaveReason::Died);
                let late = learner.write(job.size() - 10_000, &other[job.size() - 10_000..]);
                assert!(late.is_ok() || matches!(late, Err(ContributeError::Shard(_))));
                assert_eq!(
                    learner.commit(),
                    Err(ContributeError::Shard(ShardError::UnknownLearner(learner.id)))
                );
                learner = job.join("a");
            } else {
                learner.writes.abort();
            }
            assert!(!learner.writes.is_open(), "step {step}");
        }
    }
}

#[test]
fn a_dropped_block_does_not_come_back_after_new_weights() {
    let job = Job::with(floats_layout(40_000), &[("reducer", "sum")]);
    let learner = job.join("a");
    let ones = encode(&job.layout, 0, |_| 1.0);
    learner.write(0, &ones[..BLOCK as usize]).unwrap();
    learner.writes.abort();
    let buffer = job.shard.allocate().unwrap();
    job.assign(buffer, &[]).unwrap();
    let before = job.weights();
    // This version does not touch the first block, and is made in the buffer of the dropped one.
    learner.write(BLOCK as usize, &ones[BLOCK as usize..]).unwrap();
    learner.commit().unwrap();
    assert!(job.weights()[..BLOCK as usize] == before[..BLOCK as usize]);
}

#[test]
fn a_commit_without_a_buffer_times_out_and_goes_through_when_one_is_free() {
    let job = Job::with(floats_layout(40_000), &[("retain", "0"), ("max_versions", "3"), ("reducer", "sum")]);
    let learner = job.join("a");
    let ones = encode(&job.layout, 0, |_| 1.0);
    let mut pinned = Vec::new();
    for _ in 0..5 {
        pinned.push((job.pin_newest(), job.weights()));
        learner.contribute(&ones).unwrap();
    }
    learner.write(0, &ones).unwrap();
    assert!(is_timeout(learner.commit_within(SHORT)), "{:?}", job.shard.status());
    assert_eq!(job.shard.version(), Version(5));
    assert!(job.shard.allocate().is_err());
    let writes = Arc::clone(&learner.writes);
    let (sender, receiver) = mpsc::channel();
    writes.commit(Share::None, LONG, move |result| sender.send(result).unwrap());
    assert!(receiver.recv_timeout(SHORT).is_err());
    for (version, bytes) in &pinned {
        assert!(job.weights_of(*version) == *bytes);
    }
    job.shard.unpin(pinned[0].0, 1);
    receiver.recv_timeout(LONG).unwrap().unwrap();
    assert_eq!(job.shard.version(), Version(6));
    assert!(job.weights_of(pinned[1].0) == pinned[1].1);
}

#[test]
fn a_buffer_for_new_weights_counts_until_it_is_dropped() {
    let job = Job::with(floats_layout(40_000), &[("retain", "0"), ("max_versions", "3"), ("reducer", "sum")]);
    let learner = job.join("a");
    let ones = encode(&job.layout, 0, |_| 1.0);
    let buffers: Vec<_> = (0..4).map(|_| job.shard.allocate().unwrap()).collect();
    assert!(job.shard.allocate().is_err());
    let first = job.pin_newest();
    learner.contribute(&ones).unwrap();
    learner.write(0, &ones).unwrap();
    assert!(is_timeout(learner.commit_within(SHORT)));
    assert_eq!(job.shard.status().buffers.0, 6);
    drop(buffers);
    learner.commit().unwrap();
    job.shard.unpin(first, 1);
}

#[test]
fn waiting_ends_at_the_deadline() {
    let job = Job::new(&[("learners", "2")]);
    let (a, b) = (job.join("a"), job.join("b"));
    let data = gradient(&job.layout, 1);
    a.contribute(&data).unwrap();
    let started = std::time::Instant::now();
    let (sender, receiver) = mpsc::channel();
    job.shard.await_step(a.id, SHORT, Box::new(move |result| sender.send(result).unwrap()));
    assert!(matches!(receiver.recv_timeout(LONG).unwrap(), Err(ShardError::TimedOut(_))));
    assert!(started.elapsed() >= SHORT);
    // Written ahead, the next contribution waits for its step, stays open, and counts once.
    a.write(0, &data).unwrap();
    assert!(is_timeout(a.commit_within(SHORT)));
    assert!(is_timeout(a.commit_within(SHORT)));
    b.contribute(&data).unwrap();
    a.commit().unwrap();
    b.contribute(&data).unwrap();
    assert_eq!((job.wait(&a), job.shard.status().contributions), (Version(2), 4));
}

#[test]
fn shutting_down_answers_everybody() {
    let job = Job::new(&[("learners", "2")]);
    let (a, _b) = (job.join("a"), job.join("b"));
    let data = gradient(&job.layout, 1);
    a.contribute(&data).unwrap();
    a.write(0, &data).unwrap();
    let (sender, receiver) = mpsc::channel();
    let of_commit = sender.clone();
    a.writes.commit(Share::None, LONG, move |result| of_commit.send(result.is_err()).unwrap());
    job.shard.await_step(a.id, LONG, Box::new(move |result| sender.send(result.is_err()).unwrap()));
    job.shard.shut_down();
    assert!(receiver.recv().unwrap() && receiver.recv().unwrap());
    let refused = Err(ContributeError::Shard(ShardError::Unreachable));
    assert_eq!(a.commit(), refused);
    a.writes.abort();
    assert_eq!(a.write(0, &data), refused);
    assert_eq!(job.weights().len(), job.size(), "what is published can be read on");
}

#[test]
fn nonsense_is_refused_and_changes_nothing() {
    let job = Job::new(&[]);
    let learner = job.join("a");
    let data = gradient(&job.layout, 1);
    let slot = |block| BlockSlot {
        learner: learner.id,
        incarnation: learner.incarnation,
        step: Step(1),
        block: BlockId(block),
    };
    let write = |bytes: &[u8], block| job.shard.write(bytes, slot(block), None);
    let block = &data[..BLOCK as usize];
    assert!(matches!(write(block, 0), Err(ShardError::StepOutOfOrder { .. })), "not opened");
    for (bytes, at) in [(&block[1..], 0), (block, 99), (&[][..], 99), (block, u32::MAX)] {
        assert!(matches!(write(bytes, at), Err(ShardError::BadBlock { .. })), "{at}");
    }
    wait_for(LONG, |done| job.shard.open(learner.id, LONG, done)).unwrap();
    assert_eq!(write(block, 0), Ok(Placement::Reduced));
    assert_eq!(write(block, 0), Ok(Placement::Duplicate));
    let set = FixedBitSet::with_capacity;
    for (sent, unchecked) in [(set(1), set(1)), (set(900), set(900)), (set(4), set(900))] {
        let notice = CommitNotice {
            deferred: sent.clone(),
            sent,
            unchecked,
            tensors: set(job.layout.tensors().len()),
            partly: Some(Default::default()),
            contents: Default::default(),
            weight: Default::default(),
            staging: learner.writes.mapped().clone(),
            lendable: true,
        };
        let commit = |done| job.shard.commit(learner.id, Step(1), notice, LONG, done);
        assert!(wait_for(LONG, commit).is_err());
    }
    wait_for(LONG, |done| job.shard.abort(learner.id, LONG, done)).unwrap();
    let buffer = job.shard.allocate().unwrap();
    let size = job.layout.size();
    for written in [vec![0..1, 2..size + 1], vec![5..9, 3..4], vec![std::ops::Range { start: 9, end: 5 }]] {
        let refused = job.assign(buffer.clone(), &written);
        assert_eq!(refused.unwrap_err(), ShardError::OutOfRange);
    }
    let foreign = learner.writes.mapped().clone();
    assert!(job.assign(foreign, &[]).is_err());
    job.set("reducer", "assign");
    job.assign(buffer.clone(), &[]).unwrap();
    let twice = job.assign(buffer, &[]);
    assert!(matches!(twice, Err(ShardError::NotAllowed(_))), "it is a version now: {twice:?}");
    assert_eq!(job.shard.version(), Version(1));
    assert!(job.shard.read(size - 1, &mut [0; 2]).is_err() && job.shard.read(u64::MAX, &mut [0; 2]).is_err());
}
