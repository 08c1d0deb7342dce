//! Shards and clients over real connections, in one process.

mod memory;
mod moved;
mod moving;
mod steps;
mod world;
