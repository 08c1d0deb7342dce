//! Model layout, contribution tracking and transports of gradfs.

pub mod admin;
pub mod bytes;
pub mod client;
pub mod contributor;
pub mod formats;
pub mod link;
pub mod net;
pub mod payload;
pub mod published;
pub mod publisher;
pub mod rdma;
pub mod registry;
pub mod shm;
pub mod tracker;
pub mod transport;
pub mod vocabulary;
pub mod wire;
