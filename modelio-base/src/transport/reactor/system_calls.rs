//! System calls on the memory of a stream and on its socket. One of the modules that hold `unsafe`.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use nix::errno::Errno;

use crate::transport::stream::{ReceiveSlices, SendSlices};

/// Receives the bytes that have come, as many as fit into `into`. Zero is the peer's end of the stream.
pub(super) fn receive_now(socket: BorrowedFd<'_>, into: &mut ReceiveSlices) -> Result<usize, Errno> {
    let message = into.message();
    loop {
        // SAFETY: `message` describes memory that its owner keeps writable. The call has ended when it returns.
        let done = unsafe { libc::recvmsg(socket.as_raw_fd(), message, libc::MSG_DONTWAIT) };
        match Errno::result(done) {
            Ok(bytes) => return Ok(bytes.cast_unsigned()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Sends what the socket takes.
pub(super) fn send_now(socket: BorrowedFd<'_>, out: &mut SendSlices) -> Result<usize, Errno> {
    let message = out.message();
    loop {
        // SAFETY: as above, for reading.
        let done =
            unsafe { libc::sendmsg(socket.as_raw_fd(), message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        match Errno::result(done) {
            Ok(bytes) => return Ok(bytes.cast_unsigned()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Sets the number of waiting bytes from which the socket counts as readable (SO_RCVLOWAT). The end of the stream, an
/// error and a full window always count.
pub(super) fn set_low_water(socket: BorrowedFd<'_>, bytes: u32) -> Result<(), Errno> {
    let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    // SAFETY: the option takes an int, which is passed with its size.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            ptr::from_ref(&value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    Errno::result(done).map(drop)
}

/// Bytes that have come and were not received yet (FIONREAD).
pub(super) fn waiting(socket: BorrowedFd<'_>) -> Result<usize, Errno> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the request writes an int, which lives until the call returns.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    Errno::result(done).map(|_| usize::try_from(bytes).unwrap_or(0))
}
