//! Shards and clients over real connections, in one process.

mod steps;
mod world;
