//! Connections to the coordinator and to the shards: opened, greeted, ended, opened again.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Shared;
use super::detours::{Detours, Due};
use super::memory::TransportChoice;
use super::moving::{IN_QUESTION, overtaken};
use super::usage::Usage;
use super::whereabouts::Way;
use crate::client::conversation::{Control, Data};
use crate::client::core::Part;
use crate::transport::frames::{Framed, Link};
use crate::transport::reactor::Thread;
use crate::transport::stream::Close;
use crate::transport::tcp::SocketOptions;

/// Ends a connection by which a shard reads memory of this end's, before it returns: nothing that is read later counts.
pub(in crate::client) type EndOfLoan = Box<dyn Fn() + Send + Sync>;

pub(super) struct Peer {
    /// Connections that are greeted.
    pub(super) links: Vec<Link>,
    /// Connections over which the shard reads this end's memory, each with what ends that reading.
    pub(super) lenders: Vec<(Link, EndOfLoan)>,
    /// Connections in existence or on their way, by their numbers.
    opened: Vec<usize>,
    /// When to try again.
    pub(super) retry_at: Option<Instant>,
    pub(super) tries: u32,
    /// What was seen when the last one ended.
    pub(super) trouble: Option<String>,
    /// The same, and it is kept when there is another one.
    pub(super) lost: Option<String>,
    /// Which of them are used.
    pub(super) usage: Usage,
    /// Which of `links` is next.
    pub(super) turn: usize,
    /// Which of them go by TCP though there is a better way.
    pub(super) detours: Detours,
    /// Times in a row that it did not answer on its Unix socket.
    pub(super) unmet: u32,
    /// Since when it cannot be reached.
    pub(super) gone_since: Option<Instant>,
    /// It has been reached under the block map in force.
    pub(super) met: bool,
    /// It must not be reached by the only way there is.
    barred: bool,
}

impl Peer {
    /// One that nothing is known of yet.
    pub(super) fn new(barred: bool) -> Peer {
        Peer {
            links: Vec::new(),
            lenders: Vec::new(),
            opened: Vec::new(),
            retry_at: None,
            tries: 0,
            trouble: None,
            lost: None,
            turn: 0,
            usage: Usage::default(),
            detours: Detours::default(),
            unmet: 0,
            gone_since: (!barred).then(Instant::now),
            met: false,
            barred,
        }
    }

    fn greeted(&mut self) {
        self.tries = 0;
        self.trouble = None;
        self.gone_since = None;
        self.met = true;
    }
}

/// Why a connection that goes by TCP is closed when there is one that goes a better way.
const OVERCOME: &str = "another connection has come about in its place, by a better way";

/// A way to a shard that is better than TCP, where it comes about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::client) enum Shortcut {
    Memory,
    Rdma,
}

impl Shortcut {
    /// The choice that allows no other way.
    fn alone(self) -> TransportChoice {
        match self {
            Shortcut::Memory => TransportChoice::SharedMemory,
            Shortcut::Rdma => TransportChoice::Rdma,
        }
    }
}

impl std::fmt::Display for Shortcut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Shortcut::Memory => "shared memory",
            Shortcut::Rdma => "RDMA",
        })
    }
}

impl Shared {
    /// The greeting of a connection, which goes by memory if that ends in some way.
    ///
    /// # Errors
    /// If it was opened under a block map that is no longer in force.
    pub(in crate::client) fn greeted(
        &self,
        way: &Way,
        link: &Link,
        by_memory: Option<EndOfLoan>,
    ) -> Result<(), Close> {
        let mut inner = self.inner.lock();
        if !inner.is_in_force(way) {
            return Err(overtaken());
        }
        let mut actions = Vec::new();
        let now = self.now();
        match way.part {
            None => {
                inner.coordinator.greeted();
                inner.coordinator.links = vec![link.clone()];
                inner.core.coordinator_up(now, &mut actions);
            }
            Some(part) => {
                let peer = &mut inner.parts[part];
                peer.greeted();
                let better = by_memory.is_some();
                if let Some(end) = by_memory {
                    peer.unmet = 0;
                    peer.lenders.push((link.clone(), end));
                    if let Some(leaving) = peer.detours.overcome(way.number, Instant::now()) {
                        let address = way.address();
                        tracing::info!(model = %self.model, %address, "in place of one by TCP there is a better way");
                        peer.usage.rest(&leaving);
                    }
                } else {
                    peer.detours.greeted(way.number, link);
                }
                // Those that come first are used.
                let worse = |other: &Link| better && peer.detours.is_one(other);
                let at = peer.links.iter().position(worse).unwrap_or(peer.links.len());
                peer.links.insert(at, link.clone());
                inner.core.shard_up(part, now, &mut actions);
                // For the next connection.
                self.changed.notify_all();
            }
        }
        self.act(inner, actions);
        Ok(())
    }

