//! Blocks with and without a checksum: each end decides for what it sends.

use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::coding::Form;
use libmodelio::vocabulary::ids::{BlockId, ClientId, PlanId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::wire::{Checksum, Message, Refusal, Role};
use ps_backend::server::ServerOptions;

use crate::payload::of_shard;
use crate::raw::Raw;
use crate::world::{BLOCK, LONG, Learner, Way, World};

const BYTES: u64 = 1_000_004;
const STEPS: u64 = 3;
const CHOICES: [Checksum; 2] = [Checksum::On, Checksum::Off];

fn world(checksum: Checksum, way: Way, bytes: u64) -> World {
    let (options, transport) = way.options();
    let layout = ModelLayout::blank(bytes, DType::F32, BLOCK).unwrap();
    let settings = [("reducer", "sum"), ("learners", "1")];
    World::with_options(ServerOptions { checksum, ..options }, transport, 1, &layout, &settings)
}

/// The bytes that a client and its shard have received without a checksum, in some steps of a learner.
fn unchecked(client: Checksum, shard: Checksum, way: Way, bytes: u64) -> (u64, u64) {
    let world = world(shard, way, bytes);
    let job = world.client_with(|options| options.checksum = client);
    let learner = Learner::join(&job, "l");
    for step in 1..=STEPS {
        assert_eq!(learner.push(1.0).recv_timeout(LONG).unwrap(), Ok(Message::Done));
        assert!(learner.pull().1.iter().all(|&weight| weight == step as f32), "{client:?} {shard:?} {way:?}");
    }
    let received = job.payload().unwrap().unchecked_bytes;
    job.shut_down();
    (received, of_shard(&world).unchecked_bytes)
}

/// What the sender's choice makes of so many bytes that come at least.
#[track_caller]
fn is_choice(choice: Checksum, unchecked: u64, bytes: u64) {
    match choice {
        Checksum::On => assert_eq!(unchecked, 0),
        Checksum::Off => assert!(unchecked >= bytes, "{unchecked} of {bytes}"),
    }
}

#[test]
fn each_end_decides_for_the_blocks_that_it_sends() {
    for way in [Way::Tcp(Choice::Auto), Way::Tcp(Choice::Poll)] {
        for (client, shard) in CHOICES.iter().flat_map(|&client| CHOICES.map(|shard| (client, shard))) {
            let (pulled, pushed) = unchecked(client, shard, way, BYTES);
            is_choice(client, pushed, STEPS * BYTES);
            is_choice(shard, pulled, STEPS * BYTES);
        }
    }
}

/// Their blocks go with commits and states.
#[test]
fn each_end_decides_for_the_blocks_that_it_sends_of_a_small_model() {
    for (client, shard) in CHOICES.iter().flat_map(|&client| CHOICES.map(|shard| (client, shard))) {
        let (pulled, pushed) = unchecked(client, shard, Way::Tcp(Choice::Auto), 4096);
        is_choice(client, pushed, STEPS * 4096);
        is_choice(shard, pulled, STEPS * 4096);
    }
}

fn greeted(world: &World) -> Raw {
    let address = world.address_of(world.record.coordinator);
    let mut raw = Raw::greet(&address, Role::Data, &world.record, ClientId(77));
    assert!(matches!(raw.receive().0.message, Message::Welcome { .. }));
    raw
}

#[test]
fn a_shard_sends_blocks_as_its_own_option_says() {
    for checksum in CHOICES {
        let world = world(checksum, Way::Tcp(Choice::Auto), BYTES);
        let mut raw = greeted(&world);
        raw.say(0, &Message::Pull { version: Version(0), blocks: 0..2 });
        for block in [0, 1].map(BlockId) {
            let (received, payload) = raw.receive_of(|message| matches!(message, Message::Block { .. }));
            assert_eq!(received.message, Message::Block { version: Version(0), block });
            assert_eq!(received.header.payload_crc().is_some(), checksum == Checksum::On);
            assert_eq!(payload, vec![0; BLOCK as usize]);
        }
    }
}

/// Whatever its own option says.
#[test]
fn a_shard_checks_what_has_a_checksum() {
    for checksum in CHOICES {
        let world = world(checksum, Way::Tcp(Choice::Auto), BYTES);
        let push = Message::Push { plan: PlanId(0), block: BlockId(0), form: Form::Plain, ahead: false };
        let (told, sent) = (vec![1; BLOCK as usize], vec![2; BLOCK as usize]);
        let mut raw = greeted(&world);
        raw.say_with_other(&push, &told, &sent);
        let (received, _) = raw.receive_of(|message| matches!(message, Message::Refused(_)));
        let Message::Refused(Refusal::Frame { what, .. }) = received.message else { panic!("{received:?}") };
        assert_eq!(what, "checksum of the payload");
    }
}
