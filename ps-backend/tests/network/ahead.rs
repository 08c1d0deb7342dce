//! Blocks of a contribution go to the shards while it is still being written.

use std::sync::Arc;
use std::sync::mpsc::channel;

use libmodelio::client::{Job, wait_for};
use libmodelio::contributor::{ContributeError, Contributor, Share};
use libmodelio::transport::rdma::Placement;
use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::ids::Version;

use crate::payload::of_shard;
use crate::world::{BLOCK, Client, LONG, Way, World, is_all, read, until};

pub const BYTES: u64 = 8 << 20;

/// By RDMA where there is a device; all the others elsewhere.
pub fn ways() -> Vec<Way> {
    if std::env::var_os("GRADFS_RDMA_ADDRESS").is_some() {
        let placed = Way::rdma_with(|options| options.placement = Placement::Static);
        let fetched = Way::rdma_with(|options| options.placement = Placement::Dynamic);
        return placed.into_iter().chain(fetched).collect();
    }
    vec![Way::Tcp(Choice::Auto), Way::Tcp(Choice::Poll), Way::Shm]
}

/// A program's way to contribute.
pub fn contributor(client: &Arc<Job>, name: &str) -> Arc<Contributor> {
    let who = wait_for(LONG, |done| client.join(name.into(), LONG, done)).unwrap();
    Arc::new(Contributor::new(Arc::clone(client), who, Arc::default()).unwrap())
}

/// Writes a value into a part of the contribution.
pub fn write(contributor: &Contributor, value: f32, part: std::ops::Range<u64>) {
    let bytes = value.to_le_bytes().repeat((part.end - part.start) as usize / 4);
    contributor.write(&mut Share::None, part.start, &bytes, LONG).unwrap();
}

pub fn commit(contributor: &Arc<Contributor>) -> Result<(), ContributeError> {
    let (sender, receiver) = channel();
    contributor.commit(Share::None, LONG, move |result| drop(sender.send(result)));
    receiver.recv_timeout(2 * LONG).unwrap()
}

/// The version with the last step of this contributor.
pub fn pull(client: &Job, contributor: &Contributor) -> (Version, Vec<f32>) {
    let version = wait_for(LONG, |done| client.await_step(contributor.learner(), LONG, done)).unwrap();
    read(client, version)
}

/// The version with the last step is this one, and all of it is `value`.
#[track_caller]
pub fn sees(client: &Job, contributor: &Contributor, version: u64, value: f32) {
    let (shown, weights) = pull(client, contributor);
    assert_eq!(shown, Version(version));
    is_all(&weights, value);
}

/// Waits until the shard has what is sent before the commit, if contributions of so many bytes are whole. A client
/// sends four blocks together, so up to three are left for the commit.
#[track_caller]
pub fn wait_for_pushed(world: &World, bytes: u64) {
    let bytes = bytes - 3 * u64::from(BLOCK);
    until("the bytes come", || of_shard(world).pushed_bytes >= bytes);
}

/// A contribution of ones makes this version of a model that began with zeros, and counts once.
#[track_caller]
fn counts_once(client: &Job, contributor: &Arc<Contributor>, step: u64) {
    write(contributor, 1.0, 0..BYTES);
    assert_eq!(commit(contributor), Ok(()));
    sees(client, contributor, step, step as f32);
}

/// As many learners add up what they bring.
pub fn world(learners: &str, way: Way) -> World {
    World::new(1, BYTES, &[("reducer", "sum"), ("learners", learners)], way)
}

/// A learner alone.
pub fn one(way: Way) -> (World, Client, Arc<Contributor>) {
    let world = world("1", way);
    let client = world.client();
    let learner = contributor(&client, "l");
    (world, client, learner)
}

#[test]
fn blocks_come_before_the_commit() {
    for way in ways() {
        let (world, client, learner) = one(way);
        for step in 1..=3 {
            // Blocks that are written whole, and blocks that become whole.
            write(&learner, 1.0, 0..BYTES / 2);
            for at in (BYTES / 2..BYTES).step_by(1 << 14) {
                write(&learner, 1.0, at..at + (1 << 14));
            }
            wait_for_pushed(&world, step * BYTES);
            assert_eq!(client.version(), Version(step - 1), "{way:?}: it is not committed");
            let again = learner.write(&mut Share::None, 0, &[0; 4], LONG);
            assert!(matches!(again, Err(ContributeError::Refused(_))), "{again:?}");
            assert_eq!(commit(&learner), Ok(()));
            sees(&client, &learner, step, step as f32);
        }
    }
}

