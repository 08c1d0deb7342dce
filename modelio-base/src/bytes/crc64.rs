//! CRC-64/NVME, for what is longer than blocks.

use crc_fast::{CrcAlgorithm, Digest};

/// The checksum of bytes that come in pieces.
#[derive(Clone, Debug)]
pub struct Crc64(Digest);

impl Crc64 {
    /// The checksum of no bytes yet.
    pub fn new() -> Crc64 {
        Crc64(Digest::new(CrcAlgorithm::Crc64Nvme))
    }

    /// The next piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all pieces so far.
    pub fn finish(&self) -> u64 {
        self.0.finalize()
    }
}

impl Default for Crc64 {
    fn default() -> Crc64 {
        Crc64::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_nvme_polynomial() {
        // The check value of the catalogue of CRC algorithms.
        let mut crc = Crc64::new();
        crc.update(b"12345");
        crc.update(b"6789");
        assert_eq!(crc.finish(), 0xae8b_1486_0a79_9888);
    }
}
