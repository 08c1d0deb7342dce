//! Tensors that are written in a step, and tensors that are not.

use std::sync::Arc;

use libmodelio::bytes::kernels::Wire;
use libmodelio::contributor::{ContributeError, Contributor};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::partly::MAX_PIECES;
use libmodelio::vocabulary::shard_error::ShardError;

use test_devices::numbers;

use crate::site::{BLOCK, End, Learner, Site, Way, begin_commit, commit_mapped, outcome, write};

/// Tensors that end within blocks, some of them within the same.
fn layout() -> ModelLayout {
    let tensors = [
        ("first", DType::F32, 20_003),
        ("second", DType::F32, 17_010),
        ("tiny", DType::F32, 3),
        ("brain", DType::BF16, 30_002),
        ("more", DType::BF16, 40_000),
        ("half", DType::F16, 9_002),
    ];
    let tensors = tensors.map(|(name, dtype, len)| (name.to_owned(), dtype, vec![len]));
    ModelLayout::new(tensors.to_vec(), BLOCK as u32).unwrap()
}

fn encoded(dtype: DType, value: f32, count: usize) -> Vec<u8> {
    numbers::encode(Wire::of(dtype).unwrap(), std::iter::repeat_n(value.into(), count))
}

fn decoded(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let values = numbers::decode(Wire::of(dtype).unwrap(), bytes);
    values.into_iter().map(|value| value as f32).collect()
}

/// A learner as a mount has it.
struct Writer {
    learner: Learner,
    contributor: Arc<Contributor>,
}

impl Writer {
    fn new(end: &Arc<End>, name: &str) -> Writer {
        let learner = end.join(name);
        Writer { contributor: learner.contributor(), learner }
    }

    /// Writes `value` into the elements from `from` to `to` of a tensor.
    fn write(&self, tensor: &str, from: usize, to: usize, value: f32) {
        let layout = self.learner.end.job.layout();
        let tensor = &layout.tensors()[layout.tensor_index(tensor).unwrap()];
        let size = tensor.dtype.size_bytes().unwrap();
        let bytes = encoded(tensor.dtype, value, to - from);
        // Neither blocks nor whole ones.
        for (i, bytes) in bytes.chunks(30_000).enumerate() {
            write(&self.contributor, tensor.bytes.start as usize + from * size + i * 30_000, bytes).unwrap();
        }
    }

    fn write_all(&self, tensors: &[&str], value: f32) {
        let layout = self.learner.end.job.layout();
        for tensor in tensors {
            let len = layout.tensors()[layout.tensor_index(tensor).unwrap()].shape[0];
            self.write(tensor, 0, len, value);
        }
    }

    fn commit(&self) {
        commit(std::slice::from_ref(self));
    }

    /// The bytes of a tensor in the version with the last step.
    fn sees(&self, tensor: &str) -> Vec<u8> {
        self.learner.pull();
        let (_, bytes) = self.learner.end.bytes();
        let layout = self.learner.end.job.layout();
        let tensor = &layout.tensors()[layout.tensor_index(tensor).unwrap()];
        bytes[tensor.bytes.start as usize..tensor.bytes.end as usize].to_vec()
    }

    #[track_caller]
    fn sees_all_at(&self, tensor: &str, value: f32) {
        let layout = self.learner.end.job.layout();
        let dtype = layout.tensors()[layout.tensor_index(tensor).unwrap()].dtype;
        let seen = decoded(dtype, &self.sees(tensor));
        let other = seen.iter().position(|&seen| seen != value);
        assert_eq!(other.map(|at| (at, seen[at])), None, "{tensor} is not all {value}");
    }
}

/// All of them commit at once, so that nobody waits for another.
fn commit<'a>(writers: impl IntoIterator<Item = &'a Writer>) {
    let outcomes: Vec<_> = writers.into_iter().map(|writer| begin_commit(&writer.contributor)).collect();
    outcomes.iter().for_each(|one| assert_eq!(outcome(one), Ok(())));
}

const ALL: [&str; 6] = ["first", "second", "tiny", "brain", "more", "half"];

/// One learner at one end, or two at two.
fn writers(site: &Site, count: usize) -> Vec<Writer> {
    let ends = [site.end(), site.end()];
    (0..count).map(|i| Writer::new(&ends[i], ["a", "b"][i])).collect()
}

