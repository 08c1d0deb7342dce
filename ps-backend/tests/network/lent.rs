//! Memory of a program's is lent to shards until its commit is answered, and no longer.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::region::{Region, RegionKey};
use libmodelio::client::CommitNotice;
use libmodelio::transport::rdma::{Placement, RdmaOptions};
use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::ids::{Step, Version};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::Message;

use crate::shm::Raw;
use crate::world::{LONG, Learner, Way, World, ask};

const BYTES: u64 = 16 << 20;

/// What a program has mapped, and contributes by a call that it waits for.
struct Mapped<'a> {
    learner: &'a Learner,
    region: Region,
}

impl<'a> Mapped<'a> {
    fn new(learner: &'a Learner) -> Mapped<'a> {
        let memory = Mapping::memfd("mapped", learner.client.layout().size() as usize).unwrap();
        Mapped { learner, region: Region::new(Arc::new(memory), RegionKey(1 << 40)) }
    }

    /// Stores a value everywhere.
    fn store(&self, value: f32) {
        // SAFETY: what shards read meanwhile they find out to be no longer lent.
        unsafe { self.region.memory().floats_mut(0..BYTES as usize / 4) }.fill(value);
    }

    /// As an fsync of the mapping.
    fn commit(&self, timeout: Duration) -> Result<(), ShardError> {
        let (learner, client) = (self.learner.id, &self.learner.client);
        let step: Step = self.learner.open();
        let (sender, receiver) = channel();
        let notice = CommitNotice::whole(client.layout(), self.region.clone(), false);
        client.commit(learner, step, notice, timeout, Box::new(move |result| drop(sender.send(result))));
        let answer = receiver.recv_timeout(timeout + LONG).unwrap();
        if answer.is_err() {
            assert_eq!(ask(client, Message::Abort { learner }), Ok(Message::Done));
        }
        answer
    }
}

/// By RDMA, clients write into the memory of shards, or shards fetch from that of clients.
fn ways() -> Vec<Way> {
    let placed: fn(&mut RdmaOptions) = |options| options.placement = Placement::Static;
    let fetched: fn(&mut RdmaOptions) = |options| options.placement = Placement::Dynamic;
    let by_rdma = [placed, fetched].into_iter().filter_map(Way::rdma_with);
    [Way::Shm, Way::Tcp(Choice::Auto)].into_iter().chain(by_rdma).collect()
}

#[test]
fn mapped_memory_that_changes_after_a_timeout_never_counts() {
    for way in ways() {
        let world = World::new(2, BYTES, &[("reducer", "sum"), ("learners", "1")], way);
        let client = world.client();
        let learner = Learner::join(&client, "l");
        let mapped = Mapped::new(&learner);
        mapped.store(1.0);
        // Readers hold versions of the second shard, until it has no memory for another one: its blocks are read later.
        let mut readers = Vec::new();
        let (mut sum, late) = loop {
            assert!(readers.len() < 10, "as many versions as there are buffers are read");
            let mut raw = Raw::welcomed_by(&world, 1);
            let block = world.record.block_map().unwrap().blocks_of(world.shards()[1].shard).next().unwrap();
            let version = Version(readers.len() as u64);
            raw.say(Message::Pull { version, blocks: block.0..block.0 + 1 });
            assert!(matches!(raw.receive().unwrap().message, Message::Share { .. }));
            readers.push(raw);
            readers.iter_mut().for_each(Raw::lives);
            match mapped.commit(Duration::from_secs(1)) {
                Ok(_) => assert_eq!(learner.pull().0, Version(readers.len() as u64)),
                Err(late) => break (readers.len() as f32 - 1.0, late),
            }
        };
        assert!(matches!(late, ShardError::TimedOut(_)), "{late}");
        mapped.store(1000.0);
        drop(readers);
        // Whatever the shards read now is not that contribution any more.
        for _ in 0..3 {
            assert_eq!(mapped.commit(LONG), Ok(()), "{way:?}");
            sum += 1000.0;
            let (_, weights) = learner.pull();
            let wrong = weights.iter().position(|&weight| weight != sum);
            assert_eq!(wrong.map(|at| (at, weights[at])), None, "{way:?}: {sum} is expected");
        }
        client.shut_down();
    }
}
