//! The timers of a serving thread's descriptors.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use super::table::Entry;
use crate::transport::stream::Token;

/// Timers, the earliest first. A timer that its entry no longer waits for stays queued, and has no effect.
#[derive(Default)]
pub(super) struct Timers(BinaryHeap<Reverse<(Instant, Token)>>);

impl Timers {
    /// Makes sure that a timer is queued for the entry's next deadline.
    pub(super) fn queue(&mut self, token: Token, entry: &mut Entry) {
        let Some(next) = entry.due.into_iter().chain(entry.retry).min() else { return };
        if entry.queued.is_none_or(|queued| next < queued) {
            entry.queued = Some(next);
            self.0.push(Reverse((next, token)));
        }
    }

    /// The earliest timer.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.peek().map(|Reverse((at, _))| *at)
    }

    /// Takes the earliest timer if it is due.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<(Instant, Token)> {
        self.0.peek().filter(|Reverse((at, _))| *at <= now)?;
        self.0.pop().map(|Reverse(timer)| timer)
    }
}
