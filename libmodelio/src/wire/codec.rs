//! Messages to bodies and back; frames; the payload that each message may have.

use std::ops::RangeInclusive;

use super::header::{HEADER, Header, Payload};
use super::{
    DataKind, Limits, MAX_PARTS_BYTES, MAX_PAYLOAD, MAX_SMALL_MODEL, Message, Protocol, Refusal,
    RegistryAnswer, RegistryRequest, WireError,
};
use crate::vocabulary::block_ranges::{self, BlockRanges, RangesError};
use crate::vocabulary::coding::Form;
use crate::vocabulary::dtype::MOST_WIDENING;
use crate::vocabulary::ids::Epoch;
use crate::vocabulary::layout::MAX_BLOCK_SIZE;
use crate::vocabulary::partly::PartlyWritten;
use crate::vocabulary::strided::Strided;

/// Longest text of a refusal that says what went wrong in its own words, in bytes.
const MAX_REASON: usize = 1024;

impl Message {
    /// The name in `docs/internals/protocol.md`.
    pub fn name(&self) -> &'static str {
        self.into()
    }

    /// The allowed length of this message's payload, in bytes; `0..=0` for none. An end that knows the model
    /// can be stricter: see [`super::Received::expect_payload`].
    pub fn payload_limits(&self) -> RangeInclusive<u32> {
        match self {
            // Narrow elements take more room as fp32. A coded block is shorter than a full one.
            Message::Push { form: Form::Wide | Form::Coded(_), .. } => {
                1..=MOST_WIDENING as u32 * MAX_BLOCK_SIZE
            }
            Message::Push { form: Form::Plain, .. }
            | Message::Block { .. }
            | Message::BlockAhead { .. }
            | Message::Changes { .. }
            | Message::ChangesAhead { .. }
            | Message::PushChanges { .. } => 1..=MAX_BLOCK_SIZE,
            Message::Load { what: DataKind::Weights, .. } => 1..=MAX_BLOCK_SIZE,
            Message::Create
            | Message::Registry(
                RegistryRequest::Put { .. }
                | RegistryRequest::Restore { .. }
                | RegistryRequest::Succeed { .. },
            )
            | Message::Registered(RegistryAnswer::Model)
            | Message::Moved
            | Message::Prepare { .. }
            | Message::HandOver { .. }
            | Message::Captured { .. }
            | Message::BeginAt { .. }
            | Message::Offer { .. }
            | Message::Switch => 1..=MAX_PAYLOAD,
            // Narrow elements have masters and optimizer state of more than their room.
            Message::Fetched | Message::Load { .. } => 0..=MOST_WIDENING as u32 * MAX_BLOCK_SIZE,
            Message::PartBytes { .. } | Message::WritePart { .. } => 1..=MAX_PARTS_BYTES,
            Message::Offered { wanted: true } => 1..=MAX_PAYLOAD,
            Message::Text | Message::ChangedBlocks { .. } => 0..=MAX_PAYLOAD,
            Message::Commit { .. } | Message::State(_) => 0..=MAX_SMALL_MODEL,
            _ => 0..=0,
        }
    }

    /// Frames that are said before both ends know each other.
    fn limits(&self) -> Limits {
        match self {
            Message::Hello { .. } | Message::Welcome { .. } | Message::Refused(_) => Limits::GREETING,
            _ => Limits::MAX,
        }
    }

    /// The message of a body, for a frame with `payload_len` bytes of payload.
    ///
    /// # Errors
    /// [`WireError::Protocol`] for a greeting of another version, whatever else is in it; otherwise the fault
    /// of body or payload.
    pub fn decode(body: &[u8], payload_len: u32) -> Result<Message, WireError> {
        greeted_by(body)?;
        let (message, rest) = postcard::take_from_bytes::<Message>(body)?;
        if !rest.is_empty() {
            return Err(WireError::Trailing(rest.len()));
        }
        // Once more, for a variant that is spelt in more bytes than it needs.
        if let Message::Hello { protocol, .. } | Message::Welcome { protocol, .. } = message {
            Protocol::from_number(protocol)?;
        }
        message.check(payload_len)?;
        Ok(message)
    }

    /// Checks what the types do not say. Both ends do.
    fn check(&self, payload_len: u32) -> Result<(), WireError> {
        let allowed = self.payload_limits();
        if !allowed.contains(&payload_len) {
            let (least, most) = (*allowed.start(), *allowed.end());
            return Err(WireError::Payload { message: self.name(), least, most, got: payload_len });
        }
        let blocks = |blocks: &BlockRanges| {
            block_ranges::check(blocks, u32::MAX)
                .map_err(|error| WireError::Ranges { message: self.name(), error })
        };
        let pieces = |partly: &PartlyWritten| {
            partly.check(u32::MAX).map_err(|error| WireError::Ranges { message: self.name(), error })
        };
        match self {
            Message::Commit { blocks: list, tensors, partly, .. } => {
                blocks(list)?;
                blocks(tensors)?;
                partly.iter().try_for_each(pieces)
            }
            Message::Assign { blocks: list, .. }
            | Message::AssignPart { blocks: list, .. }
            | Message::Missing { blocks: list, .. }
            | Message::Unchanged { blocks: list, .. } => blocks(list),
            Message::Start(plan) => {
                let parts = plan.parts.iter().flat_map(|set| &set.parts);
                parts.into_iter().try_for_each(|part| blocks(&part.blocks))?;
                plan.sources.iter().try_for_each(|source| {
                    blocks(&source.blocks)?;
                    pieces(&source.partly)
                })
            }
            Message::ReadParts { parts, .. } | Message::WritePart { parts, .. } => {
                match Strided::total(parts, u64::MAX) {
                    Some(bytes) if (1..=MAX_PARTS_BYTES.into()).contains(&bytes) => Ok(()),
                    _ => Err(WireError::Pieces { most: MAX_PARTS_BYTES }),
                }
            }
            Message::Pull { blocks: range, .. } if range.is_empty() => Err(WireError::Ranges {
                message: self.name(),
                error: RangesError::Empty { start: range.start, end: range.end },
            }),
            _ => Ok(()),
        }
    }
}

