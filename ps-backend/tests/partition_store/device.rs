//! Partitions whose state is on a device: they make what the host's make, bit by bit, and leave nothing behind.

use std::sync::Arc;

use common::floats_layout;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::reducer::{Hyper, Reducer, Step};
use libmodelio::wire::{DataKind, Work};
use ps_backend::device::{Accelerator, Arrays, DeviceError, lanes};
use ps_backend::partition::executor::{Batch, Pass, Pool};
use ps_backend::partition::store::{Home, Limits, PartitionError, PartitionStore, Payload};
use ps_backend::state_copies::StateCopies;
use test_devices::one_by_one::OneByOne;

use crate::common;
use crate::driver::{
    Source, Twin, WAYS, Way, bytes_of, conclude, loaded_with, model, partition_of, reduces_all,
};
use test_devices::homes;
use test_devices::software_device::software;

const KEPT: [DataKind; 4] = [DataKind::Weights, DataKind::Masters, DataKind::Slot(0), DataKind::Slot(1)];

fn twin_of(model: &ModelLayout, reducer: Reducer, home: Home) -> Twin {
    let hyper = Hyper {
        learning_rate: 0.013,
        weight_decay: 0.07,
        dampening: 0.3,
        carry: 0.9,
        epsilon: 1e-6,
        ..Hyper::default()
    };
    Twin::with_state(partition_of(model, |_| true), reducer, hyper, Limits::default(), home)
}

fn twin(model: &ModelLayout, reducer: Reducer, accelerator: &Arc<Accelerator>) -> Twin {
    twin_of(model, reducer, Home::Device(Arc::clone(accelerator)))
}

/// All that a store keeps.
fn kept(store: &PartitionStore) -> Vec<Vec<u8>> {
    let kept = store.keep().unwrap();
    let blocks = (0..store.partition().layout().blocks()).map(BlockId);
    blocks.flat_map(|block| KEPT.map(|what| kept.bytes(block, what).unwrap().into_owned())).collect()
}

/// The newest version.
fn weights(store: &PartitionStore) -> Vec<u8> {
    let newest = store.newest().unwrap();
    let blocks = (0..store.partition().layout().blocks()).map(BlockId);
    blocks.flat_map(|block| newest.block(block).to_vec()).collect()
}

/// Some blocks, in one of the ways.
fn source(twin: &Twin, seed: usize) -> Source {
    let blocks = twin.blocks().filter(|block| !(block.0 as usize + seed).is_multiple_of(4)).collect();
    Source { seed, way: WAYS[seed % WAYS.len()], blocks }
}

fn of_all(twin: &Twin, seed: usize) -> Source {
    Source { seed, way: Way::Plain, blocks: twin.blocks().collect() }
}

#[test]
fn a_device_makes_the_host_s_bits() {
    for accelerator in homes::devices() {
        for model in [model(), floats_layout(40_001)] {
            for reducer in Reducer::all() {
                let mut there = twin(&model, reducer, &accelerator);
                let mut here = twin_of(&model, reducer, Home::Host(StateCopies::Single));
                for step in 1..6 {
                    let sources = [source(&here, 3 * step), source(&here, 3 * step + 1)];
                    // Some sums of earlier plans, and steps without any contribution.
                    let count = [2, 1, 0, 2, 2][step - 1];
                    for twin in [&mut there, &mut here] {
                        if step % 2 == 0 {
                            twin.add(&[source(twin, 3 * step + 2)]);
                        }
                        twin.reduce(&sources[..count]);
                    }
                    let what = format!("{reducer}, step {step}, {}", accelerator.name());
                    assert!(there.check(&what) == here.check(&what), "{what}: weights");
                    assert!(kept(&there.store) == kept(&here.store), "{what}: state");
                }
            }
        }
    }
}

