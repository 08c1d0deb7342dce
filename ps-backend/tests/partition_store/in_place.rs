//! One copy of optimizer state: a version changes it in place, once it counts.

use std::time::Duration;

use common::{BLOCK, floats_layout};
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::reducer::{Hyper, Reducer};
use libmodelio::wire::DataKind;
use ps_backend::partition::store::{Home, Limits, PartitionError, Payload};
use ps_backend::state_copies::StateCopies;
use test_devices::one_by_one::OneByOne;

use crate::common;
use crate::driver::{Source, Twin, Way, checked, model, partition_of};
use test_devices::homes;

const FLOATS: usize = 3 * BLOCK as usize / 4;

fn twin(model: &ModelLayout, reducer: Reducer, home: &Home) -> Twin {
    let partition = partition_of(model, |_| true);
    Twin::with_state(partition, reducer, Hyper::default(), Limits::default(), home.clone())
}

fn of_all(twin: &Twin, seed: usize) -> Source {
    Source { seed, way: Way::Plain, blocks: twin.blocks().collect() }
}

fn state_of(twin: &Twin) -> Vec<Vec<u8>> {
    let kept = twin.store.keep().unwrap();
    let kinds = [DataKind::Masters, DataKind::Slot(0), DataKind::Slot(1)];
    let of = |block| kinds.map(|what| kept.bytes(block, what).unwrap().to_vec());
    twin.blocks().flat_map(of).collect()
}

