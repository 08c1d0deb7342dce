//! The goodput of jobs of a thousand learners, of which some are slow and some die: what `docs/use/performance.md` says of
//! `grace`, for some seeds.

#[path = "../examples/goodput/world.rs"]
mod world;

use world::{Outcome, Settings, run};

fn outcome(consistency: &str, seed: u64, contributions: u32) -> Outcome {
    let consistency = consistency.to_owned();
    run(Settings { seed, learners: 1000, consistency, contributions, deaths: 3.0, overlaps: true })
}

#[test]
fn with_grace_most_of_the_computing_time_counts() {
    for seed in [1, 2, 3] {
        let grace = outcome("grace(800, 0.1)", seed, 25);
        assert!(grace.goodput >= 0.88, "seed {seed}: {grace:?}");
        assert!(grace.deaths > 25 && grace.contributions >= 800 * grace.versions, "seed {seed}: {grace:?}");
    }
}

#[test]
fn with_sync_little_of_it_does() {
    let sync = outcome("sync", 1, 25);
    assert!(sync.goodput < 0.4 && sync.versions > 0, "{sync:?}");
}

#[test]
fn a_run_is_a_function_of_its_seed() {
    let [one, again, other] = [1, 1, 2].map(|seed| outcome("grace(800, 0.1)", seed, 5));
    assert_eq!(one, again);
    assert_ne!(one, other);
}
