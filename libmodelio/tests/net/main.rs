//! Reactors on real sockets: each test runs with io_uring and with epoll.

mod rings;
mod streams;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::sleep;
use std::time::{Duration, Instant};

use libmodelio::transport::reactor::{Backend, Choice, Reactor, ReactorOptions, Refused, Thread};
use libmodelio::transport::stream::{Buffer, Close, Connection, Stream};
use libmodelio::transport::tcp::{SocketOptions, bind, connect};
use nix::errno::Errno;
use streams::{Chatter, Counter, Echo, Event, FAREWELL, PATIENCE, Patient, Watch, Wrong, pattern};

/// A test with both ways of moving bytes.
macro_rules! both {
    ($($name:ident)*) => {
        mod uring {
            $(#[test] fn $name() {
                match super::Backend::choose(super::Choice::Uring) {
                    Ok(_) => super::$name(super::Choice::Uring),
                    Err(because) => eprintln!("not tested with io_uring: {because}"),
                }
            })*
        }
        mod poll {
            $(#[test] fn $name() {
                super::$name(super::Choice::Poll);
            })*
        }
    };
}

both! {
    bytes_come_back_in_order
    two_hundred_connections
    a_paused_stream_gets_nothing_until_it_is_woken
    a_peer_that_ends_is_noticed
    a_peer_that_resets_is_noticed
    closing_in_mid_transfer_frees_the_memory
    a_peer_that_never_reads_holds_up_nobody
    a_trickle_is_gathered
    what_waits_to_be_gathered_is_told
    no_wake_up_is_lost_and_a_farewell_arrives
    connecting_has_a_deadline
    a_refused_connection_is_told
    a_connection_is_made
    defects_close_only_their_connection
    busy_connections_are_on_different_threads
    limits_hold
    nothing_is_taken_after_the_end
}

fn reactor(choice: Choice, threads: usize) -> Reactor {
    let options = ReactorOptions { name: "test".to_owned(), threads, choice, ..ReactorOptions::default() };
    let reactor = Reactor::start(&options).expect("a reactor");
    assert_eq!(*reactor.backend() == Backend::Uring, choice == Choice::Uring);
    reactor
}

fn end(reactor: Reactor) {
    reactor.shut_down(PATIENCE).expect("all threads end");
}

/// Two ends of a connection.
fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let options =
        SocketOptions { send_buffer: Some(100_000), receive_buffer: Some(100_000), ..<_>::default() };
    let near = connect(listener.local_addr().expect("address"), &options, PATIENCE).expect("connect");
    let (far, _) = listener.accept().expect("accept");
    far.set_read_timeout(Some(PATIENCE)).expect("a deadline");
    far.set_write_timeout(Some(PATIENCE)).expect("a deadline");
    (near, far)
}

fn opened(events: &Receiver<Event>) -> Connection {
    match events.recv_timeout(PATIENCE).expect("an event") {
        Event::Opened(connection) => connection.0,
        other => panic!("opened expected, not {other:?}"),
    }
}

fn closed(events: &Receiver<Event>) -> Close {
    loop {
        if let Event::Closed(why) = events.recv_timeout(PATIENCE).expect("an event") {
            return why;
        }
    }
}

fn complete(events: &Receiver<Event>) {
    loop {
        match events.recv_timeout(PATIENCE).expect("an event") {
            Event::Complete => return,
            Event::Opened(_) => {}
            Event::Closed(why) => panic!("closed: {why}"),
        }
    }
}

/// A stream that sends `total` bytes and expects `expected`, with its record and its events.
fn chatter(seed: u64, total: u64, expected: u64) -> (Chatter, Arc<Watch>, Receiver<Event>) {
    let (sender, events): (Sender<Event>, _) = channel();
    let chatter = Chatter::new(seed, total, expected, sender);
    let watch = Arc::clone(&chatter.watch);
    (chatter, watch, events)
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        sleep(Duration::from_millis(1));
    }
}

fn echo_server(reactor: &Reactor) -> SocketAddr {
    let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0)), &SocketOptions::default()).expect("bind");
    let address = listener.local_addr().expect("address");
    let factory = |_| Some(Box::new(Echo::new()) as Box<dyn Stream>);
    reactor.handle().listen(listener, SocketOptions::default(), factory).expect("listen");
    address
}

