//! Aggregation shards of gradfs: block store, reducers, versions, membership.

pub mod controls;
pub mod core;
pub mod embedded;
pub mod job;
pub mod kernels;
pub mod reducer;
pub mod region_store;
