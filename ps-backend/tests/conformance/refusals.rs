//! Refused requests change nothing.

use std::sync::{Arc, Barrier};

use fixedbitset::FixedBitSet;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::client::CommitNotice;
use libmodelio::contributor::ContributeError;
use libmodelio::vocabulary::block_slot::{BlockSlot, Placement};
use libmodelio::vocabulary::ids::{BlockId, Step};
use libmodelio::vocabulary::shard_error::ShardError;

use crate::site::{
    BLOCK, BLOCKS, End, LONG, Learner, Message, Site, Way, answer, begin_commit, done, outcome, write,
};

/// One that waits for nobody, and one that does.
const LEARNERS: [&str; 2] = ["1", "2"];

/// A job of as many learners, which are all of one end.
pub fn one_or_two(way: &Way, learners: &str) -> (Site, Arc<End>, Learner, Option<Learner>) {
    let (site, end, learner) = way.job(&[("reducer", "sum"), ("learners", learners)]).one();
    let other = (learners == "2").then(|| end.join("b"));
    (site, end, learner, other)
}

/// Completes a step in which nothing but `value` counts.
fn completes(learner: &Learner, other: Option<&Learner>, version: u64, before: f32) {
    learner.push(1.0);
    other.iter().for_each(|other| other.push(0.0));
    learner.pulls(version, before + 1.0);
}

pub fn blocks_that_do_not_fit_change_nothing(way: &Way) {
    for learners in LEARNERS {
        let (_site, end, learner, other) = one_or_two(way, learners);
        let full = vec![0; BLOCK];
        let early = learner.slot(Step(1), 0);
        let nine = 9f32.to_le_bytes().repeat(BLOCK / 4);
        let room = end.region("room");
        assert_eq!(
            end.job.write(&full, early, Some(&room)),
            Err(ShardError::StepOutOfOrder { got: Step(1), expected: Step(1) }),
            "not open"
        );
        let contribution = learner.open();
        let room = &contribution.notice.staging;
        for (bytes, block) in [
            (&nine[4..], 0),
            (&nine[..0], 0),
            (&nine, BLOCKS - 1),
            (&nine, BLOCKS),
            (&nine[..0], BLOCKS),
            (&nine, 1 << 20),
            (&nine, u32::MAX),
        ] {
            let refused = end.job.write(bytes, learner.slot(contribution.step, block), Some(room));
            let expected = ShardError::BadBlock { block: BlockId(block), bytes: bytes.len() };
            assert_eq!(refused, Err(expected));
        }
        let ahead = BlockSlot { step: Step(2), ..learner.slot(contribution.step, 0) };
        assert_eq!(
            end.job.write(&nine, ahead, Some(room)),
            Err(ShardError::StepOutOfOrder { got: Step(2), expected: Step(1) })
        );
        let short = end.job.register(Arc::new(Mapping::memfd("short", BLOCK).unwrap()));
        let second = learner.slot(contribution.step, 1);
        assert_eq!(end.job.write(&nine, second, Some(&short)), Err(ShardError::OutOfRange));
        completes(&learner, other.as_ref(), 1, 0.0);
    }
}

pub fn commits_that_make_no_sense_change_nothing(way: &Way) {
    for learners in LEARNERS {
        let (_site, end, learner, other) = one_or_two(way, learners);
        let mut contribution = learner.open();
        (0..BLOCKS).for_each(|block| contribution.stage_all_of(block, 1.0));
        let refused = |change: &dyn Fn(&mut CommitNotice)| {
            let mut notice = contribution.notice.clone();
            change(&mut notice);
            let message = Message::Commit { learner: learner.id, step: contribution.step, notice };
            assert_eq!(answer(&end.send(message, LONG)).unwrap_err(), ShardError::OutOfRange);
        };
        let all_of = |blocks| {
            let mut set = FixedBitSet::with_capacity(blocks);
            set.insert_range(..);
            set
        };
        for blocks in [1, 900] {
            refused(&|notice| {
                (notice.sent, notice.deferred, notice.unchecked) =
                    (all_of(blocks), all_of(blocks), all_of(blocks));
            });
            refused(&|notice| notice.sent = all_of(blocks));
            refused(&|notice| notice.deferred = all_of(blocks));
            refused(&|notice| notice.unchecked = all_of(blocks));
        }
        for tensors in [0, 2, 900] {
            refused(&|notice| notice.tensors = all_of(tensors));
        }
        refused(&|notice| notice.sent.remove(1));
        refused(&|notice| notice.deferred.remove(1));
        let short = end.job.register(Arc::new(Mapping::memfd("short", BLOCK).unwrap()));
        refused(&|notice| notice.staging = short.clone());
        for step in [0, 2, 7] {
            let message = Message::Commit {
                learner: learner.id,
                step: Step(step),
                notice: contribution.notice.clone(),
            };
            assert_eq!(
                answer(&end.send(message, LONG)).unwrap_err(),
                ShardError::StepOutOfOrder { got: Step(step), expected: Step(1) }
            );
        }
        done(contribution.commit());
        other.iter().for_each(|other| other.push(0.0));
        learner.pulls(1, 1.0);
        completes(&learner, other.as_ref(), 2, 1.0);
    }
}

