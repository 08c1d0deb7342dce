//! Messages that several threads send on one connection, some by themselves and some by the serving thread.

use std::net::{TcpListener, TcpStream};
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use super::*;
use crate::transport::frames::{Conversation, Framed, Take};
use crate::transport::reactor::{Backend, Choice, Reactor, ReactorOptions, Thread};
use crate::vocabulary::ids::PlanId;
use crate::wire::{Limits, Received};

const LONG: Duration = Duration::from_secs(600);
const THREADS: u64 = 4;
const EACH: u64 = 2000;

/// Notes the numbers of all requests that come. It does not read while `pauses` says so.
struct Notes {
    opened: Sender<()>,
    seen: Sender<u64>,
    pauses: Arc<AtomicUsize>,
}

impl Conversation for Notes {
    fn opened(&mut self, _: &Link) -> Result<(), Close> {
        self.opened.send(()).unwrap();
        Ok(())
    }

    fn message(&mut self, received: &Received) -> Result<Take, Close> {
        while self.pauses.load(Ordering::Relaxed) > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        if received.header.request() != 0 {
            self.seen.send(received.header.request()).unwrap();
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
        Some(LONG)
    }

    fn closed(&mut self, _: &Close) {}
}

struct End {
    link: Link,
    reactor: Reactor,
    seen: Receiver<u64>,
    pauses: Arc<AtomicUsize>,
}

fn end(socket: TcpStream, choice: Choice) -> End {
    let options = ReactorOptions { choice, ..ReactorOptions::default() };
    let reactor = Reactor::start(&options).unwrap();
    let (link, pauses) = (Link::default(), Arc::<AtomicUsize>::default());
    let ((opened, is_open), (sender, seen)) = (channel(), channel());
    let notes = Notes { opened, seen: sender, pauses: Arc::clone(&pauses) };
    let stream = Framed::new(notes, link.clone(), 16 << 10);
    reactor.handle().add(socket, Box::new(stream), Thread::Any).unwrap();
    is_open.recv_timeout(LONG).unwrap();
    End { link, reactor, seen, pauses }
}

fn ends(choice: Choice) -> Option<(End, End)> {
    Backend::choose(choice).ok()?;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    // Both ends soon take no more, so parts of frames are left over.
    for socket in [&near, &far] {
        let socket = socket2::SockRef::from(socket);
        socket.set_send_buffer_size(4096).unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
    }
    Some((end(near, choice), end(far, choice)))
}

fn message(thread: u64, number: u64) -> Outgoing {
    Outgoing::new(thread << 32 | number, Message::Probe { plan: PlanId(number) })
}

#[test]
fn messages_of_many_threads_come_once_whole_and_in_order() {
    for choice in [Choice::Uring, Choice::Poll] {
        let Some((near, far)) = ends(choice) else { continue };
        far.pauses.store(1, Ordering::Relaxed);
        std::thread::scope(|scope| {
            for thread in 1..=THREADS {
                let link = near.link.clone();
                scope.spawn(move || {
                    for number in 0..EACH {
                        match number % 16 {
                            7 => link.send(message(thread, number)),
                            // The serving thread falls asleep meanwhile.
                            9 if number > EACH / 2 => {
                                std::thread::sleep(Duration::from_micros(50));
                                link.send_now(message(thread, number));
                            }
                            _ => link.send_now(message(thread, number)),
                        }
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(100));
            far.pauses.store(0, Ordering::Relaxed);
        });
        let mut next = [0; 1 + THREADS as usize];
        for _ in 0..THREADS * EACH {
            let seen = far.seen.recv_timeout(LONG).unwrap();
            let (thread, number) = ((seen >> 32) as usize, seen & 0xffff_ffff);
            assert_eq!(number, next[thread], "of thread {thread}");
            next[thread] += 1;
        }
        near.reactor.shut_down(LONG).unwrap();
        far.reactor.shut_down(LONG).unwrap();
    }
}

#[test]
fn a_thread_that_sleeps_is_not_woken_to_send() {
    for choice in [Choice::Uring, Choice::Poll] {
        let Some((near, far)) = ends(choice) else { continue };
        let mut sent_here = 0;
        for number in 1..=50 {
            std::thread::sleep(Duration::from_millis(2));
            let outgoing = message(1, number);
            if near.link.is_sent_here(&outgoing) {
                sent_here += 1;
            } else {
                near.link.send(outgoing);
            }
            assert_eq!(far.seen.recv_timeout(LONG).unwrap(), 1 << 32 | number);
        }
        assert!(sent_here > 25, "{sent_here} of 50");
        near.reactor.shut_down(LONG).unwrap();
        // Nobody sends on a connection that has ended.
        assert!(!near.link.is_sent_here(&message(1, 51)));
        far.reactor.shut_down(LONG).unwrap();
    }
}
