//! The messages between the ends of a model in one process: its coordinator, the partition beside it, and a
//! client.
//!
//! An end puts a message in under its own lock, so that messages keep the order of the decisions behind them.
//! Once it has released that lock, it empties the mailbox ([`Mailbox::drain`]) on the same thread, unless
//! another thread is already doing so and takes the new message, too. So no end is ever called from another
//! end's stack, and one thread at a time hands messages over.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::vocabulary::ids::LearnerId;
use crate::wire::Message;

/// An end that takes messages.
pub trait Recipient: Send + Sync {
    /// Takes a message of another end. The caller holds no lock.
    fn receive(self: Arc<Self>, from: End, mail: Mail);

    /// Gives callers the answers that have come. The mailbox is empty then, so that their next request is handed
    /// over at once, or it has not been empty for [`ANSWERS_AFTER`] messages.
    fn answer_callers(&self) {}
}

/// Messages that are handed over, at most, before callers get their answers.
const ANSWERS_AFTER: usize = 64;

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
pub enum Mail {
    /// A message under a request's number, as over a connection.
    Message(u64, Message),
    /// The client says to the coordinator that the contribution which this learner writes has a whole block.
    WholeBlock(LearnerId),
    /// The partition says to the coordinator whether the next version has a buffer.
    Buffer(bool),
    /// The partition says to the client that a block which had to wait may be taken now.
    Retry,
}

/// The mailbox between the ends of one model. It keeps none of the ends alive.
pub struct Mailbox {
    coordinator: Weak<dyn Recipient>,
    partition: Weak<dyn Recipient>,
    client: OnceLock<Weak<dyn Recipient>>,
    queue: Mutex<Queue>,
}

/// Whether a message to an end is held back.
type Holds = Box<dyn Fn(End, &Mail) -> bool + Send>;

#[derive(Default)]
struct Queue {
    ready: VecDeque<(End, End, Mail)>,
    /// The held-back messages, with sender and receiver.
    held: VecDeque<(End, End, Mail)>,
    holds: Option<Holds>,
    /// A thread is emptying the mailbox.
    draining: bool,
}

impl Mailbox {
    /// A mailbox between a coordinator and a partition.
    pub fn new(coordinator: Weak<dyn Recipient>, partition: Weak<dyn Recipient>) -> Mailbox {
        Mailbox { coordinator, partition, client: OnceLock::new(), queue: Mutex::default() }
    }

    /// A client takes part. False if there is one already.
    pub fn join(&self, client: Weak<dyn Recipient>) -> bool {
        self.client.set(client).is_ok()
    }

    /// Puts a message in. The caller empties the mailbox once it has released its locks.
    pub fn put(&self, from: End, to: End, mail: Mail) {
        let mut queue = self.queue.lock();
        let is_held = queue.holds.as_ref().is_some_and(|holds| holds(to, &mail));
        let line = if is_held { &mut queue.held } else { &mut queue.ready };
        line.push_back((from, to, mail));
    }

    /// From now on, messages that `holds` matches are held back, each until [`Self::release_one`]: for tests of late
    /// ends.
    pub fn hold(&self, holds: impl Fn(End, &Mail) -> bool + Send + 'static) {
        self.queue.lock().holds = Some(Box::new(holds));
    }

    /// Hands over the message that is held back for longest. False if there is none.
    pub fn release_one(&self) -> bool {
        let mut queue = self.queue.lock();
        let Some(mail) = queue.held.pop_front() else { return false };
        queue.ready.push_back(mail);
        drop(queue);
        self.drain();
        true
    }

    /// Hands over all messages in it, and those that are put in meanwhile. Does nothing if another thread is
    /// already doing so. The caller must hold no lock of any end.
    pub fn drain(&self) {
        {
            let mut queue = self.queue.lock();
            if queue.draining || queue.ready.is_empty() {
                return;
            }
            queue.draining = true;
        }
        let answer = || {
            if let Some(client) = self.client.get().and_then(Weak::upgrade) {
                client.answer_callers();
            }
        };
        let mut handed_over = 0;
        while let Some((from, to, mail)) = self.next() {
            let end = match to {
                End::Coordinator => Some(&self.coordinator),
                End::Partition => Some(&self.partition),
                End::Client => self.client.get(),
            };
            if let Some(end) = end.and_then(Weak::upgrade) {
                end.receive(from, mail);
            }
            handed_over += 1;
            if handed_over % ANSWERS_AFTER == 0 {
                answer();
            }
        }
        answer();
    }

    /// The next message. With none left, no thread is emptying the mailbox from then on.
    fn next(&self) -> Option<(End, End, Mail)> {
        let mut queue = self.queue.lock();
        let mail = queue.ready.pop_front();
        queue.draining = mail.is_some();
        mail
    }
}

#[cfg(test)]
mod tests;