#[test]
fn the_others_of_a_client_that_have_committed_count_with_what_is_sent_ahead() {
    for way in ways() {
        let world = world("2", way);
        let client = world.client();
        let [first, last] = ["a", "b"].map(|name| contributor(&client, name));
        for step in 1..=3u64 {
            write(&first, 1.0, 0..BYTES);
            assert_eq!(commit(&first), Ok(()));
            let before = of_shard(&world).pushed_bytes;
            write(&last, 2.0, 0..BYTES / 2);
            wait_for_pushed(&world, before + BYTES / 2);
            assert_eq!(commit(&last), Ok(()));
            let (version, weights) = pull(&client, &first);
            pull(&client, &last);
            assert_eq!(version, Version(step));
            is_all(&weights[..BYTES as usize / 8], 3.0 * step as f32);
            is_all(&weights[BYTES as usize / 8..], step as f32);
        }
    }
}

#[test]
fn dropped_blocks_that_were_sent_ahead_never_count() {
    for way in ways() {
        let (_world, client, learner) = one(way);
        for step in 1..=8u64 {
            // Blocks of these are on their way, or wait at the shard, when they are dropped.
            for dropped in 0..3 {
                write(&learner, 1000.0, 0..BYTES / (1 << dropped));
                assert!(learner.abort());
            }
            counts_once(&client, &learner, step);
        }
    }
}

pub fn set_lease(client: &Job, seconds: &str) {
    let (sender, receiver) = channel();
    client.set_control("lease", seconds, LONG, Box::new(move |outcome| drop(sender.send(outcome))));
    assert_eq!(receiver.recv_timeout(2 * LONG).unwrap().map_err(|error| error.to_string()), Ok(()));
}

#[test]
fn blocks_that_a_dead_client_sent_ahead_never_count() {
    for way in ways() {
        let world = world("1", way);
        let dying = world.client();
        let learner = contributor(&dying, "dies");
        write(&learner, 1000.0, 0..BYTES / 2);
        wait_for_pushed(&world, BYTES / 2);
        // Not before, and not shorter: a machine that is busy may be silent for seconds, and alive.
        set_lease(&dying, "4");
        drop(learner);
        dying.dies();
        let client = world.client();
        let learner = contributor(&client, "lives");
        for step in 1..=2 {
            counts_once(&client, &learner, step);
        }
    }
}

/// One learner has written half of its contribution, which the shard has. Then another one contributes.
#[test]
fn a_slow_writer_holds_nobody_up_with_a_quorum_and_in_an_asynchronous_job() {
    let jobs = ways().into_iter().flat_map(|way| {
        [("quorum(1)", false), ("quorum(1)", true), ("async", false), ("async", true)]
            .map(|(consistency, shared)| (way, consistency, shared))
    });
    for (way, consistency, shared) in jobs {
        let settings =
            [("reducer", "sum"), ("learners", "1"), ("consistency", consistency), ("read_own_step", "true")];
        let world = World::new(1, BYTES, &settings, way);
        let (client, other) = (world.client(), world.client());
        let slow = contributor(&client, "slow");
        write(&slow, 100.0, 0..BYTES / 2);
        wait_for_pushed(&world, BYTES / 2);
        let of_quick = if shared { &client } else { &other };
        let quick = contributor(of_quick, "quick");
        for step in 1..=3 {
            counts_once(of_quick, &quick, step);
        }
        write(&slow, 100.0, BYTES / 2..BYTES);
        assert_eq!(commit(&slow), Ok(()), "{way:?}");
        sees(&client, &slow, 4, 103.0);
        // Blocks that were sent in vain may still be read, so the next contribution lies elsewhere.
        write(&slow, 100.0, 0..BYTES);
        assert_eq!(commit(&slow), Ok(()), "{way:?}");
        is_all(&pull(&client, &slow).1, 203.0);
    }
}

#[test]
fn new_weights_do_not_wait_for_a_slow_writer() {
    for way in ways() {
        let (world, client, slow) = one(way);
        write(&slow, 100.0, 0..BYTES / 2);
        wait_for_pushed(&world, BYTES / 2);
        let buffer = client.allocate().unwrap();
        // SAFETY: the buffer is this test's until it is published.
        unsafe { buffer.memory().floats_mut(0..BYTES as usize / 4) }.fill(5.0);
        let published =
            wait_for(LONG, |done| client.assign(buffer, std::slice::from_ref(&(0..BYTES)), LONG, done));
        assert_eq!(published, Ok(()), "{way:?}");
        write(&slow, 100.0, BYTES / 2..BYTES);
        assert_eq!(commit(&slow), Ok(()), "{way:?}");
        sees(&client, &slow, 2, 105.0);
    }
}
