//! Peers by RDMA that speak another protocol, or want more than there is, get the reason. Others are served as before.
//! Ends are made by hand here, of what the transport is made of. Skipped, with the reason, where there is no device.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use libmodelio::transport::rdma::verbs::{
    CmChannel, CmEvent, CmId, CmKind, Domain, Notify, Pair, PairLimits, Parameters, Poller, RemoteMemory,
    VerbsError,
};
use libmodelio::transport::rdma::{Endpoint, Offer};
use libmodelio::wire::Protocol;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::world::{LONG, Way, World, is_all};

const BYTES: u64 = 1_000_004;
/// Nobody speaks it.
const OTHER: u16 = 99;
const NO_GRADFS: &str = "something else than gradfs is there";

/// The next event, which comes soon.
fn next(channel: &Arc<CmChannel>) -> CmEvent {
    let until = Instant::now() + LONG;
    loop {
        if let Some(event) = channel.next().unwrap() {
            return event;
        }
        let left = until.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "no news of a connection");
        let mut ready = [PollFd::new(channel.as_fd(), PollFlags::POLLIN)];
        poll(&mut ready, PollTimeout::try_from(left).unwrap()).unwrap();
    }
}

/// A queue pair for an end that knows its way.
fn pair(cm_id: CmId) -> Arc<Pair> {
    let domain = Domain::new(cm_id.context().expect("a device leads there")).unwrap();
    let poller = Poller::new(&domain, 64, 0).unwrap();
    let receives = if domain.context().is_iwarp() { 0 } else { 4 };
    let limits = PairLimits { depth: 16, inline: 0, report_every: 1, receives };
    let reserved = Pair::reserve(&poller, limits).unwrap();
    Pair::new(cm_id, reserved, limits).map_err(|(error, _)| error).unwrap()
}

fn introducing(private: &[u8]) -> Parameters {
    Parameters { private: private.to_vec(), reads: 1, retries: 7 }
}

fn offer(notify: Notify) -> Offer {
    let ring = RemoteMemory { address: 0x1000, key: 1 };
    Offer { protocol: Protocol::NEWEST.number(), notify, mtu: None, ring }
}

/// Offers that an end with this way of notification refuses, with the name that it gives to the fault.
fn strange(notify: Notify) -> [(Vec<u8>, &'static str); 5] {
    let other = match notify {
        Notify::Immediate => Notify::Flag,
        Notify::Flag => Notify::Immediate,
    };
    let mut no_mtu = offer(notify).encode();
    no_mtu[7] = 6;
    [
        (Offer { protocol: OTHER, ..offer(notify) }.encode().to_vec(), "it speaks protocol 99, expected "),
        (no_mtu.to_vec(), "it wants the MTU numbered 6, expected 0 to 5"),
        (offer(other).encode().to_vec(), "set the same --rdma-notice for both"),
        (b"GET / HTTP/1.1\r\nHost: example".to_vec(), NO_GRADFS),
        (Vec::new(), NO_GRADFS),
    ]
}

/// Asks for a connection with `private` as its introduction, and returns the outcome.
fn ask(to: SocketAddr, private: &[u8]) -> CmEvent {
    const TOKEN: u64 = 5;
    const MILLIS: i32 = 5000;
    let channel = CmChannel::new().unwrap();
    let cm_id = CmId::new(&channel, TOKEN).unwrap();
    cm_id.resolve_address(None, to, MILLIS).unwrap();
    let event = next(&channel);
    assert!(matches!(event, CmEvent { token: TOKEN, kind: CmKind::AddressResolved, .. }), "{event:?}");
    cm_id.resolve_route(MILLIS).unwrap();
    let event = next(&channel);
    assert!(matches!(event.kind, CmKind::RouteResolved), "{event:?}");
    let pair = pair(cm_id);
    pair.cm_id().connect(&introducing(private)).unwrap();
    next(&channel)
}

#[test]
fn a_shard_turns_strangers_away_and_names_its_protocol() {
    let Some(way) = Way::rdma() else { return };
    let world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "1")], way);
    let (_client, learner) = world.learner("l");
    let to: SocketAddr = world.shards()[0].rdma.parse().unwrap();
    let notify = Endpoint::open(&world.rdma, Protocol::NEWEST.number()).unwrap().device().notify();
    let mut sum = 0.0;
    for (private, what) in strange(notify) {
        let event = ask(to, &private);
        assert!(matches!(event.kind, CmKind::Rejected), "{event:?}, {what}");
        let received = Offer::decode(&event.private, Protocol::NEWEST.number(), notify).expect(what);
        let ring = RemoteMemory { address: 0, key: 0 };
        assert_eq!(received, Offer { ring, ..offer(notify) }, "{what}");
        sum += 1.0;
        learner.pushes(1.0);
        is_all(&learner.pull().1, sum);
    }
    // Who comes after them is served, too.
    assert!(world.client().shards()[0].connected);
}