impl Refusal {
    /// A refusal in words of its own, cut where they are too many.
    pub fn other(reason: impl std::fmt::Display) -> Refusal {
        let mut reason = reason.to_string();
        if reason.len() > MAX_REASON {
            reason.truncate(reason.floor_char_boundary(MAX_REASON));
            reason.push('…');
        }
        Refusal::Other(reason)
    }
}

/// A greeting begins with its variant and the protocol in every version; the rest may differ.
fn greeted_by(body: &[u8]) -> Result<(), WireError> {
    const HELLO: u8 = 0;
    const WELCOME: u8 = 1;
    if let Some((&(HELLO | WELCOME), rest)) = body.split_first() {
        let (protocol, _) = postcard::take_from_bytes::<u16>(rest)?;
        Protocol::from_number(protocol)?;
    }
    Ok(())
}

/// Puts header and body of a message behind what `buffer` holds, to be followed on the wire by the payload that
/// `payload` tells of. `request` is the number that the answer repeats, `epoch` the block map that the message was
/// made under. Allocates only where `buffer` must grow.
///
/// # Errors
/// [`WireError`] for a message that the other end would not take; `buffer` is as it was.
pub fn append_frame(
    buffer: &mut Vec<u8>,
    message: &Message,
    request: u64,
    epoch: Epoch,
    payload: Payload,
) -> Result<(), WireError> {
    message.check(payload.len)?;
    let start = buffer.len();
    let appended = append(buffer, message, request, epoch, payload);
    if appended.is_err() {
        buffer.truncate(start);
    }
    appended
}

fn append(
    buffer: &mut Vec<u8>,
    message: &Message,
    request: u64,
    epoch: Epoch,
    payload: Payload,
) -> Result<(), WireError> {
    let start = buffer.len();
    let body = start + HEADER;
    buffer.resize(body, 0);
    postcard::to_io(message, &mut *buffer)?;
    let header = Header::new(request, epoch, &buffer[body..], payload, message.limits())?;
    buffer[start..body].copy_from_slice(header.as_bytes());
    Ok(())
}

/// Header and body of a message, to be followed on the wire by `payload`; otherwise as [`append_frame`].
///
/// # Errors
/// [`WireError`] for a message that the other end would not take.
pub fn frame(message: &Message, request: u64, epoch: Epoch, payload: &[u8]) -> Result<Vec<u8>, WireError> {
    let mut buffer = Vec::new();
    append_frame(&mut buffer, message, request, epoch, Payload::of(payload)?)?;
    Ok(buffer)
}
