//! Clients that live through moves of their model, with learners at work.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use libmodelio::admin::AdminPeer;
use libmodelio::registry::Registry;
use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::ids::{ShardId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::wire::Message;

use crate::world::{LONG, Learner, Way, World};

/// Before which of so many steps the model moves.
pub struct Course {
    pub steps: u32,
    pub moves: [u32; 4],
}

const LONG_COURSE: Course = Course { steps: 120, moves: [10, 30, 50, 70] };
/// For emulated machines.
pub const SHORT_COURSE: Course = Course { steps: 24, moves: [4, 8, 13, 18] };

fn world(way: Way) -> World {
    let layout = ModelLayout::blank(1_000_004, DType::BF16, 64 << 10).unwrap();
    World::of(3, &layout, &[("reducer", "adam"), ("learners", "2"), ("nonfinite", "accept")], way)
}

/// Moves the model off its coordinator, or another shard, and stops that unless it has the registry. A new one comes
/// before.
fn drain(world: &mut World, coordinator: bool) {
    world.servers.push(world.another());
    let deadline = Instant::now() + LONG;
    let record = world.registry.model("m", deadline).unwrap();
    let mut owners = record.owners.iter().map(|&(owner, _)| owner);
    let off = owners.find(|owner| (*owner == record.coordinator) == coordinator).unwrap();
    world.registry.drain(off, deadline).unwrap();
    let shards = world.shards();
    let address = &shards.iter().find(|shard| shard.shard == record.coordinator).unwrap().address;
    let mut peer = AdminPeer::connect(address, deadline).unwrap();
    let model = "m".to_owned();
    let message = Message::Move { model, generation: record.generation, off, timeout_ms: 20_000, hold_ms: 0 };
    let (answer, _) = peer.request(&message, &[], Instant::now() + 2 * LONG).unwrap();
    assert_eq!(answer, Message::Done);
    let at = world.servers.iter().position(|server| server.shard() == off).unwrap();
    if at > 0 {
        drop(world.servers.remove(at));
    }
}

/// Two learners, on a client each, for `count` steps. `before` each step something happens.
fn train(world: &mut World, count: u32, mut before: impl FnMut(&mut World, u32)) -> (Version, Vec<u32>) {
    let clients = [world.client(), world.client()];
    let shares = [0.125f32, 0.5];
    let (sender, steps) = channel();
    let threads: Vec<_> = clients
        .iter()
        .map(|client| Arc::clone(client))
        .zip(["a", "b"].into_iter().zip(shares))
        .map(|(client, (name, share))| {
            let sender = sender.clone();
            std::thread::spawn(move || {
                let learner = Learner::join(&client, name);
                let mut newest = (Version(0), Vec::new());
                for step in 1..=count {
                    let answer = learner.push(share / step as f32).recv_timeout(LONG).unwrap();
                    assert_eq!(answer, Ok(Message::Done), "step {step} of {name}");
                    newest = learner.pull();
                    assert_eq!(newest.0, Version(step.into()));
                    if name == "a" {
                        sender.send(step).unwrap();
                    }
                }
                newest
            })
        })
        .collect();
    drop(sender);
    for step in steps {
        before(world, step + 1);
    }
    let results: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    let bits: Vec<Vec<u32>> =
        results.iter().map(|(_, weights)| weights.iter().map(|weight| weight.to_bits()).collect()).collect();
    assert_eq!(bits[0], bits[1]);
    let owners: Vec<ShardId> = clients[0].shards().into_iter().map(|peer| peer.shard).collect();
    let record = world.registry.model("m", Instant::now() + LONG).unwrap();
    assert_eq!(owners, record.block_map().unwrap().shares().into_keys().collect::<Vec<_>>());
    (results[0].0, bits.into_iter().next().unwrap())
}

/// The same weights, bit by bit, as if nothing had moved; every step counts once.
pub fn lived_through(way: Way, course: &Course) {
    let expected = train(&mut world(way), course.steps, |_, _| {});
    let mut moved = world(way);
    let mut times = 0;
    let got = train(&mut moved, course.steps, |world, step| {
        if course.moves.contains(&step) {
            drain(world, times % 2 == 0);
            times += 1;
        }
    });
    assert!(got == expected, "versions {} and {}, with other weights", got.0, expected.0);
    let record = moved.registry.model("m", Instant::now() + LONG).unwrap();
    assert_eq!(record.epoch.0, 1 + course.moves.len() as u64);
    assert_ne!(record.coordinator, moved.record.coordinator);
}

#[test]
fn learners_live_through_moves_of_their_model_over_tcp() {
    lived_through(Way::Tcp(Choice::Auto), &LONG_COURSE);
}

#[test]
fn learners_live_through_moves_of_their_model_in_shared_memory() {
    lived_through(Way::Shm, &LONG_COURSE);
}
