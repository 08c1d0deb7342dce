//! Clients that only read: whole versions, or pieces of them without holding the model.

use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::bytes::changes::Changed;
use libmodelio::bytes::crc32c::crc32c;
use libmodelio::client::{Event, wait_for};
use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::ids::{ClientId, Generation, Version};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::vocabulary::strided::Strided;
use libmodelio::wire::{Message, Refusal};

use crate::world::{BLOCK, Client, LONG, Way, World, until};

/// Several requests to each shard.
const BYTES: u64 = 5_000_004;
const SETTINGS: &[(&str, &str)] = &[("reducer", "sum"), ("learners", "1")];

fn ask(peer: &mut AdminPeer, world: &World, version: u64, part: Strided) -> Result<Vec<u8>, AdminError> {
    let (generation, version) = (world.record.generation, Version(version));
    let ask = Message::ReadParts { generation, version, base: None, parts: vec![part] };
    match peer.request(&ask, &[], Instant::now() + LONG)? {
        (Message::PartBytes { patched: None }, bytes) => Ok(bytes),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_client_that_holds_nothing_follows_versions_and_reads_pieces_of_them() {
    for (shards, bytes, way) in [
        (2, BYTES, Way::Tcp(Choice::Auto)),
        (1, BYTES, Way::Shm),
        // Versions of so small a model come along with the state.
        (1, 100_000, Way::Tcp(Choice::Auto)),
    ] {
        let world = World::new(shards, bytes, SETTINGS, way);
        let onlooker = Client::of(world.onlooker());
        let (sender, events) = channel();
        let sender = Mutex::new(sender);
        onlooker.subscribe(Box::new(move |event| {
            let _ = sender.lock().unwrap().send(event);
        }));
        let (_client, learner) = world.learner("a");
        for version in 1..=3 {
            learner.makes(1.0, version, version as f32);
            until("the version", || onlooker.version() == Version(version));
            let mut read = vec![0; bytes as usize];
            let whole = [Strided::contiguous(0..bytes)];
            onlooker.read_parts(Version(version), &whole, &mut read, Instant::now() + LONG).unwrap();
            assert!(read.chunks(4).all(|weight| weight == (version as f32).to_le_bytes()));
            assert!(!onlooker.pin(Version(version)) && onlooker.get(Version(version)).is_none());
            assert!(onlooker.versions().is_empty() && onlooker.retained().is_empty());
            assert_eq!((onlooker.buffers(), onlooker.memory().versions), ((0, 0), 0));
            until("its event", || events.try_recv() == Ok(Event::Published(Version(version))));
        }
        assert_eq!(onlooker.payload().unwrap().pulled_bytes, 3 * bytes, "these bytes and no more");
    }
}

#[test]
fn a_client_that_holds_nothing_takes_no_learners_and_no_weights() {
    let world = World::new(1, BYTES, SETTINGS, Way::Tcp(Choice::Auto));
    let onlooker = Client::of(world.onlooker());
    let joined = wait_for(LONG, |done| onlooker.join("a".into(), LONG, done));
    let refused: Vec<ShardError> = [joined.map(drop), onlooker.may_assign(), onlooker.allocate().map(drop)]
        .map(Result::unwrap_err)
        .into();
    for error in refused {
        assert!(
            matches!(&error, ShardError::NotAllowed(why) if why.contains("need a mount of the model")),
            "{error}"
        );
    }
    world.serves();
}

#[test]
fn a_client_that_only_reads_holds_two_versions() {
    let world = World::new(2, BYTES, SETTINGS, Way::Tcp(Choice::Auto));
    let (writing, learner) = world.learner("a");
    let reading = world.client();
    let makes = |version: u64| {
        learner.makes(1.0, version, version as f32);
        until("the version", || reading.version() == Version(version));
        // A program has looked its name up.
        assert!(reading.look_up(Version(version)));
    };
    // The spare buffer is taken beside the first version.
    (1..=2).for_each(makes);
    for version in 3..=6 {
        makes(version);
        assert_eq!(reading.buffers().0, 2);
    }
    assert!(reading.open_version(Version(6)));
    (7..=9).for_each(makes);
    assert_eq!(reading.buffers().0, 3, "one is open");
    reading.close_version(Version(6));
    reading.forget(Version(6), 1);
    (10..=11).for_each(makes);
    assert_eq!(reading.buffers().0, 2);
    // Who has learners does not give up what the next step may need.
    assert!(writing.buffers().0 >= 2);
}

#[test]
fn a_version_stays_as_long_as_pieces_of_it_are_read() {
    let world = World::new(1, BYTES, SETTINGS, Way::Tcp(Choice::Auto));
    let (_client, learner) = world.learner("a");
    learner.makes(1.0, 1, 1.0);
    let address = world.address_of(world.record.coordinator);
    let mut peer = AdminPeer::connect(&address, Instant::now() + LONG).unwrap();
    let part = Strided { start: 8, run: 4, stride: u64::from(BLOCK), count: 5 };
    for version in 2..=6 {
        let begun = Instant::now();
        let read = ask(&mut peer, &world, 1, part);
        learner.makes(1.0, version, version as f32);
        // On a machine that stands still for so long, it may be gone.
        if version == 2 || begun.elapsed() < Duration::from_secs(1) {
            assert_eq!(read.unwrap(), 1f32.to_le_bytes().repeat(5));
        }
    }
    // It goes with the connection, or when another one is asked for.
    assert_eq!(ask(&mut peer, &world, 6, part).unwrap(), 6f32.to_le_bytes().repeat(5));
    learner.makes(1.0, 7, 7.0);
    learner.makes(1.0, 8, 8.0);
    let gone = ask(&mut peer, &world, 1, part);
    assert!(matches!(gone, Err(AdminError::Refusal(Refusal::NoVersion { .. }))), "{gone:?}");
}

#[test]
fn a_shard_refuses_pieces_that_are_not_its_own() {
    let world = World::new(2, BYTES, SETTINGS, Way::Tcp(Choice::Auto));
    let address = world.address_of(world.record.coordinator);
    let mut peer = AdminPeer::connect(&address, Instant::now() + LONG).unwrap();
    let outside = Strided { start: BYTES - 3, run: 4, stride: 4, count: 1 };
    let across = Strided::contiguous(0..2 * u64::from(BLOCK));
    let refusal = |peer: &mut AdminPeer, part| match ask(peer, &world, 0, part) {
        Err(AdminError::Refusal(refusal)) => refusal,
        other => panic!("{other:?}"),
    };
    assert_eq!(refusal(&mut peer, outside), Refusal::Shard(ShardError::OutOfRange));
    assert!(matches!(refusal(&mut peer, across), Refusal::NotMine { .. }));
    let too_many = Strided { start: 0, run: 1 << 19, stride: 1 << 19, count: 3 };
    assert!(
        matches!(ask(&mut peer, &world, 0, too_many), Err(AdminError::Request(_))),
        "neither end takes it"
    );
    let (generation, version) = (Generation(7), Version(0));
    let other = Message::ReadParts { generation, version, base: None, parts: vec![outside] };
    let other = peer.request(&other, &[], Instant::now() + LONG);
    assert!(matches!(other, Err(AdminError::Refusal(Refusal::NoModel(_)))), "{other:?}");
    world.serves();
}

#[test]
fn a_shard_keeps_no_piece_that_a_patch_does_not_make() {
    let world = World::new(1, BYTES, SETTINGS, Way::Tcp(Choice::Auto));
    let address = world.address_of(world.record.coordinator);
    let mut peer = AdminPeer::connect(&address, Instant::now() + LONG).unwrap();
    let (generation, epoch) = (world.record.generation, world.record.epoch);
    let piece = Strided::contiguous(8..1008);
    let (old, mut new) = ([0; 1000], [0; 1000]);
    new[400] = 1;
    let mut patch = Vec::new();
    assert!(Changed::between(&old, &new, 4).patch(&new, &mut patch));
    let mut write = |base: u64, crc: u32, payload: &[u8]| {
        let (client, patched, parts) = (ClientId(815), Some((Version(base), crc)), vec![piece]);
        let write = Message::WritePart { generation, epoch, client, token: 1, patched, parts };
        peer.request(&write, payload, Instant::now() + LONG)
    };
    let refused = |answer: Result<(Message, Vec<u8>), AdminError>| {
        assert!(matches!(answer, Err(AdminError::Refusal(Refusal::NoVersion { .. }))), "{answer:?}");
    };
    let right = crc32c(&new);
    refused(write(0, right ^ 1, &patch));
    refused(write(0, right, &patch[..patch.len() - 1]));
    refused(write(0, right, &[0xff; 40]));
    refused(write(9, right, &patch));
    // The connection is as good as before, and so is the part.
    assert!(matches!(write(0, right, &patch), Ok((Message::Done, _))));
    world.serves();
}
