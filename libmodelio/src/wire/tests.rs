//! Frames there and back, damaged, cut, in pieces; garbage.

use proptest::collection::vec;
use proptest::prelude::*;
use strum::VariantNames;

use super::strategies::{any_frame, each_message, message};
use super::*;
use crate::bytes::crc32c::crc32c;
use crate::vocabulary::block_ranges::RangesError;
use crate::vocabulary::coding::Form;
use crate::vocabulary::ids::{BlockId, ClientId, Epoch, Generation, PlanId, ShardId, Version};
use crate::vocabulary::norm::{ExactSum, MOST_MEASURED, Squares, TensorSquares};

/// All bytes of a frame.
fn whole(message: &Message, request: u64, epoch: Epoch, payload: &[u8]) -> Vec<u8> {
    let mut bytes = frame(message, request, epoch, payload).expect("a message of this end");
    bytes.extend_from_slice(payload);
    bytes
}

/// The same without a checksum of the payload.
fn whole_unchecked(message: &Message, request: u64, epoch: Epoch, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let described = Payload { len: payload.len() as u32, crc: Checksum::Off.of(payload) };
    append_frame(&mut bytes, message, request, epoch, described).expect("a message of this end");
    bytes.extend_from_slice(payload);
    bytes
}

type Frames = Vec<(Received, Vec<u8>)>;

/// Receives `stream` in the pieces that `cuts` make of it: the frames with their payloads until all is read or
/// something is wrong.
fn receive(stream: &[u8], cuts: &[usize]) -> (Frames, Result<(), WireError>) {
    let mut receiver = Receiver::new(Limits::MAX);
    let mut frames = Frames::new();
    let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (stream.len() + 1)).collect();
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
                    return (frames, Err(error));
                }
                continue;
            }
            match receiver.push(piece) {
                Ok((used, received)) => {
                    assert!(used > 0, "it always takes what it wants");
                    piece = &piece[used..];
                    frames.extend(received.map(|received| (received, Vec::new())));
                }
                Err(error) => {
                    assert_eq!(receiver.push(piece), Err(error.clone()), "it stays broken");
                    return (frames, Err(error));
                }
            }
        }
    }
    (frames, Ok(()))
}

proptest! {
    #[test]
    fn frames_come_through_in_any_pieces(
        sent in vec((any_frame(), any::<bool>()), 0..4),
        cuts in vec(any::<usize>(), 0..12),
    ) {
        let bytes = |checked: bool| if checked { whole } else { whole_unchecked };
        let stream: Vec<u8> =
            sent.iter().flat_map(|((m, r, e, p), checked)| bytes(*checked)(m, *r, *e, p)).collect();
        let (frames, end) = receive(&stream, &cuts);
        prop_assert_eq!(end, Ok(()));
        prop_assert_eq!(frames.len(), sent.len());
        for ((received, bytes), ((message, request, epoch, payload), checked)) in frames.iter().zip(&sent) {
            prop_assert_eq!(&received.message, message);
            prop_assert_eq!((received.header.request(), received.header.epoch()), (*request, *epoch));
            prop_assert_eq!(bytes, payload);
            prop_assert_eq!(received.header.payload_crc().is_some(), *checked || payload.is_empty());
        }
    }

    #[test]
    fn without_a_checksum_a_flipped_bit_is_noticed_unless_it_is_the_payloads(
        sent in any_frame(),
        bit in any::<usize>(),
        cuts in vec(any::<usize>(), 0..4),
    ) {
        let (message, request, epoch, payload) = sent;
        let mut stream = whole_unchecked(&message, request, epoch, &payload);
        let bit = bit % (stream.len() * 8);
        stream[bit / 8] ^= 1 << (bit % 8);
        let head = stream.len() - payload.len();
        let (frames, end) = receive(&stream, &cuts);
        if bit / 8 < head {
            prop_assert!(
                matches!(end, Err(WireError::Magic { .. } | WireError::Checksum { .. })),
                "bit {bit}: {end:?}"
            );
        } else {
            prop_assert_eq!(end, Ok(()));
            prop_assert_eq!(&frames[0].1[..], &stream[head..], "as it came");
        }
    }

    #[test]
    fn a_flipped_bit_is_noticed(sent in any_frame(), bit in any::<usize>(), cuts in vec(any::<usize>(), 0..4)) {
        let (message, request, epoch, payload) = sent;
        let mut stream = whole(&message, request, epoch, &payload);
        let bit = bit % (stream.len() * 8);
        stream[bit / 8] ^= 1 << (bit % 8);
        let (_, end) = receive(&stream, &cuts);
        prop_assert!(
            matches!(end, Err(WireError::Magic { .. } | WireError::Checksum { .. })),
            "bit {bit}: {end:?}"
        );
    }

    #[test]
    fn of_a_truncated_frame_nothing_is_complete(sent in any_frame(), keep in any::<usize>()) {
        let (message, request, epoch, payload) = sent;
        let stream = whole(&message, request, epoch, &payload);
        let keep = keep % stream.len();
        let (frames, end) = receive(&stream[..keep], &[]);
        prop_assert_eq!(end, Ok(()), "more may come");
        prop_assert!(frames.iter().all(|(received, bytes)| bytes.len() < received.header.payload_len() as usize));
    }

    #[test]
    fn a_truncated_body_is_refused(message in message(), keep in any::<usize>()) {
        let payload = *message.payload_limits().start();
        let body = frame(&message, 0, Epoch(0), &vec![0; payload as usize]).unwrap().split_off(HEADER);
        prop_assert_eq!(Message::decode(&body, payload), Ok(message));
        let cut = Message::decode(&body[..keep % body.len()], payload);
        prop_assert!(matches!(cut, Err(WireError::Body(_))), "{cut:?}");
        let longer = Message::decode(&[body.as_slice(), &[0]].concat(), payload);
        prop_assert_eq!(longer, Err(WireError::Trailing(1)));
    }

    #[test]
    fn garbage_is_refused(bytes in vec(any::<u8>(), 0..200), cuts in vec(any::<usize>(), 0..4)) {
        let (frames, end) = receive(&bytes, &cuts);
        prop_assert!(frames.is_empty());
        prop_assert!(end.is_err() || bytes.len() < HEADER || bytes.starts_with(b"GF"));
        let _ = Message::decode(&bytes, 0);
    }

    /// A message that can be decoded can be encoded, and means the same.
    #[test]
    fn garbage_in_a_sound_frame_is_a_message_or_refused(mut body in vec(any::<u8>(), 1..60)) {
        body[0] %= Message::VARIANTS.len() as u8;
        if let Ok(message) = Message::decode(&body, 0) {
            let again = frame(&message, 0, Epoch(0), &[]).unwrap().split_off(HEADER);
            prop_assert_eq!(Message::decode(&again, 0), Ok(message));
        }
    }
}

