//! Blocks of a mapped contribution that its program declares final go to the shards before its fsync.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use libmodelio::contributor::{ContributeError, Contributor, Share};
use libmodelio::tracker::WriteRefused;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::Message;

use crate::ahead::{BYTES, commit, contributor, one, pull, sees, wait_for_pushed, ways, world, write};
use crate::payload::of_shard;
use crate::shm::Raw;
use crate::world::{BLOCK, Client, LONG, Way, World, is_all};

/// Stores a value into a part of the mapping, as a program does.
fn store(contributor: &Contributor, value: f32, part: Range<u64>) {
    let part = part.start as usize / 4..part.end as usize / 4;
    // SAFETY: what others read meanwhile, they read as memory that a program may change.
    unsafe { contributor.mapped().memory().floats_mut(part) }.fill(value);
}

fn declare(contributor: &Contributor, part: Range<u64>) -> Result<(), ContributeError> {
    contributor.declare_final(part.start, part.end - part.start, true)
}

fn begin_commit(contributor: &Arc<Contributor>, timeout: Duration) -> Receiver<Result<(), ContributeError>> {
    let (sender, receiver) = channel();
    contributor.commit_mapped(timeout, move |result| drop(sender.send(result)));
    receiver
}

/// As an fsync of the mapping.
fn commit_mapped(contributor: &Arc<Contributor>) -> Result<(), ContributeError> {
    begin_commit(contributor, LONG).recv_timeout(2 * LONG).unwrap()
}

/// One that maps and one that writes, on one client or two.
fn two(way: Way, is_shared: bool) -> (World, Vec<Client>, [Arc<Contributor>; 2]) {
    let world = world("2", way);
    let clients: Vec<Client> = (0..2 - usize::from(is_shared)).map(|_| world.client()).collect();
    let mapped = contributor(&clients[0], "mapped");
    let written = contributor(clients.last().unwrap(), "written");
    (world, clients, [mapped, written])
}

#[test]
fn blocks_come_before_the_fsync_and_are_sent_once() {
    for way in ways() {
        let (world, client, learner) = one(way);
        for step in 1..=4u64 {
            store(&learner, 1.0, 0..BYTES);
            // Whole blocks; halves in any order, the second of which completes blocks; and ranges that overlap.
            declare(&learner, 0..BYTES / 2).unwrap();
            let half = u64::from(BLOCK) / 2;
            for at in (BYTES / 2 / half..BYTES / half).rev() {
                declare(&learner, at * half..(at + 1) * half).unwrap();
            }
            declare(&learner, 100..BYTES - 100).unwrap();
            wait_for_pushed(&world, step * BYTES);
            assert_eq!(client.version(), Version(step - 1), "{way:?}: fsync has not been called");
            assert_eq!(commit_mapped(&learner), Ok(()));
            sees(&client, &learner, step, step as f32);
            assert_eq!(of_shard(&world).pushed_bytes, step * BYTES, "{way:?}: nothing is sent twice");
        }
    }
}

#[test]
fn blocks_that_are_covered_in_part_wait_for_the_fsync() {
    for way in ways() {
        let (world, client, learner) = one(way);
        store(&learner, 1.0, 0..BYTES);
        for at in (0..BYTES).step_by(BLOCK as usize) {
            declare(&learner, at + 1..at + u64::from(BLOCK)).unwrap();
        }
        declare(&learner, 0..8 * u64::from(BLOCK)).unwrap();
        wait_for_pushed(&world, 8 * u64::from(BLOCK));
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(of_shard(&world).pushed_bytes, 8 * u64::from(BLOCK), "{way:?}");
        store(&learner, 2.0, 8 * u64::from(BLOCK)..BYTES);
        assert_eq!(commit_mapped(&learner), Ok(()));
        let (_, weights) = pull(&client, &learner);
        is_all(&weights[..2 * BLOCK as usize], 1.0);
        is_all(&weights[2 * BLOCK as usize..], 2.0);
    }
}

