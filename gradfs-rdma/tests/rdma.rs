//! Queue pairs over a real device (software RDMA will do): frames through rings, payload past them, and what peers do
//! wrong. Skipped, with the reason, where there is none.
#![cfg(feature = "verbs")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use gradfs_rdma::verbs::{
    Arena, Chunk, CmChannel, CmEvent, CmId, CmKind, Context, Domain, Notify, Pair, PairLimits, Parameters,
    Poller, Pool, RING, RemoteMemory, Rings, VerbsError, Work,
};
use gradfs_rdma::{Endpoint, Mtu, Offer, QueuePair, RdmaOptions};
use modelio_base::transport::stream::{
    Buffer, Close, Connection, Receive, ReceiveSlices, SendSlices, Stream,
};

const PROTOCOL: u16 = 12;

/// An address that leads over the device, as `GRADFS_RDMA_ADDRESS` says.
fn address() -> Option<SocketAddr> {
    match std::env::var("GRADFS_RDMA_ADDRESS") {
        Ok(text) => Some(SocketAddr::new(text.parse().expect("GRADFS_RDMA_ADDRESS is an address"), 0)),
        Err(_) => {
            eprintln!("skipped: GRADFS_RDMA_ADDRESS names no address of an RDMA device");
            None
        }
    }
}

fn options() -> RdmaOptions {
    RdmaOptions { arena: 4 << 20, ..RdmaOptions::default() }
}

/// Sends `to_send` bytes of a pattern, checks as many that come, and tells when it is over.
struct Pattern {
    to_send: usize,
    sent: usize,
    got: usize,
    expected: usize,
    out: Buffer,
    into: Buffer,
    news: Sender<String>,
}

const PIECE: usize = 8192;

impl Pattern {
    fn new(to_send: usize, expected: usize, news: Sender<String>) -> Pattern {
        let (out, into) = (Buffer::zeroed(PIECE), Buffer::zeroed(PIECE));
        Pattern { to_send, sent: 0, got: 0, expected, out, into, news }
    }

    fn at(position: usize) -> u8 {
        (position.wrapping_mul(2_654_435_761) >> 13) as u8
    }
}

impl Stream for Pattern {
    fn opened(&mut self, _: &Connection) {}

    fn receive(&mut self, into: &mut ReceiveSlices) -> Receive {
        // SAFETY: the buffer is this stream's, and is looked at only in `received`.
        unsafe { into.push(self.into.start(), PIECE) };
        Receive::Into { least: 1 }
    }

    fn received(&mut self, bytes: usize) -> Result<(), Close> {
        // SAFETY: nothing is received just now.
        let bytes = unsafe { std::slice::from_raw_parts(self.into.start(), bytes) };
        for &byte in bytes {
            if byte != Pattern::at(self.got) {
                return Err(Close::Asked(format!("byte {} is wrong", self.got).into()));
            }
            self.got += 1;
        }
        if self.got == self.expected {
            let _ = self.news.send("all".into());
        }
        Ok(())
    }

    fn transmit(&mut self, out: &mut SendSlices) {
        let len = PIECE.min(self.to_send - self.sent);
        // SAFETY: nothing is being sent; the buffer is long enough, and left alone until it is.
        unsafe {
            for index in 0..len {
                self.out.start().add(index).write(Pattern::at(self.sent + index));
            }
            out.push(self.out.start(), len);
        }
    }

    fn transmitted(&mut self, bytes: usize) -> Result<(), Close> {
        self.sent += bytes;
        Ok(())
    }

    fn closed(&mut self, why: &Close) {
        let _ = self.news.send(format!("closed: {why}"));
    }
}

const LONG: Duration = Duration::from_secs(600);

/// Serves connections, each with so many bytes both ways; where, and what becomes of them.
fn listens(endpoint: &Endpoint, at: SocketAddr, down: usize, up: usize) -> (SocketAddr, Receiver<String>) {
    let (sender, news) = channel();
    let stream = move |_: &Arc<QueuePair>, _| {
        Some(Box::new(Pattern::new(down, up, sender.clone())) as Box<dyn Stream>)
    };
    (endpoint.listen(at, stream).unwrap(), news)
}

