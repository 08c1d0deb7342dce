//! Versions as readers see them: whole, immutable while they are held, gone when nobody wants them.

use std::slice::from_ref;

use libmodelio::client::Event;
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::shard_error::ShardError;

use crate::common::{Job, decode, encode, floats_layout, gradient};

#[test]
fn pinned_versions_stay_what_they_are_while_others_are_recycled() {
    let job = Job::new(&[("reducer", "adam"), ("max_versions", "6")]);
    let learner = job.join("a");
    let mut held: Vec<(Version, Vec<u8>)> = Vec::new();
    for step in 0..30 {
        if step % 7 == 0 {
            let version = job.pin_newest();
            held.push((version, job.weights_of(version)));
        }
        if held.len() > 2 {
            let (version, bytes) = held.remove(0);
            assert!(job.weights_of(version) == bytes);
            job.shard.unpin(version, 1);
            assert!(!job.shard.pin(version), "old and no longer held");
        }
        learner.contribute(&gradient(&job.layout, step)).unwrap();
        for (version, bytes) in &held {
            assert!(job.weights_of(*version) == *bytes, "{version} at step {step}");
        }
        assert!(job.shard.status().buffers.0 <= 6);
    }
}

#[test]
fn as_many_versions_are_retained_as_asked_for() {
    let job = Job::with(floats_layout(20_000), &[("retain", "3")]);
    let learner = job.join("a");
    for _ in 0..9 {
        learner.contribute(&encode(&job.layout, 0, |_| 1.0)).unwrap();
    }
    assert_eq!(job.shard.retained(), [9, 8, 7, 6].map(Version));
    job.set("retain", "1");
    assert_eq!(job.shard.status().versions, [8, 9].map(Version));
    assert!(job.shard.get(Version(7)).is_none() && !job.shard.pin(Version(7)));
}

#[test]
fn a_contribution_may_be_written_before_the_last_is_published() {
    let job = Job::with(floats_layout(40_000), &[("reducer", "sum"), ("learners", "2")]);
    let (a, b) = (job.join("a"), job.join("b"));
    let value = |v: f32| encode(&job.layout, 0, move |_| v);
    let start = decode(&job.layout, &job.weights());
    let added = |by: f32| {
        let weights = decode(&job.layout, &job.weights());
        weights.iter().zip(&start).all(|(w, s)| w - s == by)
    };
    for round in 0..4 {
        let before = 23.0 * round as f32;
        a.contribute(&value(1.0)).unwrap();
        // The first one still lies in staging: this must not overwrite it.
        a.write_in_pieces(&value(16.0), 7_001);
        b.contribute(&value(2.0)).unwrap();
        job.wait(&a);
        assert!(added(before + 3.0), "{round}");
        a.commit().unwrap();
        b.contribute(&value(4.0)).unwrap();
        job.wait(&a);
        assert!(added(before + 23.0), "{round}");
    }
}

#[test]
fn a_dropped_contribution_ahead_leaves_the_committed_one_alone() {
    let job = Job::with(floats_layout(40_000), &[("reducer", "sum"), ("learners", "2")]);
    let (a, b) = (job.join("a"), job.join("b"));
    let start = decode(&job.layout, &job.weights());
    let value = |v: f32| encode(&job.layout, 0, move |_| v);
    a.contribute(&value(1.0)).unwrap();
    for _ in 0..3 {
        // Each of these is staged again while the first one is still to be read.
        a.write_in_pieces(&value(64.0), 7_001);
        let late = a.commit_within(std::time::Duration::from_millis(1));
        assert!(late.is_err());
        a.writes.abort();
    }
    b.contribute(&value(2.0)).unwrap();
    job.wait(&a);
    let weights = decode(&job.layout, &job.weights());
    assert!(weights.iter().zip(&start).all(|(w, s)| w - s == 3.0), "{}", weights[0] - start[0]);
}

