//! Memory, and what is computed over plain bytes.

pub mod crc32c;
pub mod mmap;
