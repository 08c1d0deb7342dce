//! How fast bytes move over loopback TCP: bare blocking sockets, a thread an end and connection, against a reactor
//! with one thread an end. The reactors carry a header with every block, the bare sockets none.
//!
//! `cargo run --release -p libmodelio --example loopback -- [GiB=8] [rounds=5] [connections=1,4] [buffers=0 KiB]
//! [placement=apart|free]`; buffers of 0 leave their size to the kernel.
//!
//! `apart` puts senders on one CPU and receivers on another. Left free, the scheduler's choice decides the result: both
//! ends on one CPU pass the bytes on in its cache, or do not, and a run is more than twice as fast as the next.
//!
//! The variants take turns, so that what else runs on the machine meets all of them; medians are printed. Throughput
//! counts payload; CPU is that of both ends, kernel included. This file holds `unsafe`: it names buffers to the reactor,
//! and CPUs to the kernel.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use libmodelio::transport::reactor::{Choice, Reactor, ReactorOptions, Thread};
use libmodelio::transport::stream::{Buffer, Close, Connection, Receive, ReceiveSlices, SendSlices, Stream};
use libmodelio::transport::tcp::{SocketOptions, bind, connect};
use nix::sys::resource::{UsageWho, getrusage};

const BLOCK: usize = 256 << 10;
const HEADER: usize = 64;
/// What a bare write and a gathered send take at once.
const AT_ONCE: usize = 1 << 20;
const DEADLINE: Duration = Duration::from_secs(300);

#[derive(Clone, Copy, PartialEq)]
enum Variant {
    Bare,
    Uring,
    Poll,
}

const VARIANTS: [(Variant, &str); 3] = [
    (Variant::Bare, "bare blocking"),
    (Variant::Uring, "reactor, io_uring"),
    (Variant::Poll, "reactor, epoll"),
];

/// The CPUs of the two ends.
const SENDERS: usize = 0;
const RECEIVERS: usize = 1;

/// One run: GiB a second, CPU seconds a GiB.
type Figures = (f64, f64);

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number =
        |default: usize| arguments.next().map_or(default, |text| text.parse().expect("a number"));
    let (gib, rounds) = (number(8), number(5));
    let buffers = std::env::args().nth(4).and_then(|kib| match kib.parse::<usize>().expect("KiB") {
        0 => None,
        kib => Some(kib << 10),
    });
    let connections = std::env::args().nth(3).unwrap_or_else(|| "1,4".to_owned());
    let options = SocketOptions { send_buffer: buffers, receive_buffer: buffers, ..SocketOptions::default() };
    for count in connections.split(',').map(|text| text.parse::<usize>().expect("connections")) {
        let mut figures = vec![Vec::new(); VARIANTS.len()];
        for round in 0..=rounds {
            for (at, (variant, _)) in VARIANTS.iter().enumerate() {
                let one = run(*variant, gib, count, &options);
                // The first round warms up.
                if round > 0 {
                    figures[at].push(one);
                }
            }
        }
        println!("{count} connections, {gib} GiB, median of {rounds} (and ratio to the first)");
        let base = (median(&figures[0], |f| f.0), median(&figures[0], |f| f.1));
        for ((_, name), figures) in VARIANTS.iter().zip(&figures) {
            let (rate, cpu) = (median(figures, |f| f.0), median(figures, |f| f.1));
            println!(
                "  {name:18} {rate:6.2} GiB/s ({:.3})   {cpu:.3} CPU s/GiB ({:.3})",
                rate / base.0,
                cpu / base.1
            );
        }
    }
}

fn median(figures: &[Figures], of: impl Fn(&Figures) -> f64) -> f64 {
    let mut all: Vec<f64> = figures.iter().map(of).collect();
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

fn cpu() -> f64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("getrusage");
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    seconds(usage.user_time()) + seconds(usage.system_time())
}

/// Binds the calling thread to a CPU, if there are enough and nobody wants it otherwise.
fn pin(to: usize) {
    let free = std::env::args().nth(5).is_some_and(|placement| placement == "free");
    if free || std::thread::available_parallelism().map_or(1, usize::from) <= to {
        return;
    }
    // SAFETY: zeros are an empty set, which has room for the first 1024 CPUs; the kernel reads it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(to, &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &raw const set), 0, "CPU {to}");
    }
}

fn run(variant: Variant, gib: usize, connections: usize, options: &SocketOptions) -> Figures {
    let blocks = (gib << 30) / BLOCK / connections;
    let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0)), options).expect("bind");
    let address = listener.local_addr().expect("address");
    let pairs: Vec<(TcpStream, TcpStream)> =
        (0..connections).map(|_| pair(&listener, address, options)).collect();
    let (rate, spent) = match variant {
        Variant::Bare => bare(pairs, blocks),
        Variant::Uring => reactors(Choice::Uring, pairs, blocks),
        Variant::Poll => reactors(Choice::Poll, pairs, blocks),
    };
    let gib = (blocks * connections * BLOCK) as f64 / f64::from(1 << 30);
    (gib / rate.as_secs_f64(), spent / gib)
}

