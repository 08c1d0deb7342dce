//! The coordinator or a shard as the client knows it, with its connections.

use std::time::Instant;

use super::fallback::Fallbacks;
use super::usage::Usage;
use crate::transport::frames::Link;
use crate::vocabulary::phase::Heard;

/// Ends a connection by which a shard reads this end's memory. Nothing that is read after it returns counts.
pub(super) type EndOfLoan = Box<dyn Fn() + Send + Sync>;

pub(super) struct Peer {
    /// The greeted connections.
    pub(super) links: Vec<Link>,
    /// The connections over which the shard reads this end's memory, each with the function that ends the reading.
    pub(super) loans: Vec<(Link, EndOfLoan)>,
    /// The numbers of all connections that exist or are being opened.
    pub(super) opened: Vec<usize>,
    /// The time of the next try.
    pub(super) retry_at: Option<Instant>,
    pub(super) tries: u32,
    /// The error of the last connection that ended. A new connection clears it.
    pub(super) trouble: Option<String>,
    /// The same error. A new connection does not clear it.
    pub(super) lost: Option<String>,
    /// The connections that are in use.
    pub(super) usage: Usage,
    /// The index in `links` of the next connection to use.
    pub(super) turn: usize,
    /// The connections that go by TCP for want of a better path.
    pub(super) fallbacks: Fallbacks,
    /// How often in a row the shard did not answer on its Unix socket.
    pub(super) unmet: u32,
    /// The time since which the shard is out of reach.
    pub(super) gone_since: Option<Instant>,
    /// When the coordinator was last heard.
    pub(super) heard: Heard,
    /// Whether the shard was reached under the block map in force.
    pub(super) met: bool,
    /// Whether the only path to the shard is forbidden.
    pub(super) barred: bool,
}

impl Peer {
    /// A peer that was not reached yet.
    pub(super) fn new(barred: bool) -> Peer {
        Peer {
            links: Vec::new(),
            loans: Vec::new(),
            opened: Vec::new(),
            retry_at: None,
            tries: 0,
            trouble: None,
            lost: None,
            turn: 0,
            usage: Usage::default(),
            fallbacks: Fallbacks::default(),
            unmet: 0,
            gone_since: (!barred).then(Instant::now),
            heard: Heard::default(),
            met: false,
            barred,
        }
    }

    pub(super) fn greeted(&mut self) {
        self.tries = 0;
        self.trouble = None;
        self.gone_since = None;
        self.met = true;
    }
}
