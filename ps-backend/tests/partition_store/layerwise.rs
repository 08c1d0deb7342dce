//! Layer-wise steps: the norms of each tensor, and the steps that they scale, against f64.

use std::sync::Arc;

use common::{BLOCK, noise};
use libmodelio::bytes::kernels::Wire;
use libmodelio::vocabulary::groups::{GroupId, Groups, Overrides, TensorReducers};
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::norm::{Quantity, Squares, TensorFactors, TensorSquares};
use libmodelio::vocabulary::reducer::{Hyper, Reducer, Step};
use libmodelio::vocabulary::tensor_steps::TensorSteps;
use libmodelio::wire::{DataKind, Work};
use ps_backend::partition::store::{Home, Limits, PartitionStore, Payload};
use ps_backend::reducers;
use test_devices::formulas::{self, Brought, Constants};
use test_devices::numbers;
use test_devices::one_by_one::OneByOne;

use crate::common;
use crate::driver::{conclude, partition_of};
use test_devices::homes;

const VERSIONS: u64 = 4;

/// Tensors that begin and end in the middle of blocks, and share some. One is frozen.
fn model() -> ModelLayout {
    let tensors = [
        ("a", DType::F64, 20_001),
        ("b", DType::F32, 40_003),
        ("frozen", DType::F32, 301),
        ("c", DType::BF16, 7_001),
        ("d", DType::F16, 50_005),
        ("e", DType::F32, 5),
    ];
    let tensors = tensors.map(|(name, dtype, count)| (name.to_owned(), dtype, vec![count]));
    ModelLayout::new(tensors.to_vec(), BLOCK).unwrap()
}

/// The model with these values, which have few bits.
fn encode(model: &ModelLayout, value: impl Fn(usize) -> f32) -> Vec<u8> {
    let (mut bytes, mut element) = (Vec::new(), 0);
    for tensor in model.tensors() {
        assert_eq!(bytes.len() as u64, tensor.bytes.start);
        let values = (element..element + tensor.shape[0]).map(|i| f64::from(value(i)));
        bytes.extend(numbers::encode(Wire::of(tensor.dtype).unwrap(), values));
        element += tensor.shape[0];
    }
    bytes
}

/// An element of a contribution.
fn sent(version: u64, which: usize, i: usize) -> f32 {
    noise(7 * version as usize + 3 * which, i) * 2.0
}

fn step(reducer: Reducer) -> Step {
    let hyper = Hyper {
        learning_rate: 0.25,
        weight_decay: 0.0625,
        dampening: 0.25,
        momentum: 0.5,
        trust_coefficient: 0.125,
        epsilon: 1e-3,
        ..Hyper::default()
    };
    Step { reducer, hyper, contributions: 2, ..Step::default() }
}

/// The shards of a model, and what its groups are.
struct Job {
    model: ModelLayout,
    groups: Groups,
    step: Step,
    shards: Vec<PartitionStore>,
}

impl Job {
    fn new(step: Step, groups: Groups, home: &Home, shard_of: fn(u32) -> u32) -> Job {
        let model = model();
        let weights = encode(&model, |i| 1.0 + noise(5, i));
        let is_any = |shard: &u32| (0..model.blocks()).any(|block| shard_of(block) == *shard);
        let store = |shard: u32| {
            let partition = partition_of(&model, |block| shard_of(block) == shard);
            let widest = groups.widest(step.reducer);
            let store = PartitionStore::new(partition, widest, Limits::default(), home.clone()).unwrap();
            for (local, block) in (0..).map(BlockId).zip(store.partition().blocks().to_vec()) {
                let range = model.block_bytes(block);
                assert!(store.load(local, &weights[range.start as usize..range.end as usize]).unwrap());
            }
            store.finish_loading().unwrap();
            store
        };
        let shards = (0..3).filter(is_any).map(store).collect();
        Job { model, groups, step, shards }
    }

    fn tensors(t: u64) -> TensorSteps {
        TensorSteps::from(vec![(2, t), (1, 0), (3, t)])
    }

