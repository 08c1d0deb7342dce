//! Blocks that move to other shards while a job runs. Clients connect anew here, under the new block map; one that
//! speaks by hand does what a client does that lives through it.

#![allow(clippy::single_range_in_vec_init)] // Lists of ranges of blocks.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::registry::Registry;
use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::ids::{ClientId, Epoch, Generation, ShardId, Step, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::{
    Adoption, Limits, Message, ModelRecord, Moved, Protocol, Received, Receiver, Refusal, Role, frame,
};

use crate::world::{LONG, Learner, Way, World, server};

const TCP: Way = Way::Tcp(Choice::Auto);
const BYTES: u64 = 1_500_004;

fn layout() -> ModelLayout {
    let tensors = vec![
        ("h".to_owned(), DType::F16, vec![200_003]),
        ("w".to_owned(), DType::F32, vec![150_001]),
        ("i".to_owned(), DType::parse("I32").unwrap(), vec![30_001]),
        ("b".to_owned(), DType::BF16, vec![100_001]),
    ];
    ModelLayout::new(tensors, 64 << 10).unwrap()
}

fn status(address: &str) -> serde_json::Value {
    let mut peer = AdminPeer::connect(address, Instant::now() + LONG).unwrap();
    let (_, text) = peer.request(&Message::Status, &[], Instant::now() + LONG).unwrap();
    serde_json::from_slice(&text).unwrap()
}

impl World {
    pub fn address_of(&self, shard: ShardId) -> String {
        self.shards().into_iter().find(|record| record.shard == shard).unwrap().address
    }

    fn newest_record(&self) -> ModelRecord {
        self.registry.model("m", Instant::now() + LONG).unwrap()
    }

    /// Asks the lead to move the model off a shard.
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

    fn stop(&mut self, shard: ShardId) {
        let at = self.servers.iter().position(|server| server.shard() == shard).unwrap();
        drop(self.servers.remove(at));
    }
}

/// Two learners on a client each, for some steps; then they leave. The bits of the weights.
fn train(world: &World, steps: u32) -> (Version, Vec<u32>) {
    let (a, b) = (world.client(), world.client());
    let learners = [Learner::join(&a, "a"), Learner::join(&b, "b")];
    let mut newest = (Version(0), Vec::new());
    for step in 1..=steps {
        let pushed: Vec<_> = learners
            .iter()
            .zip([0.125, 0.5])
            .map(|(learner, share)| learner.push(share / step as f32))
            .collect();
        for answer in pushed {
            assert_eq!(answer.recv_timeout(LONG).unwrap(), Ok(Message::Done));
        }
        let (version, weights) = learners[0].pull();
        newest = (version, weights.iter().map(|weight| weight.to_bits()).collect());
    }
    learners.iter().for_each(Learner::leave);
    a.shut_down();
    b.shut_down();
    newest
}

/// Trains, moves the model off one of three shards, stops that, and trains on; the other world is left alone.
fn drained(way: Way, spare: bool, off: impl Fn(&ModelRecord) -> ShardId) {
    let settings = [("reducer", "adam"), ("learners", "2"), ("nonfinite", "accept")];
    let undisturbed = World::of(3, &layout(), &settings, way);
    let mut world = World::of(3, &layout(), &settings, way);
    // The registry is here, and stays.
    let registry = world.servers[0].address().to_string();
    if spare {
        world.servers.push(server(Some(registry), world.io));
    }
    assert_eq!(train(&world, 3), train(&undisturbed, 3));
    let off = off(&world.record);
    world.move_off(off, LONG).unwrap();
    let before = world.record.clone();
    world.look_again();
    assert_eq!(world.record.epoch, Epoch(2));
    assert_ne!(world.record.coordinator, off);
    let (old, new) = (before.block_map().unwrap(), world.record.block_map().unwrap());
    assert_eq!(new.blocks_of(off).count(), 0);
    assert_eq!(new.shares().len(), if spare { 3 } else { 2 });
    let moved = old.owners().iter().zip(new.owners()).filter(|(a, b)| a != b).count();
    assert_eq!(moved, old.blocks_of(off).count(), "no other block moves");
    // It holds nothing any more.
    let gone = status(&world.address_of(off));
    assert_eq!(gone["models"], serde_json::json!([]));
    assert_eq!(gone["adopting"], serde_json::json!([]));
    if off != world.servers[0].shard() {
        world.stop(off);
    }
    assert_eq!(train(&world, 3), train(&undisturbed, 3));
    // Said again, nothing happens.
    if off == world.servers[0].shard() {
        world.move_off(off, LONG).unwrap();
    }
    assert_eq!(world.newest_record().epoch, Epoch(2));
}

fn not_the_coordinator(record: &ModelRecord) -> ShardId {
    record.owners.iter().map(|(owner, _)| *owner).find(|owner| *owner != record.coordinator).unwrap()
}

#[test]
fn a_drained_shard_can_be_stopped_and_nothing_is_lost() {
    drained(TCP, false, not_the_coordinator);
    drained(Way::Shm, false, not_the_coordinator);
}

#[test]
fn another_shard_takes_the_place_of_a_drained_one() {
    drained(TCP, true, not_the_coordinator);
}

#[test]
fn a_coordinator_that_is_drained_hands_the_job_over() {
    drained(TCP, false, |record| record.coordinator);
    drained(Way::Shm, true, |record| record.coordinator);
}

#[test]
fn whoever_stays_the_same_takes_no_more_memory() {
    let world = World::new(2, BYTES, &[("reducer", "adam"), ("learners", "2")], TCP);
    let _spare = server(Some(world.servers[0].address().to_string()), world.io);
    train(&world, 2);
    let (off, stays) = (not_the_coordinator(&world.record), world.record.coordinator);
    let memory = || status(&world.address_of(stays))["models"][0]["memory_bytes"].as_u64().unwrap();
    let before = memory();
    world.move_off(off, LONG).unwrap();
    assert_eq!(memory(), before);
}

/// A connection to a shard that is spoken over by hand.
pub struct Raw {
    pub stream: TcpStream,
    receiver: Receiver,
    unread: Vec<u8>,
    epoch: Epoch,
}

impl Raw {
    pub fn greet(address: &str, role: Role, record: &ModelRecord, client: ClientId) -> Raw {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let mut receiver = Receiver::new(Limits::GREETING);
        receiver.set_limits(Limits::MAX);
        let mut raw = Raw { stream, receiver, unread: Vec::new(), epoch: record.epoch };
        let hello = Message::Hello {
            protocol: Protocol::NEWEST.number(),
            role,
            model: record.name.clone(),
            generation: record.generation,
            client,
        };
        raw.say(0, &hello);
        raw
    }

    fn say(&mut self, request: u64, message: &Message) {
        let bytes = frame(message, request, self.epoch, &[]).unwrap();
        self.stream.write_all(&bytes).unwrap();
    }

    pub fn receive(&mut self) -> (Received, Vec<u8>) {
        loop {
            let (used, received) = self.receiver.push(&self.unread).unwrap();
            self.unread.drain(..used);
            let Some(received) = received else {
                self.read();
                continue;
            };
            let len = received.header.payload_len() as usize;
            while self.unread.len() < len {
                self.read();
            }
            let payload: Vec<u8> = self.unread.drain(..len).collect();
            if len > 0 {
                self.receiver.payload_done(libmodelio::bytes::crc32c::crc32c(&payload)).unwrap();
            }
            return (received, payload);
        }
    }

    fn read(&mut self) {
        let mut bytes = [0; 4096];
        let count = loop {
            match self.stream.read(&mut bytes) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                outcome => break outcome.unwrap(),
            }
        };
        assert!(count > 0, "the connection ended");
        self.unread.extend_from_slice(&bytes[..count]);
    }

    /// The answer to a request, whatever else is said.
    fn answer(&mut self, request: u64) -> Message {
        loop {
            let (received, _) = self.receive();
            if received.header.request() == request {
                return received.message;
            }
        }
    }

    /// Says something and waits for the answer.
    fn ask(&mut self, request: u64, message: &Message) -> Message {
        self.say(request, message);
        self.answer(request)
    }

    /// It is told where the model is now, and the connection ends.
    fn is_moved(&mut self, after: &ModelRecord) {
        loop {
            let (received, payload) = self.receive();
            if received.message == Message::Moved {
                let moved = Moved::decode(&payload).unwrap();
                assert_eq!(moved.record, *after);
                assert_eq!(received.header.epoch(), after.epoch);
                assert_eq!(self.stream.read(&mut [0]).unwrap(), 0, "nothing follows");
                return;
            }
        }
    }
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
    let (blocks, tensors) = (vec![0..1], vec![0..1]);
    let commit = Message::Commit {
        learner,
        step: Step(1),
        blocks,
        tensors,
        partly: Some(Default::default()),
        timeout_ms: 20_000,
        lent: false,
        under: None,
    };
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
    let push =
        Message::Push { plan, block: libmodelio::vocabulary::ids::BlockId(0), wide: false, ahead: false };
    data.stream.write_all(&frame(&push, 0, world.record.epoch, &block).unwrap()).unwrap();
    data.stream.write_all(&block).unwrap();
    assert_eq!(control.answer(3), Message::Done);
    assert_eq!(late_answer.recv_timeout(LONG).unwrap(), Ok(Message::Done));
    let (version, weights) = late.pull();
    assert_eq!(version, Version(1));
    assert!(weights[..16 << 10].iter().all(|&weight| weight == 3.0));
    assert!(weights[16 << 10..].iter().all(|&weight| weight == 1.0));
    other.shut_down();
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
        let status = status(&server.address().to_string());
        assert_eq!(status["models"], serde_json::json!([]), "shard {}", server.shard());
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
    assert!(refused(Message::Adopt, b"nothing").contains("record"));
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
        let what = libmodelio::wire::Kept::Weights;
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
    let client = world.client();
    let learner = Learner::join(&client, "l");
    assert_eq!(learner.push(1.0).recv_timeout(LONG).unwrap(), Ok(Message::Done));
    assert!(learner.pull().1.iter().all(|&w| w == 1.0));
    client.shut_down();
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
    let adoption = |attempt, before: &ModelRecord, after: &ModelRecord| {
        let (epoch, owners) = (before.epoch, before.owners.clone());
        Adoption { attempt, record: after.clone(), epoch, owners, shards: shards.clone() }.encode().unwrap()
    };
    let mut peer = AdminPeer::connect(&world.address_of(new), Instant::now() + LONG).unwrap();
    let mut ask = |message: Message, payload: &[u8]| peer.request(&message, payload, Instant::now() + LONG);
    // A shard takes blocks, the registry puts the map in force, and nobody tells the shard.
    let (generation, after) = (old.generation, without(&old, off, new));
    ask(Message::Adopt, &adoption(1, &old, &after)).unwrap();
    let fill = Message::Fill { generation, attempt: 1, version: Version(0), reducer: Reducer::Sum };
    let end = Instant::now() + LONG;
    loop {
        match ask(fill.clone(), &[]).unwrap().0 {
            Message::Adopted { blocks, of } if blocks == of => break,
            _ => assert!(Instant::now() < end, "its blocks do not come"),
        }
    }
    world.registry.put(&after, Some(old.epoch), Instant::now() + LONG).unwrap();
    // Under the new map another move begins, and is given up.
    let later = without(&after, after.coordinator, new);
    match ask(Message::Adopt, &adoption(2, &after, &later)) {
        Err(AdminError::Refusal(refusal)) => {
            assert!(refusal.to_string().contains("has not switched to block map 2"), "{refusal}");
        }
        other => panic!("{other:?}"),
    }
    ask(Message::Abandon { generation, attempt: 2 }, &[]).unwrap();
    // Then the shard hears of the first one.
    let moved = Moved { record: after.clone(), shards: shards.clone() }.encode().unwrap();
    ask(Message::Switch, &moved).unwrap();
    let block = after.block_map().unwrap().blocks_of(new).next().unwrap();
    let what = libmodelio::wire::Kept::Weights;
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
        let deadline = Instant::now() + LONG;
        while client.shards().iter().any(|peer| peer.connected) {
            assert!(Instant::now() < deadline, "{way:?}: connections for blocks hold the model's partitions");
            std::thread::sleep(Duration::from_millis(5));
        }
        client.shut_down();
    }
}
