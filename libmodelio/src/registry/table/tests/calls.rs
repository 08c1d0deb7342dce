//! All calls of a registry: over TCP, with the table at the other end, and in an etcd.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::tested::EtcdServer;
use crate::bytes::crc32c::crc32c;
use crate::registry::table::RegistryCore;
use crate::registry::{Registry, RegistryError, RemoteRegistry, open};
use crate::vocabulary::block_map::BlockMap;
use crate::vocabulary::controls::Controls;
use crate::vocabulary::ids::{Epoch, Generation, ShardId};
use crate::vocabulary::layout::{DType, MIN_BLOCK_SIZE, ModelLayout};
use crate::wire::{Limits, Message, ModelRecord, Protocol, Receiver, Refusal, Role, ShardRecord, frame};

/// Serves `core` on one connection until it ends.
fn serve(mut stream: TcpStream, mut core: RegistryCore) {
    let start = Instant::now();
    stream.set_read_timeout(Some(Duration::from_secs(600))).expect("a timeout");
    let mut receiver = Receiver::new(Limits::GREETING);
    loop {
        let mut bytes = vec![0; receiver.wanted()];
        if stream.read_exact(&mut bytes).is_err() {
            return;
        }
        let Some(received) = receiver.push(&bytes).expect("sound frames").1 else { continue };
        let mut payload = vec![0; receiver.payload_due().unwrap_or(0) as usize];
        if !payload.is_empty() {
            stream.read_exact(&mut payload).expect("a payload");
            receiver.payload_done(crc32c(&payload)).expect("a sound payload");
        }
        let (answer, record) = match received.message {
            Message::Hello { role, .. } => {
                assert_eq!(role, Role::Admin);
                receiver.set_limits(Limits::MAX);
                let (shard, epoch) = (ShardId(0), Epoch(0));
                let protocol = Protocol::NEWEST.number();
                (Message::Welcome { protocol, shard, epoch, silence_ms: 60_000 }, None)
            }
            Message::Registry(request) => match core.handle(&request, &payload, start.elapsed()) {
                Ok(answer) => (Message::Registered(answer.message), answer.payload),
                Err(refusal) => (Message::Refused(refusal), None),
            },
            other => panic!("{other:?}"),
        };
        let record = record.unwrap_or_default();
        let bytes = frame(&answer, received.header.request(), Epoch(0), &record).expect("a sound answer");
        stream.write_all(&[&bytes, &record[..]].concat()).expect("the client listens");
    }
}

#[test]
fn all_calls_are_answered() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address").to_string();
    let server =
        std::thread::spawn(move || serve(listener.accept().expect("a connection").0, RegistryCore::new()));
    let deadline = Instant::now() + Duration::from_secs(600);
    let registry = RemoteRegistry::new(address);
    all_calls(&registry, deadline);
    drop(registry);
    server.join().expect("it kept to the protocol");
    let Some(server) = EtcdServer::start() else { return };
    let registry = open(&format!("etcd://{}", server.address)).expect("a URL");
    all_calls(&*registry, deadline);
}

fn all_calls(registry: &dyn Registry, deadline: Instant) {
    let mut shard = ShardRecord {
        shard: ShardId(0),
        address: "host:1".to_owned(),
        host: "boot".to_owned(),
        draining: false,
        rdma: "host:2".to_owned(),
    };
    let lease = Duration::from_secs(60);
    shard.shard = registry.announce(&shard, false, lease, deadline).expect("a number");
    assert_eq!(shard.shard, ShardId(1));
    assert_eq!(registry.shards(deadline).expect("an answer"), [shard.clone()]);
    registry.drain(shard.shard, deadline).expect("an answer");
    assert!(registry.shards(deadline).expect("an answer")[0].draining);
    let refused = registry.drain(ShardId(7), deadline).expect_err("no such shard");
    assert!(matches!(refused, RegistryError::Refused(Refusal::Other(_))), "{refused}");

    let layout = ModelLayout::new(vec![("w".to_owned(), DType::F32, vec![100_000])], MIN_BLOCK_SIZE)
        .expect("a layout");
    let map = BlockMap::striped(layout.blocks(), &[shard.shard]).expect("a map");
    let (metadata, controls) = (Default::default(), Controls::default());
    let mut record = ModelRecord::new("m", Generation(5), &layout, metadata, &map, shard.shard, controls)
        .expect("a record");
    assert!(matches!(registry.model("m", deadline), Err(RegistryError::NoModel(name)) if name == "m"));
    registry.put(&record, None, deadline).expect("a new model");
    record.ready = true;
    registry.put(&record, Some(Epoch(1)), deadline).expect("its new state");
    assert_eq!(registry.model("m", deadline).expect("its record"), record);
    let stale = registry.put(&ModelRecord { epoch: Epoch(9), ..record.clone() }, Some(Epoch(8)), deadline);
    assert!(matches!(stale, Err(RegistryError::Epoch { expected: Epoch(1), got: Epoch(8) })), "{stale:?}");
    assert!(matches!(
        registry.put(&ModelRecord { generation: Generation(6), ..record }, None, deadline),
        Err(RegistryError::Exists(_))
    ));
    assert_eq!(registry.models(deadline).expect("an answer"), ["m"]);
    let other = registry.delete("m", Generation(6), deadline);
    assert!(matches!(other, Err(RegistryError::Generation { .. })), "{other:?}");
    registry.delete("m", Generation(5), deadline).expect("it is forgotten");
    assert!(registry.models(deadline).expect("an answer").is_empty());
    registry.withdraw(shard.shard, deadline).expect("an answer");
    assert!(registry.shards(deadline).expect("an answer").is_empty());
}
