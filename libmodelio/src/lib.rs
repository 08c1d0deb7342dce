//! Model layout, contribution tracking and transports of gradfs.

pub mod ids;
pub mod layout;
