//! Aggregation shards of gradfs: block store, reducers, versions, membership.

#![warn(unreachable_pub)]

pub mod coordinator;
pub mod core;
pub mod create;
pub mod device;
pub mod losses;
pub mod memory;
pub mod moving;
pub mod offers;
pub mod partition;
pub mod reducers;
pub mod relays;
pub mod server;
pub mod snapshot;
pub mod state_copies;
pub mod stores;
