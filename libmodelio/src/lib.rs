//! Model layout, contribution tracking and transports of gradfs.

pub mod admin;
pub mod block_map;
pub mod client;
pub mod contributor;
pub mod dtype;
pub mod ids;
pub mod layout;
pub mod link;
pub mod mmap;
pub mod net;
pub mod npy;
pub mod partly;
pub mod payload;
pub mod published;
pub mod publisher;
pub mod ranges;
pub mod rdma;
pub mod registry;
pub mod safetensors_file;
pub mod shm;
pub mod tracker;
pub mod transport;
pub mod wire;
