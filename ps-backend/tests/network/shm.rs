//! Shared memory: what only it has, and peers that misuse it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::bytes::mmap::Mapping;
use libmodelio::client::{ClientError, TransportChoice};
use libmodelio::transport::shm::{BorrowedRange, Descriptors, Meeting, Regions, RingEnd, meet};
use libmodelio::vocabulary::ids::{BlockId, ClientId, Epoch, PlanId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::transport_kind::TransportKind;
use libmodelio::wire::{Limits, Message, Protocol, Received, Receiver, Refusal, Role, frame};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ps_backend::server::{Server, ServerOptions};

use crate::world::{self, Client, LONG, Learner, Way, World, blank, is_unreachable, options, read, until};

const BYTES: u64 = 1_000_004;

#[test]
fn a_shard_on_another_host_is_reached_over_tcp_or_not_at_all() {
    let world = World::new(2, BYTES, &[("reducer", "sum")], Way::Shm);
    let mut shards = world.shards();
    shards[1].host = "another host".into();
    let error = world.connect(&shards, TransportChoice::SharedMemory).err().unwrap();
    let far = (shards[1].shard, shards[1].address.clone());
    assert!(matches!(&error, ClientError::Transport { .. }), "{error}");
    assert!(
        error.to_string().contains(&format!("shard {} at {} is on another host", far.0, far.1)),
        "{error}"
    );
    let client = Client::of(world.connect(&shards, TransportChoice::Auto).unwrap());
    let ways: Vec<_> = client.shards().into_iter().map(|peer| (peer.transport, peer.no_memory)).collect();
    assert_eq!(ways, [(TransportKind::SharedMemory, None), (TransportKind::Tcp, None)]);
}

#[test]
fn a_shard_without_a_socket_is_reached_over_tcp_and_the_status_says_so() {
    let world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "1")], Way::Shm);
    let mut shards = world.shards();
    // The same place, by a name from which no socket's name follows.
    shards[0].address = shards[0].address.replace("127.0.0.1", "localhost");
    let client = Client::of(world.connect(&shards, TransportChoice::Auto).unwrap());
    let peer = client.shards().remove(0);
    assert_eq!(peer.transport, TransportKind::Tcp);
    assert!(peer.no_memory.as_ref().is_some_and(|why| why.contains("Connection refused")), "{peer:?}");
    let learner = Learner::join(&client, "l");
    learner.makes(1.0, 1, 1.0);
    is_unreachable(&["shared memory: connecting to its socket"], |patience| {
        world.connect_within(&shards, TransportChoice::SharedMemory, patience).err().unwrap()
    });
}

#[test]
fn a_client_that_ends_while_its_memory_is_read_contributes_all_or_nothing() {
    // Longer than the pause between two signs of life.
    let settings = [("reducer", "sum"), ("learners", "1"), ("lease", "5")];
    let world = World::new(1, 8 << 20, &settings, Way::Shm);
    let _watcher = world.client();
    let mut sum = 0.0;
    for round in 0..3 {
        let (client, learner) = world.learner(&format!("gone-{round}"));
        let answer = learner.push(1.0);
        std::thread::sleep(Duration::from_micros(1000 * round));
        // It says nothing to anybody.
        drop((learner, answer));
        client.dies();
        let next = world.client();
        let learner = Learner::join(&next, &format!("next-{round}"));
        learner.pushes(100.0);
        let (_, weights) = learner.pull();
        assert!(weights.iter().all(|&w| w == weights[0]), "torn");
        let came = weights[0] - sum;
        assert!(came == 100.0 || came == 101.0, "round {round}: {came}");
        sum = weights[0];
        learner.leave();
    }
}

#[test]
fn a_restarted_shard_is_reached_by_shared_memory_again() {
    let start = |listen| {
        let (advertise, registry) = (None, None);
        let options = ServerOptions { listen, advertise, registry, ..options() };
        Server::start(options).unwrap()
    };
    let first = start("127.0.0.1:0".parse().unwrap());
    let at = first.address();
    let Meeting { end, socket } = meet(&at.to_string(), LONG).unwrap();
    first.shut_down();
    let mut sockets = [PollFd::new(socket.as_fd(), PollFlags::empty())];
    assert_eq!(poll(&mut sockets, PollTimeout::try_from(LONG).unwrap()), Ok(1), "it hangs up");
    drop((end, first));
    let second = start(at);
    assert!(second.backend().ends_with("; shm on this host"), "{}", second.backend());
    assert!(meet(&at.to_string(), LONG).is_ok());
}

