//! Blocks that move to other shards while a job runs. Clients connect anew here, under the new block map; one that
//! speaks by hand does what a client does that lives through it.

#![allow(clippy::single_range_in_vec_init)] // Lists of ranges of blocks.

use std::io::Write;
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::registry::Registry;
use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::coding::Form;
use libmodelio::vocabulary::ids::{ClientId, Epoch, Generation, ShardId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::{Message, ModelRecord, Moved, Refusal, Role, frame};

use crate::raw::{Raw, committed};
use crate::world::{LONG, Learner, Way, World, is_all, server, until};

const TCP: Way = Way::Tcp(Choice::Auto);
const BYTES: u64 = 1_500_004;

impl World {
    pub fn address_of(&self, shard: ShardId) -> String {
        self.shards().into_iter().find(|record| record.shard == shard).unwrap().address
    }

    fn newest_record(&self) -> ModelRecord {
        self.registry.model("m", Instant::now() + LONG).unwrap()
    }

    /// Asks the coordinator to move the model off a shard.
    fn move_off(&self, off: ShardId, within: Duration) -> Result<(), Refusal> {
        self.registry.drain(off, Instant::now() + LONG).unwrap();
        let record = self.newest_record();
        let mut coordinator =
            AdminPeer::connect(&self.address_of(record.coordinator), Instant::now() + LONG).unwrap();
        let (model, generation) = ("m".to_owned(), record.generation);
        let message =
            Message::Move { model, generation, off, timeout_ms: within.as_millis() as u32, hold_ms: 0 };
        match coordinator.request(&message, &[], Instant::now() + 3 * LONG) {
            Ok((Message::Done, _)) => Ok(()),
            Err(AdminError::Refusal(refusal)) => Err(refusal),
            other => panic!("{other:?}"),
        }
    }

    /// Clients that connect from now on find the model where it is.
    fn look_again(&mut self) {
        self.record = self.newest_record();
    }
}

fn not_the_coordinator(record: &ModelRecord) -> ShardId {
    record.owners.iter().map(|(owner, _)| *owner).find(|owner| *owner != record.coordinator).unwrap()
}

fn lives_through(coordinator_moves: bool) {
    let settings = [("reducer", "sum"), ("learners", "2"), ("deterministic", "true")];
    let mut world = World::new(3, BYTES, &settings, TCP);
    let before = world.record.clone();
    let off = if coordinator_moves { before.coordinator } else { not_the_coordinator(&before) };
    let client = ClientId(77);
    let mut control = Raw::greet(&world.address_of(before.coordinator), Role::Control, &before, client);
    assert!(matches!(control.receive().0.message, Message::Welcome { .. }));
    let mut data = Raw::greet(&world.address_of(off), Role::Data, &before, client);
    assert!(matches!(data.receive().0.message, Message::Welcome { .. }));
    let joined = control.ask(1, &Message::Join { name: "by-hand".into() });
    let Message::Joined { learner, .. } = joined else { panic!("{joined:?}") };
    // Its commit waits for a learner that is still to come.
    control.ask(2, &Message::Open { learner });
    let commit = committed(learner, 1, 1);
    control.say(3, &commit);
    assert_eq!(
        control.ask(4, &Message::SetControl { name: "carry".into(), value: "1".into() }),
        Message::Done
    );
    let reader = world.client();
    world.move_off(off, LONG).unwrap();
    world.look_again();
    reader.shut_down();
    // All connections are told, unasked.
    control.is_moved(&world.record);
    data.is_moved(&world.record);
    // So is whoever comes with the old map; who claims to coordinate by it is refused.
    for role in [Role::Control, Role::Data] {
        Raw::greet(&world.address_of(before.coordinator), role, &before, client).is_moved(&world.record);
    }
    Raw::greet(&world.address_of(off), Role::Data, &before, client).is_moved(&world.record);
    let refused =
        Raw::greet(&world.address_of(off), Role::Coordinator, &before, ClientId(0)).receive().0.message;
    assert_eq!(refused, Message::Refused(Refusal::Epoch { expected: Epoch(2), got: Epoch(1) }));
    // The client goes on with its learner and its requests.
    let mut control =
        Raw::greet(&world.address_of(world.record.coordinator), Role::Control, &world.record, client);
    assert!(matches!(control.receive().0.message, Message::Welcome { .. }));
    assert_eq!(control.ask(1, &Message::Join { name: "by-hand".into() }), joined, "it was carried out");
    control.say(3, &commit);
    let other = world.client();
    let late = Learner::join(&other, "late");
    let late_answer = late.push(1.0);
    // The plan has both; it is sent what it asks for.
    let plan = loop {
        if let Message::Grant { plan, .. } = control.receive().0.message {
            break plan;
        }
    };
    let owner = world.record.block_map().unwrap().owners()[0];
    let mut data = Raw::greet(&world.address_of(owner), Role::Data, &world.record, client);
    assert!(matches!(data.receive().0.message, Message::Welcome { .. }));
    let block = 2.0f32.to_le_bytes().repeat((64 << 10) / 4);
    let push = Message::Push {
        plan,
        block: libmodelio::vocabulary::ids::BlockId(0),
        form: Form::Plain,
        ahead: false,
    };
    data.stream.write_all(&frame(&push, 0, world.record.epoch, &block).unwrap()).unwrap();
    data.stream.write_all(&block).unwrap();
    assert_eq!(control.answer(3), Message::Done);
    assert_eq!(late_answer.recv_timeout(LONG).unwrap(), Ok(Message::Done));
    let (version, weights) = late.pull();
    assert_eq!(version, Version(1));
    is_all(&weights[..16 << 10], 3.0);
    is_all(&weights[16 << 10..], 1.0);
}

#[test]
fn a_client_goes_on_with_its_learners_and_requests_after_a_move() {
    lives_through(false);
}

#[test]
fn a_client_goes_on_with_its_learners_and_requests_under_another_coordinator() {
    lives_through(true);
}

#[test]
fn a_model_that_has_moved_is_deleted_wherever_it_is() {
    let mut world = World::new(2, BYTES, &[("reducer", "sum"), ("learners", "2")], TCP);
    let first = world.servers[0].address().to_string();
    world.servers.push(server(Some(first.clone()), world.io));
    let before = world.record.clone();
    let off = not_the_coordinator(&before);
    world.move_off(off, LONG).unwrap();
    // As one who has looked before it moved, and deletes now.
    let registry = &world.registry;
    registry.delete("m", before.generation, Instant::now() + LONG).unwrap();
    assert!(ps_backend::create::forget(&before, &world.shards()).is_empty());
    for server in &world.servers {
        assert_eq!(server.status()["models"], serde_json::json!([]), "shard {}", server.shard());
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let world = World::new(2, BYTES, &[("reducer", "sum")], TCP);
    let record = &world.record;
    let other = not_the_coordinator(record);
    let mut peer = AdminPeer::connect(&world.address_of(other), Instant::now() + LONG).unwrap();
    let mut refused = |message: Message, payload: &[u8]| match peer
        .request(&message, payload, Instant::now() + LONG)
        .unwrap_err()
    {
        AdminError::Refusal(refusal) => refusal.to_string(),
        error => panic!("{error}"),
    };
    let generation = record.generation;
    let moves = |generation| Message::Move {
        model: "m".into(),
        generation,
        off: other,
        timeout_ms: 1000,
        hold_ms: 0,
    };
    assert!(refused(moves(generation), &[]).contains("does not coordinate"));
    assert!(refused(moves(Generation(1)), &[]).contains("generation"));
    assert!(refused(Message::Prepare { attempt: 1, off: other }, b"nothing").contains("record"));
    assert!(refused(Message::Switch, b"nothing").contains("record"));
    let fill = Message::Fill { generation, attempt: 1, version: Version(0), reducer: Reducer::Sum };
    assert!(refused(fill, &[]).contains("does not take part"));
    // A map that nobody has prepared does not come into force.
    let map = record.block_map().unwrap().without(record.coordinator, &[other]).unwrap();
    let after = record.moved(&map, other).unwrap();
    let switch = Moved { record: after, shards: world.shards() }.encode().unwrap();
    assert!(refused(Message::Switch, &switch).contains("has no blocks"));
    let block = world.record.block_map().unwrap().blocks_of(other).next().unwrap();
    let fetch = |epoch, version, block| {
        let what = libmodelio::wire::DataKind::Weights;
        Message::Fetch { generation, epoch: Epoch(epoch), version: Version(version), block, what }
    };
    assert!(refused(fetch(2, 0, block), &[]).contains("block map"));
    assert!(refused(fetch(1, 7, block), &[]).contains("version 7 is not here"));
    let theirs = world.record.block_map().unwrap().blocks_of(record.coordinator).next().unwrap();
    assert!(refused(fetch(1, 0, theirs), &[]).contains("not one of this shard's"));
    let (answer, bytes) = peer.request(&fetch(1, 0, block), &[], Instant::now() + LONG).unwrap();
    assert_eq!((answer, bytes.len()), (Message::Fetched, 64 << 10));
}

#[test]
fn an_order_to_switch_that_the_registry_does_not_know_of_changes_nothing() {
    let layout = ModelLayout::blank(BYTES, DType::F32, 64 << 10).unwrap();
    let world = World::of(2, &layout, &[("reducer", "sum"), ("learners", "1")], TCP);
    let (shards, coordinator) = (world.shards(), world.record.coordinator);
    let other = shards.iter().find(|shard| shard.shard != coordinator).unwrap();
    let record = ModelRecord {
        epoch: Epoch(99),
        owners: vec![(coordinator, layout.blocks())],
        ..world.record.clone()
    };
    let moved = Moved { record, shards: shards.clone() }.encode().unwrap();
    let mut peer = AdminPeer::connect(&other.address, Instant::now() + LONG).unwrap();
    match peer.request(&Message::Switch, &moved, Instant::now() + LONG) {
        Err(AdminError::Refusal(refusal)) => {
            let said = refusal.to_string();
            assert!(said.contains("the registry has block map 1 of model \"m\", not 99"), "{said}");
        }
        other => panic!("{other:?}"),
    }
    world.serves();
}

#[test]
fn blocks_under_a_map_in_force_outlive_a_later_move_that_comes_to_nothing() {
    let mut world = World::new(2, BYTES, &[("reducer", "sum")], TCP);
    let first = world.servers[0].address().to_string();
    world.servers.push(server(Some(first), world.io));
    let (old, shards) = (world.record.clone(), world.shards());
    let (off, new) = (not_the_coordinator(&old), world.servers[2].shard());
    let without = |record: &ModelRecord, off: ShardId, to: ShardId| {
        let map = record.block_map().unwrap().without(off, &[to]).unwrap();
        let coordinator = if record.coordinator == off { to } else { record.coordinator };
        record.moved(&map, coordinator).unwrap()
    };
    let moved =
        |after: &ModelRecord| Moved { record: after.clone(), shards: shards.clone() }.encode().unwrap();
    let mut peer = AdminPeer::connect(&world.address_of(new), Instant::now() + LONG).unwrap();
    let mut ask = |message: Message, payload: &[u8]| peer.request(&message, payload, Instant::now() + LONG);
    // A shard takes blocks, the registry puts the map in force, and nobody tells the shard.
    let (generation, after) = (old.generation, without(&old, off, new));
    ask(Message::Prepare { attempt: 1, off }, &moved(&after)).unwrap();
    let fill = Message::Fill { generation, attempt: 1, version: Version(0), reducer: Reducer::Sum };
    let end = Instant::now() + LONG;
    loop {
        match ask(fill.clone(), &[]).unwrap().0 {
            Message::Filled { blocks, of } if blocks == of => break,
            _ => assert!(Instant::now() < end, "its blocks do not come"),
        }
    }
    world.registry.put(&after, Some(old.epoch), Instant::now() + LONG).unwrap();
    // Under the new map another move begins, and is given up.
    let later = without(&after, after.coordinator, new);
    match ask(Message::Prepare { attempt: 2, off: after.coordinator }, &moved(&later)) {
        Err(AdminError::Refusal(refusal)) => {
            assert!(refusal.to_string().contains("has not switched to block map 2"), "{refusal}");
        }
        other => panic!("{other:?}"),
    }
    ask(Message::Abandon { generation, attempt: 2 }, &[]).unwrap();
    // Then the shard hears of the first one.
    ask(Message::Switch, &moved(&after)).unwrap();
    let block = after.block_map().unwrap().blocks_of(new).next().unwrap();
    let what = libmodelio::wire::DataKind::Weights;
    let fetch = Message::Fetch { generation, epoch: after.epoch, version: Version(0), block, what };
    assert_eq!(ask(fetch, &[]).unwrap().0, Message::Fetched);
}

#[test]
fn a_deleted_model_takes_no_memory_though_clients_are_connected() {
    let layout = ModelLayout::blank(BYTES, DType::F32, 64 << 10).unwrap();
    for way in [TCP, Way::Shm] {
        let world = World::of(2, &layout, &[("reducer", "sum"), ("learners", "1")], way);
        let client = world.client();
        world.registry.delete("m", world.record.generation, Instant::now() + LONG).unwrap();
        for shard in world.shards() {
            let mut peer = AdminPeer::connect(&shard.address, Instant::now() + LONG).unwrap();
            let delete = Message::Delete { model: "m".into(), generation: world.record.generation };
            assert!(matches!(peer.request(&delete, &[], Instant::now() + LONG), Ok((Message::Done, _))));
        }
        // Connections for blocks hold the model's partitions.
        until("they end", || !client.shards().iter().any(|peer| peer.connected));
    }
}
