//! What shards do in a move: they take blocks, switch to the new block map, and tell who is connected.

use std::sync::Arc;

use libmodelio::vocabulary::ids::ShardId;
use libmodelio::wire::{Message, Refusal, RegistryRequest};
use ps_backend::coordinator::CoordinatorCore;

use super::{Attempt, Incoming, Life, Moving};
use crate::state::Block;
use crate::world::{Event, Node, Now, World};

/// A shard that nobody tells asks the registry after this time, and again.
const ASK_AFTER: Now = Now::from_secs(5);
const ASK_AGAIN: Now = Now::from_secs(2);

impl World {
    /// The registry replaces the record, if it is still the one that was to be replaced. From then on the new map is in
    /// force.
    pub(super) fn puts(&mut self, of: usize) -> Result<(), Refusal> {
        let plan = Arc::clone(&self.moves.attempts[of].plan);
        let put = RegistryRequest::Put { replaces: Some(plan.before.epoch) };
        self.registry.handle(&put, &plan.after.encode().expect("a record"), self.now)?;
        if self.courses[self.current()].by == Some(of) {
            return Ok(());
        }
        let stored = self.courses[self.current()].record.epoch;
        assert_eq!(stored, plan.before.epoch, "the registry replaces a record of another epoch");
        assert!(self.frozen || self.courses[self.coordinated].coordinator != Life::Live, "two coordinators");
        self.trace(|| format!("move {of} is in force: {:?}", plan.after.owners));
        let map = plan.after.block_map().expect("a map");
        let partitions = map.shares().len();
        let at = map.shares().into_keys().position(|owner| owner == plan.after.coordinator);
        let local = at.filter(|_| self.rng.bool());
        self.history.moved(partitions, self.moves.attempts[of].reducer);
        self.add_course(plan.after.clone(), map, local, Some(of));
        Ok(())
    }

    /// A shard gets an order.
    pub(super) fn receives(
        &mut self,
        of: usize,
        shard: ShardId,
        message: Message,
        payload: &[u8],
    ) -> Result<Message, String> {
        let Attempt { plan, from, .. } = &self.moves.attempts[of];
        let (plan, from, number) = (Arc::clone(plan), *from, plan.attempt);
        let known = self.moves.incoming.get(&shard).map(|incoming| incoming.of);
        let takes_part = || "it does not take part".to_owned();
        match message {
            Message::Prepare { .. } if known == Some(of) => Ok(Message::Done),
            Message::Prepare { .. } => {
                let own = self.partition_of(from, shard);
                let earlier = known.map(|known| &self.moves.attempts[known]);
                let there = self.moves.incoming.get(&shard);
                let is_empty = there.is_some_and(|there| there.version.is_none() || there.failed);
                let is_void = self.moves.void.get(&shard).is_some_and(|void| void.contains(&number));
                if is_void || earlier.is_some_and(|earlier| earlier.plan.attempt > number && !is_empty) {
                    return Err("a later attempt, or none".into());
                }
                let in_force = |earlier: &Attempt| earlier.plan.after.epoch <= plan.before.epoch;
                if earlier.is_some_and(in_force) {
                    return Err("it has not switched yet".into());
                }
                self.moves.incoming.remove(&shard);
                if own.is_some_and(|partition| self.shards[partition].life != Life::Live) {
                    return Err("no such model".into());
                }
                self.moves.incoming.insert(shard, Incoming { of, ..Incoming::default() });
                Ok(Message::Done)
            }
            Message::Abandon { .. } => {
                self.moves.void.entry(shard).or_default().insert(number);
                if known == Some(of) {
                    self.moves.incoming.remove(&shard);
                }
                Ok(Message::Done)
            }
            Message::Switch => self.switches(of, shard).map(|()| Message::Done),
            Message::Fill { .. } | Message::HandOver { .. } if known != Some(of) => Err(takes_part()),
            Message::Fill { version, .. } => {
                let incoming = self.moves.incoming.get_mut(&shard).ok_or_else(takes_part)?;
                if incoming.version.replace(version).is_none() {
                    let after = self.some_time(200_000);
                    self.after(after, Event::Moves(Moving::Filled(of, shard)));
                }
                let blocks = plan.after.owners.iter().filter(|(owner, _)| *owner == shard);
                let blocks = blocks.map(|(_, run)| run).sum();
                match self.moves.incoming.get(&shard) {
                    Some(incoming) if incoming.failed => Err("blocks cannot be fetched".into()),
                    Some(incoming) if incoming.whole.is_some() => Ok(Message::Filled { blocks, of: blocks }),
                    _ => Ok(Message::Filled { blocks: 0, of: blocks }),
                }
            }
            Message::HandOver { at, now, .. } => {
                assert_eq!(at, 0, "a state of one piece");
                let (layout, partitions) = (self.settings.layout(), self.courses[from].partitions.len());
                let (state, now) = (payload.to_vec(), Now::from_nanos(now));
                CoordinatorCore::taken_over(&state, &layout, partitions, now).expect("what was handed over");
                let incoming = self.moves.incoming.get_mut(&shard).ok_or_else(takes_part)?;
                incoming.handed = Some((state, now));
                Ok(Message::Done)
            }
            other => unreachable!("nobody says {}", other.name()),
        }
    }

