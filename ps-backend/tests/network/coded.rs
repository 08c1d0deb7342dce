//! Contributions that cross the network in a lossy form: what a form loses comes with a later contribution, and what
//! nobody has coded is refused.

use std::sync::Arc;
use std::sync::mpsc::channel;

use half::bf16;
use libmodelio::client::{Job, wait_for};
use libmodelio::contributor::{Contributor, Share};
use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::coding::{Coding, Form};
use libmodelio::vocabulary::ids::{BlockId, PlanId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::vocabulary::transport_kind::TransportKind;
use libmodelio::wire::{Message, Refusal, Role};

use crate::ahead::{commit, contributor, pull, sees};
use crate::raw::{Raw, committed};
use crate::world::{BLOCK, LONG, Way, World};

const ELEMENTS: usize = 100_001;
const TCP: Way = Way::Tcp(Choice::Auto);

const CODINGS: [&str; 5] = ["bf16", "fp16", "int8", "fp8", "topk(0.25)"];

fn world(shards: usize, settings: &[(&str, &str)], way: Way) -> World {
    let settings = [&[("reducer", "sum"), ("learners", "1")], settings].concat();
    World::new(shards, 4 * ELEMENTS as u64, &settings, way)
}

fn set(job: &Job, name: &str, value: &str) {
    let (sender, receiver) = channel();
    job.set_control(name, value, LONG, Box::new(move |result| sender.send(result).unwrap()));
    receiver.recv_timeout(2 * LONG).unwrap().unwrap();
}

/// Numbers without a pattern, as large as 2 in some places and as small as 1e-4 in others.
fn gradient(seed: u32) -> Vec<f32> {
    let number = |i: u32| {
        let mixed = (i ^ seed.wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b);
        ((mixed ^ (mixed >> 13)) % 4001) as f32 / 1000.0 - 2.0
    };
    (0..ELEMENTS as u32).map(|i| number(i) * if i % 3 == 0 { 1.0 } else { 5e-5 }).collect()
}

fn contribute(of: &Arc<Contributor>, values: &[f32]) -> Result<(), String> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    of.write(&mut Share::None, 0, &bytes, LONG).map_err(|error| error.to_string())?;
    commit(of).map_err(|error| error.to_string())
}

fn largest_difference(a: &[f64], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - f64::from(*b)).abs()).fold(0.0, f64::max)
}

#[test]
fn what_a_form_loses_comes_with_later_contributions() {
    for (shards, coding) in CODINGS.iter().enumerate().map(|(at, coding)| (1 + at % 2, coding)) {
        let world = world(shards, &[("wire", coding)], TCP);
        let job = world.client();
        assert!(job.status().shards.iter().all(|shard| shard.coding == coding.parse().ok()), "{coding}");
        let learner = contributor(&job, "l");
        let mut exact = vec![0.0; ELEMENTS];
        let mut worst: f64 = 0.0;
        for step in 0..6 {
            let values = gradient(step);
            contribute(&learner, &values).unwrap();
            exact.iter_mut().zip(&values).for_each(|(sum, value)| *sum += f64::from(*value));
            worst = worst.max(largest_difference(&exact, &pull(&job, &learner).1));
        }
        // The largest number is about 2, and no error is added to another one. What topk leaves waits for its turn.
        let bound = match *coding {
            "bf16" => 2.0 / 256.0,
            "fp16" => 2.0 / 2048.0,
            "int8" => 2.1 / 254.0,
            "fp8" => 2.1 / 16.0,
            _ => 8.0,
        };
        assert!(worst > 0.0 && worst < bound, "{coding}: {worst} off");
        assert!(job.memory().residuals >= 4 * ELEMENTS as u64, "{coding}");
        for _ in 0..24 {
            contribute(&learner, &vec![0.0; ELEMENTS]).unwrap();
        }
        let left = largest_difference(&exact, &pull(&job, &learner).1);
        assert!(left < 1e-5, "{coding}: {left} is left");
    }
}

#[test]
fn the_same_contributions_make_the_same_bits() {
    for coding in CODINGS {
        let run = || {
            let world = world(2, &[("wire", coding), ("deterministic", "true"), ("learners", "3")], TCP);
            let (one, other) = (world.client(), world.client());
            let learners = [contributor(&one, "a"), contributor(&one, "b"), contributor(&other, "c")];
            for step in 0..3 {
                std::thread::scope(|scope| {
                    for (at, learner) in (0..).zip(&learners) {
                        scope.spawn(move || contribute(learner, &gradient(10 * step + at)).unwrap());
                    }
                });
            }
            pull(&one, &learners[0])
        };
        let (first, second) = (run(), run());
        assert_eq!(first.0, Version(3));
        assert!(first == second, "{coding}");
    }
}

