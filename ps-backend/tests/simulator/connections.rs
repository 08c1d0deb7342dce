//! Connections between nodes: opened, lost, opened again.

use libmodelio::wire::{Message, Refusal};

use crate::moving::Life;
use crate::world::{Event, Node, Now, World};

impl World {
    /// The one of two nodes that keeps up their connection, and the other one.
    pub fn roles(a: Node, b: Node) -> (Node, Node) {
        match (a, b) {
            (Node::Client(_), _) | (Node::Coordinator(_), Node::Partition(_)) => (a, b),
            _ => (b, a),
        }
    }

    pub fn connects(&mut self, opener: Node, acceptor: Node, after: Now) {
        self.network.connection(opener, acceptor);
        self.after(after, Event::Connects { opener, acceptor });
    }

    pub fn accepts(&mut self, opener: Node, acceptor: Node) {
        if matches!(opener, Node::Client(index) if !self.clients[index].alive) {
            return;
        }
        if !self.is_wanted(opener, acceptor) {
            return;
        }
        let cut = self.network.cut_until(opener, acceptor, self.now);
        let hung = self.hung.get(&self.process(opener)).copied().filter(|&until| until > self.now);
        if let Some(until) = cut.max(hung) {
            let again = until - self.now + self.some_time(200_000);
            return self.connects(opener, acceptor, again);
        }
        match (opener, acceptor, self.life(acceptor)) {
            (_, _, Life::Live) => {}
            (Node::Client(index), ..) => return self.greeted_in_vain(index, acceptor),
            // The shard is there, but not the blocks: it has been restarted.
            (Node::Coordinator(coordinator), Node::Partition(partition), Life::Lost) => {
                if coordinator == self.coordinated && self.is_coordinated() {
                    let known =
                        self.courses[coordinator].partitions.iter().position(|&known| known == partition);
                    let (partition, gone) = (known.expect("its partition"), Refusal::NoModel("m".into()));
                    self.on_coordinator(|coordinator, now, actions| {
                        coordinator.from_partition(partition, 0, Message::Refused(gone), now, actions);
                    });
                }
                // A frozen node gets no message, so this is repeated.
                let again = Now::from_millis(100) + self.some_time(300_000);
                return self.connects(opener, acceptor, again);
            }
            _ => {
                let again = self.some_time(300_000);
                return self.connects(opener, acceptor, again);
            }
        }
        self.network.drain(opener, acceptor);
        let connection = self.network.connection(opener, acceptor);
        connection.epoch += 1;
        connection.acceptor_up = true;
        let epoch = connection.epoch;
        if let (Node::Client(index), Node::Partition(partition)) = (opener, acceptor) {
            self.loses_pins(partition, index, epoch);
        }
        self.trace(|| format!("{opener:?} connects to {acceptor:?} ({epoch})"));
        if let Node::Partition(partition) = acceptor
            && opener == self.coordinator_node()
        {
            self.coordinated_anew(partition, self.coordinator.over());
        }
        // Who comes while nobody coordinates will come again.
        if let Node::Client(index) = opener
            && acceptor == self.coordinator_node()
        {
            let id = self.clients[index].id;
            match self.frozen {
                true => drop(self.moves.missed.insert(index)),
                false => self.on_coordinator(|coordinator, now, actions| {
                    coordinator.client_up(id, now, actions).expect("room for a client");
                }),
            }
        }
        let after = if self.network.is_local(opener, acceptor) { Now::ZERO } else { self.some_time(2000) };
        self.after(after, Event::Accepted { opener, acceptor, epoch });
    }

    pub fn accepted(&mut self, opener: Node, acceptor: Node, epoch: u64) {
        let connection = self.network.connection(opener, acceptor);
        if connection.epoch != epoch {
            return;
        }
        if !self.is_wanted(opener, acceptor) {
            return;
        }
        self.network.connection(opener, acceptor).opener_up = true;
        match (opener, acceptor) {
            (Node::Client(index), _) => match self.clients[index].partition_of(&self.courses, acceptor) {
                Some(None) => self.on_client(index, |core, now, actions| core.coordinator_up(now, actions)),
                Some(Some(partition)) => {
                    self.on_client(index, |core, now, actions| core.shard_up(partition, now, actions));
                }
                None => unreachable!("it is wanted"),
            },
            (Node::Coordinator(coordinator), Node::Partition(partition)) => {
                let partition = self.courses[coordinator]
                    .partitions
                    .iter()
                    .position(|&known| known == partition)
                    .expect("its partition");
                if coordinator == self.coordinated && self.is_coordinated() {
                    self.on_coordinator(|coordinator, _, actions| {
                        coordinator.partition_up(partition, actions)
                    });
                }
            }
            _ => unreachable!("nobody else connects"),
        }
    }

    /// The connection is lost, with all that is under way on it; both ends hear of it in their time.
    pub fn reset(&mut self, opener: Node, acceptor: Node) {
        if self.network.is_local(opener, acceptor) {
            return;
        }
        let connection = self.network.connection(opener, acceptor);
        connection.epoch += 1;
        let epoch = connection.epoch;
        self.trace(|| format!("the connection of {opener:?} to {acceptor:?} is reset"));
        if let (Node::Client(index), Node::Partition(partition)) = (opener, acceptor) {
            self.part_links_break(partition, index);
        }
        for at_opener in [true, false] {
            let after = self.some_time(20_000);
            self.after(after, Event::Gone { opener, acceptor, epoch, at_opener });
        }
    }

    pub fn gone(&mut self, opener: Node, acceptor: Node, epoch: u64, at_opener: bool) {
        let connection = self.network.connection(opener, acceptor);
        if connection.epoch != epoch {
            return;
        }
        if !at_opener {
            connection.acceptor_up = false;
            if let (Node::Client(index), Node::Partition(partition)) = (opener, acceptor) {
                self.loses_pins(partition, index, epoch);
            }
            if let Node::Client(index) = opener
                && acceptor == self.coordinator_node()
                && self.life(acceptor) == Life::Live
            {
                let id = self.clients[index].id;
                match self.frozen {
                    true => drop(self.moves.missed.insert(index)),
                    false => self.on_coordinator(|coordinator, now, actions| {
                        coordinator.client_down(id, now, actions)
                    }),
                }
            }
            return;
        }
        connection.opener_up = false;
        // The end of a connection that was opened under an older map means nothing.
        if !self.is_wanted(opener, acceptor) {
            return;
        }
        if let Node::Client(index) = opener {
            match self.clients[index].partition_of(&self.courses, acceptor) {
                Some(None) => self.on_client(index, |core, now, actions| core.coordinator_down(now, actions)),
                Some(Some(partition)) => self.on_client(index, |core, _, _| core.shard_down(partition)),
                None => {}
            }
        }
        let again = self.some_time(300_000);
        self.connects(opener, acceptor, again);
    }
}
