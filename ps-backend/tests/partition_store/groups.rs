//! Groups of tensors: each tensor gets the bits that it would have if all of its model were of its group.

use std::sync::Arc;

use common::{BLOCK, encode, noise};
use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::groups::{GroupId, Groups, Overrides};
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::norm::TensorFactors;
use libmodelio::vocabulary::reducer::{Content, Hyper, Reducer, Step};
use libmodelio::vocabulary::tensor_steps::TensorSteps;
use libmodelio::wire::Work;
use ps_backend::partition::store::{Home, Limits, PartitionStore, Payload};
use test_devices::one_by_one::OneByOne;

use crate::common;
use crate::driver::{bytes_of, conclude, loaded_with, partition_of};
use test_devices::homes;

const VERSIONS: usize = 4;

/// Tensors that begin and end in the middle of blocks, some of them in the block of others.
fn model(types: &[DType]) -> ModelLayout {
    let sizes = [5_003, 7, 1_001, 30_001, 3, 9_011, 500];
    let tensors = sizes.iter().zip(types.iter().cycle()).enumerate();
    let tensors = tensors.map(|(i, (&size, dtype))| (format!("t{i}"), *dtype, vec![size]));
    ModelLayout::new(tensors.collect(), BLOCK).unwrap()
}

fn models() -> [ModelLayout; 2] {
    // The sums of the first lie in its versions.
    [model(&[DType::F32]), model(&[DType::F32, DType::BF16, DType::F64, DType::E4M3, DType::F16])]
}

/// What all courses on a layout get: two contributions to each version, by the version before it.
struct Sent(Vec<[Vec<u8>; 2]>);

impl Sent {
    fn new(model: &ModelLayout, versions: usize) -> Sent {
        let pair = |version: usize| [2, 3].map(|add| encode(model, 0, |i| noise(2 * version + add, i)));
        Sent((0..versions).map(pair).collect())
    }
}

struct Course<'a> {
    store: PartitionStore,
    layout: Arc<ModelLayout>,
    version: Version,
    sent: &'a [[Vec<u8>; 2]],
}

impl<'a> Course<'a> {
    fn new(
        (model, weights): (&ModelLayout, &[u8]),
        widest: Reducer,
        home: &Home,
        sent: &'a [[Vec<u8>; 2]],
    ) -> Course<'a> {
        let partition = partition_of(model, |_| true);
        let layout = Arc::clone(partition.layout());
        let store = loaded_with(partition, widest, Limits::default(), home.clone(), weights);
        Course { store, layout, version: Version(0), sent }
    }

    /// Makes a version of two contributions. To some blocks nobody contributes anything.
    fn step(&mut self, step: &Step, groups: &Groups, tensors: &TensorSteps, fresh_state: bool) {
        self.step_with(step, groups, &TensorFactors::default(), tensors, fresh_state);
    }

    /// The same with factors of tensors.
    fn step_with(
        &mut self,
        step: &Step,
        groups: &Groups,
        factors: &TensorFactors,
        tensors: &TensorSteps,
        fresh_state: bool,
    ) {
        let step = Step { t: tensors.highest(), ..step.clone() };
        let work = Work::Reduce {
            step,
            tensors: tensors.clone(),
            groups: groups.clone(),
            factors: factors.clone(),
            fresh_state,
        };
        let job = self.store.begin(self.version, work, true).unwrap();
        let ([first, second], rest) = self.sent.split_first().unwrap();
        for block in (0..self.layout.blocks()).map(BlockId) {
            let bytes = bytes_of(&self.layout, block);
            let last = match (block.0 as usize + rest.len()) % 4 {
                0 => None,
                _ => Some(Payload::Plain(&second[bytes.clone()])),
            };
            if last.is_some() {
                assert!(job.add(block, Payload::Plain(&first[bytes])).unwrap());
            }
            assert!(job.finish(block, last).unwrap());
        }
        conclude(&self.store, &job).unwrap();
        (self.version, self.sent) = (self.version.next(), rest);
    }

    fn weights(&self) -> Vec<u8> {
        let newest = self.store.newest().unwrap();
        (0..self.layout.blocks()).flat_map(|block| newest.block(BlockId(block)).to_vec()).collect()
    }
}

