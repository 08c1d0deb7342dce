//! By RDMA, over a real device (software RDMA will do): every way in which it can be used, ends that go, and peers that
//! misuse it. Skipped, with the reason, where there is none.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver as News, Sender, channel};
use std::time::{Duration, Instant};

use libmodelio::bytes::mmap::Mapping;
use libmodelio::client::TransportChoice;
use libmodelio::transport::rdma::{
    Buffers, Device, DeviceMemory, Endpoint, Export, Placement, Polling, RdmaOptions,
};
use libmodelio::transport::stream::{Buffer, Close, Connection, Receive, ReceiveSlices, SendSlices, Stream};
use libmodelio::vocabulary::ids::{BlockId, ClientId, PlanId};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::transport_kind::TransportKind;
use libmodelio::wire::{Limits, Message, Protocol, Received, Receiver, Refusal, Role, frame};

use ps_backend::server::{Server, ServerOptions};

use crate::living::{SHORT_COURSE, lived_through};
use crate::steps::{THREE_ARE_SUMMED, one_connection_or_many, sums_in, sums_of_two_clients};
use crate::world::{Client, LONG, Learner, Way, World, push_all};

const BYTES: u64 = 1_000_004;

fn sums(change: fn(&mut RdmaOptions)) {
    if let Some(way) = Way::rdma_with(change) {
        sums_of_two_clients(way, 1);
    }
}

#[test]
fn learners_live_through_moves_of_their_model_by_rdma() {
    if let Some(way) = Way::rdma() {
        lived_through(way, &SHORT_COURSE);
    }
}

#[test]
fn blocks_are_fetched_into_slots_in_turn() {
    sums(|options| (options.placement, options.buffers) = (Placement::Dynamic, Buffers::Looped));
}

#[test]
fn blocks_are_fetched_into_slots_of_each_queue_pair() {
    sums(|options| (options.placement, options.buffers) = (Placement::Dynamic, Buffers::Own));
}

#[test]
fn two_slots_suffice() {
    sums(|options| (options.placement, options.slots) = (Placement::Dynamic, 2));
}

/// With a fixed order, a payload waits for those before it, in slots that they need, too.
fn in_order_through_two_slots(change: fn(&mut RdmaOptions)) {
    let Some(way) = Way::rdma_with(change) else { return };
    let settings = [("reducer", "sum"), ("learners", "3"), ("deterministic", "true")];
    let world = World::new(1, BYTES, &settings, way);
    let clients = [(); 3].map(|()| world.client());
    let learners: Vec<Learner> =
        clients.iter().zip(["a", "b", "c"]).map(|(client, name)| Learner::join(client, name)).collect();
    for step in 1..=5 {
        // The first one is the last to push.
        push_all(learners.iter().zip([1.0, 2.0, 4.0]).rev());
        learners.iter().for_each(|learner| learner.sees(step, 7.0 * step as f32));
    }
}

#[test]
fn contributions_in_a_fixed_order_share_two_slots() {
    in_order_through_two_slots(|options| (options.placement, options.slots) = (Placement::Dynamic, 2));
}

#[test]
fn contributions_in_a_fixed_order_share_two_slots_in_turn() {
    in_order_through_two_slots(|options| {
        (options.placement, options.slots) = (Placement::Dynamic, 2);
        options.buffers = Buffers::Looped;
    });
}

#[test]
fn each_queue_pair_may_wait_for_its_own_messages() {
    sums(|options| options.shared_receives = 0);
}

#[test]
fn short_queues_without_inline_data_suffice() {
    sums(|options| (options.depth, options.inline, options.report_every) = (16, 0, 1));
}

#[test]
fn a_client_has_one_queue_pair_or_many() {
    let ways: [fn(&mut RdmaOptions); 2] =
        [|options| options.placement = Placement::Static, |options| options.placement = Placement::Dynamic];
    for change in ways {
        if let Some(way) = Way::rdma_with(change) {
            one_connection_or_many(way);
        }
    }
}

#[test]
fn threads_may_sleep_or_never_do() {
    sums(|options| options.polling = Polling::Event);
    sums(|options| (options.polling, options.queues) = (Polling::Busy, 1));
}

