//! Any body: what is a message can be sent again and is the same message.

#![no_main]

use libfuzzer_sys::fuzz_target;
use libmodelio::vocabulary::ids::Epoch;
use libmodelio::wire::{HEADER, Message, Payload, append_frame};

fuzz_target!(|input: (u32, Option<u32>, &[u8])| {
    let (len, crc, body) = input;
    let Ok(message) = Message::decode(body, len) else { return };
    assert!(message.payload_limits().contains(&len));
    let mut bytes = Vec::new();
    // Greetings and refusals have a lower limit than the decoder, which does not know what comes.
    if append_frame(&mut bytes, &message, 1, Epoch(1), Payload { len, crc }).is_ok() {
        assert_eq!(Message::decode(&bytes[HEADER..], len), Ok(message));
    }
});
