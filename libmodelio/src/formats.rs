//! The file formats in which models are read and shown.

pub mod changes;
pub mod layout;
pub mod named;
pub mod npy;
pub mod patch;
pub mod safetensors;
