//! Model layout, contribution tracking and transports of gradfs.

pub mod block_map;
pub mod contributor;
pub mod dtype;
pub mod ids;
pub mod layout;
pub mod mmap;
pub mod net;
pub mod npy;
pub mod publisher;
pub mod ranges;
pub mod safetensors_file;
pub mod tracker;
pub mod transport;
pub mod wire;
