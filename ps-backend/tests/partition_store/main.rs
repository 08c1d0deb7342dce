//! The memory of a partition of a model, against a plain scalar model.

mod clipping;
#[path = "../local/common.rs"]
#[allow(dead_code)]
mod common;
mod doubles;
mod driver;
mod in_place;
mod moving;
mod partly;
mod random;
mod rules;
mod threads;
mod watching;
