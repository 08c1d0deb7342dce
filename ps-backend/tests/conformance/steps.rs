//! Steps: what blocks of which contributions add up to, whenever and however they come.

use libmodelio::client::LastCommit;
use libmodelio::vocabulary::block_slot::Placement;
use libmodelio::vocabulary::ids::{Step, Version};

use crate::refusals::one_or_two;
use crate::site::{BLOCK, BLOCKS, LONG, SHORT, Way, answer, begin_commit, done, outcome, timed_out, write};

pub fn steps_follow_each_other(way: &Way) {
    let (_site, end, learner) = way.job(&[("reducer", "sum")]).one();
    assert_eq!(end.job.last_commit(learner.id), LastCommit::In(Version(0)));
    for step in 1..=4 {
        let contribution = learner.all_of(1.0);
        assert_eq!(contribution.step, Step(step));
        assert_eq!(learner.ask_to_open().unwrap().0, Step(step), "it is open already");
        done(contribution.commit());
        assert_eq!(learner.pull(), step);
        assert_eq!(end.job.last_commit(learner.id), LastCommit::In(Version(step)));
        end.shows(step, step as f32);
        assert!(
            !learner.ask_to_open().unwrap().1,
            "what was staged for the last step is not needed any more"
        );
    }
}

pub fn contributions_of_several_ends_are_added(way: &Way) {
    let (_site, [a, b]) = way.striped_job(&[("reducer", "sum"), ("learners", "3")]).two_ends();
    let learners = [a.join("a1"), a.join("a2"), b.join("b1")];
    let mut sum = 0.0;
    for step in 1..=4 {
        let committed: Vec<_> = learners
            .iter()
            .zip([1.0, 10.0, 100.0])
            .map(|(learner, value)| {
                sum += value * step as f32;
                learner.all_of(value * step as f32).send(LONG)
            })
            .collect();
        committed.iter().for_each(|commit| done(answer(commit)));
        for learner in &learners {
            learner.pulls(step, sum);
        }
    }
}

pub fn blocks_may_come_early_or_late_and_in_any_order(way: &Way) {
    let (_site, _, [one, other]) = way.striped_job(&[("reducer", "sum"), ("learners", "2")]).two();
    // By step: in which order, and which of them are left to the commit.
    let ways: [(&[u32], &[u32]); 4] =
        [(&[0, 1, 2, 3, 4], &[]), (&[4, 2, 0], &[3, 1]), (&[], &[4, 3, 2, 1, 0]), (&[3], &[0, 1, 2, 4])];
    let mut expected = vec![0.0; BLOCKS as usize];
    for (step, (early, late)) in (1..).zip(ways) {
        let value = |block: u32| (step * 8 + u64::from(block)) as f32;
        // The second of them is the last that is missing, which may make a difference.
        for learner in [&one, &other] {
            let mut contribution = learner.open();
            early.iter().for_each(|&block| contribution.offer_all_of(block, value(block)));
            late.iter().for_each(|&block| contribution.stage_all_of(block, value(block)));
            done(contribution.commit());
        }
        (0..BLOCKS).for_each(|block| expected[block as usize] += 2.0 * value(block));
        for learner in [&one, &other] {
            assert_eq!(learner.pull(), step);
            let (_, weights) = learner.end.weights();
            for (block, weights) in weights.chunks(BLOCK / 4).enumerate() {
                assert!(weights.iter().all(|&w| w == expected[block]), "block {block} of version {step}");
            }
        }
    }
}

