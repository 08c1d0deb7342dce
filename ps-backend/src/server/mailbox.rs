//! What a coordinator and the partition in its own process say to each other.
//!
//! Either puts a word in under its own lock, so that words keep the order of the decisions that they come from. Once it
//! has let go of that lock it has the mailbox emptied ([`Mailbox::drain`]): here, on the same thread, unless a thread is
//! at it already, which then takes what was put in, too. So neither end is ever called from the other one's stack, and
//! at any time one thread carries words.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use libmodelio::wire::Message;
use parking_lot::Mutex;

/// Takes what the other end says.
pub(super) trait Hears: Send + Sync {
    /// The other end has said this. No lock is held.
    fn hears(self: Arc<Self>, request: u64, message: Message);
}

/// An end of a mailbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    Coordinator,
    Partition,
}

/// Between a coordinator and a partition. It keeps neither.
pub(super) struct Mailbox {
    coordinator: Weak<dyn Hears>,
    partition: Weak<dyn Hears>,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    words: VecDeque<(To, u64, Message)>,
    /// A thread is at it.
    draining: bool,
}

impl Mailbox {
    pub(super) fn new(coordinator: Weak<dyn Hears>, partition: Weak<dyn Hears>) -> Mailbox {
        Mailbox { coordinator, partition, queue: Mutex::default() }
    }

    /// Puts a word in. Whoever does has it emptied, once its locks are let go of.
    pub(super) fn put(&self, to: To, request: u64, message: Message) {
        self.queue.lock().words.push_back((to, request, message));
    }

    /// Hands over all that is in it, and what is put in meanwhile; nothing if a thread is at it, which does. No lock of
    /// either end may be held.
    pub(super) fn drain(&self) {
        {
            let mut queue = self.queue.lock();
            if queue.draining || queue.words.is_empty() {
                return;
            }
            queue.draining = true;
        }
        while let Some((to, request, message)) = self.next() {
            let end = match to {
                To::Coordinator => &self.coordinator,
                To::Partition => &self.partition,
            };
            if let Some(end) = end.upgrade() {
                end.hears(request, message);
            }
        }
    }

    /// The next word; with none left, nobody is at it from then on.
    fn next(&self) -> Option<(To, u64, Message)> {
        let mut queue = self.queue.lock();
        let word = queue.words.pop_front();
        queue.draining = word.is_some();
        word
    }
}

#[cfg(test)]
mod tests;
