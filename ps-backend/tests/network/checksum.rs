//! Blocks with and without a checksum: each end decides for what it sends.

use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::coding::Form;
use libmodelio::vocabulary::ids::{BlockId, PlanId};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::wire::{Checksum, Message, Refusal, Role};
use ps_backend::server::ServerOptions;

use crate::payload::of_shard;
use crate::raw::Raw;
use crate::world::{BLOCK, Learner, Way, World};

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
        learner.makes(1.0, step, step as f32);
    }
    let received = job.payload().unwrap().unchecked_bytes;
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

/// Blocks of a small model go with commits and states.
#[test]
fn each_end_decides_for_the_blocks_that_it_sends() {
    let (auto, poll) = (Way::Tcp(Choice::Auto), Way::Tcp(Choice::Poll));
    for (way, bytes) in [(auto, BYTES), (poll, BYTES), (auto, 4096)] {
        for (client, shard) in CHOICES.iter().flat_map(|&client| CHOICES.map(|shard| (client, shard))) {
            let (pulled, pushed) = unchecked(client, shard, way, bytes);
            is_choice(client, pushed, STEPS * bytes);
            // The first version is pulled, too.
            is_choice(shard, pulled, (STEPS + 1) * bytes);
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
        let mut raw = Raw::welcomed(&world, Role::Data, 77);
        raw.say_with_other(&push, &told, &sent);
        let Refusal::Frame { what, .. } = raw.refusal() else { panic!("another refusal") };
        assert_eq!(what, "checksum of the payload");
    }
}
