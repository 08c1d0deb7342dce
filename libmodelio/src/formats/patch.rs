//! The beginning of a patch: a file that brings a copy of `weights` from one version to another.
//!
//! Behind it are the runs of bytes that are replaced ([`Runs`](crate::bytes::changes::Runs)), and then the bytes, one run
//! after the other. Numbers are little-endian. The head ends with its own CRC32C.

use crate::bytes::crc32c::crc32c;
use crate::vocabulary::ids::Version;

/// Its length in bytes.
pub const HEAD: usize = 72;
/// The part of it that its checksum covers.
const COVERED: usize = 64;

const MAGIC: [u8; 8] = *b"gradfs\0P";
const FORMAT: u64 = 1;

/// What the beginning says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchHead {
    /// The bytes of the model.
    pub size: u64,
    /// The version that the patch begins with.
    pub base: Version,
    /// The version that it makes.
    pub version: Version,
    /// The bytes of the runs' encoded form.
    pub runs: u64,
    /// The bytes that are replaced.
    pub values: u64,
    /// The CRC-64/NVME of the model afterwards.
    pub checksum: u64,
}

/// Why a file is no patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatchHeadError {
    /// It begins with something else.
    #[error("it is no patch of gradfs")]
    Magic,
    /// Another release has made it.
    #[error("it is a patch of format {0}, and this release reads format {FORMAT}")]
    Format(u64),
    /// It is not what was written.
    #[error("its head is damaged")]
    Damaged,
    /// The lengths do not make the file's.
    #[error("it has {len} bytes in place of {expected}: it is cut off or damaged")]
    Length {
        /// The file's.
        len: u64,
        /// As the head says.
        expected: u128,
    },
}

impl PatchHead {
    /// The bytes of the head.
    pub fn encode(&self) -> [u8; HEAD] {
        let PatchHead { size, base, version, runs, values, checksum } = *self;
        let mut bytes = [0; HEAD];
        bytes[..8].copy_from_slice(&MAGIC);
        let numbers = [FORMAT, size, base.0, version.0, runs, values, checksum];
        for (place, number) in bytes[8..].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        let checksum = u64::from(crc32c(&bytes[..COVERED]));
        bytes[COVERED..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// The head of a file of `len` bytes.
    ///
    /// # Errors
    /// [`PatchHeadError`].
    pub fn decode(bytes: &[u8; HEAD], len: u64) -> Result<PatchHead, PatchHeadError> {
        let number =
            |at: usize| bytes[8 * at..].first_chunk().map_or(0, |number| u64::from_le_bytes(*number));
        if bytes[..8] != MAGIC {
            return Err(PatchHeadError::Magic);
        }
        if number(1) != FORMAT {
            return Err(PatchHeadError::Format(number(1)));
        }
        if number(8) != u64::from(crc32c(&bytes[..COVERED])) {
            return Err(PatchHeadError::Damaged);
        }
        let head = PatchHead {
            size: number(2),
            base: Version(number(3)),
            version: Version(number(4)),
            runs: number(5),
            values: number(6),
            checksum: number(7),
        };
        let expected = HEAD as u128 + u128::from(head.runs) + u128::from(head.values);
        if expected != u128::from(len) {
            return Err(PatchHeadError::Length { len, expected });
        }
        Ok(head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_that_of_its_file_or_none() {
        let (base, version) = (Version(3), Version(9));
        let head = PatchHead { size: 1 << 40, base, version, runs: 10, values: 20, checksum: u64::MAX - 1 };
        let bytes = head.encode();
        assert_eq!(PatchHead::decode(&bytes, 102), Ok(head));
        assert_eq!(PatchHead::decode(&bytes, 101), Err(PatchHeadError::Length { len: 101, expected: 102 }));
        let with = |at: usize| {
            let mut other = bytes;
            other[at] ^= 0x80;
            PatchHead::decode(&other, 102)
        };
        assert_eq!(with(0), Err(PatchHeadError::Magic));
        assert_eq!(with(8), Err(PatchHeadError::Format(0x81)));
        for at in 16..HEAD {
            assert_eq!(with(at), Err(PatchHeadError::Damaged), "byte {at}");
        }
    }
}