fn bytes_come_back_in_order(choice: Choice) {
    let reactor = reactor(choice, 2);
    let address = echo_server(&reactor);
    for seed in 1..=6 {
        let bytes = [1, 63, 4096, 262_144, 3_000_000, 8_000_001][seed as usize - 1];
        let (mut stream, watch, events) = chatter(seed, bytes, bytes);
        // Odd ones ask for much at once.
        stream.least = (seed % 2 == 1).then_some(262_144);
        let socket = connect(address, &SocketOptions::default(), PATIENCE).expect("connect");
        reactor.handle().add(socket, Box::new(stream), Thread::Any).expect("room");
        complete(&events);
        assert_eq!(watch.received.load(Ordering::SeqCst), bytes);
    }
    end(reactor);
}

fn two_hundred_connections(choice: Choice) {
    let reactor = reactor(choice, 1);
    let address = echo_server(&reactor);
    let (sender, events) = channel();
    for seed in 0..200 {
        let stream = Chatter::new(seed, 50_000, 50_000, sender.clone());
        let deadline = Instant::now() + PATIENCE;
        let handle = reactor.handle();
        handle
            .connect(address, SocketOptions::default(), deadline, Box::new(stream), Thread::Any)
            .expect("room");
    }
    for _ in 0..200 {
        complete(&events);
    }
    end(reactor);
}

fn a_paused_stream_gets_nothing_until_it_is_woken(choice: Choice) {
    const BYTES: u64 = 3_000_000;
    let reactor = reactor(choice, 1);
    let (near, mut far) = pair();
    let (stream, watch, events) = chatter(7, 0, BYTES);
    let connection = reactor.handle().add(near, Box::new(stream), Thread::Any).expect("room");
    let writer = std::thread::spawn(move || {
        let bytes: Vec<u8> = (0..BYTES).map(|position| pattern(7, position)).collect();
        far.write_all(&bytes).expect("all is taken in the end");
        far
    });
    let received = || watch.received.load(Ordering::SeqCst);
    for round in 1..=3 {
        wait_until("some bytes", || received() > round * 100_000);
        watch.paused.store(true, Ordering::SeqCst);
        let mut last = received();
        // Outstanding bytes may still come.
        wait_until("a pause", || {
            sleep(Duration::from_millis(20));
            std::mem::replace(&mut last, received()) == last
        });
        watch.paused.store(false, Ordering::SeqCst);
        connection.wake();
    }
    complete(&events);
    drop(writer.join().expect("the writer"));
    assert_eq!(closed(&events), Close::Ended);
    wait_until("closed", || connection.is_closed());
    end(reactor);
}

fn a_peer_that_ends_is_noticed(choice: Choice) {
    let reactor = reactor(choice, 1);
    let (near, mut far) = pair();
    let (mut stream, watch, events) = chatter(8, 0, 1_000_000);
    // More than will ever come: the bytes that there are, are reported before the end.
    stream.least = Some(200_000);
    reactor.handle().add(near, Box::new(stream), Thread::Any).expect("room");
    let bytes: Vec<u8> = (0..70_000).map(|position| pattern(8, position)).collect();
    far.write_all(&bytes).expect("written");
    drop(far);
    assert_eq!(closed(&events), Close::Ended);
    assert_eq!(watch.received.load(Ordering::SeqCst), 70_000);
    end(reactor);
}

fn a_peer_that_resets_is_noticed(choice: Choice) {
    let reactor = reactor(choice, 1);
    let (near, mut far) = pair();
    // It sends for ever; the peer takes a part and goes, with bytes unread: a reset.
    let (stream, _, events) = chatter(9, u64::from(u32::MAX), 1);
    reactor.handle().add(near, Box::new(stream), Thread::Any).expect("room");
    far.read_exact(&mut vec![0; 300_000]).expect("some bytes");
    drop(far);
    match closed(&events) {
        Close::Socket { errno: Errno::ECONNRESET | Errno::EPIPE, .. } => {}
        other => panic!("a reset expected, not {other:?}"),
    }
    end(reactor);
}