fn base(reducer: Reducer) -> Step {
    let hyper = Hyper {
        learning_rate: 0.013,
        weight_decay: 0.07,
        dampening: 0.3,
        carry: 0.9,
        clip_value: 0.4,
        ..Hyper::default()
    };
    Step { reducer, hyper, contributions: 2, t: 0, ..Step::default() }
}

fn mixable() -> impl Iterator<Item = Reducer> {
    Reducer::all().filter(|reducer| reducer.content() == Content::Gradient)
}

#[test]
fn a_tensor_has_the_bits_of_a_model_of_its_group() {
    let reducers: Vec<Reducer> = mixable().collect();
    let pairs = reducers.iter().zip(reducers.iter().cycle().skip(4));
    for model in &models() {
        let (weights, sent) = (common::initial_weights(model), Sent::new(model, VERSIONS));
        let start = (model, &weights[..]);
        for (home, (&reducer, &other)) in
            homes::all().iter().flat_map(|home| pairs.clone().map(move |pair| (home, pair)))
        {
            let model_s = Overrides::default();
            let others = Overrides { reducer: Some(other), weight_decay: Some(0.02), ..model_s };
            let slow = Overrides { learning_rate_scale: Some(0.1), weight_decay: Some(0.0), ..model_s };
            let kinds = [model_s, others, slow];
            let kind_of = |tensor: usize| [1, 0, 2, 1, 2, 0, 1][tensor];
            let count = model.tensors().len();
            let groups = Groups::new((0..count).map(|tensor| kinds[kind_of(tensor)]));
            let mut mixed = Course::new(start, groups.widest(reducer), home, &sent.0);
            let mut alone = kinds.map(|of| {
                let whole = Groups::new([of]);
                let step = whole
                    .steps(&base(reducer))
                    .of_group(whole.runs().first().map_or(GroupId::MODEL, |run| run.1))
                    .clone();
                let course = Course::new(start, step.reducer, home, &sent.0);
                (step, course)
            });
            let mut steps = TensorSteps::uniform(count, 0);
            for version in 0..VERSIONS {
                // In the second one, nobody has written tensor 3.
                let mut written = FixedBitSet::with_capacity(count);
                written.insert_range(..);
                written.set(3, version != 1);
                let next = steps.next(&written);
                mixed.step(&base(reducer), &groups, &next, version == 0);
                for (step, course) in &mut alone {
                    course.step(step, &Groups::default(), &next, version == 0);
                }
                steps = steps.after(&next);
            }
            let (got, want) = (mixed.weights(), alone.map(|(_, course)| course.weights()));
            for (i, tensor) in model.tensors().iter().enumerate() {
                let bytes = tensor.bytes.start as usize..tensor.bytes.end as usize;
                let is_same = got[bytes.clone()] == want[kind_of(i)][bytes];
                assert!(is_same, "tensor {i} of {:?}, the model has {reducer}, {home:?}", kinds[kind_of(i)]);
            }
        }
    }
}