#[test]
fn a_partition_moves_to_a_device_and_back() {
    for accelerator in homes::devices() {
        for reducer in [Reducer::AdamW, Reducer::Nesterov, Reducer::Sgd] {
            let mut stays = twin_of(&model(), reducer, Home::Host(StateCopies::Double));
            let mut moves = twin_of(&model(), reducer, Home::Host(StateCopies::Double));
            let homes = [Home::Device(Arc::clone(&accelerator)), Home::Host(StateCopies::Single)];
            for (home, step) in homes.into_iter().zip(1..) {
                for twin in [&mut stays, &mut moves] {
                    twin.reduce(&[source(twin, 5 * step), source(twin, 5 * step + 1)]);
                }
                let there = PartitionStore::new(
                    partition_of(&model(), |_| true),
                    Reducer::Sum,
                    Limits::default(),
                    home,
                );
                let there = there.unwrap();
                there.begin_at(moves.version, reducer).unwrap();
                let state = moves.store.keep().unwrap();
                for block in moves.blocks() {
                    for what in [DataKind::Weights].into_iter().chain(there.wants(block).unwrap()) {
                        assert!(there.load_piece(block, what, &state.bytes(block, what).unwrap()).unwrap());
                    }
                }
                there.finish_loading().unwrap();
                drop(state);
                assert!(kept(&there) == kept(&moves.store), "{reducer}: on its way");
                moves.moved_to(there);
                for twin in [&mut stays, &mut moves] {
                    twin.reduce(&[source(twin, 5 * step + 2)]);
                }
                assert!(moves.check("moves") == stays.check("stays"), "{reducer}: afterwards");
            }
            assert!(kept(&moves.store) == kept(&stays.store), "{reducer}: in the end");
        }
    }
}

#[test]
fn new_weights_reach_the_device_with_the_masters_of_those_that_stay() {
    for accelerator in homes::devices() {
        let mut there = twin(&model(), Reducer::Adam, &accelerator);
        let mut here = twin_of(&model(), Reducer::Adam, Home::Host(StateCopies::Single));
        for twin in [&mut there, &mut here] {
            twin.reduce(&[source(twin, 1)]);
        }
        for step in 1..4 {
            let newest: Vec<u8> = weights(&here.store);
            let mut weights = newest.clone();
            // Half of the blocks stay as they are, and of the others some bytes.
            for (at, byte) in weights.iter_mut().enumerate().skip(700 * step) {
                if at / 40_000 % 2 == 0 && at % 11 < 4 {
                    *byte = byte.wrapping_add(1) & 0x3f;
                }
            }
            for twin in [&mut there, &mut here] {
                let job = twin.store.begin(twin.version, Work::Assign { token: 0 }, true).unwrap();
                assert!(job.is_in_place());
                for block in twin.blocks() {
                    let bytes = &weights[bytes_of(&twin.layout, block)];
                    let sent =
                        (bytes != &newest[bytes_of(&twin.layout, block)]).then_some(Payload::Plain(bytes));
                    assert!(job.finish(block, sent).unwrap());
                }
                conclude(&twin.store, &job).unwrap();
                twin.version = twin.version.next();
            }
            assert!(kept(&there.store) == kept(&here.store), "after {step} times");
            // The next step starts from them, and the scalar model does not know them.
            for twin in [&mut there, &mut here] {
                let sources = [source(twin, 100 + step)];
                let job = twin.begin_reduce(1).unwrap();
                twin.blocks().for_each(|block| twin.finish_block(&job, block, &sources));
                conclude(&twin.store, &job).unwrap();
                drop(job);
                twin.version = twin.version.next();
            }
            assert!(kept(&there.store) == kept(&here.store), "the step after {step} times");
        }
    }
}

