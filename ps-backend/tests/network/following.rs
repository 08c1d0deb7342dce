//! Blocks of a version come to its learners while others are still being written.

use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use libmodelio::contributor::Contributor;
use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::ids::{PlanId, Version};
use libmodelio::wire::{Message, Refusal, Role};

use crate::ahead::{BYTES, commit, contributor, pull, sees, write};
use crate::payload::of_shard;
use crate::raw::Raw;
use crate::world::{BLOCK, Client, LONG, Learner, Way, World, is_all, read, until};

/// Over TCP, where blocks are sent. (Elsewhere they are read where they lie.)
const WAYS: [Way; 2] = [Way::Tcp(Choice::Auto), Way::Tcp(Choice::Poll)];

/// Learners on clients of their own, which show the first version.
fn learners(way: Way, shards: usize, count: usize) -> (World, Vec<Client>, Vec<Arc<Contributor>>) {
    let settings = [("reducer", "sum"), ("learners", &*count.to_string())];
    let world = World::new(shards, BYTES, &settings, way);
    let clients: Vec<Client> = (0..count).map(|_| world.client()).collect();
    let learners = clients.iter().enumerate().map(|(at, client)| contributor(client, &format!("l{at}")));
    let learners = learners.collect();
    (world, clients, learners)
}

fn pulled(world: &World) -> u64 {
    of_shard(world).pulled_bytes
}

#[track_caller]
fn wait_for_pulled(world: &World, bytes: u64) {
    until("the bytes come", || pulled(world) >= bytes);
}

/// A client sends four blocks together, so it may keep three until the commit.
const KEPT: u64 = 3 * BLOCK as u64;

#[test]
fn blocks_come_back_before_the_version_counts() {
    for way in WAYS {
        for count in [1, 2] {
            let (world, clients, learners) = learners(way, 1, count);
            for step in 1..=3u64 {
                let before = pulled(&world);
                // What one learner has not written is not computed.
                learners[1..].iter().for_each(|learner| write(learner, 1.0, 0..BYTES));
                write(&learners[0], 1.0, 0..BYTES / 2);
                wait_for_pulled(&world, before + count as u64 * (BYTES / 2 - count as u64 * KEPT));
                let shown: Vec<Version> = clients.iter().map(|client| client.version()).collect();
                assert_eq!(shown, vec![Version(step - 1); count], "{way:?}: nothing is committed");
                is_all(&read(&clients[0], Version(step - 1)).1, (step - 1) as f32 * count as f32);
                write(&learners[0], 1.0, BYTES / 2..BYTES);
                std::thread::scope(|scope| {
                    let commits: Vec<_> =
                        learners.iter().map(|learner| scope.spawn(|| commit(learner))).collect();
                    commits.into_iter().for_each(|commit| assert_eq!(commit.join().unwrap(), Ok(())));
                });
                for (client, learner) in clients.iter().zip(&learners) {
                    sees(client, learner, step, step as f32 * count as f32);
                }
                assert_eq!(pulled(&world), before + count as u64 * BYTES, "{way:?}: no block comes twice");
            }
        }
    }
}

#[test]
fn blocks_of_a_version_that_is_made_once_it_counts_come_to_those_who_follow_it() {
    for way in WAYS {
        // The blocks are more than are made at once.
        let bytes = 200 * u64::from(BLOCK);
        let settings =
            [("reducer", "momentum"), ("momentum", "0"), ("learning_rate", "1"), ("learners", "1")];
        let world = World::new(2, bytes, &settings, way);
        let client = world.client();
        let learner = contributor(&client, "l");
        for step in 1..=3u64 {
            write(&learner, -1.0, 0..bytes);
            assert_eq!(commit(&learner), Ok(()));
            sees(&client, &learner, step, step as f32);
        }
    }
}

#[test]
fn blocks_come_to_a_client_that_only_reads_before_the_version_counts() {
    for way in WAYS {
        let (world, mut clients, learners) = learners(way, 1, 1);
        clients.push(world.client());
        for step in 1..=3u64 {
            let before = pulled(&world);
            write(&learners[0], 1.0, 0..BYTES / 2);
            wait_for_pulled(&world, before + 2 * (BYTES / 2 - KEPT));
            assert_eq!(clients[1].version(), Version(step - 1), "{way:?}: nothing is committed");
            write(&learners[0], 1.0, BYTES / 2..BYTES);
            assert_eq!(commit(&learners[0]), Ok(()));
            until("the version is shown", || clients[1].version() >= Version(step));
            is_all(&read(&clients[1], Version(step)).1, step as f32);
            pull(&clients[0], &learners[0]);
            assert_eq!(pulled(&world), before + 2 * BYTES, "{way:?}: no block comes twice");
        }
    }
}

#[test]
fn blocks_of_a_dropped_contribution_are_never_shown() {
    for way in WAYS {
        let (world, clients, learners) = learners(way, 2, 1);
        for step in 1..=6u64 {
            // Plans that were dropped make the next ones wait for commits, so not all of these send something.
            let before = pulled(&world);
            write(&learners[0], 1000.0, 0..BYTES);
            if step == 1 {
                wait_for_pulled(&world, before + BYTES / 4);
            }
            assert!(learners[0].abort());
            write(&learners[0], 1.0, 0..BYTES);
            assert_eq!(commit(&learners[0]), Ok(()));
            sees(&clients[0], &learners[0], step, step as f32);
        }
    }
}