    /// Does a plan on all shards. Contributions come in two plans: `sent` says which of them comes now.
    fn plan(&self, version: u64, work: &Work, sent: Option<usize>) -> Option<Squares> {
        let mut all: Option<Squares> = None;
        for store in self.shards.iter().rev() {
            let job = store.begin(Version(version), work.clone(), true).unwrap();
            for (local, block) in (0..).map(BlockId).zip(store.partition().blocks()) {
                let range = self.model.block_bytes(*block);
                let sent = sent.map(|which| self.contribution(version, which));
                // Nobody contributes anything to the second block.
                let payload = sent.as_ref().filter(|_| block.0 != 1);
                let payload =
                    payload.map(|sent| Payload::Plain(&sent[range.start as usize..range.end as usize]));
                match work {
                    Work::Add { .. } => {
                        payload.map_or((), |payload| assert!(job.add(local, payload).unwrap()))
                    }
                    _ => assert!(job.finish(local, payload).unwrap()),
                }
            }
            match (&mut all, job.squares()) {
                (Some(all), Some(squares)) => assert!(all.merge(&squares)),
                (all, squares) => *all = squares,
            }
            drop(conclude(store, &job).unwrap());
        }
        all
    }

    fn contribution(&self, version: u64, which: usize) -> Vec<u8> {
        encode(&self.model, |i| sent(version, which, i))
    }

    /// Makes the version after this one. Returns the norms of the tensors.
    fn advance(&self, version: u64) -> Vec<TensorSquares> {
        let (step, groups) = (Step { t: version + 1, ..self.step.clone() }, self.groups.clone());
        let tensors = Job::tensors(step.t);
        self.plan(version, &Work::Add { combine: step.reducer.combine() }, Some(0));
        let quantity = Quantity::Tensors;
        let measure =
            Work::Measure { step: step.clone(), tensors: tensors.clone(), groups: groups.clone(), quantity };
        let Some(Squares::Tensors(squares)) = self.plan(version, &measure, Some(1)) else { panic!() };
        let steps = groups.steps(&step);
        let mut of_tensors: Vec<GroupId> =
            groups.runs().iter().flat_map(|(count, group)| vec![*group; *count as usize]).collect();
        of_tensors.resize(squares.len(), GroupId::MODEL);
        let factors = TensorFactors::new(squares.iter().zip(of_tensors).map(|(squares, group)| {
            let step = steps.of_group(group);
            step.reducer.is_layerwise().then(|| reducers::factor(step, squares.norms()))
        }));
        let fresh_state = version == 0;
        self.plan(version, &Work::Reduce { step, tensors, groups, factors, fresh_state }, None);
        squares
    }

    /// The weights as they are kept: of 16-bit types, their masters.
    fn weights(&self) -> Vec<f64> {
        let mut all = vec![0.0; self.model.tensors().iter().map(|of| of.shape[0]).sum()];
        let mut first = 0;
        let starts: Vec<(u64, u64, usize, usize)> = self
            .model
            .tensors()
            .iter()
            .map(|of| {
                let size = of.dtype.size_bytes().unwrap();
                let start = (of.bytes.start, of.bytes.end, size, first);
                first += of.shape[0];
                start
            })
            .collect();
        for store in &self.shards {
            let kept = store.keep().unwrap();
            let layout = Arc::clone(store.partition().layout());
            for (local, block) in (0..).map(BlockId).zip(store.partition().blocks()) {
                let (weights, masters) = (
                    kept.bytes(local, DataKind::Weights).unwrap(),
                    kept.bytes(local, DataKind::Masters).unwrap(),
                );
                let (here, there) = (layout.block_bytes(local), self.model.block_bytes(*block));
                let segments = layout.segments(local);
                for segment in segments {
                    let at = there.start + segment.bytes.start - here.start;
                    let &(start, _, size, element) =
                        starts.iter().find(|(start, end, ..)| (*start..*end).contains(&at)).unwrap();
                    let at = element + (at - start) as usize / size;
                    let bytes = (segment.bytes.start - here.start) as usize
                        ..(segment.bytes.end - here.start) as usize;
                    let values = match segment.dtype {
                        DType::F64 => numbers::decode(Wire::F64, &weights[bytes]),
                        DType::F32 => numbers::decode(Wire::F32, &weights[bytes]),
                        _ => {
                            let word = (segment.element - segments[0].element) as usize;
                            numbers::decode(Wire::F32, &masters[4 * word..4 * word + 2 * bytes.len()])
                        }
                    };
                    all[at..at + values.len()].copy_from_slice(&values);
                }
            }
        }
        all
    }
}

/// The model in f64.
struct Reference {
    weights: Vec<f64>,
    slots: [Vec<f64>; 2],
}