#[test]
fn a_client_that_ends_silently_leaves_nothing() {
    let Some(way) = Way::rdma() else { return };
    let world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "1")], way);
    for round in 1..=5 {
        let client = world.client();
        assert_eq!(client.shards()[0].transport, TransportKind::Rdma);
        let learner = Learner::join(&client, "l");
        learner.makes(1.0, round, round as f32);
        learner.leave();
        client.dies();
    }
}

/// What a GPU's memory is to a shard: the CPU has no way to it but `copy_out`, which counts its bytes.
#[derive(Debug)]
struct Far {
    memory: Mapping,
    copied: AtomicUsize,
}

// SAFETY: nobody refers to the mapping but `copy_out`, which copies what the device has written, whatever it is.
unsafe impl DeviceMemory for Far {
    fn bytes(&self) -> usize {
        self.memory.len()
    }

    fn export(&self) -> Export<'_> {
        Export::Address(self.memory.start().as_ptr() as u64)
    }

    fn copy_out(&self, at: usize, into: &mut [u8]) -> std::io::Result<()> {
        assert!(at + into.len() <= self.memory.len());
        // SAFETY: within the mapping, and elsewhere than `into`.
        unsafe {
            into.as_mut_ptr().copy_from_nonoverlapping(self.memory.start().as_ptr().add(at), into.len())
        };
        self.copied.fetch_add(into.len(), Ordering::Relaxed);
        Ok(())
    }
}

#[test]
fn payload_may_lie_in_memory_of_another_device() {
    for placement in [Placement::Static, Placement::Dynamic] {
        let Some(way) = Way::rdma() else { return };
        let memory = Mapping::memfd("far", 8 << 20).unwrap();
        let far = Arc::new(Far { memory, copied: AtomicUsize::new(0) });
        let (mut options, transport) = way.options();
        options.rdma_options.placement = placement;
        options.device_memory = Some(Arc::clone(&far) as Arc<dyn DeviceMemory>);
        let layout = ModelLayout::blank(BYTES, DType::F32, 64 << 10).unwrap();
        let world = World::with_options(options, transport, 1, &layout, &THREE_ARE_SUMMED);
        sums_in(&world);
        // Five steps of two clients; sums are twice as wide.
        let copied = far.copied.load(Ordering::Relaxed);
        assert!((10 * BYTES..=15 * BYTES).contains(&(copied as u64)), "{copied} bytes, {placement}");
    }
}

/// Memory that is no device's.
#[derive(Debug)]
struct NoneOfADevice(Mapping);

// SAFETY: it is never registered: a memfd is no `dma_buf`.
unsafe impl DeviceMemory for NoneOfADevice {
    fn bytes(&self) -> usize {
        self.0.len()
    }

    fn export(&self) -> Export<'_> {
        Export::DmaBuf { fd: self.0.fd().expect("a memfd"), offset: 0 }
    }

    fn copy_out(&self, _: usize, _: &mut [u8]) -> std::io::Result<()> {
        unreachable!("nothing comes there")
    }
}

#[test]
fn memory_that_is_not_a_devices_is_refused() {
    let Some(way) = Way::rdma() else { return };
    let memory = || Arc::new(NoneOfADevice(Mapping::memfd("none", 8 << 20).unwrap()));
    let (options, _) = way.options();
    let why = Device::open_with(&options.rdma_options, Some(memory())).unwrap_err().to_string();
    assert!(why.starts_with("registering memory of a device: "), "{why}");
    let refused = Server::start(ServerOptions { device_memory: Some(memory()), ..options.clone() });
    let why = refused.err().expect("no shard").to_string();
    assert!(why.contains("registering memory of a device: "), "{why}");
    drop(Server::start(options).unwrap());
}

/// One end of a connection that says what a test tells it.
struct Raw {
    out: Buffer,
    to_send: Vec<u8>,
    sent: usize,
    into: Buffer,
    receiver: Receiver,
    news: Sender<Result<Received, String>>,
}

const ROOM: usize = 4096;

impl Stream for Raw {
    fn opened(&mut self, _: &Connection) {}