/// A process that speaks by itself through shared memory.
pub struct Raw {
    end: RingEnd,
    socket: Arc<OwnedFd>,
    descriptors: Descriptors,
    receiver: Receiver,
    epoch: Epoch,
    came: Vec<u8>,
}

impl Raw {
    fn meet(world: &World) -> Raw {
        Raw::meet_shard(world, 0)
    }

    fn meet_shard(world: &World, shard: usize) -> Raw {
        let Meeting { end, socket } = meet(&world.shards()[shard].address, LONG).unwrap();
        let descriptors = Descriptors::new(Arc::clone(&socket));
        let epoch = world.record.epoch;
        Raw { end, socket, descriptors, receiver: Receiver::new(Limits::MAX), epoch, came: Vec::new() }
    }

    fn greet(world: &World, role: Role) -> Raw {
        Raw::meet(world).greets(world, role)
    }

    fn greets(mut self, world: &World, role: Role) -> Raw {
        self.say(Message::Hello {
            protocol: Protocol::NEWEST.number(),
            role,
            model: world.record.name.clone(),
            generation: world.record.generation,
            client: ClientId(7),
        });
        self
    }

    fn welcomed(world: &World) -> Raw {
        Raw::welcomed_by(world, 0)
    }

    pub fn welcomed_by(world: &World, shard: usize) -> Raw {
        let mut raw = Raw::meet_shard(world, shard).greets(world, Role::Data);
        let answer = raw.receive().unwrap().message;
        assert!(matches!(answer, Message::Welcome { .. }), "{answer:?}");
        raw
    }

    /// It lives: else its shard lets go of what it reads.
    pub fn lives(&mut self) {
        self.say(Message::Ping);
    }

    pub fn say(&mut self, message: Message) {
        self.ask(0, message);
    }

    fn ask(&mut self, request: u64, message: Message) {
        self.say_bytes(frame(&message, request, self.epoch, &[]).unwrap());
    }

    fn say_bytes(&mut self, mut bytes: Vec<u8>) {
        // SAFETY: the vector is this call's.
        let count = unsafe { self.end.write([(bytes.as_mut_ptr(), bytes.len())].into_iter()) };
        assert_eq!(count, Ok(bytes.len()));
    }

