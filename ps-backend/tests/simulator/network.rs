//! The network between the nodes: its connections, and whether and when each message comes.
//!
//! It knows two kinds. A *stream* is what TCP gives: in order and complete for as long as the connection lives; when
//! it is reset, what was under way is lost. *Datagrams* are worse than any transport that is used: each message by
//! itself is lost, repeated or overtaken, and one of an older connection may come through the newer one. But the numbers
//! of a client's requests come first over each connection, because a coordinator that knows nothing of them cannot tell
//! what it has carried out.

use std::collections::BTreeMap;

use fastrand::Rng;

use crate::world::{Node, Now};

/// One way a message goes.
pub type Way = (Node, Node);

/// How messages are treated.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    /// In order and complete while the connection lives.
    pub streams: bool,
    /// Shortest delay.
    pub delay: Now,
    /// What may come on top of it.
    pub jitter: Now,
    /// Longest addition to it for what a coordinator sends to shards.
    pub orders: Now,
    /// Share of messages that are lost (datagrams).
    pub loss: f64,
    /// Share of messages that come twice (datagrams).
    pub twice: f64,
}

/// A connection, by who opens it and who accepts it.
#[derive(Clone, Debug, Default)]
pub struct Connection {
    /// Counts the connections of this pair.
    pub epoch: u64,
    /// The opener takes it to be there.
    pub opener_up: bool,
    /// The acceptor does.
    pub acceptor_up: bool,
    /// The last connection over which a client has stated the numbers of its requests.
    pub numbered: u64,
}

/// All connections, and their faults.
#[derive(Debug)]
pub struct Network {
    pub weather: Weather,
    connections: BTreeMap<Way, Connection>,
    /// Until when nothing passes between two nodes.
    cuts: BTreeMap<Way, Now>,
    /// Until when messages between two nodes take so much longer.
    slow: BTreeMap<Way, (Now, Now)>,
    /// When the last message of a stream comes.
    last: BTreeMap<Way, Now>,
    /// These are pairs of one process.
    pub local: Vec<Way>,
}

fn pair(a: Node, b: Node) -> Way {
    if a < b { (a, b) } else { (b, a) }
}

impl Network {
    pub fn new(weather: Weather) -> Network {
        Network {
            weather,
            connections: BTreeMap::new(),
            cuts: BTreeMap::new(),
            slow: BTreeMap::new(),
            last: BTreeMap::new(),
            local: Vec::new(),
        }
    }

    /// The connection that `opener` keeps up to `acceptor`.
    pub fn connection(&mut self, opener: Node, acceptor: Node) -> &mut Connection {
        self.connections.entry((opener, acceptor)).or_default()
    }

    /// All pairs that keep a connection.
    pub fn pairs(&self) -> Vec<Way> {
        self.connections.keys().copied().collect()
    }

    pub fn is_local(&self, a: Node, b: Node) -> bool {
        self.local.contains(&pair(a, b))
    }

    pub fn cut(&mut self, a: Node, b: Node, until: Now) {
        let end = self.cuts.entry(pair(a, b)).or_default();
        *end = until.max(*end);
    }

    pub fn slow_down(&mut self, a: Node, b: Node, until: Now, by: Now) {
        self.slow.insert(pair(a, b), (until, by));
    }

    /// Until when nothing passes between the two.
    pub fn cut_until(&self, a: Node, b: Node, now: Now) -> Option<Now> {
        self.cuts.get(&pair(a, b)).copied().filter(|&until| until > now)
    }

    /// Everything is mended; nothing is lost or late from here on.
    pub fn heal(&mut self) {
        self.cuts.clear();
        self.slow.clear();
        let calm = Now::from_micros(200);
        self.weather =
            Weather { delay: calm, jitter: calm, orders: Now::ZERO, loss: 0.0, twice: 0.0, ..self.weather };
    }

    /// When a message that is sent now comes; several times if it comes twice, none if it is lost.
    pub fn deliveries(&mut self, from: Node, to: Node, now: Now, rng: &mut Rng) -> Vec<Now> {
        if self.is_local(from, to) {
            let at = self.last.entry((from, to)).or_default();
            *at = now.max(*at);
            return vec![*at];
        }
        let weather = self.weather;
        let cut = self.cut_until(from, to, now);
        let slow = self.slow.get(&pair(from, to)).filter(|(until, _)| *until > now).map(|(_, by)| *by);
        let delay = |rng: &mut Rng| {
            let orders = matches!((from, to), (Node::Coordinator(_), Node::Partition(_)));
            let more = if orders { weather.orders } else { Now::ZERO };
            let most = (weather.jitter + more + slow.unwrap_or_default()).as_micros() as u64;
            weather.delay + Now::from_micros(rng.u64(0..=most))
        };
        if weather.streams {
            // Connections survive a short cut: the sender repeats lost bytes.
            let at = cut.unwrap_or(now) + delay(rng);
            let last = self.last.entry((from, to)).or_default();
            *last = at.max(*last);
            return vec![*last];
        }
        if cut.is_some() {
            return Vec::new();
        }
        let copies = 1 + usize::from(rng.f64() < weather.twice);
        let mut deliveries = Vec::new();
        for _ in 0..copies {
            if rng.f64() >= weather.loss {
                deliveries.push(now + delay(rng));
            }
        }
        deliveries
    }

    /// The next connection of this pair begins with empty pipes.
    pub fn drain(&mut self, a: Node, b: Node) {
        self.last.remove(&(a, b));
        self.last.remove(&(b, a));
    }
}
