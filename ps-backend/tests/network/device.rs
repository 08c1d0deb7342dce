//! Shards whose models are on a device, alone and beside shards that have none.

use std::sync::Arc;

use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::{Message, Refusal};
use ps_backend::device::Accelerator;
use ps_backend::server::ServerOptions;

use crate::world::{BLOCK, LONG, Learner, Way, World, ask, push_all, read};
use test_devices::homes;
use test_devices::software_device::software;

const BYTES: u64 = 1_000_004;

/// A world whose shards have these devices.
fn world(devices: &[Option<&Arc<Accelerator>>], bytes: u64, settings: &[(&str, &str)]) -> World {
    let (options, transport) = Way::Tcp(Choice::Auto).options();
    let each = devices.iter().map(|device| ServerOptions { device: device.cloned(), ..options.clone() });
    let layout = ModelLayout::blank(bytes, DType::F32, BLOCK).unwrap();
    World::with_each(each.collect(), transport, &layout, settings)
}

#[test]
fn shards_with_a_device_and_without_make_the_same_bits() {
    let settings =
        [("reducer", "adamw"), ("learners", "2"), ("weight_decay", "0.01"), ("learning_rate", "0.037")];
    let weights_after = |devices: &[Option<&Arc<Accelerator>>]| {
        let world = world(devices, BYTES, &settings);
        let client = world.client();
        let learners = [Learner::join(&client, "a"), Learner::join(&client, "b")];
        let mut weights = Vec::new();
        for step in 1..=6 {
            push_all(learners.iter().zip([0.3, -1.7].map(|gradient| gradient / step as f32 + 0.1)));
            weights = learners[0].pull().1;
        }
        weights.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let without = weights_after(&[None, None]);
    assert!(without.iter().all(|&weight| weight == without[0] && weight != 0));
    for device in homes::devices() {
        for first in [None, Some(&device)] {
            assert!(weights_after(&[first, Some(&device)]) == without, "{}", device.name());
        }
    }
}

#[test]
fn a_small_model_is_computed_by_the_cpu() {
    let (device, accelerator) = software(1 << 30);
    let at_rest = device.taken();
    let world = world(&[Some(&accelerator)], 200_000, &[("reducer", "adam")]);
    let (_client, learner) = world.learner("a");
    learner.pushes(1.0);
    assert_eq!(learner.pull().0, Version(1));
    assert_eq!((device.taken(), device.launches()), (at_rest, 0));
}

#[test]
fn a_model_whose_device_fails_has_failed_and_says_so() {
    let (device, accelerator) = software(1 << 30);
    let world = world(&[Some(&accelerator)], BYTES, &[("reducer", "adam")]);
    let (client, learner) = world.learner("a");
    learner.pushes(1.0);
    let before = learner.pull();
    device.fail_after(3);
    // The contribution counts before the version is made of it, so its commit may be answered well.
    let _ = learner.push(2.0).recv_timeout(LONG).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    client.await_step(learner.id, LONG, Box::new(move |version| sender.send(version).unwrap()));
    assert!(receiver.recv_timeout(LONG).unwrap().is_err(), "its version never comes");
    let answer = ask(&client, Message::Open { learner: learner.id });
    let is_lost = |answer: &Result<Message, Refusal>| match answer {
        Err(Refusal::Shard(ShardError::Lost(why))) => why.contains("a device in software has failed"),
        _ => false,
    };
    assert!(is_lost(&answer), "{answer:?}");
    // The last version can still be read.
    assert_eq!(client.version(), Version(1));
    assert!(read(&client, Version(1)).1 == before.1);
    let status = world.servers[0].status();
    let coordinator = &status["models"][0]["coordinator"];
    assert_eq!(coordinator["state"], "failed");
    assert!(coordinator["why"].as_str().is_some_and(|why| why.contains("has failed")), "{coordinator}");
}
