//! The coordinator or a shard as the client knows it, with its connections.

use std::time::Instant;

use crate::client::peers::fallback::Fallbacks;
use crate::transport::frames::Link;
use crate::vocabulary::phase::Heard;

/// Ends a connection by which a shard reads this end's memory. Nothing that is read after it returns counts.
pub(in crate::client) type EndOfLoan = Box<dyn Fn() + Send + Sync>;

pub(in crate::client) struct Peer {
    /// The greeted connections.
    pub(in crate::client) links: Vec<Link>,
    /// The connections over which the shard reads this end's memory, each with the function that ends the reading.
    pub(in crate::client) loans: Vec<(Link, EndOfLoan)>,
    /// The numbers of all connections that exist or are being opened.
    pub(in crate::client) opened: Vec<usize>,
    /// The time of the next try.
    pub(in crate::client) retry_at: Option<Instant>,
    pub(in crate::client) tries: u32,
    /// The error of the last connection that ended. A new connection clears it.
    pub(in crate::client) trouble: Option<String>,
    /// The same error. A new connection does not clear it.
    pub(in crate::client) lost: Option<String>,
    /// The connections that the shard has parked. They are used if nothing else is, or if something is lost.
    pub(in crate::client) parked: Vec<Link>,
    /// The index in `links` of the next connection to use.
    pub(in crate::client) turn: usize,
    /// The connections that go by TCP for want of a better path.
    pub(in crate::client) fallbacks: Fallbacks,
    /// How often in a row the shard did not answer on its Unix socket.
    pub(in crate::client) unmet: u32,
    /// The time since which the shard is out of reach.
    pub(in crate::client) gone_since: Option<Instant>,
    /// When the coordinator was last heard.
    pub(in crate::client) heard: Heard,
    /// Whether the shard was reached under the block map in force.
    pub(in crate::client) met: bool,
    /// Whether the only path to the shard is forbidden.
    pub(in crate::client) barred: bool,
}

impl Peer {
    /// A peer that was not reached yet.
    pub(in crate::client) fn new(barred: bool) -> Peer {
        Peer {
            links: Vec::new(),
            loans: Vec::new(),
            opened: Vec::new(),
            retry_at: None,
            tries: 0,
            trouble: None,
            lost: None,
            turn: 0,
            parked: Vec::new(),
            fallbacks: Fallbacks::default(),
            unmet: 0,
            gone_since: (!barred).then(Instant::now),
            heard: Heard::default(),
            met: false,
            barred,
        }
    }

    /// Whether blocks go over `link`, one of `links`. At most `most` of them are in use, or all while something does not
    /// progress.
    pub(in crate::client) fn uses(&self, link: &Link, most: usize, struggles: bool) -> bool {
        let is_parked = |link: &Link| self.parked.iter().any(|parked| parked.is(link));
        let all = struggles || self.links.iter().all(is_parked);
        let used = self.links.iter().filter(|link| all || !is_parked(link));
        used.take(if struggles { usize::MAX } else { most }).any(|used| used.is(link))
    }

    /// The shard parks the connection, or uses it again. True if that is news.
    pub(in crate::client) fn park(&mut self, link: &Link, parked: bool) -> bool {
        let before = self.parked.len();
        self.parked.retain(|known| !known.is(link));
        if parked {
            self.parked.push(link.clone());
        }
        self.parked.len() != before
    }

    pub(in crate::client) fn greeted(&mut self) {
        self.tries = 0;
        self.trouble = None;
        self.gone_since = None;
        self.met = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The connections in use, of three.
    fn used(peer: &Peer, most: usize, struggles: bool) -> Vec<usize> {
        (0..peer.links.len()).filter(|&at| peer.uses(&peer.links[at], most, struggles)).collect()
    }

    #[test]
    fn as_many_connections_are_used_as_are_wanted_and_never_none() {
        let links: Vec<Link> = (0..3).map(|_| Link::default()).collect();
        let mut peer = Peer { links: links.clone(), ..Peer::new(false) };
        assert_eq!(used(&peer, 2, false), [0, 1]);
        assert_eq!(used(&peer, 2, true), [0, 1, 2]);
        assert!(peer.park(&links[0], true) && !peer.park(&links[0], true));
        assert_eq!(used(&peer, 1, false), [1]);
        assert_eq!(used(&peer, 1, true), [0, 1, 2]);
        links[1..].iter().for_each(|link| assert!(peer.park(link, true)));
        assert_eq!(used(&peer, 1, false), [0]);
        assert!(peer.park(&links[2], false));
        assert_eq!(used(&peer, 1, false), [2]);
    }
}
