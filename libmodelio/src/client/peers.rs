//! The coordinator and the shards as the client knows them: the block map in force, the connections to each, and who is
//! out of reach.

pub(super) mod fallback;
pub(super) mod inquiry;
pub(super) mod late;
pub(super) mod peer;
pub(super) mod routes;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::client::core::{Gone, Now};
use crate::client::peers::fallback::FastPath;
use crate::client::peers::inquiry::{Inquiry, Unconfirmed};
use crate::client::peers::late::WaitedFor;
use crate::client::peers::peer::Peer;
use crate::client::peers::routes::{Route, Routes, overtaken};
use crate::transport::frames::{Link, Outgoing};
use crate::transport::stream::Close;
use crate::vocabulary::block_map::PartitionIndex;
use crate::vocabulary::transport_kind::TransportKind;
use crate::wire::{Message, Role};

/// The coordinator and the shards under one block map.
pub(super) struct Peers {
    /// The routes in force.
    pub(super) routes: Arc<Routes>,
    pub(super) coordinator: Peer,
    /// The shards, by [`PartitionIndex`]. A shard in this process is not among them.
    pub(super) partitions: Vec<Peer>,
    pub(super) inquiry: Inquiry,
    pub(super) unconfirmed: Option<Unconfirmed>,
    pub(super) late: WaitedFor,
    /// The relay, and its address if there is one.
    pub(super) relay: (Option<Arc<str>>, Peer),
    /// Connections of followers that wait for blocks.
    followers: Vec<Link>,
}

impl Peers {
    pub(super) fn new(routes: Routes) -> Peers {
        Peers {
            coordinator: Peer::new(false),
            partitions: routes.partitions.iter().map(|_| Peer::new(false)).collect(),
            inquiry: Inquiry::default(),
            unconfirmed: None,
            late: WaitedFor::default(),
            relay: (None, Peer::new(false)),
            followers: Vec::new(),
            routes: Arc::new(routes),
        }
    }

    /// Another block map is in force. Connections under the old one are told to end, and its routes are returned.
    pub(super) fn replace(&mut self, new: &Arc<Routes>) -> Arc<Routes> {
        let peers = new.partitions.iter().map(|place| Peer::new(place.barred.is_some())).collect();
        let before = std::mem::replace(&mut self.routes, Arc::clone(new));
        let partitions = std::mem::replace(&mut self.partitions, peers);
        let coordinator = std::mem::replace(&mut self.coordinator, Peer::new(false));
        let links = partitions.iter().chain([&coordinator]).flat_map(|peer| &peer.links);
        links.for_each(|link| link.close(overtaken()));
        self.pulls_by(None);
        before
    }

    /// The relay is at this address from now on. Connections to another one are told to end.
    pub(super) fn pulls_by(&mut self, address: Option<&Arc<str>>) {
        if self.relay.0.as_ref() == address {
            return;
        }
        let (_, before) = std::mem::replace(&mut self.relay, (address.cloned(), Peer::new(false)));
        before.links.iter().for_each(|link| link.close(Close::Asked("another relay takes its place".into())));
    }

    /// A follower's connection is to be woken when there may be a block for it.
    pub(super) fn follower_waits(&mut self, link: &Link) {
        if !self.followers.iter().any(|other| other.is(link)) {
            self.followers.push(link.clone());
        }
    }

    /// There may be a block for followers.
    pub(super) fn wake_followers(&mut self) {
        self.followers.drain(..).for_each(|link| link.wake());
    }

    /// Whether a route belongs to the block map in force.
    pub(super) fn is_in_force(&self, route: &Route) -> bool {
        Arc::ptr_eq(&self.routes, &route.routes) && (route.role != Role::Relay || self.relay.0 == route.relay)
    }

    /// # Errors
    /// If a connection was opened under a map that is no longer in force.
    pub(super) fn check_in_force(&self, route: &Route) -> Result<(), Close> {
        if self.is_in_force(route) { Ok(()) } else { Err(overtaken()) }
    }