fn job(way: &Way, learners: usize, settings: &[(&str, &str)]) -> (Site, Vec<Writer>) {
    let count = learners.to_string();
    let site = way.job_of(layout(), &[&[("learners", &*count)], settings].concat());
    let writers = writers(&site, learners);
    (site, writers)
}

pub fn a_tensor_that_nobody_wrote_stays_as_it_is(way: &Way) {
    let decays = [("weight_decay", "0.5"), ("learning_rate", "0.5"), ("carry", "0.5")];
    for reducer in ["sgd", "momentum", "adam", "adamw", "sum"] {
        for learners in [1, 2] {
            let settings = [&[("reducer", reducer)][..], &decays].concat();
            let (_site, writers) = job(way, learners, &settings);
            let step = |of: &dyn Fn(&Writer, usize)| {
                writers.iter().enumerate().for_each(|(i, writer)| of(writer, i));
                commit(&writers);
            };
            step(&|writer, _| writer.write_all(&ALL, 1.0));
            let before = ALL.map(|tensor| writers[0].sees(tensor));
            // Each of them one, where there are two; over blocks that they have in common with others.
            let written = ["second", "more"];
            for _ in 0..2 {
                step(&|writer, i| {
                    let of = if learners == 2 { &written[i..=i] } else { &written[..] };
                    writer.write_all(of, 2.0);
                });
            }
            for (tensor, before) in ALL.iter().zip(&before) {
                let stays = writers[0].sees(tensor) == *before;
                assert_eq!(stays, !written.contains(tensor), "{tensor} with {reducer}, {learners} learners");
            }
            // Zeros are written, too.
            step(&|writer, _| writer.write_all(&ALL, 0.0));
            for (tensor, before) in ALL.iter().zip(&before) {
                assert_ne!(writers[0].sees(tensor), *before, "{tensor} with {reducer}, {learners} learners");
            }
        }
    }
}

pub fn adam_counts_its_steps_per_tensor(way: &Way) {
    for (reducer, learners) in [("adam", 1), ("adamw", 2), ("momentum", 2)] {
        let settings = [("reducer", reducer), ("weight_decay", "0.25"), ("dampening", "0.5")];
        // What a tensor goes through does not depend on steps in which nobody has written it.
        let run = |steps: &[&[&str]]| {
            let (_site, writers) = job(way, learners, &settings);
            for step in steps {
                writers.iter().zip([1.0, 3.0]).for_each(|(writer, value)| writer.write_all(step, value));
                commit(&writers);
            }
            ALL.map(|tensor| writers[0].sees(tensor))
        };
        let written: [&[&str]; 5] = [&ALL, &["second", "half"], &["tiny"], &["first", "second"], &ALL];
        let with_gaps = run(&written);
        for (i, tensor) in ALL.iter().enumerate() {
            let times = written.iter().filter(|step| step.contains(tensor)).count();
            let without = run(&vec![&ALL[..]; times]);
            assert!(with_gaps[i] == without[i], "{tensor} after {times} steps of {reducer}");
        }
    }
}

pub fn unwritten_parts_of_a_written_tensor_count_as_zero(way: &Way) {
    let settings = [("learning_rate", "0.5"), ("weight_decay", "0.5"), ("reducer", "sgd")];
    let (_site, writers) = job(way, 2, &settings);
    let [one, other] = &writers[..] else { unreachable!("two") };
    for writer in [one, other] {
        writer.write_all(&ALL, -8.0);
        writer.commit();
    }
    ALL.iter().for_each(|tensor| one.sees_all_at(tensor, 4.0));
    // One writes the beginning of a tensor, the other nothing of it.
    one.write("first", 0, 100, 2.0);
    other.write("more", 39_000, 40_000, 2.0);
    one.commit();
    other.commit();
    let first = decoded(DType::F32, &one.sees("first"));
    assert!(first[..100].iter().all(|&value| value == 4.0 - 0.5 * (1.0 + 2.0)), "the mean of 2 and 0");
    assert!(first[100..].iter().all(|&value| value == 4.0 - 0.5 * 2.0), "it decays");
    let more = decoded(DType::BF16, &one.sees("more"));
    assert!(
        more[..39_000].iter().all(|&value| value == 3.0) && more[39_000..].iter().all(|&value| value == 2.5)
    );
    ["second", "tiny", "brain", "half"].iter().for_each(|tensor| one.sees_all_at(tensor, 4.0));
}

