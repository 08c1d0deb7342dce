//! Lost blocks and restorations in a world with a seed. The registry's table, what shards know of losses, and lineages are
//! the product's; shards, jobs and the store are models of them, which take the product's steps in its order. Shards are
//! killed, started anew and stopped, messages to the registry are lost on either way, and the registry is started anew. In
//! every second run, newer weights of mounts count.
//!
//! What is checked: a version that was called durable is part of all later lives; no number shows two contents; of two
//! lives one counts; and once all are well, the job goes on.
//!
//! `GRADFS_SIM_SEEDS` sets how many runs are made, and `GRADFS_SIM_SEED` makes one and prints what happens.

mod mounts;
mod restoring;
mod world;

use std::panic::catch_unwind;

use world::World;

const SEEDS: u64 = 500;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect("a number"))
}

#[test]
fn what_was_durable_outlives_every_loss() {
    if let Some(seed) = number("GRADFS_SIM_SEED") {
        World::new(seed, true).run();
        return;
    }
    let seeds = number("GRADFS_SIM_SEEDS").unwrap_or(SEEDS);
    let (mut restored, mut durable, mut zombies, mut brought) = (0, 0, 0, 0);
    for seed in 0..seeds {
        let run = catch_unwind(|| {
            let mut world = World::new(seed, false);
            world.run();
            (world.restored, world.told, world.refused_zombies, world.brought)
        });
        let counts = run.unwrap_or_else(|_| panic!("seed {seed} fails: GRADFS_SIM_SEED={seed} shows how"));
        restored += counts.0;
        durable += counts.1;
        zombies += counts.2;
        brought += counts.3;
    }
    // Rare events check nothing.
    println!(
        "{seeds} runs: {restored} restorations, {brought} with weights of mounts, {durable} durable versions, {zombies} \
         refusals of old lives"
    );
    assert!(restored > 2 * seeds && durable > 5 * seeds && zombies > seeds / 20 && brought > seeds / 4);
}
