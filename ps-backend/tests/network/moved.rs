//! Clients whose model moves: from a shard that says so, or is gone. The shards here are spoken for by hand.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use libmodelio::admin::AdminError;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::client::{ClientError, ClientOptions, Job, TransportChoice};
use libmodelio::registry::{Registry, RegistryError};
use libmodelio::transport::{CommitNotice, Region, RegionKey, ShardError, TransportKind};
use libmodelio::vocabulary::block_map::BlockMap;
use libmodelio::vocabulary::ids::{
    ClientId, Epoch, Generation, Incarnation, LearnerId, ShardId, Step, Version,
};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::wire::{
    Fate, Held, JobState, Limits, Message, ModelRecord, Moved, Protocol, Receiver, Refusal, RefusedShard,
    Role, ShardRecord, frame,
};

use crate::world::{LONG, Way, World, ask};

const BYTES: u64 = 300_000;
const LEARNER: LearnerId = LearnerId(1);

/// What a shard does, and what it has seen.
#[derive(Default)]
struct Script {
    epoch: Epoch,
    /// What it says to whoever greets it under an older map; under any, if it is `deaf`.
    moved: Option<Vec<u8>>,
    /// It welcomes nobody.
    deaf: bool,
    /// What it says in its welcome, if not the truth.
    claims: Option<Epoch>,
    /// What it says at once on connections of this role.
    now: Vec<(Role, Vec<u8>)>,
    /// Commits are answered.
    answers: bool,
    /// Who has greeted it, and under which map.
    greeted: Vec<(Role, Epoch, ClientId)>,
    /// Commits, by the number of their request.
    commits: Vec<u64>,
    gone: bool,
}

/// A shard that owns all blocks of its model, and coordinates it.
#[derive(Clone)]
struct Hand {
    record: ShardRecord,
    script: Arc<Mutex<Script>>,
}

