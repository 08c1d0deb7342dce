//! Sums that are measured, and the step that is clipped by their norm, against f64.

use libmodelio::bytes::kernels::Wire;
use libmodelio::vocabulary::groups::Groups;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout, PartitionLayout};
use libmodelio::vocabulary::norm::{ExactSum, Norm, Quantity, Squares};
use libmodelio::vocabulary::reducer::{Aggregation, Hyper, Reducer, Step};
use libmodelio::vocabulary::tensor_steps::TensorSteps;
use libmodelio::wire::Work;
use ps_backend::partition::store::{Home, Limits, PartitionError, PartitionStore, Payload};
use test_devices::numbers;
use test_devices::one_by_one::OneByOne;

use crate::common::BLOCK;
use crate::driver::{conclude, loaded_with, partition_of};

/// Tensors of all types, the second of which is frozen, with one that is no number.
fn model() -> ModelLayout {
    let tensor =
        |name: &str, dtype: &str, count| (name.to_owned(), DType::parse(dtype).unwrap(), vec![count]);
    let tensors = vec![
        tensor("a", "F32", 50_003),
        tensor("b", "F32", 20_001),
        tensor("c", "F64", 13_007),
        tensor("d", "I64", 1_001),
        tensor("e", "BF16", 40_005),
    ];
    ModelLayout::new(tensors, BLOCK).unwrap()
}