fn pair(listener: &TcpListener, address: SocketAddr, options: &SocketOptions) -> (TcpStream, TcpStream) {
    let from = connect(address, options, Duration::from_secs(5)).expect("connect");
    let (to, _) = listener.accept().expect("accept");
    options.apply(&(&to).into()).expect("options");
    (from, to)
}

fn bare(pairs: Vec<(TcpStream, TcpStream)>, blocks: usize) -> (Duration, f64) {
    let (start, spent) = (Instant::now(), cpu());
    let mut threads = Vec::new();
    for (mut from, mut to) in pairs {
        threads.push(std::thread::spawn(move || {
            pin(SENDERS);
            let buffer = vec![1u8; AT_ONCE];
            let mut left = blocks * BLOCK;
            while left > 0 {
                let now = left.min(AT_ONCE);
                from.write_all(&buffer[..now]).expect("write");
                left -= now;
            }
        }));
        threads.push(std::thread::spawn(move || {
            pin(RECEIVERS);
            let mut buffer = vec![0u8; BLOCK];
            let mut left = blocks * BLOCK;
            while left > 0 {
                let got = to.read(&mut buffer).expect("read");
                assert!(got > 0, "ended early");
                left -= got;
            }
        }));
    }
    for thread in threads {
        thread.join().expect("a thread panicked");
    }
    (start.elapsed(), cpu() - spent)
}

fn reactors(choice: Choice, pairs: Vec<(TcpStream, TcpStream)>, blocks: usize) -> (Duration, f64) {
    let start_one = |name: &str| {
        let options = ReactorOptions { name: name.to_owned(), choice, ..ReactorOptions::default() };
        Reactor::start(&options).expect("a reactor")
    };
    let (senders, receivers) = (start_one("send"), start_one("receive"));
    let (done, finished) = channel();
    let payload = Arc::new(Buffer::zeroed(AT_ONCE));
    let count = pairs.len();
    let (start, spent) = (Instant::now(), cpu());
    for (from, to) in pairs {
        let receive = Sink {
            header: Buffer::zeroed(HEADER),
            payload: Buffer::zeroed(BLOCK),
            begun: false,
            left: blocks,
            done: done.clone(),
        };
        receivers.handle().add(to, Box::new(receive), Thread::Any).expect("room");
        let send = Source { header: Buffer::zeroed(HEADER), payload: Arc::clone(&payload), left: blocks };
        senders.handle().add(from, Box::new(send), Thread::Any).expect("room");
    }
    for _ in 0..count {
        finished.recv_timeout(DEADLINE).expect("blocks in time");
    }
    let figures = (start.elapsed(), cpu() - spent);
    senders.shut_down(Duration::from_secs(5)).expect("an end");
    receivers.shut_down(Duration::from_secs(5)).expect("an end");
    figures
}

/// Sends blocks, each with a header before it.
struct Source {
    header: Buffer,
    payload: Arc<Buffer>,
    left: usize,
}

impl Stream for Source {
    fn opened(&mut self, _: &Connection) {
        pin(SENDERS);
    }

    fn receive(&mut self, _: &mut ReceiveSlices) -> Receive {
        Receive::Paused
    }

    fn received(&mut self, _: usize) -> Result<(), Close> {
        Ok(())
    }

    fn transmit(&mut self, out: &mut SendSlices) {
        let now = self.left.min(AT_ONCE / BLOCK);
        for block in 0..now {
            // SAFETY: both buffers are never written to and live as long as this stream; the block is within.
            unsafe {
                out.push(self.header.start(), HEADER);
                out.push(self.payload.start().add(block * BLOCK), BLOCK);
            }
        }
        self.left -= now;
    }

    fn transmitted(&mut self, _: usize) -> Result<(), Close> {
        Ok(())
    }

    fn closed(&mut self, _: &Close) {}
}

/// Receives them: the rest of a block with the header of the next.
struct Sink {
    header: Buffer,
    payload: Buffer,
    /// After the first header.
    begun: bool,
    left: usize,
    done: Sender<()>,
}

impl Stream for Sink {
    fn opened(&mut self, _: &Connection) {
        pin(RECEIVERS);
    }

    fn receive(&mut self, into: &mut ReceiveSlices) -> Receive {
        // SAFETY: the buffers live as long as this stream, nobody looks into them, and what is pushed is within.
        unsafe {
            match self.begun {
                false => {
                    into.push(self.header.start(), HEADER);
                    Receive::Into { least: HEADER }
                }
                true => {
                    into.push(self.payload.start(), BLOCK);
                    let next = if self.left > 1 { HEADER } else { 0 };
                    into.push(self.header.start(), next);
                    Receive::Into { least: BLOCK + next }
                }
            }
        }
    }

    fn received(&mut self, bytes: usize) -> Result<(), Close> {
        if self.begun && bytes >= BLOCK {
            self.left -= 1;
        }
        self.begun = self.left > 0;
        if self.left == 0 {
            // The main thread waits for it, with a deadline.
            let _ = self.done.send(());
        }
        Ok(())
    }

    fn transmit(&mut self, _: &mut SendSlices) {}

    fn transmitted(&mut self, _: usize) -> Result<(), Close> {
        Ok(())
    }

    fn closed(&mut self, _: &Close) {}
}
