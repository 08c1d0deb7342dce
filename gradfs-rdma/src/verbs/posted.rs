//! The work of one queue pair that is not reported yet, in the order in which it was added.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use super::work::{Done, Finished, Work};

/// The bits of a number that count the work of one queue pair. Numbers of work are unique over all queue pairs, because
/// a later pair may get the number of one that has ended, whose completions may still come.
const WORK_BITS: u32 = 36;
const MOST_PAIRS: u64 = (1 << (63 - WORK_BITS)) - 1;
static PAIRS: AtomicU64 = AtomicU64::new(0);

struct Sent {
    number: u64,
    /// Whether the piece was reported, if the device reports each.
    done: bool,
    token: u64,
    work: Work,
}

/// Work, with the memory that the device uses for it.
pub(super) struct Posted {
    /// The posted work, and the work that is about to be posted, in order.
    sent: VecDeque<Sent>,
    /// The number of pieces that are not posted yet.
    waiting: usize,
    /// The number of the first piece, and of the next one.
    first: u64,
    next: u64,
    finished: Done,
}

impl Posted {
    /// An empty list with room for `depth` pieces.
    pub(super) fn new(depth: usize) -> Posted {
        let first = (PAIRS.fetch_add(1, Ordering::Relaxed) & MOST_PAIRS) << WORK_BITS;
        Posted { sent: VecDeque::with_capacity(depth), waiting: 0, first, next: first, finished: Vec::new() }
    }

    /// The number of outstanding pieces.
    pub(super) fn len(&self) -> usize {
        self.sent.len()
    }

    /// Adds a piece, to be posted with the next chain.
    pub(super) fn add(&mut self, token: u64, work: Work) {
        self.sent.push_back(Sent { number: self.next, done: false, token, work });
        self.next += 1;
        self.waiting += 1;
    }

    /// The pieces of the next chain, with their numbers. They count as posted from now on.
    pub(super) fn chain(&mut self) -> impl ExactSizeIterator<Item = (u64, &Work)> {
        let first = self.sent.len() - std::mem::take(&mut self.waiting);
        self.sent.range(first..).map(|sent| (sent.number, &sent.work))
    }

    /// Whether the number is that of work of this queue pair.
    pub(super) fn has(&self, number: u64) -> bool {
        (self.first..self.next).contains(&number)
    }

    /// The device reports a piece. All earlier ones are done, too, unless the device reports `each`.
    pub(super) fn reported(&mut self, number: u64, each: bool) {
        if !self.has(number) {
            return;
        }
        let last = match each {
            // A write may be reported before an earlier READ. It is held until all earlier pieces are done.
            true => {
                if let Some(sent) = self.sent.iter_mut().find(|sent| sent.number == number) {
                    sent.done = true;
                }
                self.sent.iter().take_while(|sent| sent.done).last().map(|sent| sent.number)
            }
            false => Some(number),
        };
        let Some(last) = last else { return };
        while let Some(sent) = self.sent.pop_front_if(|sent| sent.number <= last) {
            if !matches!(sent.work, Work::Ring { .. }) {
                self.finished.push(Finished { token: sent.token, work: sent.work });
            }
        }
    }

    /// Moves the finished work, in order, to the end of `done`.
    pub(super) fn take(&mut self, done: &mut Done) {
        done.append(&mut self.finished);
    }

    /// Whether there are finished pieces to take.
    pub(super) fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// Takes all outstanding work, whose memory the device touches no more. The caller drops the result.
    pub(super) fn end(&mut self) -> impl Sized + use<> {
        std::mem::take(&mut self.sent)
    }
}