#[test]
fn a_mapped_and_a_written_contribution_are_sent_and_count_together() {
    for way in ways() {
        for is_shared in [false, true] {
            let (world, clients, [mapped, written]) = two(way, is_shared);
            for step in 1..=4u64 {
                let (before, sent) = (of_shard(&world).pushed_bytes, BYTES * clients.len() as u64);
                store(&mapped, 1.0, 0..BYTES);
                for part in [0..BYTES / 2, BYTES / 2..BYTES] {
                    declare(&mapped, part.clone()).unwrap();
                    write(&written, 2.0, part);
                }
                // Each client keeps up to three blocks for the commit.
                wait_for_pushed(&world, before + sent - 3 * (clients.len() as u64 - 1) * u64::from(BLOCK));
                assert_eq!(clients[0].version(), Version(step - 1), "{way:?}: nothing is committed");
                let outcome = begin_commit(&mapped, LONG);
                assert_eq!(commit(&written), Ok(()));
                assert_eq!(outcome.recv_timeout(2 * LONG).unwrap(), Ok(()), "{way:?}");
                // It is the program's again, whatever the shards still do.
                store(&mapped, 1000.0, 0..BYTES);
                sees(&clients[0], &mapped, step, 3.0 * step as f32);
                assert_eq!(of_shard(&world).pushed_bytes, before + sent, "{way:?}: nothing is sent twice");
            }
        }
    }
}

#[test]
fn blocks_that_are_forgotten_never_count() {
    for way in ways() {
        let (_world, client, learner) = one(way);
        for step in 1..=6u64 {
            for dropped in 0..3 {
                store(&learner, 1000.0, 0..BYTES);
                declare(&learner, 0..BYTES / (1 << dropped)).unwrap();
                match step % 2 {
                    0 => learner.forget_final(),
                    _ => assert!(!learner.abort(), "nothing was written"),
                }
            }
            store(&learner, 1.0, 0..BYTES);
            declare(&learner, 0..BYTES / 2).unwrap();
            assert_eq!(commit_mapped(&learner), Ok(()));
            sees(&client, &learner, step, step as f32);
        }
    }
}

#[test]
fn what_is_written_counts_and_not_what_was_declared_before() {
    for way in ways() {
        let (_world, client, learner) = one(way);
        for step in 1..=4u64 {
            store(&learner, 1000.0, 0..BYTES);
            declare(&learner, 0..BYTES).unwrap();
            write(&learner, 1.0, 0..BYTES / 2);
            assert_eq!(declare(&learner, 0..BYTES), Err(ContributeError::Writing));
            write(&learner, 1.0, BYTES / 2..BYTES);
            assert_eq!(commit(&learner), Ok(()));
            sees(&client, &learner, step, step as f32);
        }
        store(&learner, 1.0, 0..BYTES);
        assert_eq!(commit_mapped(&learner), Ok(()));
        is_all(&pull(&client, &learner).1, 5.0);
    }
}

#[test]
fn nan_in_a_block_that_was_sent_is_reported_at_the_fsync() {
    for way in ways() {
        for is_shared in [false, true] {
            let (_world, clients, [mapped, written]) = two(way, is_shared);
            for step in 1..=3u64 {
                let bad = BlockId(step as u32);
                store(&mapped, 1.0, 0..BYTES);
                store(&mapped, f32::NAN, step * u64::from(BLOCK)..step * u64::from(BLOCK) + 4);
                assert_eq!(declare(&mapped, 0..BYTES), Ok(()), "nobody has read it yet");
                write(&written, 1.0, 0..BYTES);
                let outcome = begin_commit(&mapped, LONG);
                let other = written.clone();
                let other = std::thread::spawn(move || commit(&other));
                let said = outcome.recv_timeout(2 * LONG).unwrap();
                assert_eq!(said, Err(ContributeError::Shard(ShardError::NonFinite(bad))), "{way:?}");
                assert_eq!(clients[0].version(), Version(step - 1));
                store(&mapped, 1.0, 0..BYTES);
                assert_eq!(declare(&mapped, 0..BYTES / 2), Ok(()));
                assert_eq!(commit_mapped(&mapped), Ok(()), "{way:?}");
                assert_eq!(other.join().unwrap(), Ok(()), "the other one's counts");
                sees(&clients[0], &mapped, step, 2.0 * step as f32);
            }
        }
    }
}

/// The client sends the sums of its learners, and the shard does not search those.
#[test]
fn nan_is_found_where_only_one_of_a_clients_learners_has_written() {
    for way in ways() {
        for declares_all in [false, true] {
            let (_world, clients, [mapped, written]) = two(way, true);
            for step in 1..=3u64 {
                store(&mapped, 1.0, 0..BYTES);
                store(&mapped, f32::NAN, 5 * u64::from(BLOCK)..5 * u64::from(BLOCK) + 4);
                declare(&mapped, 0..if declares_all { BYTES } else { u64::from(BLOCK) }).unwrap();
                write(&written, 1.0, 0..u64::from(BLOCK));
                let other = Arc::clone(&written);
                let other = std::thread::spawn(move || commit(&other));
                // It waits for the one that is writing, so one plan has both.
                std::thread::sleep(Duration::from_millis(20));
                let nan = Err(ContributeError::Shard(ShardError::NonFinite(BlockId(5))));
                assert_eq!(commit_mapped(&mapped), nan, "{way:?}");
                store(&mapped, 1.0, 0..BYTES);
                assert_eq!(commit_mapped(&mapped), Ok(()), "{way:?}");
                assert_eq!(other.join().unwrap(), Ok(()), "{way:?}");
                let (version, weights) = pull(&clients[0], &mapped);
                pull(&clients[0], &written);
                assert_eq!(version, Version(step));
                is_all(&weights[..BLOCK as usize / 4], 2.0 * step as f32);
                is_all(&weights[BLOCK as usize / 4..], step as f32);
            }
        }
    }
}

