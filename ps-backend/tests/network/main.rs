//! Shards and clients over real connections, in one process.

mod memory;
mod moving;
mod steps;
mod world;
