//! Shards and clients over real connections, in one process.

mod memory;
mod steps;
mod world;
