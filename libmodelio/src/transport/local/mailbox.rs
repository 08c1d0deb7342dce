//! The mailbox of a model in one process: its coordinator, the partition beside it and a client leave messages there
//! for each other.
//!
//! An end puts a message in under its own lock, so that messages keep the order of the decisions behind them. When it
//! has released that lock, it empties the mailbox ([`Mailbox::drain`]) on the same thread. If another thread is doing
//! so already, that thread delivers the new message, too. So no end is ever called from another end's stack, and only
//! one thread at a time delivers.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::vocabulary::block_ranges::BlockRanges;
use crate::vocabulary::ids::{ClientId, PlanId};
use crate::wire::Message;

/// An end that takes messages.
pub trait Recipient: Send + Sync {
    /// Takes a message of another end. No lock is held.
    fn receive(self: Arc<Self>, from: MailboxEnd, mail: Mail);

    /// Gives callers the answers that have come. This is called when the mailbox is empty, so that their next request
    /// is delivered at once, or after [`ANSWERS_AFTER`] messages.
    fn answer_callers(&self) {}
}

/// The most messages that are delivered before callers get their answers.
const ANSWERS_AFTER: usize = 64;

/// An end of a mailbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MailboxEnd {
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
    /// The partition tells the coordinator whether the next version has a buffer.
    Buffer(bool),
    /// The partition tells the client that a block which had to wait may be offered again, or that a version which it
    /// has asked for may be there.
    Retry,
    /// The coordinator hands blocks to the partition that came with a commit, or the partition hands them back.
    Granted(Granted),
}

/// Blocks that came with a commit, and are granted.
#[derive(Clone, Debug, PartialEq)]
pub struct Granted {
    /// The client.
    pub client: ClientId,
    /// The plan.
    pub plan: PlanId,
    /// The blocks.
    pub blocks: BlockRanges,
    /// Their bytes, one block behind the other.
    pub bytes: Arc<[u8]>,
    /// The grant, which the client gets if they are not taken.
    pub grant: Box<Message>,
}

/// The mailbox between the ends of one model. It keeps no end alive.
pub struct Mailbox {
    coordinator: Weak<dyn Recipient>,
    partition: Weak<dyn Recipient>,
    client: OnceLock<Weak<dyn Recipient>>,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    /// Messages with sender and receiver.
    ready: VecDeque<(MailboxEnd, MailboxEnd, Mail)>,
    /// A thread is delivering.
    draining: bool,
}

impl Mailbox {
    /// A mailbox between a coordinator and a partition.
    pub fn new(coordinator: Weak<dyn Recipient>, partition: Weak<dyn Recipient>) -> Mailbox {
        Mailbox { coordinator, partition, client: OnceLock::new(), queue: Mutex::default() }
    }

    /// Adds a client. False if there is one already.
    pub fn join(&self, client: Weak<dyn Recipient>) -> bool {
        self.client.set(client).is_ok()
    }

    /// Puts a message in. The caller drains the mailbox once it has released its locks.
    pub fn put(&self, from: MailboxEnd, to: MailboxEnd, mail: Mail) {
        self.queue.lock().ready.push_back((from, to, mail));
    }

    /// Delivers all messages, and those that are put in meanwhile. It does nothing if another thread is delivering.
    /// The caller must hold no lock of any end.
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
                MailboxEnd::Coordinator => Some(&self.coordinator),
                MailboxEnd::Partition => Some(&self.partition),
                MailboxEnd::Client => self.client.get(),
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

    /// The next message. If there is none, no thread is delivering from then on.
    fn next(&self) -> Option<(MailboxEnd, MailboxEnd, Mail)> {
        let mut queue = self.queue.lock();
        let mail = queue.ready.pop_front();
        queue.draining = mail.is_some();
        mail
    }
}

#[cfg(test)]
mod tests;