/// More than the sockets of a connection hold.
const MANY: usize = 768;

fn is_quiet(raw: &Raw) -> bool {
    raw.stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let is_quiet = raw.stream.peek(&mut [0]).is_err();
    raw.stream.set_read_timeout(Some(LONG)).unwrap();
    is_quiet
}

/// A learner's version 1 of many blocks, which a plan has made, and two connections of a client that shows nothing.
fn followable() -> (World, Client, Learner, [Raw; 2]) {
    let settings = [("reducer", "sum"), ("learners", "1")];
    let world = World::new(1, (MANY * BLOCK as usize) as u64, &settings, WAYS[0]);
    let (client, learner) = world.learner("l");
    learner.pushes(1.0);
    let connections = [(); 2].map(|()| Raw::welcomed(&world, Role::Data, 77));
    (world, client, learner, connections)
}

/// The blocks of a plan that have come, each once.
struct Came {
    plan: PlanId,
    blocks: Vec<bool>,
}

impl Came {
    fn new(plan: PlanId) -> Came {
        Came { plan, blocks: vec![false; MANY] }
    }

    /// The next message; returns what is not about blocks of the plan.
    fn next(&mut self, raw: &mut Raw) -> Option<Message> {
        let (received, payload) = raw.receive();
        match received.message {
            Message::BlockAhead { plan, block } if plan == self.plan => {
                assert!(
                    !std::mem::replace(&mut self.blocks[block.index()], true),
                    "block {block} comes again"
                );
                let values =
                    payload.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
                assert!({ values }.all(|value| value == plan.0 as f32));
                None
            }
            Message::Park { .. } | Message::Ping | Message::Pong => None,
            other => Some(other),
        }
    }

    /// The next message that is not about blocks of the plan.
    fn other(&mut self, raw: &mut Raw) -> Message {
        loop {
            if let Some(other) = self.next(raw) {
                return other;
            }
        }
    }
}

/// Makes one more version, while the client that is spoken for by hand gives signs of life.
fn push(learner: &Learner, raw: &mut Raw) {
    let outcome = learner.push(1.0);
    let until = Instant::now() + LONG;
    loop {
        raw.say(0, &Message::Ping);
        match outcome.recv_timeout(Duration::from_secs(1)) {
            Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
            outcome => return assert_eq!(outcome.unwrap(), Ok(Message::Done)),
        }
    }
}

#[test]
fn a_client_that_follows_another_plan_gets_no_block_of_the_one_before_again() {
    let (_world, _client, _learner, [mut one, mut other]) = followable();
    let (mut came, next) = (Came::new(PlanId(1)), PlanId(2));
    one.say(0, &Message::Follow { plan: came.plan, base: None });
    (0..10).for_each(|_| assert_eq!(came.next(&mut one), None));
    other.say(0, &Message::Follow { plan: next, base: None });
    // The shard answers in order.
    other.say(0, &Message::Probe { plan: came.plan });
    while !matches!(other.receive().0.message, Message::Missing { .. }) {}
    while !is_quiet(&one) {
        assert_eq!(came.next(&mut one), None);
    }
}

#[test]
fn a_slow_client_gets_all_blocks_of_a_version_that_is_no_longer_the_newest() {
    let (_world, _client, learner, [mut one, _other]) = followable();
    let mut came = Came::new(PlanId(1));
    one.say(0, &Message::Follow { plan: came.plan, base: None });
    (0..10).for_each(|_| assert_eq!(came.next(&mut one), None));
    push(&learner, &mut one);
    let until = Instant::now() + LONG;
    while !came.blocks.iter().all(|came| *came) {
        assert!(
            Instant::now() < until,
            "{} blocks have come",
            came.blocks.iter().filter(|came| **came).count()
        );
        assert_eq!(came.next(&mut one), None);
    }
    // Versions that are gone are named.
    for _ in 0..4 {
        push(&learner, &mut one);
    }
    let gone = PlanId(2);
    one.say(0, &Message::Follow { plan: gone, base: None });
    let refusal = Refusal::NoVersion { wanted: Version(2), newest: Version(6) };
    assert_eq!(Came::new(gone).other(&mut one), Message::Refused(refusal));
    // A client that pulls does not wait for what it follows any more.
    let newest = PlanId(6);
    one.say(0, &Message::Follow { plan: newest, base: None });
    (0..10).for_each(|_| assert_eq!(Came::new(newest).next(&mut one), None));
    one.say(0, &Message::Pull { version: Version(6), blocks: 0..1, base: None });
    let (mut ahead, mut pulled) = (10, false);
    while !pulled || !is_quiet(&one) {
        match one.receive().0.message {
            Message::BlockAhead { .. } => ahead += 1,
            Message::Block { .. } => pulled = true,
            _ => {}
        }
    }
    assert!(ahead < MANY as u32);
}
