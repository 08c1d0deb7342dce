//! What both ends say of registered memory.

/// The place of a peer's memory, and the key to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteMemory {
    /// The address for the peer's device.
    pub address: u64,
    /// The peer's key.
    pub key: u32,
}

impl RemoteMemory {
    /// The place `offset` bytes further on. The peer's device refuses addresses that do not exist.
    pub fn at(self, offset: u64) -> RemoteMemory {
        RemoteMemory { address: self.address.wrapping_add(offset), ..self }
    }
}

/// Registrations that are useful, but not necessary.
pub trait Spare: Send + Sync {
    /// Gives the registrations up. Each ends when nothing uses it any more.
    fn give_up(&self);
}
