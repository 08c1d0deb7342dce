//! Moving bytes with plain non-blocking sockets and epoll, for systems without io_uring.
//!
//! A send is tried at once. A receive is tried when epoll reports enough bytes (see `Port::adjust_low_water`).
//! Interest is level-triggered, and is withdrawn only when it turns out to be idle. So a busy connection needs no
//! epoll_ctl.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{EpollEvent, EpollFlags};

use super::driver::Driver;
use super::inbox::ThreadState;
use super::port::{Completion, Op, Phase, Port, Readiness};
use super::sleeper::Sleeper;
use super::system_calls;
use super::table::Table;
use crate::transport::stream::Token;

const EVENTS: usize = 256;

/// How long a thread polls for the rest of a payload from this host before it sleeps: about the time in which its
/// sender copies as much as a Unix socket holds. To be woken costs both of them more than that.
const POLLING: Duration = Duration::from_micros(30);

/// How many threads wait for the rest of a payload from this host. One alone polls. Where there are more, they and
/// their senders have better uses for the CPUs.
static AMID_PAYLOADS: AtomicUsize = AtomicUsize::new(0);

/// Whether the sender can run while a thread polls.
static HAS_TWO_CPUS: LazyLock<bool> =
    LazyLock::new(|| std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1));

pub(super) struct Poll {
    sleeper: Sleeper,
    /// Sends that have begun and were not tried yet. They take turns, so that no connection holds up another.
    fresh: VecDeque<Token>,
    events: Box<[EpollEvent]>,
    /// A connection waits for the rest of a payload that a program on this host is sending.
    is_amid_payload: bool,
}

impl Poll {
    pub(super) fn new(thread: Arc<ThreadState>) -> Result<Poll, Errno> {
        let events = vec![EpollEvent::empty(); EVENTS].into_boxed_slice();
        Ok(Poll { sleeper: Sleeper::new(thread)?, fresh: VecDeque::new(), events, is_amid_payload: false })
    }