#[test]
fn the_strategies_know_every_message() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut name = |of: BoxedStrategy<Message>| of.new_tree(&mut runner).unwrap().current().name();
    let names: Vec<_> = each_message().into_iter().map(&mut name).collect();
    assert_eq!(names, Message::VARIANTS);
}

#[test]
fn a_frame_is_what_the_document_says() {
    let push = Message::Push { plan: PlanId(300), block: BlockId(5), form: Form::Wide, ahead: false };
    let bytes = frame(&push, 0x0102_0304_0506_0708, Epoch(9), b"payload").unwrap();
    let body = [25, 0xac, 0x02, 5, 1, 0];
    let mut expected = Vec::new();
    expected.extend(b"GF");
    expected.extend([0, 0]);
    expected.extend(6u32.to_le_bytes());
    expected.extend(7u32.to_le_bytes());
    expected.extend(crc32c(b"payload").to_le_bytes());
    expected.extend([8, 7, 6, 5, 4, 3, 2, 1]);
    expected.extend(9u64.to_le_bytes());
    expected.extend(crc32c(&body).to_le_bytes());
    expected.extend(crc32c(&expected).to_le_bytes());
    assert_eq!(expected.len(), HEADER);
    expected.extend(body);
    assert_eq!(bytes, expected);
}

#[test]
fn a_frame_without_a_checksum_of_its_payload_says_so() {
    let block = Message::Block { version: Version(1), block: BlockId(0) };
    let (checked, unchecked) =
        (whole(&block, 1, Epoch(1), b"abc"), whole_unchecked(&block, 1, Epoch(1), b"abc"));
    assert_eq!((&checked[2..4], &unchecked[2..4]), (&[0, 0][..], &[1, 0][..]));
    assert_eq!(&unchecked[12..16], &[0; 4]);
    assert_eq!(whole_unchecked(&Message::Ping, 1, Epoch(1), b""), whole(&Message::Ping, 1, Epoch(1), b""));

    let with = |message: &Message, payload: &[u8], flags: u16, crc: u32| {
        let mut bytes = whole(message, 1, Epoch(1), payload);
        bytes[2..4].copy_from_slice(&flags.to_le_bytes());
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        let own = crc32c(&bytes[..HEADER - 4]);
        bytes[HEADER - 4..HEADER].copy_from_slice(&own.to_le_bytes());
        receive(&bytes, &[]).1
    };
    assert_eq!(with(&block, b"abc", 1, 0), Ok(()));
    let told = WireError::Checksum { what: "payload", expected: 7, got: 0 };
    assert_eq!(with(&block, b"abc", 1, 7), Err(told), "a checksum that is none");
    assert_eq!(with(&block, b"abc", 2, 0), Err(WireError::Flags { allowed: 1, got: 2 }));
    assert_eq!(with(&block, b"abc", 3, 0), Err(WireError::Flags { allowed: 1, got: 3 }));
    assert_eq!(with(&Message::Ping, b"", 1, 0), Err(WireError::Flags { allowed: 0, got: 1 }));
}

