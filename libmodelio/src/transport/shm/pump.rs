//! Moving the bytes of one connection to and from its rings. The Unix socket shows whether the peer still exists.
//!
//! This module holds `unsafe`: it hands a stream's slices to the rings.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::epoll::{EpollEvent, EpollFlags};

use super::ring::{Broken, RingEnd, Wants};
use crate::transport::reactor::{Completion, Driver, Op, Phase, Port, Sleeper, Table, ThreadState};
use crate::transport::stream::{ReceiveSlices, SendSlices, Token};

const BELL: u64 = 1;
const SOCKET: u64 = 2;

/// Moves bytes between one connection and its rings.
pub(super) struct Pump {
    end: RingEnd,
    sleeper: Sleeper,
    token: Option<Token>,
    receiving: bool,
    sending: bool,
    /// The peer's socket has hung up: no bytes come beyond those in the ring.
    gone: bool,
}

impl Pump {
    pub(super) fn new(end: RingEnd, socket: &OwnedFd, thread: Arc<ThreadState>) -> Result<Pump, Errno> {
        let sleeper = Sleeper::new(thread)?;
        sleeper.epoll.add(end.bell(), EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, BELL))?;
        // A hang-up is always reported. Descriptors that wait are no news.
        sleeper.epoll.add(socket, EpollEvent::new(EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET, SOCKET))?;
        let (token, receiving, sending, gone) = (None, false, false, false);
        Ok(Pump { end, sleeper, token, receiving, sending, gone })
    }

    /// Whether bytes can be moved. A peer that breaks the rules is noticed when bytes are moved.
    fn possible(&self) -> bool {
        let readable = self.receiving && (self.gone || self.end.readable() != Ok(0));
        readable || self.sending && (self.gone || self.end.room() != Ok(0))
    }

    fn receive_now(&mut self, into: &ReceiveSlices) -> Option<Result<usize, Errno>> {
        // SAFETY: the stream has named writable memory, which belongs to the connection until the bytes are reported.
        match unsafe { self.end.read(into.each()) } {
            Ok(0) if self.gone => Some(Ok(0)),
            Ok(0) => None,
            Ok(bytes) => Some(Ok(bytes)),
            Err(broken) => Some(Err(named(&broken))),
        }
    }

    fn send_now(&mut self, out: &SendSlices) -> Option<Result<usize, Errno>> {
        if self.gone {
            return Some(Err(Errno::EPIPE));
        }
        // SAFETY: the stream has named memory that stays readable until the bytes are reported.
        match unsafe { self.end.write(out.each()) } {
            Ok(0) => None,
            Ok(bytes) => Some(Ok(bytes)),
            Err(broken) => Some(Err(named(&broken))),
        }
    }

    fn progress(&mut self, table: &mut Table, done: &mut Vec<Completion>) {
        let Some(token) = self.token else { return };
        let Some(port) = table.get(token).map(|entry| &mut entry.port) else { return };
        if self.receiving
            && let Some(result) = self.receive_now(&port.receive)
        {
            self.receiving = false;
            port.receiving = Phase::Over;
            done.push(Completion { token, op: Op::Receive, result });
            if self.gone {
                // The peer's last message comes before the failure to answer it.
                return;
            }
        }
        if self.sending
            && let Some(result) = self.send_now(&port.send)
        {
            self.sending = false;
            port.sending = Phase::Over;
            done.push(Completion { token, op: Op::Send, result });
        }
    }

    fn sleep(&mut self, timeout: Duration) -> Result<(), Errno> {
        let mut events = [EpollEvent::empty(); 3];
        let count = self.sleeper.sleep(&mut events, timeout)?;
        self.gone |= events[..count].iter().any(|event| event.data() == SOCKET);
        Ok(())
    }
}

fn named(broken: &Broken) -> Errno {
    tracing::warn!("rings in shared memory: {broken}");
    Errno::EPROTO
}

impl Driver for Pump {
    fn receive(&mut self, token: Token, port: &mut Port) -> Result<(), Errno> {
        (self.token, self.receiving) = (Some(token), true);
        port.receiving = Phase::Outstanding;
        Ok(())
    }

    fn send(&mut self, token: Token, port: &mut Port) -> Result<(), Errno> {
        (self.token, self.sending) = (Some(token), true);
        port.sending = Phase::Outstanding;
        Ok(())
    }

    fn cancel(&mut self, _: Token, port: &mut Port) -> Result<(), Errno> {
        (self.receiving, self.sending) = (false, false);
        (port.receiving, port.sending) = (Phase::Idle, Phase::Idle);
        Ok(())
    }

    fn ready(&self) -> bool {
        self.possible()
    }

    fn wait(
        &mut self,
        table: &mut Table,
        done: &mut Vec<Completion>,
        timeout: Duration,
    ) -> Result<(), Errno> {
        self.progress(table, done);
        if !done.is_empty() || timeout.is_zero() {
            return Ok(());
        }
        self.end.wait(Wants { bytes: self.receiving, room: self.sending });
        let outcome = if self.possible() { Ok(()) } else { self.sleep(timeout) };
        self.end.awake();
        self.progress(table, done);
        outcome
    }
}
