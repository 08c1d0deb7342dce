//! Connections to the coordinator and to shards: the client opens them, and opens them again when they end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::client::peers::fallback::{Due, FastPath};
use crate::client::peers::inquiry::IN_QUESTION;
use crate::client::peers::peer::{EndOfLoan, Peer};
use crate::client::peers::routes::{Route, overtaken};
use crate::client::shared::{Inner, Shared};
use crate::transport::frames::Link;
use crate::transport::stream::Close;
use crate::vocabulary::block_map::PartitionIndex;
use crate::vocabulary::transport_kind::TransportKind;
use crate::wire::Role;

/// The reason for closing a TCP connection after a faster one has come about.
const OVERCOME: &str = "another connection has come about in its place, by a better way";

impl Shared {
    /// The peer has greeted a connection. On a fast path it reads this end's memory until the loan ends.
    ///
    /// # Errors
    /// If the connection was opened under a block map that is no longer in force.
    pub(in crate::client) fn greeted(
        &self,
        route: &Route,
        link: &Link,
        end_of_loan: Option<EndOfLoan>,
    ) -> Result<(), Close> {
        let mut inner = self.inner.lock();
        if !inner.peers.is_in_force(route) {
            return Err(overtaken());
        }
        let mut actions = Vec::new();
        let now = self.now();
        let peer = inner.peers.peer(route);
        peer.greeted();
        if route.role == Role::Control {
            peer.links = vec![link.clone()];
            peer.heard.heard(now);
            inner.core.coordinator_up(now, &mut actions);
        } else if route.role == Role::Relay {
            peer.links.push(link.clone());
            inner.core.relay_up();
            self.lifetime.rouse();
        } else {
            let is_fast = end_of_loan.is_some();
            if let Some(end) = end_of_loan {
                peer.unmet = 0;
                peer.loans.push((link.clone(), end));
                if let Some(leaving) = peer.fallbacks.overcome(route.number, Instant::now()) {
                    let address = route.address();
                    tracing::info!(model = %self.model, %address, "in place of one by TCP there is a better way");
                    peer.park(&leaving, true);
                }
            } else {
                peer.fallbacks.greeted(route.number, link);
            }
            // Fast connections go first in the list, and are used first.
            let worse = |other: &Link| is_fast && peer.fallbacks.is_one(other);
            let at = peer.links.iter().position(worse).unwrap_or(peer.links.len());
            peer.links.insert(at, link.clone());
            inner.core.shard_up(route.partition, now, &mut actions);
            // The keeper may open the next connection now.
            self.lifetime.rouse();
        }
        self.act(inner, actions);
        Ok(())
    }

    /// A connection has ended.
    pub(in crate::client) fn ended(&self, route: &Route, link: &Link, why: &str) {
        let mut inner = self.inner.lock();
        if !inner.peers.is_in_force(route) {
            return;
        }
        let mut actions = Vec::new();
        let now = self.now();
        let peer = inner.peers.peer(route);
        peer.opened.retain(|&number| number != route.number);
        if peer.fallbacks.ended(route.number, link, Instant::now()) {
            // Other connections exist, and nothing else changes.
            tracing::debug!(model = %self.model, address = %route.address(), "no better way than TCP yet: {why}");
            return;
        }
        let before = peer.links.len();
        peer.links.retain(|known| !known.is(link));
        peer.loans.retain(|(known, _)| !known.is(link));
        peer.park(link, false);
        let was_up = before > peer.links.len();
        let alone = peer.links.is_empty();
        if alone {
            peer.gone_since.get_or_insert_with(Instant::now);
        }
        let replaced = why.contains(OVERCOME);
        if replaced || why.contains(IN_QUESTION) {
            tracing::debug!(model = %self.model, address = %route.address(), "connection ended: {why}");
        } else if !self.lifetime.is_stopping() && (was_up || peer.trouble.as_deref() != Some(why)) {
            tracing::warn!(model = %self.model, address = %route.address(), "connection lost: {why}");
        }
        if !replaced {
            peer.trouble = Some(why.to_owned());
            peer.lost = peer.trouble.clone();
            let pause = Duration::from_millis(50 << peer.tries.min(5));
            peer.tries += 1;
            peer.retry_at = Some(Instant::now() + pause);
        }
        match route.role {
            Role::Relay => inner.core.relay_down(now, &mut actions),
            _ if !was_up => {}
            Role::Control => inner.core.coordinator_down(now, &mut actions),
            _ if alone => inner.core.shard_down(route.partition),
            _ => inner.core.check_partition(route.partition, now, &mut actions),
        }
        self.act(inner, actions);
        self.lifetime.rouse();
    }

