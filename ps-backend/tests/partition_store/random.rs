//! Any sequence of plans, dropped ones among them, makes what the scalar model makes.

use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::reducer::{Hyper, Reducer};
use proptest::prelude::*;
use proptest::sample::select;
use ps_backend::partition::store::Limits;

use crate::common::floats_layout;
use crate::driver::{Source, Twin, WAYS, model, partition_of};
use test_devices::homes;

/// Which blocks, by bit; which way.
type Draw = (u16, usize);

#[derive(Clone, Debug)]
struct Plan {
    sources: Vec<Draw>,
    /// Before it, the same plan is begun and dropped after so many blocks.
    dropped_after: Option<usize>,
}

#[derive(Clone, Debug)]
struct Round {
    reducer: Reducer,
    adds: Vec<Plan>,
    reduce: Plan,
}

fn plan() -> impl Strategy<Value = Plan> {
    let sources = prop::collection::vec((any::<u16>(), 0..WAYS.len()), 0..4);
    (sources, prop::option::of(0..12usize))
        .prop_map(|(sources, dropped_after)| Plan { sources, dropped_after })
}

fn round() -> impl Strategy<Value = Round> {
    let reducer = select(Reducer::all().collect::<Vec<_>>());
    (reducer, prop::collection::vec(plan(), 0..4), plan()).prop_map(|(reducer, adds, reduce)| Round {
        reducer,
        adds,
        reduce,
    })
}

fn hyper() -> impl Strategy<Value = Hyper> {
    (select(vec![0.0, 0.0625]), select(vec![0.0, 0.5, 1.0])).prop_map(|(weight_decay, carry)| Hyper {
        learning_rate: 0.125,
        dampening: 0.25,
        epsilon: 1e-3,
        weight_decay,
        carry,
        ..Hyper::default()
    })
}

/// The sources of a plan. Each has a seed of its own.
fn sources(twin: &Twin, plan: &Plan, seed: &mut usize) -> Vec<Source> {
    plan.sources
        .iter()
        .map(|&(bits, way)| {
            *seed += 1;
            let blocks = twin.blocks().filter(|block| bits >> (block.0 % 16) & 1 == 1).collect();
            Source { seed: *seed, way: WAYS[way], blocks }
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn every_history_makes_what_the_scalar_model_makes(
        mine in 1..0x400u32,
        hyper in hyper(),
        rounds in prop::collection::vec(round(), 1..5),
        home in 0..homes::all().len(),
        model in select(vec![model(), floats_layout(150_001)]),
    ) {
        let partition = partition_of(&model, |block| mine >> (block % 10) & 1 == 1 || block == 0);
        let limits = Limits { retain: 1, ..Limits::default() };
        let home = homes::all().swap_remove(home);
        let mut twin = Twin::with_state(partition, rounds[0].reducer, hyper, limits, home);
        let mut before = twin.check("loaded");
        let mut seed = 0;
        for (i, round) in rounds.iter().enumerate() {
            twin.change(round.reducer);
            for plan in &round.adds {
                let sources = sources(&twin, plan, &mut seed);
                if let Some(mut left) = plan.dropped_after {
                    let job = twin.begin_add().unwrap();
                    for (source, &block) in sources.iter().flat_map(|s| s.blocks.iter().map(move |b| (s, b))) {
                        if left > 0 {
                            source.add(&job, &twin.layout, block);
                            left -= 1;
                        }
                    }
                    job.give_up();
                }
                twin.add(&sources);
            }
            let sources = sources(&twin, &round.reduce, &mut seed);
            if let Some(left) = round.reduce.dropped_after {
                let job = twin.begin_reduce(sources.len()).unwrap();
                // With somebody else's payloads: nothing of them may be found later.
                let others: Vec<_> = sources.iter().map(|s| Source { seed: s.seed + 1_000, ..s.clone() }).collect();
                twin.blocks().take(left).for_each(|block: BlockId| twin.finish_block(&job, block, &others));
                drop(job);
                prop_assert!(twin.check("after a dropped plan") == before);
            }
            twin.reduce(&sources);
            let what = format!("round {i}: {}", round.reducer);
            let now = twin.check(&what);
            // The one before is retained.
            let old = twin.store.version(libmodelio::vocabulary::ids::Version(twin.version.0 - 1)).unwrap();
            let old: Vec<u8> = twin.blocks().flat_map(|block| old.block(block).to_vec()).collect();
            prop_assert!(old == before, "{what}: the version before has changed");
            before = now;
        }
    }
}
