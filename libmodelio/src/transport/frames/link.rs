//! A connection's queue of messages, which any thread may fill.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::transport::stream::{Close, Connection, Piece};
use crate::vocabulary::ids::Epoch;
use crate::wire::Message;

/// The most messages that may wait. With more, the peer counts as too slow, and the connection ends.
const MAX_QUEUED: usize = 1 << 16;
/// The most bytes of payload that may wait before the peer's next frame is read.
const MAX_QUEUED_BYTES: usize = 32 << 20;

/// An outgoing message.
pub struct Outgoing {
    /// The message.
    pub message: Message,
    /// The request's number, which the answer repeats; 0 for messages without answer.
    pub request: u64,
    /// The epoch of the block map.
    pub epoch: Epoch,
    /// The payload.
    pub payload: Option<Piece>,
}

impl Outgoing {
    /// A message without a payload.
    pub fn new(request: u64, message: Message) -> Outgoing {
        Outgoing { message, request, epoch: Epoch(0), payload: None }
    }
}

/// Sends messages on a connection, from any thread. It is cheap to clone.
#[derive(Clone, Default)]
pub struct Link(Arc<LinkState>);

#[derive(Default)]
struct LinkState {
    queue: Mutex<VecDeque<Outgoing>>,
    /// Bytes of payload in the queue.
    queued_bytes: AtomicUsize,
    connection: OnceLock<Connection>,
    /// The connection ends once everything is sent.
    ending: AtomicBool,
}

impl Link {
    /// Queues a message. It is lost if the connection has ended.
    pub fn send(&self, outgoing: Outgoing) {
        self.queue(outgoing);
        self.wake();
    }

    fn queue(&self, outgoing: Outgoing) {
        if self.0.ending.load(Ordering::Relaxed) {
            return;
        }
        let bytes = outgoing.payload.as_ref().map_or(0, Piece::len);
        let mut queue = self.0.queue.lock();
        self.0.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        queue.push_back(outgoing);
    }

    /// Whether the queue is so full that the peer is not read before it takes some messages.
    pub(super) fn is_full(&self) -> bool {
        self.0.queued_bytes.load(Ordering::Relaxed) > MAX_QUEUED_BYTES
    }

    pub(super) fn pop(&self) -> Option<Outgoing> {
        let mut queue = self.0.queue.lock();
        let outgoing = queue.pop_front()?;
        let bytes = outgoing.payload.as_ref().map_or(0, Piece::len);
        self.0.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
        Some(outgoing)
    }

    /// The connection is open.
    pub(super) fn attach(&self, connection: &Connection) {
        let _ = self.0.connection.set(connection.clone());
    }

    /// Whether the connection ends when everything is sent.
    pub(super) fn is_ending(&self) -> bool {
        self.0.ending.load(Ordering::Relaxed)
    }

    /// Whether the queue is empty.
    pub(super) fn is_said(&self) -> bool {
        self.0.queue.lock().is_empty()
    }

    /// Whether the queue is so long that the peer counts as too slow.
    pub(super) fn is_stuffed(&self) -> bool {
        self.0.queue.lock().len() > MAX_QUEUED
    }

    /// Drops the queued messages.
    pub(super) fn clear(&self) {
        self.0.queue.lock().clear();
    }

    /// Sends a message without a payload.
    pub fn send_message(&self, request: u64, message: Message) {
        self.send(Outgoing::new(request, message));
    }

    /// Sends a message, and ends the connection once the kernel has it. Later messages are lost.
    pub fn send_last(&self, outgoing: Outgoing) {
        self.queue(outgoing);
        self.0.ending.store(true, Ordering::Relaxed);
        self.wake();
    }

    /// Wakes the conversation, which then receives and sends again.
    pub fn wake(&self) {
        if let Some(connection) = self.0.connection.get() {
            connection.wake();
        }
    }

    /// Marks the connection as one for blocks. Other such connections go to other threads.
    pub fn expect_much(&self) {
        if let Some(connection) = self.0.connection.get() {
            connection.expect_much();
        }
    }

    /// A number that identifies the thread that serves the connection; 0 before it is opened.
    pub fn thread(&self) -> usize {
        self.0.connection.get().map_or(0, Connection::thread)
    }

    /// Ends the connection.
    pub fn close(&self, why: Close) {
        if let Some(connection) = self.0.connection.get() {
            connection.close(why);
        }
    }

    /// Whether two links belong to the same connection.
    pub fn is(&self, other: &Link) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
