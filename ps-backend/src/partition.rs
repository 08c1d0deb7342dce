//! One shard's partition of a model: its memory, and the decisions about each block that comes.

pub mod brought;
pub mod core;
pub mod executor;
pub mod fetches;
pub mod store;
pub mod unknown_plan;
