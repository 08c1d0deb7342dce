//! Whether the payload of blocks is sent with a checksum.

use strum::{EnumString, IntoStaticStr, VariantNames};

use crate::bytes::crc32c::crc32c;

/// Whether an end sends blocks with a checksum. It is the sender's choice alone: a receiver checks what has a checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumString, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "lowercase")]
pub enum Checksum {
    /// With one.
    #[default]
    On,
    /// Without: the network checks what it carries, or is trusted.
    Off,
}

impl Checksum {
    /// The checksum that these bytes are sent with.
    pub fn of(self, bytes: &[u8]) -> Option<u32> {
        self.or_none(|| crc32c(bytes))
    }

    /// The checksum that bytes are sent with, from whoever knows it.
    pub fn or_none(self, known: impl FnOnce() -> u32) -> Option<u32> {
        match self {
            Checksum::On => Some(known()),
            Checksum::Off => None,
        }
    }

    /// The word for it.
    pub fn name(self) -> &'static str {
        self.into()
    }
}