fn closing_in_mid_transfer_frees_the_memory(choice: Choice) {
    let reactor = reactor(choice, 1);
    for round in 0..20 {
        let (near, mut far) = pair();
        let (stream, watch, events) = chatter(10, u64::from(u32::MAX), u64::from(u32::MAX));
        let connection = reactor.handle().add(near, Box::new(stream), Thread::Any).expect("room");
        let bytes: Vec<u8> = (0..200_000).map(|position| pattern(10, position)).collect();
        let mut sender = far.try_clone().expect("clone");
        let writer = std::thread::spawn(move || sender.write_all(&bytes));
        far.read_exact(&mut vec![0; 50_000]).expect("some bytes");
        wait_until("some bytes", || watch.received.load(Ordering::SeqCst) > 0);
        sleep(Duration::from_micros(round * 100));
        connection.close(Close::Asked("enough".into()));
        connection.close(Close::Asked("too late".into()));
        assert_eq!(closed(&events), Close::Asked("enough".into()));
        // The stream and its buffers are gone: nothing holds the watch but this test.
        wait_until("the stream is dropped", || Arc::strong_count(&watch) == 1);
        wait_until("the peer sees it", || match far.read(&mut [0; 65536]) {
            Ok(0) => true,
            Err(err) => err.kind() == ErrorKind::ConnectionReset,
            Ok(_) => false,
        });
        // It may have been cut off, or not.
        let _ = writer.join().expect("the writer");
        connection.wake();
    }
    end(reactor);
}

fn a_peer_that_never_reads_holds_up_nobody(choice: Choice) {
    let reactor = reactor(choice, 1);
    let (near, far) = pair();
    let (mut stalled, _, stalled_events) = chatter(11, u64::from(u32::MAX), 1);
    let deadline = Instant::now() + Duration::from_secs(2);
    stalled.deadline = Some(deadline);
    reactor.handle().add(near, Box::new(stalled), Thread::Number(0)).expect("room");
    opened(&stalled_events);
    let address = echo_server(&reactor);
    let (stream, _, events) = chatter(12, 2_000_000, 2_000_000);
    let socket = connect(address, &SocketOptions::default(), PATIENCE).expect("connect");
    reactor.handle().add(socket, Box::new(stream), Thread::Number(0)).expect("room");
    complete(&events);
    assert_eq!(closed(&stalled_events), Close::Asked("past its deadline".into()));
    assert!(Instant::now() >= deadline);
    drop(far);
    end(reactor);
}

fn a_trickle_is_gathered(choice: Choice) {
    let reactor = reactor(choice, 1);
    for least in [100_usize, 40_000] {
        let (near, mut far) = pair();
        let (mut stream, watch, events) = chatter(13, 0, least as u64);
        stream.least = Some(least);
        reactor.handle().add(near, Box::new(stream), Thread::Any).expect("room");
        let bytes: Vec<u8> = (0..least as u64).map(|position| pattern(13, position)).collect();
        for piece in bytes.chunks(least / 50) {
            assert_eq!(watch.calls.load(Ordering::SeqCst), 0);
            far.write_all(piece).expect("written");
            sleep(Duration::from_millis(1));
        }
        complete(&events);
        assert_eq!(watch.calls.load(Ordering::SeqCst), 1);
    }
    end(reactor);
}

fn what_waits_to_be_gathered_is_told(choice: Choice) {
    let reactor = reactor(choice, 1);
    let (near, mut far) = pair();
    let (sender, arrived) = channel();
    let stream = Patient::new(100_000, sender);
    reactor.handle().add(near, Box::new(stream), Thread::Any).expect("room");
    let mut written = 0;
    for piece in [30_000, 500, 1] {
        far.write_all(&vec![0; piece]).expect("written");
        written += piece;
        let deadline = Instant::now() + PATIENCE;
        while arrived.recv_timeout(PATIENCE).expect("a report") != written {
            assert!(Instant::now() < deadline);
        }
    }
    end(reactor);
}

/// Says which thread it is on.
struct Placed(Sender<String>);

impl Stream for Placed {
    fn opened(&mut self, _: &Connection) {
        let thread = std::thread::current().name().expect("a name").to_owned();
        self.0.send(thread).expect("the test listens");
    }

    fn receive(
        &mut self,
        _: &mut libmodelio::transport::stream::ReceiveSlices,
    ) -> libmodelio::transport::stream::Receive {
        libmodelio::transport::stream::Receive::Paused
    }

    fn received(&mut self, _: usize) -> Result<(), Close> {
        Ok(())
    }

