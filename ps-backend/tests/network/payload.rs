//! What CPUs copy of payload on its way is counted, and differs with the way.

use libmodelio::transport::reactor::Choice;
use libmodelio::transport::tally::Payloads;

use crate::world::{Learner, Way, World};

const BYTES: u64 = 1_000_004;
const STEPS: u64 = 3;
const ALL: u64 = STEPS * BYTES;

/// What a client and its shard have counted after some steps of a learner.
fn counted(way: Way) -> (Payloads, Payloads) {
    counted_with(1, way)
}

/// The same, of the client and the first of so many shards.
fn counted_with(shards: usize, way: Way) -> (Payloads, Payloads) {
    let world = World::new(shards, BYTES, &[("reducer", "sum"), ("learners", "1")], way);
    let (client, learner) = world.learner("l");
    let before = client.payload().unwrap();
    assert_eq!(before.pulled_bytes, BYTES, "the first version");
    for step in 1..=STEPS {
        learner.makes(1.0, step, step as f32);
    }
    let after = client.payload().unwrap();
    let ours = Payloads {
        pulled_bytes: after.pulled_bytes - before.pulled_bytes,
        pull_copied_bytes: after.pull_copied_bytes - before.pull_copied_bytes,
        ..after
    };
    (ours, of_shard(&world))
}

pub fn of_shard(world: &World) -> Payloads {
    let status = world.servers[0].status();
    let counts = &status["models"][0]["payload"];
    let count = |name: &str| counts[name].as_u64().unwrap_or_else(|| panic!("no {name} in {status}"));
    Payloads {
        pushed_bytes: count("pushed_bytes"),
        push_copied_bytes: count("push_copied_bytes"),
        push_stored_bytes: count("push_stored_bytes"),
        pulled_bytes: count("pulled_bytes"),
        pull_copied_bytes: count("pull_copied_bytes"),
        pull_patched_bytes: count("pull_patched_bytes"),
        unchecked_bytes: count("unchecked_bytes"),
    }
}

/// All pushed blocks came, some perhaps twice: a block that must wait may be sent again.
fn pushed_and_pulled(counts: &Payloads, pulled: u64) {
    assert!(counts.pushed_bytes >= ALL, "{counts:?}");
    assert_eq!(counts.pulled_bytes, pulled, "{counts:?}");
}

#[test]
fn over_shared_memory_no_byte_of_a_model_with_one_shard_is_copied() {
    let (ours, shards) = counted(Way::Shm);
    pushed_and_pulled(&ours, ALL);
    assert_eq!((ours.push_copied_bytes, ours.pull_copied_bytes), (0, 0));
    pushed_and_pulled(&shards, shards.pulled_bytes);
    assert!(shards.pulled_bytes >= ALL + BYTES, "{shards:?}");
    assert_eq!((shards.push_copied_bytes, shards.pull_copied_bytes), (0, 0));
}

#[test]
fn over_shared_memory_each_pulled_byte_of_several_shards_is_copied_once_and_no_pushed_one() {
    let (ours, shards) = counted_with(2, Way::Shm);
    pushed_and_pulled(&ours, ALL);
    assert_eq!((ours.push_copied_bytes, ours.pull_copied_bytes), (0, ours.pulled_bytes));
    assert_eq!((shards.push_copied_bytes, shards.pull_copied_bytes), (0, 0));
}

#[test]
fn over_tcp_the_kernel_copies_all_but_what_comes_with_the_head_of_a_frame() {
    let (ours, shards) = counted(Way::Tcp(Choice::Auto));
    pushed_and_pulled(&ours, ALL);
    assert_eq!((ours.push_copied_bytes, shards.pull_copied_bytes), (0, 0));
    for copied in [ours.pull_copied_bytes, shards.push_copied_bytes] {
        assert!(copied < ALL / 200, "{copied} of {ALL}");
    }
}

/// What a shard has counted of steps to which two clients contribute: the first of them to a sum.
fn of_two(way: Way) -> Payloads {
    let world = World::new(1, BYTES, &[("reducer", "sum"), ("learners", "2")], way);
    let clients = [(); 2].map(|()| world.client());
    let learners = [Learner::join(&clients[0], "a"), Learner::join(&clients[1], "b")];
    for step in 1..=STEPS {
        for learner in &learners {
            learner.pushes(step as f32);
        }
        learners[0].sees(step, (step * (step + 1)) as f32);
        // A step is over for the other one when that has its version.
        learners[1].pull();
    }
    of_shard(&world)
}

#[test]
fn the_first_contribution_comes_straight_into_the_sum() {
    for way in [Way::Tcp(Choice::Auto), Way::Tcp(Choice::Poll)] {
        assert_eq!(of_two(way).push_stored_bytes, ALL, "{way:?}");
    }
    // It is read where it lies.
    assert_eq!(of_two(Way::Shm).push_stored_bytes, 0);
}

#[test]
fn the_first_contribution_is_fetched_straight_into_the_sum() {
    use libmodelio::transport::rdma::{Endpoint, Placement};
    use libmodelio::wire::Protocol;

    let Some(way) = Way::rdma_with(|options| options.placement = Placement::Dynamic) else { return };
    // With iWARP peers may write what READs fill.
    let is_iwarp =
        Endpoint::open(&way.options().0.rdma_options, Protocol::NEWEST.number()).unwrap().device().is_iwarp();
    let stored = of_two(way).push_stored_bytes;
    // A block that is named before the shard knows its plan may be in a slot when the plan begins.
    // And only the first step registers the sum.
    assert!(if is_iwarp { stored == 0 } else { (BYTES / 2..=ALL).contains(&stored) }, "{stored} of {ALL}");
}

#[test]
fn by_rdma_no_cpu_copies_anything() {
    use libmodelio::transport::rdma::{Placement, RdmaOptions};

    let placed: fn(&mut RdmaOptions) = |options| options.placement = Placement::Static;
    let fetched: fn(&mut RdmaOptions) = |options| options.placement = Placement::Dynamic;
    for way in [placed, fetched].into_iter().filter_map(Way::rdma_with) {
        let (ours, shards) = counted(way);
        pushed_and_pulled(&ours, ALL);
        assert_eq!((ours.push_copied_bytes, ours.pull_copied_bytes), (0, 0));
        // It does not see who reads.
        pushed_and_pulled(&shards, 0);
        assert_eq!((shards.push_copied_bytes, shards.pull_copied_bytes), (0, 0));
    }
}