/// Beside optimizers, with what counts for gradients alone.
#[test]
fn an_averaged_tensor_is_the_mean_of_the_values() {
    use libmodelio::vocabulary::norm::Norm;
    use libmodelio::vocabulary::reducer::Aggregation;

    for model in &models() {
        let (weights, sent) = (common::initial_weights(model), Sent::new(model, 2));
        let count = model.tensors().len();
        let averaged = Overrides { reducer: Some(Reducer::Average), ..Overrides::default() };
        let is_averaged = |tensor: usize| [true, false, true, true, false, true, false][tensor];
        let of = |tensor| if is_averaged(tensor) { averaged } else { Overrides::default() };
        // Tensor 3 is in some contributions alone, which count half.
        let factors = TensorFactors::new((0..count).map(|tensor| (tensor == 3).then_some(2.0)));
        let mut all = Vec::new();
        for (home, reducer) in homes::all().iter().flat_map(|home| mixable().map(move |of| (home, of))) {
            let groups = Groups::new((0..count).map(of));
            let mut course = Course::new((model, &weights), groups.widest(reducer), home, &sent.0);
            let mut step = base(reducer);
            (step.hyper.loss_scale, step.hyper.aggregation) = (64.0, Aggregation::Sum);
            step.norm = Some(Norm::new(1e9));
            course.step_with(&step, &groups, &factors, &TensorSteps::uniform(count, 1), true);
            all.push((format!("{reducer}, {home:?}"), course.weights()));
        }
        let [first, second] = sent.0[0].each_ref().map(|sent| common::decode(model, sent));
        let before = common::decode(model, &weights);
        let (what, one) = &all[0];
        let got = common::decode(model, one);
        let mut at = 0;
        for (i, tensor) in model.tensors().iter().enumerate() {
            let bytes = tensor.bytes.start as usize..tensor.bytes.end as usize;
            let size = bytes.len() / tensor.shape.iter().product::<usize>();
            for (what, other) in all.iter().filter(|_| is_averaged(i)) {
                assert!(other[bytes.clone()] == one[bytes.clone()], "tensor {i}, {what}");
            }
            for byte in bytes.step_by(size) {
                let brings = !(byte / BLOCK as usize + 1).is_multiple_of(4);
                let mean = (first[at] + second[at]) / if i == 3 { 0.5 } else { 2.0 };
                let want = if brings { mean } else { before[at] };
                // `decode` does not read doubles.
                let counts = is_averaged(i) && tensor.dtype != DType::F64;
                let close = (got[at] - want).abs() <= want.abs() / 100.0;
                assert!(close || !counts, "tensor {i}, {what}: {} is not {want}", got[at]);
                at += 1;
            }
        }
    }
}

#[test]
fn a_tensor_with_another_reducer_begins_with_state_of_zero() {
    let model = model(&[DType::F32]);
    let sent = Sent::new(&model, 2 * VERSIONS);
    let (early, late) = sent.0.split_at(VERSIONS);
    let (weights, count) = (common::initial_weights(&model), model.tensors().len());
    let uniform = |t| TensorSteps::uniform(count, t);
    let none = Groups::default();
    for home in &homes::all() {
        for (before, after) in [
            (Reducer::Adam, Reducer::Momentum),
            (Reducer::AdamW, Reducer::Lion),
            (Reducer::Momentum, Reducer::Adam),
            (Reducer::AdaGrad, Reducer::RmsProp),
            (Reducer::Adam, Reducer::AdamW),
            (Reducer::Sgd, Reducer::AdaGrad),
        ] {
            let changes = |tensor: usize| tensor.is_multiple_of(2);
            let of = Overrides { reducer: Some(after), ..Overrides::default() };
            let groups = Groups::new((0..count).map(|i| if changes(i) { of } else { Overrides::default() }));
            let start = (&model, &weights[..]);
            let mut courses = [(); 2].map(|()| Course::new(start, before, home, &sent.0));
            for t in 1..=VERSIONS as u64 {
                courses.iter_mut().for_each(|course| course.step(&base(before), &none, &uniform(t), t == 1));
            }
            let [mut changed, mut stays] = courses;
            assert_eq!(changed.sent.len(), early.len());
            // This one begins at the weights of then with the other reducer.
            let weights = changed.weights();
            let mut anew = Course::new((&model, &weights), after, home, late);
            for t in 1..=VERSIONS as u64 {
                let later = t + VERSIONS as u64;
                let t_of = |i: usize| (1, if changes(i) { t } else { later });
                let steps = TensorSteps::from((0..count).map(t_of).collect::<Vec<_>>());
                changed.step(&base(before), &groups, &steps, false);
                stays.step(&base(before), &none, &uniform(later), false);
                anew.step(&base(after), &none, &uniform(t), t == 1);
            }
            let (got, of_stays, of_anew) = (changed.weights(), stays.weights(), anew.weights());
            for (i, tensor) in model.tensors().iter().enumerate() {
                let bytes = tensor.bytes.start as usize..tensor.bytes.end as usize;
                let want = if changes(i) { &of_anew } else { &of_stays };
                assert!(got[bytes.clone()] == want[bytes], "tensor {i}, {before} then {after}, {home:?}");
            }
        }
    }
}