/// The other end of one.
fn connects(endpoint: &Endpoint, to: SocketAddr, number: usize, up: usize, down: usize) -> Receiver<String> {
    let (sender, news) = channel();
    endpoint.connect(to, Instant::now() + LONG, number, move |queue_pair| {
        queue_pair.expect("a queue pair");
        Some(Box::new(Pattern::new(up, down, sender)) as Box<dyn Stream>)
    });
    news
}

fn next_event(news: &Receiver<String>) -> String {
    news.recv_timeout(LONG).expect("news in time")
}

#[test]
fn bytes_flow_both_ways() {
    let Some(at) = address() else { return };
    const UP: usize = 3_000_001;
    const DOWN: usize = 1_234_567;
    let endpoint = Endpoint::open(&options(), PROTOCOL).unwrap();
    let (sender, server) = channel();
    let to = endpoint
        .listen(at, move |_: &Arc<QueuePair>, peer| {
            assert!(peer.is_some());
            Some(Box::new(Pattern::new(DOWN, UP, sender.clone())) as Box<dyn Stream>)
        })
        .unwrap();
    let begun = Instant::now();
    let client = connects(&endpoint, to, 1, UP, DOWN);
    assert_eq!(next_event(&client), "all");
    assert_eq!(next_event(&server), "all");
    eprintln!("{} bytes in {:?}", UP + DOWN, begun.elapsed());
    assert_eq!(endpoint.connections(), 2);
    endpoint.shut_down(Duration::from_secs(2));
    assert!(next_event(&client).starts_with("closed: "));
    assert!(next_event(&server).starts_with("closed: "));
}

/// What both ends of a connection use, if they want these.
fn agreed(at: SocketAddr, server: Option<u32>, client: Option<u32>) -> [Option<u32>; 2] {
    let open = |bytes: Option<u32>| {
        let mtu = bytes.map(|bytes| Mtu::from_bytes(bytes).expect("an MTU"));
        Endpoint::open(&RdmaOptions { mtu, ..options() }, PROTOCOL).unwrap()
    };
    let ask = |queue_pair: &Arc<QueuePair>| queue_pair.mtu().unwrap().map(Mtu::bytes);
    let (server, client) = (open(server), open(client));
    let (tell, made) = channel();
    let (news, events) = channel();
    let of_server = (tell.clone(), news.clone());
    let to = server
        .listen(at, move |queue_pair: &Arc<QueuePair>, _| {
            of_server.0.send((0, ask(queue_pair))).unwrap();
            Some(Box::new(Pattern::new(20_000, 20_000, of_server.1.clone())) as Box<dyn Stream>)
        })
        .unwrap();
    client.connect(to, Instant::now() + Duration::from_secs(600), 0, move |queue_pair| {
        tell.send((1, ask(queue_pair.expect("a queue pair")))).unwrap();
        Some(Box::new(Pattern::new(20_000, 20_000, news)) as Box<dyn Stream>)
    });
    let mut found = [None; 2];
    for _ in 0..2 {
        let (end, mtu) = made.recv_timeout(Duration::from_secs(600)).expect("a queue pair in time");
        found[end] = mtu;
    }
    assert_eq!([next_event(&events), next_event(&events)], ["all", "all"]);
    found
}

#[test]
fn packets_are_no_longer_than_either_end_wants() {
    let Some(at) = address() else { return };
    let mtu = Mtu::from_bytes(1024);
    if let Err(why) = Endpoint::open(&RdmaOptions { mtu, ..options() }, PROTOCOL) {
        assert!(why.to_string().contains("speaks iWARP, which has no MTU of its own"), "{why}");
        assert_eq!(agreed(at, None, None), [None; 2]);
        return;
    }
    let [Some(most), same] = agreed(at, None, None) else { panic!("no MTU") };
    assert_eq!(same, Some(most));
    assert!(most >= 1024, "the path of a test takes {most}");
    for (server, client, expected) in [
        (Some(512), None, 512),
        (None, Some(256), 256),
        (Some(256), Some(1024), 256),
        (Some(1024), Some(512), 512),
    ] {
        assert_eq!(agreed(at, server, client), [Some(expected); 2], "{server:?}, {client:?}");
    }
}

