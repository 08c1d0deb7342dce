//! Shards and clients over real connections, in one process.

mod living;
mod memory;
mod moved;
mod moving;
mod resting;
mod steps;
mod world;
