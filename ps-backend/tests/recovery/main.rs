//! Lost blocks and restorations in a world with a seed. The registry's table, what shards know of losses, lineages, offers,
//! the job's decisions, and the shelf of snapshots with its claims are the product's. Shards, restorations, writers of
//! snapshots, learners, mounts and the network are models of them, which take the product's steps in its order.
//!
//! Shards are killed, started anew, stopped and cut off, and the registry is started anew. Messages are lost on either way,
//! and commits come late and twice. Descriptions of snapshots are cut short or changed, and their writers end. Several shards
//! restore at once, and shards come back with blocks of lives that are over. In every second run, newer weights of mounts
//! count.
//!
//! What is checked:
//! - No version has a contribution twice. None lacks one whose learner has sent a later one.
//! - A life has what it has acknowledged, for as long as it lives.
//! - What was called durable is part of all later lives, and of what is called durable later.
//! - No number of a version shows two contents.
//! - The record of a version says how many steps of each learner it has.
//! - All learners go on once all is well.
//!
//! `GRADFS_RECOVERY_SEEDS` sets how many runs are made, from `GRADFS_SIM_FROM` on. `GRADFS_SIM_SEED` makes one and prints what
//! happens.

mod content;
mod counts;
mod job;
mod learners;
mod mounts;
mod promises;
mod restoring;
mod saving;
mod store;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use counts::COUNTED;
use world::World;

/// Runs that are made unless the environment says otherwise.
const SEEDS: u64 = 5000;

/// Runs in which every counted event occurs as often as it must, wherever they begin.
const MANY: u64 = 1000;

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value:?} is not a number")))
}

fn run(seed: u64, says: bool) -> [u64; COUNTED.len()] {
    let mut world = World::new(seed, says);
    world.run();
    std::array::from_fn(|at| COUNTED[at].1(&world.counts))
}

#[test]
fn what_was_durable_outlives_every_loss() {
    if let Some(seed) = number("GRADFS_SIM_SEED") {
        run(seed, true);
        return;
    }
    let seeds = number("GRADFS_RECOVERY_SEEDS").unwrap_or(SEEDS);
    let from = number("GRADFS_SIM_FROM").unwrap_or(0);
    let next = AtomicU64::new(from);
    let totals = [const { AtomicU64::new(0) }; COUNTED.len()];
    let failed = Mutex::new(Vec::new());
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= from + seeds || !failed.lock().expect("nobody panics with it").is_empty() {
                return;
            }
            match catch_unwind(AssertUnwindSafe(|| run(seed, false))) {
                Err(_) => failed.lock().expect("nobody panics with it").push(seed),
                Ok(counts) => {
                    for (total, count) in totals.iter().zip(counts) {
                        total.fetch_add(count, Ordering::Relaxed);
                    }
                }
            }
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        (0..threads).for_each(|_| drop(scope.spawn(work)));
    });
    let failed = failed.into_inner().expect("nobody panics with it");
    assert!(failed.is_empty(), "seeds {failed:?} fail: GRADFS_SIM_SEED={} shows how", failed[0]);
    let totals = totals.map(AtomicU64::into_inner);
    for ((what, _, runs), count) in COUNTED.iter().zip(totals) {
        println!("{count} {what}");
        // A few runs may lack what is not in each of them.
        let least = if seeds >= MANY { seeds / runs } else { 0 };
        assert!(count >= least, "{count} {what} in {seeds} runs");
    }
}
