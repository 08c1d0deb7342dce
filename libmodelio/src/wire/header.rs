//! The header that every frame begins with, and the one place where it is made and validated.
//!
//! The header is the same in all versions of the protocol, so that ends of different versions recognise each
//! other.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Limits, WireError};
use crate::bytes::crc32c::crc32c;
use crate::vocabulary::ids::Epoch;

/// Bytes of a header.
pub const HEADER: usize = 40;

/// "GF" in memory.
const MAGIC: u16 = u16::from_le_bytes(*b"GF");
/// The flag of a frame whose payload has no checksum.
const UNCHECKED: u16 = 1;

/// The fixed part of a frame, validated: there is no way to one with another magic, flags or checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header(Raw);

/// Its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Raw {
    magic: U16,
    flags: U16,
    body: U32,
    payload: U32,
    payload_crc: U32,
    request: U64,
    epoch: U64,
    body_crc: U32,
    /// Over all that stands before it.
    header_crc: U32,
}

const _: () = assert!(size_of::<Raw>() == HEADER);

/// Length and checksum of a payload that goes its own way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Payload {
    /// Bytes.
    pub len: u32,
    /// Their CRC32C. `None` if they are sent without one.
    pub crc: Option<u32>,
}

impl Payload {
    /// No payload.
    pub const NONE: Payload = Payload { len: 0, crc: None };

    /// The payload of these bytes, with a checksum.
    ///
    /// # Errors
    /// [`WireError::TooLong`] beyond [`super::MAX_PAYLOAD`].
    pub fn of(bytes: &[u8]) -> Result<Payload, WireError> {
        let len = within("payload", bytes.len() as u64, Limits::MAX.payload)?;
        Ok(Payload { len, crc: Some(crc32c(bytes)) })
    }
}

impl Header {
    /// The header of a frame with this body and payload.
    ///
    /// # Errors
    /// [`WireError::TooLong`].
    pub(super) fn new(
        request: u64,
        epoch: Epoch,
        body: &[u8],
        payload: Payload,
        limits: Limits,
    ) -> Result<Header, WireError> {
        let mut header = Raw {
            magic: U16::new(MAGIC),
            flags: U16::new(if payload.len > 0 && payload.crc.is_none() { UNCHECKED } else { 0 }),
            body: U32::new(within("body", body.len() as u64, limits.body)?),
            payload: U32::new(within("payload", payload.len.into(), limits.payload)?),
            payload_crc: U32::new(payload.crc.unwrap_or(0)),
            request: U64::new(request),
            epoch: U64::new(epoch.0),
            body_crc: U32::new(crc32c(body)),
            header_crc: U32::new(0),
        };
        header.header_crc = U32::new(header.own_crc());
        Ok(Header(header))
    }

    /// Parses a received header. Nothing in it can be trusted before this returns.
    ///
    /// # Errors
    /// [`WireError`] naming what is wrong first: no frame, damage, then what a correct peer does not send.
    pub fn parse(bytes: &[u8; HEADER], limits: Limits) -> Result<Header, WireError> {
        let header: Raw = zerocopy::transmute!(*bytes);
        if header.magic.get() != MAGIC {
            return Err(WireError::Magic { expected: MAGIC, got: header.magic.get() });
        }
        same("header", header.header_crc.get(), header.own_crc())?;
        let allowed = if header.payload.get() > 0 { UNCHECKED } else { 0 };
        if header.flags.get() & !allowed != 0 {
            return Err(WireError::Flags { allowed, got: header.flags.get() });
        }
        if header.flags.get() == UNCHECKED {
            same("payload", header.payload_crc.get(), 0)?;
        }
        within("body", header.body.get().into(), limits.body)?;
        within("payload", header.payload.get().into(), limits.payload)?;
        Ok(Header(header))
    }

    /// The number that the answer repeats; 0 for messages that are neither requests nor answers.
    pub fn request(&self) -> u64 {
        self.0.request.get()
    }

    /// The block map that the frame was made under; 0 where that does not matter.
    pub fn epoch(&self) -> Epoch {
        Epoch(self.0.epoch.get())
    }

    /// Bytes of the body.
    pub fn body_len(&self) -> usize {
        self.0.body.get() as usize
    }

    /// Bytes of the payload.
    pub fn payload_len(&self) -> u32 {
        self.0.payload.get()
    }

    /// CRC32C of the payload, as the sender says. `None` if the sender has left it out.
    pub fn payload_crc(&self) -> Option<u32> {
        (self.0.flags.get() & UNCHECKED == 0).then_some(self.0.payload_crc.get())
    }

    /// Checks that the body arrived unchanged.
    pub(super) fn check_body(&self, body: &[u8]) -> Result<(), WireError> {
        same("body", self.0.body_crc.get(), crc32c(body))
    }

    /// Checks that the payload arrived unchanged, given its CRC32C. Without a checksum in the frame, any value will do.
    ///
    /// # Errors
    /// [`WireError::Checksum`].
    pub fn check_payload(&self, crc: u32) -> Result<(), WireError> {
        self.payload_crc().map_or(Ok(()), |expected| same("payload", expected, crc))
    }

    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl Raw {
    fn own_crc(&self) -> u32 {
        crc32c(&self.as_bytes()[..HEADER - 4])
    }
}

fn same(what: &'static str, expected: u32, got: u32) -> Result<(), WireError> {
    if expected == got { Ok(()) } else { Err(WireError::Checksum { what, expected, got }) }
}

fn within(what: &'static str, got: u64, limit: u32) -> Result<u32, WireError> {
    match u32::try_from(got) {
        Ok(length) if length <= limit => Ok(length),
        _ => Err(WireError::TooLong { what, limit: limit.into(), got }),
    }
}
