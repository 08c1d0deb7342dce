//! What the codec allocates: nothing for a block, and never more than its limits for what a stranger sends.

use allocation_counter::measure;
use libmodelio::bytes::crc32c::crc32c;
use libmodelio::vocabulary::block_map::BlockMap;
use libmodelio::vocabulary::coding::Form;
use libmodelio::vocabulary::ids::{BlockId, Epoch, Generation, PlanId, ShardId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::wire::{
    JobState, Limits, MAX_METADATA, Message, ModelRecord, Moved, Payload, Receiver, append_frame, frame,
};

#[test]
fn blocks_go_without_an_allocation() {
    let payload = [7; 1000];
    let payload = Payload { len: 1000, crc: Some(crc32c(&payload)) };
    let (mut buffer, mut receiver) = (Vec::new(), Receiver::new(Limits::MAX));
    let mut send_and_receive = |i: u32| {
        for message in [
            Message::Push { plan: PlanId(1 << 40), block: BlockId(i), form: Form::Plain, ahead: false },
            Message::Block { version: Version(1 << 40), block: BlockId(i) },
        ] {
            buffer.clear();
            append_frame(&mut buffer, &message, i.into(), Epoch(1), payload).expect("it is sound");
            let (_, received) = receiver.push(&buffer).expect("it is sound");
            assert_eq!(received.expect("it is complete").message, message);
            receiver.payload_done(payload.crc.unwrap()).expect("it is sound");
        }
    };
    // The buffers take their size.
    send_and_receive(u32::MAX);
    let used = measure(|| (0..100).for_each(&mut send_and_receive));
    assert_eq!(used.count_total, 0, "{used:?}");
}

#[test]
fn announced_lengths_cause_no_allocation() {
    // A list of 2^60 elements in a body of a few bytes: varint after the variant of `Touch`.
    let body = [16, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0f, 1, 2, 3];
    let used = measure(|| assert!(Message::decode(&body, 0).is_err()));
    assert!(used.bytes_max < 2 << 20, "{used:?}");

    // A header that tells of the longest body: its room is all that is made before it comes.
    let join = Message::Join { name: "x".repeat((1 << 20) - 4) };
    let long = frame(&join, 0, Epoch(0), &[]).expect("it is just short enough");
    let used = measure(|| {
        let mut receiver = Receiver::new(Limits::MAX);
        let (_, received) = receiver.push(&long[..100]).expect("more may come");
        assert!(received.is_none());
    });
    assert!(used.bytes_max < (1 << 20) + 4096, "{used:?}");
    let used = measure(|| assert!(Receiver::new(Limits::GREETING).push(&long).is_err()));
    assert!(used.bytes_max < 4096, "{used:?}");
}

#[test]
fn decoded_messages_take_a_small_multiple_of_their_bytes() {
    let late = vec![Default::default(); (1 << 20) - 200];
    let state = Message::State(Box::new(JobState { late, ..JobState::default() }));
    let body = frame(&state, 0, Epoch(0), &[]).expect("it is just short enough").split_off(40);
    let used = measure(|| assert_eq!(Message::decode(&body, 0).as_ref(), Ok(&state)));
    assert!(used.bytes_max < 64 << 20, "{used:?}");

    // A record of name "m" and generation 1, that goes on with lists without end.
    let lists: [(&str, Vec<u8>); 4] = [
        ("tensors", vec![0xff, 0xff, 0xff, 0x0f]),
        ("dimensions of a tensor", vec![1, 0, 0, 0xff, 0xff, 0xff, 0x0f]),
        ("metadata", {
            let entries =
                (0..=MAX_METADATA as u32).flat_map(|i| [4].into_iter().chain(i.to_le_bytes()).chain([0]));
            [0, 0xff, 0xff, 0xff, 0x0f].into_iter().chain(entries).collect()
        }),
        ("owners", vec![0, 0, 0, 1, 0xff, 0xff, 0xff, 0x0f]),
    ];
    for (what, list) in lists {
        let mut bytes = b"\x01m\x01".to_vec();
        bytes.extend(list);
        bytes.resize(4 << 20, 0);
        let used = measure(|| assert!(ModelRecord::decode(&bytes).is_err()));
        assert!(used.bytes_max < 128 << 20, "{what}: {used:?}");
        // A record comes first in a redirect.
        let used = measure(|| assert!(Moved::decode(&bytes).is_err()));
        assert!(used.bytes_max < 128 << 20, "{what}: {used:?}");
    }
}

#[test]
fn an_endless_list_of_shards_takes_no_memory() {
    let layout = ModelLayout::blank(1 << 20, DType::F32, 64 << 10).expect("a layout");
    let map = BlockMap::striped(layout.blocks(), &[ShardId(1)]).expect("a map");
    let record = ModelRecord::new(
        "m",
        Generation(1),
        &layout,
        Default::default(),
        &map,
        ShardId(1),
        Default::default(),
    );
    let sound =
        Moved { record: record.expect("a record"), shards: Vec::new() }.encode().expect("it is short");
    // Instead of no shards as many as there is room for: each of number 1, with no texts.
    let mut bytes = sound[..sound.len() - 1].to_vec();
    bytes.extend([0xff, 0xff, 0xff, 0x01]);
    bytes.extend([1, 0, 0, 0].repeat(1 << 20));
    let used = measure(|| assert!(Moved::decode(&bytes).is_err()));
    assert!(used.bytes_max < 1 << 20, "{used:?}");
}
