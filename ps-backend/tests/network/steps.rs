//! Steps of several learners on several clients.

use std::sync::mpsc::channel;
use std::time::Duration;

use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::controls::PullPolicy;
use libmodelio::vocabulary::ids::Version;
use libmodelio::wire::Message;

use crate::world::{LONG, Learner, Way, World};

const BYTES: u64 = 1_000_004;

pub const THREE_ARE_SUMMED: [(&str, &str); 2] = [("reducer", "sum"), ("learners", "3")];

pub fn sums_of_two_clients(way: Way, shards: usize) {
    sums_in(&World::new(shards, BYTES, &THREE_ARE_SUMMED, way));
}

/// Of a world with [`THREE_ARE_SUMMED`].
pub fn sums_in(world: &World) {
    let (a, b) = (world.client(), world.client());
    let learners = [Learner::join(&a, "a1"), Learner::join(&a, "a2"), Learner::join(&b, "b1")];
    let mut expected = 0.0;
    for step in 1..=5 {
        let pushed: Vec<_> = learners.iter().zip(1..).map(|(l, n)| l.push((step * n) as f32)).collect();
        for answer in pushed {
            assert_eq!(answer.recv_timeout(LONG).unwrap(), Ok(Message::Done));
        }
        expected += (step * 6) as f32;
        for learner in &learners {
            let (version, weights) = learner.pull();
            assert_eq!(version, Version(step as u64));
            assert!(weights.iter().all(|&w| w == expected), "{:?} != {expected}", &weights[..4]);
        }
    }
    learners.iter().for_each(Learner::leave);
    a.shut_down();
    b.shut_down();
}

/// Clients with one connection to each shard, and with more than there are threads.
pub fn one_connection_or_many(way: Way) {
    let world = World::new(2, BYTES, &[("reducer", "sum"), ("learners", "2")], way);
    let clients = [1, 7].map(|connections| world.client_with(|options| options.connections = connections));
    let learners = [Learner::join(&clients[0], "a"), Learner::join(&clients[1], "b")];
    for step in 1..=4 {
        let pushed = learners.each_ref().map(|learner| learner.push(1.0));
        for answer in pushed {
            assert_eq!(answer.recv_timeout(LONG).unwrap(), Ok(Message::Done));
        }
        for learner in &learners {
            let (version, weights) = learner.pull();
            assert_eq!(version, Version(step));
            assert!(weights.iter().all(|&weight| weight == 2.0 * step as f32), "{:?}", &weights[..4]);
        }
    }
    learners.iter().for_each(Learner::leave);
    clients.iter().for_each(|client| client.shut_down());
}

#[test]
fn a_client_has_one_connection_or_many() {
    for way in [Way::Tcp(Choice::Auto), Way::Tcp(Choice::Poll), Way::Shm] {
        one_connection_or_many(way);
    }
}

#[test]
fn learners_on_two_clients_are_summed_over_io_uring() {
    sums_of_two_clients(Way::Tcp(Choice::Auto), 2);
}

#[test]
fn learners_on_two_clients_are_summed_over_plain_sockets() {
    sums_of_two_clients(Way::Tcp(Choice::Poll), 3);
}

#[test]
fn learners_on_two_clients_are_summed_over_shared_memory() {
    sums_of_two_clients(Way::Shm, 2);
}

pub fn a_late_one(way: Way) {
    let world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "2")], way);
    let (a, b) = (world.client(), world.client());
    let (first, late) = (Learner::join(&a, "first"), Learner::join(&b, "late"));
    assert_eq!(first.push(1.0).recv_timeout(LONG).unwrap(), Ok(Message::Done));
    assert_eq!(a.version(), Version(0));
    assert_eq!(late.push(2.0).recv_timeout(LONG).unwrap(), Ok(Message::Done));
    for learner in [&first, &late] {
        let (version, weights) = learner.pull();
        assert_eq!(version, Version(1));
        assert!(weights.iter().all(|&w| w == 3.0));
    }
}

#[test]
fn a_late_learner_does_not_hold_up_anothers_answer() {
    a_late_one(Way::Tcp(Choice::Auto));
    a_late_one(Way::Shm);
}

#[test]
fn a_client_may_pull_only_what_it_waits_for() {
    let world = World::new(2, BYTES, &[("reducer", "sum"), ("learners", "1")], Way::Tcp(Choice::Auto));
    let (lazy, eager) = (world.client_that(Some(PullPolicy::OnDemand)), world.client());
    let learner = Learner::join(&lazy, "a");
    for step in 1..=2 {
        assert_eq!(learner.push(1.0).recv_timeout(LONG).unwrap(), Ok(Message::Done));
        // The other one knows the version, and has pulled it.
        let end = std::time::Instant::now() + LONG;
        while eager.version() != Version(step) {
            assert!(std::time::Instant::now() < end, "version {step} does not come");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(lazy.version(), Version(0), "nobody has waited for version {step}");
    }
    let (version, weights) = learner.pull();
    assert_eq!(version, Version(2));
    assert!(weights.iter().all(|&w| w == 2.0));
    assert_eq!(learner.push(1.0).recv_timeout(LONG).unwrap(), Ok(Message::Done));
    let end = std::time::Instant::now() + LONG;
    while lazy.state().version != Version(3) {
        assert!(std::time::Instant::now() < end, "word of version 3 does not come");
        std::thread::sleep(Duration::from_millis(1));
    }
    let (sender, receiver) = channel();
    lazy.await_newest(LONG, Box::new(move |result| sender.send(result).unwrap()));
    assert_eq!(receiver.recv_timeout(2 * LONG).unwrap(), Ok(Version(3)));
}