    /// Registers the awaited events. With `exactly`, other events are withdrawn.
    fn register(
        &self,
        token: Token,
        port: &mut Port,
        wanted: EpollFlags,
        exactly: bool,
    ) -> Result<(), Errno> {
        let event = |bits| EpollEvent::new(bits, pack(token));
        match port.registered.map(|bits| EpollFlags::from_bits_retain(bits.cast_signed())) {
            None => {
                self.sleeper.epoll.add(&port.fd, event(wanted))?;
                port.registered = Some(wanted.bits().cast_unsigned());
            }
            Some(bits) if if exactly { bits != wanted } else { !bits.contains(wanted) } => {
                let bits = if exactly { wanted } else { bits | wanted };
                self.sleeper.epoll.modify(&port.fd, &mut event(bits))?;
                port.registered = Some(bits.bits().cast_unsigned());
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// Withdraws all interest. epoll reports errors and hang-ups in any case, and nobody wants them while nothing is
    /// outstanding.
    fn withdraw(&self, port: &mut Port) -> Result<(), Errno> {
        if port.registered.take().is_some() { self.sleeper.epoll.delete(&port.fd) } else { Ok(()) }
    }

    fn try_send(&self, token: Token, port: &mut Port) -> Option<Completion> {
        let result = match system_calls::send_now(port.fd.as_fd(), &mut port.send) {
            Err(Errno::EAGAIN) => match self.register(token, port, EpollFlags::EPOLLOUT, false) {
                Ok(()) => return None,
                Err(errno) => Err(errno),
            },
            other => other,
        };
        port.sending = Phase::Over;
        Some(Completion { token, op: Op::Send, result })
    }

    fn event(
        &self,
        token: Token,
        port: &mut Port,
        bits: EpollFlags,
        done: &mut Vec<Completion>,
    ) -> Result<(), Errno> {
        let broken = bits.intersects(EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP);
        if port.readiness.take().is_some() {
            done.push(Completion { token, op: Op::Readiness, result: Ok(0) });
            // It is reported once.
            return self.withdraw(port);
        }
        if port.receiving == Phase::Outstanding && (broken || bits.contains(EpollFlags::EPOLLIN)) {
            match system_calls::receive_now(port.fd.as_fd(), &mut port.receive) {
                Err(Errno::EAGAIN) => {}
                result => {
                    port.receiving = Phase::Over;
                    done.push(Completion { token, op: Op::Receive, result });
                }
            }
        } else if bits.contains(EpollFlags::EPOLLIN) && !broken {
            // The stream is paused: the bytes wait.
            let wanted =
                if port.sending == Phase::Outstanding { EpollFlags::EPOLLOUT } else { EpollFlags::empty() };
            self.register(token, port, wanted, true)?;
        }
        if port.sending == Phase::Outstanding && (broken || bits.contains(EpollFlags::EPOLLOUT)) {
            done.extend(self.try_send(token, port));
        } else if bits.contains(EpollFlags::EPOLLOUT) && !broken {
            let wanted =
                if port.receiving == Phase::Outstanding { EpollFlags::EPOLLIN } else { EpollFlags::empty() };
            self.register(token, port, wanted, true)?;
        } else if broken && !port.busy() {
            self.withdraw(port)?;
        }
        Ok(())
    }
}

impl Driver for Poll {
    const IS_BY_SOCKET: bool = true;

    fn receive(&mut self, token: Token, port: &mut Port) -> Result<(), Errno> {
        port.adjust_low_water();
        self.register(token, port, EpollFlags::EPOLLIN, false)?;
        port.receiving = Phase::Outstanding;
        self.is_amid_payload |= port.is_amid_local_payload() && *HAS_TWO_CPUS;
        Ok(())
    }

    fn send(&mut self, token: Token, port: &mut Port) -> Result<(), Errno> {
        port.sending = Phase::Outstanding;
        self.fresh.push_back(token);
        Ok(())
    }

    fn watch(&mut self, token: Token, port: &mut Port, readiness: Readiness) -> Result<(), Errno> {
        let wanted = match readiness {
            Readiness::Readable => EpollFlags::EPOLLIN,
            Readiness::Writable => EpollFlags::EPOLLOUT,
        };
        self.register(token, port, wanted, true)?;
        port.readiness = Some(readiness);
        Ok(())
    }

    fn cancel(&mut self, _: Token, port: &mut Port) -> Result<(), Errno> {
        (port.receiving, port.sending, port.readiness) = (Phase::Idle, Phase::Idle, None);
        self.withdraw(port)
    }

    fn ready(&self) -> bool {
        !self.fresh.is_empty()
    }

    fn wait(
        &mut self,
        table: &mut Table,
        done: &mut Vec<Completion>,
        timeout: Duration,
    ) -> Result<(), Errno> {
        for _ in 0..self.fresh.len() {
            let Some(token) = self.fresh.pop_front() else { break };
            // If it is not there or not sending, it was cancelled meanwhile.
            if let Some(port) = table
                .get(token)
                .map(|entry| &mut entry.port)
                .filter(|port| port.sending == Phase::Outstanding)
            {
                done.extend(self.try_send(token, port));
            }
        }
        let timeout = if done.is_empty() { timeout } else { Duration::ZERO };
        let mut events = std::mem::take(&mut self.events);
        let outcome = match std::mem::take(&mut self.is_amid_payload) && !timeout.is_zero() {
            true => self.poll_and_sleep(&mut events, timeout),
            false => self.sleeper.sleep(&mut events, timeout),
        };
        let outcome = outcome.and_then(|count| self.events(&events[..count], table, done));
        self.events = events;
        outcome
    }
}

impl Poll {
    /// Sleeps, but polls before that if no other thread may poll.
    fn poll_and_sleep(&self, events: &mut [EpollEvent], timeout: Duration) -> Result<usize, Errno> {
        let until = Instant::now() + POLLING.min(timeout);
        AMID_PAYLOADS.fetch_add(1, Ordering::Relaxed);
        let mut outcome = Ok(0);
        while outcome == Ok(0) && AMID_PAYLOADS.load(Ordering::Relaxed) == 1 && Instant::now() < until {
            outcome = self.sleeper.sleep(events, Duration::ZERO);
        }
        if outcome == Ok(0) {
            outcome = self.sleeper.sleep(events, timeout);
        }
        AMID_PAYLOADS.fetch_sub(1, Ordering::Relaxed);
        outcome
    }

    fn events(
        &self,
        events: &[EpollEvent],
        table: &mut Table,
        done: &mut Vec<Completion>,
    ) -> Result<(), Errno> {
        for event in events.iter().filter(|event| event.data() != Sleeper::WOKEN) {
            let token = unpack(event.data());
            if let Some(entry) = table.get(token) {
                self.event(token, &mut entry.port, event.events(), done)?;
            }
        }
        Ok(())
    }
}

fn pack(token: Token) -> u64 {
    u64::from(token.generation) << 32 | u64::from(token.slot)
}

fn unpack(data: u64) -> Token {
    Token { slot: data as u32, generation: (data >> 32) as u32 }
}