    fn receive(&mut self, into: &mut ReceiveSlices) -> Receive {
        // SAFETY: the buffer is this stream's, and is looked at only in `received`.
        unsafe { into.push(self.into.start(), ROOM) };
        Receive::Into { least: 1 }
    }

    fn received(&mut self, bytes: usize) -> Result<(), Close> {
        // SAFETY: nothing is received just now.
        let mut bytes = unsafe { std::slice::from_raw_parts(self.into.start(), bytes) };
        while let Ok((used, received)) = self.receiver.push(bytes) {
            bytes = &bytes[used..];
            match received {
                Some(received) => drop(self.news.send(Ok(received))),
                None => break,
            }
        }
        Ok(())
    }

    fn transmit(&mut self, out: &mut SendSlices) {
        let len = (self.to_send.len() - self.sent).min(ROOM);
        // SAFETY: nothing is being sent; the buffer is long enough, and left alone until it is.
        unsafe {
            self.out.start().copy_from_nonoverlapping(self.to_send[self.sent..].as_ptr(), len);
            out.push(self.out.start(), len);
        }
    }

    fn transmitted(&mut self, bytes: usize) -> Result<(), Close> {
        self.sent += bytes;
        Ok(())
    }

    fn closed(&mut self, why: &Close) {
        let _ = self.news.send(Err(why.to_string()));
    }
}

/// Connects, and sends `messages` after a greeting as `client`. Returns the answer.
fn say(
    endpoint: &Endpoint,
    world: &World,
    client: ClientId,
    messages: &[Message],
) -> News<Result<Received, String>> {
    let record = &world.record;
    let hello = Message::Hello {
        protocol: Protocol::NEWEST.number(),
        role: Role::Data,
        model: record.name.clone(),
        generation: record.generation,
        client,
    };
    let frames = std::iter::once(&hello).chain(messages);
    let to_send = frames.flat_map(|message| frame(message, 0, record.epoch, &[]).unwrap()).collect();
    let to: SocketAddr = world.shards()[0].rdma.parse().unwrap();
    let (news, events) = channel();
    endpoint.connect(to, Instant::now() + LONG, 0, move |queue_pair| {
        queue_pair.expect("a queue pair");
        let (out, into) = (Buffer::zeroed(ROOM), Buffer::zeroed(ROOM));
        let receiver = Receiver::new(Limits::MAX);
        Some(Box::new(Raw { out, to_send, sent: 0, into, receiver, news }) as Box<dyn Stream>)
    });
    events
}

/// How the shard ends a connection on which these were said.
fn ends(endpoint: &Endpoint, world: &World, messages: &[Message]) -> String {
    ended(&say(endpoint, world, ClientId(7), messages))
}

fn ended(events: &News<Result<Received, String>>) -> String {
    let mut refused = None;
    loop {
        match events.recv_timeout(LONG).expect("an end") {
            Ok(Received { message: Message::Refused(refusal), .. }) => refused = Some(refusal),
            Ok(_) => {}
            Err(why) => return refused.map_or(why, |refusal: Refusal| refusal.to_string()),
        }
    }
}

#[test]
fn a_hostile_client_ends_only_its_own_connection() {
    let Some(way) = Way::rdma() else { return };
    let world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "1")], way);
    let (_client, learner) = world.learner("l");
    let endpoint = Endpoint::open(&world.rdma, Protocol::NEWEST.number()).unwrap();
    let (plan, block, wide) = (PlanId(1), BlockId(0), false);
    let share = |bytes, address| Message::ShareAt { region: 1, bytes, address, key: 0xdead_beef };
    let push = |offset| Message::PushAt { plan, block, wide, ahead: false, region: 1, offset };
    let bad = [
        // A key that opens nothing: the fetch fails, and with it the queue pair.
        (vec![share(BYTES, 0x1000), push(0)], "RDMA: "),
        (vec![push(0)], "no region 1"),
        (vec![share(1 << 60, 0x1000)], "bytes, expected 1 to"),
        (vec![share(BYTES, u64::MAX - 8)], "bytes, expected 1 to"),
        (vec![share(BYTES, 0x1000), push(BYTES - 1)], "leave region 1"),
        (vec![share(BYTES, 0x1000), push(u64::MAX)], "leave region 1"),
        (vec![share(BYTES, 0x1000), share(BYTES, 0x1000)], "is there already"),
        (
            vec![Message::PushIn { plan, block, wide, ahead: false, slot: 999 }],
            "slot 999 is not the client's",
        ),
        (
            vec![Message::PushIn { plan, block: BlockId(1 << 20), wide, ahead: false, slot: 0 }],
            "is not one of this shard's",
        ),
        (vec![Message::Unshare { region: 5 }], "no region 5"),
    ];
    for (messages, expected) in &bad {
        let why = ends(&endpoint, &world, messages);
        // A queue pair that broke is closed without a word.
        let silent = *expected == "RDMA: " && why.contains("closed by the peer");
        assert!(silent || why.contains(expected), "{why:?} to {messages:?}");
    }
    learner.makes(2.0, 1, 2.0);
}

