//! A conversation as a stream of bytes: received bytes are read, messages are sent, and when it ends, the
//! last messages are sent first.

use std::time::{Duration, Instant};

use super::conversation::Conversation;
use super::link::Link;
use super::reading::Reading;
use super::sending::Sending;
use super::watch::{Watch, reads};
use crate::transport::stream::{Close, Connection, Receive, ReceiveSlices, SendSlices, Stream};

/// Longest time for the last words, and for the peer to hear them.
const FAREWELL: Duration = Duration::from_secs(2);

/// Last words are being said.
struct Farewell {
    why: Close,
    deadline: Instant,
    /// Whether further bytes of the peer are received and passed over. A connection that is closed with bytes
    /// unread is reset, and the reset may overtake the last messages.
    drains: bool,
    said: bool,
}

/// A [`Conversation`] as a [`Stream`].
pub struct Framed<C> {
    conversation: C,
    link: Link,
    reading: Reading,
    sending: Sending,
    watch: Watch,
    /// The connection ends with this when all is said.
    farewell: Option<Farewell>,
}

impl<C: Conversation> Framed<C> {
    /// `ahead` is how many bytes are read besides a payload: few where blocks come one after the other, many where
    /// short messages do.
    pub fn new(conversation: C, link: Link, ahead: usize) -> Framed<C> {
        let reading = Reading::new(&conversation, ahead);
        Framed { conversation, link, reading, sending: Sending::new(), watch: Watch::new(), farewell: None }
    }

    /// Takes what has come, as far as it goes. If that ends the connection, last words are said first.
    fn go_on(&mut self) -> Result<(), Close> {
        match self.reading.digest(&mut self.conversation, &self.link) {
            Err(why) if self.link.is_ending() => {
                // Others may have what was to be received, and there is no need for it to be in memory.
                self.reading.give_up();
                self.conversation.given_up();
                let deadline = Instant::now() + FAREWELL;
                self.farewell = Some(Farewell { why, deadline, drains: true, said: false });
                Ok(())
            }
            outcome => outcome,
        }
    }

    /// Has time watch the frame under way.
    fn mark(&mut self, now: Instant) {
        if self.watch.mark(now, &self.reading, &self.conversation, &self.link) {
            self.link.wake();
        }
    }
}

impl<C: Conversation> Stream for Framed<C> {
    fn opened(&mut self, connection: &Connection) {
        self.watch.opened();
        self.link.attach(connection);
        if let Err(why) = self.conversation.opened(&self.link) {
            connection.close(why);
        }
    }

    fn receive(&mut self, into: &mut ReceiveSlices) -> Receive {
        if self.reading.is_held_up() {
            // The conversation was woken: perhaps it can go on.
            if let Err(why) = self.go_on() {
                self.link.close(why);
                return Receive::Paused;
            }
            // From now on the rest of its frame is expected; perhaps it never comes.
            self.mark(Instant::now());
        }
        match &self.farewell {
            Some(farewell) if farewell.drains => self.reading.drain(into),
            Some(_) => Receive::Paused,
            // A peer that asks for more than it takes is not read until it has taken it.
            None if !reads(&self.reading, &self.link) => Receive::Paused,
            None => self.reading.name(into),
        }
    }

    fn arriving(&mut self, bytes: usize) {
        if self.reading.arriving(bytes) {
            self.watch.alive(Instant::now());
        }
    }

    fn received(&mut self, bytes: usize) -> Result<(), Close> {
        let now = Instant::now();
        self.reading.received(bytes);
        if self.farewell.is_some() {
            return Ok(());
        }
        if self.watch.is_to_report(now) {
            self.conversation.alive();
        }
        self.watch.alive(now);
        self.reading.filled(bytes);
        let outcome = self.go_on();
        self.mark(now);
        outcome
    }

    fn transmit(&mut self, out: &mut SendSlices) {
        let Framed { conversation, link, farewell, .. } = self;
        let next = || {
            let said = link.pop();
            said.or_else(|| if farewell.is_none() { conversation.next() } else { None })
        };
        self.sending.fill(out, next);
    }

    fn transmitted(&mut self, bytes: usize) -> Result<(), Close> {
        self.watch.spoke();
        self.sending.transmitted(bytes);
        match &mut self.farewell {
            Some(farewell) if self.sending.is_sent() && self.link.is_said() => {
                farewell.said = true;
                if farewell.drains { Ok(()) } else { Err(farewell.why.clone()) }
            }
            _ => Ok(()),
        }
    }

    fn is_finished(&self) -> bool {
        self.farewell.as_ref().is_some_and(|farewell| farewell.said)
    }

    fn tick(&mut self, now: Instant) -> Result<Option<Instant>, Close> {
        if let Some(Farewell { why, deadline, .. }) = &self.farewell {
            return if now >= *deadline { Err(why.clone()) } else { Ok(Some(*deadline)) };
        }
        match self.watch.tick(now, &self.reading, &mut self.conversation, &self.link) {
            // The kernel may be receiving into the memory, which stays until the connection is closed.
            Err(why) if self.link.is_ending() => {
                let deadline = now + FAREWELL;
                self.farewell = Some(Farewell { why, deadline, drains: false, said: false });
                Ok(Some(deadline))
            }
            outcome => outcome,
        }
    }

    fn closed(&mut self, why: &Close) {
        self.sending.closed();
        self.link.clear();
        self.reading.closed();
        let why = self.farewell.as_ref().map_or(why, |farewell| &farewell.why);
        self.conversation.closed(why);
    }
}

#[cfg(test)]
mod tests;
