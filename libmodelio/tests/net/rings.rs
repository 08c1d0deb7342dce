//! Streams over rings in shared memory, both ends in this process. This file holds `unsafe`: one end is read by hand.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use libmodelio::transport::shm::{Meeting, Threads, listen, meet, receive};
use libmodelio::transport::stream::{Buffer, Close, Connection, Receive, ReceiveSlices, SendSlices, Stream};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{SockFlag, accept4};

use super::streams::{Counter, Event, FAREWELL, PATIENCE, Wrong};
use super::{chatter, closed, complete, opened, wait_until};

/// Two ends that have met.
fn meetings() -> (Meeting, Meeting) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let address = format!("net-test-{}-{}:1", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let listener = listen(&address).unwrap();
    let client = std::thread::spawn(move || meet(&address, PATIENCE).unwrap());
    let mut ready = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    assert_eq!(poll(&mut ready, PollTimeout::try_from(PATIENCE).unwrap()), Ok(1));
    let fd = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK).unwrap();
    // SAFETY: it was made just now.
    let shard = receive(unsafe { OwnedFd::from_raw_fd(fd) }, PATIENCE).unwrap();
    (client.join().unwrap(), shard)
}

/// Serves a stream on a thread.
fn serve(threads: &Arc<Threads>, meeting: Meeting, stream: impl Stream + 'static) {
    threads.spawn(move |threads| threads.serve(meeting, Box::new(stream))).unwrap();
}

fn end(threads: &Threads) {
    threads.shut_down(PATIENCE).expect("all threads end");
}

#[test]
fn bytes_flow_both_ways_at_once() {
    let threads = Threads::new(2);
    for (seed, there, back) in [(1, 3_000_000, 5_000_000), (2, 1, 400_000), (3, 65_536, 65_537)] {
        let (near, far) = meetings();
        let (a, _, of_a) = chatter(seed, there, back);
        let (b, _, of_b) = chatter(seed, back, there);
        serve(&threads, near, a);
        serve(&threads, far, b);
        let connection = opened(&of_a);
        complete(&of_a);
        complete(&of_b);
        connection.close(Close::Asked("done".into()));
        assert_eq!(closed(&of_a), Close::Asked("done".into()));
        assert_eq!(closed(&of_b), Close::Ended);
        wait_until("its threads end", || connection.is_closed() && threads.connections() == 0);
    }
    end(&threads);
}

#[test]
fn a_paused_stream_gets_nothing_until_it_is_woken() {
    let threads = Threads::new(2);
    let (near, far) = meetings();
    let (reader, watch, of_reader) = chatter(4, 0, 1_000_000);
    watch.paused.store(true, Ordering::SeqCst);
    let (writer, _, of_writer) = chatter(4, 1_000_000, 0);
    serve(&threads, near, reader);
    serve(&threads, far, writer);
    let connection = opened(&of_reader);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(watch.received.load(Ordering::SeqCst), 0);
    watch.paused.store(false, Ordering::SeqCst);
    connection.wake();
    complete(&of_reader);
    complete(&of_writer);
    end(&threads);
    // Or the other end was, just before.
    assert!(matches!(closed(&of_reader), Close::ShutDown | Close::Ended));
}

#[test]
fn a_peer_that_goes_in_mid_stream_is_noticed_whatever_is_under_way() {
    for paused in [false, true] {
        let threads = Threads::new(1);
        let (near, far) = meetings();
        // More than a ring takes, of which nothing is read; or waiting for what does not come.
        let (stream, watch, events) = if paused { chatter(5, 1_000_000, 10) } else { chatter(5, 0, 10) };
        watch.paused.store(paused, Ordering::SeqCst);
        serve(&threads, near, stream);
        opened(&events);
        std::thread::sleep(Duration::from_millis(20));
        let begin = Instant::now();
        drop(far);
        let why = closed(&events);
        match paused {
            false => assert_eq!(why, Close::Ended),
            true => assert_eq!(why, Close::Socket { doing: "send", errno: Errno::EPIPE }),
        }
        assert!(begin.elapsed() < PATIENCE / 2);
        end(&threads);
    }
}

