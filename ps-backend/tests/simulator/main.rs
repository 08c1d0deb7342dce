//! The cores of a networked job in a world of their own: a seeded network that loses, delays, repeats and reorders
//! what they say, nodes that hang, are cut off or end, and a record of all that happens, which is checked against what
//! `docs/use/semantics.md` and `docs/operate/network.md` promise. A run is a function of its seed.
//!
//! `GRADFS_SIM_SEEDS` sets how many runs are made, from `GRADFS_SIM_FROM` on, and `GRADFS_SIM_FAILURES` after how many
//! that fail no more are; `GRADFS_SIM_SEED` makes one and prints all that happens in it.

mod chaos;
mod client;
mod clock;
mod connections;
mod ended;
mod following;
mod history;
mod laying;
mod memory;
mod moving;
mod network;
mod optimizer;
mod parts;
mod programs;
mod relaying;
mod settings;
mod shard;
mod state;
mod stranger;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use world::World;

/// Runs that are made unless the environment says otherwise.
const SEEDS: u64 = 500;

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value:?} is not a number")))
}

type Count = fn(&World) -> u64;

/// Runs in which every counted event occurs as often as it must, wherever they begin. In fewer, it may come to a quarter of
/// that by chance, and what is then to occur once may not occur at all.
const MANY: u64 = 2000;

/// How often an event occurs at least in some runs, if it must occur once in so many.
fn least(seeds: u64, runs: u64) -> u64 {
    if seeds >= MANY {
        seeds / runs
    } else {
        Some(seeds / (4 * runs)).filter(|&least| least > 1).unwrap_or(0)
    }
}

/// The counted events of a run, and in how many runs each must occur once on average: rare events check nothing.
const COUNTED: &[(&str, Count, u64)] = &[
    ("versions", |world| world.history.made() as u64, 1),
    ("events", |world| world.events, 1),
    ("moves", |world| world.current() as u64, 4),
    ("competing moves", |world| world.moves.competed, 100),
    ("kills", |world| world.killed, 16),
    ("ended jobs", |world| u64::from(world.ended), 64),
    ("plans that were sealed", |world| world.history.sealed_plans, 2),
    ("plans that several clients wrote to and that were sealed", |world| world.history.sealed_together, 4),
    ("layer-wise steps", |world| world.history.layerwise, 4),
    ("measured norms", |world| world.history.measured, 1),
    ("versions of a grace window that ended", |world| world.history.without_the_late, 4),
    ("blocks that came before", |world| world.early, 1),
    ("payloads that came before the seal", |world| world.before_the_seal, 50),
    ("contributions of which blocks were sent in vain before", |world| world.history.sent_again(), 100),
    ("blocks of several clients in one pass", |world| world.together, 1),
    ("mapped commits that timed out", |world| world.loans.timed_out, 1),
    ("mapped blocks that were sent before their commit", |world| world.loans.declared, 1),
    ("reads of what was lent no more", |world| world.loans.late_reads, 50),
    ("of them, reads of what had changed", |world| world.loans.changed, 64),
    ("lost pins", |world| world.loans.lost_pins, 2),
    ("copies of versions that were over", |world| world.loans.late_copies, 96),
    ("blocks that were received before their version counted", |world| world.ahead.received, 1),
    ("of them, blocks of plans that made no version", |world| world.ahead.void, 4),
    ("blocks of new weights that were sent while others were written", |world| world.ahead.weights, 4),
    ("blocks that followers were sent when their version counted", |world| world.ahead.late, 4),
    ("blocks that came as what has changed", |world| world.patches.taken, 1),
    ("of them, broken ones", |world| world.patches.broken, 4),
    ("blocks that came whole though changes were asked for", |world| world.patches.whole, 1),
    ("blocks that came from other clients", |world| world.relayed.blocks, 1),
    ("of them, blocks that the relay did not show yet", |world| world.relayed.early, 2),
    ("relays that failed", |world| world.relayed.failed, 8),
    ("versions that were not pulled", |world| world.history.shown_own(), 4),
    ("grants that name a plan which counts", |world| world.history.told_counted, 1),
    ("versions of sets of parts", |world| world.history.sets.made, 1),
    ("blocks of them with something of several parts", |world| world.history.sets.mixed, 1),
    ("elements of them that several parts had", |world| world.history.sets.overlaps, 1),
    ("blocks of them with something of no part", |world| world.history.sets.kept, 4),
    ("complete sets that were refused", |world| world.history.sets.refused, 12),
    ("refusals of parts for NaN", |world| world.parts.bad, 100),
    ("refusals of parts because their sets lacked some of the model", |world| world.parts.uncovered, 32),
    ("refusals of parts because one was gone", |world| world.parts.gone, 32),
    ("parts whose sets are versions", |world| world.parts.acknowledged, 1),
    ("of them, versions that their ranks saw", |world| world.parts.seen, 1),
    ("parts that waited in vain for others", |world| world.parts.lacking, 8),
    ("parts that came while another set gathered", |world| world.parts.other_set, 2),
    ("parts that came twice", |world| world.parts.twice, 8),
    ("parts whose outcome nobody knows", |world| world.parts.unsure, 4),
    ("ranks that died before their part was asked for", |world| world.parts.died, 12),
    ("of them, with their clients", |world| world.parts.crashed, 64),
    ("parts that were taken back", |world| world.parts.withdrawn, 8),
    ("strangers", |world| world.strangers, 1),
    ("lies that were believed", |world| world.believed, 1),
    ("jumps of a shard's clock", |world| world.jumped, 4),
];

