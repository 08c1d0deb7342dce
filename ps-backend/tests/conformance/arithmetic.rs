//! Arithmetic: narrow types are added up in full precision, and reducers compute their formulas.

use half::bf16;
use libmodelio::bytes::kernels::Wire;
use libmodelio::vocabulary::layout::{DType, ModelLayout};

use crate::site::{BLOCK, Learner, Way, done};
use test_devices::numbers;

/// fp32, narrower types and integers, in blocks that hold several of them.
fn mixed() -> ModelLayout {
    let tensors = vec![
        ("full".to_owned(), DType::F32, vec![20_003]),
        ("ids".to_owned(), DType::parse("I32").unwrap(), vec![101]),
        ("brain".to_owned(), DType::BF16, vec![30_002]),
        ("half".to_owned(), DType::F16, vec![17_010]),
        ("fine".to_owned(), DType::E4M3, vec![12_003]),
        ("wide".to_owned(), DType::E5M2, vec![7_001]),
    ];
    ModelLayout::new(tensors, BLOCK as u32).unwrap()
}

/// Bytes of the model in which each number is `value`, and each other byte `other`. Of 8 bits, numbers from 2040 on are
/// smaller by 2040.
fn bytes(layout: &ModelLayout, value: f32, other: u8) -> Vec<u8> {
    let mut all = Vec::new();
    let small = if value < 2040.0 { value } else { value - 2040.0 };
    for tensor in layout.tensors() {
        all.resize(tensor.bytes.start as usize, other);
        let count: usize = tensor.shape.iter().product();
        let Some(wire) = Wire::of(tensor.dtype) else {
            all.extend(vec![other; 4 * count]);
            continue;
        };
        let value = f64::from(if wire.size() == 1 { small } else { value });
        all.extend(numbers::encode(wire, std::iter::repeat_n(value, count)));
    }
    assert_eq!(all.len() as u64, layout.size());
    all
}

fn contribute(learner: &Learner, bytes: &[u8]) {
    let mut contribution = learner.open();
    for (block, bytes) in (0..).zip(bytes.chunks(BLOCK)) {
        contribution.offer(block, bytes).unwrap();
    }
    done(contribution.commit());
}

pub fn halves_are_added_up_in_full_precision(way: &Way) {
    let (_site, [a, b]) = way.job_of(mixed(), &[("reducer", "sum"), ("learners", "3")]).two_ends();
    let layout = a.job.layout();
    let (one, other, third) = (a.join("a"), b.join("b"), a.join("c"));
    // What a half does not have is kept all the same: fp16 has nothing between 2048 and 2050, bf16 nothing to 2064.
    // E4M3 has nothing between 8 and 9, and E5M2 nothing to 10.
    let steps = [2047.0, 0.25, 0.25, 8.0];
    let (mut sum, mut version) = (0.0, 0);
    for step in steps {
        contribute(&one, &bytes(layout, step, 0x5a));
        contribute(&other, &bytes(layout, 0.5, 0xa5));
        // A client may add up what its own learners contribute.
        contribute(&third, &bytes(layout, 0.25, 0x3c));
        sum += step + 0.75;
        version += 1;
        for learner in [&one, &other, &third] {
            assert_eq!(learner.pull(), version);
            let (_, weights) = learner.end.bytes();
            // bf16 does not have 2047 itself.
            let expected = bytes(layout, sum, 0);
            let brain = layout.tensors().iter().find(|tensor| tensor.dtype == DType::BF16).unwrap();
            let brain = brain.bytes.start as usize..brain.bytes.end as usize;
            for (i, (got, wanted)) in weights.iter().zip(&expected).enumerate() {
                assert!(got == wanted || brain.contains(&i), "byte {i} of version {version}");
            }
            let in_full = f32::from(bf16::from_f32(2047.0)) + sum - 2047.0;
            let in_full = bf16::from_f32(in_full).to_le_bytes();
            assert!(weights[brain].chunks(2).all(|weight| weight == in_full), "bf16 in version {version}");
        }
    }
    assert_eq!(sum, 2058.5);
}

pub fn reducers_compute_their_formulas(way: &Way) {
    let (_site, [a, _], [one, other]) =
        way.job(&[("reducer", "sum"), ("learners", "2"), ("learning_rate", "0.5")]).two();
    let mut version = 0;
    // Both contribute, 2 and 6 times the factor. Returns the shown value.
    let mut step = |settings: &[(&str, &str)], factor: f32, expected: f32| {
        for (name, value) in settings {
            a.set(name, value).unwrap();
        }
        // One after the other: of several values the last one counts then, as they come or by the order of learners.
        one.push(2.0 * factor);
        other.push(6.0 * factor);
        version += 1;
        for learner in [&one, &other] {
            learner.pulls(version, expected);
        }
    };
    step(&[], 1.0, 8.0);
    step(&[("carry", "0.5")], 1.0, 12.0);
    // The mean of them, and their sum.
    step(&[("reducer", "sgd")], 1.0, 10.0);
    step(&[("weight_decay", "0.5")], 1.0, 5.5);
    step(&[("weight_decay", "0"), ("aggregation", "sum")], 1.0, 1.5);
    // The first gradient counts as a whole. Then half of the buffer counts with the next one.
    step(&[("aggregation", "mean"), ("reducer", "momentum"), ("momentum", "0.5")], 1.0, -0.5);
    step(&[], 1.0, -3.5);
    step(&[("reducer", "nesterov")], 1.0, -6.5);
    step(&[], 0.5, -8.5);
    // Values instead of gradients.
    step(&[("reducer", "assign")], 1.0, 6.0);
    step(&[("reducer", "sum"), ("carry", "1")], 1.0, 14.0);
}

pub fn gradients_are_clipped_by_their_norm(way: &Way) {
    let settings = [("reducer", "sgd"), ("learners", "2"), ("learning_rate", "1"), ("clip_norm", "2")];
    let (_site, [a, _], [one, other]) = way.striped_job(&settings).two();
    let count = (a.job.layout().size() / 4) as f64;
    let mut weight = 0.0;
    // Above the limit, below it, and mapped.
    for (version, factor) in (1..).zip([1.0f32, 1e-9, 3.0, 0.25]) {
        if version == 4 {
            for (learner, value) in [(&one, 2.0 * factor), (&other, 6.0 * factor)] {
                let mut contribution = learner.open();
                (0..a.job.layout().blocks()).for_each(|block| contribution.stage_all_of(block, value));
                done(contribution.commit());
            }
        } else {
            one.push(2.0 * factor);
            other.push(6.0 * factor);
        }
        let sum = 2.0 * factor + 6.0 * factor;
        let norm = 0.5 * f64::from(sum) * count.sqrt();
        let clip = (2.0 / (norm + 1e-6)).min(1.0);
        weight -= sum * (0.5 * clip) as f32;
        for learner in [&one, &other] {
            learner.pulls(version, weight);
            let shown = learner.end.job.status().norm.unwrap().get();
            assert!((shown - norm).abs() <= 1e-12 * norm, "{shown} in version {version}, not {norm}");
        }
    }
}
