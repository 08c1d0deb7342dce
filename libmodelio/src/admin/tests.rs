//! Against a listener that answers from a script: a good conversation, and all the ways in which it is none.

use std::net::TcpListener;
use std::thread::JoinHandle;

use super::*;
use crate::registry::{Registry, RegistryError, RemoteRegistry};
use crate::wire::{HEADER, RegistryAnswer, RegistryRequest, frame};

const SOON: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(600);

fn within(time: Duration) -> Instant {
    Instant::now() + time
}

/// A listener whose connections, in turn, are given to `script` with their number, and where it listens.
fn peer(connections: usize, script: impl Fn(usize, &mut Client) + Send + 'static) -> (String, Peer) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address").to_string();
    let thread = std::thread::spawn(move || {
        for number in 0..connections {
            let (stream, _) = listener.accept().expect("a connection");
            stream.set_read_timeout(Some(LONG)).expect("a timeout");
            script(number, &mut Client { stream, receiver: Receiver::new(Limits::MAX) });
        }
    });
    (address, Peer(Some(thread)))
}

/// A listener that goes when its script is over. Whoever has connected to it goes first.
struct Peer(Option<JoinHandle<()>>);

impl Drop for Peer {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.0.take().expect("one end").join().expect("the script was kept to");
        }
    }
}

/// The other end of a connection.
struct Client {
    stream: TcpStream,
    receiver: Receiver,
}

impl Client {
    /// The next message, its number and payload; `None` at the end.
    fn receive(&mut self) -> Option<(Message, u64, Vec<u8>)> {
        loop {
            let mut bytes = vec![0; self.receiver.wanted()];
            self.stream.read_exact(&mut bytes).ok()?;
            let (_, received) = self.receiver.push(&bytes).expect("sound frames");
            let Some(received) = received else { continue };
            let mut payload = vec![0; self.receiver.payload_due().unwrap_or(0) as usize];
            if !payload.is_empty() {
                self.stream.read_exact(&mut payload).ok()?;
                self.receiver.payload_done(crc32c(&payload)).expect("a sound payload");
            }
            return Some((received.message, received.header.request(), payload));
        }
    }

    fn say(&mut self, message: &Message, request: u64, payload: &[u8]) {
        let frame = frame(message, request, Epoch(0), payload).expect("a sound message");
        self.stream.write_all(&[frame.as_slice(), payload].concat()).expect("the client listens");
    }

    fn greet(&mut self, silence_ms: u32) {
        let hello = self.receive().expect("a hello").0;
        assert!(
            matches!(hello, Message::Hello { protocol, role: Role::Admin, .. } if protocol == Protocol::NEWEST.number()),
            "{hello:?}"
        );
        self.say(&welcome(silence_ms), 0, &[]);
    }

    /// Until the client has gone.
    fn wait(&mut self) {
        while self.receive().is_some() {}
    }
}

fn welcome(silence_ms: u32) -> Message {
    Message::Welcome { protocol: Protocol::NEWEST.number(), shard: ShardId(3), epoch: Epoch(7), silence_ms }
}

#[test]
fn a_good_conversation() {
    let (address, _peer) = peer(1, |_, client| {
        client.greet(10_000);
        let (status, request, _) = client.receive().expect("a request");
        assert_eq!((status, request), (Message::Status, 1));
        client.say(&Message::Ping, 0, &[]);
        assert_eq!(client.receive().expect("it lives").0, Message::Pong);
        client.say(&Message::Text, 1, b"{}");
        let (create, request, payload) = client.receive().expect("a request");
        assert_eq!((create, request, payload), (Message::Create, 2, vec![5; 100_000]));
        client.say(&Message::Refused(Refusal::Exists("m".to_owned())), 2, &[]);
        assert_eq!(client.receive().expect("another request").1, 3);
        client.say(&Message::Done, 3, &[]);
        client.wait();
    });
    let deadline = within(LONG);
    let mut peer = AdminPeer::connect(&address, deadline).expect("a greeting");
    assert_eq!((peer.shard(), peer.epoch(), peer.is_stale()), (ShardId(3), Epoch(7), false));
    let answer = peer.request(&Message::Status, &[], deadline).expect("an answer");
    assert_eq!(answer, (Message::Text, b"{}".to_vec()));
    let refused = peer.request(&Message::Create, &[5; 100_000], deadline).expect_err("a refusal");
    assert!(matches!(refused, AdminError::Refusal(Refusal::Exists(_))), "{refused}");
    assert_eq!(peer.request(&Message::Status, &[], deadline).expect("an answer").0, Message::Done);
    let unsendable = peer.request(&Message::Ping, &[1], deadline).expect_err("no payload belongs there");
    assert!(matches!(unsendable, AdminError::Request(WireError::Payload { .. })), "{unsendable}");
}