#[test]
fn other_types_travel_as_they_are() {
    let tensors = vec![
        ("full".to_owned(), DType::F32, vec![20_000]),
        ("double".to_owned(), DType::F64, vec![5_001]),
        ("ids".to_owned(), DType::parse("I32").unwrap(), vec![101]),
        ("brain".to_owned(), DType::BF16, vec![40_002]),
        ("fine".to_owned(), DType::E4M3, vec![90_001]),
        ("wide".to_owned(), DType::E5M2, vec![50_003]),
    ];
    let layout = ModelLayout::new(tensors, BLOCK).unwrap();
    let world = World::of(1, &layout, &[("reducer", "sum"), ("learners", "2"), ("wire", "int8")], TCP);
    let job = world.client();
    let learners = [contributor(&job, "a"), contributor(&job, "b")];
    let third = 1.0f64 / 3.0;
    let bytes = [
        1.0f32.to_le_bytes().repeat(20_000),
        third.to_le_bytes().repeat(5_001),
        7u32.to_le_bytes().repeat(101),
        bf16::from_f32(2.0).to_le_bytes().repeat(40_002),
        vec![0x40; 90_001],
        vec![0x40; 50_003],
    ]
    .concat();
    std::thread::scope(|scope| {
        for learner in &learners {
            scope.spawn(|| {
                learner.write(&mut Share::None, 0, &bytes, LONG).unwrap();
                commit(learner).unwrap();
            });
        }
    });
    let version = wait_for(LONG, |done| job.await_step(learners[0].learner(), LONG, done)).unwrap();
    assert!(job.pin(version));
    let view = job.get(version).unwrap();
    // SAFETY: it is pinned.
    let got = unsafe { view.region.memory().bytes(0..layout.size() as usize) }.to_vec();
    let expected = [
        2.0f32.to_le_bytes().repeat(20_000),
        (third + third).to_le_bytes().repeat(5_001),
        vec![0; 404],
        bf16::from_f32(4.0).to_le_bytes().repeat(40_002),
        vec![0x48; 90_001],
        vec![0x44; 50_003],
    ]
    .concat();
    assert!(got == expected);
}

#[test]
fn full_gives_the_memory_back_and_is_exact_again() {
    let world = world(1, &[("wire", "int8")], TCP);
    let job = world.client();
    let learner = contributor(&job, "l");
    contribute(&learner, &gradient(1)).unwrap();
    assert!(job.memory().residuals > 0);
    let (_, before) = pull(&job, &learner);
    set(&job, "wire", "full");
    contribute(&learner, &vec![1.0; ELEMENTS]).unwrap();
    assert_eq!(job.memory().residuals, 0);
    let (_, after) = pull(&job, &learner);
    assert!(before.iter().zip(&after).all(|(before, after)| before + 1.0 == *after));
    // Back again, nothing of before is left.
    set(&job, "wire", "topk(0.5)");
    contribute(&learner, &vec![2.0; ELEMENTS]).unwrap();
    contribute(&learner, &vec![0.0; ELEMENTS]).unwrap();
    let (_, last) = pull(&job, &learner);
    assert!(after.iter().zip(&last).all(|(before, after)| before + 2.0 == *after));
}

#[test]
fn nan_is_refused_before_it_is_coded_or_arrives_as_nan() {
    for coding in CODINGS {
        let world = world(1, &[("wire", coding)], TCP);
        let job = world.client();
        let learner = contributor(&job, "l");
        let mut bad = vec![1.0; ELEMENTS];
        bad[5] = f32::INFINITY;
        let refused = contribute(&learner, &bad).unwrap_err();
        assert!(refused.contains("NaN or Inf"), "{coding}: {refused}");
        assert!(learner.abort());
        contribute(&learner, &vec![1.0; ELEMENTS]).unwrap();
        set(&job, "nonfinite", "accept");
        contribute(&learner, &bad).unwrap();
        let (version, weights) = pull(&job, &learner);
        assert_eq!(version, Version(2));
        assert!(weights[5].is_nan(), "{coding}: {}", weights[5]);
        assert!(weights[256..].iter().all(|weight| weight.is_finite()), "{coding}");
    }
}

