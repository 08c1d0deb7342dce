//! Waits end at their deadlines, when they are withdrawn, and when the awaited contribution is dropped.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::{Step, Version};
use libmodelio::vocabulary::shard_error::ShardError;

use crate::site::{BLOCK, BLOCKS, LONG, Message, Reply, SHORT, Way, answer, done, timed_out};

/// By how much an answer may be late where a machine is emulated.
const LATE: Duration = Duration::from_secs(300);

/// Checks that a wait from `begun` on has ended about at its timeout.
#[track_caller]
fn in_time(begun: Instant, timeout: Duration) {
    let took = begun.elapsed();
    // Each end may round down to its clock's resolution.
    assert!(took + Duration::from_millis(5) >= timeout, "too early: {took:?}");
    assert!(took < timeout + LATE, "too late: {took:?}");
}

/// A job in which a commit waits for a second learner to join, to be taken then.
const WAITS: [(&str, &str); 4] =
    [("reducer", "sum"), ("consistency", "async"), ("learners", "2"), ("read_own_step", "true")];

pub fn a_commit_that_waits_for_others_ends_at_its_deadline(way: &Way) {
    let (_site, [a, b]) = way.job(&WAITS).two_ends();
    let one = a.join("a");
    let contribution = one.all_of(1.0);
    // The second learner that the job is to have is not there.
    for timeout in [SHORT, Duration::from_millis(1), SHORT] {
        let begun = Instant::now();
        timed_out(answer(&contribution.send(timeout)));
        in_time(begun, timeout);
    }
    assert_eq!(a.job.version(), Version(0));
    let other = b.join("b");
    done(contribution.commit());
    one.pulls(1, 1.0);
    other.makes(2.0, 2, 3.0);
}

pub fn waiting_for_a_step_ends_at_its_deadline(way: &Way) {
    let (_site, [a, _], [one, other]) = way.job(&[("reducer", "sum"), ("learners", "2")]).two();
    let wait = |timeout| a.send(Message::AwaitStep { learner: one.id }, timeout);
    assert!(matches!(answer(&wait(LONG)), Ok(Reply::Version(Version(0)))), "it has committed nothing");
    one.push(1.0);
    let begun = Instant::now();
    let waits = [wait(SHORT), wait(SHORT * 2), wait(LONG)];
    timed_out(answer(&waits[0]));
    in_time(begun, SHORT);
    timed_out(answer(&waits[1]));
    in_time(begun, SHORT * 2);
    other.push(2.0);
    assert!(matches!(answer(&waits[2]), Ok(Reply::Version(Version(1)))));
    a.shows(1, 3.0);
    // Others wait for another step than this learner's.
    other.push(4.0);
    assert_eq!(one.pull(), 1);
}

pub fn a_wait_is_withdrawn(way: &Way) {
    let (_site, [a, b]) = way.job(&WAITS).two_ends();
    let one = a.join("a");
    // Nothing waits: nothing happens.
    done(a.ask(Message::Withdraw { learner: one.id }));
    let contribution = one.all_of(1.0);
    for _ in 0..2 {
        let commit = contribution.send(LONG);
        done(a.ask(Message::Withdraw { learner: one.id }));
        assert_eq!(answer(&commit).unwrap_err(), ShardError::Interrupted);
    }
    let other = b.join("b");
    done(contribution.commit());
    assert_eq!(one.pull(), 1);
    // One that was taken is not taken back.
    done(a.ask(Message::Withdraw { learner: one.id }));
    other.makes(2.0, 2, 3.0);
    assert_eq!(one.open().step, Step(2));
}

pub fn a_contribution_that_is_aborted_while_its_commit_waits_is_dropped(way: &Way) {
    let (_site, [a, b]) = way.job(&WAITS).two_ends();
    let one = a.join("a");
    let contribution = one.all_of(64.0);
    let commit = contribution.send(LONG);
    contribution.abort();
    let refused = answer(&commit).unwrap_err();
    assert!(matches!(refused, ShardError::NotAllowed(_)), "{refused:?}");
    let other = b.join("b");
    other.makes(1.0, 1, 1.0);
    assert_eq!(one.open().step, Step(1));
    one.makes(2.0, 2, 3.0);
}

