//! The tree: names, inodes, attributes and what the files are, apart from how the kernel asks for them and from who
//! opens them.
//!
//! [`crate::session`] does the work behind the files. Nothing here blocks for long: a call that has to wait
//! takes a callback.

pub mod attr;
pub mod filesystem;
pub mod model_tree;
pub mod names;
pub mod node;
pub mod open;
pub mod open_file;
pub mod text;
pub mod text_file;

mod draft;
mod looked_up;
mod paths;
mod tensors_name;
