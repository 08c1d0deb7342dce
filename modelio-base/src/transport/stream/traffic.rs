//! How a TCP socket's bytes get on, from the kernel's own account (TCP_INFO).
//!
//! This module holds `unsafe` for a system call that has no safe form.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

/// How a TCP socket's bytes get on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes that the kernel has taken and not sent yet.
    pub not_sent: u32,
    /// The newest measured rate, in bytes a second. 0 if none was measured.
    pub rate: u64,
    /// There were not enough bytes to measure what the link can do.
    pub too_few: bool,
    /// How long bytes were on their way, since the connection began.
    pub busy: Duration,
    /// How long of that the peer had no room for more.
    pub by_peer: Duration,
}

/// The bytes of `struct tcp_info` (linux/tcp.h) up to the last one that is used here, and where its fields lie.
const INFO: usize = 184;
const TOO_FEW: usize = 7;
const NOT_SENT: usize = 144;
const RATE: usize = 160;
const BUSY: usize = 168;
const BY_PEER: usize = 176;

/// How the socket's bytes get on. None if it is not one of TCP, or the kernel does not say all of it.
pub(super) fn traffic(socket: &OwnedFd) -> Option<Traffic> {
    let (mut info, mut len) = ([0_u8; INFO], INFO as libc::socklen_t);
    // SAFETY: the kernel writes at most `len` bytes, which the array has, and the number of those.
    let failed = unsafe {
        let to = info.as_mut_ptr().cast();
        libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, to, &raw mut len)
    };
    if failed != 0 || (len as usize) < INFO {
        return None;
    }
    let number = |at: usize| info[at..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
    let time = |at| Duration::from_micros(number(at));
    let not_sent = info[NOT_SENT..].first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
    let too_few = info[TOO_FEW] & 1 != 0;
    Some(Traffic { not_sent, rate: number(RATE), too_few, busy: time(BUSY), by_peer: time(BY_PEER) })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn the_kernel_says_what_a_peer_that_does_not_read_holds_up() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_peer, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        while stream.write(&[0; 1 << 16]).is_ok() {}
        let socket = OwnedFd::from(stream);
        let seen = traffic(&socket).unwrap();
        assert!(seen.not_sent > 0 && seen.busy >= seen.by_peer, "{seen:?}");
        while traffic(&socket).unwrap().by_peer.is_zero() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn other_sockets_say_nothing() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(traffic(&one.into()), None);
    }
}