pub fn an_aborted_contribution_is_dropped(way: &Way) {
    for learners in ["1", "2"] {
        let (_site, [a, b]) = way.job(&[("reducer", "sum"), ("learners", learners)]).two_ends();
        let one = a.join("a");
        let junk = || {
            let mut contribution = one.open();
            contribution.offer_all_of(0, 64.0);
            contribution.offer_all_of(BLOCKS - 1, 64.0);
            contribution.stage_all_of(1, 64.0);
            contribution
        };
        junk().abort();
        let other = (learners == "2").then(|| b.join("b"));
        let mut sum = 0.0;
        for version in 1..=3 {
            junk().abort();
            // Blocks that were dropped do not come back where the next one has none.
            let mut contribution = one.open();
            assert_eq!(contribution.step, Step(version));
            contribution.offer_all_of(2, 1.0);
            done(contribution.commit());
            other.iter().for_each(|other| other.push(0.0));
            sum += 1.0;
            assert_eq!(one.pull(), version);
            let (_, weights) = a.weights();
            for (block, weights) in weights.chunks(BLOCK / 4).enumerate() {
                let expected = if block == 2 { sum } else { 0.0 };
                assert!(weights.iter().all(|&w| w == expected), "block {block} of version {version}");
            }
        }
    }
}

pub fn an_end_that_shuts_down_answers_everybody(way: &Way) {
    let (_site, end) = way.job(&[("reducer", "sum"), ("learners", "2")]).one_end();
    let (a, b) = (end.join("a"), end.join("b"));
    a.push(1.0);
    let contribution = a.all_of(2.0);
    let waits = [contribution.send(LONG), end.send(Message::AwaitStep { learner: a.id }, LONG)];
    end.job.shut_down();
    for wait in &waits {
        assert_eq!(answer(wait).unwrap_err(), ShardError::Unreachable);
    }
    let join = Message::Join { name: "c".into() };
    for message in [join, Message::AwaitStep { learner: b.id }, Message::Open { learner: b.id }] {
        let text = format!("{message:?}");
        let refused = end.ask(message);
        assert!(matches!(refused, Err(ShardError::Unreachable)), "{refused:?} to {text}");
    }
    let slot = a.slot(Step(2), 0);
    let refused = end.job.write(&contribution.filled(0, 1.0), slot, Some(&contribution.notice.staging));
    assert_eq!(refused, Err(ShardError::Unreachable));
    // Published versions can still be read. The end of its learners may have made a version of their commits.
    let (version, _) = end.weights();
    end.shows(version.0.min(1), version.0 as f32);
}

pub fn answers_may_call_the_job(way: &Way) {
    let (_site, end) = way.job(&[("reducer", "sum"), ("learners", "2")]).one_end();
    let (a, b) = (end.join("a"), end.join("b"));
    let (sender, receiver) = channel();
    for step in 1..=20 {
        a.push(1.0);
        let (job, report, other) = (Arc::clone(&end.job), sender.clone(), b.id);
        let seen = move |reply: Result<Reply, ShardError>| {
            let seen = reply.is_ok() && job.status().version.0 >= step && job.read(0, &mut [0; 4]).is_ok();
            job.await_step(
                other,
                LONG,
                Box::new(move |reply| report.send(seen && reply.is_ok()).unwrap_or_default()),
            );
        };
        // The answer comes while the other one drops a contribution, and makes the next.
        end.ask_within(Message::AwaitStep { learner: a.id }, LONG, Box::new(seen));
        let mut dropped = b.open();
        dropped.offer_all_of(0, 64.0);
        dropped.abort();
        b.push(1.0);
        assert!(receiver.recv_timeout(LONG).expect("an answer"), "step {step}");
        assert_eq!(b.pull(), step);
    }
    end.shows(20, 40.0);
}

/// In this process, where readers and the job share the buffers.
pub fn a_commit_waits_for_a_buffer_that_readers_hold(way: &Way) {
    let (_site, end, learner) = way.job(&[("reducer", "sum"), ("retain", "0"), ("max_versions", "3")]).one();
    for version in 0..5 {
        assert!(end.job.pin(Version(version)));
        learner.push(1.0);
        assert_eq!(learner.pull(), version + 1);
    }
    let next = learner.all_of(1.0);
    timed_out(answer(&next.send(SHORT)));
    assert!(end.job.version() == Version(5) && end.ask(Message::Allocate).is_err());
    let waits = next.send(LONG);
    assert!(waits.recv_timeout(SHORT).is_err());
    end.job.unpin(Version(0), 1);
    done(answer(&waits));
    learner.pulls(6, 6.0);
    let held = end.job.get(Version(1)).expect("a pinned version");
    assert!(held.bytes(0..4) == 1f32.to_le_bytes(), "others stay as they are");
}