/// A block of ones with one number that is none.
fn bad(value: f32) -> Vec<u8> {
    let mut bytes = 1f32.to_le_bytes().repeat(BLOCK / 4);
    bytes[4 * 1000..][..4].copy_from_slice(&value.to_le_bytes());
    bytes
}

pub fn nan_is_refused_when_offered(way: &Way) {
    for learners in LEARNERS {
        let (_site, _, learner, other) = one_or_two(way, learners);
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut contribution = learner.open();
            contribution.offer_all_of(0, 5.0);
            assert_eq!(contribution.offer(1, &bad(value)), Err(ShardError::NonFinite(BlockId(1))));
            contribution.abort();
        }
        // It was not taken, so it may be offered again.
        let mut contribution = learner.open();
        assert_eq!(contribution.offer(1, &bad(f32::NAN)), Err(ShardError::NonFinite(BlockId(1))));
        (0..BLOCKS).for_each(|block| contribution.offer_all_of(block, 2.0));
        done(contribution.commit());
        other.iter().for_each(|other| other.push(0.0));
        learner.pulls(1, 2.0);
        completes(&learner, other.as_ref(), 2, 2.0);
    }
}

fn refused_at_commit(end: &Arc<End>, learner: &Learner, lendable: bool) {
    let mut contribution = learner.open();
    contribution.notice.lendable = lendable;
    (0..BLOCKS).for_each(|block| contribution.stage_all_of(block, 5.0));
    contribution.stage(2, &bad(f32::NAN));
    let refused = contribution.commit();
    assert_eq!(refused.unwrap_err(), ShardError::NonFinite(BlockId(2)));
    contribution.abort();
    assert!(end.has(learner.id));
}

pub fn nan_is_refused_at_the_commit(way: &Way) {
    for learners in LEARNERS {
        let (_site, end, learner, other) = one_or_two(way, learners);
        for (version, lendable) in [(1, true), (2, false)] {
            // Before and after the other's is in: which stays.
            refused_at_commit(&end, &learner, lendable);
            if let Some(other) = &other {
                other.push(0.0);
                refused_at_commit(&end, &learner, lendable);
            }
            learner.makes(1.0, version, version as f32);
        }
    }
}

/// The block with the NaN is one of which the other learner of the client has nothing.
pub fn nan_is_refused_to_the_learner_who_brings_it(way: &Way) {
    for who_joins_first in [0, 1] {
        let (_site, end) = way.job(&[("reducer", "sum"), ("learners", "2")]).one_end();
        let joined = ["a", "b"].map(|name| end.join(name));
        let (other, learner) = (&joined[who_joins_first], &joined[1 - who_joins_first]);
        let mut half = other.open();
        half.offer_all_of(0, 5.0);
        let answer = half.send(LONG);
        let mut contribution = learner.open();
        contribution.notice.lendable = false;
        contribution.stage(2, &bad(f32::NAN));
        assert_eq!(contribution.commit().unwrap_err(), ShardError::NonFinite(BlockId(2)));
        contribution.abort();
        learner.push(1.0);
        done(self::answer(&answer));
        assert_eq!(learner.pull(), 1);
        let (_, weights) = end.weights();
        assert_eq!((weights[0], weights[2 * BLOCK / 4]), (6.0, 1.0), "the other's stays");
    }
}

/// Either the block comes after the commit, and is no part of it, or it makes it fail.
pub fn a_refused_block_fails_the_commit_whichever_thread_wrote_it(way: &Way) {
    let site = way.job(&[("reducer", "sum")]);
    let learner = site.end().join("a");
    let contributor = &learner.contributor();
    let good = 1f32.to_le_bytes().repeat(BLOCK / 4);
    for _ in 0..30 {
        let barrier = Barrier::new(3);
        std::thread::scope(|scope| {
            write(contributor, 2 * BLOCK, &good[..16]).unwrap();
            for (at, bytes) in [(0, bad(f32::NAN)), (BLOCK, good.clone())] {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    drop(write(contributor, at, &bytes));
                });
            }
            barrier.wait();
            std::thread::yield_now();
            match outcome(&begin_commit(contributor)) {
                Ok(()) => _ = learner.pull(),
                Err(ContributeError::Shard(ShardError::NonFinite(BlockId(0)))) => {}
                Err(error) => panic!("{error}"),
            }
        });
        contributor.abort();
        assert!(!contributor.is_open() && learner.end.weights().1.iter().all(|weight| weight.is_finite()));
    }
}

pub fn accepted_nan_counts(way: &Way) {
    let (_site, end, learner) = way.job(&[("reducer", "sum"), ("nonfinite", "accept")]).one();
    let mut contribution = learner.open();
    let placement = contribution.offer(1, &bad(f32::INFINITY)).unwrap();
    assert_ne!(placement, Placement::Duplicate);
    contribution.stage(2, &bad(f32::NAN));
    done(contribution.commit());
    assert_eq!(learner.pull(), 1);
    let (_, weights) = end.weights();
    let (first, second) = (&weights[BLOCK / 4..][..BLOCK / 4], &weights[2 * BLOCK / 4..][..BLOCK / 4]);
    assert_eq!(first[1000], f32::INFINITY);
    assert!(second[1000].is_nan());
    assert_eq!((first[999], first[1001], second[999], second[1001]), (1.0, 1.0, 1.0, 1.0));
    assert_eq!(weights[0], 0.0);
}
