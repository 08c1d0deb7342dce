//! The messages between the ends of a model in one process: its coordinator, the partition beside it, and a
//! client.
//!
//! An end puts a word in under its own lock, so that words keep the order of the decisions behind them. Once
//! it has released that lock, it empties the mailbox ([`Mailbox::drain`]) on the same thread, unless another
//! thread is already doing so and takes the new word, too. So no end is ever called from another end's stack,
//! and one thread at a time carries words.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::vocabulary::ids::LearnerId;
use crate::wire::Message;

/// Takes what another end says.
pub trait Hears: Send + Sync {
    /// An end has said this. No lock is held.
    fn hears(self: Arc<Self>, from: End, word: Word);

    /// The mailbox is empty, and no thread carries words: callers may now get their answers, and find the
    /// mailbox free for their next request.
    fn rests(&self) {}
}

/// An end of a mailbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The coordinator of the model.
    Coordinator,
    /// The partition of the shard that coordinates it.
    Partition,
    /// A client in the same process, if there is one.
    Client,
}

/// A message from one end to another.
#[derive(Clone, Debug, PartialEq)]
pub enum Word {
    /// A message under a request's number, as over a connection.
    Says(u64, Message),
    /// The client says to the coordinator that the contribution which this learner writes has a whole block.
    IsWhole(LearnerId),
    /// The partition says to the coordinator whether the next version has a buffer.
    Buffer(bool),
    /// The partition says to the client that a block which had to wait may be taken now.
    GoOn,
}

/// The mailbox between the ends of one model. It keeps none of the ends alive.
pub struct Mailbox {
    coordinator: Weak<dyn Hears>,
    partition: Weak<dyn Hears>,
    client: OnceLock<Weak<dyn Hears>>,
    queue: Mutex<Queue>,
}

/// Whether a word to an end is held back.
type Holds = Box<dyn Fn(End, &Word) -> bool + Send>;

#[derive(Default)]
struct Queue {
    words: VecDeque<(End, End, Word)>,
    /// The held-back words, with sender and receiver.
    held: VecDeque<(End, End, Word)>,
    holds: Option<Holds>,
    /// A thread is at it.
    draining: bool,
}

impl Mailbox {
    /// A mailbox between a coordinator and a partition.
    pub fn new(coordinator: Weak<dyn Hears>, partition: Weak<dyn Hears>) -> Mailbox {
        Mailbox { coordinator, partition, client: OnceLock::new(), queue: Mutex::default() }
    }

    /// A client takes part. False if there is one already.
    pub fn join(&self, client: Weak<dyn Hears>) -> bool {
        self.client.set(client).is_ok()
    }

    /// Puts a word in. The caller empties the mailbox once it has released its locks.
    pub fn put(&self, from: End, to: End, word: Word) {
        let mut queue = self.queue.lock();
        let is_held = queue.holds.as_ref().is_some_and(|holds| holds(to, &word));
        let words = if is_held { &mut queue.held } else { &mut queue.words };
        words.push_back((from, to, word));
    }

    /// From now on, words that `holds` matches are held back, each until [`Self::let_go`]: for tests of late
    /// ends.
    pub fn hold(&self, holds: impl Fn(End, &Word) -> bool + Send + 'static) {
        self.queue.lock().holds = Some(Box::new(holds));
    }

    /// Hands over the word that is held back for longest. False if there is none.
    pub fn let_go(&self) -> bool {
        let mut queue = self.queue.lock();
        let Some(word) = queue.held.pop_front() else { return false };
        queue.words.push_back(word);
        drop(queue);
        self.drain();
        true
    }

    /// Hands over all words in it, and those that are put in meanwhile. Does nothing if another thread is
    /// already doing so. The caller must hold no lock of any end.
    pub fn drain(&self) {
        {
            let mut queue = self.queue.lock();
            if queue.draining || queue.words.is_empty() {
                return;
            }
            queue.draining = true;
        }
        while let Some((from, to, word)) = self.next() {
            let end = match to {
                End::Coordinator => Some(&self.coordinator),
                End::Partition => Some(&self.partition),
                End::Client => self.client.get(),
            };
            if let Some(end) = end.and_then(Weak::upgrade) {
                end.hears(from, word);
            }
        }
        if let Some(client) = self.client.get().and_then(Weak::upgrade) {
            client.rests();
        }
    }

    /// The next word; with none left, nobody is at it from then on.
    fn next(&self) -> Option<(End, End, Word)> {
        let mut queue = self.queue.lock();
        let word = queue.words.pop_front();
        queue.draining = word.is_some();
        word
    }
}

#[cfg(test)]
mod tests;
