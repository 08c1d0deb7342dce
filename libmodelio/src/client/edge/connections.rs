//! Connections to the lead and to the shards: opened, greeted, ended, opened again.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::Shared;
use crate::client::conversation::{Control, Data};
use crate::client::core::Part;
use crate::link::{Framed, Link};
use crate::net::{SocketOptions, Thread};

#[derive(Default)]
pub(super) struct Peer {
    /// Connections that are greeted.
    pub(super) links: Vec<Link>,
    /// Connections in existence or on their way.
    pub(super) opened: usize,
    /// When to try again.
    pub(super) retry_at: Option<Instant>,
    pub(super) tries: u32,
    /// What was seen when the last one ended.
    pub(super) trouble: Option<String>,
    /// Which of `links` is next.
    pub(super) turn: usize,
    /// Why there is no memory in common with it, though it is on this host.
    pub(super) no_memory: Option<String>,
}

impl Shared {
    /// The greeting of a connection for control (`None`) or for blocks of a part.
    pub(in crate::client) fn greeted(&self, part: Option<Part>, link: &Link, by_memory: bool) {
        let mut inner = self.inner.lock();
        let mut actions = Vec::new();
        let now = self.now();
        match part {
            None => {
                inner.lead.tries = 0;
                inner.lead.trouble = None;
                inner.lead.links = vec![link.clone()];
                inner.core.lead_up(now, &mut actions);
            }
            Some(part) => {
                let peer = &mut inner.parts[part];
                peer.tries = 0;
                peer.trouble = None;
                if by_memory {
                    peer.no_memory = None;
                }
                peer.links.push(link.clone());
                inner.core.shard_up(part, now, &mut actions);
            }
        }
        self.act(inner, actions);
    }

    /// A connection is over.
    pub(in crate::client) fn ended(&self, part: Option<Part>, link: &Link, why: &str) {
        let mut inner = self.inner.lock();
        let mut actions = Vec::new();
        let now = self.now();
        let peer = match part {
            None => &mut inner.lead,
            Some(part) => &mut inner.parts[part],
        };
        peer.opened = peer.opened.saturating_sub(1);
        let before = peer.links.len();
        peer.links.retain(|known| !known.is(link));
        let was_up = before > peer.links.len();
        let alone = peer.links.is_empty();
        if !self.is_stopping() && (was_up || peer.trouble.as_deref() != Some(why)) {
            let address = part.map_or(&self.lead_address, |part| &self.part_addresses[part]);
            tracing::warn!(model = %self.model, %address, "connection lost: {why}");
        }
        peer.trouble = Some(why.to_owned());
        let pause = Duration::from_millis(50 << peer.tries.min(5));
        peer.tries += 1;
        peer.retry_at = Some(Instant::now() + pause);
        match part {
            None if was_up => inner.core.lead_down(),
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
        {
            let mut inner = self.inner.lock();
            let connections = self.options.connections;
            let now = Instant::now();
            let mut look = |peer: &mut Peer, wanted: usize, part: Option<Part>| {
                if peer.opened >= wanted {
                    return;
                }
                match peer.retry_at.filter(|&at| at > now) {
                    Some(at) => next = Some(next.map_or(at, |next: Instant| next.min(at))),
                    None => {
                        missing.extend((peer.opened..wanted).map(|_| part));
                        peer.opened = wanted;
                    }
                }
            };
            look(&mut inner.lead, 1, None);
            for (part, peer) in inner.parts.iter_mut().enumerate() {
                look(peer, connections, Some(part));
            }
        }
        for (index, part) in missing.into_iter().enumerate() {
            match part.filter(|&part| self.by_memory[part]) {
                Some(part) => self.connect_by_memory(part, index),
                None => self.connect_one(part, index),
            }
        }
        next
    }

    pub(super) fn connect_one(&self, part: Option<Part>, index: usize) {
        let Some(this) = self.this.upgrade() else { return };
        let link = Link::default();
        let address = part.map_or(&self.lead_address, |part| &self.part_addresses[part]);
        let resolved = address.to_socket_addrs().map(|mut all| all.next());
        let resolved: SocketAddr = match resolved {
            Ok(Some(resolved)) => resolved,
            Ok(None) => return self.ended(part, &link, "the address leads nowhere"),
            Err(error) => return self.ended(part, &link, &error.to_string()),
        };
        let deadline = Instant::now() + self.options.patience;
        let options = SocketOptions::default();
        let connected = match part {
            None => {
                let stream = Framed::new(Control::new(this), link.clone(), 16 << 10);
                self.net.connect(resolved, options, deadline, Box::new(stream), Thread::Number(0))
            }
            Some(part) => {
                let stream = Framed::new(Data::new(this, part, None), link.clone(), 128);
                self.net.connect(resolved, options, deadline, Box::new(stream), Thread::Number(index))
            }
        };
        if let Err(error) = connected {
            self.ended(part, &link, &error.to_string());
        }
    }
}
