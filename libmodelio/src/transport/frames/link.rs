//! A connection's queue of messages, which any thread may fill.

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, send};
use parking_lot::Mutex;

use crate::transport::stream::{Close, Connection, LentPayload, Traffic};
use crate::vocabulary::ids::Epoch;
use crate::wire::{self, Message, Payload};

/// The most messages that may wait. With more, the peer counts as too slow, and the connection ends.
const MAX_QUEUED: usize = 1 << 16;
/// The most bytes of payload that may wait before the peer's next frame is read.
const MAX_QUEUED_BYTES: usize = 32 << 20;
/// A payload of at most so many bytes may be sent by the thread that has it: copying takes less than waking another
/// one.
const MAX_SENT_HERE: usize = wire::MAX_SMALL_MODEL as usize;

/// An outgoing message.
pub struct Outgoing {
    /// The message.
    pub message: Message,
    /// The request's number, which the answer repeats; 0 for messages without answer.
    pub request: u64,
    /// The epoch of the block map.
    pub epoch: Epoch,
    /// The payload.
    pub payload: Option<LentPayload>,
}

impl Outgoing {
    /// A message without a payload.
    pub fn new(request: u64, message: Message) -> Outgoing {
        Outgoing { message, request, epoch: Epoch(0), payload: None }
    }

    /// The payload, if it is a patch.
    pub(super) fn patch(&mut self) -> Option<&mut LentPayload> {
        let is_patch = matches!(
            self.message,
            Message::Changes { .. } | Message::ChangesAhead { .. } | Message::PushChanges { .. }
        );
        self.payload.as_mut().filter(|_| is_patch)
    }

    /// Length and checksum of the payload.
    pub(super) fn described(&self) -> Payload {
        let described = |piece: &LentPayload| Payload { len: piece.len() as u32, crc: piece.crc() };
        self.payload.as_ref().map_or(Payload::NONE, described)
    }
}

/// Sends messages on a connection, from any thread. It is cheap to clone.
#[derive(Clone, Default)]
pub struct Link(Arc<LinkState>);

/// The messages that wait, and whose turn it is to send.
#[derive(Default)]
struct Queue {
    messages: VecDeque<Outgoing>,
    /// The serving thread has found nothing to send, and the kernel has all that it sent before. Others may send then.
    is_idle: bool,
    /// The end of a frame of which the kernel took the beginning from another thread. It goes before all messages.
    rest: Vec<u8>,
}

#[derive(Default)]
struct LinkState {
    queue: Mutex<Queue>,
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

    /// Sends a message without a payload, or with a short one. If the serving thread sleeps and has nothing to send,
    /// this thread hands the message to the kernel: to wake the other one for that takes as long, and what it does
    /// comes on top.
    ///
    /// For messages to one peer or to a few, because the caller may hold a lock. A thread that serves many peers sends
    /// with fewer system calls.
    pub fn send_now(&self, outgoing: Outgoing) {
        if !self.is_sent_here(&outgoing) {
            self.send(outgoing);
        }
    }

    /// Whether this thread has sent the message.
    ///
    /// Frames do not mix, and keep their order: the lock is held from the look at the queue until the kernel has the
    /// bytes. Before the serving thread names bytes to the kernel, it notes under the same lock that it is not idle. No
    /// wake-up is lost: what this thread leaves over is in `rest` before the serving thread is woken for it.
    fn is_sent_here(&self, outgoing: &Outgoing) -> bool {
        let payload = outgoing.payload.as_ref();
        if payload.is_some_and(|piece| piece.len() > MAX_SENT_HERE) || self.0.ending.load(Ordering::Relaxed) {
            return false;
        }
        let Some(socket) = self.0.connection.get().and_then(Connection::resting_socket) else { return false };
        let mut queue = self.0.queue.lock();
        if !queue.is_idle || !queue.rest.is_empty() || !queue.messages.is_empty() {
            return false;
        }
        let mut frame = Vec::new();
        let Outgoing { message, request, epoch, .. } = outgoing;
        if wire::append_frame(&mut frame, message, *request, *epoch, outgoing.described()).is_err() {
            // The serving thread reports it.
            return false;
        }
        payload.into_iter().for_each(|piece| piece.append_to(&mut frame));
        let sent = loop {
            match send(socket.as_raw_fd(), &frame, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL) {
                Err(Errno::EINTR) => {}
                // Of a full socket or a broken connection, the serving thread learns by itself.
                Err(_) | Ok(0) => return false,
                Ok(sent) => break sent,
            }
        };
        frame.drain(..sent);
        let is_left = !frame.is_empty();
        queue.rest = frame;
        drop(queue);
        if is_left {
            self.wake();
        }
        true
    }

    /// The serving thread looks for something to send. Returns what goes before all messages.
    pub(super) fn begin(&self) -> Vec<u8> {
        let mut queue = self.0.queue.lock();
        queue.is_idle = false;
        std::mem::take(&mut queue.rest)
    }

    /// The serving thread has found nothing to send. A message that has come meanwhile wakes it.
    pub(super) fn rests(&self) {
        self.0.queue.lock().is_idle = true;
    }

    fn queue(&self, outgoing: Outgoing) {
        if self.0.ending.load(Ordering::Relaxed) {
            return;
        }
        let bytes = outgoing.payload.as_ref().map_or(0, LentPayload::len);
        let mut queue = self.0.queue.lock();
        self.0.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        queue.messages.push_back(outgoing);
    }

    /// Whether the queue is so full that the peer is not read before it takes some messages.
    pub(super) fn is_full(&self) -> bool {
        self.0.queued_bytes.load(Ordering::Relaxed) > MAX_QUEUED_BYTES
    }

    pub(super) fn pop(&self) -> Option<Outgoing> {
        let mut queue = self.0.queue.lock();
        let outgoing = queue.messages.pop_front()?;
        let bytes = outgoing.payload.as_ref().map_or(0, LentPayload::len);
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
        let queue = self.0.queue.lock();
        queue.messages.is_empty() && queue.rest.is_empty()
    }

    /// Whether the queue is so long that the peer counts as too slow.
    pub(super) fn is_stuffed(&self) -> bool {
        self.0.queue.lock().messages.len() > MAX_QUEUED
    }

    /// Drops the queued messages.
    pub(super) fn clear(&self) {
        *self.0.queue.lock() = Queue::default();
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

    /// How its bytes get on, if they go through TCP to another host.
    pub(super) fn traffic(&self) -> Option<Traffic> {
        self.0.connection.get().and_then(Connection::traffic)
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

#[cfg(test)]
mod tests;
