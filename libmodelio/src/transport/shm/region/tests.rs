//! Tests of mapping regions, of refusals, and of regions that stay.

use std::io::{Seek, Write};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use super::*;

fn channel() -> (Descriptors, Descriptors) {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let (a, b) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
    (Descriptors::new(Arc::new(a)), Descriptors::new(Arc::new(b)))
}

/// A memfd of `len` bytes with these seals.
fn memfd(len: u64, seals: SealFlag) -> OwnedFd {
    let fd = memfd_create("region", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    nix::unistd::ftruncate(&fd, len as i64).unwrap();
    fcntl(&fd, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    fd
}

fn bytes(piece: &BorrowedRange) -> Vec<u8> {
    // SAFETY: nobody writes them during the test.
    unsafe { piece.bytes() }.to_vec()
}

#[test]
fn lent_memory_is_read_where_it_lies_and_stays_when_its_owner_goes() {
    let (ours, theirs) = channel();
    let memory = Arc::new(Mapping::memfd("lent", 10_000).unwrap());
    // SAFETY: one thread.
    unsafe { memory.write(9_000, b"numbers") };
    let mut lender = Lender::default();
    let (number, length) = lender.lend(&memory, &ours).unwrap();
    assert_eq!(length, Some(10_000));
    assert_eq!(lender.lend(&memory, &ours).unwrap(), (number, None), "it is known already");
    let mut regions = Regions::new(10_000);
    regions.share(number, 10_000, &theirs).unwrap();
    let piece = regions.piece(number, 9_000, 7).unwrap();
    assert_eq!(bytes(&piece), b"numbers");
    // SAFETY: one thread, and no slice is alive.
    unsafe { memory.write(9_000, b"changed") };
    assert_eq!(bytes(&piece), b"changed");
    // The descriptor that was sent is good for reading only.
    let fd = piece.region.0.fd().unwrap().try_clone_to_owned().unwrap();
    // SAFETY: only a refused mapping is of this file.
    let written = unsafe { Mapping::of(fd, 10_000, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE) };
    assert_eq!(written.unwrap_err().raw_os_error(), Some(libc::EACCES));

    assert!(lender.gone().is_empty());
    drop(memory);
    assert_eq!((lender.gone(), lender.gone()), (vec![number], vec![]));
    regions.unshare(number).unwrap();
    assert!(matches!(regions.piece(number, 0, 1), Err(RegionError::Unknown(_))));
    assert_eq!(bytes(&piece), b"changed", "who reads it keeps it");
}

#[test]
fn pieces_outside_of_a_region_are_refused() {
    let (ours, theirs) = channel();
    let memory = Arc::new(Mapping::memfd("lent", 4096).unwrap());
    let (number, _) = Lender::default().lend(&memory, &ours).unwrap();
    let mut regions = Regions::new(4096);
    regions.share(number, 4096, &theirs).unwrap();
    assert!(regions.piece(number, 0, 4096).is_ok() && regions.piece(number, 4096, 0).is_ok());
    for (offset, len) in [(0, 4097), (1, 4096), (4096, 1), (u64::MAX, 1), (u64::MAX - 10, 100), (1 << 40, 8)]
    {
        let outside = regions.piece(number, offset, len);
        assert!(matches!(outside, Err(RegionError::OutOfRange { .. })), "{len} at {offset}");
    }
}

#[test]
fn only_memfds_that_cannot_shrink_are_mapped() {
    let sealed = SealFlag::F_SEAL_SHRINK;
    let map = |fd: OwnedFd, bytes| Borrowed::map(7, fd, bytes).map(|_| ()).unwrap_err();
    assert!(Borrowed::map(7, memfd(4096, sealed), 4096).is_ok());
    assert!(matches!(map(memfd(4096, SealFlag::F_SEAL_GROW), 4096), RegionError::NotSealed(7)));
    for (len, said) in [(4096, 4097), (4096, 8192), (8192, 4096), (4096, u64::MAX), (0, 0)] {
        let error = map(memfd(len, sealed), said);
        assert!(matches!(error, RegionError::Length { .. }), "{len} {said}: {error}");
    }
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[0; 4096]).unwrap();
    file.rewind().unwrap();
    assert!(matches!(map(file.into(), 4096), RegionError::Kind(7) | RegionError::NotSealed(7)));
    let (pipe, _other) = nix::unistd::pipe().unwrap();
    assert!(matches!(map(pipe, 4096), RegionError::Kind(7)));
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING | MFdFlags::MFD_HUGETLB;
    if let Ok(huge) = memfd_create("huge", flags) {
        nix::unistd::ftruncate(&huge, 2 << 20).unwrap();
        fcntl(&huge, FcntlArg::F_ADD_SEALS(sealed)).unwrap();
        assert!(matches!(map(huge, 2 << 20), RegionError::Kind(7)));
    }
}

#[test]
fn numbers_lengths_and_descriptors_have_to_be_right() {
    let (ours, theirs) = channel();
    let mut regions = Regions::new(4096);
    let none = regions.share(1, 4096, &theirs);
    assert!(matches!(none, Err(RegionError::Descriptor(DescriptorError::System { .. }))), "{none:?}");
    let long = regions.share(1, 4097, &theirs);
    assert!(matches!(long, Err(RegionError::TooLong { number: 1, most: 4096, got: 4097 })), "{long:?}");
    ours.send(2, memfd(4096, SealFlag::F_SEAL_SHRINK).as_fd()).unwrap();
    let other = regions.share(1, 4096, &theirs);
    let expected = |error: &RegionError| {
        matches!(error, RegionError::Descriptor(DescriptorError::Unexpected { expected: 1, .. }))
    };
    assert!(other.as_ref().is_err_and(expected), "{other:?}");
    for number in 0..MAX_REGIONS as u32 {
        ours.send(number, memfd(4096, SealFlag::F_SEAL_SHRINK).as_fd()).unwrap();
        regions.share(number, 4096, &theirs).unwrap();
        let again = regions.share(number, 4096, &theirs);
        let known = matches!(again, Err(RegionError::Taken(_) | RegionError::TooMany));
        assert!(known, "{again:?}");
    }
    assert!(matches!(regions.share(1000, 4096, &theirs), Err(RegionError::TooMany)));
    assert!(matches!(regions.unshare(1000), Err(RegionError::Unknown(1000))));
}

#[test]
fn private_memory_and_too_much_of_it_is_not_lent() {
    let (ours, _theirs) = channel();
    let mut lender = Lender::default();
    let private = Arc::new(Mapping::anonymous(4096).unwrap());
    assert!(matches!(lender.lend(&private, &ours), Err(RegionError::Kind(_))));
    let all: Vec<_> = (0..MAX_REGIONS).map(|_| Arc::new(Mapping::memfd("lent", 4096).unwrap())).collect();
    for memory in &all {
        lender.lend(memory, &ours).unwrap();
    }
    let more = Arc::new(Mapping::memfd("lent", 4096).unwrap());
    assert!(matches!(lender.lend(&more, &ours), Err(RegionError::TooMany)));
    assert!(lender.lend(&all[0], &ours).is_ok());
}