#[test]
fn many_blocks_are_made_by_few_kernels() {
    let (device, accelerator) = software(1 << 30);
    let model = floats_layout(4_000_000);
    let mut twin = twin(&model, Reducer::Adam, &accelerator);
    let executor = Pool::start(2, Some(Arc::clone(&accelerator))).unwrap();
    let sources = [of_all(&twin, 3)];
    let job = twin.begin_reduce(1).unwrap();
    twin.blocks().for_each(|block| twin.finish_block(&job, block, &sources));
    let making = twin.store.make(&job).unwrap();
    assert!(making.is_on_device());
    // In two batches, one of them in the background.
    let blocks: Vec<BlockId> = twin.blocks().collect();
    let (first, second) = blocks.split_at(blocks.len() / 2);
    executor.make(&making, first).unwrap();
    assert!(executor.make(&making, first).is_err(), "a block is made once");
    let (sender, done) = std::sync::mpsc::channel();
    let batch = Batch {
        pass: Pass::Make(making, second.to_vec()),
        done: Box::new(move |outcome| sender.send(outcome).unwrap()),
    };
    executor.execute(batch);
    done.recv().unwrap().unwrap();
    // Each of the batches is cut into runs whose copies overlap.
    assert!((32..=34).contains(&device.launches()), "{} kernels", device.launches());
    twin.store.conclude(&job).unwrap();
    drop(job);
    twin.published(&sources);
    twin.check("in batches");
}

#[test]
fn memory_that_is_not_there_is_named() {
    let room = lanes::BYTES + (9 << 20);
    let (device, accelerator) = software(room);
    let at_rest = device.taken();
    let layout = floats_layout(1 << 20);
    let store = |reducer| {
        let home = Home::Device(Arc::clone(&accelerator));
        PartitionStore::new(partition_of(&layout, |_| true), reducer, Limits::default(), home)
    };
    // 4 MiB of weights, and twice as much of moments.
    let (needed, free) = (12 << 20, room - at_rest);
    match store(Reducer::Adam).unwrap_err() {
        PartitionError::Device(DeviceError::Room { needed: named, free: there, .. }) => {
            assert_eq!((named, there), (needed, free));
        }
        other => panic!("{other}"),
    }
    assert_eq!(device.taken(), at_rest, "nothing is left of it");
    let store = store(Reducer::Sgd).unwrap();
    assert_eq!(device.taken(), at_rest + (4 << 20));
    (0..layout.blocks()).map(BlockId).for_each(|block| {
        store.load(block, &vec![0; bytes_of(&layout, block).len()]).map(drop).unwrap();
    });
    store.finish_loading().unwrap();
    // Another reducer needs more later. That passes, once somebody makes room.
    let begin = |reducer| {
        let step = Step { reducer, contributions: 1, t: 1, ..Step::default() };
        store.begin(Version(0), reduces_all(&store, step, true), true).map(drop)
    };
    let error = begin(Reducer::Adam).unwrap_err();
    assert!(error.is_transient(), "{error}");
    let text = error.to_string();
    assert!(text.contains("4194304 bytes") && text.contains("are free"), "{text}");
    begin(Reducer::Sum).unwrap();
    assert_eq!(device.taken(), at_rest + (4 << 20), "slots that no reducer needs are given back");
    drop(store);
    assert_eq!(device.taken(), at_rest);
}

#[test]
fn a_model_that_no_device_has_room_for_is_refused_before_anything_is_taken() {
    for accelerator in homes::devices() {
        let before = accelerator.device().room().unwrap();
        let words = usize::try_from(before.total).unwrap() / 8;
        let error = Arrays::new(&accelerator, words, 2).unwrap_err();
        let needed = 12 * words as u64;
        assert!(matches!(error, DeviceError::Room { needed: named, .. } if named == needed), "{error}");
        assert!(error.to_string().contains(&format!("{needed} bytes")), "{error}");
    }
}

