//! Stores outside gradfs, for callers that block: each call has a deadline, and says in one line why it failed.
//!
//! Their clients are asynchronous. One runtime drives them all ([`runtime`]); nothing else in gradfs needs one.

#![warn(unreachable_pub)]

pub mod etcd;
pub mod runtime;
