//! How a client and a shard set up shared rings.
//!
//! A shard listens on a Unix socket in the abstract namespace, whose name follows from the address that it announces.
//! The socket goes with its process, and exists only within one network namespace. The connecting end makes the
//! memory of the rings and the bells, and sends their descriptors with its greeting. The other end checks them, and
//! accepts them or answers why not. From then on the socket carries descriptors of regions. Its hang-up tells each
//! end that the other has gone.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::mman::ProtFlags;
use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockType, UnixAddr};

use super::descriptors;
use super::owner;
use super::region::{self, RegionError};
use super::ring::{MEMORY, RingEnd, Side};
use crate::bytes::crc32c::crc32c;
use crate::bytes::mmap::Mapping;

/// The greeting begins with this: kind and version. The length of the rings' memory follows.
const MAGIC: &[u8; 8] = b"gradfs\0\x01";
/// The first byte of an answer that accepts. Any other answer is the reason for a refusal.
const YES: u8 = 0;
/// The longest reason for a refusal, in bytes.
const REASON: usize = 256;

/// Why two processes cannot set up rings.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A system call failed.
    #[error("{doing}: {error}")]
    System {
        /// The operation that failed.
        doing: &'static str,
        /// Why it failed.
        error: io::Error,
    },
    /// No answer came in time.
    #[error("no answer within {0:?} from whoever has bound the socket's name")]
    Late(Duration),
    /// Another user's process listens on the socket.
    #[error("user {owner} has bound the socket's name, who is not the shard's")]
    Foreign {
        /// Its owner.
        owner: u32,
    },
    /// The peer closed its end.
    #[error("the peer hangs up")]
    Gone,
    /// The peer has refused this end's rings.
    #[error("refused: {0}")]
    Refused(String),
    /// The received bytes are no greeting.
    #[error("the peer does not greet as gradfs {0}")]
    Stranger(String),
}

impl SetupError {
    /// Whether the peer may answer a little later, because it is stopped, overloaded, or just ending.
    pub fn is_transient(&self) -> bool {
        match self {
            SetupError::Late(_) | SetupError::Gone => true,
            SetupError::System { error, .. } => error.kind() == io::ErrorKind::WouldBlock,
            SetupError::Refused(_) | SetupError::Stranger(_) | SetupError::Foreign { .. } => false,
        }
    }
}

fn system(doing: &'static str) -> impl Fn(Errno) -> SetupError {
    move |errno| SetupError::System { doing, error: errno.into() }
}

/// The error of sending to a peer or receiving from it. The peer may have gone.
fn talking(doing: &'static str) -> impl Fn(Errno) -> SetupError {
    move |errno| match errno {
        Errno::EPIPE | Errno::ECONNRESET => SetupError::Gone,
        errno => system(doing)(errno),
    }
}

/// Two ends that have set up rings.
#[derive(Debug)]
pub struct Meeting {
    /// The rings.
    pub end: RingEnd,
    /// The socket, for descriptors and its hang-up.
    pub socket: Arc<OwnedFd>,
}

/// The name of the socket of a shard that announces this address.
fn name(address: &str) -> Result<UnixAddr, SetupError> {
    /// Longer addresses are cut. Their checksum tells them apart.
    const MAX_NAME_BYTES: usize = 80;
    let mut name = format!("gradfs/{address}");
    if name.len() > MAX_NAME_BYTES {
        name.truncate(name.floor_char_boundary(MAX_NAME_BYTES));
        name.push_str(&format!("~{:08x}", crc32c(address.as_bytes())));
    }
    UnixAddr::new_abstract(name.as_bytes()).map_err(system("naming the socket"))
}

fn unix_socket() -> Result<OwnedFd, SetupError> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socket::socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).map_err(system("making a socket"))
}

/// The non-blocking listening socket of a shard that announces itself from `address`.
///
/// # Errors
/// [`SetupError::System`], with EADDRINUSE if another process listens there.
pub fn listen(address: &str) -> Result<OwnedFd, SetupError> {
    let listener = unix_socket()?;
    socket::bind(listener.as_raw_fd(), &name(address)?).map_err(system("binding the socket"))?;
    let backlog = Backlog::new(128).map_err(system("listening"))?;
    socket::listen(&listener, backlog).map_err(system("listening"))?;
    Ok(listener)
}

