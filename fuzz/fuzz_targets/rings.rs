//! A peer that does to the memory of the rings whatever it likes, between any two steps of this end: its counts are
//! believed or refused as docs/internals/protocol.md says, this end moves the bytes that it says it moves, from and to
//! where its own counts are, and touches nothing else.

#![no_main]

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use libmodelio::transport::shm::{Broken, Meeting, RING, RingEnd, Wants, receive};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, sendmsg, socketpair,
};

const MEMORY: u64 = 135_168;
/// Of the words that the client, which is the peer here, may write; and of those of this end, which it must not.
const CLIENT_WRITTEN: u64 = 0;
const SHARD_WRITTEN: u64 = 128;
const SHARD_READ: u64 = 256;
const CLIENT_READ: u64 = 384;
const RINGS: [u64; 2] = [4096, 69_632];

#[derive(Debug, arbitrary::Arbitrary)]
enum Step {
    /// The peer counts on, by what is honest or not.
    Count {
        read: bool,
        by: u32,
    },
    /// It writes anything anywhere, this end's words too.
    Store {
        at: u32,
        bytes: Vec<u8>,
    },
    /// It fills this end's way to ring it.
    Fill,
    Empty,
    Read {
        lens: Vec<u16>,
    },
    Write {
        lens: Vec<u16>,
    },
    Wait {
        bytes: bool,
        room: bool,
    },
    Awake,
}

struct Peer {
    memory: File,
    bell: EventFd,
}

impl Peer {
    fn word(&self, at: u64) -> u32 {
        let mut word = [0; 4];
        self.memory.read_exact_at(&mut word, at).expect("memory");
        u32::from_le_bytes(word)
    }

    fn ring(&self, which: usize, from: u32, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; RING];
        self.memory.read_exact_at(&mut bytes, RINGS[which]).expect("memory");
        (0..len).map(|at| bytes[(from as usize + at) % RING]).collect()
    }
}

fn meet() -> (Peer, RingEnd, OwnedFd) {
    let memory = memfd_create(c"fuzz", MFdFlags::MFD_ALLOW_SEALING).expect("a memfd");
    nix::unistd::ftruncate(&memory, MEMORY as i64).expect("a length");
    fcntl(&memory, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).expect("a seal");
    let bell = || EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK).expect("an eventfd");
    let (bell, shards) = (bell(), bell());
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let (near, far) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).expect("sockets");
    let greeting = [b"gradfs\0\x01".as_slice(), &(MEMORY as u32).to_le_bytes()].concat();
    let fds = [
        memory.as_raw_fd(),
        std::os::fd::AsFd::as_fd(&bell).as_raw_fd(),
        std::os::fd::AsFd::as_fd(&shards).as_raw_fd(),
    ];
    let greeting = [std::io::IoSlice::new(&greeting)];
    let control = [ControlMessage::ScmRights(&fds)];
    sendmsg::<UnixAddr>(near.as_raw_fd(), &greeting, &control, MsgFlags::empty(), None).expect("sent");
    let Meeting { end, .. } = receive(far, Duration::from_secs(5)).expect("it is a right one");
    (Peer { memory: memory.into(), bell }, end, near)
}

fn room_for(lens: &[u16]) -> Vec<Vec<u8>> {
    lens.iter().take(64).map(|&len| vec![0xAA; usize::from(len)]).collect()
}

fn total(buffers: &[Vec<u8>]) -> usize {
    buffers.iter().map(Vec::len).sum()
}

fuzz_target!(|steps: Vec<Step>| {
    let (peer, mut end, _socket) = meet();
    // This end's own counts, as only it can know them.
    let (mut read, mut written) = (0u32, 0u32);
    let mut fill = 0u8;
    for step in steps.into_iter().take(200) {
        match step {
            Step::Count { read: of_read, by } => {
                let at = if of_read { CLIENT_READ } else { CLIENT_WRITTEN };
                let count = peer.word(at).wrapping_add(by);
                peer.memory.write_all_at(&count.to_le_bytes(), at).expect("memory");
            }
            Step::Store { at, bytes } => {
                let at = u64::from(at) % MEMORY;
                let bytes = &bytes[..bytes.len().min((MEMORY - at) as usize)];
                peer.memory.write_all_at(bytes, at).expect("memory");
            }
            Step::Fill => drop(peer.bell.write(u64::MAX - 1)),
            Step::Empty => drop(peer.bell.read()),
            Step::Wait { bytes, room } => end.wait(Wants { bytes, room }),
            Step::Awake => end.awake(),
            Step::Read { lens } => {
                let there = peer.word(CLIENT_WRITTEN).wrapping_sub(read);
                let mut buffers = room_for(&lens);
                let most = total(&buffers);
                let slices: Vec<_> = buffers.iter_mut().map(|b| (b.as_mut_ptr(), b.len())).collect();
                // SAFETY: the buffers are this step's.
                let outcome = unsafe { end.read(slices.into_iter()) };
                let count = (there as usize).min(most);
                if there as usize > RING {
                    assert_eq!(outcome, Err(Broken::Count(there)));
                    assert!(buffers.concat().iter().all(|&byte| byte == 0xAA), "nothing was taken");
                    continue;
                }
                let all = buffers.concat();
                assert_eq!(all[..count], peer.ring(0, read, count));
                assert!(all[count..].iter().all(|&byte| byte == 0xAA));
                read = read.wrapping_add(count as u32);
                match outcome {
                    Ok(got) => assert_eq!(got, count),
                    Err(broken) => assert!(matches!(broken, Broken::Bell(_)), "{broken:?}"),
                }
                if count > 0 {
                    assert_eq!(peer.word(SHARD_READ), read);
                }
            }
            Step::Write { lens } => {
                let under_way = written.wrapping_sub(peer.word(CLIENT_READ));
                let mut buffers = room_for(&lens);
                fill = fill.wrapping_add(1);
                buffers.iter_mut().for_each(|buffer| buffer.fill(fill));
                let before = peer.ring(1, 0, RING);
                let slices: Vec<_> = buffers.iter_mut().map(|b| (b.as_mut_ptr(), b.len())).collect();
                // SAFETY: the buffers are this step's.
                let outcome = unsafe { end.write(slices.into_iter()) };
                let after = peer.ring(1, 0, RING);
                if under_way as usize > RING {
                    assert_eq!(outcome, Err(Broken::Count(under_way)));
                    assert!(before == after, "nothing was written");
                    continue;
                }
                let count = (RING - under_way as usize).min(total(&buffers));
                let mut expected = before;
                (0..count).for_each(|at| expected[(written as usize + at) % RING] = fill);
                assert!(expected == after, "what was said, and no more");
                written = written.wrapping_add(count as u32);
                match outcome {
                    Ok(put) => assert_eq!(put, count),
                    Err(broken) => assert!(matches!(broken, Broken::Bell(_)), "{broken:?}"),
                }
                if count > 0 {
                    assert_eq!(peer.word(SHARD_WRITTEN), written);
                }
            }
        }
    }
});
