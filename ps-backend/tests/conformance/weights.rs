//! New weights: written into a buffer, and published at once, wholly or in part.

#![allow(clippy::single_range_in_vec_init, reason = "what was written is a list of ranges")]

use std::ops::Range;
use std::sync::Arc;

use libmodelio::bytes::region::Region;
use libmodelio::client::wait_for;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::shard_error::ShardError;

use crate::site::{Answer, BLOCK, BLOCKS, End, LONG, Message, Reply, Way, answer, done, store, until};

fn allocate(end: &End) -> Result<Region, ShardError> {
    match end.ask(Message::Allocate)? {
        Reply::Buffer(buffer) => Ok(buffer),
        other => panic!("{other:?}"),
    }
}

/// A buffer with `value` where it is going to be `written`, and something else elsewhere.
fn filled(end: &End, value: f32, written: &[Range<u64>]) -> Region {
    let buffer = allocate(end).unwrap();
    assert_eq!(buffer.memory().len() as u64, end.job.layout().size());
    store(&buffer, 0, &(-1f32).to_le_bytes().repeat(buffer.memory().len() / 4));
    for range in written {
        let bytes = value.to_le_bytes().repeat((range.end - range.start) as usize / 4);
        store(&buffer, range.start as usize, &bytes);
    }
    buffer
}

fn send(end: &End, buffer: &Region, written: &[Range<u64>]) -> Answer {
    end.send(Message::Assign { buffer: buffer.clone(), written: written.to_vec() }, LONG)
}

fn assign(end: &End, value: f32, written: &[Range<u64>]) -> Result<Reply, ShardError> {
    answer(&send(end, &filled(end, value, written), written))
}

fn all(end: &End) -> [Range<u64>; 1] {
    [0..end.job.layout().size()]
}

pub fn new_weights_appear_whole_everywhere(way: &Way) {
    let (_site, [a, b]) = way.striped_job(&[("reducer", "assign")]).two_ends();
    for (version, end) in (1..).zip([&a, &a, &b]) {
        done(assign(end, version as f32, &all(end)));
        // The end that has written them reads them.
        end.shows(version, version as f32);
        a.sees(version);
        b.sees(version);
        a.shows(version, version as f32);
        b.shows(version, version as f32);
    }
    // So do contributions that hold values.
    let learner = b.join("b");
    learner.makes(9.0, 4, 9.0);
}

pub fn new_weights_wait_for_readers_of_all_ends(way: &Way) {
    let settings = [("reducer", "assign"), ("hold_for_readers", "1"), ("lease", "600")];
    let (_site, [a, b]) = way.striped_job(&settings).two_ends();
    let name = || "r".to_owned();
    let begins =
        |end: &Arc<End>| wait_for(LONG, |done| end.job.begin_reader(name(), "host".into(), LONG, done));
    let applies = |version| wait_for(LONG, |done| b.job.applies(name(), Version(version), LONG, done));
    begins(&b).unwrap();
    assert_eq!(begins(&a), Err(ShardError::ReaderTaken(name())));
    let (got, newest) = (Version(1), Version(0));
    assert_eq!(applies(1), Err(ShardError::NoVersionYet { got, newest }));
    applies(0).unwrap();
    done(assign(&a, 1.0, &all(&a)));
    let held = send(&a, &filled(&a, 2.0, &all(&a)), &all(&a));
    b.sees(1);
    until("the reader's end has told that it has version 1", || {
        a.job.readers().iter().any(|reader| reader.staged == Version(1) && reader.applied == Some(newest))
    });
    assert!(held.try_recv().is_err() && a.job.state().version == Version(1));
    applies(1).unwrap();
    done(answer(&held));
    b.sees(2);
    b.shows(2, 2.0);
    let held = send(&a, &filled(&a, 3.0, &all(&a)), &all(&a));
    wait_for(LONG, |done| b.job.end_reader(name(), LONG, done)).unwrap();
    done(answer(&held));
    until("nobody reads", || a.job.readers().is_empty());
}

pub fn unwritten_bytes_keep_their_value(way: &Way) {
    let (_site, end) = way.striped_job(&[("reducer", "assign")]).one_end();
    let size = end.job.layout().size();
    let block = BLOCK as u64;
    let mut expected = vec![0f32; size as usize / 4];
    let pieces: [&[Range<u64>]; 5] = [
        &[0..size],
        &[4..8, 400..800, block - 4..block + 4, 3 * block..size],
        &[block..2 * block],
        &[],
        &[0..0, 0..4, 4..4, size - 4..size, size..size],
    ];
    for (version, written) in (1..).zip(pieces) {
        done(assign(&end, version as f32, written));
        for range in written {
            expected[range.start as usize / 4..range.end as usize / 4].fill(version as f32);
        }
        let (shown, weights) = end.weights();
        assert_eq!(shown, Version(version));
        let wrong = weights.iter().zip(&expected).position(|(got, wanted)| got != wanted);
        assert_eq!(wrong, None, "in version {version}");
    }
}

pub fn new_weights_come_first_and_committed_contributions_on_top(way: &Way) {
    let (_site, [a, _], [one, other]) = way.job(&[("reducer", "sum"), ("learners", "2")]).two();
    // A block that was dropped before does not come back.
    let mut dropped = one.open();
    dropped.offer_all_of(0, 64.0);
    dropped.abort();
    one.push(1.0);
    done(assign(&a, 100.0, &all(&a)));
    a.shows(1, 100.0);
    other.push(2.0);
    for learner in [&one, &other] {
        learner.pulls(2, 103.0);
    }
}

