//! What several tests of `ps-backend` share. It is a crate, so that its kernels are compiled once.

pub mod fp8;
pub mod homes;
pub mod software_device;
