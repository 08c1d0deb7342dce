//! What the rivals of gradfs have in common: the model's memory, the adds, the rounds that a driver asks for.
//!
//! A server process holds the weights, learner processes push gradients and pull weights. All are made for speed
//! alone: nothing is checked on the way, nothing survives an error, nobody may come late.

pub mod add;
pub mod memory;
pub mod pattern;
pub mod place;
pub mod rounds;
pub mod sockets;
pub mod usage;