impl Hand {
    fn start(shard: ShardId, epoch: Epoch) -> Hand {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let record =
            ShardRecord { shard, address, host: "elsewhere".into(), draining: false, rdma: String::new() };
        let script = Arc::new(Mutex::new(Script { epoch, ..Script::default() }));
        let of_thread = Arc::clone(&script);
        std::thread::spawn(move || {
            loop {
                match listener.accept() {
                    Ok((stream, _)) => {
                        let script = Arc::clone(&of_thread);
                        std::thread::spawn(move || Talk { stream, script, shard }.run());
                    }
                    Err(_) if of_thread.lock().unwrap().gone => return,
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
            }
        });
        Hand { record, script }
    }

    fn with<R>(&self, f: impl FnOnce(&mut Script) -> R) -> R {
        f(&mut self.script.lock().unwrap())
    }

    /// Says it on the connections of this role that are there.
    fn say_now(&self, role: Role, payload: Vec<u8>) {
        self.with(|script| script.now.push((role, payload)));
    }

    fn controls(&self) -> usize {
        self.with(|script| script.greeted.iter().filter(|(role, ..)| *role == Role::Control).count())
    }

    /// Ends; nobody listens at its address any more.
    fn stop(&self) {
        self.with(|script| script.gone = true);
        until("it has ended", || TcpStream::connect(&self.record.address).is_err());
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !done() {
        assert!(Instant::now() < end, "not within {LONG:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// One connection of a shard.
struct Talk {
    stream: TcpStream,
    script: Arc<Mutex<Script>>,
    shard: ShardId,
}

impl Talk {
    fn say(&mut self, message: &Message, request: u64, payload: &[u8]) {
        let mut bytes = frame(message, request, Epoch(0), payload).unwrap();
        bytes.extend_from_slice(payload);
        let _ = self.stream.write_all(&bytes);
    }

    fn run(mut self) {
        self.stream.set_nonblocking(false).unwrap();
        self.stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        let mut receiver = Receiver::new(Limits::MAX);
        let (mut came, mut role, mut due) = (Vec::new(), None, 0);
        let begun = self.script.lock().unwrap().now.len();
        let mut said = begun;
        loop {
            let mut bytes = [0; 64 << 10];
            match self.stream.read(&mut bytes) {
                Ok(0) => return,
                Ok(count) => came.extend_from_slice(&bytes[..count]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(_) => return,
            }
            loop {
                if due > 0 {
                    let count = came.len().min(due);
                    came.drain(..count);
                    due -= count;
                    if due > 0 {
                        break;
                    }
                }
                let (used, received) = receiver.push(&came).unwrap();
                came.drain(..used);
                let Some(received) = received else { break };
                due = received.header.payload_len() as usize;
                let (request, epoch) = (received.header.request(), received.header.epoch());
                if let Message::Hello { role: of, client, .. } = received.message {
                    role = Some(of);
                    if !self.greet(of, epoch, client) {
                        return;
                    }
                } else {
                    self.receive(received.message, request, epoch);
                }
            }
            let (new, gone) = {
                let script = self.script.lock().unwrap();
                let new: Vec<_> = script.now[said..].to_vec();
                said = script.now.len();
                (new, script.gone)
            };
            for (_, payload) in new.iter().filter(|(of, _)| Some(*of) == role) {
                self.say(&Message::Moved, 0, payload);
            }
            if gone {
                return;
            }
        }
    }

    /// False when the conversation is over.
    fn greet(&mut self, role: Role, epoch: Epoch, client: ClientId) -> bool {
        let (own, moved, deaf, claimed) = {
            let mut script = self.script.lock().unwrap();
            script.greeted.push((role, epoch, client));
            let claimed = script.claims.unwrap_or(script.epoch);
            (script.epoch, script.moved.clone(), script.deaf, claimed)
        };
        if let Some(moved) = moved.filter(|_| epoch < own || deaf) {
            self.say(&Message::Moved, 0, &moved);
            return false;
        }
        assert_eq!(epoch, own);
        let protocol = Protocol::NEWEST.number();
        self.say(&Message::Welcome { protocol, shard: self.shard, epoch: claimed, silence_ms: 5000 }, 0, &[]);
        if role == Role::Control {
            let state = JobState { sequence: own.0 * 1000, ..JobState::default() };
            self.say(&Message::State(Box::new(state)), 0, &[]);
        }
        true
    }

    fn receive(&mut self, message: Message, request: u64, epoch: Epoch) {
        // A connection's own pings are of no map.
        if message != Message::Ping {
            assert_eq!(epoch, self.script.lock().unwrap().epoch, "{} of another map", message.name());
        }
        match message {
            Message::Ping => self.say(&Message::Pong, 0, &[]),
            Message::Join { .. } => {
                let joined =
                    Message::Joined { learner: LEARNER, incarnation: Incarnation(1), since: u64::MAX };
                self.say(&joined, request, &[]);
            }
            Message::Commit { .. } => {
                let answers = {
                    let mut script = self.script.lock().unwrap();
                    script.commits.push(request);
                    script.answers
                };
                if answers {
                    self.say(&Message::Done, request, &[]);
                }
            }
            Message::Pull { version, blocks } => {
                let layout = ModelLayout::blank(BYTES, DType::F32, 64 << 10).unwrap();
                for block in blocks.map(libmodelio::vocabulary::ids::BlockId) {
                    let extent = layout.block_bytes(block);
                    let bytes = vec![0; (extent.end - extent.start) as usize];
                    self.say(&Message::Block { version, block }, 0, &bytes);
                }
            }
            _ => {}
        }
    }
}

/// The model with all blocks on one shard.
fn record(shard: ShardId, epoch: Epoch) -> ModelRecord {
    let layout = ModelLayout::blank(BYTES, DType::F32, 64 << 10).unwrap();
    let map = BlockMap::from_owners(epoch, vec![shard; layout.blocks() as usize]).unwrap();
    let mut record =
        ModelRecord::new("m", Generation(7), &layout, BTreeMap::new(), &map, shard, Default::default())
            .unwrap();
    record.ready = true;
    record
}

fn moved_to(to: &Hand, epoch: Epoch) -> Moved {
    Moved { record: record(to.record.shard, epoch), shards: vec![to.record.clone()] }
}

fn options() -> ClientOptions {
    ClientOptions { transport: TransportChoice::Tcp, ..ClientOptions::default() }
}

fn connect(at: &Hand, options: ClientOptions) -> Result<Job, ClientError> {
    let epoch = at.with(|script| script.epoch);
    Job::connect(&record(at.record.shard, epoch), std::slice::from_ref(&at.record), options)
}

fn join(client: &Job) {
    let joined = ask(client, Message::Join { name: "l".into() });
    assert!(matches!(joined, Ok(Message::Joined { .. })), "{joined:?}");
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

fn is_at(client: &Job, hand: &Hand) -> bool {
    let peers = client.shards();
    let [peer] = &peers[..] else { panic!("{peers:?}") };
    peer.connected && (peer.address.as_ref(), peer.shard) == (Some(&hand.record.address), hand.record.shard)
}

#[test]
fn a_client_goes_where_its_model_goes_and_asks_there_again() {
    let (first, second) = (Hand::start(ShardId(1), Epoch(1)), Hand::start(ShardId(2), Epoch(2)));
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
    client.shut_down();
}

#[test]
fn a_greeting_under_an_older_map_is_redirected() {
    let (first, second) = (Hand::start(ShardId(1), Epoch(1)), Hand::start(ShardId(1), Epoch(3)));
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
    client.shut_down();
}

#[test]
fn word_of_a_move_that_makes_no_sense_is_not_followed() {
    let (first, second) = (Hand::start(ShardId(1), Epoch(1)), Hand::start(ShardId(2), Epoch(2)));
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

        let liar = Hand::start(ShardId(1), Epoch(1));
        liar.with(|script| (script.deaf, script.moved) = (true, Some(lie.clone())));
        let options = ClientOptions { patience: Duration::from_millis(300), ..options() };
        let error = connect(&liar, options).err().unwrap().to_string();
        assert!(error.contains("where the model is now") && error.contains(why), "{error}, not {why}");
        liar.stop();
    }
    assert_eq!(second.with(|script| script.greeted.len()), 0);
    client.shut_down();
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
    fn announce(&self, _: &ShardRecord, _: bool, _: Duration, _: Instant) -> Result<ShardId, RegistryError> {
        Err(RegistryError::Refused(Refusal::other("nobody announces itself here")))
    }

    fn withdraw(&self, _: ShardId, _: Instant) -> Result<(), RegistryError> {
        Ok(())
    }

    fn drain(&self, _: ShardId, _: Instant) -> Result<(), RegistryError> {
        Ok(())
    }

    fn undrain(&self, _: ShardId, _: Instant) -> Result<(), RegistryError> {
        Ok(())
    }

    fn shards(&self, _: Instant) -> Result<Vec<ShardRecord>, RegistryError> {
        Ok(self.shards.clone())
    }

    fn refused(&self, _: Instant) -> Result<Vec<RefusedShard>, RegistryError> {
        Ok(Vec::new())
    }

    fn models(&self, _: Instant) -> Result<Vec<String>, RegistryError> {
        Ok(vec!["m".into()])
    }

    fn model(&self, name: &str, _: Instant) -> Result<ModelRecord, RegistryError> {
        assert_eq!(name, "m");
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        if self.down.load(Ordering::Relaxed) {
            return Err(AdminError::ConnectionRefused { address: "nobody".into() }.into());
        }
        let records = self.records.lock().unwrap();
        Ok(records[asked.min(records.len() - 1)].clone())
    }

    fn put(&self, _: &ModelRecord, _: Option<Epoch>, _: Instant) -> Result<(), RegistryError> {
        Err(RegistryError::Refused(Refusal::other("nothing is put here")))
    }

    fn delete(&self, _: &str, _: Generation, _: Instant) -> Result<(), RegistryError> {
        Ok(())
    }

    fn holding(
        &self,
        _: ShardId,
        held: &[Held],
        _: &[(String, Generation)],
        _: Instant,
    ) -> Result<(bool, Vec<Fate>), RegistryError> {
        Ok((false, vec![Fate::Unknown; held.len()]))
    }

    fn restore(&self, _: &ModelRecord, _: &[ShardRecord], _: Instant) -> Result<(), RegistryError> {
        Err(RegistryError::Refused(Refusal::other("nothing is put here")))
    }
}

#[test]
fn where_a_model_is_whose_shards_are_gone_is_found_in_the_registry() {
    let (first, second) = (Hand::start(ShardId(1), Epoch(1)), Hand::start(ShardId(2), Epoch(2)));
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
    client.shut_down();
}

/// A client that asks a registry which says this.
fn asking(at: &Hand, records: Vec<ModelRecord>, shards: &[&Hand]) -> (Job, Arc<Table>) {
    let table = Table::of(records, shards.iter().map(|hand| hand.record.clone()).collect());
    let registry = Some(Arc::clone(&table) as Arc<dyn Registry>);
    (connect(at, ClientOptions { registry, ..options() }).unwrap(), table)
}

#[test]
fn a_shard_that_lies_about_where_the_model_is_is_not_followed() {
    let (first, liar) = (Hand::start(ShardId(1), Epoch(1)), Hand::start(ShardId(5), Epoch(9)));
    let second = Hand::start(ShardId(2), Epoch(9));
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
    client.shut_down();
}

#[test]
fn a_word_that_the_registry_confirms_is_followed_at_once() {
    let (first, second) = (Hand::start(ShardId(1), Epoch(1)), Hand::start(ShardId(2), Epoch(2)));
    let (client, table) = asking(&first, vec![record(ShardId(2), Epoch(2))], &[&second]);
    join(&client);
    let said_at = Instant::now();
    first.say_now(Role::Control, moved_to(&second, Epoch(2)).encode().unwrap());
    until("it is there", || is_at(&client, &second));
    // Silence that the registry is asked about takes two seconds.
    assert!(said_at.elapsed() < Duration::from_secs(1), "{:?}", said_at.elapsed());
    assert_eq!(table.asked.load(Ordering::Relaxed), 1, "one question");
    client.shut_down();
}

#[test]
fn without_a_registry_in_reach_a_shards_word_counts_until_the_registry_says() {
    let (first, liar) = (Hand::start(ShardId(1), Epoch(1)), Hand::start(ShardId(5), Epoch(9)));
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
    client.shut_down();
}

#[test]
fn a_shard_that_welcomes_under_another_map_is_left() {
    let hand = Hand::start(ShardId(1), Epoch(1));
    hand.with(|script| script.claims = Some(Epoch(9)));
    let options = ClientOptions { patience: Duration::from_millis(300), ..options() };
    let error = connect(&hand, options).err().unwrap().to_string();
    assert!(error.contains("the client's block map is 1, the shard's is 9"), "{error}");
    let greeted = hand.with(|script| script.greeted.clone());
    assert!(greeted.iter().all(|(_, epoch, _)| *epoch == Epoch(1)), "{greeted:?}");
}

#[test]
fn shared_memory_alone_does_not_follow_to_another_host_and_says_so() {
    let second = Hand::start(ShardId(9), Epoch(2));
    for transport in [TransportChoice::SharedMemory, TransportChoice::Auto] {
        let world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "1")], Way::Shm);
        assert_eq!(world.record.epoch, Epoch(1));
        let owners = vec![(ShardId(9), world.record.layout().unwrap().blocks())];
        let moved = ModelRecord { epoch: Epoch(2), owners, coordinator: ShardId(9), ..world.record.clone() };
        let table = Table::of(vec![moved], vec![second.record.clone()]);
        let options = ClientOptions { transport, registry: Some(table), ..ClientOptions::default() };
        let client = Job::connect(&world.record, &world.shards(), options).unwrap();
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
        client.shut_down();
    }
}