    /// The next message; none if the shard hangs up.
    pub fn receive(&mut self) -> Option<Received> {
        let deadline = Instant::now() + LONG;
        loop {
            let gone = self.is_gone(Duration::ZERO);
            let mut bytes = [0; 4096];
            // SAFETY: the array is this call's.
            let count = unsafe { self.end.read([(bytes.as_mut_ptr(), bytes.len())].into_iter()) }.unwrap();
            self.came.extend_from_slice(&bytes[..count]);
            let (used, received) = self.receiver.push(&self.came).unwrap();
            self.came.drain(..used);
            match received {
                // Which of its connections a client uses is nothing that is asked here, nor whether it lives.
                Some(Received { message: Message::Park { .. } | Message::Ping | Message::Pong, .. }) => {}
                Some(received) => return Some(received),
                None if gone && self.came.is_empty() => return None,
                None => assert!(Instant::now() < deadline, "no answer"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether the shard hangs up, or will say nothing more.
    fn is_gone(&self, patience: Duration) -> bool {
        let mut sockets =
            [PollFd::new(self.socket.as_fd(), PollFlags::from_bits_retain(nix::libc::POLLRDHUP))];
        poll(&mut sockets, PollTimeout::try_from(patience).unwrap()).unwrap() == 1
    }

    /// Why it hangs up.
    fn refused(&mut self) -> Refusal {
        let answer = self.receive();
        let Some(Received { message: Message::Refused(refusal), .. }) = answer else { panic!("{answer:?}") };
        assert!(self.receive().is_none() && self.is_gone(LONG));
        refusal
    }
}

#[test]
fn false_claims_are_refused_by_name_and_hurt_nobody_else() {
    let world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "1")], Way::Shm);
    let push = |region, offset| Message::PushAt {
        plan: PlanId(1),
        block: BlockId(0),
        wide: false,
        ahead: false,
        region,
        offset,
    };
    let share = |bytes| Message::Share { region: 1, bytes };
    let sealed = |bytes| {
        let memory = Mapping::memfd("lies", bytes).unwrap();
        memory.fix_size().unwrap();
        memory
    };
    let lies: [(&str, Option<Mapping>, Vec<Message>); 10] = [
        ("there is no region 1", None, vec![push(1, 0)]),
        ("cannot be received", None, vec![share(4096)]),
        ("not sealed", Some(Mapping::memfd("lies", 4096).unwrap()), vec![share(4096)]),
        ("has 4096 bytes, not 8192", Some(sealed(4096)), vec![share(8192)]),
        ("more than", Some(sealed(4096)), vec![share(1 << 40)]),
        ("leave region 1", Some(sealed(4096)), vec![share(4096), push(1, 0)]),
        ("leave region 1", Some(sealed(1 << 20)), vec![share(1 << 20), push(1, u64::MAX - 100)]),
        ("is not the next", None, vec![Message::Done]),
        // Versions are shown where they lie, so nothing is sent ahead.
        ("Follow", None, vec![Message::Follow { plan: PlanId(1), base: None }]),
        (
            "there is no region 1",
            Some(sealed(4096)),
            vec![share(4096), Message::Unshare { region: 1 }, push(1, 0)],
        ),
    ];
    for (why, memory, said) in lies {
        let mut raw = Raw::welcomed(&world);
        if let Some(memory) = &memory {
            raw.descriptors.send(1, memory.fd().unwrap()).unwrap();
        }
        said.into_iter().for_each(|message| raw.say(message));
        let refusal = raw.refused();
        assert!(refusal.to_string().contains(why), "{refusal} does not say {why}");
    }
    let mut raw = Raw::welcomed(&world);
    raw.say(Message::PushAt {
        plan: PlanId(1),
        block: BlockId(1000),
        wide: false,
        ahead: false,
        region: 1,
        offset: 0,
    });
    assert_eq!(raw.refused(), Refusal::NotMine { block: BlockId(1000) });
    assert!(matches!(Raw::greet(&world, Role::Control).refused(), Refusal::Role { .. }));
    let magic =
        |got: &str| Refusal::Frame { what: "magic".into(), expected: "0x4647".into(), got: got.into() };
    let mut raw = Raw::welcomed(&world);
    raw.say_bytes(vec![0x5a; 5000]);
    assert_eq!(raw.refused(), magic("0x5a5a"));
    let mut raw = Raw::meet(&world);
    raw.say_bytes(vec![0; 50_000]);
    assert_eq!(raw.refused(), magic("0x0000"));
    let mut raw = Raw::welcomed(&world);
    let mut corrupt = frame(&Message::Ping, 0, world.record.epoch, &[]).unwrap();
    *corrupt.last_mut().unwrap() ^= 1;
    raw.say_bytes(corrupt);
    let refusal = raw.refused();
    assert!(matches!(&refusal, Refusal::Frame { what, .. } if what == "checksum of the body"), "{refusal}");

    world.serves();
}

#[test]
fn blocks_of_plans_that_never_come_do_not_wait_for_ever() {
    let world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "1")], Way::Shm);
    let memory = Mapping::memfd("early", 64 << 10).unwrap();
    memory.fix_size().unwrap();
    let mut raw = Raw::welcomed(&world);
    raw.descriptors.send(1, memory.fd().unwrap()).unwrap();
    raw.say(Message::Share { region: 1, bytes: 64 << 10 });
    let blocks = world.record.layout().unwrap().blocks();
    let whole = blocks - 1;
    let begin = Instant::now();
    for block in (0..whole).map(BlockId) {
        let push =
            Message::PushAt { plan: PlanId(1 << 40), block, wide: false, ahead: false, region: 1, offset: 0 };
        raw.ask(u64::from(block.0) + 1, push);
    }
    // All at once, when the first one has waited long enough: it is free to use its memory again.
    for block in 0..whole {
        let answer = raw.receive().expect("it does not hang up");
        assert_eq!((answer.header.request(), answer.message), (u64::from(block) + 1, Message::Done));
    }
    let waited = begin.elapsed();
    assert!(waited > Duration::from_secs(2), "{waited:?}");
    raw.say(Message::Probe { plan: PlanId(0) });
    assert!(matches!(raw.receive().expect("it does not hang up").message, Message::Missing { .. }));

    // None of them counts.
    world.serves();
}

