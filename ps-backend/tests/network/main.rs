//! Shards and clients over real connections, in one process.

mod ahead;
mod checksum;
mod coded;
mod declared;
mod device;
mod following;
mod liars;
mod living;
mod moved;
mod moving;
mod parking;
mod parts;
mod patched;
mod payload;
mod pinned;
mod publishing;
mod pushed_changes;
mod raw;
mod rdma;
mod relays;
mod scripted_shard;
mod shm;
mod small;
mod steps;
#[cfg(feature = "rdma")]
mod strangers;
mod together;
mod unchanged;
mod world;
