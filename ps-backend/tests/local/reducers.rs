//! What a version's numbers are: every reducer, however the bytes come.

use std::time::Instant;

use libmodelio::publisher::Publisher;
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::reducer::{Content, Reducer};

use crate::common::{
    BLOCK, Job, LONG, Learner, Reference, decode, elements, encode, floats_layout, gradient, initial_weights,
};

/// Settings under which every term of the formulas matters.
const SETTINGS: [(&str, &str); 5] = [
    ("learning_rate", "0.125"),
    ("weight_decay", "0.0625"),
    ("dampening", "0.25"),
    ("epsilon", "1e-3"),
    ("carry", "0.5"),
];

/// Contributes `seed`'s gradient in the `way`-th way, and returns what it amounts to, and of how many elements from the
/// first on tensors are written.
fn contribute(job: &Job, learner: &Learner, seed: usize, way: usize) -> (Vec<f32>, usize) {
    let data = gradient(&job.layout, seed);
    match way % 5 {
        0 => learner.contribute(&data).unwrap(),
        1 => {
            learner.write_in_pieces(&data, 10_007);
            learner.commit().unwrap();
        }
        2 => learner.commit_mapped(&data).unwrap(),
        3 => {
            // In part: a whole block, an unaligned piece over a border, and nothing else. That is of `w`.
            let (one, two) = (BLOCK as usize, 2 * BLOCK as usize);
            learner.write(0, &data[..one]).unwrap();
            learner.write(two - 1_000, &data[two - 1_000..two + 3_000]).unwrap();
            learner.commit().unwrap();
            let mut counts = vec![0; data.len()];
            counts[..one].copy_from_slice(&data[..one]);
            counts[two - 1_000..two + 3_000].copy_from_slice(&data[two - 1_000..two + 3_000]);
            return (decode(&job.layout, &counts), 40_003);
        }
        _ => {
            // Backwards, so that blocks complete late and in the wrong order.
            let mut end = data.len();
            while end > 0 {
                let start = end.saturating_sub(50_001);
                learner.write(start, &data[start..end]).unwrap();
                end = start;
            }
            learner.commit().unwrap();
        }
    }
    (decode(&job.layout, &data), job.layout.elements() as usize)
}

fn run(reducer: Reducer, consistency: &str, count: usize) {
    let number = count.to_string();
    let mut settings = vec![("reducer", reducer.name()), ("consistency", consistency), ("learners", &number)];
    settings.extend(SETTINGS);
    let job = Job::new(&settings);
    let learners: Vec<_> = (0..count).map(|i| job.join(&format!("l{i}"))).collect();
    let mut reference = Reference::new(&job.layout);
    let hyper = job.shard.controls().hyper;
    for step in 1..=4 {
        let mut contributions = Vec::new();
        let mut all_written = 0;
        for (i, learner) in learners.iter().enumerate() {
            let (contribution, written) = contribute(&job, learner, 10 * step + i, step + i);
            if consistency == "async" {
                reference.step_of(reducer, &hyper, std::slice::from_ref(&contribution), |i| i < written);
            }
            all_written = all_written.max(written);
            contributions.push(contribution);
        }
        if consistency == "sync" {
            reference.step_of(reducer, &hyper, &contributions, |i| i < all_written);
        }
        learners.iter().for_each(|learner| _ = job.wait(learner));
        let what = format!("{reducer}, {consistency}, {count} learners, step {step}");
        let weights = job.weights();
        reference.check(&job.layout, &weights, &what);
        assert!(weights[..808] == initial_weights(&job.layout)[..808], "{what}: I64 is not touched");
    }
    let versions = if consistency == "async" { 4 * count as u64 } else { 4 };
    assert_eq!(job.shard.version(), Version(versions));
}

#[test]
pub fn synchronous_reducers_match_the_reference() {
    // Layer-wise steps have factors of tensors, which the reference does not know.
    let plain = |reducer: &Reducer| reducer.content() == Content::Gradient && !reducer.is_layerwise();
    for reducer in Reducer::all().filter(plain) {
        for learners in 1..=4 {
            run(reducer, "sync", learners);
        }
    }
}

