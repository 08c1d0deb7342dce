//! In this process, blocks are reduced before they are committed: as soon as all who take part have them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::contributor::{ContributeError, Contributor};
use libmodelio::observe::trace::{MOST_EVENTS, What};
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::shard_error::ShardError;

use crate::site::{BLOCK, End, LONG, Learner, Site, Way, begin_commit, commit_mapped, outcome, store, write};

const BLOCKS: usize = 32;
const SIZE: usize = BLOCKS * BLOCK;

/// A job with learners, and what they write to.
struct Together {
    end: Arc<End>,
    learners: Vec<(Learner, Arc<Contributor>)>,
    _site: Site,
}

impl Together {
    fn new(way: &Way, learners: usize, settings: &[(&str, &str)]) -> Together {
        let layout = ModelLayout::blank(SIZE as u64, DType::F32, BLOCK as u32).unwrap();
        let (site, end) =
            way.job_of(layout, &[settings, &[("learners", &*learners.to_string())]].concat()).one_end();
        let join = |at: usize| {
            let learner = end.join(&format!("l{at}"));
            (learner.contributor(), learner)
        };
        let learners = (0..learners).map(join).map(|(contributor, learner)| (learner, contributor)).collect();
        Together { end, learners, _site: site }
    }

    fn contributors(&self) -> impl Iterator<Item = &Arc<Contributor>> {
        self.learners.iter().map(|(_, contributor)| contributor)
    }

    /// Writes all blocks by `writes`, and whether they are reduced now, but for three: the job takes four at a time.
    ///
    /// They are not reduced before the commit for some steps after one whose plan was dropped, as on a busy machine,
    /// where a plan gives way to whoever waits for it. So who asks goes on with steps that drop nothing.
    fn reduces(&self, writes: impl FnOnce()) -> bool {
        const MAX_WAIT: Duration = Duration::from_millis(500);
        let (trace, begun) = (self.end.job.trace(), Instant::now());
        trace.begin(begun, MOST_EVENTS);
        writes();
        let is_reduced = loop {
            let events = trace.so_far();
            let block = |what| if let What::Sent(_, block, _) = what { Some(block) } else { None };
            let reduced: BTreeSet<_> = events.iter().filter_map(|event| block(event.what)).collect();
            if reduced.len() + 3 >= BLOCKS || begun.elapsed() > MAX_WAIT {
                break reduced.len() + 3 >= BLOCKS;
            }
            std::thread::yield_now();
        };
        trace.end();
        is_reduced
    }

    /// All commit what they have written, and the version that holds it is made.
    #[track_caller]
    fn commits(&self, step: u64) {
        let outcomes: Vec<_> = self.contributors().map(begin_commit).collect();
        outcomes.iter().for_each(|one| assert_eq!(outcome(one), Ok(())));
        assert_eq!(self.learners[0].0.pull(), step);
    }
}

fn all_of(value: f32) -> Vec<u8> {
    value.to_le_bytes().repeat(SIZE / 4)
}

fn is_non_finite(result: Result<(), ContributeError>) -> bool {
    matches!(result, Err(ContributeError::Shard(ShardError::NonFinite(_))))
}

/// Neither that changes a bit of a version, nor do blocks that were reduced and dropped.
pub fn blocks_are_reduced_before_any_learner_commits(way: &Way) {
    for (reducer, deterministic) in [("sum", "false"), ("adam", "true"), ("momentum", "false")] {
        let job = || {
            let settings = [("reducer", reducer), ("deterministic", deterministic), ("learning_rate", "0.5")];
            Together::new(way, 2, &settings)
        };
        let gradients = |step: u64| {
            [0.25, -1.0].map(|scale| {
                let value = |i: usize| scale * (1 + (i + step as usize) % 7) as f32;
                (0..SIZE / 4).flat_map(|i| value(i).to_le_bytes()).collect::<Vec<u8>>()
            })
        };
        // Sometimes the other half of the blocks has no contribution.
        let part = |step: u64| if step % 4 == 3 { 0..SIZE / 2 } else { 0..SIZE };
        let (early, deadline) = (job(), Instant::now() + LONG);
        let (mut kept, mut dropped, mut steps, mut was_early) = (0, 0, 0, true);
        while kept < 3 || dropped < 3 || steps % 4 != 0 {
            assert!(Instant::now() < deadline, "{reducer}: {kept} and {dropped} of {steps} steps were early");
            steps += 1;
            let gradients = gradients(steps);
            let writes = || {
                let each = early.contributors().zip(&gradients);
                each.for_each(|(of, bytes)| write(of, 0, &bytes[part(steps)]).unwrap());
            };
            if !was_early || kept < dropped {
                was_early = early.reduces(writes);
                kept += usize::from(was_early);
                assert_eq!(early.end.job.version(), Version(steps - 1), "nothing is committed");
            } else {
                let bad = all_of(1000.0);
                let bad = || early.contributors().for_each(|of| write(of, 0, &bad).unwrap());
                was_early = early.reduces(bad);
                dropped += usize::from(was_early);
                early.contributors().for_each(|of| assert!(of.abort()));
                writes();
            }
            early.commits(steps);
        }
        let late = job();
        for step in 1..=steps {
            for (of, bytes) in late.contributors().zip(&gradients(step)) {
                write(of, 0, &bytes[part(step)]).unwrap();
                assert_eq!(outcome(&begin_commit(of)), Ok(()));
            }
            assert_eq!(late.learners[0].0.pull(), step);
        }
        assert!(early.end.bytes() == late.end.bytes(), "{reducer}");
    }
}