#[test]
fn names_are_resolved() {
    let (address, _peer) = peer(1, |_, client| client.greet(1000));
    let port = address.rsplit_once(':').expect("a port").1;
    AdminPeer::connect(&format!("localhost:{port}"), within(LONG)).expect("one of its addresses");
}

/// What connecting to a peer of this script ends with, by `time`.
fn failure(time: Duration, script: impl Fn(&mut Client) + Send + 'static) -> (AdminError, Duration) {
    let (address, _peer) = peer(1, move |_, client| script(client));
    let start = Instant::now();
    let error = AdminPeer::connect(&address, start + time).expect_err("no greeting");
    let took = start.elapsed();
    assert!(error.to_string().contains(&address), "{error}");
    assert!(!error.to_string().contains('\n'), "{error}");
    (error, took)
}

#[test]
fn something_else_listens() {
    let (error, _) = failure(LONG, |client| {
        client.stream.write_all(&b"HTTP/1.1 400 Bad Request\r\n".repeat(4)).expect("it listens");
        client.wait();
    });
    assert!(matches!(error, AdminError::NotGradfs { .. }), "{error}");
}

#[test]
fn a_greeting_that_is_damaged_on_the_way() {
    let greeting = frame(&welcome(1000), 0, Epoch(0), &[]).expect("a sound message");
    for (at, what) in [(HEADER / 2, "header"), (greeting.len() - 1, "body")] {
        let mut bytes = greeting.clone();
        bytes[at] ^= 0x10;
        let (error, _) = failure(LONG, move |client| {
            client.stream.write_all(&bytes).expect("it listens");
            client.wait();
        });
        match &error {
            AdminError::Wire { source: WireError::Checksum { what: found, .. }, .. } => {
                assert_eq!(*found, what)
            }
            other => panic!("{other}"),
        }
        assert!(error.to_string().contains("damaged on the way"), "{error}");
    }
}

#[test]
fn half_a_greeting() {
    let half = || frame(&welcome(1000), 0, Epoch(0), &[]).expect("a sound message")[..HEADER + 2].to_vec();
    let (error, _) = failure(LONG, move |client| {
        client.receive();
        client.stream.write_all(&half()).expect("it listens");
    });
    assert!(matches!(error, AdminError::Disconnected { .. }), "{error}");
    let (error, took) = failure(SOON, move |client| {
        client.stream.write_all(&half()).expect("it listens");
        client.wait();
    });
    assert!(matches!(error, AdminError::TimedOut { .. }), "{error}");
    assert!((SOON..LONG / 2).contains(&took), "{took:?}");
}

#[test]
fn a_peer_that_dribbles_does_not_extend_the_deadline() {
    let (error, took) = failure(SOON, |client| {
        let bytes = frame(&welcome(1000), 0, Epoch(0), &[]).expect("a sound message");
        for byte in bytes {
            std::thread::sleep(SOON / 10);
            if client.stream.write_all(&[byte]).is_err() {
                break;
            }
        }
    });
    assert!(matches!(error, AdminError::TimedOut { .. }), "{error}");
    assert!((SOON..LONG / 2).contains(&took), "{took:?}");
}

#[test]
fn another_version() {
    let here = Protocol::NEWEST.number();
    let other = here + 1;
    let is_it = |error: &AdminError| matches!(error, AdminError::Protocol { expected, got, .. } if (*expected, *got) == (here, other));
    let refusal = Message::Refused(Refusal::Protocol { expected: other, got: here });
    let (error, _) = failure(LONG, move |client| client.say(&refusal, 0, &[]));
    assert!(is_it(&error), "{error}");
    let (error, _) = failure(LONG, move |client| {
        // A welcome of the next protocol, with a field that this one does not have.
        let mut bytes = Vec::new();
        let message = Message::Welcome { protocol: other, shard: ShardId(1), epoch: Epoch(1), silence_ms: 1 };
        append_frame(&mut bytes, &message, 0, Epoch(0), Payload::NONE).expect("a sound message");
        client.stream.write_all(&bytes).expect("it listens");
        client.wait();
    });
    assert!(is_it(&error), "{error}");
}

#[test]
fn a_greeting_that_is_none() {
    let (error, _) = failure(LONG, |client| client.say(&Message::Done, 0, &[]));
    assert!(matches!(error, AdminError::Unexpected { what: "Done", .. }), "{error}");
}

#[test]
fn nobody_listens() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address").to_string();
    drop(listener);
    let error = AdminPeer::connect(&address, within(LONG)).expect_err("nobody");
    assert!(matches!(error, AdminError::ConnectionRefused { .. }), "{error}");
    let error = AdminPeer::connect("no port", within(LONG)).expect_err("no address");
    assert!(matches!(error, AdminError::Address { .. }), "{error}");
    let error = AdminPeer::connect(&address, Instant::now()).expect_err("no time");
    assert!(matches!(error, AdminError::TimedOut { .. }), "{error}");
}

