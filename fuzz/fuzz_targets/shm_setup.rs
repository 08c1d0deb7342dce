//! Any message with any descriptors to a shard's Unix socket: it is taken as rings, or turned away with a reason that the
//! peer gets. Never does it wait for longer than it may, and no descriptor is left open.

#![no_main]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use libmodelio::transport::shm::{SetupError, receive};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, recvmsg, sendmsg, socketpair,
};

const RINGS: u32 = 135_168;

#[derive(Debug, arbitrary::Arbitrary)]
enum Kind {
    Rings { right: bool, bytes: u16, seals: u8 },
    Event { semaphore: bool },
    Pipe,
    Socket,
    Null,
}

#[derive(Debug, arbitrary::Arbitrary)]
struct Input {
    /// Of the greeting, the right one's first bytes,
    right: u8,
    /// and others behind them.
    then: Vec<u8>,
    descriptors: Vec<Kind>,
    /// What is sent after it.
    more: Option<Vec<u8>>,
    /// The peer is gone when it is looked at.
    gone: bool,
}

fn made(kind: &Kind) -> Vec<OwnedFd> {
    match *kind {
        Kind::Rings { right, bytes, seals } => {
            let memory = memfd_create(c"fuzz", MFdFlags::MFD_ALLOW_SEALING).expect("a memfd");
            let bytes = if right { RINGS } else { u32::from(bytes) * 16 };
            nix::unistd::ftruncate(&memory, bytes.into()).expect("a length");
            let seals =
                if right { SealFlag::F_SEAL_SHRINK } else { SealFlag::from_bits_truncate(seals.into()) };
            // Some seals exclude others.
            let _ = fcntl(&memory, FcntlArg::F_ADD_SEALS(seals));
            vec![memory]
        }
        Kind::Event { semaphore } => {
            let flags = if semaphore { EfdFlags::EFD_SEMAPHORE } else { EfdFlags::empty() };
            vec![EventFd::from_value_and_flags(0, flags).expect("an eventfd").into()]
        }
        Kind::Pipe => {
            let (near, far) = nix::unistd::pipe().expect("a pipe");
            vec![near, far]
        }
        Kind::Socket => vec![std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket").into()],
        Kind::Null => vec![std::fs::File::open("/dev/null").expect("a file").into()],
    }
}

fn say(socket: &OwnedFd, bytes: &[u8], descriptors: &[RawFd]) -> bool {
    let control = [ControlMessage::ScmRights(descriptors)];
    let control = if descriptors.is_empty() { &control[..0] } else { &control[..] };
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    sendmsg::<UnixAddr>(socket.as_raw_fd(), &[IoSlice::new(bytes)], control, flags, None).is_ok()
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc").count()
}

fuzz_target!(|input: Input| {
    let before = open_descriptors();
    {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let (peer, own) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).expect("sockets");
        let right = [b"gradfs\0\x01".as_slice(), &RINGS.to_le_bytes()].concat();
        let mut greeting = right[..usize::from(input.right).min(right.len())].to_vec();
        greeting.extend(&input.then);
        let descriptors: Vec<OwnedFd> = input.descriptors.iter().take(40).flat_map(made).collect();
        let raw: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        let said = say(&peer, &greeting, &raw);
        drop(descriptors);
        if let Some(more) = &input.more {
            say(&peer, more, &[]);
        }
        let peer = (!input.gone).then_some(peer);
        let begin = Instant::now();
        let patience = if said { Duration::from_secs(5) } else { Duration::ZERO };
        let met = receive(own, patience);
        assert!(begin.elapsed() < Duration::from_secs(1));
        if let Some(peer) = &peer {
            let mut bytes = [0; 300];
            let mut receive = || {
                let mut slices = [IoSliceMut::new(&mut bytes)];
                let received =
                    recvmsg::<UnixAddr>(peer.as_raw_fd(), &mut slices, None, MsgFlags::MSG_DONTWAIT);
                received.map(|received| received.bytes)
            };
            // That not all was read that was said comes before the answer.
            let received = match receive() {
                Err(Errno::ECONNRESET) if input.more.is_some() => receive(),
                received => received,
            };
            let received = received.expect("an answer");
            match &met {
                Ok(_) => assert_eq!(bytes[..received], [0]),
                Err(error) => {
                    let told = error.to_string();
                    assert_eq!(bytes[..received], told.as_bytes()[..told.len().min(256)]);
                }
            }
        }
        if met.is_ok() {
            assert!(greeting == right && raw.len() == 3);
        } else if let Err(SetupError::System { .. }) = &met {
            // Only what the peer may be the reason of.
            assert!(input.gone || !said, "{met:?}");
        }
    }
    assert_eq!(open_descriptors(), before, "descriptors stay open");
});
