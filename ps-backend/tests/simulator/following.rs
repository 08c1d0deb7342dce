//! Blocks that shards send as they are computed, to clients that follow a plan.

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::ids::{BlockId, PlanId, Version};
use libmodelio::wire::Message;
use ps_backend::partition::core::Ahead;

use crate::moving::Life;
use crate::world::{Body, Node, World};

/// How often each of these has happened.
#[derive(Debug, Default)]
pub struct Early {
    /// Blocks that clients have received before their version counted.
    pub received: u64,
    /// Such blocks of plans that made no version.
    pub void: u64,
    /// Blocks of new weights that clients have sent while others were written.
    pub weights: u64,
    /// Blocks that followers were sent when their version counted.
    pub late: u64,
}

/// A client that follows a plan.
pub struct Follower {
    client: usize,
    epoch: u64,
    plan: PlanId,
    /// It takes what has changed since this version.
    base: Option<Version>,
    sent: FixedBitSet,
    /// There may be a block for it. Otherwise it waits until its shard has news.
    is_awake: bool,
}

impl World {
    /// A client asks for the blocks of a plan.
    pub fn begins_to_be_followed(
        &mut self,
        partition: usize,
        client: usize,
        plan: PlanId,
        base: Option<Version>,
    ) {
        let epoch = self.network.connection(Node::Client(client), Node::Partition(partition)).epoch;
        let shard = &mut self.shards[partition];
        let before = shard.followers.iter().position(|of| of.client == client);
        let before = before.map(|at| shard.followers.swap_remove(at)).filter(|of| of.plan == plan);
        let sent = before.map_or_else(|| FixedBitSet::with_capacity(shard.mine().len()), |of| of.sent);
        shard.followers.push(Follower { client, epoch, plan, base, sent, is_awake: true });
    }

    /// Something has happened at a shard: sends blocks to those who follow. A slow connection has no room for some.
    pub fn serves_followers(&mut self, partition: usize) {
        let shard = &mut self.shards[partition];
        if shard.core.has_news_for_readers() {
            shard.followers.iter_mut().for_each(|follower| follower.is_awake = true);
        }
        for at in 0..self.shards[partition].followers.len() {
            while self.shards[partition].followers[at].is_awake {
                let shard = &self.shards[partition];
                let Follower { client, epoch, plan, base, ref sent, .. } = shard.followers[at];
                let (ahead, live) = (shard.core.ahead(plan, sent), shard.life == Life::Live);
                let connection = self.network.connection(Node::Client(client), Node::Partition(partition));
                let goes = live && connection.epoch == epoch && connection.acceptor_up;
                if !goes || self.chance(self.settings.broken) {
                    break;
                }
                let shard = &mut self.shards[partition];
                let (block, content) = match ahead {
                    Ahead::Computed(block) => (block as usize, shard.computed(block as usize)),
                    Ahead::Made(version) => {
                        let block = shard.followers[at].sent.zeroes().next();
                        let Some((block, memory)) = block.zip(shard.memory.version(version)) else {
                            shard.followers[at].is_awake = false;
                            break;
                        };
                        self.ahead.late += 1;
                        (block, memory.borrow()[block].clone())
                    }
                    Ahead::Wait | Ahead::Over => {
                        shard.followers[at].is_awake = false;
                        break;
                    }
                };
                shard.followers[at].sent.insert(block);
                let patch = shard.memory.patch(base, block, &content);
                let block = shard.mine()[block];
                let (message, body) = match patch {
                    Some((base, body)) => (Message::ChangesAhead { plan, block, base, crc: None }, body),
                    None => (Message::BlockAhead { plan, block }, Body::Content(content)),
                };
                self.say_to_client(partition, client, message, body);
            }
        }
    }

    /// A client gets a block of a plan that it may follow, perhaps as what has changed since `base`.
    pub fn gets_block_ahead(
        &mut self,
        index: usize,
        plan: PlanId,
        (block, base): (BlockId, Option<Version>),
        body: Body,
    ) {
        let core = &mut self.clients[index].core;
        let Some(version) = core.followed(plan) else { return };
        let is_early = core.pulling().is_none();
        if self.reserves(index, version, (block, base), &body) {
            if is_early {
                self.ahead.received += 1;
                let before = self.clients[index].early.filter(|(of, _)| *of == plan);
                self.clients[index].early = Some((plan, before.map_or(0, |(_, blocks)| blocks) + 1));
            }
            self.begins_to_copy(index, version, block, body);
        }
    }

    /// A client follows the plan that makes the next version, if its core wants that.
    pub fn follows(&mut self, index: usize, partition: usize, to: Node, epoch: u64) {
        let client = &mut self.clients[index];
        let (of, plan) = client.followed[partition];
        let asked = if of == epoch { plan } else { PlanId(0) };
        // Where memory is shared, versions are shown where they lie.
        if self.settings.shared || !client.core.follows(asked) {
            return;
        }
        if let Some(message) = client.core.next_follow(partition, asked) {
            if let Message::Follow { plan, .. } = message {
                client.followed[partition] = (epoch, plan);
            }
            self.send(Node::Client(index), to, 0, message, Body::None);
        }
    }
}