#[test]
pub fn asynchronous_reducers_match_the_reference() {
    for reducer in [Reducer::Sum, Reducer::Sgd, Reducer::Nesterov, Reducer::AdamW] {
        for learners in 1..=3 {
            run(reducer, "async", learners);
        }
    }
}

#[test]
pub fn untouched_blocks_keep_their_value_over_many_versions() {
    for reducer in ["sum", "sgd", "assign"] {
        let job = Job::new(&[("reducer", reducer), ("carry", "1")]);
        let learner = job.join("a");
        let mut expected = initial_weights(&job.layout);
        let size = expected.len();
        let target = if reducer == "assign" { 1 } else { 0 };
        for step in 0..12 {
            // One block is written, another one each time; the buffers take turns.
            let block = step % job.layout.blocks() as usize;
            let range = block * BLOCK as usize..((block + 1) * BLOCK as usize).min(size);
            let data = gradient(&job.layout, step);
            learner.write(range.start, &data[range.clone()]).unwrap();
            learner.commit().unwrap();
            if target == 1 {
                expected[range.clone()].copy_from_slice(&data[range]);
                assert!(job.weights() == expected, "{reducer}, step {step}");
            } else {
                let before = decode(&job.layout, &expected);
                let after = decode(&job.layout, &job.weights());
                let outside = elements(&job.layout).filter(|(at, ..)| !range.contains(at));
                assert!(outside.into_iter().all(|(_, i, _)| before[i] == after[i]), "{reducer}, step {step}");
                expected = job.weights();
            }
        }
    }
}

#[test]
pub fn assigned_contributions_replace_everything_accumulated_or_not() {
    for count in 1..=3 {
        for mapped in [false, true] {
            let number = count.to_string();
            let job = Job::new(&[("reducer", "assign"), ("learners", &number)]);
            let learners: Vec<_> = (0..count).map(|i| job.join(&format!("l{i}"))).collect();
            let size = job.size();
            let data = gradient(&job.layout, 7);
            for step in 0..3 {
                // Each learner brings its own blocks, and the last one the rest, too.
                let mut expected = job.weights();
                for (i, learner) in learners.iter().enumerate() {
                    let start = i * BLOCK as usize;
                    let end = if i + 1 == count { size } else { start + BLOCK as usize };
                    let data = gradient(&job.layout, 100 * step + i);
                    expected[start..end].copy_from_slice(&data[start..end]);
                    if mapped && count == 1 {
                        learner.commit_mapped(&data).unwrap();
                    } else {
                        learner.write(start, &data[start..end]).unwrap();
                        learner.commit_within(LONG).unwrap();
                    }
                }
                learners.iter().for_each(|learner| _ = job.wait(learner));
                assert!(job.weights() == expected, "{count} learners, step {step}");
            }
            if mapped && count > 1 {
                // All in a mapping: the first ones are accumulated, their bytes of every type survive that.
                for learner in &learners {
                    learner.commit_mapped(&data).unwrap();
                }
                learners.iter().for_each(|learner| _ = job.wait(learner));
                assert!(job.weights() == data, "{count} learners");
            }
        }
    }
}

#[test]
pub fn accumulated_values_stay_when_the_last_learner_writes_nothing() {
    let job = Job::new(&[("reducer", "assign"), ("learners", "2")]);
    let (a, b) = (job.join("a"), job.join("b"));
    let data = gradient(&job.layout, 3);
    a.commit_mapped(&data).unwrap();
    let tail = job.size() - 10;
    b.write(tail, &data[tail..]).unwrap();
    b.commit_within(LONG).unwrap();
    job.wait(&b);
    let last = (job.layout.blocks() as usize - 1) * BLOCK as usize;
    assert!(job.weights()[..last] == data[..last]);
}

