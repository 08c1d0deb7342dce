//! The messages of a connection: a [`Conversation`] handles messages, and knows nothing of frames and bytes.

use std::time::{Duration, Instant};

use super::link::{Link, Outgoing};
use crate::transport::stream::{Close, Target};
use crate::wire::{Limits, Message, Received, Refusal};

/// What to do with the payload of a message.
pub enum Take {
    /// There is no payload, or it is discarded.
    Nothing,
    /// The payload is received into the connection's memory, and lent to [`Conversation::payload`].
    Buffered,
    /// The payload is received straight into this place.
    Into(Target),
    /// The message must wait. It is handed over again after a wake-up, and nothing is received before.
    Later,
}

/// One end of a conversation. One thread at a time makes all calls. None may block.
pub trait Conversation: Send {
    /// The connection is open. `link` sends messages on it.
    fn opened(&mut self, link: &Link) -> Result<(), Close>;

    /// Takes a message, and says where its payload goes.
    ///
    /// # Errors
    /// The connection ends.
    fn message(&mut self, received: &Received) -> Result<Take, Close>;

    /// The payload of the message has come whole and undamaged. `bytes` holds it if it was buffered; otherwise it is
    /// in its place.
    ///
    /// # Errors
    /// The connection ends.
    fn payload(&mut self, received: &Received, bytes: &[u8]) -> Result<(), Close>;

    /// The next message to send, after those of the link. It is called after a wake-up, and when the kernel has taken
    /// the bytes sent before.
    fn next(&mut self) -> Option<Outgoing> {
        None
    }

    /// The longest frame that the peer may send from now on. It is called at the beginning and after each message.
    fn limits(&self) -> Limits;

    /// The longest silence before the peer counts as dead. `None` until the greeting is over.
    fn silence(&self) -> Option<Duration>;

    /// `bytes` of the payload under way came together with its message, and were copied to their place.
    fn copied(&mut self, bytes: usize) {
        let _ = bytes;
    }

    /// The peer has sent bytes. This is called now and then.
    fn alive(&mut self) {}

    /// Time passes, or the connection was woken. Returns when to call again at the latest.
    ///
    /// # Errors
    /// The connection ends.
    fn tick(&mut self, now: Instant) -> Result<Option<Instant>, Close> {
        let _ = now;
        Ok(None)
    }

    /// The last message to a peer whose bytes are no valid frame. By default it is sent only if the peer can learn
    /// from it, by a refusal of its protocol.
    fn farewell(&mut self, refusal: Refusal) -> Option<Outgoing> {
        let protocol = matches!(refusal, Refusal::Protocol { .. });
        protocol.then(|| Outgoing::new(0, Message::Refused(refusal)))
    }

    /// Nothing is received any more, and the last message is being sent. The payload under way does not come.
    fn given_up(&mut self) {}

    /// The connection has ended.
    fn closed(&mut self, why: &Close);
}
