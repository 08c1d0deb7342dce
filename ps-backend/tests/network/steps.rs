//! Steps of several learners on several clients.

use libmodelio::client::wait_for;
use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::controls::PullPolicy;
use libmodelio::vocabulary::ids::Version;

use crate::world::{LONG, Learner, Way, World, push_all, until};

const BYTES: u64 = 1_000_004;

pub const THREE_ARE_SUMMED: [(&str, &str); 2] = [("reducer", "sum"), ("learners", "3")];

pub fn sums_of_two_clients(way: Way, shards: usize) {
    sums_in(&World::new(shards, BYTES, &THREE_ARE_SUMMED, way));
}

/// Of a world with [`THREE_ARE_SUMMED`].
pub fn sums_in(world: &World) {
    let (a, b) = (world.client(), world.client());
    are_summed(&[Learner::join(&a, "a1"), Learner::join(&a, "a2"), Learner::join(&b, "b1")]);
}

/// All learners of a job.
fn are_summed(learners: &[Learner]) {
    let mut expected = 0.0;
    for step in 1..=5 {
        let values = (1..=learners.len() as u64).map(|of| (step * of) as f32);
        expected += values.clone().sum::<f32>();
        push_all(learners.iter().zip(values));
        learners.iter().for_each(|learner| learner.sees(step, expected));
    }
    learners.iter().for_each(Learner::leave);
}

/// Clients with one connection to each shard, and with more than there are threads.
pub fn one_connection_or_many(way: Way) {
    let world = World::new(2, BYTES, &[("reducer", "sum"), ("learners", "2")], way);
    let clients = [1, 7].map(|connections| world.client_with(|options| options.connections = connections));
    are_summed(&[Learner::join(&clients[0], "a"), Learner::join(&clients[1], "b")]);
}

#[test]
fn a_client_has_one_connection_or_many() {
    for way in [Way::Tcp(Choice::Auto), Way::Tcp(Choice::Poll), Way::Shm] {
        one_connection_or_many(way);
    }
}

#[test]
fn a_client_may_pull_only_what_it_waits_for() {
    let world = World::new(2, BYTES, &[("reducer", "sum"), ("learners", "1")], Way::Tcp(Choice::Auto));
    let lazy = world.client_with(|options| options.pulls = Some(PullPolicy::OnDemand));
    let eager = world.client();
    let learner = Learner::join(&lazy, "a");
    for step in 1..=2 {
        learner.pushes(1.0);
        // The other one knows the version, and has pulled it.
        until("the version is there", || eager.version() == Version(step));
        assert_eq!(lazy.version(), Version(0), "nobody has waited for version {step}");
    }
    learner.sees(2, 2.0);
    learner.pushes(1.0);
    until("word of version 3 comes", || lazy.state().version == Version(3));
    assert_eq!(wait_for(LONG, |done| lazy.await_newest(LONG, done)), Ok(Version(3)));
}
