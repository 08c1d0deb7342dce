//! A reactor that is shut down leaves no thread and no descriptor. By itself in this program, as both are counted.

#[path = "net/streams.rs"]
#[allow(dead_code, reason = "shared with the other tests of the network")]
mod streams;

use std::net::SocketAddr;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use libmodelio::transport::reactor::{Backend, Choice, Reactor, ReactorOptions, Thread};
use libmodelio::transport::stream::{Close, Stream};
use libmodelio::transport::tcp::{SocketOptions, bind};
use streams::{Chatter, Echo, Event, PATIENCE};

fn count(folder: &str) -> usize {
    std::fs::read_dir(folder).expect("procfs").count()
}

/// Waits until as many descriptors and threads are open as `before`: the kernel lists a thread, its own workers for
/// io_uring too, for a moment after it has been joined.
fn assert_none_is_left(before: (usize, usize), what: Choice) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let open = (count("/proc/self/fd"), count("/proc/self/task"));
        if open == before {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "{what:?}: {open:?} descriptors and threads are open, before {before:?}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_shut_down_network_leaves_no_thread_and_no_descriptor() {
    // Whatever the first use of anything opens for good is open after this.
    let threads = count("/proc/self/task");
    busy_reactor(Choice::Poll);
    let before = (count("/proc/self/fd"), threads);
    for choice in [Choice::Poll, Choice::Uring, Choice::Poll, Choice::Uring] {
        if choice == Choice::Uring && Backend::choose(choice).is_err() {
            continue;
        }
        busy_reactor(choice);
        assert_none_is_left(before, choice);
    }
}

/// Ends in the middle of what 20 connections have to say, of a connection that is not made, and of a listener.
fn busy_reactor(choice: Choice) {
    let options = ReactorOptions { choice, threads: 2, ..ReactorOptions::default() };
    let reactor = Reactor::start(&options).expect("a reactor");
    let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0)), &SocketOptions::default()).expect("bind");
    let address = listener.local_addr().expect("address");
    let factory = |_| Some(Box::new(Echo::new()) as Box<dyn Stream>);
    reactor.handle().listen(listener, SocketOptions::default(), factory).expect("listen");
    let (sender, events) = channel();
    let endless = u64::from(u32::MAX);
    for seed in 0..20 {
        let stream = Box::new(Chatter::new(seed, endless, endless, sender.clone()));
        let deadline = Instant::now() + PATIENCE;
        let handle = reactor.handle();
        handle.connect(address, SocketOptions::default(), deadline, stream, Thread::Any).expect("room");
    }
    // Nobody answers at a documentation address (RFC 5737), or the system has no way there.
    let nowhere = SocketAddr::from(([192, 0, 2, 1], 9));
    let stream = Box::new(Chatter::new(99, 0, 0, sender));
    let deadline = Instant::now() + PATIENCE;
    reactor.handle().connect(nowhere, SocketOptions::default(), deadline, stream, Thread::Any).expect("room");
    for _ in 0..20 {
        let event = events.recv_timeout(PATIENCE).expect("an event");
        assert!(matches!(event, Event::Opened(_) | Event::Closed(Close::Connect { .. })), "{event:?}");
    }
    reactor.shut_down(PATIENCE).expect("all threads end");
    let ended = events.iter().filter(|event| matches!(event, Event::Closed(_))).count();
    assert!((20..=21).contains(&ended), "{ended} were told that they are closed");
}