#[test]
fn a_fetch_into_a_sum_that_fails_leaves_nothing() {
    let Some(way) = Way::rdma_with(|options| {
        (options.placement, options.slots) = (Placement::Dynamic, 2);
    }) else {
        return;
    };
    let world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "2")], way);
    let clients = [(); 2].map(|()| world.client());
    let learners = [Learner::join(&clients[0], "a"), Learner::join(&clients[1], "b")];
    let step = |step: u32| {
        for learner in &learners {
            learner.pushes(1.0);
        }
        for learner in &learners {
            learner.sees(u64::from(step), 2.0 * step as f32);
        }
    };
    step(1);
    let endpoint = Endpoint::open(&world.rdma, Protocol::NEWEST.number()).unwrap();
    let memory = Mapping::memfd("held", BYTES as usize).unwrap();
    let held = endpoint.device().register(&memory).unwrap().remote();
    let share = |address, key| Message::ShareAt { region: 1, bytes: BYTES, address, key };
    let push = |plan, block| {
        let (block, offset) = (BlockId(block), u64::from(block) * (64 << 10));
        Message::PushAt { plan: PlanId(plan), block, wide: false, ahead: false, region: 1, offset }
    };
    for round in 2..=4 {
        // So that there is no slot to fetch ahead into, somebody has what will never have its turn in them.
        let holder = [share(held.address, held.key), push(99, 0), push(99, 1)];
        let _holder = say(&endpoint, &world, ClientId(8), &holder);
        std::thread::sleep(Duration::from_millis(300));
        // The first one's contribution is the plan after the two of each step. Somebody else says where it lies, and
        // lies.
        let mut lies = vec![share(held.address, held.key ^ 0x0505_0500)];
        lies.extend((0..BYTES.div_ceil(64 << 10) as u32).map(|block| push(u64::from(2 * round - 1), block)));
        let liar = say(&endpoint, &world, clients[0].id(), &lies);
        std::thread::sleep(Duration::from_millis(100));
        step(round);
        let why = ended(&liar);
        assert!(why.contains("RDMA: ") || why.contains("closed by the peer"), "{why}");
    }
    endpoint.shut_down(LONG);
}

#[test]
fn fewer_slots_suffice_if_no_more_fit() {
    // Rings of two connections for each client, two slots of twice a block, and none for blocks that are placed.
    let Some(way) = Way::rdma_with(|options| options.arena = 1 << 20) else { return };
    sums_in(&World::new(1, BYTES, &THREE_ARE_SUMMED, way));
}

#[test]
fn a_shard_whose_arena_is_full_is_reached_over_tcp() {
    // Not enough for two slots, with which it refuses the greeting; not enough for rings, with which the connection.
    let changes: [fn(&mut RdmaOptions); 2] =
        [|options| options.arena = 256 << 10, |options| options.arena = 64 << 10];
    for change in changes {
        let Some(way) = Way::rdma_with(change) else { return };
        let mut world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "1")], way);
        world.rdma = RdmaOptions { arena: 16 << 20, ..world.rdma };
        let mut shards = world.shards();
        shards[0].host = "another host".into();
        let client = Client::of(world.connect(&shards, TransportChoice::Auto).unwrap());
        let peer = client.shards().remove(0);
        assert_eq!(peer.transport, TransportKind::Tcp);
        let why = peer.no_rdma.expect("a reason");
        assert!(why.contains("raise ") && why.contains("--rdma-arena") && why.contains("or lower "), "{why}");
        let learner = Learner::join(&client, "l");
        learner.makes(2.0, 1, 2.0);
    }
}

