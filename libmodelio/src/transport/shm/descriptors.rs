//! Descriptors that processes send each other over a Unix socket. Each has a message of its own, with a few bytes
//! that identify it.
//!
//! This module holds `unsafe`: received descriptors are numbers, which become owned here.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, Shutdown, UnixAddr, recvmsg, sendmsg, shutdown,
};

/// The most descriptors that the kernel passes on at once (SCM_MAX_FD). With room for fewer, those that do not fit
/// would be lost.
const MAX_DESCRIPTORS: usize = 253;

/// Why a descriptor cannot be sent or received.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DescriptorError {
    /// A system call failed.
    #[error("a descriptor cannot be {doing}: {errno}")]
    System {
        /// The operation that failed.
        doing: &'static str,
        /// The reason.
        errno: Errno,
    },
    /// The message is not the expected one.
    #[error("expected a descriptor for region {expected}, got {got}")]
    Unexpected {
        /// The expected region.
        expected: u32,
        /// The received kind.
        got: String,
    },
}

/// The descriptors of a connection whose messages are in rings.
#[derive(Clone, Debug)]
pub struct Descriptors(Arc<OwnedFd>);

impl Descriptors {
    /// Uses this socket, which keeps messages apart (SOCK_SEQPACKET).
    pub fn new(socket: Arc<OwnedFd>) -> Descriptors {
        Descriptors(socket)
    }

    /// Ends the connection for both ends before this returns: the peer finds it ended from now on.
    pub fn hang_up(&self) {
        // This has no effect on an ended connection.
        let _ = shutdown(self.0.as_raw_fd(), Shutdown::Both);
    }

    /// Whether either end has ended the connection. A reader of the peer's memory asks this afterwards, to know
    /// whether it read in time.
    ///
    /// # Errors
    /// The system's error.
    pub fn is_hung_up(&self) -> Result<bool, Errno> {
        // Earlier reads must be complete before the socket is asked.
        fence(Ordering::SeqCst);
        let ended = PollFlags::POLLHUP | PollFlags::POLLERR;
        let mut socket = [PollFd::new(self.0.as_fd(), ended)];
        loop {
            match poll(&mut socket, PollTimeout::ZERO) {
                Ok(_) => return Ok(socket[0].revents().is_none_or(|seen| seen.intersects(ended))),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Sends the descriptor of region `number`. The message about the region must be sent later, so that the peer
    /// finds the descriptor when it has the message.
    ///
    /// # Errors
    /// [`DescriptorError::System`], with EAGAIN if the peer takes none.
    pub fn send(&self, number: u32, fd: BorrowedFd<'_>) -> Result<(), DescriptorError> {
        let sent = send(&self.0, &number.to_le_bytes(), &[fd.as_raw_fd()]);
        sent.map_err(|errno| DescriptorError::System { doing: "sent", errno })
    }

    /// The descriptor of region `number`, which the peer has announced.
    ///
    /// # Errors
    /// [`DescriptorError`].
    pub fn receive(&self, number: u32) -> Result<OwnedFd, DescriptorError> {
        let mut bytes = [0; 5];
        let (len, mut fds) = receive(&self.0, &mut bytes)
            .map_err(|errno| DescriptorError::System { doing: "received", errno })?;
        match (fds.pop(), fds.is_empty(), &bytes[..len]) {
            (Some(fd), true, got) if got == number.to_le_bytes() => Ok(fd),
            (_, _, got) => {
                let got = format!("{len} bytes {got:02x?}");
                Err(DescriptorError::Unexpected { expected: number, got })
            }
        }
    }
}

/// Sends one message, without waiting.
pub(super) fn send(socket: &impl AsFd, bytes: &[u8], fds: &[RawFd]) -> Result<(), Errno> {
    let control = [ControlMessage::ScmRights(fds)];
    let control = if fds.is_empty() { &control[..0] } else { &control[..] };
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    loop {
        let socket = socket.as_fd().as_raw_fd();
        match sendmsg::<UnixAddr>(socket, &[IoSlice::new(bytes)], control, flags, None) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Receives one message without waiting. Returns its length and its descriptors. Zero bytes: the peer has gone.
pub(super) fn receive(socket: &impl AsFd, bytes: &mut [u8]) -> Result<(usize, Vec<OwnedFd>), Errno> {
    let mut control = nix::cmsg_space!([RawFd; MAX_DESCRIPTORS]);
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    loop {
        let mut slices = [IoSliceMut::new(bytes)];
        let socket = socket.as_fd().as_raw_fd();
        match recvmsg::<UnixAddr>(socket, &mut slices, Some(&mut control), flags) {
            Ok(message) => {
                let mut fds = Vec::new();
                for control in message.cmsgs()? {
                    if let ControlMessageOwned::ScmRights(raw) = control {
                        // SAFETY: the kernel has just made them for this process, and no other code knows them.
                        fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                    }
                }
                return Ok((message.bytes, fds));
            }
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}