    /// The peer that a connection leads to.
    pub(super) fn peer(&mut self, route: &Route) -> &mut Peer {
        match route.role {
            Role::Control => &mut self.coordinator,
            Role::Relay => &mut self.relay.1,
            _ => &mut self.partitions[route.partition],
        }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Peer> {
        self.partitions.iter().chain([&self.coordinator])
    }

    /// Sends a shard a message without a payload, over its connections in turn.
    pub(super) fn send(&mut self, partition: PartitionIndex, message: Message) {
        let epoch = self.routes.epoch;
        let peer = &mut self.partitions[partition];
        peer.turn += 1;
        if let Some(link) = peer.links.get(peer.turn % peer.links.len().max(1)) {
            link.send(Outgoing { epoch, ..Outgoing::new(0, message) });
        }
    }

    /// Has the connections to a shard send what there is to send.
    pub(super) fn wake(&self, partition: PartitionIndex) {
        self.partitions[partition].links.iter().for_each(Link::wake);
    }

    pub(super) fn wake_all(&self) {
        self.partitions.iter().flat_map(|peer| &peer.links).for_each(Link::wake);
    }

    /// Asks the coordinator for a sign of life, or gives it one.
    pub(super) fn ping_coordinator(&self) {
        self.coordinator.links.iter().for_each(|link| link.send_message(0, Message::Ping));
    }

    /// What moves the blocks to and from a shard on a network.
    pub(super) fn transport(&self, partition: PartitionIndex) -> TransportKind {
        let works = |fast: &FastPath| self.partitions[partition].fallbacks.why(*fast).is_none();
        match self.routes.partitions[partition].fast.filter(works) {
            Some(FastPath::SharedMemory) => TransportKind::SharedMemory,
            Some(FastPath::Rdma) => TransportKind::Rdma,
            None => TransportKind::Tcp,
        }
    }

    /// Who is out of reach, and since when: the coordinator, and shards.
    pub(super) fn out_of_reach(&self, now: Now) -> (Option<Gone>, Vec<Gone>) {
        let gone = |partition: PartitionIndex, since: Option<Now>| {
            Some(Gone { shard: self.routes.partitions[partition].record.shard, since: since? })
        };
        let coordinator = gone(self.routes.coordinator, self.coordinator_gone(now));
        let shards = (0..self.partitions.len()).filter_map(|of| gone(of, self.gone_since(of, now)));
        (coordinator, shards.collect())
    }

    /// Since when the coordinator is out of reach, if it is.
    fn coordinator_gone(&self, now: Now) -> Option<Now> {
        let gone = self.coordinator.gone_since.map(|at| now.saturating_sub(at.elapsed()));
        gone.into_iter().chain(self.coordinator.heard.silent_since(now)).min()
    }

    /// Since when a shard is out of reach, as far as this end and the coordinator know.
    pub(super) fn gone_since(&self, partition: PartitionIndex, now: Now) -> Option<Now> {
        let announced = self.late.shards.get(&self.routes.partitions[partition].record.shard);
        let known = [self.partitions[partition].gone_since.as_ref(), announced].into_iter().flatten();
        let is_coordinator = partition == self.routes.coordinator;
        let coordinator = self.coordinator_gone(now).filter(|_| is_coordinator);
        known.map(|at| now.saturating_sub(at.elapsed())).chain(coordinator).min()
    }

    /// Why no version has come within `patience`: the peers without a connection, or else the connections that were lost.
    pub(super) fn why_nothing_came(&self, patience: Duration) -> String {
        let routes = &self.routes;
        let partitions = self.partitions.iter().enumerate();
        let peers: Vec<_> = std::iter::once((routes.address(routes.coordinator), &self.coordinator))
            .chain(partitions.map(|(partition, peer)| (routes.address(partition), peer)))
            .collect();
        let unmet = peers.iter().filter(|(_, peer)| peer.links.is_empty());
        let said = |(address, peer): &(&str, &Peer)| {
            format!("{address}: {}", peer.trouble.as_deref().unwrap_or("no answer"))
        };
        let mut why: Vec<String> = unmet.map(said).collect();
        if why.is_empty() {
            // Connections may come and go without ever bringing a version.
            why.push("no version came".to_owned());
            let lost = peers.iter().filter_map(|(address, peer)| Some((address, peer.lost.as_ref()?)));
            why.extend(lost.map(|(address, lost)| format!("{address}: connection lost: {lost}")));
        }
        format!("{} (waited {patience:?})", why.join("; "))
    }

    /// Since when somebody is out of reach, or only a shard says where the model is. If neither, the registry need not be
    /// asked any more.
    pub(super) fn inquires_since(&mut self) -> Option<Instant> {
        let gone = self.all().filter_map(|peer| peer.gone_since).min();
        let since = gone.or(self.unconfirmed.as_ref().map(|unconfirmed| unconfirmed.since));
        if since.is_none() {
            (self.inquiry.tries, self.inquiry.other_lives, self.inquiry.next) = (0, 0, None);
        }
        since
    }
}
