//! Moving bytes with plain non-blocking sockets and epoll, for systems without io_uring.
//!
//! A send is tried at once. A receive is tried when epoll reports enough bytes (see `Port::adjust_low_water`).
//! Interest is level-triggered, and is withdrawn only when it turns out to be idle. So a busy connection needs no
//! epoll_ctl.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

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

pub(super) struct Poll {
    sleeper: Sleeper,
    /// Sends that have begun and were not tried yet. They take turns, so that no connection holds up another.
    fresh: VecDeque<Token>,
    events: Box<[EpollEvent]>,
}

impl Poll {
    pub fn new(thread: Arc<ThreadState>) -> Result<Poll, Errno> {
        let events = vec![EpollEvent::empty(); EVENTS].into_boxed_slice();
        Ok(Poll { sleeper: Sleeper::new(thread)?, fresh: VecDeque::new(), events })
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
    fn receive(&mut self, token: Token, port: &mut Port) -> Result<(), Errno> {
        port.adjust_low_water();
        self.register(token, port, EpollFlags::EPOLLIN, false)?;
        port.receiving = Phase::Outstanding;
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
        let outcome = self.sleeper.sleep(&mut events, timeout);
        let outcome = outcome.and_then(|count| self.events(&events[..count], table, done));
        self.events = events;
        outcome
    }
}

impl Poll {
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