pub fn a_mapping_writes_every_tensor(way: &Way) {
    let settings = [("learning_rate", "0.5"), ("weight_decay", "0.5"), ("reducer", "sgd")];
    let (_site, writers) = job(way, 1, &settings);
    let writer = &writers[0];
    writer.write_all(&ALL, -8.0);
    writer.commit();
    ALL.iter().for_each(|tensor| writer.sees_all_at(tensor, 4.0));
    // It holds zeros.
    assert_eq!(commit_mapped(&writer.contributor, &[]), Ok(()));
    ALL.iter().for_each(|tensor| writer.sees_all_at(tensor, 3.0));
}

pub fn frozen_tensors_are_never_reduced(way: &Way) {
    for learners in [1, 2] {
        let settings =
            [("learning_rate", "0.5"), ("weight_decay", "0.5"), ("reducer", "sgd"), ("frozen", "m?re\ntin*")];
        let (site, writers) = job(way, learners, &settings);
        let step = |expected: f32, expected_of_frozen: f32| {
            for writer in &writers {
                writer.write_all(&ALL, -8.0);
                writer.commit();
            }
            for tensor in ALL {
                let frozen = ["more", "tiny"].contains(&tensor);
                writers[0].sees_all_at(tensor, if frozen { expected_of_frozen } else { expected });
            }
        };
        step(4.0, 0.0);
        let end = site.end();
        let refused = end.set("frozen", "more\nnobody*").unwrap_err();
        assert!(refused.to_string().contains("\"nobody*\""), "{refused}");
        step(7.0, 0.0);
        end.set("frozen", "").unwrap();
        step(9.25, 4.0);
        // Frozen tensors are checked like all others, on every path.
        writers[0].learner.end.set("frozen", "first").unwrap();
        let layout = end.job.layout();
        let nan = f32::NAN.to_le_bytes();
        let whole = nan.repeat(BLOCK / 4);
        assert!(layout.tensors()[0].bytes.end > BLOCK as u64);
        let written = write(&writers[0].contributor, 0, &whole);
        let committed = outcome(&begin_commit(&writers[0].contributor));
        assert!(written.is_err() || committed.is_err(), "NaN in a frozen tensor");
        writers[0].contributor.abort();
    }
}

/// Deterministic numbers below `below`.
struct Draws(u64);

impl Draws {
    fn below(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below
    }
}

