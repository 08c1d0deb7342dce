//! Memory, and computations over plain bytes.

pub mod available;
pub mod block;
pub mod changes;
pub mod crc32c;
pub mod crc64;
pub mod kernels;
pub mod loan;
pub mod mmap;
pub mod pages;
pub mod region;
pub mod surplus;
