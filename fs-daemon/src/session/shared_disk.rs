//! The disk of a model, which all its users share.

use std::sync::Arc;

use libmodelio::disk::Disk;

/// The disk of a model, as long as somebody uses it or it has bytes that are in no version.
#[derive(Default)]
pub struct SharedDisk {
    /// The disk, if there is one.
    pub disk: Option<Arc<Disk>>,
    /// The number of its users.
    pub users: usize,
}

impl SharedDisk {
    /// Lets go of a disk that nobody uses. Bytes that are in no version stay for the next user.
    pub fn forget_unused(&mut self) {
        if self.users == 0 {
            self.disk.take_if(|disk| !disk.is_changed());
        }
    }
}
