//! New weights go to the shards, and to those who read them, while their program still writes them.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use libmodelio::client::Job;
use libmodelio::publisher::Publisher;
use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::meta::Meta;
use libmodelio::vocabulary::shard_error::ShardError;

use crate::ahead::{BYTES, commit, contributor, wait_for_pushed, ways, write};
use crate::payload::of_shard;
use crate::world::{BLOCK, Client, LONG, Way, World, is_all, read, until};

fn store(publisher: &Publisher, value: f32, part: std::ops::Range<u64>) {
    for start in part.clone().step_by(BLOCK as usize) {
        let len = u64::from(BLOCK).min(part.end - start);
        publisher.write(start, &value.to_le_bytes().repeat(len as usize / 4)).unwrap();
    }
}

fn publish(publisher: Publisher) -> Receiver<Result<(), ShardError>> {
    let (sender, receiver) = channel();
    publisher.commit(Meta::default(), LONG, move |result| drop(sender.send(result)));
    receiver
}

#[track_caller]
fn shows(client: &Job, version: u64, value: f32) {
    until("the version is shown", || client.version() >= Version(version));
    is_all(&read(client, Version(version)).1, value);
}

/// A model whose weights can be written, a client that writes them, and one that reads them.
fn two_clients(way: Way) -> (World, Client, Client) {
    let world = World::new(1, BYTES, &[("reducer", "assign")], way);
    let (writer, reader) = (world.client(), world.client());
    (world, writer, reader)
}

#[test]
fn new_weights_travel_while_they_are_written() {
    for way in ways() {
        let sends = matches!(way, Way::Tcp(_));
        let (world, writer, reader) = two_clients(way);
        for version in 1..=3u64 {
            let before = of_shard(&world);
            let publisher = Publisher::new(Arc::clone(&writer)).unwrap();
            store(&publisher, version as f32, 0..BYTES / 2);
            wait_for_pushed(&world, before.pushed_bytes + BYTES / 2);
            let wanted = before.pulled_bytes + BYTES / 2 - 3 * u64::from(BLOCK);
            until("it comes to the reader", || !sends || of_shard(&world).pulled_bytes >= wanted);
            assert_eq!((writer.version(), reader.version()), (Version(version - 1), Version(version - 1)));
            store(&publisher, version as f32, BYTES / 2..BYTES);
            assert_eq!(publish(publisher).recv_timeout(LONG).unwrap(), Ok(()));
            shows(&writer, version, version as f32);
            shows(&reader, version, version as f32);
            let after = of_shard(&world);
            assert_eq!(after.pushed_bytes - before.pushed_bytes, BYTES, "{way:?}: no block is sent twice");
        }
    }
}

#[test]
fn a_block_that_is_written_again_counts_as_it_was_written_last() {
    for way in ways() {
        let (world, writer, reader) = two_clients(way);
        for version in 1..=3u64 {
            let before = of_shard(&world).pushed_bytes;
            let publisher = Publisher::new(Arc::clone(&writer)).unwrap();
            store(&publisher, -1.0, 0..BYTES / 2);
            wait_for_pushed(&world, before + BYTES / 2);
            store(&publisher, version as f32, 0..BYTES);
            assert_eq!(publish(publisher).recv_timeout(LONG).unwrap(), Ok(()));
            shows(&writer, version, version as f32);
            shows(&reader, version, version as f32);
        }
    }
}

#[test]
fn threads_that_write_the_same_block_publish_what_one_of_them_wrote() {
    let (_world, writer, reader) = two_clients(Way::Tcp(Choice::Auto));
    for version in 1..=20u64 {
        let publisher = Publisher::new(Arc::clone(&writer)).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| store(&publisher, version as f32, 0..BYTES / 4));
            }
        });
        store(&publisher, version as f32, BYTES / 4..BYTES);
        assert_eq!(publish(publisher).recv_timeout(LONG).unwrap(), Ok(()));
        shows(&reader, version, version as f32);
    }
}

#[test]
fn weights_that_are_given_up_leave_nothing() {
    for way in ways() {
        let (world, writer, reader) = two_clients(way);
        for version in 1..=3u64 {
            let before = of_shard(&world).pushed_bytes;
            let given_up = Publisher::new(Arc::clone(&writer)).unwrap();
            store(&given_up, -1.0, 0..BYTES / 2);
            wait_for_pushed(&world, before + BYTES / 2);
            drop(given_up);
            let publisher = Publisher::new(Arc::clone(&writer)).unwrap();
            store(&publisher, version as f32, 0..BYTES);
            assert_eq!(publish(publisher).recv_timeout(LONG).unwrap(), Ok(()));
            shows(&reader, version, version as f32);
        }
    }
}

#[test]
fn contributions_do_not_wait_for_weights_that_are_still_written() {
    for way in ways() {
        let (world, writer, reader) = two_clients(way);
        let learner = contributor(&reader, "l");
        let before = of_shard(&world).pushed_bytes;
        let publisher = Publisher::new(Arc::clone(&writer)).unwrap();
        store(&publisher, 2.0, 0..BYTES / 2);
        wait_for_pushed(&world, before + BYTES / 2);
        write(&learner, 1.0, 0..BYTES);
        assert_eq!(commit(&learner), Ok(()));
        shows(&reader, 1, 1.0);
        store(&publisher, 2.0, BYTES / 2..BYTES);
        assert_eq!(publish(publisher).recv_timeout(LONG).unwrap(), Ok(()));
        shows(&reader, 2, 2.0);
    }
}