    /// A connection is over.
    pub(in crate::client) fn ended(&self, way: &Way, link: &Link, why: &str) {
        let mut inner = self.inner.lock();
        if !inner.is_in_force(way) {
            return;
        }
        let mut actions = Vec::new();
        let now = self.now();
        let peer = match way.part {
            None => &mut inner.coordinator,
            Some(part) => &mut inner.parts[part],
        };
        peer.opened.retain(|&number| number != way.number);
        if peer.detours.ended(way.number, link, Instant::now()) {
            // There are others, and all is as before.
            tracing::debug!(model = %self.model, address = %way.address(), "no better way than TCP yet: {why}");
            return;
        }
        let before = peer.links.len();
        peer.links.retain(|known| !known.is(link));
        peer.lenders.retain(|(known, _)| !known.is(link));
        peer.usage.forget(link);
        let was_up = before > peer.links.len();
        let alone = peer.links.is_empty();
        if alone {
            peer.gone_since.get_or_insert_with(Instant::now);
        }
        let replaced = why.contains(OVERCOME);
        if replaced || why.contains(IN_QUESTION) {
            tracing::debug!(model = %self.model, address = %way.address(), "connection ended: {why}");
        } else if !self.is_stopping() && (was_up || peer.trouble.as_deref() != Some(why)) {
            tracing::warn!(model = %self.model, address = %way.address(), "connection lost: {why}");
        }
        if !replaced {
            peer.trouble = Some(why.to_owned());
            peer.lost = peer.trouble.clone();
            let pause = Duration::from_millis(50 << peer.tries.min(5));
            peer.tries += 1;
            peer.retry_at = Some(Instant::now() + pause);
        }
        match way.part {
            None if was_up => inner.core.coordinator_down(now, &mut actions),
            Some(part) if was_up && alone => inner.core.shard_down(part),
            Some(part) if was_up => inner.core.look_after(part, now, &mut actions),
            _ => {}
        }
        self.act(inner, actions);
        self.changed.notify_all();
    }

    /// Opens the connections that are missing, and says when to look again.
    pub(super) fn connect_missing(&self) -> Option<Instant> {
        let mut missing = Vec::new();
        let mut next = None;
        let map = {
            let mut inner = self.inner.lock();
            let connections = self.options.connections;
            let now = Instant::now();
            let mut later = |at: Instant| next = Some(next.map_or(at, |next: Instant| next.min(at)));
            let mut look = |peer: &mut Peer, wanted: usize, part: Option<Part>| {
                if peer.barred {
                    return;
                }
                let free = |peer: &Peer, count: usize| -> Vec<usize> {
                    (0..).filter(|number| !peer.opened.contains(number)).take(count).collect()
                };
                let open = |peer: &mut Peer, numbers: Vec<usize>, missing: &mut Vec<_>| {
                    missing.extend(numbers.iter().map(|&number| (part, number)));
                    peer.opened.extend(numbers);
                };
                // One that only tries is one more.
                let wanted = wanted + usize::from(peer.detours.is_trying());
                if peer.opened.len() < wanted {
                    match peer.retry_at.filter(|&at| at > now) {
                        Some(at) => later(at),
                        None => open(peer, free(peer, wanted - peer.opened.len()), &mut missing),
                    }
                    return;
                }
                let number = free(peer, 1)[0];
                match peer.detours.due(now, number) {
                    Some(Due::Try(number)) => open(peer, vec![number], &mut missing),
                    Some(Due::Close(link)) => link.close(Close::Asked(OVERCOME.into())),
                    Some(Due::At(at)) => later(at),
                    None => {}
                }
            };
            look(&mut inner.coordinator, 1, None);
            for (part, peer) in inner.parts.iter_mut().enumerate() {
                // One after the other, so that the shard knows what the last one is for and puts the next elsewhere.
                let greeted = peer.links.len();
                look(peer, connections.min(greeted + 1), Some(part));
            }
            Arc::clone(&inner.map)
        };
        for (part, number) in missing {
            let way = Way { map: Arc::clone(&map), part, number };
            match part.map(|part| (part, &map.parts[part])) {
                Some((part, place)) if place.by_memory => self.connect_by_memory(way, part),
                Some((part, place)) if place.by_rdma => self.by_rdma(way, part),
                _ => self.connect_one(way),
            }
        }
        next
    }

