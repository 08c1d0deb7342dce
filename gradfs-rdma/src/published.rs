//! A directory of published versions in plain memory. Clients read versions with it, without the shard's CPU.
//!
//! A client copies the directory, finds a version's entry in it ([`find`]), copies blocks from the version's buffer,
//! and then copies the entry once more. If the entry still says the same ([`Seen::still_there`]), the bytes are the
//! version's. If not, the buffer may have been used again meanwhile, and the client discards the bytes. The shard takes
//! no part in this and knows of no reader, so nothing is pinned.
//!
//! # Why that is enough
//! An entry has a sequence number that rises by one with each change. It is even while the entry is valid, and odd
//! while the entry is empty or being changed. So no two versions ever have the same slot and sequence number, and an
//! entry that is gone never comes back.
//!
//! - The shard takes the entry away *before* anybody stores into the version's buffer ([`Directory::retire`]): the
//!   number becomes odd, and a full fence follows. A reader that finds any byte of a later store in the buffer, and
//!   then reads the number, finds it changed. A release fence is not enough. On x86 it is no instruction, because
//!   stores are seen in their order anyway, but that does not hold for the stores past the caches that make versions.
//! - The reader reads the entry *after* it has the bytes: it posts the second READ of the entry when the READs of the
//!   bytes are complete. READs that are under way together may be carried out in any order, even on one connection.
//! - The last store of all is one with release, which makes the number even. A reader that finds it even and goes on to
//!   the buffer finds everything that was stored there before [`Directory::publish`].
//!
//! A NIC copies word by word at best, so a copy of the directory may hold anything, for example half an entry and
//! half the next one. An entry has a checksum over all fields, numbers included, so such a mixture is not taken for
//! an entry. If it is by chance, the second read of the entry finds something else.
//!
//! This module holds `unsafe`: the directory is read while it is written. In this process, all access to it is
//! atomic.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use modelio_base::bytes::crc32c::crc32c;
use modelio_base::bytes::mmap::Mapping;
use modelio_base::vocabulary::ids::Version;

/// The number of entries. There are never more versions in memory, unless readers hold very many.
pub const ENTRIES: usize = 64;
/// Bytes of an entry.
pub const ENTRY: usize = 64;
/// Bytes of a directory.
pub const DIRECTORY: usize = ENTRIES * ENTRY;

const WORDS: usize = ENTRY / 8;
/// The bytes of an entry that its checksum covers.
const CHECKED: usize = ENTRY - 4;

/// An entry in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Raw {
    sequence: U64,
    version: U64,
    address: U64,
    bytes: U64,
    key: U32,
    zero: [u8; 24],
    crc: U32,
}

const _: () = assert!(size_of::<Raw>() == ENTRY);

impl Raw {
    fn own_crc(&self) -> u32 {
        crc32c(&self.as_bytes()[..CHECKED])
    }
}

/// The shard's own copy of an entry. The shard never reads memory back that others can reach.
#[derive(Clone, Copy, Debug)]
struct Slot {
    sequence: u64,
    version: Option<Version>,
}

/// The shard's side of the directory. It has the newest 64 published versions. Dropping it retires them all.
#[derive(Debug)]
pub struct Directory {
    memory: Arc<Mapping>,
    slots: [Slot; ENTRIES],
}

/// The words of memory that is accessed by words only.
fn words(memory: &Mapping) -> &[AtomicU64] {
    // SAFETY: the range is within the mapping, which begins on a page and lives as long as the slice. Only this
    // function accesses the memory in this process, and readers outside do not write it.
    unsafe { std::slice::from_raw_parts(memory.start().as_ptr().cast(), memory.len() / 8) }
}

