//! The messages of a connection: a [`Conversation`] handles messages, and knows nothing of frames and bytes.

use std::time::{Duration, Instant};

use super::link::{Link, Outgoing};
use crate::transport::stream::{Close, Target};
use crate::wire::{Limits, Message, Received, Refusal};

/// What to do with the payload of a message.
pub enum Take {
    /// There is no payload, or it is passed over.
    Nothing,
    /// Received into memory of the link, and lent to [`Conversation::payload`].
    Buffered,
    /// Received straight there.
    Into(Target),
    /// Not now: the message is handed over again after a wake-up, and until then nothing is received.
    Later,
}

/// One end of a conversation. All calls come from one thread at a time; none may block.
pub trait Conversation: Send {
    /// The connection is there; `link` sends messages on it.
    fn opened(&mut self, link: &Link) -> Result<(), Close>;

    /// A message has come; says what becomes of its payload, if it has one.
    ///
    /// # Errors
    /// The connection ends.
    fn message(&mut self, received: &Received) -> Result<Take, Close>;

    /// The payload of that message is there, whole and undamaged: `bytes` if it was buffered, otherwise where it was
    /// to go.
    ///
    /// # Errors
    /// The connection ends.
    fn payload(&mut self, received: &Received, bytes: &[u8]) -> Result<(), Close>;

    /// The next message to send, besides those that the link sends. Asked after a wake-up and when the bytes
    /// sent before are with the kernel.
    fn next(&mut self) -> Option<Outgoing> {
        None
    }

    /// How long what the peer sends may be from now on. Asked at the beginning and after each message.
    fn limits(&self) -> Limits;

    /// Longest silence before the peer is taken for dead; `None` until the greeting is over.
    fn silence(&self) -> Option<Duration>;

    /// `bytes` of the payload under way came with its message, and were copied to its place.
    fn copied(&mut self, bytes: usize) {
        let _ = bytes;
    }

    /// Some bytes have come. This is called now and then.
    fn alive(&mut self) {}

    /// Time passes, or the connection was woken; when to call again at the latest.
    ///
    /// # Errors
    /// The connection ends.
    fn tick(&mut self, now: Instant) -> Result<Option<Instant>, Close> {
        let _ = now;
        Ok(None)
    }

    /// The last message to a peer whose bytes are no frame, or do not fit, before the connection is closed.
    /// By default it is sent only if the peer can learn from it: a refusal of its protocol.
    fn farewell(&mut self, refusal: Refusal) -> Option<Outgoing> {
        let protocol = matches!(refusal, Refusal::Protocol { .. });
        protocol.then(|| Outgoing::new(0, Message::Refused(refusal)))
    }

    /// Nothing is taken any more, and the last message is being sent: the payload under way does not come.
    fn given_up(&mut self) {}

    /// The conversation is over.
    fn closed(&mut self, why: &Close);
}
