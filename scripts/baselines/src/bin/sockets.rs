//! Bare blocking sockets: learners push all their gradients, a server adds them, learners pull the weights.
//!
//! A server has a thread for each connection. It receives into a buffer that stays in the core's cache and adds
//! from there straight to the weights, piece by piece under a lock: no accumulator, no version, no second pass. So
//! only who knows that nobody reads meanwhile may push. It does nothing of what a real shard has to do besides.
//!
//! This file holds `unsafe` code: system calls with flags that the standard library does not offer, and the model's
//! memory, which connections share by pieces.

use std::io;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use net_baselines::add::add;
use net_baselines::memory::Memory;
use net_baselines::pattern;
use net_baselines::place::share;
use net_baselines::rounds::{Learner, learn, serve};
use net_baselines::sockets::{DEADLINE, Tuning};
use nix::sys::socket::{MsgFlags, recv};
use serde_json::json;
use socket2::SockRef;

const PUSH: u8 = 1;
const PULL: u8 = 2;
const STEP: u8 = 3;
const DONE: u8 = 4;

/// Pieces of the weights that have a lock each.
const LOCKED: usize = 256 << 10;

#[derive(Parser)]
#[command(about = "Bare blocking sockets")]
enum Options {
    /// Holds weights and adds gradients
    Server {
        #[command(flatten)]
        common: Common,
        /// Bytes of its part of the model
        #[arg(long)]
        bytes: usize,
        /// Bytes received before they are added
        #[arg(long, default_value_t = 256 << 10)]
        buffer: usize,
    },
    /// Pushes and pulls
    Learner {
        #[command(flatten)]
        common: Common,
        /// Bytes of the whole model
        #[arg(long)]
        bytes: usize,
        /// Which learner it is
        #[arg(long)]
        rank: usize,
        /// Where the shards are, in order
        #[arg(required = true)]
        servers: Vec<SocketAddr>,
    },
}

