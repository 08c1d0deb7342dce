//! Descriptors that processes send each other over a Unix socket: a message each, with a few bytes that say what they
//! are.
//!
//! One of the modules that hold `unsafe`: received descriptors are numbers, which become owned here.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, Shutdown, UnixAddr, recvmsg, sendmsg, shutdown,
};

/// The number of descriptors that the kernel passes on at once (SCM_MAX_FD): room for fewer would lose those
/// that do not fit.
const AT_ONCE: usize = 253;

/// Why a descriptor does not come or go.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DescriptorError {
    /// The system says so.
    #[error("a descriptor cannot be {doing}: {errno}")]
    System {
        /// Sent or received.
        doing: &'static str,
        /// The reason.
        errno: Errno,
    },
    /// Something else came.
    #[error("expected a descriptor for region {expected}, got {got}")]
    Unexpected {
        /// For which it should be.
        expected: u32,
        /// The received kind.
        got: String,
    },
}

/// The descriptors of a connection whose messages are in rings.
#[derive(Clone, Debug)]
pub struct Descriptors(Arc<OwnedFd>);

impl Descriptors {
    /// Over this socket, which keeps messages apart (SOCK_SEQPACKET).
    pub fn new(socket: Arc<OwnedFd>) -> Descriptors {
        Descriptors(socket)
    }

    /// Ends the connection for both ends before this returns: the peer finds it ended from now on.
    pub fn hang_up(&self) {
        // On one that is over already it does nothing.
        let _ = shutdown(self.0.as_raw_fd(), Shutdown::Both);
    }

    /// Whether the peer, or this end, has ended the connection. Ask this after reading the peer's memory, to
    /// know whether the read was in time.
    ///
    /// # Errors
    /// The system's error.
    pub fn is_hung_up(&self) -> Result<bool, Errno> {
        // Earlier reads are done before this is asked.
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

    /// Sends the descriptor of region `number`. The message about it must be sent afterwards, so that the
    /// peer finds the descriptor when it has the message.
    ///
    /// # Errors
    /// [`DescriptorError::System`]; EAGAIN if the peer takes none.
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

/// Receives one message, without waiting: how long it was, and the descriptors with it. Zero bytes: the peer is gone.
pub(super) fn receive(socket: &impl AsFd, bytes: &mut [u8]) -> Result<(usize, Vec<OwnedFd>), Errno> {
    let mut control = nix::cmsg_space!([RawFd; AT_ONCE]);
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    loop {
        let mut slices = [IoSliceMut::new(bytes)];
        let socket = socket.as_fd().as_raw_fd();
        match recvmsg::<UnixAddr>(socket, &mut slices, Some(&mut control), flags) {
            Ok(message) => {
                let mut fds = Vec::new();
                for control in message.cmsgs()? {
                    if let ControlMessageOwned::ScmRights(raw) = control {
                        // SAFETY: the kernel has just made them, for this process, and nobody else knows them.
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
