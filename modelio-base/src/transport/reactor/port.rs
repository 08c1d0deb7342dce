//! A descriptor of a serving thread, and the operations outstanding on it.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockaddrLike, SockaddrStorage, getsockname};

use super::system_calls;
use crate::transport::stream::{ReceiveSlices, SendSlices, Token};

/// Below this, every byte wakes the thread: it waits for a message, not for a payload.
const LOW_WATER_MIN: usize = 16 << 10;
/// A longer payload is taken in parts, while the rest is on its way. With a smaller limit the thread wakes up more
/// often; with a larger one, more bytes have left the cache when they are taken.
const LOW_WATER_MAX: usize = 128 << 10;

/// The shortest interval in which bytes below the low-water mark are counted.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// An outstanding operation on a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Bytes come into memory.
    Receive,
    /// Bytes of memory go out.
    Send,
    /// Readiness to read or write, by `poll`.
    Readiness,
}

/// A finished operation.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// The descriptor.
    pub token: Token,
    /// The operation.
    pub op: Op,
    /// The number of bytes, or the error.
    pub result: Result<usize, Errno>,
}

/// The readiness that the thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// It can be read.
    Readable,
    /// It can be written.
    Writable,
}

/// The state of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// There is no operation.
    Idle,
    /// The kernel may touch its memory.
    Outstanding,
    /// The operation has ended, and the stream does not know yet.
    Over,
}

/// A descriptor and its outstanding operations.
pub struct Port {
    /// Another thread that is sending a message holds it, too, until the system call is over.
    pub fd: Arc<OwnedFd>,
    /// The memory of the receive.
    pub receive: ReceiveSlices,
    /// The memory of the send.
    pub send: SendSlices,
    /// The number of bytes that the outstanding receive must still bring.
    pub least: usize,
    /// The number of bytes that it has brought.
    pub got: usize,
    /// The state of the receive.
    pub receiving: Phase,
    /// The state of the send.
    pub sending: Phase,
    /// The readiness that is waited for.
    pub readiness: Option<Readiness>,
    /// The events that epoll is registered for.
    pub registered: Option<u32>,
    is_unix: bool,
    /// The socket's SO_RCVLOWAT. `None` if it has none that counts.
    low_water: Option<usize>,
    /// When the bytes below it were last counted.
    checked: Option<Instant>,
}

impl Port {
    pub(super) fn new(fd: OwnedFd) -> Port {
        // A Unix socket takes the option, but is readable at every byte.
        let address = getsockname::<SockaddrStorage>(fd.as_raw_fd());
        let is_unix = address.is_ok_and(|address| address.family() == Some(AddressFamily::Unix));
        Port {
            fd: Arc::new(fd),
            receive: ReceiveSlices::new(),
            send: SendSlices::new(),
            least: 0,
            got: 0,
            receiving: Phase::Idle,
            sending: Phase::Idle,
            readiness: None,
            registered: None,
            is_unix,
            low_water: (!is_unix).then_some(1),
            checked: None,
        }
    }

    /// Whether the kernel may still touch memory, or report something.
    pub fn busy(&self) -> bool {
        self.receiving == Phase::Outstanding || self.sending == Phase::Outstanding || self.readiness.is_some()
    }

    /// Sets the low-water mark, so that the socket becomes readable when the receive has the bytes that it needs, or
    /// earlier if those are few. True if they are many. Then a try before that would only fetch a part.
    pub fn adjust_low_water(&mut self) -> bool {
        let Some(current) = self.low_water else { return false };
        let wanted = low_water(current, self.least - self.got);
        if wanted != current {
            let set = system_calls::set_low_water(self.fd.as_fd(), u32::try_from(wanted).unwrap_or(u32::MAX));
            // This kind of socket does not have the option. It is readable at every byte, which costs only time.
            self.low_water = set.ok().map(|()| wanted);
        }
        self.low_water.is_some_and(|bytes| bytes > 1)
    }

    /// Whether the receive waits for a long payload whose sender is on this host.
    pub fn is_amid_local_payload(&self) -> bool {
        self.is_unix && self.least - self.got >= LOW_WATER_MIN
    }

    /// How many bytes of the outstanding receive have come that the low-water mark hides. `None` if it hides none, or
    /// if they were counted a moment ago.
    pub fn check(&mut self, now: Instant) -> Option<usize> {
        let hidden = self.receiving == Phase::Outstanding && self.low_water.is_some_and(|bytes| bytes > 1);
        if !hidden || self.checked.is_some_and(|checked| now < checked + CHECK_INTERVAL) {
            return None;
        }
        self.checked = Some(now);
        system_calls::waiting(self.fd.as_fd()).ok().map(|waiting| self.got + waiting)
    }
}

/// The low-water mark for a receive that needs `needed` more bytes. Setting it is a system call, so an old mark stays
/// if it does little harm. It is never above what is needed, because no more bytes may come.
fn low_water(current: usize, needed: usize) -> usize {
    let best = if needed < LOW_WATER_MIN { 1 } else { needed.min(LOW_WATER_MAX) };
    if current > needed || best >= 2 * current.max(LOW_WATER_MIN / 2) { best } else { current }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_mark_never_exceeds_what_is_needed() {
        for current in [1, 1000, 20_000, 100_000, LOW_WATER_MAX] {
            for needed in [1, 31, 1000, LOW_WATER_MIN, 50_000, 99_999, LOW_WATER_MAX, 1 << 30] {
                let mark = low_water(current, needed);
                assert!(mark <= needed && (1..=LOW_WATER_MAX).contains(&mark), "{current} {needed} {mark}");
            }
        }
    }

    #[test]
    fn only_sockets_that_heed_a_mark_get_one() {
        let waiting = |fd: OwnedFd| {
            let mut port = Port::new(fd);
            port.least = 1 << 20;
            port
        };
        let (unix, _other) = UnixStream::pair().expect("a pair of Unix sockets");
        let mut unix = waiting(unix.into());
        assert!(!unix.adjust_low_water() && unix.is_amid_local_payload());
        unix.got = unix.least - 28;
        assert!(!unix.is_amid_local_payload(), "a head may come in an hour");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a TCP socket");
        let tcp = TcpStream::connect(listener.local_addr().expect("its address")).expect("a connection");
        let mut tcp = waiting(tcp.into());
        assert!(tcp.adjust_low_water() && !tcp.is_amid_local_payload());
    }

    #[test]
    fn the_mark_is_left_alone_in_a_steady_stream() {
        let block = (256 << 10) + 64;
        let mark = low_water(1, block);
        assert_eq!(mark, LOW_WATER_MAX);
        assert_eq!(low_water(mark, block), mark);
        assert_eq!(low_water(1, 64), 1);
        assert_eq!(low_water(mark, 64), 1);
    }
}