#[test]
fn paths_without_a_network_go_in_full_and_say_so() {
    let world = world(1, &[("wire", "int8")], Way::Shm);
    let job = world.client();
    let shard = job.status().shards.remove(0);
    assert_eq!((shard.transport, shard.coding), (TransportKind::SharedMemory, None));
    assert_eq!(shard.full_because.unwrap().to_string(), "contributions go through shared memory");
    let learner = contributor(&job, "l");
    contribute(&learner, &gradient(1)).unwrap();
    assert!(pull(&job, &learner).1 == gradient(1));
    assert_eq!(job.memory().residuals, 0);
    // A model that goes with its commits.
    let small = World::new(1, 4096, &[("reducer", "sum"), ("learners", "1"), ("wire", "topk(0.01)")], TCP);
    let job = small.client();
    let why = job.status().shards[0].full_because.unwrap().to_string();
    assert_eq!(why, "contributions to so small a model go with their commits");
    let learner = contributor(&job, "l");
    contribute(&learner, &[3.0; 1024]).unwrap();
    sees(&job, &learner, 1, 3.0);
}

/// A client that is spoken for by hand, and the plan for its committed contribution.
fn granted(world: &World, client: u64) -> (Raw, PlanId) {
    let (mut raw, learner) = Raw::joined(world, client);
    raw.say(2, &committed(learner, 1, (4 * ELEMENTS as u32).div_ceil(BLOCK)));
    let grant = raw.receive_of(|message| matches!(message, Message::Grant { .. })).0.message;
    let Message::Grant { plan, counted, .. } = grant else { unreachable!() };
    assert_eq!(counted, PlanId(0));
    (raw, plan)
}

#[test]
fn a_payload_that_nobody_has_coded_is_refused_and_counts_nowhere() {
    let world = world(1, &[], TCP);
    let (mut control, plan) = granted(&world, 7);
    let elements = BLOCK as usize / 4;
    let [int8, topk]: [Coding; 2] = ["int8", "topk(0.01)"].map(|text| text.parse().unwrap());
    let good = |coding: Coding| vec![0u8; coding.bytes(elements)];
    let with = |coding: Coding, at: usize, bytes: [u8; 4]| {
        let mut payload = good(coding);
        payload[4 * at..4 * at + 4].copy_from_slice(&bytes);
        payload
    };
    for (coding, payload, says) in [
        (int8, vec![0; elements], "payload of Push"),
        (int8, with(int8, 3, (-1.0f32).to_le_bytes()), "scale of group 3"),
        (int8, with(int8, 63, f32::INFINITY.to_le_bytes()), "scale of group 63"),
        (topk, with(topk, 1, (elements as u32).to_le_bytes()), "index 16384 of 16384 elements"),
        (topk, good(topk), "index 0 does not follow a lower one"),
    ] {
        let mut raw = Raw::welcomed(&world, Role::Data, 7);
        let push = Message::Push { plan, block: BlockId(1), form: Form::Coded(coding), ahead: false };
        raw.say_with(0, &push, &payload);
        let refusal = raw.refusal();
        assert!(refusal.to_string().contains(says), "{refusal}");
    }
    // A scale of NaN is a contribution that is not finite.
    let mut raw = Raw::welcomed(&world, Role::Data, 7);
    let push = Message::Push { plan, block: BlockId(1), form: Form::Coded(int8), ahead: false };
    raw.say_with(0, &push, &with(int8, 0, f32::NAN.to_le_bytes()));
    let refused = Message::Refused(Refusal::Shard(ShardError::NonFinite(BlockId(1))));
    assert_eq!(control.answer(2), refused);
    assert_eq!(world.client().version(), Version(0));
}

#[test]
fn values_that_replace_others_come_as_they_are() {
    let world = world(1, &[("reducer", "assign")], TCP);
    let (_control, plan) = granted(&world, 7);
    let mut raw = Raw::welcomed(&world, Role::Data, 7);
    let push = Message::Push { plan, block: BlockId(1), form: Form::Coded(Coding::Bf16), ahead: false };
    raw.say_with(0, &push, &vec![0; BLOCK as usize / 2]);
    let refusal = raw.refusal();
    assert!(refusal.to_string().contains("its values replace others"), "{refusal}");
    // The mount that knows the reducer does not code.
    let job = world.client();
    set(&job, "wire", "int8");
    let why = job.status().shards[0].full_because.unwrap().to_string();
    assert_eq!(why, "reducer assign takes values as they are");
}
