//! A conversation as a stream of bytes. It reads received bytes, sends messages, and sends the last messages before
//! the connection ends.

use std::time::{Duration, Instant};

use super::conversation::Conversation;
use super::link::Link;
use super::reading::Reading;
use super::sending::Sending;
use super::watch::{Watch, reads};
use crate::transport::stream::{Close, Connection, Receive, ReceiveSlices, SendSlices, Stream};

/// The longest time for the last message to reach the peer.
const FAREWELL: Duration = Duration::from_secs(2);

/// Memory that a connection has not used for so long goes back to the system. To take it again costs as much as some
/// blocks, so a connection that is used in every step of a fast job keeps it.
const UNUSED: Duration = Duration::from_secs(1);

/// The end of a connection whose last message is being sent.
struct Farewell {
    why: Close,
    deadline: Instant,
    /// Whether further bytes of the peer are received and discarded. A connection that is closed with unread bytes is
    /// reset, and the reset may overtake the last message.
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
    /// When to give memory back, unless it is used before.
    unused_at: Option<Instant>,
    /// The connection ends with this once everything is sent.
    farewell: Option<Farewell>,
}

impl<C: Conversation> Framed<C> {
    /// `ahead` is the number of bytes that are read in addition to a payload: few if blocks follow each other, many
    /// if short messages do.
    pub fn new(conversation: C, link: Link, ahead: usize) -> Framed<C> {
        let reading = Reading::new(&conversation, ahead);
        let (sending, watch, unused_at, farewell) = (Sending::new(), Watch::new(), None, None);
        Framed { conversation, link, reading, sending, watch, unused_at, farewell }
    }

    /// Gives memory back that was not used for a while. Returns when to look again.
    fn save_memory(&mut self, now: Instant) -> Option<Instant> {
        if self.reading.arriving.take_used() | self.sending.take_used() {
            self.unused_at = Some(now + UNUSED);
        }
        if self.unused_at.take_if(|at| *at <= now).is_some() {
            self.reading.arriving.give_back();
            self.sending.give_back();
        }
        self.unused_at
    }

    /// Handles the received bytes. If that ends the connection, its last message is sent first.
    fn go_on(&mut self) -> Result<(), Close> {
        match self.reading.digest(&mut self.conversation, &self.link) {
            Err(why) if self.link.is_ending() => {
                // Others may use the memory for the payload now, and it need not exist.
                self.reading.give_up();
                self.conversation.given_up();
                let deadline = Instant::now() + FAREWELL;
                self.farewell = Some(Farewell { why, deadline, drains: true, said: false });
                Ok(())
            }
            outcome => outcome,
        }
    }

    /// Starts or stops the deadline of the frame under way.
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
            // The conversation was woken, and may be able to go on.
            if let Err(why) = self.go_on() {
                self.link.close(why);
                return Receive::Paused;
            }
            // The rest of the frame is expected from now on, and may never come.
            self.mark(Instant::now());
        }
        match &self.farewell {
            Some(farewell) if farewell.drains => self.reading.drain(into),
            Some(_) => Receive::Paused,
            // A peer that asks for more than it takes is not read until it has taken that.
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
        let rest = link.begin();
        self.sending.fill(out, rest, next, || link.traffic());
        // Without bytes the driver has nothing to do. What was handed out before has gone by now.
        if out.bytes() == 0 && farewell.is_none() {
            link.rests();
        }
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
            // The kernel may still be receiving into the memory, which stays until the connection is closed.
            Err(why) if self.link.is_ending() => {
                let deadline = now + FAREWELL;
                self.farewell = Some(Farewell { why, deadline, drains: false, said: false });
                Ok(Some(deadline))
            }
            outcome => Ok(outcome?.into_iter().chain(self.save_memory(now)).min()),
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
