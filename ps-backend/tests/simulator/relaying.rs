//! Clients that pull versions from each other. A relay answers as that of a mount does: with blocks that it shows or has
//! pulled, and with others when they are there.

use std::collections::{BTreeMap, BTreeSet};

use libmodelio::vocabulary::ids::{BlockId, ClientId, Version};
use libmodelio::wire::{Message, Refusal};

use crate::client::{ClientEvent, WINDOW};
use crate::world::{Body, Event, Node, World};

/// How often each of these has happened.
#[derive(Debug, Default)]
pub struct Relayed {
    /// Blocks that clients have got from relays.
    pub blocks: u64,
    /// Of them, blocks of versions that the relay did not show yet.
    pub early: u64,
    /// Times that a client has told the coordinator of a relay which failed.
    pub failed: u64,
}

/// A follower's request, as far as its relay has not sent the blocks.
#[derive(Clone, Debug)]
pub struct Asked {
    follower: usize,
    link: u64,
    version: Version,
    blocks: Vec<BlockId>,
}

/// A client's way to its relay.
#[derive(Debug, Default)]
pub struct Link {
    /// Counts the connections. What comes over an earlier one is void.
    number: u64,
    relay: Option<usize>,
    /// The requests of followers of this client.
    asked: Vec<Asked>,
}

#[derive(Clone, Debug)]
pub enum RelayEvent {
    /// The connection of this number opens, if it can.
    Opens(u64),
    /// It has ended.
    Ends(u64),
    /// A follower asks.
    Asks(Asked),
    /// Something comes over the connection of this number.
    Comes(u64, Box<Message>, Body),
}

impl World {
    fn soon(&mut self, index: usize, most_micros: u64, event: RelayEvent) {
        let after = self.some_time(most_micros);
        self.after(after, Event::Client(index, ClientEvent::Relay(event)));
    }

    /// A client's core may want another relay.
    pub fn relay_changes(&mut self, index: usize) {
        let client = &mut self.clients[index];
        let wanted = client.core.relay_address().map(|address| address.parse().expect("a client's number"));
        if wanted == client.link.relay {
            return;
        }
        client.link.relay = wanted;
        client.link.number += 1;
        let number = client.link.number;
        if wanted.is_some() {
            self.soon(index, 20_000, RelayEvent::Opens(number));
        }
    }

    /// A client has ended: those that pull from it hear of it.
    pub fn relay_ends(&mut self, index: usize) {
        for follower in 0..self.clients.len() {
            if self.clients[follower].link.relay == Some(index) {
                let number = self.clients[follower].link.number;
                self.soon(follower, 20_000, RelayEvent::Ends(number));
            }
        }
    }

    pub fn relay_event(&mut self, index: usize, event: RelayEvent) {
        let is_now = |world: &World, number: u64| world.clients[index].link.number == number;
        match event {
            RelayEvent::Opens(number) if is_now(self, number) => {
                let relay = self.clients[index].link.relay;
                let opens = relay.is_some_and(|relay| self.clients[relay].alive) && !self.chance(0.1);
                self.on_client(index, |core, now, actions| match opens {
                    true => core.relay_up(),
                    false => core.relay_down(now, actions),
                });
            }
            RelayEvent::Ends(number) if is_now(self, number) => {
                self.on_client(index, |core, now, actions| core.relay_down(now, actions));
            }
            RelayEvent::Asks(asked) => self.clients[index].link.asked.push(asked),
            RelayEvent::Comes(number, message, body) if is_now(self, number) => match *message {
                Message::Block { version, block } => {
                    if self.reserves(index, version, (block, None), &body) {
                        self.relayed.blocks += 1;
                        self.begins_to_copy(index, version, block, body);
                    }
                }
                message => {
                    self.on_client(index, |core, now, actions| core.from_relay(&message, now, actions));
                }
            },
            _ => {}
        }
    }

    /// Asks a client's relay for blocks, and sends followers what is there.
    pub fn relays_and_follows(&mut self, index: usize) {
        let now = self.clock(Node::Client(index));
        while let Some(message) = self.clients[index].core.next_of_relay(WINDOW, now) {
            let Message::Pull { version, blocks, .. } = message else { unreachable!("it pulls") };
            let link = &self.clients[index].link;
            let (Some(relay), number) = (link.relay, link.number) else { continue };
            let blocks = blocks.map(BlockId).collect();
            if !self.chance(self.settings.broken) {
                let asked = Asked { follower: index, link: number, version, blocks };
                self.soon(relay, 2000, RelayEvent::Asks(asked));
            }
        }
        for asked in std::mem::take(&mut self.clients[index].link.asked) {
            self.serves(index, asked);
        }
    }

    fn serves(&mut self, index: usize, mut asked: Asked) {
        let Asked { follower, link, version, .. } = asked;
        let shown = self.clients[index].core.version();
        if version < shown {
            let refusal = Refusal::NoVersion { wanted: version, newest: shown };
            return self.soon(
                follower,
                2000,
                RelayEvent::Comes(link, Message::Refused(refusal).into(), Body::None),
            );
        }
        let client = &self.clients[index];
        let is_there = |block: &BlockId| version == shown || client.core.has_pulled(version, *block);
        let (there, later): (Vec<_>, Vec<_>) = asked.blocks.iter().copied().partition(is_there);
        for block in there {
            let client = &self.clients[index];
            let content =
                if version == shown { client.front() } else { client.back() }[block.index()].clone();
            self.relayed.early += u64::from(version > shown);
            if !self.chance(self.settings.broken) {
                let message = Message::Block { version, block };
                let most = self.settings.arrival;
                self.soon(follower, most, RelayEvent::Comes(link, message.into(), Body::Content(content)));
            }
        }
        if !later.is_empty() {
            asked.blocks = later;
            self.clients[index].link.asked.push(asked);
            self.on_client(index, |core, now, actions| core.follower_wants(version, now, actions));
        }
    }

    /// A client's message to the coordinator. False if it is not about relays.
    pub fn relays_hear(&mut self, index: usize, message: &Message) -> bool {
        let now = self.clock(self.coordinator_node());
        let taken = self.relays.takes(self.clients[index].id, message, now).expect("a relay's message");
        self.relayed.failed += u64::from(matches!(message, Message::RelayFailed { .. }));
        taken
    }

    /// Tells relays whom they follow, where that has changed.
    pub fn tells_relays(&mut self) {
        let node = self.coordinator_node();
        let now = self.clock(node);
        let clients: BTreeMap<ClientId, usize> =
            (0..).zip(&self.clients).map(|(at, of)| (of.id, at)).collect();
        let network = &mut self.network;
        let up = clients.iter().filter(|(_, at)| network.connection(Node::Client(**at), node).acceptor_up);
        let up: BTreeSet<ClientId> = up.map(|(id, _)| *id).collect();
        for (id, message) in self.relays.tell(|id| up.contains(id), now) {
            self.send(node, Node::Client(clients[&id]), 0, message, Body::None);
        }
    }
}