#[test]
fn silence_ends_at_the_deadline() {
    let (address, _peer) = peer(1, |_, client| {
        client.greet(60_000);
        client.wait();
    });
    let mut peer = AdminPeer::connect(&address, within(LONG)).expect("a greeting");
    let start = Instant::now();
    let error = peer.request(&Message::Status, &[], start + SOON).expect_err("silence");
    assert!(matches!(error, AdminError::TimedOut { .. }), "{error}");
    assert!((SOON..LONG / 2).contains(&start.elapsed()));
}

#[test]
fn silence_ends_when_the_welcome_says() {
    let (address, _peer) = peer(1, |_, client| {
        client.greet(SOON.as_millis() as u32);
        assert_eq!(client.receive().expect("a request").0, Message::Status);
        let mut pings = 0;
        while let Some((message, ..)) = client.receive() {
            assert_eq!(message, Message::Ping);
            pings += 1;
        }
        assert!(pings >= 1, "a client that waits says that it lives");
    });
    let mut peer = AdminPeer::connect(&address, within(LONG)).expect("a greeting");
    let start = Instant::now();
    let error = peer.request(&Message::Status, &[], start + LONG).expect_err("silence");
    assert!(matches!(error, AdminError::Silent { .. }) && error.is_disconnect(), "{error}");
    assert!(start.elapsed() < LONG / 2 && peer.is_stale() == (peer.last_sent.elapsed() >= SOON / 2));
}

#[test]
fn pongs_keep_a_slow_answer_waited_for() {
    let (address, _peer) = peer(1, |_, client| {
        client.greet(SOON.as_millis() as u32);
        assert_eq!(client.receive().expect("a request").0, Message::Status);
        for _ in 0..8 {
            assert_eq!(client.receive().expect("a ping").0, Message::Ping);
            client.say(&Message::Pong, 0, &[]);
        }
        client.say(&Message::Text, 1, &[]);
        client.wait();
    });
    let mut peer = AdminPeer::connect(&address, within(LONG)).expect("a greeting");
    let answer = peer.request(&Message::Status, &[], within(LONG)).expect("an answer");
    assert_eq!(answer, (Message::Text, Vec::new()));
}

#[test]
fn a_damaged_payload_is_noticed() {
    let (address, _peer) = peer(1, |_, client| {
        client.greet(60_000);
        client.receive();
        let mut bytes = frame(&Message::Text, 1, Epoch(0), b"good").expect("a sound message");
        bytes.extend(b"bad!");
        client.stream.write_all(&bytes).expect("it listens");
        client.wait();
    });
    let mut peer = AdminPeer::connect(&address, within(LONG)).expect("a greeting");
    let error = peer.request(&Message::Status, &[], within(LONG)).expect_err("damage");
    assert!(
        matches!(error, AdminError::Wire { source: WireError::Checksum { what: "payload", .. }, .. }),
        "{error}"
    );
}

#[test]
fn whoever_is_hung_up_on_before_the_greeting_tries_again() {
    let (address, _peer) = peer(4, |number, client| {
        if number > 1 {
            client.greet(60_000);
            let (_, request, _) = client.receive().expect("a request");
            client.say(&Message::Registered(RegistryAnswer::Models(Vec::new())), request, &[]);
        }
    });
    let registry = RemoteRegistry::new(&*address);
    registry.models(within(LONG)).expect("an answer");
    let mut peer = AdminPeer::connect(&address, within(LONG)).expect("a greeting");
    peer.request(&Message::Registry(RegistryRequest::Models), &[], within(LONG)).expect("an answer");
    let always = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = always.local_addr().expect("its address").to_string();
    std::thread::spawn(move || always.incoming().for_each(drop));
    let start = Instant::now();
    let error = AdminPeer::connect(&address, start + SOON).expect_err("nobody greets");
    assert!(error.is_disconnect() && error.to_string().contains("while greeting it"), "{error}");
    assert!(start.elapsed() >= SOON / 2, "as long as there is time");
}

#[test]
fn a_registry_is_connected_to_again() {
    // The first connection ends after one answer; the second after a wrong one; the third stays.
    let (address, _peer) = peer(3, |number, client| {
        client.greet(60_000);
        let (asked, request, _) = client.receive().expect("a request");
        assert_eq!(asked, Message::Registry(RegistryRequest::Models));
        let answer = if number == 1 {
            Message::Done
        } else {
            Message::Registered(RegistryAnswer::Models(vec![format!("m{number}")]))
        };
        client.say(&answer, request, &[]);
        if number == 2 {
            client.wait();
        }
    });
    let registry = RemoteRegistry::new(address);
    assert_eq!(registry.models(within(LONG)).expect("an answer"), ["m0"]);
    let error = registry.models(within(LONG)).expect_err("a wrong answer on the second connection");
    assert!(matches!(error, RegistryError::Peer(AdminError::Unexpected { what: "Done", .. })), "{error}");
    assert_eq!(registry.models(within(LONG)).expect("an answer"), ["m2"]);
}
