//! Many learners at once: exact sums, no answer lost, nothing stuck.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use libmodelio::contributor::ContributeError;
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::shard_error::ShardError;

use crate::common::{BLOCK, Job, LONG, Learner, decode, encode, floats_layout};

/// A small generator, so that threads differ and runs do not.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// Writes every element as `value`, in some order and cut somehow, perhaps from two threads.
fn write(learner: &Learner, bytes: &[u8], random: &mut Random) -> Result<(), ContributeError> {
    match random.below(3) {
        0 => learner.write(0, bytes),
        1 => {
            let piece = 4 * (1 + random.below(30_000) as usize);
            bytes.chunks(piece).enumerate().try_for_each(|(i, part)| learner.write(i * piece, part))
        }
        _ => {
            let at = 4 * random.below(bytes.len() as u64 / 4) as usize;
            std::thread::scope(|scope| {
                let second = scope.spawn(move || learner.write(at, &bytes[at..]));
                learner.write(0, &bytes[..at])?;
                second.join().unwrap()
            })
        }
    }
}

/// Every learner adds its own power of 16 to all weights, each step, and sometimes gives up in the middle.
fn stress(consistency: &str, steps: u64) {
    const LEARNERS: u64 = 4;
    let job = Job::with(
        floats_layout(70_001),
        &[
            ("reducer", "sum"),
            ("consistency", consistency),
            ("learners", "4"),
            ("max_versions", "5"),
            ("read_own_step", "true"),
        ],
    );
    let start = decode(&job.layout, &job.weights());
    let learners: Vec<Learner> = (0..LEARNERS).map(|i| job.join(&format!("l{i}"))).collect();
    let done = AtomicU64::new(0);
    let aborted = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for (i, learner) in learners.iter().enumerate() {
            let (job, done, aborted) = (&job, &done, &aborted);
            scope.spawn(move || {
                let mut random = Random(i as u64 + 1);
                let bytes = encode(&job.layout, 0, |_| 16f32.powi(i as i32));
                let junk = encode(&job.layout, 0, |_| 0.5);
                let mut committed = 0;
                while committed < steps {
                    if random.below(3) == 0 {
                        let part = 1 + random.below(junk.len() as u64 - 1) as usize;
                        learner.write(0, &junk[..part]).unwrap();
                        learner.writes.abort();
                        aborted.fetch_add(1, Ordering::Relaxed);
                        continue;
                    }
                    if random.below(4) == 0 {
                        learner.commit_mapped(&bytes).unwrap();
                    } else {
                        write(learner, &bytes, &mut random).unwrap();
                        let timeout = if random.below(4) == 0 { Duration::from_millis(1) } else { LONG };
                        while let Err(error) = learner.commit_within(timeout) {
                            let late = matches!(error, ContributeError::Shard(ShardError::TimedOut(_)));
                            assert!(late, "{error}");
                        }
                    }
                    committed += 1;
                    if random.below(2) == 0 {
                        job.wait(learner);
                    }
                }
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        // A reader: no version is ever torn, wherever in it one looks.
        let (job, done) = (&job, &done);
        let start = &start;
        scope.spawn(move || {
            while done.load(Ordering::Relaxed) < LEARNERS {
                let version = job.pin_newest();
                let weights = decode(&job.layout, &job.weights_of(version));
                let added = weights[0] - start[0];
                assert!(weights.iter().zip(start).all(|(w, s)| w - s == added), "{version} is torn");
                if consistency == "sync" {
                    assert_eq!(added, version.0 as f32 * 4_369.0, "{version}");
                }
                job.shard.unpin(version, 1);
            }
        });
    });
    // A commit that is taken while a version is made is part of the next one.
    learners.iter().for_each(|learner| _ = job.wait(learner));
    let added = steps as f32 * 4_369.0;
    let weights = decode(&job.layout, &job.weights());
    assert!(weights.iter().zip(&start).all(|(w, s)| w - s == added), "{} {}", weights[0] - start[0], added);
    assert_eq!(job.shard.status().contributions, steps * LEARNERS);
    assert!(aborted.load(Ordering::Relaxed) > 0);
}

#[test]
fn synchronous_sums_are_exact_under_aborts_and_timeouts() {
    stress("sync", 24);
}

#[test]
fn asynchronous_sums_are_exact_under_aborts_and_timeouts() {
    stress("async", 24);
}

#[test]
fn a_lone_asynchronous_learner_and_its_guests_lose_nothing() {
    let job = Job::with(floats_layout(70_001), &[("reducer", "sum"), ("consistency", "async")]);
    let host = job.join("host");
    let start = decode(&job.layout, &job.weights());
    let ones = encode(&job.layout, 0, |_| 1.0);
    std::thread::scope(|scope| {
        let (job, ones) = (&job, &ones);
        scope.spawn(move || {
            for _ in 0..60 {
                write(&host, ones, &mut Random(7)).unwrap();
                host.commit().unwrap();
            }
        });
        scope.spawn(move || {
            for i in 0..20 {
                let guest = job.join(&format!("guest{}", i % 3));
                guest.contribute(ones).unwrap();
                if i % 2 == 0 {
                    guest.write(0, &ones[..BLOCK as usize + 4]).unwrap();
                }
                let reason = LeaveReason::Asked;
                job.leave(&guest, reason);
            }
        });
    });
    let weights = decode(&job.layout, &job.weights());
    assert!(weights.iter().zip(&start).all(|(w, s)| w - s == 80.0), "{}", weights[0] - start[0]);
}

#[test]
fn a_refused_block_always_fails_the_commit_whichever_thread_wrote_it() {
    let job = Job::with(floats_layout(4 * BLOCK as usize / 4), &[]);
    let learner = job.join("a");
    let (one, two) = (BLOCK as usize, 2 * BLOCK as usize);
    let good = encode(&job.layout, 0, |_| 1.0);
    let bad = encode(&job.layout, 0, |i| if i + 1 == one / 4 { f32::NAN } else { 1.0 });
    for _ in 0..100 {
        let barrier = Barrier::new(3);
        std::thread::scope(|scope| {
            learner.write(2 * BLOCK as usize, &good[two..two + 16]).unwrap();
            scope.spawn(|| {
                barrier.wait();
                let _ = learner.write(0, &bad[..one]);
            });
            scope.spawn(|| {
                barrier.wait();
                let _ = learner.write(one, &good[one..two]);
            });
            barrier.wait();
            std::thread::yield_now();
            // Either the block comes after the commit, and is no part of it, or it makes it fail.
            match learner.commit() {
                Ok(()) => assert!(decode(&job.layout, &job.weights()).iter().all(|w| w.is_finite())),
                Err(error) => {
                    assert!(matches!(error, ContributeError::Shard(ShardError::NonFinite(_))), "{error}");
                }
            }
        });
        learner.writes.abort();
        assert!(!learner.writes.is_open());
    }
}

#[test]
fn completions_may_call_the_job() {
    let job = Job::with(floats_layout(40_000), &[("learners", "2")]);
    let (a, b) = (job.join("a"), job.join("b"));
    let ones = encode(&job.layout, 0, |_| 1.0);
    let (sender, receiver) = mpsc::channel();
    a.contribute(&ones).unwrap();
    // The answer to a's wait comes while b drops its contribution, and looks at everything in reach.
    for round in 0..50 {
        let (of_a, of_b, of_job) = (Arc::clone(&a.writes), Arc::clone(&b.writes), Arc::clone(&job.shard));
        let report = sender.clone();
        let answer = Box::new(move |reply: Result<_, _>| {
            let _ = (of_a.is_open(), of_b.is_open(), of_job.status());
            of_a.abort();
            report.send(reply.is_ok()).unwrap();
        });
        job.shard.await_step(a.id, LONG, answer);
        b.write(0, &ones[..BLOCK as usize]).unwrap();
        b.writes.abort();
        b.contribute(&ones).unwrap();
        assert!(receiver.recv_timeout(LONG).unwrap(), "{round}");
        job.wait(&b);
        a.contribute(&ones).unwrap();
    }
}

#[test]
fn joining_and_leaving_all_the_time_holds_nobody_up() {
    let job = Job::with(floats_layout(40_000), &[("reducer", "sum")]);
    let ones = encode(&job.layout, 0, |_| 1.0);
    let until = Instant::now() + Duration::from_millis(700);
    let committed = AtomicU64::new(0);
    let start = decode(&job.layout, &job.weights());
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (job, ones, committed) = (&job, &ones, &committed);
            scope.spawn(move || {
                let mut random = Random(thread);
                while Instant::now() < until {
                    let learner = job.join(&format!("l{thread}"));
                    for _ in 0..random.below(3) {
                        learner.contribute(ones).unwrap();
                        committed.fetch_add(1, Ordering::Relaxed);
                    }
                    let part = 1 + random.below(ones.len() as u64 - 1) as usize;
                    learner.write(0, &ones[..part]).unwrap();
                    job.leave(&learner, LeaveReason::Died);
                }
            });
        }
    });
    let end = Instant::now() + LONG;
    while job.shard.status().contributions < committed.load(Ordering::Relaxed) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    let added = committed.load(Ordering::Relaxed) as f32;
    let weights = decode(&job.layout, &job.weights());
    assert!(weights.iter().zip(&start).all(|(w, s)| w - s == added), "{} {added}", weights[0] - start[0]);
}
