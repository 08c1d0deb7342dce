//! By RDMA, where not all memory may be pinned (RLIMIT_MEMLOCK): what is known when a connection begins sends it
//! another way; what comes later goes through the connection's ring. Each test is a process of its own, without the
//! capability to pin what it likes, for the limit is the process's.

use std::process::Command;
use std::time::Instant;

use libmodelio::client::TransportChoice;
use libmodelio::transport::rdma::{Endpoint, Placement, RdmaOptions};
use libmodelio::transport::stream::{Buffer, Close, Connection, Receive, ReceiveSlices, SendSlices, Stream};
use libmodelio::vocabulary::ids::{ClientId, Version};
use libmodelio::vocabulary::transport_kind::TransportKind;
use libmodelio::wire::{Message, Protocol, Role, ShardRecord, frame};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};

use crate::payload::of_shard;
use crate::world::{Client, LONG, Learner, Way, World, is_unreachable, until};

const BYTES: u64 = 1_000_004;
/// Of a version, in pages.
const VERSION: i64 = BYTES.div_ceil(4096) as i64;
/// A client's arena, in bytes and in pages.
const ARENA: usize = 4 << 20;
const ARENA_PAGES: i64 = ARENA as i64 / 4096;
/// More pages than all rings of a client and a shard, and less than a version.
const RINGS: i64 = 120;

/// True in a process to which limits apply. Otherwise the test is run in one.
fn is_limited(test: &str) -> bool {
    const LIMITED: &str = "GRADFS_RDMA_LIMITED";
    if std::env::var_os(LIMITED).is_some() {
        let (_, hard) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap();
        // Who may raise it does.
        let raised = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
        raised.or_else(|_| setrlimit(Resource::RLIMIT_MEMLOCK, hard, hard)).unwrap();
        return true;
    }
    if Way::rdma().is_some() {
        let this = std::env::current_exe().unwrap();
        let mut again = match nix::unistd::geteuid().is_root() {
            true => {
                let mut command = Command::new("setpriv");
                command.args(["--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock"]).arg(this);
                command
            }
            false => Command::new(this),
        };
        again.args(["--exact", "--nocapture", &format!("pinned::{test}")]).env(LIMITED, "1");
        let done = again.output().unwrap();
        eprint!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        assert!(done.status.success(), "{}", done.status);
    }
    false
}

/// Bytes that are pinned.
fn pinned() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let pinned = status.lines().find_map(|line| line.strip_prefix("VmPin:")).expect("VmPin");
    pinned.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// From now on so many pages more may be pinned than are, or so many less; `None` for no limit.
fn limit(more: Option<i64>) {
    let (_, hard) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap();
    let soft = more.map_or(hard, |more| pinned().saturating_add_signed(more * 4096));
    setrlimit(Resource::RLIMIT_MEMLOCK, soft, hard).unwrap();
}

fn world(change: fn(&mut RdmaOptions)) -> World {
    let way = Way::rdma_with(change).expect("there is a device");
    let mut world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "1")], way);
    world.rdma = RdmaOptions { arena: ARENA, ..world.rdma };
    world
}

fn steps(learner: &Learner, steps: std::ops::RangeInclusive<u64>) {
    for step in steps {
        learner.makes(1.0, step, step as f32);
    }
}

/// The shard, on a host that has no memory in common with the client.
fn far(world: &World) -> Vec<ShardRecord> {
    let mut shards = world.shards();
    shards[0].host = "another host".into();
    shards
}

fn connect(world: &World, transport: TransportChoice) -> Client {
    Client::of(world.connect(&far(world), transport).unwrap())
}