impl Raw {
    /// Pulls `version`, and says of none of its blocks that they are copied.
    fn hold(&mut self, version: Version, blocks: u32) -> Vec<BorrowedRange> {
        self.say(Message::Pull { version, blocks: 0..blocks, base: None });
        let Message::Share { region, bytes } = self.receive().unwrap().message else { panic!("not shared") };
        let mut regions = Regions::new(bytes);
        regions.share(region, bytes, &self.descriptors).unwrap();
        let place = |expected: u32| match self.receive().unwrap().message {
            Message::BlockAt { version: of, block, region, offset } => {
                assert_eq!((of, block), (version, BlockId(expected)));
                regions.piece(region, offset, 4 * (((BYTES / 4).min((64 << 10) / 4)) as usize)).ok()
            }
            other => panic!("{other:?}"),
        };
        // All but the last, which is shorter.
        (0..blocks).map(place).collect::<Vec<_>>().into_iter().flatten().collect()
    }
}

/// Whether all that a reader has mapped is `value`.
fn all_are(pieces: &[BorrowedRange], value: f32) -> bool {
    // SAFETY: the bytes are only compared.
    let bytes = |piece| unsafe { BorrowedRange::bytes(piece) };
    !pieces.is_empty()
        && pieces.iter().flat_map(bytes).copied().eq(value
            .to_le_bytes()
            .into_iter()
            .cycle()
            .take(pieces.len() * (64 << 10)))
}

/// Makes the versions `from` to `to`.
fn go_on(learner: &Learner, from: u64, to: u64) {
    for step in from..=to {
        learner.makes(1.0, step, step as f32);
    }
}

#[test]
fn a_version_that_a_silent_reader_may_still_read_is_never_written_over() {
    let world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "1")], Way::Shm);
    let (_client, learner) = world.learner("l");
    learner.pushes(1.0);
    let mut raw = Raw::welcomed(&world);
    let held = raw.hold(Version(1), client_blocks(&world));
    let begin = Instant::now();
    // The job goes on beside it.
    go_on(&learner, 2, 12);
    assert!(raw.is_gone(LONG), "silent for {:?}", begin.elapsed());
    // So it does when the shard waits for it no longer, and needs every buffer that it has.
    let mut readers = Vec::new();
    for version in 12..16 {
        let mut raw = Raw::welcomed(&world);
        raw.hold(Version(version), client_blocks(&world));
        readers.push(raw);
        go_on(&learner, version + 1, version + 1);
    }
    assert!(all_are(&held, 1.0), "the version that it reads was written over");
}

#[test]
fn a_version_that_is_read_when_its_connection_ends_is_never_written_over() {
    let world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "1")], Way::Shm);
    let (_client, learner) = world.learner("l");
    learner.pushes(1.0);
    let mut held = Vec::new();
    for version in 1..=6 {
        // Memory that several clients have released is taken again each time.
        let mut raw = Raw::welcomed(&world);
        held.push(raw.hold(Version(version), client_blocks(&world)));
        drop(raw);
        learner.pushes(1.0);
    }
    go_on(&learner, 8, 12);
    for (held, version) in held.iter().zip(1..) {
        assert!(all_are(held, version as f32), "version {version} was written over");
    }
}