    /// Opens the missing connections. Returns when to check again.
    pub(in crate::client) fn connect_missing(&self) -> Option<Instant> {
        let mut missing = Vec::new();
        let mut next = None;
        let routes = {
            let mut inner = self.inner.lock();
            let connections = self.options.connections;
            let now = Instant::now();
            let mut later = |at: Instant| next = Some(next.map_or(at, |next: Instant| next.min(at)));
            let mut check = |peer: &mut Peer, wanted: usize, (role, partition): (Role, PartitionIndex)| {
                if peer.barred {
                    return;
                }
                let free = |peer: &Peer, count: usize| -> Vec<usize> {
                    (0..).filter(|number| !peer.opened.contains(number)).take(count).collect()
                };
                let open = |peer: &mut Peer, numbers: Vec<usize>, missing: &mut Vec<_>| {
                    missing.extend(numbers.iter().map(|&number| (role, partition, number)));
                    peer.opened.extend(numbers);
                };
                // A connection that only tries a faster path counts in addition.
                let wanted = wanted + usize::from(peer.fallbacks.is_trying());
                if peer.opened.len() < wanted {
                    match peer.retry_at.filter(|&at| at > now) {
                        Some(at) => later(at),
                        None => open(peer, free(peer, wanted - peer.opened.len()), &mut missing),
                    }
                    return;
                }
                let number = free(peer, 1)[0];
                match peer.fallbacks.due(now, number) {
                    Some(Due::Try(number)) => open(peer, vec![number], &mut missing),
                    Some(Due::Close(link)) => link.close(Close::Asked(OVERCOME.into())),
                    Some(Due::At(at)) => later(at),
                    None => {}
                }
            };
            let routes = Arc::clone(&inner.peers.routes);
            let coordinator = routes.coordinator;
            check(&mut inner.peers.coordinator, 1, (Role::Control, coordinator));
            for (partition, peer) in inner.peers.partitions.iter_mut().enumerate() {
                // Connections are opened one after the other. The shard then knows the purpose of each, and puts the
                // next one on another thread.
                let greeted = peer.links.len();
                // A shard with fewer blocks needs no more connections than that. The first one is on the thread of the
                // requests to the coordinator, so a small model's messages need one thread here.
                let blocks = routes.partitions[partition].blocks.max(1) as usize;
                check(peer, connections.min(blocks).min(greeted + 1), (Role::Data, partition));
            }
            let all_here = (0..inner.peers.partitions.len())
                .all(|partition| inner.peers.transport(partition) == TransportKind::SharedMemory);
            let address = inner.core.relay_address().filter(|_| !all_here).cloned();
            inner.peers.pulls_by(address.as_ref());
            if address.is_some() {
                let relay = &mut inner.peers.relay.1;
                let wanted = connections.min(self.layout.blocks() as usize).min(relay.links.len() + 1);
                check(relay, wanted, (Role::Relay, 0));
            }
            (routes, address)
        };
        let (routes, relay) = routes;
        for (role, partition, number) in missing {
            let relay = relay.clone().filter(|_| role == Role::Relay);
            let route = Route { routes: Arc::clone(&routes), role, partition, number, relay };
            match routes.partitions[partition].fast.filter(|_| role == Role::Data) {
                Some(FastPath::SharedMemory) => self.connect_by_memory(route),
                Some(FastPath::Rdma) => self.connect_by_rdma(route),
                None => self.connect_by_tcp(route),
            }
        }
        next
    }

    /// The fast path to a shard has not come about. The client takes TCP instead, unless the options forbid it.
    pub(in crate::client) fn without(&self, fast: FastPath, route: Route, why: &str) {
        if self.options.transport == fast.alone() {
            return self.ended(&route, &Link::default(), &format!("{fast}: {why}"));
        }
        if self.lifetime.is_stopping() {
            return;
        }
        let is_news = {
            let mut inner = self.inner.lock();
            if !inner.peers.is_in_force(&route) {
                return;
            }
            let fallbacks = &mut inner.peers.partitions[route.partition].fallbacks;
            if fallbacks.is_trial(route.number) {
                drop(inner);
                return self.ended(&route, &Link::default(), &format!("{fast}: {why}"));
            }
            fallbacks.take(route.number, fast, why, Instant::now())
        };
        if is_news {
            let address = route.address();
            tracing::warn!(model = %self.model, %address, "no {fast} with this shard, using TCP: {why}");
        }
        self.connect_by_tcp(route);
    }

    /// The coordinator has sent something.
    pub(in crate::client) fn heard(&self, route: &Route) {
        let mut inner = self.inner.lock();
        if inner.peers.is_in_force(route) {
            inner.peers.coordinator.heard.heard(self.now());
        }
    }

    /// Asks a silent coordinator for a sign of life, and notes who is out of reach.
    pub(in crate::client) fn look_for_shards(&self, inner: &mut Inner) {
        let now = self.now();
        let peers = &mut inner.peers;
        if !peers.coordinator.links.is_empty() && peers.coordinator.heard.asks(now) {
            peers.ping_coordinator();
        }
        let (coordinator, shards) = peers.out_of_reach(now);
        inner.core.out_of_reach(coordinator, shards);
    }
}