impl Directory {
    /// An empty directory.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new() -> io::Result<Directory> {
        let memory = Mapping::memfd("gradfs-published", DIRECTORY)?;
        memory.prefault()?;
        memory.seal()?;
        let directory =
            Directory { memory: Arc::new(memory), slots: [Slot { sequence: 1, version: None }; ENTRIES] };
        for slot in 0..ENTRIES {
            directory.words(slot)[0].store(1u64.to_le(), Ordering::Relaxed);
        }
        Ok(directory)
    }

    /// The memory that others may read, [`DIRECTORY`] bytes. Only the directory writes it.
    pub fn memory(&self) -> &Arc<Mapping> {
        &self.memory
    }

    /// Adds `version`, whose `bytes` bytes lie at `address`, can be read under `key`, and stay there until it is
    /// retired. If there are [`ENTRIES`] others, the oldest one leaves the directory, though its buffer stays
    /// unchanged.
    pub fn publish(&mut self, version: Version, address: u64, key: u32, bytes: u64) {
        self.retire(version);
        let oldest = || (0..ENTRIES).min_by_key(|&slot| self.slots[slot].version);
        let free = self.slots.iter().position(|slot| slot.version.is_none()).or_else(oldest);
        let Some(slot) = free.filter(|&slot| self.slots[slot].version < Some(version)) else { return };
        if self.slots[slot].version.is_some() {
            self.clear(slot);
        }
        let sequence = self.slots[slot].sequence + 1;
        self.slots[slot] = Slot { sequence, version: Some(version) };
        let mut entry = Raw {
            sequence: U64::new(sequence),
            version: U64::new(version.0),
            address: U64::new(address),
            bytes: U64::new(bytes),
            key: U32::new(key),
            ..Raw::new_zeroed()
        };
        entry.crc = U32::new(entry.own_crc());
        let words = self.words(slot);
        let (values, _) = entry.as_bytes().as_chunks::<8>();
        for (word, value) in words.iter().zip(values).skip(1) {
            word.store(u64::from_ne_bytes(*value), Ordering::Relaxed);
        }
        // A reader that sees this store sees the entry, and the version's buffer.
        words[0].store(sequence.to_le(), Ordering::Release);
    }

    /// Adds `version`, which is there until it is retired and cannot be read without the shard's CPU. Clients must
    /// ask for its blocks.
    pub fn publish_unreadable(&mut self, version: Version) {
        self.publish(version, 0, 0, 0);
    }

    /// Retires `version`, whose buffer is about to be used again. When this returns, a reader that finds anything new
    /// in the buffer finds the entry gone. It does nothing if the version is not in the directory.
    pub fn retire(&mut self, version: Version) {
        if let Some(slot) = self.slots.iter().position(|slot| slot.version == Some(version)) {
            self.clear(slot);
        }
    }

    fn clear(&mut self, slot: usize) {
        let sequence = self.slots[slot].sequence + 1;
        self.slots[slot] = Slot { sequence, version: None };
        self.words(slot)[0].store(sequence.to_le(), Ordering::Relaxed);
        // The fence comes before any later store of this thread, or of one that follows it: into the buffer, also
        // past the caches, and into the rest of the entry.
        fence(Ordering::SeqCst);
    }

    fn words(&self, slot: usize) -> &[AtomicU64] {
        &words(&self.memory)[slot * WORDS..(slot + 1) * WORDS]
    }
}

impl Drop for Directory {
    /// The memory may live on with those who have registered it.
    fn drop(&mut self) {
        for slot in 0..ENTRIES {
            if self.slots[slot].version.is_some() {
                self.clear(slot);
            }
        }
    }
}

/// An entry that a reader has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Seen {
    /// The index of the entry.
    pub slot: usize,
    /// The entry's sequence number.
    pub sequence: u64,
    /// The version of the entry.
    pub version: Version,
    /// The start of the version in the shard's memory.
    pub address: u64,
    /// The key to read it under.
    pub key: u32,
    /// The length of the version.
    pub bytes: u64,
}

/// The version is not in the directory or is being added, or the copy is torn at its entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("version {wanted} is not published, or no longer; the newest is {}", Said(*newest))]
pub struct Absent {
    /// The wanted version.
    pub wanted: Version,
    /// The newest version in the directory, if there is any.
    pub newest: Option<Version>,
}

struct Said(Option<Version>);

impl std::fmt::Display for Said {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(version) => version.fmt(f),
            None => f.write_str("none"),
        }
    }
}

/// Looks for `version` in a copy of a directory, which may be torn, too short or anything else.
///
/// # Errors
/// [`Absent`].
pub fn find(directory: &[u8], version: Version) -> Result<Seen, Absent> {
    let (entries, _) = directory.as_chunks::<ENTRY>();
    let mut newest = None;
    for seen in entries.iter().take(ENTRIES).enumerate().filter_map(|(slot, entry)| Seen::read(slot, entry)) {
        if seen.version == version {
            return Ok(seen);
        }
        newest = newest.max(Some(seen.version));
    }
    Err(Absent { wanted: version, newest })
}

impl Seen {
    fn read(slot: usize, entry: &[u8; ENTRY]) -> Option<Seen> {
        let raw = Raw::read_from_bytes(entry).ok()?;
        let stands = raw.sequence.get().is_multiple_of(2) && raw.zero == [0; 24];
        (stands && raw.crc.get() == raw.own_crc()).then(|| Seen {
            slot,
            sequence: raw.sequence.get(),
            version: Version(raw.version.get()),
            address: raw.address.get(),
            key: raw.key.get(),
            bytes: raw.bytes.get(),
        })
    }

    /// Whether the version can be read where it lies. If not, the client must ask for its blocks.
    pub fn is_readable(&self) -> bool {
        self.bytes > 0
    }

    /// The offset of its entry in the directory, in bytes.
    pub fn offset(&self) -> usize {
        self.slot * ENTRY
    }

    /// The address of `len` bytes at `offset` of the version, if it has them.
    pub fn place(&self, offset: u64, len: u64) -> Option<u64> {
        let end = offset.checked_add(len).filter(|&end| end <= self.bytes)?;
        self.address.checked_add(end)?;
        Some(self.address + offset)
    }

    /// Whether `entry`, a copy of the [`ENTRY`] bytes at [`Self::offset`], is the entry that was found. If it was
    /// copied after the version's bytes, the bytes are the version's.
    pub fn still_there(&self, entry: &[u8]) -> bool {
        let entry = <&[u8; ENTRY]>::try_from(entry).ok();
        entry.and_then(|entry| Seen::read(self.slot, entry)) == Some(*self)
    }
}

#[cfg(test)]
mod tests;
