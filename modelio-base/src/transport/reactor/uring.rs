//! Moving bytes with io_uring. This module holds `unsafe`.
//!
//! Each thread has a ring. At most one operation is outstanding for each direction of a connection. Its memory (the
//! slices, and what they point to) stays until its completion has been reaped, because closing a connection cancels
//! and then waits. A large receive begins with polling, so that it happens once, when enough bytes have come
//! (`Port::adjust_low_water`). A send goes on until the kernel has all bytes (MSG_WAITALL).

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, cqueue, opcode, squeue};
use nix::errno::Errno;

use super::backend::NotUring;
use super::driver::Driver;
use super::inbox::ThreadState;
use super::port::{Completion, Op, Phase, Port, Readiness};
use super::table::Table;
use crate::transport::stream::{Token, errno};

/// Operations that are begun with one system call.
const SUBMISSIONS: u32 = 256;
/// If there are more completions, they wait in the kernel, at some cost.
const COMPLETIONS: u32 = 4096;
/// From linux/io_uring.h: do not try before the socket is ready.
const RECVSEND_POLL_FIRST: u16 = 1;

const CANCEL: u64 = 3;
const WAKEUP: u64 = 4;

pub(super) struct Uring {
    ring: IoUring,
    thread: Arc<ThreadState>,
    /// Whether the eventfd is being polled.
    listening: bool,
    /// Completions that were taken to make room, and that are not reported yet.
    early: Vec<cqueue::Entry>,
}

fn build(submissions: u32, completions: u32) -> Result<IoUring, Errno> {
    IoUring::builder()
        .dontfork()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag()
        .setup_submit_all()
        .setup_cqsize(completions)
        .build(submissions)
        .map_err(|err| errno(&err))
}

/// Checks that io_uring can be used: a ring is made and used once, because a filter may forbid one and not
/// the other.
pub(super) fn probe() -> Result<(), NotUring> {
    let refused = |errno| {
        let sysctl = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok();
        NotUring::from_errno(errno, sysctl.as_deref())
    };
    let mut ring = build(4, 8).map_err(refused)?;
    if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
        return Err(NotUring::TooOld("waiting with a deadline"));
    }
    let mut known = Probe::new();
    ring.submitter().register_probe(&mut known).map_err(|err| refused(errno(&err)))?;
    let needed = [
        (opcode::Recv::CODE, "receiving"),
        (opcode::RecvMsg::CODE, "receiving messages"),
        (opcode::Send::CODE, "sending"),
        (opcode::SendMsg::CODE, "sending messages"),
        (opcode::PollAdd::CODE, "polling"),
        (opcode::AsyncCancel::CODE, "cancelling"),
    ];
    if let Some((_, name)) = needed.iter().find(|(code, _)| !known.is_supported(*code)) {
        return Err(NotUring::TooOld(name));
    }
    // SAFETY: a no-op names no memory.
    unsafe { ring.submission().push(&opcode::Nop::new().build()) }.map_err(|_| refused(Errno::ENOSPC))?;
    ring.submit_and_wait(1).map_err(|err| refused(errno(&err)))?;
    match ring.completion().next() {
        Some(done) if done.result() == 0 => Ok(()),
        Some(done) => Err(refused(Errno::from_raw(-done.result()))),
        None => Err(refused(Errno::EIO)),
    }
}

impl Uring {
    /// A ring for the calling thread, which is the only one that may use it.
    pub(super) fn new(thread: Arc<ThreadState>) -> Result<Uring, Errno> {
        Ok(Uring { ring: build(SUBMISSIONS, COMPLETIONS)?, thread, listening: false, early: Vec::new() })
    }

    /// Queues an operation.
    ///
    /// # Safety
    /// The memory that the entry names stays valid until its completion is reaped.
    unsafe fn push(&mut self, entry: &squeue::Entry) -> Result<(), Errno> {
        // SAFETY: the caller's promise.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            match self.ring.submit().map_err(|err| errno(&err)) {
                Ok(_) | Err(Errno::EINTR) => {}
                // There are more completions than fit: they are taken first.
                Err(Errno::EBUSY | Errno::EAGAIN) => self.early.extend(self.ring.completion()),
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    fn listen_for_wakeups(&mut self) -> Result<(), Errno> {
        if !self.listening {
            // The eventfd is never read: every write of it completes once.
            let poll = opcode::PollAdd::new(fd(&self.thread.wakeup), libc::POLLIN as u32).multi(true);
            // SAFETY: no memory is named. The eventfd lives as long as `thread`, which is ours.
            unsafe { self.push(&poll.build().user_data(WAKEUP)) }?;
            self.listening = true;
        }
        Ok(())
    }

    fn reap(&mut self, table: &mut Table, done: &mut Vec<Completion>) {
        let mut early = std::mem::take(&mut self.early);
        for entry in early.drain(..).chain(self.ring.completion()) {
            if entry.user_data() == WAKEUP {
                self.listening = cqueue::more(entry.flags());
                continue;
            }
            let (token, tag) = unpack(entry.user_data());
            let Some(port) = table.get(token).map(|entry| &mut entry.port) else { continue };
            let op = match tag {
                0 => Op::Receive,
                1 => Op::Send,
                2 => Op::Readiness,
                _ => continue,
            };
            match op {
                Op::Receive => port.receiving = Phase::Over,
                Op::Send => port.sending = Phase::Over,
                Op::Readiness => port.readiness = None,
            }
            let result = usize::try_from(entry.result()).map_err(|_| Errno::from_raw(-entry.result()));
            done.push(Completion { token, op, result });
        }
        self.early = early;
    }
}

impl Driver for Uring {
    const IS_BY_SOCKET: bool = true;

