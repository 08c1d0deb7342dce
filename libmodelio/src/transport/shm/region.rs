//! Regions: memory that one end of a connection shares with the other, under a number.
//!
//! A [`Lender`] has the regions that this end has shared, and [`Regions`] those of the peer. A region is a memfd. It
//! is mapped read-only, and only if it is sealed against shrinking: touching memory that a peer has taken away would
//! end this process.
//!
//! This module holds `unsafe`: see [`BorrowedRange::bytes`].

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Weak};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::mman::ProtFlags;
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};

use super::descriptors::{DescriptorError, Descriptors};
use crate::bytes::mmap::Mapping;

/// The most regions that one end of a connection may share at once.
pub const MAX_REGIONS: usize = 64;

/// Why a peer's memory is refused.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// Its descriptor did not come.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// The descriptor is no memfd: another kind of file could end or block.
    #[error("region {0} is no memfd of ordinary pages")]
    Kind(u32),
    /// The peer could make it shorter while it is read.
    #[error("region {0} is not sealed against shrinking")]
    NotSealed(u32),
    /// The region does not have the announced length.
    #[error("region {number} has {got} bytes, not {expected}")]
    Length {
        /// The number of the region.
        number: u32,
        /// The announced length.
        expected: u64,
        /// The actual length.
        got: u64,
    },
    /// The peer, or another process that has the region, could write it.
    #[error("region {0} is not sealed against writing")]
    Writable(u32),
    /// The region is longer than any useful one.
    #[error("region {number} has {got} bytes, more than {most}")]
    TooLong {
        /// The number of the region.
        number: u32,
        /// The limit.
        most: u64,
        /// The actual length.
        got: u64,
    },
    /// The peer has shared the most regions that it may.
    #[error("more than {MAX_REGIONS} regions on one connection")]
    TooMany,
    /// The number is taken.
    #[error("region {0} is there already")]
    Taken(u32),
    /// There is no region of that number.
    #[error("there is no region {0}")]
    Unknown(u32),
    /// The bytes are outside of the region.
    #[error("{len} bytes at {offset} leave region {number}")]
    OutOfRange {
        /// The number of the region.
        number: u32,
        /// The offset.
        offset: u64,
        /// How many.
        len: usize,
    },
    /// A system call failed.
    #[error("region {number} cannot be mapped: {error}")]
    System {
        /// The number of the region.
        number: u32,
        /// Why.
        error: io::Error,
    },
}

/// Memory of a peer's, mapped to be read.
#[derive(Debug)]
pub struct Borrowed(Arc<Mapping>);

impl Borrowed {
    /// Maps a memfd of `bytes` bytes.
    ///
    /// # Errors
    /// [`RegionError`].
    pub fn map(number: u32, fd: OwnedFd, bytes: u64) -> Result<Borrowed, RegionError> {
        map(number, fd, bytes, ProtFlags::PROT_READ).map(|mapped| Borrowed(Arc::new(mapped)))
    }
}

/// Maps a descriptor that is a memfd of `bytes` bytes that stay, and refuses others.
pub(super) fn map(
    number: u32,
    fd: OwnedFd,
    bytes: u64,
    protection: ProtFlags,
) -> Result<Mapping, RegionError> {
    check(number, &fd, bytes)?;
    let len = usize::try_from(bytes).map_err(|_| RegionError::Kind(number))?;
    // SAFETY: `check` has found a memfd of this length that is sealed against changes of it.
    let mapped = unsafe { Mapping::of(fd, len, protection) };
    mapped.map_err(|error| RegionError::System { number, error })
}

/// Refuses a descriptor unless it is a memfd of `bytes` bytes that stay.
fn check(number: u32, fd: &OwnedFd, bytes: u64) -> Result<(), RegionError> {
    let system = |errno: nix::errno::Errno| RegionError::System { number, error: errno.into() };
    // Files of other kinds have no seals. A memfd on huge pages may have none left when they are touched.
    let seals = fcntl(fd, FcntlArg::F_GET_SEALS).map_err(|_| RegionError::Kind(number))?;
    if fstatfs(fd).map_err(system)?.filesystem_type() != TMPFS_MAGIC {
        return Err(RegionError::Kind(number));
    }
    if !SealFlag::from_bits_retain(seals).contains(SealFlag::F_SEAL_SHRINK) {
        return Err(RegionError::NotSealed(number));
    }
    // The length is read after the seal, so it cannot shrink any more.
    let got = nix::sys::stat::fstat(fd).map_err(system)?.st_size;
    if got <= 0 || got.unsigned_abs() != bytes {
        let got = got.max(0).unsigned_abs();
        return Err(RegionError::Length { number, expected: bytes, got });
    }
    Ok(())
}

/// A range of a peer's region.
#[derive(Clone, Debug)]
pub struct BorrowedRange {
    region: Arc<Borrowed>,
    range: Range<usize>,
}

impl BorrowedRange {
    /// The address and length.
    pub fn raw(&self) -> (*const u8, usize) {
        // SAFETY: `Regions::piece` has checked that it is within the mapping.
        (unsafe { self.region.0.start().as_ptr().add(self.range.start) }, self.range.len())
    }

