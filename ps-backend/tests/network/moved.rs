//! Clients whose model moves: from a shard that says so, or is gone.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use libmodelio::admin::AdminError;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::region::{Region, RegionKey};
use libmodelio::client::CommitNotice;
use libmodelio::client::core::OUT_OF_REACH;
use libmodelio::client::{ClientError, ClientOptions, Job, TransportChoice};
use libmodelio::registry::{Registry, RegistryError};
use libmodelio::vocabulary::block_map::BlockMap;
use libmodelio::vocabulary::ids::{Epoch, Generation, ShardId, Step, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::vocabulary::transport_kind::TransportKind;
use libmodelio::wire::{
    Message, ModelRecord, Moved, Refusal, RegistryAnswer, RegistryRequest, Role, ShardRecord,
};

use crate::scripted_shard::{BYTES, LEARNER, ScriptedShard, moved_to, record};
use crate::world::{Client, LONG, Way, World, ask, is_unreachable, until};

fn options() -> ClientOptions {
    ClientOptions { transport: TransportChoice::Tcp, ..ClientOptions::default() }
}

/// Shard 1, under map 1, and another one.
fn two(other: ShardId, epoch: Epoch) -> (ScriptedShard, ScriptedShard) {
    (ScriptedShard::start(ShardId(1), Epoch(1)), ScriptedShard::start(other, epoch))
}

fn connect(at: &ScriptedShard, options: ClientOptions) -> Result<Client, ClientError> {
    let epoch = at.with(|script| script.epoch);
    Job::connect(&record(at.record.shard, epoch), std::slice::from_ref(&at.record), options).map(Client::of)
}

/// Joining ends where the coordinator is away. Whoever asks again joins once it is there.
fn join(client: &Job) {
    until("it has joined", || match ask(client, Message::Join { name: "l".into() }) {
        Ok(Message::Joined { .. }) => true,
        Err(Refusal::Shard(ShardError::TimedOut(why))) => {
            assert!(why.starts_with(OUT_OF_REACH), "{why}");
            false
        }
        other => panic!("{other:?}"),
    });
}

/// Commits the first step of the learner, all blocks.
fn commit(client: &Job, timeout: Duration) -> std::sync::mpsc::Receiver<Result<Message, Refusal>> {
    let (sender, receiver) = channel();
    let memory = Mapping::memfd("staging", client.layout().size() as usize).unwrap();
    let staging = Region::new(Arc::new(memory), RegionKey(1));
    let done = Box::new(move |result: Result<(), ShardError>| {
        drop(sender.send(result.map(|()| Message::Done).map_err(Refusal::Shard)));
    });
    client.open(LEARNER, timeout, Box::new(|_| {}));
    client.commit(LEARNER, Step(1), CommitNotice::whole(client.layout(), staging, true), timeout, done);
    receiver
}

fn is_at(client: &Job, hand: &ScriptedShard) -> bool {
    let peers = client.shards();
    let [peer] = &peers[..] else { panic!("{peers:?}") };
    peer.connected && (peer.address.as_ref(), peer.shard) == (Some(&hand.record.address), hand.record.shard)
}

#[test]
fn a_client_goes_where_its_model_goes_and_asks_there_again() {
    let (first, second) = two(ShardId(2), Epoch(2));
    second.with(|script| script.answers = true);
    let client = connect(&first, options()).unwrap();
    join(&client);
    let answer = commit(&client, LONG);
    until("the commit comes", || !first.with(|script| script.commits.is_empty()));
    // Said on one connection; the others are left as they are, and say the same late.
    let moved = moved_to(&second, Epoch(2)).encode().unwrap();
    first.say_now(Role::Control, moved.clone());
    assert_eq!(answer.recv_timeout(LONG).unwrap(), Ok(Message::Done));
    until("all are there", || is_at(&client, &second));
    assert_eq!(first.with(|script| script.commits[0]), second.with(|script| script.commits[0]));
    let greeted = second.with(|script| script.greeted.clone());
    assert!(greeted.iter().all(|&(_, epoch, who)| (epoch, who) == (Epoch(2), client.id())), "{greeted:?}");
    assert_eq!(client.version(), Version(0), "it is shown as before");
    first.say_now(Role::Data, moved);
    first.stop();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(second.controls(), 1, "its connection is left alone");
    assert!(is_at(&client, &second));
    join(&client);
}

#[test]
fn a_greeting_under_an_older_map_is_redirected() {
    let (first, second) = two(ShardId(1), Epoch(3));
    first.with(|script| {
        script.deaf = true;
        script.moved = Some(moved_to(&second, Epoch(3)).encode().unwrap());
    });
    let client = connect(&first, options()).unwrap();
    assert!(is_at(&client, &second));
    // Word of a map between the two changes nothing any more.
    second.say_now(Role::Control, moved_to(&first, Epoch(2)).encode().unwrap());
    second.say_now(Role::Data, moved_to(&first, Epoch(3)).encode().unwrap());
    std::thread::sleep(Duration::from_millis(300));
    join(&client);
    assert!(is_at(&client, &second));
    assert_eq!(second.controls(), 1, "the connection goes on");
}

#[test]
fn word_of_a_move_that_makes_no_sense_is_not_followed() {
    let (first, second) = two(ShardId(2), Epoch(2));
    let good = moved_to(&second, Epoch(2));
    let with = |change: &dyn Fn(&mut Moved)| {
        let mut moved = good.clone();
        change(&mut moved);
        moved.encode().unwrap()
    };
    let encoded = good.encode().unwrap();
    let other = ModelLayout::blank(BYTES, DType::F32, 128 << 10).unwrap();
    let map = BlockMap::from_owners(Epoch(2), vec![ShardId(2); other.blocks() as usize]).unwrap();
    let other =
        ModelRecord::new("m", Generation(7), &other, BTreeMap::new(), &map, ShardId(2), Default::default())
            .unwrap();
    let lies = [
        (vec![0x5a; 5000], "not a model's record"),
        (encoded[..encoded.len() - 1].to_vec(), "not a model's record"),
        (with(&|moved| moved.record.generation = Generation(8)), "of model m of generation 8, not m of"),
        (with(&|moved| moved.record.name = "n".into()), "of model n of generation 7, not m of"),
        (with(&|moved| moved.record.tensors[0].0 = "other".into()), "other tensors, or other blocks"),
        (with(&|moved| moved.record = other.clone()), "other tensors, or other blocks"),
        (with(&|moved| moved.shards[0].shard = ShardId(5)), "shard 2 owns blocks, and is not among"),
    ];
    let client = connect(&first, options()).unwrap();
    for (times, (lie, why)) in lies.iter().enumerate() {
        for role in [Role::Data, Role::Control] {
            first.say_now(role, lie.clone());
        }
        until("the connection is opened anew", || first.controls() == times + 2);
        join(&client);
        until("all are", || is_at(&client, &first));

        let liar = ScriptedShard::start(ShardId(1), Epoch(1));
        liar.with(|script| (script.deaf, script.moved) = (true, Some(lie.clone())));
        is_unreachable(&["where the model is now", why], |patience| {
            connect(&liar, ClientOptions { patience, ..options() }).err().unwrap()
        });
        liar.stop();
    }
    assert_eq!(second.with(|script| script.greeted.len()), 0);
}

/// A registry of one model.
struct Table {
    records: Mutex<Vec<ModelRecord>>,
    shards: Vec<ShardRecord>,
    asked: AtomicUsize,
    /// Nobody reaches it.
    down: AtomicBool,
}

impl Table {
    /// Answers with one record after the other, and with the last one from then on.
    fn of(records: Vec<ModelRecord>, shards: Vec<ShardRecord>) -> Arc<Table> {
        let (asked, down) = Default::default();
        Arc::new(Table { records: Mutex::new(records), shards, asked, down })
    }
}

impl Registry for Table {
    fn ask(
        &self,
        request: RegistryRequest,
        _: &[u8],
        _: Instant,
    ) -> Result<(RegistryAnswer, Vec<u8>), RegistryError> {
        match request {
            RegistryRequest::Shards => Ok((RegistryAnswer::Shards(self.shards.clone()), Vec::new())),
            RegistryRequest::Model { name } => {
                assert_eq!(name, "m");
                let asked = self.asked.fetch_add(1, Ordering::Relaxed);
                if self.down.load(Ordering::Relaxed) {
                    return Err(AdminError::ConnectionRefused { address: "nobody".into() }.into());
                }
                let records = self.records.lock().unwrap();
                Ok((RegistryAnswer::Model, records[asked.min(records.len() - 1)].encode().unwrap()))
            }
            other => panic!("no client asks the registry {other:?}"),
        }
    }
}

#[test]
fn where_a_model_is_whose_shards_are_gone_is_found_in_the_registry() {
    let (first, second) = two(ShardId(2), Epoch(2));
    second.with(|script| script.answers = true);
    let moved = record(ShardId(2), Epoch(2));
    // Another life of the name is nothing that this client could go on with.
    let other = ModelRecord { generation: Generation(8), ..moved.clone() };
    let table = Table::of(vec![other, moved], vec![second.record.clone()]);
    let registry = Some(Arc::clone(&table) as Arc<dyn Registry>);
    let client = connect(&first, ClientOptions { registry, ..options() }).unwrap();
    join(&client);
    let answer = commit(&client, LONG);
    until("the commit comes", || !first.with(|script| script.commits.is_empty()));
    assert_eq!(table.asked.load(Ordering::Relaxed), 0, "nobody is out of reach");
    first.stop();
    assert_eq!(answer.recv_timeout(LONG).unwrap(), Ok(Message::Done));
    assert_eq!(table.asked.load(Ordering::Relaxed), 2);
    until("all are there", || is_at(&client, &second));
}

/// A client that asks a registry which says this.
fn asking(at: &ScriptedShard, records: Vec<ModelRecord>, shards: &[&ScriptedShard]) -> (Client, Arc<Table>) {
    let table = Table::of(records, shards.iter().map(|hand| hand.record.clone()).collect());
    let registry = Some(Arc::clone(&table) as Arc<dyn Registry>);
    (connect(at, ClientOptions { registry, ..options() }).unwrap(), table)
}

#[test]
fn a_shard_that_lies_about_where_the_model_is_is_not_followed() {
    let (first, liar) = two(ShardId(5), Epoch(9));
    let second = ScriptedShard::start(ShardId(2), Epoch(9));
    let lie = moved_to(&liar, Epoch(9)).encode().unwrap();
    let (client, table) = asking(&first, vec![record(ShardId(1), Epoch(1))], &[&first, &second, &liar]);
    join(&client);
    assert_eq!(table.asked.load(Ordering::Relaxed), 0);
    for role in [Role::Control, Role::Data] {
        first.say_now(role, lie.clone());
    }
    until("the registry is asked", || table.asked.load(Ordering::Relaxed) > 0);
    until("connections are opened anew", || first.controls() > 1 && is_at(&client, &first));
    join(&client);
    // It is in the registry, but elsewhere than the shard says, or with another address.
    *table.records.lock().unwrap() = vec![record(ShardId(2), Epoch(9))];
    let mut elsewhere = moved_to(&second, Epoch(9));
    elsewhere.shards[0].address = liar.record.address.clone();
    for lie in [lie, elsewhere.encode().unwrap()] {
        std::thread::sleep(Duration::from_millis(2100));
        first.say_now(Role::Control, lie);
    }
    until("it is where the registry says", || is_at(&client, &second));
    join(&client);
    assert_eq!(liar.with(|script| script.greeted.len()), 0, "nobody was led astray");
}

#[test]
fn a_word_that_the_registry_confirms_is_followed_at_once() {
    let (first, second) = two(ShardId(2), Epoch(2));
    let (client, table) = asking(&first, vec![record(ShardId(2), Epoch(2))], &[&second]);
    join(&client);
    first.say_now(Role::Control, moved_to(&second, Epoch(2)).encode().unwrap());
    until("it is there", || is_at(&client, &second));
    // Silence would have it ask again.
    assert_eq!(table.asked.load(Ordering::Relaxed), 1, "one question");
}

#[test]
fn without_a_registry_in_reach_a_shards_word_counts_until_the_registry_says() {
    let (first, liar) = two(ShardId(5), Epoch(9));
    let (client, table) = asking(&first, vec![record(ShardId(1), Epoch(1))], &[&first]);
    join(&client);
    table.down.store(true, Ordering::Relaxed);
    first.say_now(Role::Control, moved_to(&liar, Epoch(9)).encode().unwrap());
    until("it is followed", || is_at(&client, &liar));
    join(&client);
    let asked = table.asked.load(Ordering::Relaxed);
    until("the registry is asked again", || table.asked.load(Ordering::Relaxed) > asked);
    assert!(is_at(&client, &liar));
    table.down.store(false, Ordering::Relaxed);
    // Though its map is the older one.
    until("it is where the registry says", || is_at(&client, &first));
    join(&client);
}

#[test]
fn a_shard_that_welcomes_under_another_map_is_left() {
    let hand = ScriptedShard::start(ShardId(1), Epoch(1));
    hand.with(|script| script.claims = Some(Epoch(9)));
    is_unreachable(&["the client's block map is 1, the shard's is 9"], |patience| {
        connect(&hand, ClientOptions { patience, ..options() }).err().unwrap()
    });
    let greeted = hand.with(|script| script.greeted.clone());
    assert!(greeted.iter().all(|(_, epoch, _)| *epoch == Epoch(1)), "{greeted:?}");
}

#[test]
fn shared_memory_alone_does_not_follow_to_another_host_and_says_so() {
    let second = ScriptedShard::start(ShardId(9), Epoch(2));
    for transport in [TransportChoice::SharedMemory, TransportChoice::Auto] {
        let world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "1")], Way::Shm);
        assert_eq!(world.record.epoch, Epoch(1));
        let owners = vec![(ShardId(9), world.record.layout().unwrap().blocks())];
        let moved = ModelRecord { epoch: Epoch(2), owners, coordinator: ShardId(9), ..world.record.clone() };
        let table = Table::of(vec![moved], vec![second.record.clone()]);
        let options = ClientOptions { transport, registry: Some(table), ..ClientOptions::default() };
        let client = Client::of(Job::connect(&world.record, &world.shards(), options).unwrap());
        assert_eq!(client.shards()[0].transport, TransportKind::SharedMemory);
        drop(world);
        until("it has heard of the move", || client.shards()[0].shard == ShardId(9));
        // The coordinator is always spoken to over TCP.
        join(&client);
        if transport == TransportChoice::Auto {
            until("blocks go over TCP", || client.shards()[0].connected);
            assert_eq!(client.shards()[0].transport, TransportKind::Tcp);
        } else {
            let peer = client.shards().remove(0);
            assert!(!peer.connected && peer.transport == TransportKind::SharedMemory, "{peer:?}");
            assert!(
                peer.no_memory.as_ref().is_some_and(|why| why.contains("is on another host")),
                "{peer:?}"
            );
            let answer = commit(&client, Duration::from_millis(200)).recv_timeout(LONG).unwrap();
            assert!(matches!(answer, Err(Refusal::Shard(ShardError::TimedOut(_)))), "{answer:?}");
        }
    }
}