    fn transmit(&mut self, _: &mut libmodelio::transport::stream::SendSlices) {}

    fn transmitted(&mut self, _: usize) -> Result<(), Close> {
        Ok(())
    }

    fn closed(&mut self, _: &Close) {}
}

fn busy_connections_are_on_different_threads(choice: Choice) {
    let reactor = reactor(choice, 2);
    let mut peers = Vec::new();
    let mut add = || {
        let (near, far) = pair();
        peers.push(far);
        let (sender, thread) = channel();
        let added = reactor.handle().add(near, Box::new(Placed(sender)), Thread::Any).expect("room");
        (added, thread.recv_timeout(PATIENCE).expect("opened"))
    };
    let (idle, of_idle) = add();
    let (first, of_first) = add();
    assert_ne!(of_idle, of_first, "by their number");
    first.expect_much();
    // The thread of the busy one has fewer connections, and gets none of these.
    for _ in 0..4 {
        assert_eq!(add().1, of_idle);
    }
    let (second, of_second) = add();
    assert_eq!(of_second, of_idle);
    second.expect_much();
    second.expect_much();
    assert_eq!(add().1, of_first, "one busy connection each: by their number again");
    first.close(Close::Asked("over".into()));
    wait_until("it is over", || first.is_closed());
    assert_eq!(add().1, of_first, "its thread has none that is busy");
    drop(idle);
    end(reactor);
}

fn no_wake_up_is_lost_and_a_farewell_arrives(choice: Choice) {
    const THREADS: u64 = 4;
    const EACH: u64 = 5_000;
    let reactor = reactor(choice, 1);
    let (near, mut far) = pair();
    let (wanted, (sender, events)) = (Arc::new(AtomicU64::new(0)), channel());
    let counter = Counter { wanted: Arc::clone(&wanted), all: THREADS * EACH, sent: 0, events: sender };
    let connection = reactor.handle().add(near, Box::new(counter), Thread::Any).expect("room");
    let wakers: Vec<_> = (0..THREADS)
        .map(|_| {
            let (wanted, connection) = (Arc::clone(&wanted), connection.clone());
            std::thread::spawn(move || {
                for turn in 0..EACH {
                    wanted.fetch_add(1, Ordering::SeqCst);
                    connection.wake();
                    // Now and then the reactor falls asleep.
                    if turn % 500 == 0 {
                        sleep(Duration::from_millis(1));
                    }
                }
            })
        })
        .collect();
    let mut all = Vec::new();
    far.read_to_end(&mut all).expect("everything, and an end");
    for waker in wakers {
        waker.join().expect("a waker");
    }
    assert_eq!(all.len() as u64, THREADS * EACH + FAREWELL.len() as u64);
    assert!(all.ends_with(FAREWELL));
    assert_eq!(closed(&events), Close::Asked("said".into()));
    end(reactor);
}

/// An address whose host drops what would connect to it: its queue is full. With what keeps it so.
fn full_listener() -> (SocketAddr, Vec<socket2::Socket>) {
    let new = || socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    let listener = new();
    listener.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("bind");
    listener.listen(0).expect("listen");
    let address = listener.local_addr().expect("address");
    let mut keep = vec![listener];
    for _ in 0..4 {
        let filler = new();
        filler.set_nonblocking(true).expect("set");
        // The first ones are established, the others wait for ever.
        let _ = filler.connect(&address);
        keep.push(filler);
    }
    (address.as_socket().expect("IPv4"), keep)
}

fn connecting_has_a_deadline(choice: Choice) {
    let reactor = reactor(choice, 1);
    let (address, keep) = full_listener();
    let (stream, _, events) = chatter(14, 0, 0);
    let start = Instant::now();
    let deadline = start + Duration::from_millis(200);
    let options = SocketOptions::default();
    let handle = reactor.handle();
    handle.connect(address, options.clone(), deadline, Box::new(stream), Thread::Any).expect("room");
    assert_eq!(closed(&events), Close::Connect { address, errno: Errno::ETIMEDOUT });
    assert!(start.elapsed() >= Duration::from_millis(200));
    let late = connect(address, &options, Duration::from_millis(100)).expect_err("nobody answers");
    assert_eq!(late.kind(), ErrorKind::TimedOut);
    drop(keep);
    end(reactor);
}