    fn receive(&mut self, token: Token, port: &mut Port) -> Result<(), Errno> {
        let much = port.adjust_low_water();
        let how = if much { RECVSEND_POLL_FIRST } else { 0 };
        let single = port.receive.single().and_then(|(at, len)| Some((at, u32::try_from(len).ok()?)));
        let entry = match single {
            Some((at, len)) => opcode::Recv::new(fd(&port.fd), at, len).ioprio(how).build(),
            None => opcode::RecvMsg::new(fd(&port.fd), port.receive.message()).ioprio(how).build(),
        };
        // SAFETY: the owner of the memory keeps it until it is reported or the connection is closed. The port, which
        // has the list of slices, is dropped after this operation is reaped.
        unsafe { self.push(&entry.user_data(pack(token, Op::Receive as u64))) }?;
        port.receiving = Phase::Outstanding;
        Ok(())
    }

    fn send(&mut self, token: Token, port: &mut Port) -> Result<(), Errno> {
        let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        let single = port.send.single().and_then(|(at, len)| Some((at, u32::try_from(len).ok()?)));
        let entry = match single {
            Some((at, len)) => opcode::Send::new(fd(&port.fd), at, len).flags(flags).build(),
            None => {
                opcode::SendMsg::new(fd(&port.fd), port.send.message()).flags(flags.cast_unsigned()).build()
            }
        };
        // SAFETY: as for receiving.
        unsafe { self.push(&entry.user_data(pack(token, Op::Send as u64))) }?;
        port.sending = Phase::Outstanding;
        Ok(())
    }

    fn watch(&mut self, token: Token, port: &mut Port, readiness: Readiness) -> Result<(), Errno> {
        let bits = match readiness {
            Readiness::Readable => libc::POLLIN,
            Readiness::Writable => libc::POLLOUT,
        };
        let entry = opcode::PollAdd::new(fd(&port.fd), bits as u32).build();
        // SAFETY: no memory is named.
        unsafe { self.push(&entry.user_data(pack(token, Op::Readiness as u64))) }?;
        port.readiness = Some(readiness);
        Ok(())
    }

    fn cancel(&mut self, token: Token, port: &mut Port) -> Result<(), Errno> {
        let outstanding = [
            (port.receiving == Phase::Outstanding, Op::Receive),
            (port.sending == Phase::Outstanding, Op::Send),
            (port.readiness.is_some(), Op::Readiness),
        ];
        for (_, op) in outstanding.into_iter().filter(|(busy, _)| *busy) {
            let entry = opcode::AsyncCancel::new(pack(token, op as u64)).build();
            // SAFETY: no memory is named.
            unsafe { self.push(&entry.user_data(pack(token, CANCEL))) }?;
        }
        Ok(())
    }

    fn ready(&self) -> bool {
        !self.early.is_empty()
    }

    fn wait(
        &mut self,
        table: &mut Table,
        done: &mut Vec<Completion>,
        timeout: Duration,
    ) -> Result<(), Errno> {
        self.listen_for_wakeups()?;
        let waiting = !self.ring.completion().is_empty();
        let entered = if waiting || timeout.is_zero() {
            self.ring.submit()
        } else {
            let timeout = Timespec::from(timeout);
            self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&timeout))
        };
        match entered.map_err(|err| errno(&err)) {
            // EBUSY and EAGAIN: reap first, and try again in the next turn.
            Ok(_) | Err(Errno::ETIME | Errno::EINTR | Errno::EBUSY | Errno::EAGAIN) => {}
            Err(errno) => return Err(errno),
        }
        self.reap(table, done);
        Ok(())
    }
}

fn fd(of: &impl AsRawFd) -> Fd {
    Fd(of.as_raw_fd() as RawFd)
}

/// 32 bits of slot, 24 of generation, 8 of the operation's kind.
fn pack(token: Token, tag: u64) -> u64 {
    u64::from(token.slot) << 32 | u64::from(token.generation) << 8 | tag
}

fn unpack(data: u64) -> (Token, u64) {
    (Token { slot: (data >> 32) as u32, generation: (data >> 8) as u32 & 0x00ff_ffff }, data & 0xff)
}
