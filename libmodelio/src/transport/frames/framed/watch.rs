//! Deadlines of a connection: the greeting, the longest silence, frames that do not move on, signs of life of this end's.

use std::time::{Duration, Instant};

use super::{Framed, progress};
use crate::transport::frames::Conversation;
use crate::transport::stream::Close;
use crate::wire::{self, HELLO_DEADLINE, Message, Refusal};

impl<C: Conversation> Framed<C> {
    /// What time brings.
    pub(super) fn watch(&mut self, now: Instant) -> Result<Option<Instant>, Close> {
        let wanted = self.conversation.tick(now)?;
        let Some(silence) = self.conversation.silence() else {
            let deadline = self.opened + HELLO_DEADLINE;
            if now >= deadline {
                let why = format!("no greeting within {HELLO_DEADLINE:?}");
                self.last_words(Refusal::Other(why.clone()));
                return Err(Close::Asked(why.into()));
            }
            return Ok(Some(wanted.map_or(deadline, |wanted| wanted.min(deadline))));
        };
        if self.reads() && now >= self.heard + silence {
            return Err(Close::Asked(format!("silent for {silence:?}").into()));
        }
        let pause = pause(silence);
        self.mark(now);
        let Ok(look) = self.progress.look(self.seen, now, pause) else {
            let refusal = self.stuck(pause);
            let why = refusal.to_string();
            self.last_words(refusal);
            return Err(Close::Asked(why.into()));
        };
        if self.link.is_stuffed() {
            return Err(Close::Asked("the peer does not take what it is told".into()));
        }
        if now >= self.spoke + pause {
            self.spoke = now;
            self.link.say(0, Message::Ping);
        }
        let next = (self.spoke + pause).min(self.heard + silence).max(now + Duration::from_millis(10));
        let next = [look, wanted].into_iter().flatten().fold(next, Instant::min);
        self.progress.promised(next);
        Ok(Some(next))
    }

    /// Whether this end takes what comes; while it does not, it cannot tell what the peer does.
    pub(super) fn reads(&self) -> bool {
        self.waiting.is_none() && !self.link.is_full()
    }

    /// Keeps in mind that a frame is under way, or none is. True if [`Stream::tick`] is to look at it soon.
    pub(super) fn mark(&mut self, now: Instant) -> bool {
        let within = self.incoming.is_some() || self.receiver.is_within_frame();
        let Some(silence) = self.conversation.silence().filter(|_| within && self.reads()) else {
            self.progress.rests();
            return false;
        };
        // Its message comes before its payload.
        let frame = 2 * self.frames + u64::from(self.incoming.is_some());
        self.progress.under_way(frame, self.seen, now, pause(silence))
    }

    /// What is under way and does not move on.
    fn stuck(&self, pause: Duration) -> Refusal {
        let (what, expected, got) = match &self.incoming {
            Some(incoming) => {
                let header = &incoming.received.header;
                let len = header.payload_len() as usize;
                let got = len - self.left() + (self.seen - self.taken) as usize;
                let what = format!("payload of {}", incoming.received.message.name());
                (what, format!("{len} bytes"), format!("{got}"))
            }
            None => ("header or body".to_owned(), "the rest of it".to_owned(), "a part".to_owned()),
        };
        let got = format!("{got}, and then not {} more in {pause:.1?}", progress::CRUMBS);
        Refusal::Frame { what, expected, got }
    }
}

/// The longest one of a peer that lives.
fn pause(silence: Duration) -> Duration {
    wire::ping_after(silence.as_millis() as u32)
}