#[test]
fn a_device_that_fails_while_a_version_is_made_takes_the_model_with_it() {
    let layout = floats_layout(600_000);
    for lives_for in [0, 1, 2, 5] {
        let (device, accelerator) = software(1 << 30);
        let mut twin = twin(&layout, Reducer::Adam, &accelerator);
        twin.reduce(&[of_all(&twin, 1)]);
        let before = twin.check("before");
        let job = twin.begin_reduce(1).unwrap();
        let sources = [of_all(&twin, 2)];
        twin.blocks().for_each(|block| twin.finish_block(&job, block, &sources));
        device.fail_after(lives_for);
        let making = twin.store.make(&job).unwrap();
        let blocks: Vec<BlockId> = twin.blocks().collect();
        let (_, error) = making.blocks(&blocks).unwrap_err();
        assert!(error.to_string().contains("a device in software has failed"), "{error}");
        assert!(!error.is_transient());
        // Nothing of it is shown, whoever asks.
        assert!(job.early(BlockId(0)).is_none());
        let error = twin.store.conclude(&job).unwrap_err().to_string();
        assert!(error.contains("has failed"), "{error}");
        drop((job, making));
        assert_eq!(twin.store.newest().unwrap().version(), Version(1));
        assert!(twin.check("afterwards") == before);
        // Without its state it cannot go on, and no snapshot can be taken.
        assert!(matches!(twin.begin_reduce(1), Err(PartitionError::Device(_))));
        let kept = twin.store.keep().unwrap();
        assert!(matches!(kept.bytes(BlockId(0), DataKind::Slot(0)), Err(PartitionError::Device(_))));
        assert!(kept.bytes(BlockId(0), DataKind::Weights).is_ok());
    }
}

#[test]
fn a_plan_that_is_dropped_orders_no_work() {
    let (device, accelerator) = software(1 << 30);
    let mut twin = twin(&model(), Reducer::Nesterov, &accelerator);
    twin.reduce(&[of_all(&twin, 1)]);
    let (before, launches) = (kept(&twin.store), device.launches());
    for _ in 0..3 {
        let job = twin.begin_reduce(1).unwrap();
        let sources = [of_all(&twin, 9)];
        twin.blocks().for_each(|block| twin.finish_block(&job, block, &sources));
        job.give_up();
    }
    assert_eq!(device.launches(), launches);
    assert!(kept(&twin.store) == before);
    twin.reduce(&[source(&twin, 2)]);
    twin.check("the next version");
}

#[test]
fn a_model_of_f64_lies_on_a_device_at_any_multiple_of_four() {
    let tensors = vec![
        ("a".to_owned(), DType::F32, vec![20_001]),
        ("d".to_owned(), DType::F64, vec![30_003]),
        ("z".to_owned(), DType::BF16, vec![10_003]),
    ];
    let layout = ModelLayout::new(tensors, common::BLOCK).unwrap();
    for accelerator in homes::devices() {
        for reducer in Reducer::all() {
            let stores = [Home::Device(Arc::clone(&accelerator)), Home::Host(StateCopies::Single)];
            let all = stores.map(|home| {
                let pattern = |block: BlockId, seed: usize| -> Vec<u8> {
                    // Finite numbers in every type: every second byte decides about the size.
                    let byte = |at: usize| match at % 2 {
                        1 => 0x3c + ((at / 7 + seed) % 3) as u8,
                        _ => ((at + seed) * 41 % 251) as u8,
                    };
                    bytes_of(&layout, block).map(byte).collect()
                };
                let blocks = || (0..layout.blocks()).map(BlockId);
                let first: Vec<u8> = blocks().flat_map(|block| pattern(block, 0)).collect();
                let (partition, limits) = (partition_of(&layout, |_| true), Limits::default());
                let store = loaded_with(partition, reducer, limits, home, &first);
                for t in 1..4 {
                    let step = Step { reducer, contributions: 2, t, ..Step::default() };
                    let work = reduces_all(&store, step, t == 1);
                    let job = store.begin(Version(t - 1), work, false).unwrap();
                    for block in blocks() {
                        job.add(block, Payload::Plain(&pattern(block, t as usize))).unwrap();
                        job.finish(block, Some(Payload::Plain(&pattern(block, 9 * t as usize)))).unwrap();
                    }
                    conclude(&store, &job).unwrap();
                }
                kept(&store)
            });
            assert!(all[0] == all[1], "{reducer} on {}", accelerator.name());
        }
    }
}
