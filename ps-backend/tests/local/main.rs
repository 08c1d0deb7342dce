//! The shard in this process under real contributors, real memory and real threads, against a scalar
//! reference.

mod common;
mod concurrency;
mod device;
mod failures;
mod reducers;
mod together;
mod versions;