/// Connects to the shard on this host that announces itself from `address`. Waits for up to `patience`.
///
/// # Errors
/// [`SetupError`].
pub fn meet(address: &str, patience: Duration) -> Result<Meeting, SetupError> {
    let socket = unix_socket()?;
    socket::connect(socket.as_raw_fd(), &name(address)?).map_err(system("connecting to its socket"))?;
    // The owner is checked before it gets a descriptor of this process.
    if let Some(owner) = owner::stranger(&socket, address).map_err(system("asking who is there"))? {
        return Err(SetupError::Foreign { owner });
    }
    let making = |error| SetupError::System { doing: "making the rings", error };
    let memory = Mapping::memfd("gradfs-rings", MEMORY).map_err(making)?;
    memory.fix_size().map_err(making)?;
    let bell = || EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
    let (own, peers) = (bell().map_err(system("making a bell"))?, bell().map_err(system("making a bell"))?);
    let mut greeting = MAGIC.to_vec();
    greeting.extend_from_slice(&(MEMORY as u32).to_le_bytes());
    let rings = memory.fd().ok_or(io::ErrorKind::Unsupported.into()).map_err(making)?;
    let sent = [rings.as_raw_fd(), own.as_fd().as_raw_fd(), peers.as_fd().as_raw_fd()];
    descriptors::send(&socket, &greeting, &sent).map_err(talking("greeting"))?;
    let mut answer = [0; REASON];
    let (len, _) = await_message(&socket, &mut answer, patience)?;
    match answer[..len] {
        [] => return Err(SetupError::Gone),
        [YES] => {}
        ref reason => return Err(SetupError::Refused(String::from_utf8_lossy(reason).into_owned())),
    }
    let end = RingEnd::new(memory, Side::Connects, own.into(), peers.into()).map_err(making)?;
    Ok(Meeting { end, socket: Arc::new(socket) })
}

/// Takes the greeting of a peer that has connected. Waits for up to `patience`. The peer gets the reason of a
/// refusal.
///
/// # Errors
/// [`SetupError`].
pub fn receive(socket: OwnedFd, patience: Duration) -> Result<Meeting, SetupError> {
    let outcome = take(&socket, patience);
    let answer = match &outcome {
        Ok(_) => vec![YES],
        Err(error) => error.to_string().into_bytes(),
    };
    let answered = descriptors::send(&socket, &answer[..answer.len().min(REASON)], &[]);
    let end = outcome?;
    answered.map_err(talking("answering"))?;
    Ok(Meeting { end, socket: Arc::new(socket) })
}

/// The end that answers.
fn take(socket: &OwnedFd, patience: Duration) -> Result<RingEnd, SetupError> {
    let mut greeting = [0; 64];
    let (len, fds) = await_message(socket, &mut greeting, patience)?;
    if len == 0 {
        return Err(SetupError::Gone);
    }
    let stranger = |why: String| SetupError::Stranger(format!("does: {why}"));
    let Some(rest) = greeting[..len].strip_prefix(MAGIC) else {
        return Err(stranger(format!("{len} bytes of something else")));
    };
    let bytes = <[u8; 4]>::try_from(rest).map(u32::from_le_bytes).unwrap_or(0);
    if bytes as usize != MEMORY {
        return Err(stranger(format!("rings of {bytes} bytes, not {MEMORY}")));
    }
    let Ok([rings, peers, own]) = <[OwnedFd; 3]>::try_from(fds) else {
        return Err(stranger("its descriptors are not three".into()));
    };
    for bell in [&peers, &own] {
        // Writing to any other file might block.
        let kind = std::fs::read_link(format!("/proc/self/fd/{}", bell.as_raw_fd())).unwrap_or_default();
        if kind.as_os_str() != "anon_inode:[eventfd]" {
            return Err(stranger(format!("{} is no eventfd", kind.display())));
        }
    }
    let mapping = |error| SetupError::System { doing: "mapping the rings", error };
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let memory = region::map(0, rings, MEMORY as u64, protection).map_err(|error| match error {
        RegionError::System { error, .. } => mapping(error),
        other => stranger(other.to_string()),
    })?;
    RingEnd::new(memory, Side::Accepts, own, peers).map_err(mapping)
}

/// The next message, and its descriptors.
fn await_message(
    socket: &OwnedFd,
    bytes: &mut [u8],
    patience: Duration,
) -> Result<(usize, Vec<OwnedFd>), SetupError> {
    let deadline = Instant::now() + patience;
    loop {
        match descriptors::receive(socket, bytes) {
            Err(Errno::EAGAIN) => {}
            other => return other.map_err(talking("receiving")),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(SetupError::Late(patience));
        }
        let timeout = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(socket.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(system("waiting")(errno)),
        }
    }
}

#[cfg(test)]
mod tests;
