//! One shard's partition of a model: its memory, and what becomes of each block that comes.

pub mod core;
pub mod fetches;
pub mod store;
pub mod unheard;
