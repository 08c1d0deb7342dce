//! Small models: a contribution goes with its commit, and a version comes with the state that announces it.

use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::{Message, Refusal};

use crate::ahead::{commit, contributor, sees, write};
use crate::raw::{Raw, committed};
use crate::world::{BLOCK, LONG, Way, World, is_all, read};

const BLOCKS: u32 = 2;
const BYTES: u64 = BLOCKS as u64 * BLOCK as u64;

fn world(learners: usize, way: Way) -> World {
    World::new(1, BYTES, &[("reducer", "sum"), ("learners", &*learners.to_string())], way)
}

fn all(value: f32) -> Vec<u8> {
    value.to_le_bytes().repeat(BYTES as usize / 4)
}

/// What a client hears until a request is answered.
#[derive(Debug, Default, PartialEq)]
struct Heard {
    /// The versions that came, with the value of all their elements.
    versions: Vec<(Version, f32)>,
    grants: usize,
    answer: Option<Message>,
}

/// The value of all elements.
#[track_caller]
fn value(bytes: &[u8]) -> f32 {
    let value = f32::from_le_bytes(bytes[..4].try_into().unwrap());
    assert!(bytes == all(value));
    value
}

/// Until so many versions have come, too.
fn heard(raw: &mut Raw, request: u64, versions: usize) -> Heard {
    let mut heard = Heard::default();
    while heard.answer.is_none() || heard.versions.len() < versions {
        let (received, payload) = raw.receive();
        match received.message {
            Message::State(state) if !payload.is_empty() => {
                heard.versions.push((state.version, value(&payload)));
            }
            Message::Grant { .. } => heard.grants += 1,
            message if received.header.request() == request => heard.answer = Some(message),
            _ => assert!(payload.is_empty()),
        }
    }
    heard
}

#[test]
fn a_step_is_one_message_each_way() {
    let world = world(1, Way::Tcp(Choice::Auto));
    let (mut raw, learner) = Raw::joined(&world, 7);
    for step in 1..=3 {
        let request = step + 1;
        raw.say_with(request, &committed(learner, step, BLOCKS), &all(1.0));
        let expected =
            Heard { versions: vec![(Version(step), step as f32)], grants: 0, answer: Some(Message::Done) };
        assert_eq!(heard(&mut raw, request, 1), expected);
    }
}

#[test]
fn contributions_of_several_clients_wait_for_each_other_where_they_came() {
    let world = world(2, Way::Tcp(Choice::Auto));
    let mut clients = [Raw::joined(&world, 7), Raw::joined(&world, 8)];
    for step in 1..=2 {
        for (at, (raw, learner)) in clients.iter_mut().enumerate() {
            raw.say_with(step + 1, &committed(*learner, step, BLOCKS), &all(1.0 + at as f32));
        }
        for (raw, _) in &mut clients {
            let expected = Heard {
                versions: vec![(Version(step), 3.0 * step as f32)],
                grants: 0,
                answer: Some(Message::Done),
            };
            assert_eq!(heard(raw, step + 1, 1), expected);
        }
    }
}

#[test]
fn blocks_that_do_not_fit_are_asked_for_and_nan_is_refused() {
    let world = world(1, Way::Tcp(Choice::Auto));
    let (mut raw, learner) = Raw::joined(&world, 7);
    raw.say_with(2, &committed(learner, 1, BLOCKS), &all(f32::NAN));
    let refused = Message::Refused(Refusal::Shard(ShardError::NonFinite(BlockId(0))));
    assert_eq!(heard(&mut raw, 2, 0).answer, Some(refused));
    // Of a payload that is too short, the client has to send the rest.
    raw.say_with(3, &committed(learner, 1, BLOCKS), &all(1.0)[4..]);
    while !matches!(raw.receive().0.message, Message::Grant { .. }) {}
    assert_eq!(world.client().version(), Version(0));
}

#[test]
fn readers_and_learners_see_what_small_steps_make() {
    for way in crate::ahead::ways() {
        let world = world(1, way);
        let (trains, reads) = (world.client(), world.client());
        let learner = contributor(&trains, "l");
        for step in 1..=20u64 {
            write(&learner, 1.0, 0..BYTES / 2);
            if step % 5 == 0 {
                // It begins anew. What it has committed before is of no step.
                assert!(learner.abort());
                write(&learner, 1.0, 0..BYTES / 2);
            }
            write(&learner, 1.0, BYTES / 2..BYTES);
            assert_eq!(commit(&learner), Ok(()), "{way:?}, step {step}");
            sees(&trains, &learner, step, step as f32);
        }
        let newest = libmodelio::client::wait_for(LONG, |done| reads.await_newest(LONG, done)).unwrap();
        let (version, weights) = read(&reads, newest);
        is_all(&weights, version.0 as f32);
    }
}