/// A client's greeting finds so many pages: by `auto` it goes by TCP, by `rdma` not at all, and says why.
fn is_turned_away(pages: i64, expected: &str) {
    let world = world(|_| {});
    let whys = [expected, "RLIMIT_MEMLOCK is ", "ulimit -l unlimited"];
    let before = pinned();
    limit(Some(pages));
    is_unreachable(&whys, |patience| {
        let refused = world.connect_within(&far(&world), TransportChoice::Rdma, patience).err();
        // All that it had goes with it, and nothing is left of it at the shard.
        until("what was pinned is not any more", || pinned() == before);
        refused.expect("no client")
    });
    let client = connect(&world, TransportChoice::Auto);
    let peer = client.shards().remove(0);
    assert_eq!(peer.transport, TransportKind::Tcp);
    let no_rdma = peer.no_rdma.expect("a reason");
    assert!(whys.iter().all(|why| no_rdma.contains(why)), "{no_rdma}");
    let learner = Learner::join(&client, "l");
    steps(&learner, 1..=3);
    // Now there is room for others.
    limit(None);
    let by_rdma = connect(&world, TransportChoice::Rdma);
    assert_eq!(by_rdma.shards()[0].transport, TransportKind::Rdma);
    assert_eq!(by_rdma.version(), Version(3));
}

#[test]
fn a_client_that_may_not_pin_a_version_uses_tcp() {
    if is_limited("a_client_that_may_not_pin_a_version_uses_tcp") {
        is_turned_away(ARENA_PAGES + RINGS, "1000004 bytes cannot be registered");
    }
}

#[test]
fn a_shard_that_may_not_pin_its_versions_is_reached_over_tcp() {
    if is_limited("a_shard_that_may_not_pin_its_versions_is_reached_over_tcp") {
        // The client's version and one of the shard's, which has three.
        is_turned_away(ARENA_PAGES + RINGS + 2 * VERSION, "refused by the shard: ");
    }
}

#[test]
fn versions_that_a_client_may_not_pin_come_through_the_ring() {
    if !is_limited("versions_that_a_client_may_not_pin_come_through_the_ring") {
        return;
    }
    let world = world(|options| options.placement = Placement::Static);
    // So that the shard has all that it needs.
    let first = connect(&world, TransportChoice::Rdma);
    let learner = Learner::join(&first, "first");
    steps(&learner, 1..=4);
    learner.leave();
    let client = connect(&world, TransportChoice::Rdma);
    limit(Some(0));
    let learner = Learner::join(&client, "second");
    steps(&learner, 5..=10);
    let counts = client.payload().unwrap();
    assert_eq!(client.shards()[0].transport, TransportKind::Rdma);
    assert!(counts.push_copied_bytes >= 6 * BYTES, "{counts:?}");
    // It has memory for one version that may be pinned.
    assert!((BYTES..counts.pulled_bytes).contains(&counts.pull_copied_bytes), "{counts:?}");
}

/// Greets a shard, asks for a version, and listens to nothing.
struct Deaf {
    out: Buffer,
    len: usize,
    sent: usize,
}

impl Stream for Deaf {
    fn opened(&mut self, _: &Connection) {}

    fn receive(&mut self, _: &mut ReceiveSlices) -> Receive {
        Receive::Paused
    }

    fn received(&mut self, _: usize) -> Result<(), Close> {
        unreachable!("nothing is received")
    }

    fn transmit(&mut self, out: &mut SendSlices) {
        if self.sent < self.len {
            // SAFETY: the buffer is this stream's, long enough, and left alone.
            unsafe { out.push(self.out.start().add(self.sent), self.len - self.sent) };
        }
    }

    fn transmitted(&mut self, bytes: usize) -> Result<(), Close> {
        self.sent += bytes;
        Ok(())
    }

    fn closed(&mut self, _: &Close) {}
}

/// Has the shard hold a version that is not fetched.
fn hold(endpoint: &Endpoint, world: &World, version: Version) {
    let record = &world.record;
    let hello = Message::Hello {
        protocol: Protocol::NEWEST.number(),
        role: Role::Data,
        model: record.name.clone(),
        generation: record.generation,
        client: ClientId(7),
    };
    let pull = Message::Pull { version, blocks: 0..16, base: None };
    let frames = [hello, pull];
    let said: Vec<u8> =
        frames.iter().flat_map(|message| frame(message, 0, record.epoch, &[]).unwrap()).collect();
    let before = of_shard(world).pulled_bytes;
    endpoint.connect(world.shards()[0].rdma.parse().unwrap(), Instant::now() + LONG, 0, move |queue_pair| {
        queue_pair.expect("a queue pair");
        let out = Buffer::zeroed(said.len());
        // SAFETY: it is as long, and nobody else knows it yet.
        unsafe { out.start().copy_from_nonoverlapping(said.as_ptr(), said.len()) };
        Some(Box::new(Deaf { out, len: said.len(), sent: 0 }) as Box<dyn Stream>)
    });
    until("it is asked", || of_shard(world).pulled_bytes != before);
}