#[test]
pub fn assigned_contributions_hold_values_of_the_highest_learner_in_any_order() {
    // 0 and 2 ship mappings, 1 writes blocks in whole and in part.
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        for highest_writes in [false, true] {
            let job = Job::new(&[("reducer", "assign"), ("learners", "3")]);
            let learners = ["a", "b", "c"].map(|name| job.join(name));
            let data = [11, 12, 13].map(|seed| gradient(&job.layout, seed));
            let block = BLOCK as usize;
            let mut expected = Vec::new();
            let written = [0..2 * block + 16, 3 * block + 8..3 * block + 16];
            let writer = if highest_writes { 2 } else { 1 };
            if highest_writes {
                expected.clone_from(&data[1]);
                written
                    .iter()
                    .for_each(|range| expected[range.clone()].copy_from_slice(&data[2][range.clone()]));
            } else {
                expected.clone_from(&data[2]);
            }
            for number in order {
                if number == writer {
                    for range in &written {
                        learners[number].write(range.start, &data[number][range.clone()]).unwrap();
                    }
                    learners[number].commit().unwrap();
                } else {
                    learners[number].commit_mapped(&data[number]).unwrap();
                }
            }
            learners.iter().for_each(|learner| _ = job.wait(learner));
            assert!(job.weights() == expected, "{order:?}, the highest writes: {highest_writes}");
        }
    }
}

#[test]
pub fn partly_written_blocks_count_zeros_or_keep_values() {
    let job = Job::new(&[("reducer", "assign")]);
    let learner = job.join("a");
    let data = gradient(&job.layout, 3);
    let mut expected = job.weights();
    for range in [8..16, 66_000..66_008, 200_000..200_016] {
        learner.write(range.start, &data[range.clone()]).unwrap();
        expected[range.clone()].copy_from_slice(&data[range]);
    }
    learner.commit_within(LONG).unwrap();
    assert!(job.weights() == expected);
}

#[test]
pub fn half_precision_accumulates_in_masters() {
    // A step of 2^-12 is lost in a bf16 weight of about 1, unless an fp32 master remembers it.
    let job = Job::new(&[("reducer", "sgd"), ("learning_rate", "0.000244140625")]);
    let learner = job.join("a");
    let ones = encode(&job.layout, 0, |_| 1.0);
    let before = decode(&job.layout, &job.weights());
    for _ in 0..64 {
        learner.contribute(&ones).unwrap();
    }
    assert!(job.weights() == encode(&job.layout, 0x5a, |i| before[i] - 1.0 / 64.0));
}

#[test]
pub fn new_weights_in_part_keep_the_rest_and_its_masters() {
    let job = Job::new(&[("reducer", "sgd"), ("learning_rate", "0.000244140625")]);
    let learner = job.join("a");
    let ones = encode(&job.layout, 0, |_| 1.0);
    for _ in 0..32 {
        learner.contribute(&ones).unwrap();
    }
    let before = job.weights();
    let publisher = Publisher::new(job.shard.clone()).unwrap_or_else(|error| panic!("{error}"));
    let data = gradient(&job.layout, 5);
    let mut expected = before.clone();
    // Over an odd byte in the bf16 part, over a border of types and of blocks.
    let ranges =
        [3..11, 65_530..65_541, 161_001..161_004, 200_001..200_003, 220_831..220_900, 260_001..260_077];
    for range in ranges.clone() {
        publisher.write(range.start as u64, &data[range.clone()]).unwrap();
        expected[range.clone()].copy_from_slice(&data[range]);
    }
    job.set("reducer", "assign");
    let (sender, receiver) = std::sync::mpsc::channel();
    publisher.commit(LONG, move |result| sender.send(result).unwrap());
    receiver.recv().unwrap().unwrap();
    assert!(job.weights() == expected);
    // The masters of unwritten bytes still have the steps that the rounded weights do not show.
    job.set("reducer", "sgd");
    for _ in 0..32 {
        learner.contribute(&ones).unwrap();
    }
    let start = decode(&job.layout, &initial_weights(&job.layout));
    let (expected, after) = (decode(&job.layout, &expected), decode(&job.layout, &job.weights()));
    for (at, i, dtype) in elements(&job.layout) {
        let size = dtype.size_bytes().unwrap();
        let written = ranges.iter().any(|range| range.start < at + size && at < range.end);
        let (from, steps) = if written { (expected[i], 32.0) } else { (start[i], 64.0) };
        let want = from - steps / 4096.0;
        if size == 1 {
            assert!((after[i] - want).abs() <= want.abs() / 7.0, "{at} {dtype}: {} {want}", after[i]);
            continue;
        }
        assert!((after[i] - want).abs() <= want.abs().max(1.0) / 250.0, "{at} {dtype}: {} {want}", after[i]);
        if !written && want.abs() < 1.0 {
            assert!((after[i] - want).abs() <= 1.0 / 500.0, "{at} {dtype}: {} {want}", after[i]);
        }
    }
}

