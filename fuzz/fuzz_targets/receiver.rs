//! Any bytes in any pieces: the receiver takes them as it would take them whole, or refuses them.
//!
//! Random bytes have no sound checksum, so `mend` gives the first frames the ones that they would need.

#![no_main]

use libfuzzer_sys::fuzz_target;
use libmodelio::bytes::crc32c::crc32c;
use libmodelio::wire::{HEADER, Limits, Message, Receiver, WireError};

#[derive(Debug, arbitrary::Arbitrary)]
struct Input {
    stream: Vec<u8>,
    cuts: Vec<u16>,
    mend: bool,
}

/// Magic, flags and checksums of as many frames as the lengths in their headers make out.
fn mend(stream: &mut [u8]) {
    let mut rest = stream;
    while rest.len() >= HEADER {
        let (header, behind) = rest.split_at_mut(HEADER);
        let length = |at: usize| usize::from(header[at]) | usize::from(header[at + 1]) << 8;
        let body = length(4).min(behind.len());
        let payload = length(8).min(behind.len() - body);
        let (frame, next) = behind.split_at_mut(body + payload);
        let is_unchecked = payload > 0 && header[2] & 1 == 1;
        header[..4].copy_from_slice(if is_unchecked { b"GF\x01\0" } else { b"GF\0\0" });
        header[4..8].copy_from_slice(&(body as u32).to_le_bytes());
        header[8..12].copy_from_slice(&(payload as u32).to_le_bytes());
        let crc = if is_unchecked { 0 } else { crc32c(&frame[body..]) };
        header[12..16].copy_from_slice(&crc.to_le_bytes());
        header[32..36].copy_from_slice(&crc32c(&frame[..body]).to_le_bytes());
        let own = crc32c(&header[..36]);
        header[36..].copy_from_slice(&own.to_le_bytes());
        rest = next;
    }
}

/// The messages of the stream with their payloads, and what ends it.
fn receive(stream: &[u8], cuts: &[u16]) -> (Vec<(Message, Vec<u8>)>, Option<WireError>) {
    let mut receiver = Receiver::new(Limits::MAX);
    let mut frames: Vec<(Message, Vec<u8>)> = Vec::new();
    let mut ends: Vec<_> = cuts.iter().map(|&cut| usize::from(cut) % (stream.len() + 1)).collect();
    ends.extend([0, stream.len()]);
    ends.sort_unstable();
    for piece in ends.windows(2) {
        let mut piece = &stream[piece[0]..piece[1]];
        while !piece.is_empty() {
            if let Some(due) = receiver.payload_due() {
                let payload = &mut frames.last_mut().expect("a payload has a message").1;
                let (now, later) = piece.split_at((due as usize - payload.len()).min(piece.len()));
                payload.extend_from_slice(now);
                piece = later;
                if payload.len() == due as usize
                    && let Err(error) = receiver.payload_done(crc32c(payload))
                {
                    return (frames, Some(error));
                }
                continue;
            }
            match receiver.push(piece) {
                Ok((used, received)) => {
                    assert!(used > 0);
                    piece = &piece[used..];
                    frames.extend(received.map(|received| (received.message, Vec::new())));
                }
                Err(error) => return (frames, Some(error)),
            }
        }
    }
    (frames, None)
}

fuzz_target!(|input: Input| {
    let mut stream = input.stream;
    if input.mend {
        mend(&mut stream);
    }
    assert_eq!(receive(&stream, &input.cuts), receive(&stream, &[]));
});
