//! CRC32C (Castagnoli), by the CPU's instructions where it has them.

use crc_fast::{CrcAlgorithm, Digest};

use crate::bytes::mmap::prefetch;

/// The length from which it pays to ask for memory ahead.
const PREFETCH_FROM: usize = 16 << 10;
/// Bytes that are asked for at once, and how far ahead: of blocks that are in no cache, 15 GB/s instead of 13.
const PREFETCHED: usize = 2 << 10;
const AHEAD: usize = 8 << 10;

/// The checksum of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    // A 32-bit checksum in the crate's common type.
    if bytes.len() < PREFETCH_FROM {
        return crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32;
    }
    let mut crc = Crc32c::new();
    for (at, piece) in bytes.chunks(PREFETCHED).enumerate() {
        let ahead = at * PREFETCHED + AHEAD;
        prefetch(bytes.get(ahead..(ahead + PREFETCHED).min(bytes.len())).unwrap_or_default());
        crc.update(piece);
    }
    crc.finish()
}

/// The checksum of bytes that come in pieces.
#[derive(Clone, Debug)]
pub struct Crc32c(Digest);

impl Crc32c {
    /// The checksum of no bytes yet.
    pub fn new() -> Crc32c {
        Crc32c(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// The next piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all pieces so far.
    pub fn finish(&self) -> u32 {
        self.0.finalize() as u32
    }
}

impl Default for Crc32c {
    fn default() -> Crc32c {
        Crc32c::new()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn it_is_the_castagnoli_polynomial() {
        // The check value of the catalogue of CRC algorithms, and RFC 3720 B.4.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(b""), 0);
    }

    proptest! {
        #[test]
        fn pieces_are_the_whole(pieces in proptest::collection::vec(any::<Vec<u8>>(), 0..5)) {
            let mut crc = Crc32c::new();
            for piece in &pieces {
                crc.update(piece);
            }
            prop_assert_eq!(crc.finish(), crc32c(&pieces.concat()));
        }
    }
}