#[test]
fn a_program_that_breaks_its_word_harms_only_itself() {
    for way in ways() {
        let (_world, clients, [breaks, other]) = two(way, false);
        for step in 1..=4u64 {
            store(&breaks, 1.0, 0..BYTES);
            declare(&breaks, 0..BYTES).unwrap();
            write(&other, 10.0, 0..BYTES);
            for value in 2..20 {
                store(&breaks, value as f32 % 2.0, 0..BYTES);
            }
            let outcome = begin_commit(&breaks, LONG);
            assert_eq!(commit(&other), Ok(()), "{way:?}");
            assert_eq!(outcome.recv_timeout(2 * LONG).unwrap(), Ok(()), "{way:?}");
            let (version, weights) = pull(&clients[1], &other);
            assert_eq!(version, Version(step));
            let from = 10.0 * step as f32;
            let strange = weights.iter().find(|&&weight| !(from..=from + step as f32).contains(&weight));
            assert_eq!(strange, None, "{way:?}");
        }
    }
}

#[test]
fn memory_that_changes_after_a_timeout_never_counts() {
    for (way, declared) in ways().into_iter().flat_map(|way| [(way, 0), (way, BYTES / 2)]) {
        let world = World::new(2, BYTES, &[("reducer", "sum"), ("learners", "1")], way);
        let client = world.client();
        let learner = contributor(&client, "l");
        store(&learner, 1.0, 0..BYTES);
        // Readers hold versions of the second shard, until it has no memory for another one: its blocks are read later.
        let mut readers = Vec::new();
        let (mut sum, late) = loop {
            assert!(readers.len() < 10, "as many versions as there are buffers are read");
            let mut raw = Raw::welcomed_by(&world, 1);
            let block = world.record.block_map().unwrap().blocks_of(world.shards()[1].shard).next().unwrap();
            let version = Version(readers.len() as u64);
            raw.say(Message::Pull { version, blocks: block.0..block.0 + 1, base: None });
            assert!(matches!(raw.receive().unwrap().message, Message::Share { .. }));
            readers.push(raw);
            readers.iter_mut().for_each(Raw::lives);
            declare(&learner, 0..declared).unwrap();
            match begin_commit(&learner, Duration::from_secs(1)).recv_timeout(LONG).unwrap() {
                Ok(()) => assert_eq!(pull(&client, &learner).0, Version(readers.len() as u64)),
                Err(late) => break (readers.len() as f32 - 1.0, late),
            }
        };
        assert!(matches!(late, ContributeError::Shard(ShardError::TimedOut(_))), "{late}");
        store(&learner, 1000.0, 0..BYTES);
        drop(readers);
        for _ in 0..3 {
            declare(&learner, 0..declared).unwrap();
            assert_eq!(commit_mapped(&learner), Ok(()), "{way:?}");
            sum += 1000.0;
            is_all(&pull(&client, &learner).1, sum);
        }
    }
}

#[test]
fn what_is_out_of_range_changes_nothing() {
    let (_world, client, learner) = one(ways()[0]);
    for (offset, len) in [(0, BYTES + 1), (BYTES, 1), (u64::MAX, 1), (1, u64::MAX)] {
        let refused = learner.declare_final(offset, len, true);
        assert!(
            matches!(refused, Err(ContributeError::Refused(WriteRefused::PastEnd { .. }))),
            "{refused:?}"
        );
    }
    assert_eq!(learner.declare_final(BYTES, 0, true), Ok(()));
    write(&learner, 1.0, 0..BYTES);
    assert_eq!(commit(&learner), Ok(()));
    let nothing = learner.write(&mut Share::None, 0, &[], LONG);
    assert_eq!(nothing.map(drop), Ok(()));
    is_all(&pull(&client, &learner).1, 1.0);
}