/// In this process a version is the buffer that was written, wholly or in part.
pub fn new_weights_are_shown_where_they_were_written(way: &Way) {
    let (_site, end) = way.job(&[("reducer", "assign"), ("nonfinite", "reject")]).one_end();
    let shown = |version| end.job.get(Version(version)).expect("the newest version").region.key();
    for version in 1..=8 {
        let written = if version % 2 == 0 { [4..BLOCK as u64 + 8] } else { all(&end) };
        let buffer = filled(&end, version as f32, &written);
        done(answer(&send(&end, &buffer, &written)));
        assert_eq!(shown(version), buffer.key());
        assert!(end.job.status().buffers.0 <= 5);
    }
    let buffer = filled(&end, 9.0, &all(&end));
    store(&buffer, BLOCK + 4, &f32::NAN.to_le_bytes());
    assert_eq!(answer(&send(&end, &buffer, &all(&end))).unwrap_err(), ShardError::NonFinite(BlockId(1)));
    assert_eq!(end.job.version(), Version(8));
}

pub fn weights_can_be_written_only_when_the_job_allows_it(way: &Way) {
    let (_site, end) = way.job(&[("reducer", "sum")]).one_end();
    let job = &end.job;
    let size = job.layout().size();
    // At version 0, to begin with.
    assert_eq!(job.may_assign(), Ok(()));
    let buffer = filled(&end, 1.0, &all(&end));
    let backwards = Range { start: 9, end: 5 };
    for written in [
        vec![0..1, 2..size + 1],
        vec![5..9, 3..4],
        vec![0..8, 4..12],
        vec![backwards],
        vec![size + 1..size + 1],
    ] {
        let refused = answer(&send(&end, &buffer, &written)).unwrap_err();
        assert_eq!(refused, ShardError::OutOfRange, "{written:?}");
    }
    assert_eq!(job.version(), Version(0));
    done(answer(&send(&end, &buffer, &all(&end))));
    end.shows(1, 1.0);
    // Later only with the reducer for it.
    assert!(matches!(job.may_assign(), Err(ShardError::NotAllowed(_))));
    assert!(matches!(assign(&end, 2.0, &all(&end)).unwrap_err(), ShardError::NotAllowed(_)));
    end.set("reducer", "assign").unwrap();
    assert_eq!(job.may_assign(), Ok(()));
    // NaN is found where it is written, before it is sent.
    let buffer = filled(&end, 2.0, &all(&end));
    store(&buffer, BLOCK + 4, &f32::NAN.to_le_bytes());
    assert_eq!(job.check_finite(&buffer, &all(&end)), Err(ShardError::NonFinite(BlockId(1))));
    let around = [0..BLOCK as u64 + 4, BLOCK as u64 + 8..size];
    assert_eq!(job.check_finite(&buffer, &around), Ok(()));
    done(answer(&send(&end, &buffer, &around)));
    let (version, weights) = end.weights();
    assert_eq!(version, Version(2));
    let at = BLOCK / 4 + 1;
    assert!(weights.iter().enumerate().all(|(i, &weight)| weight == if i == at { 1.0 } else { 2.0 }));
}

pub fn a_buffer_is_assigned_once(way: &Way) {
    let (_site, end) = way.job(&[("reducer", "assign")]).one_end();
    let buffer = filled(&end, 1.0, &all(&end));
    done(answer(&send(&end, &buffer, &all(&end))));
    for foreign in [buffer, end.region("foreign")] {
        let refused = answer(&send(&end, &foreign, &all(&end))).unwrap_err();
        assert!(matches!(refused, ShardError::NotAllowed(_)), "{refused:?}");
    }
    end.shows(1, 1.0);
    done(assign(&end, 2.0, &all(&end)));
    end.shows(2, 2.0);
}

pub fn withdrawn_new_weights_count_wholly_or_not_at_all(way: &Way) {
    let (_site, end, learner) = way.job(&[("reducer", "sum")]).one();
    // A contribution that is being written may hold new weights up, and may not.
    let mut contribution = learner.open();
    contribution.offer_all_of(0, 1.0);
    let buffer = filled(&end, 4.0, &all(&end));
    let assigned = send(&end, &buffer, &all(&end));
    done(end.ask(Message::WithdrawAssign { buffer: buffer.key() }));
    let before = match answer(&assigned) {
        Ok(Reply::Done) => 4.0,
        Err(ShardError::Interrupted) => 0.0,
        other => panic!("{other:?}"),
    };
    let version = end.job.version().0;
    assert_eq!(version, u64::from(before > 0.0));
    end.shows(version, before);
    // The weights count all the same, and a withdrawal in vain harms nobody.
    done(end.ask(Message::WithdrawAssign { buffer: buffer.key() }));
    (1..BLOCKS).for_each(|block| contribution.offer_all_of(block, 1.0));
    done(contribution.commit());
    learner.pulls(version + 1, before + 1.0);
}

pub fn buffers_are_bounded(way: &Way) {
    let (_site, end, learner) = way.job(&[("reducer", "sum"), ("retain", "0"), ("max_versions", "4")]).one();
    let mut buffers = Vec::new();
    let refused = loop {
        match allocate(&end) {
            Ok(buffer) => buffers.push(buffer),
            Err(refused) => break refused,
        }
        assert!(buffers.len() < 8);
    };
    assert!(matches!(refused, ShardError::OutOfMemory(_)), "{refused:?}");
    assert!(!buffers.is_empty());
    // Not more than there may be, whatever is asked for.
    assert!(end.job.status().buffers.0 <= 8);
    drop(buffers);
    learner.makes(1.0, 1, 1.0);
    // A buffer that was given back can be taken again.
    let buffer = filled(&end, 2.0, &all(&end));
    assert!(end.job.status().buffers.0 <= 8);
    drop(buffer);
}
