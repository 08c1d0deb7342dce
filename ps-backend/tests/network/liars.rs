//! A shard by RDMA that lies: it greets its clients as it should, and then names memory that it does not have, or
//! speaks of slots that there are not. Its clients say so, and none of them is harmed. Skipped, with the reason, where
//! there is no device.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::client::{ClientOptions, Job};
use libmodelio::transport::frames::{Conversation, Framed, Link, Outgoing, Take};
use libmodelio::transport::rdma::{Endpoint, QueuePair};
use libmodelio::transport::stream::Close;
use libmodelio::wire::{Limits, Message, Protocol, Received};

use crate::world::{LONG, Way, World};

const BYTES: u64 = 1_000_004;
/// That is as a rule enough to find out, and else these are, where others are busy.
const PATIENCE: [Duration; 3] = [Duration::from_secs(2), Duration::from_secs(8), Duration::from_secs(15)];

/// The messages after the greeting, and their numbers of requests.
type Lie = (u64, Message);

struct Liar {
    lie: Lie,
    link: Link,
    silence: Option<Duration>,
}

impl Conversation for Liar {
    fn opened(&mut self, link: &Link) -> Result<(), Close> {
        self.link = link.clone();
        Ok(())
    }

    fn message(&mut self, received: &Received) -> Result<Take, Close> {
        if matches!(received.message, Message::Hello { .. }) {
            let epoch = received.header.epoch();
            let (protocol, shard, silence_ms) =
                (Protocol::NEWEST.number(), libmodelio::vocabulary::ids::ShardId(1), 10_000);
            let welcome = Message::Welcome { protocol, shard, epoch, silence_ms };
            self.silence = Some(Duration::from_millis(silence_ms.into()));
            let (request, lie) = self.lie.clone();
            for (request, message) in [(0, welcome), (request, lie)] {
                self.link.send(Outgoing { epoch, ..Outgoing::new(request, message) });
            }
        }
        Ok(Take::Nothing)
    }

    fn payload(&mut self, _: &Received, _: &[u8]) -> Result<(), Close> {
        Ok(())
    }

    fn limits(&self) -> Limits {
        Limits::MAX
    }

    fn silence(&self) -> Option<Duration> {
        self.silence
    }

    fn closed(&mut self, _: &Close) {}
}

#[test]
fn a_shard_that_lies_harms_no_client() {
    let Some(way) = Way::rdma() else { return };
    let world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "1")], way);
    let endpoint = Endpoint::open(&world.rdma, Protocol::NEWEST.number()).unwrap();
    let at: SocketAddr = world.shards()[0].rdma.parse().unwrap();
    let own = endpoint.device().arena().take(4096).unwrap().open().unwrap().remote();
    let broken = if endpoint.device().is_iwarp() { "RDMA: " } else { "RDMA: remote access error" };
    let directory = |address, key| (0, Message::Directory { address, key });
    for (what, lie, says) in [
        ("a directory that is nowhere", directory(1 << 40, 7), broken),
        ("a directory that begins within its memory", directory(own.address + 4000, own.key), broken),
        ("a directory with a key that is not there", directory(own.address, own.key ^ 0x0505_0500), broken),
        (
            "more slots than anybody has",
            (0, Message::Slots { count: 1 << 17, bytes: 4096, address: own.address, key: own.key }),
            "slots were granted before, or too many",
        ),
        ("a slot that was not granted", ((1 << 32) + 5, Message::Done), "request 4294967301 was not asked"),
    ] {
        let listened = endpoint.listen(SocketAddr::new(at.ip(), 0), move |_: &Arc<QueuePair>, _| {
            let liar = Liar { lie: lie.clone(), link: Link::default(), silence: None };
            Some(Box::new(Framed::new(liar, Link::default(), 512)))
        });
        let mut shards = world.shards();
        shards[0].rdma = listened.unwrap().to_string();
        let found = PATIENCE.into_iter().find_map(|patience| {
            let begun = Instant::now();
            let options = ClientOptions {
                transport: world.transport,
                rdma: world.rdma.clone(),
                patience,
                ..ClientOptions::default()
            };
            let Err(error) = Job::connect(&world.record, &shards, options) else {
                panic!("{what} was believed")
            };
            assert!(begun.elapsed() < LONG, "{what}: {:?}", begun.elapsed());
            Some(error.to_string()).filter(|why| why.contains(says))
        });
        assert!(found.is_some(), "{what} is not found out");
    }
    // The connections of an honest shard are none the worse for it.
    world.serves();
}
