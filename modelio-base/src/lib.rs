//! What is below the transports of gradfs: its words, memory and computations over bytes, byte streams and their
//! threads.
//!
//! libmodelio re-exports all of it, under the same names. Other programs use it from there.

#![warn(unreachable_pub)]

pub mod bytes;
pub mod transport;
pub mod vocabulary;