impl Raw {
    /// Asks for `version` as a whole, and says of nothing that it is shown no more: the request that is to be answered.
    fn show(&mut self, regions: &mut Regions, version: Version) -> (u64, Arc<Mapping>) {
        self.say(Message::PullWhole { version });
        loop {
            let received = self.receive().expect("it does not hang up");
            match received.message {
                Message::Share { region, bytes } => regions.share(region, bytes, &self.descriptors).unwrap(),
                Message::Unshare { region } => regions.unshare(region).unwrap(),
                Message::VersionAt { version: of, region } => {
                    assert_eq!(of, version);
                    let memory = regions.whole(region, BYTES as usize).unwrap();
                    return (received.header.request(), memory);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Whether all of a version is `value`.
fn is_all(memory: &Mapping, value: f32) -> bool {
    // SAFETY: the bytes are only compared.
    unsafe { memory.floats(0..BYTES as usize / 4) }.iter().all(|&weight| weight == value)
}

#[test]
fn a_shard_whose_buffers_are_all_shown_by_a_client_goes_on_with_others() {
    const SHOWN: u64 = 12;
    let world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "1")], Way::Shm);
    let (_client, learner) = world.learner("l");
    let (mut raw, mut regions) = (Raw::welcomed(&world), Regions::new(BYTES));
    let mut shown = Vec::new();
    for version in 0..SHOWN {
        shown.push(raw.show(&mut regions, Version(version)));
        go_on(&learner, version + 1, version + 1);
    }
    // It has no more memory than its own buffers.
    let memory = memory_of_shard(&world);
    assert!(memory <= (6 + 2) * (BYTES + 4096), "{memory} bytes");
    assert!(shown.iter().zip(0..).all(|((_, memory), version)| is_all(memory, version as f32)));
    // It takes note of those that it has let go of, too, in any order; and once of each.
    for (request, _) in shown.iter().rev() {
        raw.ask(*request, Message::Done);
    }
    go_on(&learner, SHOWN + 1, SHOWN + 12);
    // The buffer that it has had last of all is used again.
    let (_, last) = raw.show(&mut regions, Version(SHOWN + 12));
    raw.ask(shown[0].0, Message::Done);
    assert!(raw.refused().to_string().contains("is not the next"));
    // That ends the connection, so this one is not.
    go_on(&learner, SHOWN + 13, SHOWN + 24);
    assert!(is_all(&last, (SHOWN + 12) as f32), "it was written over");
}

fn memory_of_shard(world: &World) -> u64 {
    world.servers[0].status()["models"][0]["memory_bytes"].as_u64().unwrap()
}

#[test]
fn a_shard_that_has_some_of_the_blocks_shows_no_version_as_a_whole() {
    let world = World::new(2, BYTES, &[("reducer", "sum")], Way::Shm);
    let mut raw = Raw::welcomed(&world);
    raw.say(Message::PullWhole { version: Version(0) });
    assert!(matches!(raw.refused(), Refusal::Role { .. }));
}

#[test]
fn a_client_that_holds_all_versions_that_it_may_shows_no_newer_one_and_holds_up_nobody() {
    let settings = [("reducer", "sum"), ("learners", "1"), ("max_versions", "4")];
    let world = World::new(1, BYTES, &settings, Way::Shm);
    let (client, reader) = (world.client(), world.client());
    let learner = Learner::join(&client, "l");
    let shows = |version| until("it is shown", || reader.version() >= Version(version));
    let still_are = |versions: &[u64]| {
        versions.iter().for_each(|&of| world::is_all(&read(&reader, Version(of)).1, of as f32))
    };
    for version in 0..8 {
        shows(version);
        assert!(reader.pin(Version(version)));
        go_on(&learner, version + 1, version + 1);
    }
    go_on(&learner, 9, 20);
    assert_eq!((reader.version(), reader.status().buffers.0), (Version(7), 8));
    still_are(&[0, 1, 2, 3, 4, 5, 6, 7]);
    reader.unpin(Version(1), 1);
    shows(20);
    assert_eq!(reader.payload().unwrap().pull_copied_bytes, 0);
    // When the shard ends, shown versions stay.
    world.servers[0].shut_down();
    still_are(&[0, 2, 3, 20]);
}

#[test]
fn a_plan_that_waits_for_memory_holds_up_no_other_model() {
    let layout = ModelLayout::blank(BYTES, DType::F32, 64 << 10).unwrap();
    let settings = [("reducer", "sum"), ("learners", "1")];
    let world = World::with_threads(1, 1, &layout, &settings, Way::Shm);
    let (_client, learner) = world.learner("l");
    let mut readers = Vec::new();
    let waiting = loop {
        assert!(readers.len() < 10, "as many versions as there are buffers are read");
        let mut raw = Raw::welcomed(&world);
        raw.say(Message::Pull { version: Version(readers.len() as u64), blocks: 0..1, base: None });
        assert!(matches!(raw.receive().unwrap().message, Message::Share { .. }));
        readers.push(raw);
        readers.iter_mut().for_each(Raw::lives);
        let answer = learner.push(1.0);
        if let Ok(done) = answer.recv_timeout(Duration::from_secs(1)) {
            assert_eq!(done, Ok(Message::Done));
            continue;
        }
        // The only thread that computes is free for it.
        blank(&world.registry, &format!("other-{}", readers.len()), &layout, &settings, 1);
        match answer.try_recv() {
            // It did not wait for memory, but is slow.
            Ok(done) => assert_eq!(done, Ok(Message::Done)),
            Err(_) => break answer,
        }
    };
    drop(readers);
    assert_eq!(waiting.recv_timeout(LONG).unwrap(), Ok(Message::Done));
}

fn client_blocks(world: &World) -> u32 {
    world.record.layout().unwrap().blocks()
}
