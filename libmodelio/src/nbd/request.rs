//! Requests of a client, after the handshake.

use super::numbers::{self, command, flag};

/// The length of a request, without its payload.
pub const REQUEST_LEN: usize = 28;
/// The most bytes that a request may read or write, as clients are told.
pub const MAX_LEN: u32 = 32 << 20;

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Read a range.
    Read,
    /// Write a range; the payload follows the request.
    Write,
    /// End the connection. There is no reply.
    Disconnect,
    /// Make completed writes stable.
    Flush,
    /// Forget a range.
    Trim,
    /// Read ahead.
    Cache,
    /// Write zeros.
    WriteZeroes,
    /// The status of a range.
    BlockStatus,
    /// A command that this server does not know.
    Unknown(u16),
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its flags ([`flag`]).
    pub flags: u16,
    /// What it asks for.
    pub command: Command,
    /// The reply repeats this number.
    pub cookie: u64,
    /// The start of the range, in bytes.
    pub offset: u64,
    /// The length of the range, in bytes.
    pub len: u32,
}

impl Request {
    /// Decodes a request. `None` if it does not begin as one: the client has lost its place, and the connection ends.
    pub fn decode(bytes: &[u8; REQUEST_LEN]) -> Option<Request> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (flags, rest) = rest.split_first_chunk()?;
        let (number, rest) = rest.split_first_chunk()?;
        let (cookie, rest) = rest.split_first_chunk()?;
        let (offset, rest) = rest.split_first_chunk()?;
        let len = u32::from_be_bytes(*rest.first_chunk()?);
        if u32::from_be_bytes(*magic) != numbers::REQUEST_MAGIC {
            return None;
        }
        let command = match u16::from_be_bytes(*number) {
            command::READ => Command::Read,
            command::WRITE => Command::Write,
            command::DISCONNECT => Command::Disconnect,
            command::FLUSH => Command::Flush,
            command::TRIM => Command::Trim,
            command::CACHE => Command::Cache,
            command::WRITE_ZEROES => Command::WriteZeroes,
            command::BLOCK_STATUS => Command::BlockStatus,
            other => Command::Unknown(other),
        };
        Some(Request {
            flags: u16::from_be_bytes(*flags),
            command,
            cookie: u64::from_be_bytes(*cookie),
            offset: u64::from_be_bytes(*offset),
            len,
        })
    }

    /// The number of bytes that follow the request.
    pub fn payload(&self) -> u32 {
        if self.command == Command::Write { self.len } else { 0 }
    }

    /// Whether a range of bytes is asked for that an export of `size` bytes has.
    pub fn fits(&self, size: u64) -> bool {
        self.len > 0 && self.offset.checked_add(self.len.into()).is_some_and(|end| end <= size)
    }

    /// Whether it has one of these flags ([`flag`]).
    pub fn has(&self, flags: u16) -> bool {
        self.flags & flags != 0
    }

    /// Whether all of its flags belong to its command.
    pub fn is_well_flagged(&self) -> bool {
        let known = match self.command {
            Command::Read => flag::DONT_FRAGMENT,
            Command::BlockStatus => flag::REQUEST_ONE,
            Command::WriteZeroes => flag::NO_HOLE,
            _ => 0,
        };
        // FUA may stand with any command, and means something for writes only.
        self.flags & !(known | flag::FUA) == 0
    }
}
