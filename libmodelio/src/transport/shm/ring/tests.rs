//! Rings: bytes there and back, wrap-around, full and empty, sleepers, peers that lie.

use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::mman::ProtFlags;
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const LONG: Duration = Duration::from_secs(600);

/// Both ends of fresh rings, each with a mapping of its own.
fn pair() -> (RingEnd, RingEnd) {
    let memory = Mapping::memfd("rings", MEMORY).unwrap();
    let fd = memory.fd().unwrap().try_clone_to_owned().unwrap();
    // SAFETY: the file is the memory of this test, which stays.
    let other = unsafe { Mapping::of(fd, MEMORY, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE).unwrap() };
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    let bell = || OwnedFd::from(EventFd::from_value_and_flags(0, flags).unwrap());
    let (a, b) = (bell(), bell());
    let (a_too, b_too) = (a.try_clone().unwrap(), b.try_clone().unwrap());
    (
        RingEnd::new(memory, Side::Connects, a, b).unwrap(),
        RingEnd::new(other, Side::Accepts, b_too, a_too).unwrap(),
    )
}

/// Sets the counts as if `count` bytes had gone each way before.
fn begin_at(ends: [&mut RingEnd; 2], count: u32) {
    for end in ends {
        (end.written, end.read) = (count, count);
        end.word(WRITTEN + end.side * APART).store(count, Ordering::Relaxed);
        end.word(READ + (1 - end.side) * APART).store(count, Ordering::Relaxed);
    }
}

fn write(end: &mut RingEnd, bytes: &mut [u8]) -> Result<usize, Broken> {
    let slice = (bytes.as_mut_ptr(), bytes.len());
    // SAFETY: the slice is of this call.
    unsafe { end.write([slice].into_iter()) }
}

fn read(end: &mut RingEnd, len: usize) -> Result<Vec<u8>, Broken> {
    let mut bytes = vec![0; len];
    let (head, tail) = bytes.split_at_mut(len / 3);
    let slices = [(head.as_mut_ptr(), head.len()), (tail.as_mut_ptr(), tail.len())];
    // SAFETY: the slices are of this call.
    let count = unsafe { end.read(slices.into_iter()) }?;
    bytes.truncate(count);
    Ok(bytes)
}

proptest! {
    #[test]
    fn written_bytes_are_read_in_order(
        from in prop_oneof![Just(0), any::<u32>(), (u32::MAX - 2 * RING as u32)..],
        moves in vec((0..2 * RING, 0..2 * RING), 1..40),
    ) {
        let (mut a, mut b) = pair();
        begin_at([&mut a, &mut b], from);
        let (mut next_in, mut next_out, mut inside) = (0u64, 0u64, 0);
        for (to_write, to_read) in moves {
            let mut bytes: Vec<u8> = (next_in..next_in + to_write as u64).map(|n| (n % 251) as u8).collect();
            let wrote = write(&mut a, &mut bytes).unwrap();
            prop_assert_eq!(wrote, to_write.min(RING - inside));
            (next_in, inside) = (next_in + wrote as u64, inside + wrote);
            prop_assert_eq!((b.readable(), a.room()), (Ok(inside), Ok(RING - inside)));
            let got = read(&mut b, to_read).unwrap();
            prop_assert_eq!(got.len(), to_read.min(inside));
            let expected: Vec<u8> = (next_out..next_out + got.len() as u64).map(|n| (n % 251) as u8).collect();
            prop_assert_eq!(&got, &expected);
            (next_out, inside) = (next_out + got.len() as u64, inside - got.len());
        }
        // The other way nothing has happened.
        prop_assert_eq!((a.readable(), b.room()), (Ok(0), Ok(RING)));
    }

    #[test]
    fn a_count_that_cannot_be_is_noticed(count in RING as u32 + 1.., from in any::<u32>()) {
        let (mut a, mut b) = pair();
        begin_at([&mut a, &mut b], from);
        a.word(WRITTEN).store(from.wrapping_add(count), Ordering::Release);
        prop_assert_eq!(b.readable(), Err(Broken::Count(count)));
        prop_assert_eq!(read(&mut b, 10), Err(Broken::Count(count)));
        b.word(READ).store(from.wrapping_sub(count), Ordering::Release);
        prop_assert_eq!(a.room(), Err(Broken::Count(count)));
        prop_assert_eq!(write(&mut a, &mut [0; 10]), Err(Broken::Count(count)));
    }
}