#[test]
fn new_weights_come_first_and_committed_contributions_on_top() {
    let job = Job::with(floats_layout(40_000), &[("reducer", "sum"), ("learners", "2")]);
    let (a, b) = (job.join("a"), job.join("b"));
    let value = |v: f32| encode(&job.layout, 0, move |_| v);
    a.contribute(&value(1.0)).unwrap();
    let buffer = job.shard.allocate().unwrap();
    // SAFETY: the buffer is this test's until it is assigned.
    unsafe { buffer.memory().write(0, &value(100.0)) };
    job.assign(buffer, std::slice::from_ref(&(0..job.layout.size()))).unwrap();
    assert!(decode(&job.layout, &job.weights()).iter().all(|w| *w == 100.0));
    b.contribute(&value(2.0)).unwrap();
    job.wait(&a);
    assert_eq!(job.shard.version(), Version(2));
    assert!(decode(&job.layout, &job.weights()).iter().all(|w| *w == 103.0));
}

#[test]
fn listeners_get_every_version_and_may_call_back() {
    let job = Job::with(floats_layout(20_000), &[]);
    let (sender, receiver) = std::sync::mpsc::channel();
    let shard = std::sync::Arc::downgrade(&job.shard);
    job.shard.subscribe(Box::new(move |event| {
        let seen = shard.upgrade().map(|shard| shard.version());
        sender.send((event, seen)).unwrap();
    }));
    let learner = job.join("a");
    learner.contribute(&encode(&job.layout, 0, |_| 1.0)).unwrap();
    assert_eq!(receiver.recv().unwrap(), (Event::Published(Version(1)), Some(Version(1))));
}

#[test]
fn new_weights_are_shown_where_they_were_written() {
    let job = Job::new(&[("reducer", "assign"), ("nonfinite", "reject")]);
    let other = Job::new(&[("reducer", "assign"), ("nonfinite", "reject")]);
    let (learner, another) = (job.join("a"), other.join("a"));
    for round in 0..8 {
        let (data, mut expected) = (gradient(&job.layout, round), job.weights());
        // Every other time only a tensor is written, which neither begins nor ends with a block.
        let tensor = job.layout.tensors()[1].bytes.clone();
        let written = if round % 2 == 0 { 0..job.size() } else { tensor.start as usize..tensor.end as usize };
        expected[written.clone()].copy_from_slice(&data[written.clone()]);
        let buffer = job.shard.allocate().unwrap();
        let key = buffer.key();
        // SAFETY: nobody else has the buffer before it is published.
        unsafe { buffer.memory().write(written.start, &data[written.clone()]) };
        let range = written.start as u64..written.end as u64;
        job.assign(buffer, from_ref(&range)).unwrap();
        assert_eq!(job.shard.get(job.shard.version()).unwrap().region.key(), key);
        assert!(job.weights() == expected, "round {round}");
        // Masters are those of a job whose learner contributes the same.
        another.write(written.start, &data[written.clone()]).unwrap();
        another.commit().unwrap();
        assert!(other.weights() == expected);
        if round == 5 {
            [&job, &other].iter().for_each(|job| job.set("reducer", "sgd"));
            let step = gradient(&job.layout, 99);
            learner.contribute(&step).unwrap();
            another.contribute(&step).unwrap();
            assert!(job.weights() == other.weights(), "the masters differ");
            [&job, &other].iter().for_each(|job| job.set("reducer", "assign"));
        }
        let existing = job.shard.status().buffers.0;
        assert!(existing <= 5, "{existing}");
    }
    // A value that is refused leaves the version before.
    let (before, size) = (job.shard.version(), job.size() as u64);
    let buffer = job.shard.allocate().unwrap();
    let nan = encode(&job.layout, 0, |i| if i == 7 { f32::NAN } else { 1.0 });
    // SAFETY: as above.
    unsafe { buffer.memory().write(0, &nan) };
    let refused = job.assign(buffer, from_ref(&(0..size)));
    assert!(matches!(refused, Err(ShardError::NonFinite(_))), "{refused:?}");
    assert_eq!(job.shard.version(), before);
}
