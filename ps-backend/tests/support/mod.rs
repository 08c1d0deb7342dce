//! What several tests of devices share.
#![allow(dead_code)] // no test uses all of it

pub mod fp8;
pub mod homes;
pub mod software_device;