/// These bytes never change: ends of different versions say it to each other.
#[test]
fn greetings_begin_alike_in_all_versions() {
    let body = |message: &Message| frame(message, 0, Epoch(0), &[]).unwrap().split_off(HEADER);
    let protocol = Protocol::NEWEST.number();
    let byte = u8::try_from(protocol).expect("one byte in postcard");
    let hello = Message::Hello {
        protocol,
        role: Role::Admin,
        model: String::new(),
        generation: Generation(0),
        client: ClientId(7),
    };
    assert_eq!(body(&hello), [0, byte, 3, 0, 0, 7]);
    let welcome = Message::Welcome { protocol, shard: ShardId(2), epoch: Epoch(3), silence_ms: 4 };
    assert_eq!(body(&welcome), [1, byte, 2, 3, 4]);
    let refused = Message::Refused(Refusal::Protocol { expected: 1, got: 2 });
    assert_eq!(body(&refused), [2, 1, 1, 2]);

    let newer = WireError::Protocol { expected: protocol, got: 300 };
    assert_eq!(Message::decode(&[0, 0xac, 0x02, b'?'], 0), Err(newer.clone()), "whatever else it says");
    assert_eq!(Message::decode(&[1, 0xac, 0x02], 0), Err(newer.clone()));
    let spelt_long = Message::decode(&[0x81, 0x00, 0xac, 0x02, 1, 1, 1], 0);
    assert_eq!(spelt_long, Err(newer.clone()), "found by fuzzing");
    assert_eq!(newer.to_refusal(), Refusal::Protocol { expected: protocol, got: 300 });
}

#[test]
fn payloads_are_where_they_belong() {
    let push =
        |wide| Message::Push { plan: PlanId(1), block: BlockId(0), form: Form::full(wide), ahead: false };
    let error = |message: &Message, payload: usize| {
        frame(message, 1, Epoch(1), &vec![0; payload]).expect_err("does not fit")
    };
    let wrong = |message, least, most, got| WireError::Payload { message, least, most, got };
    assert_eq!(error(&Message::Ping, 1), wrong("Ping", 0, 0, 1));
    assert_eq!(error(&push(false), 0), wrong("Push", 1, 4 << 20, 0));
    assert_eq!(error(&push(false), (4 << 20) + 1), wrong("Push", 1, 4 << 20, (4 << 20) + 1));
    let limit = u64::from(MAX_PAYLOAD);
    let too_long = WireError::TooLong { what: "payload", limit, got: limit + 1 };
    assert_eq!(error(&Message::Text, MAX_PAYLOAD as usize + 1), too_long);
    assert_eq!(
        error(&push(true), MAX_PAYLOAD as usize + 1),
        too_long,
        "a sum of 8 bits takes four times its block"
    );
    assert_eq!(error(&push(true), 0), wrong("Push", 1, MAX_PAYLOAD, 0));

    let (frames, end) = receive(&whole(&push(false), 1, Epoch(1), &[7; 100]), &[]);
    assert_eq!(end, Ok(()));
    assert_eq!(frames[0].0.expect_payload(100), Ok(()));
    assert_eq!(frames[0].0.expect_payload(64), Err(wrong("Push", 64, 64, 100)));
}