#[test]
pub fn a_change_of_reducer_starts_from_zero_state() {
    let job = Job::new(&[("reducer", "adam"), ("learners", "2"), ("epsilon", "1e-3")]);
    let learners = [job.join("a"), job.join("b")];
    let mut reference = Reference::new(&job.layout);
    for (round, reducer) in [Reducer::Adam, Reducer::Momentum, Reducer::Adam, Reducer::Sum, Reducer::Nesterov]
        .into_iter()
        .enumerate()
    {
        job.set("reducer", reducer.name());
        reference.reset_state();
        for step in 0..3 {
            let hyper = job.shard.controls().hyper;
            let mut contributions = Vec::new();
            for (i, learner) in learners.iter().enumerate() {
                contributions.push(contribute(&job, learner, 31 * round + 7 * step + i, i).0);
            }
            reference.step(reducer, &hyper, &contributions);
            learners.iter().for_each(|learner| _ = job.wait(learner));
            reference.check(&job.layout, &job.weights(), &format!("{reducer} in round {round}, step {step}"));
        }
    }
}

#[test]
pub fn a_setting_changed_in_mid_write_takes_effect_at_the_next_version() {
    let job = Job::with(floats_layout(40_000), &[("reducer", "adam"), ("learning_rate", "0.5")]);
    let learner = job.join("a");
    let mut reference = Reference::new(&job.layout);
    let hyper = job.shard.controls().hyper;
    let data = gradient(&job.layout, 2);
    let half = BLOCK as usize;
    for step in 0..2 {
        // It is at stake: it is reduced before the setting changes.
        job.wait_for_sent(1, || learner.write(0, &data[..half]).unwrap());
        if step == 1 {
            job.set("learning_rate", "0.25");
            job.set("reducer", "sgd");
        }
        learner.write(half, &data[half..]).unwrap();
        learner.commit().unwrap();
        reference.step(Reducer::Adam, &hyper, &[decode(&job.layout, &data)]);
        reference.check(&job.layout, &job.weights(), "adam");
    }
    learner.contribute(&data).unwrap();
    reference.step(Reducer::Sgd, &job.shard.controls().hyper, &[decode(&job.layout, &data)]);
    reference.check(&job.layout, &job.weights(), "sgd");
}

#[test]
pub fn blocks_of_a_lone_learner_are_reduced_as_they_come() {
    let job = Job::with(floats_layout(40_000), &[("reducer", "adam")]);
    let learner = job.join("a");
    let (data, until) = (gradient(&job.layout, 2), Instant::now() + LONG);
    // What comes while another thread speaks with the coordinator is staged, and is reduced later.
    let mut all_came = false;
    while !all_came {
        assert!(Instant::now() < until, "no contribution was reduced as it came");
        let before = job.shard.status().blocks_on_arrival;
        learner.contribute(&data).unwrap();
        all_came = job.shard.status().blocks_on_arrival - before == u64::from(job.layout.blocks());
    }
}