/// Takes one connection for each of `answers`: accepts it with that, or refuses it with that.
fn listen(address: SocketAddr, answers: Vec<(bool, Vec<u8>)>) -> (SocketAddr, std::thread::JoinHandle<()>) {
    let channel = CmChannel::new().unwrap();
    // The kernel picks a port that is free for RDMA. A TCP connection may have it, and siw needs it for TCP, too.
    let (listener, to) = (0..10)
        .find_map(|_| {
            let listener = CmId::new(&channel, 1).unwrap();
            match listener.listen(address, 4) {
                Err(VerbsError::Call { errno: Errno::EADDRINUSE, .. }) => None,
                outcome => Some((listener, outcome.unwrap())),
            }
        })
        .expect("a free port");
    let thread = std::thread::spawn(move || {
        let mut taken = Vec::new();
        for (accepts, private) in answers {
            let (cm_id, asked) = loop {
                // Others are of those before it: they end.
                if let CmEvent { token: 1, kind: CmKind::Request(cm_id), private } = next(&channel) {
                    break (cm_id, private);
                }
            };
            assert!(asked.starts_with(b"GFRD"), "{asked:?}");
            if accepts {
                let pair = pair(cm_id);
                pair.cm_id().accept(&introducing(&private), None).unwrap();
                taken.push(pair);
            } else {
                cm_id.reject(&private).unwrap();
            }
        }
        drop(taken);
        drop(listener);
    });
    (to, thread)
}

#[test]
fn a_client_names_the_protocol_of_a_strange_shard() {
    let Some(way) = Way::rdma() else { return };
    let world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "1")], way);
    let endpoint = Endpoint::open(&world.rdma, Protocol::NEWEST.number()).unwrap();
    let notify = endpoint.device().notify();
    let at: SocketAddr = world.shards()[0].rdma.parse().unwrap();
    let mut answers = Vec::new();
    let mut expected = Vec::new();
    for (private, what) in strange(notify) {
        let refused = match what {
            NO_GRADFS => ["refused: nobody listens there for RDMA", ""],
            _ => ["refused by the shard: it ", what],
        };
        answers.extend([(true, private.clone()), (false, private)]);
        expected.extend([["", what], refused]);
    }
    for (code, why) in [
        (1, "its registered memory is full: raise its --rdma-arena"),
        (2, "its completion queues are full: raise its --rdma-queues"),
        (3, "it uses another device, or another port, than the way leads to"),
        (0, "its log says why"),
        (77, "its log says why"),
    ] {
        let mut private = offer(notify).encode();
        private[12] = code;
        answers.push((false, private.to_vec()));
        expected.push(["refused by the shard: ", why]);
    }
    let (to, thread) = listen(SocketAddr::new(at.ip(), 0), answers);
    for [begins, says] in expected {
        let (sender, outcome) = channel();
        endpoint.connect(to, Instant::now() + LONG, 0, move |queue_pair| {
            sender.send(queue_pair.map(drop)).unwrap();
            None
        });
        let why = outcome.recv_timeout(LONG).expect("an answer").expect_err(says);
        assert!(why.starts_with(&format!("{to}: {begins}")) && why.contains(says), "{why}: {begins}{says}");
    }
    thread.join().unwrap();
    assert_eq!(endpoint.connections(), 0);
    // The device is none the worse for it.
    world.serves();
}