#[test]
fn versions_that_a_shard_may_not_pin_go_through_the_ring() {
    if !is_limited("versions_that_a_shard_may_not_pin_go_through_the_ring") {
        return;
    }
    // Slots that are granted to a connection are pinned as long as it lasts.
    let world = world(|options| options.placement = Placement::Dynamic);
    let client = connect(&world, TransportChoice::Rdma);
    let learner = Learner::join(&client, "l");
    steps(&learner, 1..=4);
    assert_eq!(client.payload().unwrap().pull_copied_bytes, 0);
    // It takes more buffers, and uses them, when two versions are held.
    let endpoint = Endpoint::open(&world.rdma, Protocol::NEWEST.number()).unwrap();
    hold(&endpoint, &world, Version(3));
    hold(&endpoint, &world, Version(4));
    let (before, of_shard_before) = (client.payload().unwrap(), of_shard(&world));
    // Not even if sums give way.
    limit(Some(-2 * VERSION));
    steps(&learner, 5..=10);
    let (after, of_shard_after) = (client.payload().unwrap(), of_shard(&world));
    assert_eq!(after.push_copied_bytes, 0, "{after:?}");
    assert!(after.pull_copied_bytes >= before.pull_copied_bytes + BYTES, "{after:?}");
    let sent = of_shard_after.pull_copied_bytes - of_shard_before.pull_copied_bytes;
    assert!(sent >= BYTES, "{of_shard_after:?}");
    // What lies there can be read when it may be pinned; that is found out with the next greeting.
    limit(None);
    let _another = connect(&world, TransportChoice::Rdma);
    let before = client.payload().unwrap();
    steps(&learner, 11..=16);
    let after = client.payload().unwrap();
    assert_eq!(after.pull_copied_bytes, before.pull_copied_bytes, "{after:?}");
    endpoint.shut_down(LONG);
}

#[test]
fn versions_are_pinned_before_sums() {
    if !is_limited("versions_are_pinned_before_sums") {
        return;
    }
    let way = Way::rdma_with(|options| options.placement = Placement::Dynamic).expect("there is a device");
    let mut world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "2")], way);
    world.rdma = RdmaOptions { arena: ARENA, ..world.rdma };
    let clients = [(); 2].map(|()| connect(&world, TransportChoice::Rdma));
    let learners = [Learner::join(&clients[0], "a"), Learner::join(&clients[1], "b")];
    let steps = |steps: std::ops::RangeInclusive<u64>| {
        let before = of_shard(&world).push_stored_bytes;
        for step in steps {
            learners.iter().for_each(|learner| learner.pushes(1.0));
            learners.iter().for_each(|learner| learner.sees(step, 2.0 * step as f32));
        }
        of_shard(&world).push_stored_bytes - before
    };
    let endpoint = Endpoint::open(&world.rdma, Protocol::NEWEST.number()).unwrap();
    // With iWARP nothing is fetched into sums, and they give nothing.
    if endpoint.device().is_iwarp() {
        assert_eq!(steps(1..=4), 0);
        return;
    }
    assert!((BYTES / 2..=4 * BYTES).contains(&steps(1..=4)));
    hold(&endpoint, &world, Version(3));
    hold(&endpoint, &world, Version(4));
    // One of the buffers that the held versions take can still be pinned, and the other one takes a sum's place.
    limit(Some(VERSION));
    steps(5..=10);
    assert_eq!(steps(11..=12), 0);
    // All that versions needed was pinned: nothing came through the ring.
    assert_eq!(clients.each_ref().map(|client| client.payload().unwrap().pull_copied_bytes), [0, 0]);
    endpoint.shut_down(LONG);
}