    /// A shard fetches its blocks from those that have them.
    pub(super) fn filled(&mut self, of: usize, shard: ShardId) {
        let whole = self.whole(of);
        let fails = self.chance(0.01);
        let Some(incoming) = self.moves.incoming.get_mut(&shard).filter(|incoming| incoming.of == of) else {
            return;
        };
        match whole.filter(|_| !fails) {
            Some(whole) => {
                incoming.whole = Some(whole);
                self.after(ASK_AFTER, Event::Moves(Moving::Asks(of, shard)));
            }
            None => incoming.failed = true,
        }
    }

    /// The version at which the job is held, of all shards, if they have it.
    fn whole(&self, of: usize) -> Option<Vec<Block>> {
        let Attempt { from, version: expected, reducer, .. } = self.moves.attempts[of];
        let mut whole = vec![Block::default(); self.settings.blocks as usize];
        for &partition in &self.courses[from].partitions {
            if self.shards[partition].life != Life::Live {
                return None;
            }
            let (version, blocks) = self.shards[partition].front()?;
            if version != expected {
                return None;
            }
            blocks.for_each(|(block, kept)| whole[block.index()] = kept.kept_for(reducer));
        }
        Some(whole)
    }

    /// Another block map is in force. Nothing happens the second time.
    fn switches(&mut self, of: usize, shard: ShardId) -> Result<(), String> {
        let found = self.courses.iter().position(|course| course.by == Some(of));
        let course = found.expect("it is in force");
        let from = self.moves.attempts[of].from;
        let old =
            self.partition_of(from, shard).filter(|&partition| self.shards[partition].life == Life::Live);
        let Some(partition) = self.partition_of(course, shard) else {
            self.retire(from, shard, old);
            return Ok(());
        };
        match self.shards[partition].life {
            Life::Coming => {}
            Life::Lost => return Err("this shard has no blocks of the model".into()),
            Life::Live | Life::Retired => return Ok(()),
        }
        let record = self.courses[course].record.clone();
        let incoming = self.moves.incoming.get(&shard).filter(|incoming| incoming.of == of).cloned();
        let Some(Incoming { version: Some(version), whole: Some(whole), handed, .. }) = incoming else {
            return Err("this shard has no blocks of the model under that block map".into());
        };
        if record.coordinator == shard && handed.is_none() {
            return Err("the coordinator's state was not handed over".into());
        }
        self.activate(course, shard, version, &whole);
        self.moves.incoming.remove(&shard);
        self.retire(from, shard, old);
        if let Some(handed) = handed.filter(|_| record.coordinator == shard) {
            self.takes_over(course, &handed);
        }
        Ok(())
    }

    fn takes_over(&mut self, course: usize, (handed, frozen_at): &(Vec<u8>, Now)) {
        let before = self.courses[self.coordinated].coordinator;
        assert!(
            self.frozen || before == Life::Lost,
            "a coordinator begins while another one ({before:?}) goes on"
        );
        let partitions = self.courses[course].partitions.len();
        // Its clock goes on from when the other one was frozen.
        self.starts_clock(Node::Coordinator(course), *frozen_at);
        let taken = CoordinatorCore::taken_over(handed, &self.settings.layout(), partitions, *frozen_at);
        self.coordinator = taken.expect("what was handed over");
        // Whoever coordinated is frozen, and never hears anything again.
        (self.coordinated, self.frozen) = (course, false);
        self.moves.missed.clear();
        self.courses[course].coordinator = Life::Live;
        self.coordinator_connects(course);
        self.on_coordinator(|coordinator, now, actions| coordinator.go_on(now, actions));
        self.arm(self.coordinator_node());
    }

    /// Whoever is connected to a shard, or to the coordinator in its process, is told where the model is now, perhaps.
    fn retire(&mut self, from: usize, shard: ShardId, old: Option<usize>) {
        let mut nodes: Vec<Node> = Vec::new();
        if let Some(partition) = old {
            self.shards[partition].life = Life::Retired;
            nodes.push(Node::Partition(partition));
        }
        if self.courses[from].record.coordinator == shard && self.courses[from].coordinator == Life::Live {
            self.courses[from].coordinator = Life::Retired;
            nodes.push(Node::Coordinator(from));
        }
        for node in nodes {
            for index in 0..self.clients.len() {
                if self.clients[index].alive && self.network.connection(Node::Client(index), node).acceptor_up
                {
                    // One in four is cut off by the connection's end before it hears.
                    if self.rng.u32(0..4) > 0 {
                        self.say_moved(node, index);
                    }
                    if self.rng.bool() {
                        self.reset(Node::Client(index), node);
                    }
                }
            }
        }
        let all_know =
            self.courses[from].partitions.iter().all(|&partition| self.shards[partition].life != Life::Live);
        if all_know && self.rng.bool() {
            let after = self.some_time(3_000_000);
            self.after(after, Event::Moves(Moving::Stop(from)));
        }
    }

    /// A shard whose blocks are all there, and that nobody tells what becomes of them, asks the registry.
    pub(super) fn asks(&mut self, of: usize, shard: ShardId) {
        if self.moves.incoming.get(&shard).is_none_or(|incoming| incoming.of != of) {
            return;
        }
        match self.courses.iter().any(|course| course.by == Some(of)) {
            true => drop(self.switches(of, shard)),
            // Another map is in force: it never will be.
            false if self.current() != self.moves.attempts[of].from => {
                self.moves.incoming.remove(&shard);
            }
            false => {}
        }
        self.after(ASK_AGAIN, Event::Moves(Moving::Asks(of, shard)));
    }
}