fn a_refused_connection_is_told(choice: Choice) {
    let reactor = reactor(choice, 1);
    let gone = TcpListener::bind("127.0.0.1:0").expect("bind").local_addr().expect("address");
    let (stream, _, events) = chatter(15, 0, 0);
    let deadline = Instant::now() + PATIENCE;
    let handle = reactor.handle();
    handle.connect(gone, SocketOptions::default(), deadline, Box::new(stream), Thread::Any).expect("room");
    assert_eq!(closed(&events), Close::Connect { address: gone, errno: Errno::ECONNREFUSED });
    end(reactor);
}

fn a_connection_is_made(choice: Choice) {
    let reactor = reactor(choice, 1);
    let address = echo_server(&reactor);
    let (stream, _, events) = chatter(16, 1_000_000, 1_000_000);
    let deadline = Instant::now() + PATIENCE;
    let handle = reactor.handle();
    let connection = handle
        .connect(address, SocketOptions::default(), deadline, Box::new(stream), Thread::Any)
        .expect("room");
    opened(&events);
    complete(&events);
    let in_use = connection.in_use().expect("it is TCP");
    assert!(in_use.same_host && !in_use.congestion.is_empty() && in_use.receive_buffer > 0, "{in_use}");
    // Nothing but a ban keeps cubic from a connection on one host.
    let allowed =
        std::fs::read_to_string("/proc/sys/net/ipv4/tcp_allowed_congestion_control").expect("procfs");
    if allowed.split_whitespace().any(|name| name == "cubic") {
        assert_eq!(in_use.congestion, "cubic");
    }
    assert!(!connection.is_closed());
    end(reactor);
    assert!(connection.is_closed());
    assert_eq!(closed(&events), Close::ShutDown);
}

fn defects_close_only_their_connection(choice: Choice) {
    let reactor = reactor(choice, 1);
    let address = echo_server(&reactor);
    for panics in [true, false] {
        let (near, _far) = pair();
        let (sender, events) = channel();
        let wrong = Wrong { panics, events: sender, buffer: Buffer::zeroed(10) };
        reactor.handle().add(near, Box::new(wrong), Thread::Any).expect("room");
        match closed(&events) {
            Close::Panicked(text) if panics => assert_eq!(text, "as the test wants"),
            Close::Misused(text) if !panics => assert_eq!(text, "at least 11 bytes into room for 10"),
            other => panic!("{other:?}"),
        }
    }
    let (stream, _, events) = chatter(17, 100_000, 100_000);
    let socket = connect(address, &SocketOptions::default(), PATIENCE).expect("connect");
    reactor.handle().add(socket, Box::new(stream), Thread::Any).expect("room");
    complete(&events);
    end(reactor);
}

fn limits_hold(choice: Choice) {
    let options = ReactorOptions { choice, connections_a_thread: 2, ..ReactorOptions::default() };
    let reactor = Reactor::start(&options).expect("a reactor");
    let mut ends = Vec::new();
    let mut add = || {
        let (near, far) = pair();
        ends.push(far);
        let (stream, _, events) = chatter(18, 0, 1);
        reactor.handle().add(near, Box::new(stream), Thread::Any).map(|connection| (connection, events))
    };
    let (first, first_events) = add().expect("room");
    let _second = add().expect("room");
    assert_eq!(add().err(), Some(Refused::TooMany(2)));
    first.close(Close::Asked("make room".into()));
    assert_eq!(closed(&first_events), Close::Asked("make room".into()));
    wait_until("closed", || first.is_closed());
    wait_until("room", || add().is_ok());
    end(reactor);
    let none = Reactor::start(&ReactorOptions { threads: 0, choice, ..ReactorOptions::default() });
    assert_eq!(
        none.err().map(|err| err.to_string()).as_deref(),
        Some("a reactor needs 1 thread or more, not 0")
    );
}

fn nothing_is_taken_after_the_end(choice: Choice) {
    let reactor = reactor(choice, 2);
    let handle = reactor.handle();
    end(reactor);
    let (near, _far) = pair();
    let (stream, _, events) = chatter(19, 0, 1);
    assert_eq!(handle.add(near, Box::new(stream), Thread::Any).err(), Some(Refused::ShutDown));
    assert!(events.recv_timeout(PATIENCE).is_err(), "it was dropped without a call");
}