/// Of any size, so that the order of addition makes a difference.
fn value(seed: usize, i: usize) -> f64 {
    let bits = (i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(seed * 77).rotate_left(29);
    (bits % 2001) as f64 / 1000.0 - 1.0 + ((bits >> 20) % 7) as f64
}

/// The model as contribution `seed` has it, and each value in double precision: None for what is no number.
fn contribution(layout: &ModelLayout, seed: usize) -> (Vec<u8>, Vec<Option<f64>>) {
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    for tensor in layout.tensors() {
        assert_eq!(bytes.len() as u64, tensor.bytes.start);
        let (first, count) = (values.len(), tensor.shape[0]);
        let Some(wire) = Wire::of(tensor.dtype) else {
            bytes.extend(7i64.to_le_bytes().repeat(count));
            values.extend(vec![None; count]);
            continue;
        };
        let of_tensor = numbers::encode(wire, (first..first + count).map(|i| value(seed, i)));
        values.extend(numbers::decode(wire, &of_tensor).into_iter().map(Some));
        bytes.extend(of_tensor);
    }
    (bytes, values)
}

fn store_of(partition: PartitionLayout) -> PartitionStore {
    let zeros = vec![0; partition.layout().size() as usize];
    loaded_with(partition, Reducer::Sgd, Limits::default(), Home::default(), &zeros)
}

/// Adds up three contributions under two plans, and measures: the sum of squares. `skips` has blocks that nobody sends.
fn measured(store: &PartitionStore, model: &ModelLayout, step: &Step, skips: &[u32]) -> ExactSum {
    let sent: Vec<Vec<u8>> = (1..=3).map(|seed| contribution(model, seed).0).collect();
    let locals = || (0..).map(BlockId).zip(store.partition().blocks());
    let payload = |seed: usize, block: BlockId| {
        let range = model.block_bytes(block);
        Payload::Plain(&sent[seed][range.start as usize..range.end as usize])
    };
    let is_sent = |block: &BlockId| !skips.contains(&block.0);
    let job = store.begin(Version(0), Work::Add { combine: Reducer::Sgd.combine() }, true).unwrap();
    for (local, block) in locals().filter(|(_, block)| is_sent(block)) {
        assert!(job.add(local, payload(0, *block)).unwrap());
    }
    assert!(conclude(store, &job).unwrap().is_none());
    drop(job);
    let tensors = TensorSteps::from(vec![(1, 4), (1, 0), (3, 4)]);
    let job = store.begin(Version(0), measures(step.clone(), tensors), true).unwrap();
    for (local, block) in locals() {
        if !is_sent(block) {
            assert!(job.finish(local, None).unwrap());
            continue;
        }
        assert!(job.add(local, payload(1, *block)).unwrap());
        assert!(job.finish(local, Some(payload(2, *block))).unwrap());
        assert!(matches!(job.finish(local, None), Err(PartitionError::Complete(_))), "it is measured once");
    }
    let Some(Squares::Gradient(squares)) = job.squares() else { panic!("the gradient is measured") };
    drop(conclude(store, &job).unwrap());
    squares
}

fn measures(step: Step, tensors: TensorSteps) -> Work {
    Work::Measure { step, tensors, groups: Groups::default(), quantity: Quantity::Gradient }
}

fn hyper() -> Hyper {
    Hyper { clip_norm: 3.5, learning_rate: 0.5, aggregation: Aggregation::Mean, ..Hyper::default() }
}

#[test]
fn a_clipped_step_is_that_of_f64_and_the_same_on_any_partitions() {
    let model = model();
    let step = Step { reducer: Reducer::Sgd, hyper: hyper(), contributions: 3, t: 4, ..Step::default() };
    let skips = [1];
    let parts: Vec<Vec<f64>> = (1..=3)
        .map(|seed| contribution(&model, seed).1.into_iter().map(|v| v.unwrap_or(0.0)).collect())
        .collect();
    // Where each value is, and whether it counts.
    let places: Vec<(u64, DType, bool)> = model
        .tensors()
        .iter()
        .flat_map(|of| {
            let size = of.dtype.size_bytes().unwrap() as u64;
            (0..of.shape[0] as u64).map(move |i| (of.bytes.start + i * size, of.dtype, of.name != "b"))
        })
        .collect();
    let gradient = |i: usize| {
        let (at, _, counts) = places[i];
        let skipped = skips.contains(&model.block_of(at).0);
        if counts && !skipped { parts.iter().map(|part| part[i]).sum::<f64>() / 3.0 } else { 0.0 }
    };
    let expected = (0..places.len()).map(|i| gradient(i).powi(2)).sum::<f64>().sqrt();

    let mut ends = Vec::new();
    for cut in
        [|_| 0, |block| block % 2, |block| u32::from(block > 2), |block| block % 3] as [fn(u32) -> u32; 4]
    {
        let shards: Vec<PartitionStore> = (0..3)
            .filter(|&shard| (0..model.blocks()).any(|block| cut(block) == shard))
            .map(|shard| store_of(partition_of(&model, |block| cut(block) == shard)))
            .collect();
        let mut squares = ExactSum::default();
        shards.iter().rev().for_each(|store| squares.merge(&measured(store, &model, &step, &skips)));
        let norm = step.scale() * squares.value().sqrt();
        assert!((norm - expected).abs() <= 1e-6 * expected, "{norm}, not {expected}");
        let step = Step { norm: Some(Norm::new(norm)), ..step.clone() };
        let mut weights = vec![0; model.size() as usize];
        for store in &shards {
            let tensors = TensorSteps::from(vec![(1, 4), (1, 0), (3, 4)]);
            let work = Work::Reduce {
                step: step.clone(),
                tensors,
                groups: Groups::default(),
                factors: Default::default(),
                fresh_state: false,
            };
            let job = store.begin(Version(0), work, false).unwrap();
            (0..store.partition().layout().blocks())
                .for_each(|block| assert!(job.finish(BlockId(block), None).unwrap()));
            conclude(store, &job).unwrap();
            let newest = store.newest().unwrap();
            for (local, block) in (0..).map(BlockId).zip(store.partition().blocks()) {
                let range = model.block_bytes(*block);
                weights[range.start as usize..range.end as usize].copy_from_slice(newest.block(local));
            }
        }
        ends.push((norm.to_bits(), weights));
    }
    assert!(ends.iter().all(|end| *end == ends[0]), "the partitions make a difference");
    let factor = 3.5 / (expected + 1e-6);
    assert!(factor < 0.1, "it is clipped");
    for (i, &(at, dtype, _)) in places.iter().enumerate() {
        let bytes = &ends[0].1[at as usize..][..dtype.size_bytes().unwrap()];
        let Some(wire) = Wire::of(dtype) else { continue };
        let got = numbers::decode(wire, bytes)[0];
        let error = match dtype {
            DType::F32 => 1e-5,
            DType::F64 => 1e-6,
            _ => 1.0 / 128.0,
        };
        let wanted = -0.5 * factor * gradient(i);
        assert!((got - wanted).abs() <= error * wanted.abs().max(1e-3), "element {i}: {got}, not {wanted}");
    }
}

#[test]
fn what_is_refused_is_not_measured() {
    let model = model();
    let store = store_of(partition_of(&model, |_| true));
    let step = Step { reducer: Reducer::Sgd, hyper: hyper(), contributions: 1, t: 1, ..Step::default() };
    let work = measures(step, TensorSteps::uniform(5, 1));
    let job = store.begin(Version(0), work.clone(), true).unwrap();
    let nan: Vec<u8> = f32::NAN.to_le_bytes().repeat(BLOCK as usize / 4);
    assert!(!job.finish(BlockId(0), Some(Payload::Plain(&nan))).unwrap());
    assert_eq!(job.squares(), Some(Squares::Gradient(ExactSum::default())));
    job.give_up();
    drop(job);
    // Nothing of the plan is left.
    let job = store.begin(Version(0), work, true).unwrap();
    (0..model.blocks()).for_each(|block| assert!(job.finish(BlockId(block), None).unwrap()));
    assert_eq!(job.squares(), Some(Squares::Gradient(ExactSum::default())));
}
