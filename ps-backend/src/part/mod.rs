//! A shard's part of a model.

pub mod store;