pub fn a_learner_that_begins_anew_or_leaves_takes_its_blocks_along(way: &Way) {
    let mut job = Together::new(way, 3, &[("reducer", "sum")]);
    let ([ones, bad], half) = ([1.0, 1000.0].map(all_of), SIZE / 2);
    let mut poisoned = bad.clone();
    store_at(&mut poisoned, 40_000, f32::NAN);
    for step in 1..=8 {
        for of in job.contributors() {
            write(of, 0, &bad[..half]).unwrap();
            assert!(of.abort());
        }
        let [first, second, third] = [0, 1, 2].map(|at| &job.learners[at].1);
        write(first, 0, &ones).unwrap();
        write(second, 0, &bad).unwrap();
        write(third, 0, &ones[..half]).unwrap();
        assert!(second.abort());
        assert!(is_non_finite(write(second, 0, &poisoned)) && is_non_finite(outcome(&begin_commit(second))));
        assert!(second.abort());
        write(second, 0, &ones).unwrap();
        assert_eq!(outcome(&begin_commit(first)), Ok(()));
        write(third, half, &ones[half..]).unwrap();
        let rest = [second, third].map(begin_commit);
        rest.iter().for_each(|one| assert_eq!(outcome(one), Ok(())));
        assert_eq!(job.learners[0].0.pull(), step);
        job.end.shows(step, 3.0 * step as f32);
    }
    // The others wait for the one that leaves in mid-write.
    job.contributors().for_each(|of| write(of, 0, &ones).unwrap());
    let (gone, _) = job.learners.pop().unwrap();
    let outcomes: Vec<_> = job.contributors().map(begin_commit).collect();
    gone.leave(LeaveReason::Asked);
    outcomes.iter().for_each(|one| assert_eq!(outcome(one), Ok(())));
    assert_eq!(job.learners[0].0.pull(), 9);
    job.end.shows(9, 26.0);
}

pub fn blocks_of_the_last_learner_to_begin_are_reduced_as_they_come(way: &Way) {
    for count in [1, 3] {
        let job = Together::new(way, count, &[("reducer", "sum")]);
        let (ones, deadline) = (all_of(1.0), Instant::now() + LONG);
        for step in 1.. {
            let before = job.end.job.status().blocks_on_arrival;
            for of in job.contributors() {
                ones.chunks(SIZE / 2)
                    .enumerate()
                    .for_each(|(i, half)| write(of, i * half.len(), half).unwrap());
                assert_eq!(outcome(&begin_commit(of)), Ok(()));
            }
            assert_eq!(job.learners[0].0.pull(), step);
            job.end.shows(step, (count as u64 * step) as f32);
            let on_arrival = job.end.job.status().blocks_on_arrival - before;
            assert!(on_arrival <= BLOCKS as u64, "{on_arrival} of one learner");
            // What comes while another thread speaks with the coordinator is staged, and is reduced later.
            if on_arrival == BLOCKS as u64 {
                break;
            }
            assert!(Instant::now() < deadline, "no contribution was reduced as it came");
        }
    }
}

pub fn final_bytes_of_mappings_are_reduced_before_fsync(way: &Way) {
    for count in [1, 2] {
        let job = Together::new(way, count, &[("reducer", "sum")]);
        let ones = all_of(1.0);
        let declare = |of: &Arc<Contributor>, bytes: &[u8]| {
            store(of.mapped(), 0, bytes);
            for at in (0..SIZE as u64).step_by(BLOCK / 2) {
                of.declare_final(at, BLOCK as u64 / 2, true).unwrap();
            }
        };
        let (mut early, mut dropped, deadline) = (0, 0, Instant::now() + LONG);
        for step in 1.. {
            if dropped < early {
                dropped += 1;
                // Those that are forgotten, or hold NaN, count nowhere.
                let (first, mut bad) = (&job.learners[0].1, all_of(1000.0));
                job.contributors().for_each(|of| declare(of, &bad));
                job.contributors().for_each(|of| of.forget_final());
                store_at(&mut bad, 70_000, f32::NAN);
                declare(first, &bad);
                assert!(is_non_finite(commit_mapped(first, &bad)));
            } else {
                early += usize::from(job.reduces(|| job.contributors().for_each(|of| declare(of, &ones))));
            }
            assert_eq!(job.end.job.version(), Version(step - 1), "nothing is committed");
            std::thread::scope(|scope| {
                let ones = &ones;
                let ship = |of| scope.spawn(move || assert_eq!(commit_mapped(of, ones), Ok(())));
                job.contributors().for_each(|of| drop(ship(of)));
            });
            assert_eq!(job.learners[0].0.pull(), step);
            job.end.shows(step, (count as u64 * step) as f32);
            if dropped == 3 {
                break;
            }
            assert!(Instant::now() < deadline, "{early} of {step} steps were early");
        }
    }
}

fn store_at(bytes: &mut [u8], element: usize, value: f32) {
    bytes[4 * element..4 * element + 4].copy_from_slice(&value.to_le_bytes());
}