type Counts = [u64; COUNTED.len()];

fn run(seed: u64, printing: bool) -> Counts {
    let mut world = World::new(seed, printing);
    world.run();
    std::array::from_fn(|at| COUNTED[at].1(&world))
}

fn say(of: &str, counts: &Counts) {
    let counts = COUNTED.iter().zip(counts).map(|((what, ..), count)| format!("{count} {what}"));
    println!("{of}: {}", counts.collect::<Vec<_>>().join(", "));
}

#[test]
fn every_history_is_allowed() {
    if let Some(seed) = number("GRADFS_SIM_SEED") {
        return say(&format!("seed {seed}"), &run(seed, true));
    }
    let seeds = number("GRADFS_SIM_SEEDS").unwrap_or(SEEDS);
    let from = number("GRADFS_SIM_FROM").unwrap_or(0);
    let most_failures = number("GRADFS_SIM_FAILURES").unwrap_or(5) as usize;
    let next = AtomicU64::new(from);
    let totals = [const { AtomicU64::new(0) }; COUNTED.len()];
    let failed: Mutex<Vec<(u64, String)>> = Mutex::new(Vec::new());
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= from + seeds || failed.lock().expect("no one panics with it").len() >= most_failures {
                return;
            }
            match catch_unwind(AssertUnwindSafe(|| run(seed, false))) {
                Ok(counted) => {
                    for (total, count) in totals.iter().zip(counted) {
                        total.fetch_add(count, Ordering::Relaxed);
                    }
                }
                Err(panic) => {
                    let text = panic.downcast_ref::<String>().cloned();
                    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
                    let mut failed = failed.lock().expect("no one panics with it");
                    failed.push((seed, text.unwrap_or_else(|| "a panic without words".into())));
                }
            }
        }
    };
    let quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        (0..threads).for_each(|_| drop(scope.spawn(work)));
    });
    std::panic::set_hook(quiet);
    let mut failed = failed.into_inner().expect("no one panics with it");
    failed.sort_unstable();
    for (seed, why) in &failed {
        println!("seed {seed}: {why}");
        println!("  GRADFS_SIM_SEED={seed} cargo test -p ps-backend --test simulator -- --nocapture");
    }
    assert!(failed.is_empty(), "{} of {seeds} seeds failed", failed.len());
    let totals = totals.map(AtomicU64::into_inner);
    say(&format!("{seeds} seeds"), &totals);
    for ((what, _, runs), count) in COUNTED.iter().zip(totals) {
        assert!(
            count >= least(seeds, *runs),
            "{count} {what} in {seeds} runs: more of them have more (GRADFS_SIM_SEEDS)"
        );
    }
}
