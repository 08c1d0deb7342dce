//! Aggregation shards of gradfs: block store, reducers, versions, membership.

pub mod kernels;
