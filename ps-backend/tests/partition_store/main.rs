//! The memory of a partition of a model, against a plain scalar model.

mod clipping;
mod common;
mod device;
mod device_kernels;
mod device_rules;
mod doubles;
mod driver;
mod following;
mod groups;
mod in_place;
mod layerwise;
mod lending;
mod moving;
mod partly;
mod random;
mod rules;
mod threads;
mod watching;