    #[cfg(feature = "rdma")]
    fn by_rdma(&self, way: Way, part: Part) {
        match self.open_rdma_endpoint() {
            Ok(endpoint) => self.connect_by_rdma(&endpoint, way, part),
            Err(why) => self.without(Shortcut::Rdma, way, part, &why),
        }
    }

    /// The device, which is opened when it is first wanted; if it cannot be, when it is wanted a while later.
    #[cfg(feature = "rdma")]
    fn open_rdma_endpoint(&self) -> Result<Arc<crate::transport::rdma::Endpoint>, String> {
        const AGAIN: Duration = Duration::from_secs(2);
        let mut known = self.rdma_endpoint.lock();
        match &*known {
            Some(Ok(endpoint)) => return Ok(Arc::clone(endpoint)),
            Some(Err((why, at))) if at.elapsed() < AGAIN => return Err(why.clone()),
            Some(Err(_)) | None => {}
        }
        let opened =
            crate::transport::rdma::Endpoint::open(&self.options.rdma).map_err(|error| error.to_string());
        *known = Some(opened.clone().map_err(|why| (why, Instant::now())));
        opened
    }

    #[cfg(not(feature = "rdma"))]
    fn by_rdma(&self, way: Way, part: Part) {
        self.without(Shortcut::Rdma, way, part, crate::transport::NO_RDMA);
    }

    /// A shard cannot be reached by `shortcut`: TCP is taken in its place, if it may be.
    pub(in crate::client) fn without(&self, shortcut: Shortcut, way: Way, part: Part, why: &str) {
        if self.options.transport == shortcut.alone() {
            return self.ended(&way, &Link::default(), &format!("{shortcut}: {why}"));
        }
        if self.is_stopping() {
            return;
        }
        let is_news = {
            let mut inner = self.inner.lock();
            if !inner.is_in_force(&way) {
                return;
            }
            let detours = &mut inner.parts[part].detours;
            if detours.is_trial(way.number) {
                drop(inner);
                return self.ended(&way, &Link::default(), &format!("{shortcut}: {why}"));
            }
            detours.take(way.number, shortcut, why, Instant::now())
        };
        if is_news {
            let address = way.address();
            tracing::warn!(model = %self.model, %address, "no {shortcut} with this shard, using TCP: {why}");
        }
        self.connect_one(way);
    }

    pub(super) fn connect_one(&self, way: Way) {
        let address = way.address();
        if let Ok(resolved) = address.parse() {
            return self.connect_to(way, resolved);
        }
        // The resolver of names may take its time: no deadline and no lease waits for it.
        let (this, name, of_thread) = (self.this.clone(), address.to_owned(), way.clone());
        let resolve = move || {
            let resolved = name.to_socket_addrs().map(|mut all| all.next());
            let Some(shared) = this.upgrade() else { return };
            match resolved {
                Ok(Some(resolved)) => shared.connect_to(of_thread, resolved),
                Ok(None) => shared.ended(&of_thread, &Link::default(), "the address leads nowhere"),
                Err(error) => shared.ended(&of_thread, &Link::default(), &error.to_string()),
            }
        };
        if let Err(error) = std::thread::Builder::new().name("client-resolver".into()).spawn(resolve) {
            self.ended(&way, &Link::default(), &format!("no thread to resolve its name: {error}"));
        }
    }

    fn connect_to(&self, way: Way, resolved: SocketAddr) {
        let (Some(this), Some(net)) = (self.this.upgrade(), &self.net) else { return };
        let link = Link::default();
        let deadline = Instant::now() + self.options.patience;
        let options = SocketOptions::default();
        let connected = match way.part {
            None => {
                let stream = Framed::new(Control::new(this, way.clone()), link.clone(), 16 << 10);
                net.connect(resolved, options, deadline, Box::new(stream), Thread::Number(0))
            }
            Some(part) => {
                let stream = Framed::new(Data::new(this, way.clone(), part, None), link.clone(), 128);
                // Those of one shard on different threads, so that all have work until the last shard is done.
                let thread = Thread::Number(part + way.number);
                net.connect(resolved, options, deadline, Box::new(stream), thread)
            }
        };
        if let Err(error) = connected {
            self.ended(&way, &link, &error.to_string());
        }
    }
}
