//! Random rounds of several learners, with all that may happen to a contribution: committed ones count exactly once,
//! and nothing else does.

use std::time::Duration;

use fastrand::Rng;
use libmodelio::vocabulary::block_slot::Placement;
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::shard_error::ShardError;

use crate::site::{BLOCK, BLOCKS, Contribution, LONG, Learner, Message, Way, answer, done, until};

const ROUNDS: u64 = 50;

/// Fills a contribution at random, and returns its contents by block.
fn fill(contribution: &mut Contribution, random: &mut Rng) -> Vec<f32> {
    let mut held = vec![0.0; BLOCKS as usize];
    let mut blocks: Vec<u32> = (0..BLOCKS).collect();
    random.shuffle(&mut blocks);
    // Often all of them.
    blocks.truncate(random.usize(1..=2 * BLOCKS as usize));
    for block in blocks {
        let value = random.u32(1..=8) as f32;
        held[block as usize] = value;
        if random.u8(..3) == 0 {
            contribution.stage_all_of(block, value);
            continue;
        }
        contribution.offer_all_of(block, value);
        if random.bool() {
            let again = contribution.filled(block, 100.0);
            assert_eq!(contribution.offer(block, &again), Ok(Placement::Duplicate));
        }
    }
    held
}

/// Commits, with whatever trouble there is on the way.
fn commit(contribution: &Contribution, random: &mut Rng) {
    let learner = contribution.learner;
    let troubled = match random.u8(..4) {
        0 => {
            let commit = contribution.send(LONG);
            done(learner.end.ask(Message::Withdraw { learner: learner.id }));
            Some(answer(&commit))
        }
        1 => Some(answer(&contribution.send(Duration::from_millis(random.u64(..3))))),
        _ => None,
    };
    match troubled {
        None | Some(Ok(_) | Err(ShardError::Interrupted | ShardError::TimedOut(_))) => {}
        Some(other) => panic!("{other:?}"),
    }
    // It is open still, or was taken.
    for _ in 0..random.u8(1..=2) {
        done(contribution.commit());
    }
}

/// One learner's part of a round: what counts of it. None if it leaves in the middle.
fn take_part(learner: &Learner, random: &mut Rng) -> Option<Vec<f32>> {
    if random.u8(..4) == 0 {
        let mut dropped = learner.open();
        fill(&mut dropped, random);
        if random.u8(..3) == 0 {
            learner.leave(LeaveReason::Asked);
            return None;
        }
        dropped.abort();
    }
    let mut contribution = learner.open();
    let held = fill(&mut contribution, random);
    commit(&contribution, random);
    Some(held)
}

pub fn random_rounds_count_exactly_once(way: &Way) {
    let mut random = Rng::with_seed(0x009a_ddf5);
    let (_site, ends) = way.striped_job(&[("reducer", "sum"), ("learners", "3"), ("retain", "0")]).two_ends();
    let join = |at: usize| ends[at / 2].join(["a", "b", "c"][at]);
    let mut learners = [0, 1, 2].map(join);
    let mut expected = vec![0.0; BLOCKS as usize];
    let (mut version, mut left) = (0, 0);
    for round in 0..ROUNDS {
        let mut order = [0, 1, 2];
        random.shuffle(&mut order);
        let mut gone = Vec::new();
        for at in order {
            match take_part(&learners[at], &mut random) {
                Some(held) => expected.iter_mut().zip(&held).for_each(|(sum, value)| *sum += value),
                None => gone.push(at),
            }
        }
        // If all have left there is no version.
        version += u64::from(gone.len() < order.len());
        for at in order.into_iter().filter(|at| !gone.contains(at)) {
            assert_eq!(learners[at].pull(), version);
        }
        for end in &ends {
            end.sees(version);
            let (shown, weights) = end.weights();
            assert_eq!(shown, Version(version));
            for (block, weights) in weights.chunks(BLOCK / 4).enumerate() {
                let sum = expected[block];
                let other = weights.iter().find(|&&weight| weight != sum);
                assert_eq!(other, None, "instead of {sum} in block {block} after round {round}");
            }
        }
        left += gone.len();
        for at in gone {
            learners[at] = join(at);
        }
    }
    assert!(left > 0 && version + 5 > ROUNDS, "{left} have left, and there are {version} versions");
}

/// The same where each learner goes at its own pace, comes and goes.
pub fn learners_at_once_count_exactly_once(way: &Way) {
    for consistency in ["sync", "async"] {
        let settings = [("reducer", "sum"), ("consistency", consistency), ("retain", "0")];
        let (_site, ends) = way.striped_job(&settings).two_ends();
        let learn = |at: usize| {
            let mut random = Rng::with_seed(at as u64);
            let (mut sum, mut taken) = (vec![0.0; BLOCKS as usize], 0);
            let join = || ends[at / 2].join(["a", "b", "c", "d"][at]);
            let mut learner = join();
            while taken < ROUNDS / 4 {
                let Some(held) = take_part(&learner, &mut random) else {
                    learner = join();
                    continue;
                };
                sum.iter_mut().zip(&held).for_each(|(sum, value)| *sum += value);
                taken += 1;
                if random.bool() {
                    learner.pull();
                }
            }
            learner.leave(LeaveReason::Asked);
            sum
        };
        let sums = std::thread::scope(|scope| {
            let learn = &learn;
            let threads = [0, 1, 2, 3].map(|at| scope.spawn(move || learn(at)));
            threads.map(|thread| thread.join().unwrap())
        });
        for end in &ends {
            until("all of them count", || end.job.status().contributions == 4 * (ROUNDS / 4));
            let is_all = |(block, weights): (usize, &[f32])| {
                let expected: f32 = sums.iter().map(|sum| sum[block]).sum();
                weights.iter().all(|&weight: &f32| weight == expected)
            };
            until("they show", || end.weights().1.chunks(BLOCK / 4).enumerate().all(is_all));
        }
    }
}
