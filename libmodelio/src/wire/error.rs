//! The faults of a frame.

use super::Refusal;
use crate::vocabulary::block_ranges::RangesError;

/// The fault of a frame, received or to be sent. The connection on which such bytes came is closed; nothing
/// else changes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Something else speaks on this port.
    #[error("not gradfs: a frame begins with {got:#06x}, expected {expected:#06x}")]
    Magic {
        /// The first two bytes of frames.
        expected: u16,
        /// The received bytes.
        got: u16,
    },
    /// Damaged on the way, or not a frame.
    #[error("checksum of the {what}: expected {expected:#010x}, got {got:#010x}")]
    Checksum {
        /// Header, body or payload.
        what: &'static str,
        /// The checksum in the frame.
        expected: u32,
        /// The checksum of the received bytes.
        got: u32,
    },
    /// Flags that this version does not have, or that mean nothing in such a frame.
    #[error("flags {got:#06x}, allowed are {allowed:#06x}")]
    Flags {
        /// The flags that the frame may have.
        allowed: u16,
        /// The received flags.
        got: u16,
    },
    /// A length beyond its limit, in bytes.
    #[error("{what} of {got} bytes, the limit is {limit}")]
    TooLong {
        /// The part of the frame.
        what: &'static str,
        /// The limit.
        limit: u64,
        /// The announced length.
        got: u64,
    },
    /// A payload that does not fit its message, in bytes.
    #[error("{message} with a payload of {got} bytes, expected {least} to {most}")]
    Payload {
        /// The message's name.
        message: &'static str,
        /// The shortest that fits.
        least: u32,
        /// The longest that fits.
        most: u32,
        /// The announced length.
        got: u32,
    },
    /// The peer speaks another version of the protocol.
    #[error(
        "the peer speaks protocol {got}, this is protocol {expected}: use the same release on both sides"
    )]
    Protocol {
        /// This end's.
        expected: u16,
        /// The peer's.
        got: u16,
    },
    /// A body that is no message.
    #[error("the body is no message: {0}")]
    Body(#[from] postcard::Error),
    /// A body that goes on after its message.
    #[error("the body goes on {0} bytes after its message")]
    Trailing(usize),
    /// Blocks that are not named as they must be.
    #[error("blocks of {message}: {error}")]
    Ranges {
        /// The message's name.
        message: &'static str,
        /// The fault.
        error: RangesError,
    },
    /// Pieces of a version that are none, or too long.
    #[error("pieces that are none, or have more than {most} bytes together")]
    Pieces {
        /// The limit.
        most: u32,
    },
    /// This end was given something that does not belong here: an error in gradfs.
    #[error("{0} out of order")]
    Order(&'static str),
}

impl WireError {
    /// The refusal to answer before the connection is closed. A peer of any protocol version can read a
    /// refusal of its protocol.
    pub fn to_refusal(&self) -> Refusal {
        let frame =
            |what: &str, expected: String, got: String| Refusal::Frame { what: what.into(), expected, got };
        match self {
            &WireError::Protocol { expected, got } => Refusal::Protocol { expected, got },
            WireError::Magic { expected, got } => {
                frame("magic", format!("{expected:#06x}"), format!("{got:#06x}"))
            }
            WireError::Checksum { what, expected, got } => {
                frame(&format!("checksum of the {what}"), format!("{expected:#010x}"), format!("{got:#010x}"))
            }
            WireError::Flags { allowed, got } => {
                frame("flags", format!("{allowed:#06x}"), format!("{got:#06x}"))
            }
            WireError::TooLong { what, limit, got } => {
                frame(what, format!("at most {limit} bytes"), format!("{got}"))
            }
            WireError::Payload { message, least, most, got } => {
                let expected = if least == most { format!("{least}") } else { format!("{least} to {most}") };
                frame(&format!("payload of {message}"), format!("{expected} bytes"), format!("{got}"))
            }
            WireError::Body(error) => frame("body", "a message".into(), error.to_string()),
            WireError::Trailing(bytes) => {
                frame("body", "a message and no more".into(), format!("{bytes} bytes more"))
            }
            WireError::Ranges { message, error } => {
                frame(&format!("blocks of {message}"), "a set of blocks".into(), error.to_string())
            }
            WireError::Pieces { most } => {
                frame("pieces", format!("pieces of 1 to {most} bytes together"), "others".into())
            }
            WireError::Order(_) => Refusal::other(self),
        }
    }
}