#[derive(Clone, clap::Args)]
struct Common {
    /// Learners in the job
    #[arg(long)]
    learners: usize,
    /// Connections of each learner with each shard
    #[arg(long, default_value_t = 1)]
    connections: usize,
    /// How bytes enter a socket
    #[arg(long, value_enum, default_value_t = Sending::Copied)]
    send: Sending,
    #[command(flatten)]
    tuning: Tuning,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Sending {
    /// send(2)
    Copied,
    /// sendfile(2) from the memfd: loopback passes the pages on, and only the receiver copies
    Pages,
}

/// Where a round waits until all connections are as far.
struct Meeting {
    expected: usize,
    state: Mutex<(usize, usize)>,
    changed: Condvar,
}

impl Meeting {
    fn meet(&self) -> Result<()> {
        let mut state = locked(&self.state);
        let round = state.1;
        state.0 += 1;
        if state.0 == self.expected {
            *state = (0, round + 1);
            self.changed.notify_all();
            return Ok(());
        }
        let end = Instant::now() + DEADLINE;
        while state.1 == round {
            let left = end.saturating_duration_since(Instant::now());
            ensure!(!left.is_zero(), "{} of {} connections came", state.0, self.expected);
            state = self.changed.wait_timeout(state, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        Ok(())
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

struct Shard {
    weights: Memory,
    locks: Vec<Mutex<()>>,
    all_in: Meeting,
    buffer: usize,
    send: Sending,
}

impl Shard {
    /// Serves one connection until it closes.
    fn serve(&self, mut stream: TcpStream) -> Result<()> {
        let mut hello = [[0; 8]; 3];
        stream.read_exact(hello.as_flattened_mut())?;
        let [offset, first, length] = hello.map(|number| u64::from_le_bytes(number) as usize);
        ensure!(first <= length, "begins at {first} of {length} bytes");
        let mut buffer = vec![0; self.buffer];
        loop {
            let mut request = [0];
            if stream.read(&mut request)? == 0 {
                return Ok(());
            }
            if matches!(request[0], PUSH | STEP) {
                self.receive(&stream, offset + first, length - first, &mut buffer)?;
                self.receive(&stream, offset, first, &mut buffer)?;
            }
            match request[0] {
                PUSH => stream.write_all(&[DONE])?,
                PULL => send_all(&stream, &self.weights, offset, length, self.send)?,
                STEP => {
                    self.all_in.meet()?;
                    send_all(&stream, &self.weights, offset, length, self.send)?;
                }
                other => bail!("unknown request {other}"),
            }
        }
    }

    /// Adds what comes.
    fn receive(&self, stream: &TcpStream, offset: usize, length: usize, buffer: &mut [u8]) -> Result<()> {
        let mut at = offset;
        while at < offset + length {
            // Up to a border of the locked pieces, so that one lock does.
            let piece = (offset + length - at).min(buffer.len()).min(LOCKED - at % LOCKED);
            receive_all(stream, &mut buffer[..piece])?;
            let _lock = locked(&self.locks[at / LOCKED]);
            // SAFETY: whoever writes to this piece holds its lock, and nobody reads weights during a push.
            add(unsafe { self.weights.values_mut(at, piece) }, &buffer[..piece]);
            at += piece;
        }
        Ok(())
    }
}

fn receive_all(stream: &TcpStream, mut buffer: &mut [u8]) -> Result<()> {
    while !buffer.is_empty() {
        // As much as there is to come, in one call.
        match recv(stream.as_raw_fd(), buffer, MsgFlags::MSG_WAITALL)? {
            0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            count => buffer = &mut buffer[count..],
        }
    }
    Ok(())
}

fn send_all(stream: &TcpStream, memory: &Memory, offset: usize, length: usize, how: Sending) -> Result<()> {
    match how {
        Sending::Copied => {
            // SAFETY: gradients do not change, and weights only during a push.
            (&*stream).write_all(unsafe { memory.bytes(offset, length) })?;
        }
        Sending::Pages => {
            let (mut at, end) = (libc::off_t::try_from(offset)?, offset + length);
            while (at as usize) < end {
                let left = end - at as usize;
                // SAFETY: descriptors that are open and an offset that is ours.
                let sent =
                    unsafe { libc::sendfile(stream.as_raw_fd(), memory.file().as_raw_fd(), &mut at, left) };
                ensure!(sent > 0, "sendfile: {}", io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

struct Connection {
    stream: TcpStream,
    /// Within the whole model.
    offset: usize,
    length: usize,
    /// Where its pushes begin: learners begin at different places, and keep out of each other's way.
    first: usize,
}

impl Connection {
    fn push(&self, request: u8, gradients: &Memory, how: Sending) -> Result<()> {
        SockRef::from(&self.stream).send_with_flags(&[request], libc::MSG_MORE)?;
        send_all(&self.stream, gradients, self.offset + self.first, self.length - self.first, how)?;
        send_all(&self.stream, gradients, self.offset, self.first, how)
    }

    fn pull(&self, weights: &Memory) -> Result<()> {
        // SAFETY: each connection has a part of its own, and only the one thread that drives it.
        receive_all(&self.stream, unsafe { weights.bytes_mut(self.offset, self.length) })
    }
}

struct Pusher {
    gradients: Memory,
    weights: Memory,
    connections: Vec<Connection>,
    learners: usize,
    send: Sending,
}

impl Pusher {
    fn connect(common: &Common, bytes: usize, rank: usize, servers: &[SocketAddr]) -> Result<Self> {
        let mut connections = Vec::new();
        for (index, server) in servers.iter().enumerate() {
            let part = share(bytes, index, servers.len());
            for connection in 0..common.connections {
                let within = share(part.len(), connection, common.connections);
                let mut stream = common.tuning.connect(*server)?;
                stream.set_read_timeout(Some(DEADLINE))?;
                stream.set_write_timeout(Some(DEADLINE))?;
                let (length, first) = (within.len(), share(within.len(), rank, common.learners).start);
                for number in [within.start, first, length] {
                    stream.write_all(&(number as u64).to_le_bytes())?;
                }
                connections.push(Connection { stream, offset: part.start + within.start, length, first });
            }
        }
        let mut gradients = Memory::new("gradients", bytes)?;
        pattern::fill(&mut gradients, rank);
        let weights = Memory::new("weights", bytes)?;
        Ok(Self { gradients, weights, connections, learners: common.learners, send: common.send })
    }

    /// What one connection does.
    fn drive(&self, connection: &Connection, what: &str) -> Result<()> {
        match what {
            "push" => {
                connection.push(PUSH, &self.gradients, self.send)?;
                let mut done = [0];
                (&connection.stream).read_exact(&mut done)?;
                ensure!(done[0] == DONE, "answered with {}", done[0]);
                Ok(())
            }
            "pull" => {
                (&connection.stream).write_all(&[PULL])?;
                connection.pull(&self.weights)
            }
            "step" => {
                connection.push(STEP, &self.gradients, self.send)?;
                connection.pull(&self.weights)
            }
            other => bail!("unknown round {other:?}"),
        }
    }
}

impl Learner for Pusher {
    fn round(&mut self, what: &str) -> Result<usize> {
        let (last, others) = self.connections.split_last().context("no connections")?;
        let this = &*self;
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                others.iter().map(|connection| scope.spawn(move || this.drive(connection, what))).collect();
            this.drive(last, what)?;
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(result) => result,
                Err(_) => bail!("a thread panicked"),
            })
        })?;
        Ok(self.weights.len() * if what == "step" { 2 } else { 1 })
    }

    fn check(&mut self, pushes: usize) -> Result<()> {
        // SAFETY: no round is under way.
        let weights = unsafe { self.weights.values_mut(0, self.weights.len()) };
        pattern::check(weights, self.learners, pushes)
    }
}

fn main() -> Result<()> {
    match Options::parse() {
        Options::Server { common, bytes, buffer } => {
            ensure!(buffer >= 4 && buffer.is_multiple_of(4), "a buffer of {buffer} bytes");
            let shard = Arc::new(Shard {
                weights: Memory::new("shard", bytes)?,
                locks: (0..bytes.div_ceil(LOCKED)).map(|_| Mutex::new(())).collect(),
                all_in: Meeting {
                    expected: common.learners * common.connections,
                    state: Mutex::new((0, 0)),
                    changed: Condvar::new(),
                },
                buffer,
                send: common.send,
            });
            let (listener, address) = common.tuning.listen()?;
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let shard = Arc::clone(&shard);
                    std::thread::spawn(move || {
                        if let Err(error) = shard.serve(stream) {
                            eprintln!("sockets server: {error:#}");
                        }
                    });
                }
            });
            serve(&json!({"what": "ready", "address": address}))
        }
        Options::Learner { common, bytes, rank, servers } => {
            learn(&mut Pusher::connect(&common, bytes, rank, &servers)?)
        }
    }
}