/// What this process has of the device's and of the kernel's: objects by their kinds, pages that are pinned,
/// descriptors.
fn held() -> BTreeMap<&'static str, usize> {
    let in_self = |folder: &str| std::fs::read_dir(format!("/proc/self/{folder}")).unwrap();
    // The kernel names the thread that has made an object.
    let threads: Vec<String> =
        in_self("task").map(|t| t.unwrap().file_name().into_string().unwrap()).collect();
    let is_own = |line: &&str| {
        let mut words = line.split_whitespace().skip_while(|word| *word != "pid").skip(1);
        words.next().is_some_and(|pid| threads.iter().any(|thread| thread == pid))
    };
    let mut held = BTreeMap::new();
    for kind in ["qp", "mr", "cq", "pd", "srq", "cm_id"] {
        let output =
            Command::new("rdma").args(["resource", "show", kind]).output().expect("`rdma`, of iproute2");
        assert!(output.status.success(), "{output:?}");
        held.insert(kind, String::from_utf8_lossy(&output.stdout).lines().filter(is_own).count());
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let pinned = status.lines().find_map(|line| line.strip_prefix("VmPin:")).expect("VmPin");
    held.insert("KiB pinned", pinned.trim().trim_end_matches(" kB").parse().unwrap());
    held.insert("descriptors", in_self("fd").count());
    held
}

/// Connections that have come and gone leave nothing: GRADFS_RDMA_TIMES of them. In a process of its own, for what is
/// counted is the process's.
#[test]
fn clients_that_come_and_go_leave_nothing() {
    const ALONE: &str = "GRADFS_RDMA_ALONE";
    const AT_ONCE: usize = 4;
    if Way::rdma().is_some() && std::env::var_os(ALONE).is_none() {
        let mut again = Command::new(std::env::current_exe().unwrap());
        again
            .args(["--exact", "--nocapture", "rdma::clients_that_come_and_go_leave_nothing"])
            .env(ALONE, "1");
        let done = again.output().unwrap();
        // Its output is the summary of another program.
        eprint!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        assert!(done.status.success(), "{}", done.status);
        return;
    }
    let Some(way) = Way::rdma() else { return };
    let world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "1")], way);
    let endpoint = Endpoint::open(&world.rdma, Protocol::NEWEST.number()).unwrap();
    let come_and_go = |times: usize| {
        for begun in (0..times).step_by(AT_ONCE) {
            let some = begun..times.min(begun + AT_ONCE);
            let events: Vec<_> = some
                .map(|_| say(&endpoint, &world, ClientId(7), &[Message::Unshare { region: 1 }]))
                .collect();
            for events in events {
                while events.recv_timeout(LONG).expect("an end").is_ok() {}
            }
        }
        let until = Instant::now() + LONG;
        while endpoint.connections() > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(endpoint.connections(), 0);
    };
    // Objects that are made for the first ones, and kept.
    come_and_go(AT_ONCE);
    let settled = |expected: Option<&BTreeMap<_, _>>| {
        let until = Instant::now() + LONG;
        loop {
            let (seen, pause) = (held(), Duration::from_millis(200));
            // The shard's ends go a little later.
            let is_settled = expected.map_or(seen["qp"] == 0, |expected| seen == *expected);
            if is_settled || Instant::now() > until {
                return seen;
            }
            std::thread::sleep(pause);
        }
    };
    let before = settled(None);
    assert!(before["qp"] == 0 && before["mr"] > 0 && before["cm_id"] > 0, "{before:?}");
    let times = std::env::var("GRADFS_RDMA_TIMES").map_or(100, |text| text.parse().expect("a number"));
    let begun = Instant::now();
    come_and_go(times);
    eprintln!("{times} connections in {:?}", begun.elapsed());
    let after = settled(Some(&before));
    eprintln!("before {before:?}\nafter  {after:?}");
    assert_eq!(before, after);
    world.serves();
}