pub fn what_was_not_written_takes_no_part_in_assign(way: &Way) {
    let (_site, [here, there]) = way.job_of(layout(), &[("learners", "3"), ("reducer", "assign")]).two_ends();
    // Two of one end, and between them one of another.
    let writers = [Writer::new(&here, "a"), Writer::new(&there, "b"), Writer::new(&here, "c")];
    let of_model = here.job.layout();
    let mut expected = here.bytes().1;
    let mut draws = Draws(1);
    for round in 0..8 {
        let mut late = Vec::new();
        let mut values = vec![Vec::new(); writers.len()];
        for (number, writer) in writers.iter().enumerate() {
            let value = (10 * round + number + 1) as f32;
            // By tensor, so that a block is sometimes written as a whole.
            for name in ALL {
                let tensor = &of_model.tensors()[of_model.tensor_index(name).unwrap()];
                let (len, size) = (tensor.shape[0], tensor.dtype.size_bytes().unwrap());
                let ends = [0, 0].map(|_| draws.below(len + 1));
                let (from, to) = match draws.below(4) {
                    0 => (0, len),
                    1 => continue,
                    _ => (ends[0].min(ends[1]), ends[0].max(ends[1])),
                };
                // Whole blocks are sent before it is known what others write.
                if from < to && draws.below(2) == 0 {
                    writer.write(name, from, to, value);
                } else if from < to {
                    late.push((number, name, from, to, value));
                }
                let start = tensor.bytes.start as usize;
                values[number].push((start + from * size, encoded(tensor.dtype, value, to - from)));
            }
        }
        for (number, name, from, to, value) in late {
            writers[number].write(name, from, to, value);
        }
        for (at, bytes) in values.into_iter().flatten() {
            expected[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        let first = draws.below(3);
        let order = [first, (first + 1 + round % 2) % 3, (first + 2 - round % 2) % 3];
        if round % 4 < 2 {
            // The late learner finds the others added up.
            order.iter().for_each(|&number| writers[number].commit());
        } else {
            commit(order.iter().map(|&number| &writers[number]));
        }
        writers.iter().for_each(|writer| _ = writer.learner.pull());
        for end in [&here, &there] {
            let (_, bytes) = end.bytes();
            let wrong = bytes.iter().zip(&expected).position(|(seen, expected)| seen != expected);
            assert_eq!(wrong.map(|at| (at, at / BLOCK)), None, "round {round}, {order:?}");
        }
    }
}

/// Two ship mappings, and one writes a block, more than that, and less.
pub fn assigned_contributions_hold_values_of_the_highest_learner_in_any_order(way: &Way) {
    let (_site, [here, there]) = way.job(&[("learners", "3"), ("reducer", "assign")]).two_ends();
    let writers = [Writer::new(&here, "a"), Writer::new(&there, "b"), Writer::new(&here, "c")];
    let written = [0..2 * BLOCK + 16, 3 * BLOCK + 8..3 * BLOCK + 16];
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    let rounds = orders.into_iter().flat_map(|order| [(order, 1), (order, 2)]);
    for (round, (order, who_writes)) in rounds.enumerate() {
        let value = |number: usize| (10 * round + number + 1) as f32;
        let mut expected = vec![value(3 - who_writes); here.job.layout().size() as usize / 4];
        for range in written.iter().filter(|_| who_writes == 2) {
            expected[range.start / 4..range.end / 4].fill(value(2));
        }
        for number in order {
            let contributor = &writers[number].contributor;
            let bytes = value(number).to_le_bytes().repeat(expected.len());
            if number == who_writes {
                written
                    .iter()
                    .for_each(|range| write(contributor, range.start, &bytes[range.clone()]).unwrap());
                writers[number].commit();
            } else {
                assert_eq!(commit_mapped(contributor, &bytes), Ok(()));
            }
        }
        writers.iter().for_each(|writer| _ = writer.learner.pull());
        for end in [&here, &there] {
            let wrong = end.weights().1.iter().zip(&expected).position(|(seen, expected)| seen != expected);
            assert_eq!(wrong, None, "{order:?}, {who_writes} writes");
        }
    }
}

pub fn values_that_a_mount_has_not_seen_yet_stay(way: &Way) {
    let settings =
        [("consistency", "async"), ("reducer", "assign"), ("learners", "2"), ("read_own_step", "true")];
    let (_site, writers) = job(way, 2, &settings);
    // Elements of one block in turn, as fast as they go.
    for i in 0..60 {
        writers[i % 2].write("first", i, i + 1, (i + 1) as f32);
        writers[i % 2].commit();
    }
    let expected: Vec<f32> = (0..61).map(|i| if i < 60 { (i + 1) as f32 } else { 0.0 }).collect();
    // The last one's writer sees all of them.
    assert_eq!(decoded(DType::F32, &writers[1].sees("first"))[..61], expected);
}

pub fn values_in_too_many_pieces_are_refused(way: &Way) {
    let wide = ModelLayout::blank(4 * 40_000, DType::F32, BLOCK as u32).unwrap();
    let site = way.job_of(wide, &[("reducer", "assign")]);
    let writer = Writer::new(&site.end(), "a");
    let comb = |pieces: usize| {
        for i in 0..pieces {
            write(&writer.contributor, 8 * i, &3f32.to_le_bytes()).unwrap();
        }
        outcome(&begin_commit(&writer.contributor))
    };
    let refused = comb(MAX_PIECES + 1).unwrap_err();
    assert_eq!(refused, ContributeError::Shard(ShardError::Scattered(MAX_PIECES)));
    writer.contributor.abort();
    assert_eq!(comb(MAX_PIECES), Ok(()));
    writer.learner.pull();
    let (_, weights) = writer.learner.end.weights();
    let expected = |i: usize| if i.is_multiple_of(2) && i < 2 * MAX_PIECES { 3.0 } else { 0.0 };
    assert_eq!(weights.iter().enumerate().find(|(i, value)| **value != expected(*i)), None);
    // Gradients may be written in as many as they like.
    writer.learner.end.set("reducer", "sum").unwrap();
    assert_eq!(comb(MAX_PIECES + 1), Ok(()));
}