pub fn blocks_may_come_from_several_threads(way: &Way) {
    let (_site, end, learner) = way.striped_job(&[("reducer", "sum")]).one();
    for step in 1..=4 {
        let mut contribution = learner.open();
        let slots = (0..BLOCKS).map(|block| learner.slot(contribution.step, block)).collect::<Vec<_>>();
        let bytes = (0..BLOCKS).map(|block| contribution.filled(block, 1.0)).collect::<Vec<_>>();
        // Two of them offer each block: one learns that the other was faster.
        let offered = std::thread::scope(|scope| {
            let (room, end, slots, bytes) = (&contribution.notice.staging, &end, &slots, &bytes);
            let offer = |order: Vec<usize>| {
                scope.spawn(move || {
                    let offer = |at: usize| (at, end.job.write(&bytes[at], slots[at], Some(room)).unwrap());
                    order.into_iter().map(offer).collect::<Vec<_>>()
                })
            };
            let threads = [vec![0, 1, 2], vec![3, 4, 0], vec![4, 2, 1, 3]].map(offer);
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        for block in 0..BLOCKS as usize {
            let of: Vec<_> =
                offered.iter().filter(|(at, _)| *at == block).map(|(_, placement)| *placement).collect();
            let ([taken, Placement::Duplicate] | [Placement::Duplicate, taken]) = of[..] else {
                panic!("{of:?}")
            };
            assert_ne!(taken, Placement::Duplicate);
            contribution.notice.sent.insert(block);
            contribution.notice.deferred.set(block, taken == Placement::Deferred);
        }
        contribution.notice.tensors.insert_range(..);
        done(contribution.commit());
        learner.pulls(step, step as f32);
    }
}

pub fn a_contributor_may_write_at_any_offset(way: &Way) {
    let (_site, [a, b]) = way.striped_job(&[("reducer", "sum"), ("learners", "2")]).two_ends();
    let learners = [a.join("a"), b.join("b")];
    let contributors = learners.each_ref().map(|learner| learner.contributor());
    let size = a.job.layout().size() as usize;
    let ones = 1f32.to_le_bytes().repeat(size / 4);
    for step in 1..=3 {
        for (contributor, piece) in contributors.iter().zip([40_003, BLOCK]) {
            for (i, bytes) in ones.chunks(piece).enumerate() {
                write(contributor, i * piece, bytes).unwrap();
            }
            assert_eq!(outcome(&begin_commit(contributor)), Ok(()));
        }
        for learner in &learners {
            learner.pulls(step, 2.0 * step as f32);
        }
    }
}

pub fn unsent_blocks_count_as_zero(way: &Way) {
    let (_site, end, learner) = way.job(&[("reducer", "sum")]).one();
    learner.push(1.0);
    let mut last = learner.open();
    last.offer_all_of(BLOCKS - 1, 2.0);
    done(last.commit());
    let mut first = learner.open();
    first.stage_all_of(0, 4.0);
    done(first.commit());
    // Nothing at all is a contribution, too.
    done(learner.open().commit());
    assert_eq!(learner.pull(), 4);
    let (_, weights) = end.weights();
    for (block, weights) in weights.chunks(BLOCK / 4).enumerate() {
        let expected = [5.0, 1.0, 1.0, 1.0, 3.0][block];
        assert!(weights.iter().all(|&weight| weight == expected), "block {block}");
    }
}

pub fn a_block_that_is_offered_twice_counts_once(way: &Way) {
    for learners in ["1", "2"] {
        let (_site, _, learner, other) = one_or_two(way, learners);
        let mut contribution = learner.open();
        for block in 0..BLOCKS {
            contribution.offer_all_of(block, 1.0);
            let others = contribution.filled(block, 7.0);
            assert_eq!(contribution.offer(block, &others), Ok(Placement::Duplicate));
        }
        done(contribution.commit());
        // A taken step stays taken.
        for value in [1.0, 7.0] {
            let bytes = contribution.filled(2, value);
            assert_eq!(contribution.offer(2, &bytes), Ok(Placement::Duplicate));
        }
        other.iter().for_each(|other| other.push(0.0));
        learner.pulls(1, 1.0);
        let bytes = contribution.filled(2, 7.0);
        assert_eq!(contribution.offer(2, &bytes), Ok(Placement::Duplicate));
    }
}

pub fn a_commit_that_is_sent_again_counts_once(way: &Way) {
    let (_site, [a, _], [one, other]) = way.job(&[("reducer", "sum"), ("learners", "2")]).two();
    let contribution = one.all_of(1.0);
    for _ in 0..3 {
        done(contribution.commit());
    }
    other.push(2.0);
    assert_eq!(one.pull(), 1);
    done(contribution.commit());
    a.shows(1, 3.0);
    one.push(4.0);
    other.makes(8.0, 2, 15.0);
}

pub fn a_learner_may_be_a_step_ahead(way: &Way) {
    let (_site, [a, b], [ahead, behind]) = way.job(&[("reducer", "sum"), ("learners", "2")]).two();
    ahead.push(1.0);
    assert_eq!(a.job.last_commit(ahead.id), LastCommit::Waits);
    for _ in 0..2 {
        // One that is dropped takes nothing of the committed one along.
        let dropped = ahead.all_of(64.0);
        timed_out(answer(&dropped.send(SHORT)));
        dropped.abort();
    }
    let next = ahead.all_of(10.0);
    assert_eq!(next.step, Step(2));
    timed_out(answer(&next.send(SHORT)));
    assert_eq!(a.job.version(), Version(0));
    behind.push(2.0);
    // It is open still, and is taken now.
    done(next.commit());
    behind.push(20.0);
    assert_eq!((ahead.pull(), behind.pull()), (2, 2));
    a.shows(2, 33.0);
    b.shows(2, 33.0);
}

pub fn mapped_memory_is_committed_as_it_is(way: &Way) {
    let (_site, [a, b], [one, other]) = way.job(&[("reducer", "sum"), ("learners", "2")]).two();
    for step in 1..=2 {
        let committed = [&one, &other].map(|learner| {
            let mut contribution = learner.open();
            // Its program may store into it as soon as the commit is answered.
            contribution.notice.lendable = false;
            (0..BLOCKS).for_each(|block| contribution.stage_all_of(block, 1.0));
            (contribution.send(LONG), contribution.notice.staging)
        });
        for (commit, staging) in committed {
            done(answer(&commit));
            crate::site::store(&staging, 0, &7f32.to_le_bytes().repeat(BLOCK / 4));
        }
        assert_eq!((one.pull(), other.pull()), (step, step));
        a.shows(step, 2.0 * step as f32);
        b.shows(step, 2.0 * step as f32);
    }
}
