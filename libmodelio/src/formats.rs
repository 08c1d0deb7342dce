//! The file formats of others in which models are read and shown.

pub mod layout;
pub mod named;
pub mod npy;
pub mod safetensors;