    /// The bytes.
    ///
    /// # Safety
    /// The peer has promised not to change them while they are read, and may lie. So the reader only makes numbers of
    /// them: no lengths, no positions, and no branches that memory depends on. A lie then only leads to other
    /// numbers, as with memory that a program has mapped and goes on writing.
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: in bounds; the rest is the caller's promise.
        unsafe { self.region.0.bytes(self.range.clone()) }
    }
}

/// The regions that the peer has shared.
#[derive(Debug)]
pub struct Regions {
    known: HashMap<u32, Arc<Borrowed>>,
    most_bytes: u64,
}

impl Regions {
    /// No regions yet; each has `most_bytes` at most.
    pub fn new(most_bytes: u64) -> Regions {
        Regions { known: HashMap::new(), most_bytes }
    }

    /// The peer shares a region, whose descriptor has come.
    ///
    /// # Errors
    /// [`RegionError`].
    pub fn share(&mut self, number: u32, bytes: u64, from: &Descriptors) -> Result<(), RegionError> {
        if self.known.len() >= MAX_REGIONS {
            return Err(RegionError::TooMany);
        }
        if self.has(number) {
            return Err(RegionError::Taken(number));
        }
        if bytes > self.most_bytes {
            return Err(RegionError::TooLong { number, most: self.most_bytes, got: bytes });
        }
        let region = Borrowed::map(number, from.receive(number)?, bytes)?;
        self.known.insert(number, Arc::new(region));
        Ok(())
    }

    /// The peer stops sharing it. It is unmapped when nobody reads it.
    ///
    /// # Errors
    /// [`RegionError::Unknown`].
    pub fn unshare(&mut self, number: u32) -> Result<(), RegionError> {
        self.known.remove(&number).map(drop).ok_or(RegionError::Unknown(number))
    }

    /// Whether the peer shares a region of this number.
    pub fn has(&self, number: u32) -> bool {
        self.known.contains_key(&number)
    }

    /// The whole of a region, which has `len` bytes and is sealed against writing. Memory that programs get to see
    /// must be.
    ///
    /// # Errors
    /// [`RegionError::Unknown`], [`RegionError::Length`], [`RegionError::Writable`].
    pub fn whole(&self, number: u32, len: usize) -> Result<Arc<Mapping>, RegionError> {
        let Borrowed(memory) = &**self.known.get(&number).ok_or(RegionError::Unknown(number))?;
        if memory.len() != len {
            let (expected, got) = (len as u64, memory.len() as u64);
            return Err(RegionError::Length { number, expected, got });
        }
        let fd = memory.fd().ok_or(RegionError::Kind(number))?;
        let seals = fcntl(fd, FcntlArg::F_GET_SEALS).map_err(|_| RegionError::Kind(number))?;
        let sealed = SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_FUTURE_WRITE;
        match SealFlag::from_bits_retain(seals).intersects(sealed) {
            true => Ok(Arc::clone(memory)),
            false => Err(RegionError::Writable(number)),
        }
    }

    /// `len` bytes at `offset` of a region.
    ///
    /// # Errors
    /// [`RegionError::Unknown`], [`RegionError::OutOfRange`].
    pub fn piece(&self, number: u32, offset: u64, len: usize) -> Result<BorrowedRange, RegionError> {
        let region = self.known.get(&number).ok_or(RegionError::Unknown(number))?;
        let start = usize::try_from(offset).ok();
        let range = start.and_then(|start| Some(start..start.checked_add(len)?));
        match range.filter(|range| range.end <= region.0.len()) {
            Some(range) => Ok(BorrowedRange { region: Arc::clone(region), range }),
            None => Err(RegionError::OutOfRange { number, offset, len }),
        }
    }
}

/// The regions that this end has shared with the peer, by their memory.
#[derive(Debug, Default)]
pub struct Lender {
    lent: HashMap<usize, (u32, Weak<Mapping>)>,
    last: u32,
}

impl Lender {
    /// The number under which the peer knows `memory`. If the region was sent to the peer just now, this also returns
    /// its length, and the caller must announce the region.
    ///
    /// # Errors
    /// When it cannot be shared: it is not in a memfd, there are too many regions, or the descriptor cannot be sent.
    pub fn lend(
        &mut self,
        memory: &Arc<Mapping>,
        to: &Descriptors,
    ) -> Result<(u32, Option<u64>), RegionError> {
        let key = Arc::as_ptr(memory) as usize;
        // The entry keeps the memory's address from being used again.
        if let Some((number, _)) = self.lent.get(&key) {
            return Ok((*number, None));
        }
        if self.lent.len() >= MAX_REGIONS {
            return Err(RegionError::TooMany);
        }
        let number = self.last.wrapping_add(1);
        let system = |error| RegionError::System { number, error };
        let fd = memory.fd().ok_or(RegionError::Kind(number))?;
        memory.fix_size().map_err(system)?;
        // The new descriptor can neither be written through nor sealed further.
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let read_only = File::open(path).map_err(system)?;
        to.send(number, read_only.as_fd())?;
        self.last = number;
        self.lent.insert(key, (number, Arc::downgrade(memory)));
        Ok((number, Some(memory.len() as u64)))
    }

    /// The numbers of regions whose memory has gone. The caller must tell the peer.
    pub fn gone(&mut self) -> Vec<u32> {
        // One pass: another thread may let go of the last reference at any time.
        let gone = self.lent.extract_if(|_, (_, memory)| memory.strong_count() == 0);
        gone.map(|(_, (number, _))| number).collect()
    }
}

#[cfg(test)]
mod tests;