#[test]
fn a_connection_to_nobody_fails_with_the_reason() {
    let Some(mut at) = address() else { return };
    at.set_port(9);
    let endpoint = Endpoint::open(&options(), PROTOCOL).unwrap();
    let (sender, client) = channel();
    endpoint.connect(at, Instant::now() + Duration::from_secs(5), 0, move |queue_pair| {
        sender.send(queue_pair.map(drop).unwrap_err()).unwrap();
        None
    });
    let why = next_event(&client);
    assert!(why.contains(&at.to_string()), "{why}");
}

#[test]
fn a_request_after_the_shutdown_is_refused() {
    let Some(at) = address() else { return };
    let endpoint = Endpoint::open(&options(), PROTOCOL).unwrap();
    endpoint.shut_down(Duration::from_secs(2));
    let begun = Instant::now();
    let (sender, client) = channel();
    endpoint.connect(at, begun + Duration::from_secs(600), 0, move |queue_pair| {
        sender.send(queue_pair.map(drop).unwrap_err()).unwrap();
        None
    });
    let why = next_event(&client);
    assert!(why.contains("RDMA is shut down"), "{why}");
    let error = endpoint.listen(at, |_, _| None).unwrap_err();
    assert!(error.to_string().contains("RDMA is shut down"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(300), "{:?}", begun.elapsed());
}

#[test]
fn a_stream_may_shut_down_its_own_endpoint() {
    let Some(at) = address() else { return };
    let endpoint = Endpoint::open(&options(), PROTOCOL).unwrap();
    let (to, server) = listens(&endpoint, at, 0, usize::MAX);
    let other = Endpoint::open(&options(), PROTOCOL).unwrap();
    let held = Arc::clone(&other);
    let (sender, ended) = channel();
    other.connect(to, Instant::now() + Duration::from_secs(600), 0, move |queue_pair| {
        queue_pair.expect("a queue pair");
        // The last one who holds it is on its own thread.
        drop(held);
        sender.send("dropped".to_owned()).unwrap();
        None
    });
    drop(other);
    let begun = Instant::now();
    assert_eq!(next_event(&ended), "dropped");
    assert!(begun.elapsed() < Duration::from_secs(300), "{:?}", begun.elapsed());
    // The server's end, if it has one, ends with it.
    let why = server.recv_timeout(Duration::from_secs(20));
    assert!(why.is_err() || why.unwrap().starts_with("closed: "));
}

/// A peer that does not stick to the rules.
struct Stranger {
    pair: Arc<Pair>,
    /// Where the other end has its ring.
    ring: RemoteMemory,
    chunk: Arc<Chunk>,
    arena: Arc<Arena>,
    _rings: Rings,
    channel: Arc<CmChannel>,
}

const DEPTH: u32 = 128;

impl Stranger {
    fn connect(to: SocketAddr, notify: Notify) -> Stranger {
        let channel = CmChannel::new().unwrap();
        let next = |wanted: fn(&CmKind) -> bool| -> CmEvent {
            let begun = Instant::now();
            loop {
                match channel.next().unwrap() {
                    Some(event) if wanted(&event.kind) => return event,
                    Some(event) => panic!("{event:?}"),
                    None => assert!(begun.elapsed() < Duration::from_secs(300), "no event in time"),
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let cm_id = CmId::new(&channel, 1).unwrap();
        cm_id.resolve_address(None, to, 5000).unwrap();
        next(|kind| matches!(kind, CmKind::AddressResolved));
        cm_id.resolve_route(5000).unwrap();
        next(|kind| matches!(kind, CmKind::RouteResolved));
        let domain = Domain::new(cm_id.context().unwrap()).unwrap();
        let arena = Arena::new(&domain, 1 << 20).unwrap();
        let poller = Poller::new(&domain, 2 * DEPTH, 0).unwrap();
        // What peers say by flags takes none, and devices without immediate data take none.
        let receives = if notify == Notify::Immediate { 16 } else { 0 };
        let limits = PairLimits { depth: DEPTH, inline: 0, report_every: 1, receives };
        let reserved = Pair::reserve(&poller, limits).unwrap();
        let pair = Pair::new(cm_id, reserved, limits).map_err(|(error, _)| error).unwrap();
        let rings = Rings::new(&arena, notify).unwrap();
        let protocol = PROTOCOL;
        let offer = Offer { protocol, notify, mtu: None, ring: rings.invitation() };
        let parameters = Parameters { private: offer.encode().to_vec(), reads: 1, retries: 7 };
        pair.cm_id().connect(&parameters).unwrap();
        let answer = next(|kind| matches!(kind, CmKind::Answered | CmKind::Established));
        if matches!(answer.kind, CmKind::Answered) {
            pair.cm_id().establish(None).unwrap();
        }
        let ring = Offer::decode(&answer.private, PROTOCOL, notify).unwrap().ring;
        let chunk = Arc::new(arena.take(4096).unwrap());
        Stranger { pair, ring, chunk, arena, _rings: rings, channel }
    }

    /// Has its device do something, and returns the outcome.
    fn does(&self, work: Work) -> Result<(), String> {
        self.pair.add(0, work).map_err(|(error, _)| error.to_string())?;
        self.pair.post().map_err(|error| error.to_string())?;
        let begun = Instant::now();
        let mut news = Vec::new();
        while begun.elapsed() < Duration::from_secs(10) {
            self.channel.next().unwrap();
            self.pair.poller().poll(&mut news).unwrap();
            if let Some(completion) = news.drain(..).find(|news| !news.is_receive()) {
                return self.pair.complete(completion).map(drop).map_err(|error| error.to_string());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Err("nothing came of it in time".into())
    }

    /// Says words, as fast as can be, until it is thrown out. How many were taken.
    fn say(&self, words: u32) -> u32 {
        let mut taken = 0;
        for _ in 0..words {
            let (chunk, to) = (Arc::clone(&self.chunk), self.ring);
            // As if so many bytes had been read that were never sent.
            let work = Work::Ring { chunk, start: 0, len: 0, to, word: Some(1 << 30 | 777_777) };
            if self.pair.add(0, work).is_err() {
                break;
            }
        }
        self.pair.post().unwrap();
        let begun = Instant::now();
        let mut news = Vec::new();
        let mut over = false;
        while taken < words && !over && begun.elapsed() < Duration::from_secs(10) {
            over =
                self.channel.next().unwrap().is_some_and(|event| matches!(event.kind, CmKind::Disconnected));
            self.pair.poller().poll(&mut news).unwrap();
            for completion in news.drain(..) {
                taken += u32::from(self.pair.complete(completion).is_ok());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        taken
    }
}

#[test]
fn unread_notifications_use_nothing_up() {
    let Some(at) = address() else { return };
    let options = RdmaOptions { queues: 1, shared_receives: 8, ..options() };
    let endpoint = Endpoint::open(&options, PROTOCOL).unwrap();
    if endpoint.device().is_iwarp() {
        eprintln!("skipped: with iWARP there are flags, and no words");
        return;
    }
    let (to, server) = listens(&endpoint, at, 20_000, 20_000);
    let mut taken = 0;
    for _ in 0..16 {
        taken += Stranger::connect(to, Notify::Immediate).say(DEPTH - 8);
        let why = loop {
            let news = next_event(&server);
            if news.starts_with("closed: ") {
                break news;
            }
        };
        assert!(why.contains("777777 bytes"), "{why}");
    }
    // Where the shard is quick, each takes no more than wait for it: eight. That is used up in one, if it is.
    assert!(taken > 8 * 8, "{taken} words were taken: too few to use up what waits for them");
    let events = connects(&endpoint, to, 0, 20_000, 20_000);
    assert_eq!([next_event(&events), next_event(&server)], ["all", "all"]);
}

#[test]
fn a_peer_that_leaves_its_memory_is_thrown_out_alone() {
    let Some(at) = address() else { return };
    const BYTES: usize = 2_000_000;
    let endpoint = Endpoint::open(&options(), PROTOCOL).unwrap();
    let notify = endpoint.device().notify();
    let (sender, server) = channel();
    let expected = Arc::new(AtomicUsize::new(BYTES));
    let of_server = Arc::clone(&expected);
    let to = endpoint
        .listen(at, move |_: &Arc<QueuePair>, _| {
            let bytes = of_server.load(Ordering::Relaxed);
            Some(Box::new(Pattern::new(bytes, bytes, sender.clone())) as Box<dyn Stream>)
        })
        .unwrap();
    type Attack = fn(&Stranger) -> Work;
    fn write(stranger: &Stranger, to: RemoteMemory) -> Work {
        Work::Ring { chunk: Arc::clone(&stranger.chunk), start: 0, len: 4096, to, word: None }
    }
    fn read(stranger: &Stranger, from: RemoteMemory) -> Work {
        let slot = Pool::new(stranger.arena.take(4096).unwrap(), 4096, false).take(None).unwrap();
        Work::Read { slot, len: 4096, from, fence: false }
    }
    fn foreign(place: RemoteMemory) -> RemoteMemory {
        RemoteMemory { key: place.key ^ 0x0505_0500, ..place }
    }
    let attacks: [(&str, Attack); 6] = [
        ("a write far behind its ring", |stranger| write(stranger, stranger.ring.at(1 << 30))),
        ("a write that begins in its ring", |stranger| {
            write(stranger, stranger.ring.at((RING + 4096 - 8) as u64))
        }),
        ("a write before its ring", |stranger| write(stranger, stranger.ring.at(8u64.wrapping_neg()))),
        ("a write with a key that is not there", |stranger| write(stranger, foreign(stranger.ring))),
        ("a read of the ring, which may only be written", |stranger| read(stranger, stranger.ring)),
        ("a read with a key that is not there", |stranger| read(stranger, foreign(stranger.ring))),
    ];
    for (what, attack) in attacks {
        // Nothing comes of them that anyone waits for.
        expected.store(0, Ordering::Relaxed);
        let stranger = Stranger::connect(to, notify);
        expected.store(BYTES, Ordering::Relaxed);
        // Meanwhile another one goes on.
        let events = connects(&endpoint, to, 1, BYTES, BYTES);
        let work = attack(&stranger);
        let is_write = matches!(work, Work::Ring { .. });
        match stranger.does(work) {
            // With iWARP a write is done when it is sent; siw checks the keys and ranges of READs, and not the rights.
            Ok(()) => {
                let may = endpoint.device().is_iwarp() && (is_write || what.ends_with("may only be written"));
                assert!(may, "{what} was done");
            }
            Err(why) => eprintln!("{what}: {why}"),
        }
        assert_eq!(next_event(&events), "all", "{what}");
        drop(stranger);
        let mut of_server = [next_event(&server), next_event(&server)];
        of_server.sort();
        assert!(of_server[0] == "all" && of_server[1].starts_with("closed: "), "{what}: {of_server:?}");
        drop(events);
    }
}

#[test]
fn a_completion_queue_takes_no_more_than_it_holds() {
    let Some(at) = address() else { return };
    let channel = CmChannel::new().unwrap();
    let cm_id = CmId::new(&channel, 1).unwrap();
    cm_id.resolve_address(None, at, 5000).unwrap();
    let begun = Instant::now();
    let context: Context = loop {
        if let Some(context) = cm_id.context() {
            break context;
        }
        assert!(begun.elapsed() < Duration::from_secs(300), "no device in time");
        channel.next().unwrap();
        std::thread::sleep(Duration::from_millis(1));
    };
    let domain = Domain::new(context).unwrap();
    let poller = Poller::new(&domain, 64, 0).unwrap();
    let first = poller.reserve(64).unwrap();
    match poller.reserve(u32::MAX) {
        Err(VerbsError::QueueFull { all, wanted }) => assert!(wanted > all, "{wanted} of {all}"),
        other => panic!("{other:?}"),
    }
    // It grows, where the device can.
    match poller.reserve(200) {
        Ok(second) => {
            let third = poller.reserve(200).unwrap();
            drop((second, third));
        }
        Err(VerbsError::QueueFull { all, wanted: 264 }) => assert!(all < 264, "{all}"),
        other => panic!("{other:?}"),
    }
    // Room that was given back is there again.
    drop(first);
    drop(poller.reserve(64).unwrap());
}
