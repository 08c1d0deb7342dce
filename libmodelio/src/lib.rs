//! Model layout, contribution tracking and transports of gradfs.

pub mod admin;
pub mod bytes;
pub mod client;
pub mod contributor;
pub mod disk;
pub mod formats;
pub mod mapped;
pub mod nbd;
pub mod observe;
pub mod publisher;
pub mod reader;
pub mod registry;
pub mod timer;
pub mod tracker;
pub mod transport;
pub mod vocabulary;
pub mod wire;