/// A stream that passes on the connection that wakes it.
struct Reported<S> {
    stream: S,
    opened: Sender<Connection>,
}

impl<S: Stream> Stream for Reported<S> {
    fn opened(&mut self, connection: &Connection) {
        self.opened.send(connection.clone()).unwrap();
        self.stream.opened(connection);
    }

    fn receive(&mut self, into: &mut ReceiveSlices) -> Receive {
        self.stream.receive(into)
    }

    fn received(&mut self, bytes: usize) -> Result<(), Close> {
        self.stream.received(bytes)
    }

    fn transmit(&mut self, out: &mut SendSlices) {
        self.stream.transmit(out);
    }

    fn transmitted(&mut self, bytes: usize) -> Result<(), Close> {
        self.stream.transmitted(bytes)
    }

    fn closed(&mut self, why: &Close) {
        self.stream.closed(why);
    }
}

#[test]
fn no_wake_up_is_lost_and_a_farewell_arrives() {
    const ALL: u64 = 20_000;
    let threads = Threads::new(1);
    let (near, far) = meetings();
    let (events, of_counter) = channel();
    let wanted: Arc<AtomicU64> = Arc::default();
    let (sender, opening) = channel();
    let counter = Counter { wanted: Arc::clone(&wanted), all: ALL, sent: 0, events };
    serve(&threads, near, Reported { stream: counter, opened: sender });
    let connection = opening.recv_timeout(PATIENCE).unwrap();
    let Meeting { end: mut ring, socket } = far;
    let mut got = Vec::new();
    let mut take = |got: &mut Vec<u8>| {
        let mut bytes = [0; 100];
        // SAFETY: the array is this call's.
        let count = unsafe { ring.read([(bytes.as_mut_ptr(), bytes.len())].into_iter()) }.unwrap();
        got.extend_from_slice(&bytes[..count]);
    };
    let deadline = Instant::now() + PATIENCE;
    for count in 1..=ALL {
        wanted.store(count, Ordering::SeqCst);
        connection.wake();
        while count % 7 == 0 && (got.len() as u64) < count && Instant::now() < deadline {
            take(&mut got);
        }
    }
    while got.len() < ALL as usize + FAREWELL.len() && Instant::now() < deadline {
        take(&mut got);
    }
    assert_eq!(got.len(), ALL as usize + FAREWELL.len());
    assert!(got.ends_with(FAREWELL));
    assert_eq!(closed(&of_counter), Close::Asked("said".into()));
    drop(socket);
    end(&threads);
}

#[test]
fn defects_close_only_their_connection_and_limits_hold() {
    let threads = Threads::new(3);
    let (near, far) = meetings();
    let (fine, _, of_fine) = chatter(7, 0, 100_000);
    serve(&threads, near, fine);
    opened(&of_fine);
    for panics in [false, true] {
        let (sender, events) = channel();
        let (near, _far) = meetings();
        serve(&threads, near, Wrong { panics, events: sender, buffer: Buffer::zeroed(10) });
        let Ok(Event::Closed(why)) = events.recv_timeout(PATIENCE) else { panic!("not closed") };
        assert_eq!(matches!(why, Close::Panicked(_)), panics, "{why}");
        assert_eq!(matches!(why, Close::Misused(_)), !panics, "{why}");
        wait_until("its thread ends", || threads.connections() == 1);
    }
    let (writer, _, of_writer) = chatter(7, 100_000, 0);
    serve(&threads, far, writer);
    complete(&of_fine);
    complete(&of_writer);
    wait_until("there is room", || threads.spawn(|_| std::thread::sleep(Duration::from_millis(100))).is_ok());
    let full = threads.spawn(|_| {});
    assert!(full.is_err_and(|error| error.to_string().contains("3 connections")));
    end(&threads);
    assert!(threads.spawn(|_| {}).is_err_and(|error| error.to_string().contains("shuts down")));
}