#[test]
fn limits_hold_before_anything_is_allocated() {
    let late = vec!["x".repeat(5000)];
    let state = Message::State(Box::new(JobState { late, ..JobState::default() }));
    let bytes = frame(&state, 0, Epoch(0), &[]).unwrap();
    let got = (bytes.len() - HEADER) as u64;
    let mut receiver = Receiver::new(Limits::GREETING);
    let too_long = WireError::TooLong { what: "body", limit: 4096, got };
    assert_eq!(receiver.push(&bytes[..HEADER]), Err(too_long));

    let mut receiver = Receiver::new(Limits { payload: 64, ..Limits::MAX });
    let block = Message::Block { version: Version(1), block: BlockId(0) };
    let bytes = frame(&block, 0, Epoch(0), &[0; 65]).unwrap();
    let too_long = WireError::TooLong { what: "payload", limit: 64, got: 65 };
    assert_eq!(receiver.push(&bytes), Err(too_long));

    let long = Message::Join { name: "x".repeat(MAX_BODY as usize) };
    let mut buffer = b"before".to_vec();
    let refused = append_frame(&mut buffer, &long, 0, Epoch(0), Payload::NONE);
    assert!(matches!(refused, Err(WireError::TooLong { what: "body", .. })), "{refused:?}");
    assert_eq!(buffer, b"before");
    let reason = Message::Refused(Refusal::other("é".repeat(5000)));
    assert!(frame(&reason, 0, Epoch(0), &[]).unwrap().len() < HEADER + 1100);
}

#[test]
fn limits_are_raised_between_frames() {
    let ping = frame(&Message::Ping, 0, Epoch(0), &[]).unwrap();
    let join = frame(&Message::Join { name: "x".repeat(5000) }, 1, Epoch(0), &[]).unwrap();
    let mut receiver = Receiver::new(Limits::GREETING);
    let both = [ping.as_slice(), &join].concat();
    let (used, received) = receiver.push(&both).unwrap();
    assert_eq!((used, received.unwrap().message), (ping.len(), Message::Ping));
    receiver.set_limits(Limits::MAX);
    assert_eq!(receiver.wanted(), HEADER);
    let (used, received) = receiver.push(&join).unwrap();
    assert_eq!((used, received.unwrap().message.name()), (join.len(), "Join"));
}

#[test]
fn wrong_lists_of_blocks_are_refused() {
    let missing = Message::Missing { plan: PlanId(1), blocks: vec![2..3, 3..4] };
    let error = RangesError::Order { expected: 4, got: 3 };
    assert_eq!(frame(&missing, 0, Epoch(0), &[]), Err(WireError::Ranges { message: "Missing", error }));
    // Missing, plan 1, two ranges.
    let decoded = Message::decode(&[27, 1, 2, 2, 3, 3, 4], 0);
    assert_eq!(decoded, Err(WireError::Ranges { message: "Missing", error }));
    let pull = Message::Pull { version: Version(1), blocks: 4..4, base: None };
    let error = RangesError::Empty { start: 4, end: 4 };
    assert_eq!(frame(&pull, 0, Epoch(0), &[]), Err(WireError::Ranges { message: "Pull", error }));
}

#[test]
fn payloads_end_when_they_are_due() {
    let mut receiver = Receiver::new(Limits::MAX);
    assert_eq!(receiver.payload_done(0), Err(WireError::Order("the end of a payload")));
    let mut receiver = Receiver::new(Limits::MAX);
    let load = Message::Load { generation: Generation(1), block: BlockId(0), what: DataKind::Weights };
    receiver.push(&frame(&load, 0, Epoch(0), &[1; 10]).unwrap()).unwrap();
    assert_eq!((receiver.wanted(), receiver.payload_due()), (0, Some(10)));
    assert_eq!(receiver.push(&[1]), Err(WireError::Order("bytes of a payload")));
}

#[test]
fn the_document_numbers_every_message() {
    let document = include_str!("../../../docs/internals/protocol.md");
    for (number, name) in Message::VARIANTS.iter().enumerate() {
        let row = format!("| {number} | `{name}` |");
        assert!(document.contains(&row), "{row}");
    }
}

#[test]
fn the_norms_of_as_many_tensors_as_there_may_be_fit_into_a_message() {
    // Every power of two that a square can be.
    let mut sum = ExactSum::default();
    let wide: f64 = (0..53).map(|power| 2f64.powi(-power)).sum();
    (-1021..1023).step_by(53).for_each(|power| sum.add(wide / 2.0 * 2f64.powi(power)));
    let tensor = TensorSquares { weights: sum.clone(), direction: sum };
    let squares = Squares::Tensors(vec![tensor; MOST_MEASURED]);
    let message = Message::Measured { plan: PlanId(u64::MAX), squares };
    let bytes = frame(&message, u64::MAX, Epoch(u64::MAX), &[]).unwrap();
    assert!(bytes.len() > MAX_BODY as usize / 2, "{} bytes are not the worst case", bytes.len());
    let (received, error) = receive(&bytes, &[]);
    assert!(error.is_ok() && received.len() == 1, "{error:?}");
}
