//! Blocks that are the same in two versions: a shard names them, and a client that reads its memory does not read them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::channel;

use libmodelio::client::Job;
use libmodelio::publisher::Publisher;
use libmodelio::transport::reactor::Choice;
use libmodelio::transport::tally::Payloads;
use libmodelio::vocabulary::controls::PullPolicy;
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::meta::Meta;
use libmodelio::wire::{Message, Refusal, Role};

use crate::raw::Raw;
use crate::world::{BLOCK, LONG, Way, World, read, until};

const BLOCKS: u32 = 40;
/// The last block is shorter.
const BYTES: u64 = BLOCKS as u64 * BLOCK as u64 - 1000;

fn world(shards: usize, way: Way) -> World {
    World::new(shards, BYTES, &[("reducer", "assign"), ("changes", "4")], way)
}

/// The weights of the newest version, and who publishes them.
struct Publishes {
    writer: Arc<Job>,
    weights: Vec<f32>,
    version: u64,
}

impl Publishes {
    fn new(writer: &Arc<Job>) -> Publishes {
        Publishes { writer: Arc::clone(writer), weights: vec![0.0; BYTES as usize / 4], version: 0 }
    }

    /// Publishes all weights, of which one in each of these blocks is another one than before.
    fn changes(&mut self, blocks: &[u32]) {
        self.version += 1;
        for block in blocks {
            self.weights[(block * BLOCK / 4) as usize + 100] = self.version as f32;
        }
        let bytes: Vec<u8> = self.weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        let publisher = Publisher::new(Arc::clone(&self.writer)).unwrap();
        for (block, bytes) in (0..).zip(bytes.chunks(BLOCK as usize)) {
            publisher.write(block * u64::from(BLOCK), bytes).unwrap();
        }
        let (sender, receiver) = channel();
        publisher.commit(Meta::default(), LONG, move |result| drop(sender.send(result)));
        receiver.recv_timeout(LONG).unwrap().unwrap();
    }
}

/// All blocks but these.
fn but(changed: &[u32]) -> BTreeSet<u32> {
    (0..BLOCKS).filter(|block| !changed.contains(block)).collect()
}

fn ask(raw: &mut Raw, version: u64, base: u64) {
    raw.say(0, &Message::WhichChanged { version: Version(version), base: Version(base) });
}

/// The blocks that are called unchanged.
fn unchanged(raw: &mut Raw, version: u64, base: u64) -> BTreeSet<u32> {
    let answer = raw.receive_of(|message| matches!(message, Message::Unchanged { .. })).0.message;
    match answer {
        Message::Unchanged { version: of, base: since, blocks } => {
            assert_eq!((of, since), (Version(version), Version(base)));
            blocks.into_iter().flatten().collect()
        }
        other => unreachable!("{other:?}"),
    }
}

#[test]
fn a_shard_says_which_blocks_have_not_changed() {
    let world = world(1, Way::Tcp(Choice::Auto));
    let writer = world.client();
    let mut publishes = Publishes::new(&writer);
    let mut raw = Raw::welcomed(&world, Role::Data, 7);
    // Version 1 is not here yet: the answer comes when it is.
    ask(&mut raw, 1, 0);
    publishes.changes(&[0, 7, 8]);
    assert_eq!(unchanged(&mut raw, 1, 0), but(&[0, 7, 8]));
    let mut said = |version, base| {
        ask(&mut raw, version, base);
        unchanged(&mut raw, version, base)
    };
    publishes.changes(&[8, 39]);
    assert_eq!(said(2, 1), but(&[8, 39]));
    assert_eq!(said(2, 0), but(&[0, 7, 8, 39]));
    publishes.changes(&[]);
    assert_eq!(said(3, 0), but(&[0, 7, 8, 39]));
    assert_eq!(said(3, 2), but(&[]));
    // Of these the shard knows nothing: the same version, a newer one, and one that there is not.
    for base in [3, 4, u64::MAX] {
        assert!(said(3, base).is_empty(), "{base}");
    }
    // The records of four versions are kept.
    (0..3).for_each(|_| publishes.changes(&[1]));
    assert_eq!(said(6, 2), but(&[1]));
    assert!(said(6, 1).is_empty());
    ask(&mut raw, 1, 0);
    let refusal = Refusal::NoVersion { wanted: Version(1), newest: Version(6) };
    assert_eq!(raw.refusal(), refusal);
    // The connection goes on, and so many questions at once are too many.
    ask(&mut raw, 6, 5);
    assert_eq!(unchanged(&mut raw, 6, 5), but(&[1]));
    (0..=256).for_each(|_| ask(&mut raw, 9, 6));
    let refusal = raw.refusal().to_string();
    assert!(refusal.contains("more than 256 pulls"), "{refusal}");
}

#[test]
fn blocks_that_have_not_changed_are_not_read_by_rdma() {
    let Some(way) = Way::rdma() else { return };
    let world = world(2, way);
    let (writer, reader) = (world.client(), world.client());
    let lags = world.client_with(|options| options.pulls = Some(PullPolicy::OnDemand));
    let mut publishes = Publishes::new(&writer);
    let moved = |client: &Job, before: Payloads| {
        let now = client.payload().unwrap();
        assert_eq!(now.pull_copied_bytes, 0, "blocks come through the ring");
        (now.pulled_bytes - before.pulled_bytes, now.pull_patched_bytes - before.pull_patched_bytes)
    };
    let of_changed = |blocks: &[u32]| {
        let short = if blocks.contains(&(BLOCKS - 1)) { 1000 } else { 0 };
        let bytes = blocks.len() as u64 * u64::from(BLOCK) - short;
        (bytes, BYTES - bytes)
    };
    until("versions are shown", || [&reader, &lags].iter().all(|client| !client.versions().is_empty()));
    let all: Vec<u32> = (0..BLOCKS).collect();
    let each: [&[u32]; 7] = [&[0, 7, 8], &[39], &[], &[20], &all, &[0], &[1, 21, 39]];
    let mut held = Vec::new();
    for (number, changed) in (1..).map(Version).zip(each) {
        let before = reader.payload().unwrap();
        publishes.changes(changed);
        until("it is shown", || reader.version() == number);
        assert!(read(&reader, number).1 == publishes.weights, "{number}");
        assert_eq!(moved(&reader, before), of_changed(changed), "{number}");
        // Two older versions are held by somebody, so that other buffers take their turns.
        assert!(reader.pin(number));
        held.push((number, publishes.weights.clone()));
        if held.len() > 2 {
            let (number, weights) = held.remove(0);
            assert!(read(&reader, number).1 == weights, "{number}");
            reader.unpin(number, 1);
        }
    }
    let newest = |client: &Job| {
        let (sender, receiver) = channel();
        client.await_newest(LONG, Box::new(move |result| drop(sender.send(result))));
        receiver.recv_timeout(2 * LONG).unwrap().unwrap()
    };
    // What the shards do not know any more comes on the whole, and what has changed in several versions once.
    let before = lags.payload().unwrap();
    assert_eq!(newest(&lags), Version(7));
    assert!(read(&lags, Version(7)).1 == publishes.weights);
    assert_eq!(moved(&lags, before), (BYTES, 0));
    for changed in [&[3, 4], &[3, 30], &[3, 31]] {
        publishes.changes(changed);
    }
    let before = lags.payload().unwrap();
    assert_eq!(newest(&lags), Version(10));
    assert!(read(&lags, Version(10)).1 == publishes.weights);
    assert_eq!(moved(&lags, before), of_changed(&[3, 4, 30, 31]));
}
