//! New weights in parts at the shards: parts come over connections of their own and are kept, and a plan lays those of a
//! set over the newest version. What keeps them is the code in production; the bytes are fewer.

use std::collections::BTreeMap;
use std::sync::Arc;

use libmodelio::vocabulary::ids::{BlockId, PlanId};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::vocabulary::strided::Strided;
use libmodelio::wire::Message;
use ps_backend::coordinator::NOBODY;
use ps_backend::partition::brought::{Brought, Part, Sizes};
use ps_backend::partition::core::{Placement, ReservationOutcome, Sent};

use crate::client::ClientEvent;
use crate::history::Uid;
use crate::history::sets::CELLS;
use crate::moving::Life;
use crate::parts::PartEvent;
use crate::shard::{Reservation, ShardEvent, Sum};
use crate::world::{Body, Event, Node, World};

/// Bytes of a cell: whose it is.
pub const CELL: u64 = 4;
/// Bytes of a block.
const BLOCK: u64 = CELLS as u64 * CELL;
/// Of a cell that is NaN.
pub const NAN: u32 = 1 << 31;

/// What a shard has of parts.
#[derive(Default)]
pub struct PartsHere {
    pub brought: Brought,
    /// Connections over which parts have come, by the client and the part; nothing for those that have ended.
    links: BTreeMap<(usize, Uid), Option<Arc<Part>>>,
}

/// What comes of a connection over which a client brings a part.
#[derive(Clone, Debug)]
pub enum Bringing {
    /// These pieces, packed.
    Pieces { client: usize, part: Uid, pieces: Vec<Strided>, packed: Vec<u8> },
    /// Its end.
    Ends { client: usize, part: Uid },
}

/// The part cannot be kept here.
#[derive(Clone, Copy, Debug)]
pub struct NotKept;

impl World {
    /// Something comes of a connection over which a client brings a part.
    pub fn part_comes(&mut self, partition: usize, bringing: Bringing) {
        let (client, uid, pieces, packed) = match bringing {
            Bringing::Pieces { client, part, pieces, packed } => (client, part, pieces, packed),
            Bringing::Ends { client, part } => {
                let links = &mut self.shards[partition].parts.links;
                return drop(links.insert((client, part), None));
            }
        };
        let id = self.clients[client].id;
        let shard = &mut self.shards[partition];
        if let Some(None) = shard.parts.links.get(&(client, uid)) {
            return;
        }
        let taken = if shard.life == Life::Live {
            let part = shard.parts.brought.part(id, uid.into());
            shard.parts.links.insert((client, uid), Some(Arc::clone(&part)));
            let model = u64::from(self.settings.blocks) * BLOCK;
            let sizes = Sizes { model, block: BLOCK, part: model };
            let mine = shard.mine();
            let local = |block| mine.binary_search(&block).ok().map(|at| BlockId(at as u32));
            let kept = part.keep(sizes, local, (&pieces, &packed));
            kept.unwrap_or_else(|why| panic!("partition {partition} refuses {pieces:?} of {uid}: {why}"));
            Ok(())
        } else {
            Err(NotKept)
        };
        self.trace(|| format!("partition {partition}: {pieces:?} of part {uid} come: {taken:?}"));
        if self.chance(self.settings.broken) {
            return self.part_link_breaks(partition, client, uid);
        }
        let after = self.part_delay(client, partition);
        self.after(after, Event::Client(client, ClientEvent::Part(PartEvent::Taken(uid, taken))));
    }

    /// The connection of a part is lost. Both ends hear of it in their time.
    fn part_link_breaks(&mut self, partition: usize, client: usize, part: Uid) {
        let after = self.some_time(20_000);
        self.after(after, Event::Shard(partition, ShardEvent::Part(Bringing::Ends { client, part })));
        let after = self.some_time(200_000);
        self.after(after, Event::Client(client, ClientEvent::Part(PartEvent::Lost(part))));
    }

    /// A connection of the two is lost, and those of parts with it.
    pub fn part_links_break(&mut self, partition: usize, client: usize) {
        let links = self.shards[partition].parts.links.range((client, 0)..=(client, Uid::MAX));
        let there: Vec<Uid> = links.filter(|(_, part)| part.is_some()).map(|((_, uid), _)| *uid).collect();
        for uid in there {
            // One that is not lost with the others stays.
            if !self.clients[client].alive || self.rng.bool() {
                self.part_link_breaks(partition, client, uid);
            }
        }
    }

    /// A plan has begun. If it publishes parts, its blocks are made.
    pub fn lays(&mut self, partition: usize, plan: PlanId) {
        let shard = &self.shards[partition];
        let Some(laid) = shard.parts.brought.laid(plan) else { return };
        let blocks = laid.blocks(shard.mine().len());
        for block in blocks.ones() {
            let after = self.some_time(3000);
            self.after(after, Event::Shard(partition, ShardEvent::Lays(plan, block as u32)));
        }
    }

    /// Makes a block of a plan that publishes parts, which comes to its place as if somebody had sent it.
    pub fn lays_block(&mut self, partition: usize, plan: PlanId, block: u32) {
        let shard = &mut self.shards[partition];
        let Some(laid) = shard.parts.brought.laid(plan).cloned() else { return };
        let placement = shard.core.reserve(NOBODY, plan, block, Sent { lies: false, ahead: false });
        let Placement::Ready(place) = placement else { return };
        let before = shard.memory.version(laid.base()).map(|memory| memory.borrow()[block as usize].clone());
        let start = u64::from(shard.mine()[block as usize].0) * BLOCK;
        let mut made = Vec::new();
        let outcome = before.ok_or(ShardError::Unreachable).and_then(|before| {
            laid.block(&[0; BLOCK as usize], (BlockId(block), start), &mut made)?;
            Ok(before)
        });
        self.trace(|| {
            format!("partition {partition}: block {block} of {plan} is laid: {made:?} {outcome:?}")
        });
        match outcome {
            Ok(before) => {
                let cell = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("a cell"));
                let cells: Vec<u32> = made.chunks(CELL as usize).map(cell).collect();
                let bad = cells.iter().any(|cell| cell & NAN > 0);
                let laid = before.laid(&cells.iter().map(|cell| cell & !NAN).collect::<Vec<_>>());
                let sum = Sum { of: laid.added().to_vec(), bad, laid: Some(laid) };
                let body = Body::Sum(sum);
                self.is_reserved(partition, Reservation { client: NOBODY, plan, block, place, body });
            }
            Err(why) => {
                let end = |core: &mut ps_backend::partition::core::PartitionCore, actions: &mut _| {
                    core.end(NOBODY, plan, block, ReservationOutcome::Released, actions);
                };
                self.on_shard(partition, end);
                self.ask_again(partition);
                if laid.fails(why.clone()) {
                    self.say_to_coordinator(partition, 0, Message::Unmade { plan, why });
                }
            }
        }
    }

    /// How long something takes from a client to a partition, or back, on a connection of its own.
    pub fn part_delay(&mut self, client: usize, partition: usize) -> crate::world::Now {
        let weather = self.network.weather;
        let cut = self.network.cut_until(Node::Client(client), Node::Partition(partition), self.now);
        let waits = cut.map_or_else(Default::default, |until| until - self.now);
        waits + weather.delay + self.some_time(weather.jitter.as_micros() as u64)
    }
}
