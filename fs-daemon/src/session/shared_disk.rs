//! The disk of a model, which all its users share.

use std::sync::Arc;

use libmodelio::disk::Disk;

/// The disk of a model. Its memory stays for the next user, who finds its pages taken.
#[derive(Default)]
pub struct SharedDisk {
    /// The disk, once somebody has used it.
    pub disk: Option<Arc<Disk>>,
    /// The number of its users.
    pub users: usize,
}