#[test]
fn state_changes_in_place_only_while_nobody_reads_it() {
    for home in &homes::in_place() {
        let mut twin = twin(&model(), Reducer::Adam, home);
        twin.reduce(&[of_all(&twin, 1)]);
        let sources = [of_all(&twin, 2)];
        let job = twin.begin_reduce(1).unwrap();
        twin.blocks().for_each(|block| twin.finish_block(&job, block, &sources));
        let before = state_of(&twin);
        let kept = twin.store.keep().unwrap();
        assert!(matches!(twin.store.make(&job), Err(PartitionError::Busy)));
        assert!(matches!(twin.store.conclude(&job), Err(PartitionError::Unfinished(_))));
        // It comes after those who read the state, and before the next one.
        let store = twin.store.clone();
        let next = std::thread::spawn(move || store.keep_instead_of(Some(kept)).map(|kept| kept.version()));
        let making = loop {
            match twin.store.make(&job) {
                Ok(making) => break making,
                Err(error) => assert!(error.is_transient(), "{error}"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        twin.blocks().for_each(|block| making.block(block).unwrap());
        assert!(making.block(BlockId(0)).is_err(), "no block is made twice");
        drop(making);
        twin.store.conclude(&job).unwrap();
        drop(job);
        assert_eq!(next.join().unwrap().unwrap(), twin.version.next());
        twin.published(&sources);
        twin.check("made in place");
        assert!(state_of(&twin) != before);
    }
}

#[test]
fn contributions_are_added_up_where_the_version_will_be() {
    for home in &homes::in_place() {
        let mut twin = twin(&floats_layout(FLOATS), Reducer::Adam, home);
        for seed in [1, 3] {
            let sources = [of_all(&twin, seed), Source { way: Way::InPlace, ..of_all(&twin, seed + 1) }];
            twin.reduce(&sources);
            twin.check("two sources");
        }
        let taken = twin.store.taken();
        assert_eq!(taken.sums, 0);
        let state = match (home, twin.store.device_bytes()) {
            (Home::Host(_), None) => taken.state,
            (Home::Device(_), Some((values, slots))) => {
                assert_eq!((taken.state, values), (0, taken.versions / 2));
                slots
            }
            _ => panic!("state is elsewhere"),
        };
        assert_eq!(state, 2 * taken.versions / 2, "two slots, two versions");
        // A device has registered the memory of sums, into which it reads.
        drop(twin.store.sum_memory());
        twin.reduce(&[of_all(&twin, 5), of_all(&twin, 6)]);
        twin.check("a device's sums");
        assert!(twin.store.taken().sums > 0);
    }
}

#[test]
fn sums_of_earlier_plans_count_in_a_version_that_is_made_in_place() {
    for home in &homes::in_place() {
        for model in [model(), floats_layout(FLOATS)] {
            let mut twin = twin(&model, Reducer::Momentum, home);
            for seed in [1, 4, 7] {
                twin.add(&[of_all(&twin, seed)]);
                twin.add(&[of_all(&twin, seed + 1)]);
                let one = Source { blocks: vec![BlockId(1)], ..of_all(&twin, seed + 2) };
                twin.reduce(&[one]);
                twin.check("with earlier sums");
            }
        }
    }
}

#[test]
fn a_dropped_sum_leaves_state_and_weights_as_they_are() {
    for home in &homes::in_place() {
        for model in [model(), floats_layout(FLOATS)] {
            let mut twin = twin(&model, Reducer::Adam, home);
            twin.reduce(&[of_all(&twin, 1)]);
            let (weights, state) = (twin.check("before"), state_of(&twin));
            let job = twin.begin_reduce(1).unwrap();
            let dropped = of_all(&twin, 2);
            twin.blocks().for_each(|block| twin.finish_block(&job, block, std::slice::from_ref(&dropped)));
            job.give_up();
            assert!(matches!(twin.store.make(&job), Err(PartitionError::Over)));
            drop(job);
            assert!(twin.check("afterwards") == weights && state_of(&twin) == state);
            // Blocks that nobody sends are carried over, and not those of the dropped sum.
            twin.reduce(&[Source { blocks: vec![BlockId(0)], ..of_all(&twin, 3) }]);
            twin.check("the next version");
        }
    }
}

#[test]
fn a_block_with_nan_may_come_again() {
    for home in &homes::in_place() {
        let layout = ModelLayout::blank(u64::from(BLOCK), DType::F32, BLOCK).unwrap();
        let mut twin = twin(&layout, Reducer::Adam, home);
        let good = of_all(&twin, 1);
        let (bad, fine) =
            (f32::NAN.to_le_bytes().repeat(BLOCK as usize / 4), good.plain(&layout, BlockId(0)));
        let job = twin.begin_reduce(1).unwrap();
        assert_eq!(job.finish_all(BlockId(0), &[checked(&bad)]).unwrap(), Some(0));
        assert_eq!(job.finish_all(BlockId(0), &[checked(&fine), checked(&bad)]).unwrap(), Some(1));
        assert_eq!(job.finish_all(BlockId(0), &[checked(&fine)]).unwrap(), None);
        twin.concludes(job, &[good]);
        twin.check("without NaN");
    }
}

#[test]
fn parts_of_a_dropped_sum_of_values_do_not_limit_a_sum_of_gradients() {
    let layout = floats_layout(FLOATS);
    for single in [true, false] {
        let copies = Home::Host(if single { StateCopies::Single } else { StateCopies::Double });
        let partition = partition_of(&layout, |_| true);
        let (hyper, limits) = (Hyper::default(), Limits::default());
        let mut twin = Twin::with_state(partition, Reducer::Assign, hyper, limits, copies);
        let values = of_all(&twin, 1).plain(&layout, BlockId(0));
        let job = twin.begin_reduce(1).unwrap();
        let part = Some(&[0..64u32, 128..192][..]);
        assert!(job.add_written(BlockId(0), Payload::Plain(&values), part).unwrap());
        job.give_up();
        drop(job);
        twin.change(Reducer::Adam);
        let sources = [of_all(&twin, 2), of_all(&twin, 3)];
        let job = twin.begin_reduce(2).unwrap();
        for block in twin.blocks() {
            let all = sources.each_ref().map(|source| source.plain(&layout, block));
            let inputs = all.each_ref().map(|bytes| checked(bytes));
            assert_eq!(job.finish_all(block, &inputs).unwrap(), None);
        }
        twin.concludes(job, &sources);
        twin.check(if single { "in place" } else { "with two copies" });
    }
}
