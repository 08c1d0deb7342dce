//! The coordinator, or a shard, as its client knows it: which connections to it there are, and what became of others.

use std::time::Instant;

use super::fallback::Fallbacks;
use super::usage::Usage;
use crate::transport::frames::Link;

/// Ends a connection by which a shard reads memory of this end's, before it returns: nothing that is read later counts.
pub(super) type EndOfLoan = Box<dyn Fn() + Send + Sync>;

pub(super) struct Peer {
    /// Connections that are greeted.
    pub(super) links: Vec<Link>,
    /// Connections over which the shard reads this end's memory, each with what ends that reading.
    pub(super) loans: Vec<(Link, EndOfLoan)>,
    /// Connections in existence or on their way, by their numbers.
    pub(super) opened: Vec<usize>,
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
    pub(super) fallbacks: Fallbacks,
    /// Times in a row that it did not answer on its Unix socket.
    pub(super) unmet: u32,
    /// Since when it cannot be reached.
    pub(super) gone_since: Option<Instant>,
    /// It has been reached under the block map in force.
    pub(super) met: bool,
    /// It must not be reached by the only way there is.
    pub(super) barred: bool,
}

impl Peer {
    /// One that nothing is known of yet.
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
