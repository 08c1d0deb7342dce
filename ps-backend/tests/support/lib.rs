//! Devices, number formats and formulas that tests of `ps-backend` share. They are a crate, whose kernels are compiled
//! once.

pub mod formulas;
pub mod fp8;
pub mod homes;
pub mod numbers;
pub mod one_by_one;
pub mod software_device;