impl Reference {
    /// Takes a step, after the formulas of the papers.
    fn advance(&mut self, job: &Job, version: u64, reducers: &TensorReducers) {
        let (hyper, t) = (&job.step.hyper, version + 1);
        let constants = Constants::of(hyper);
        let trust = f64::from(hyper.trust_coefficient);
        let mut at = 0;
        for (number, tensor) in job.model.tensors().iter().enumerate() {
            let range = at..at + tensor.shape[0];
            at = range.end;
            if tensor.name == "frozen" {
                continue;
            }
            let size = tensor.dtype.size_bytes().unwrap() as u64;
            let place = |i: usize| tensor.bytes.start + (i - range.start) as u64 * size;
            let gradient: Vec<f64> = range
                .clone()
                .map(|i| {
                    if job.model.block_of(place(i)).0 == 1 {
                        0.0
                    } else {
                        f64::from(sent(version, 0, i) + sent(version, 1, i)) / 2.0
                    }
                })
                .collect();
            let norm = |values: &[f64]| values.iter().map(|value| value * value).sum::<f64>().sqrt();
            let reducer = reducers.of(number).unwrap();
            let mut of = constants.clone();
            if reducer == Reducer::Momentum {
                of.decay = 0.0;
            }
            let weights = self.weights[range.clone()].to_vec();
            let stepped = |factor: f64| {
                let one = |(at, &g): (usize, &f64)| {
                    let brought = Brought { sum: g, mean: g, gradient: g, total: g, last: None };
                    let slots = [0, 1].map(|slot| self.slots[slot][range.start + at]);
                    formulas::step(reducer, &of, (t, factor), &brought, weights[at], slots)
                };
                gradient.iter().enumerate().map(one).collect::<Vec<_>>()
            };
            let (of_weights, of_gradient) = (norm(&weights), norm(&gradient));
            let factor = match reducer {
                Reducer::Lars if of_weights > 0.0 && of_gradient > 0.0 => {
                    trust * of_weights / (of_gradient + of.decay * of_weights)
                }
                Reducer::Lamb => {
                    // What a step with the factor 1 changes.
                    let direction = stepped(1.0).into_iter().zip(&weights);
                    let direction: Vec<_> = direction.map(|((new, _), w)| (w - new) / of.rate).collect();
                    let of_direction = norm(&direction);
                    if of_weights > 0.0 && of_direction > 0.0 { of_weights / of_direction } else { 1.0 }
                }
                _ => 1.0,
            };
            for (i, (new, slots)) in range.clone().zip(stepped(factor)) {
                self.weights[i] = new;
                self.slots.iter_mut().zip(slots).for_each(|(slot, value)| slot[i] = value);
            }
        }
    }
}

/// The third tensor from the end has no layer-wise reducer, like biases.
fn groups() -> Groups {
    let model = Overrides::default();
    let plain = Overrides { reducer: Some(Reducer::Momentum), weight_decay: Some(0.0), ..model };
    Groups::new([model, model, model, plain, model, model])
}

#[test]
fn a_layerwise_step_is_that_of_f64_and_the_same_on_any_partitions() {
    let cuts = [|_| 0, |block| block % 2, |block| u32::from(block > 2)] as [fn(u32) -> u32; 3];
    for (reducer, groups) in
        [(Reducer::Lars, Groups::default()), (Reducer::Lars, groups()), (Reducer::Lamb, Groups::default())]
    {
        let mut ends = Vec::new();
        for (home, cut) in homes::all().iter().flat_map(|home| cuts.map(|cut| (home, cut))) {
            let job = Job::new(step(reducer), groups.clone(), home, cut);
            let reducers = TensorReducers::new(job.model.tensors().len(), reducer, &groups);
            let weights = job.weights();
            let slots = [(); 2].map(|()| vec![0.0; weights.len()]);
            let mut reference = Reference { weights, slots };
            let mut squares = Vec::new();
            for version in 0..VERSIONS {
                squares.extend(job.advance(version));
                reference.advance(&job, version, &reducers);
            }
            let got = job.weights();
            for (i, (got, want)) in got.iter().zip(&reference.weights).enumerate() {
                let error = (got - want).abs() / want.abs().max(0.1);
                assert!(error < 2e-6, "{reducer}: element {i} is {got}, not {want}");
            }
            ends.push((got.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), squares));
        }
        assert!(
            ends.iter().all(|end| *end == ends[0]),
            "the partitions or the place of the state make a difference"
        );
    }
}