#[test]
fn a_full_bell_breaks_the_connection_and_blocks_nobody() {
    let (mut a, b) = pair();
    nix::unistd::write(&b.own_bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    assert_eq!(write(&mut a, &mut [1]), Ok(1), "b does not wait for it");
    b.wait(Wants { bytes: true, room: false });
    assert_eq!(write(&mut a, &mut [1]), Err(Broken::Bell(Errno::EAGAIN)));
}

/// Sleeps until the bell rings, as connections do.
struct Sleeper(Epoll);

impl Sleeper {
    fn new(end: &RingEnd) -> Sleeper {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
        epoll.add(end.bell(), EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, 0)).unwrap();
        Sleeper(epoll)
    }

    /// How often it has slept; `possible` says that there is no need.
    fn sleep(&self, end: &RingEnd, wants: Wants, possible: impl Fn(&RingEnd) -> bool) -> u32 {
        end.wait(wants);
        if possible(end) {
            end.awake();
            return 0;
        }
        let begin = Instant::now();
        let timeout = EpollTimeout::try_from(LONG).unwrap();
        self.0.wait(&mut [EpollEvent::empty()], timeout).unwrap();
        end.awake();
        assert!(begin.elapsed() < LONG, "a wake-up was lost");
        1
    }
}

/// Bytes from one thread to the other, in pieces of up to `most`, with naps that make rings full and empty.
fn stream(total: usize, most: usize, nap_of_writer: u64, nap_of_reader: u64) -> (u32, u32) {
    let (mut a, mut b) = pair();
    begin_at([&mut a, &mut b], u32::MAX - 1000);
    let nap = |every: u64, round: u64| {
        if every > 0 && round.is_multiple_of(every) {
            std::thread::sleep(Duration::from_micros(200));
        }
    };
    let writer = std::thread::spawn(move || {
        let sleeper = Sleeper::new(&a);
        let (mut sent, mut sleeps, mut round) = (0, 0, 0u64);
        while sent < total {
            let len = (1 + sent * 7 % most).min(total - sent);
            let mut bytes: Vec<u8> = (sent..sent + len).map(|n| (n % 251) as u8).collect();
            let count = write(&mut a, &mut bytes).unwrap();
            sent += count;
            if count == 0 {
                let wants = Wants { bytes: false, room: true };
                sleeps += sleeper.sleep(&a, wants, |end| end.room() != Ok(0));
            }
            round += 1;
            nap(nap_of_writer, round);
        }
        sleeps
    });
    let sleeper = Sleeper::new(&b);
    let (mut got, mut sleeps, mut round) = (0, 0, 0u64);
    while got < total {
        let bytes = read(&mut b, 1 + got * 13 % most).unwrap();
        for (at, byte) in bytes.iter().enumerate() {
            assert_eq!(*byte, ((got + at) % 251) as u8, "byte {}", got + at);
        }
        got += bytes.len();
        if bytes.is_empty() {
            let wants = Wants { bytes: true, room: false };
            sleeps += sleeper.sleep(&b, wants, |end| end.readable() != Ok(0));
        }
        round += 1;
        nap(nap_of_reader, round);
    }
    (writer.join().unwrap(), sleeps)
}

#[test]
fn a_reader_that_waits_for_every_few_bytes_misses_none() {
    let (_, sleeps) = stream(200_000, 30, 100, 0);
    assert!(sleeps > 10, "{sleeps}");
}

#[test]
fn a_writer_that_waits_for_room_is_woken() {
    let (sleeps, _) = stream(8 << 20, RING, 0, 1);
    assert!(sleeps > 10, "{sleeps}");
}
