//! The deadlines of a connection: the greeting, the longest silence, frames that do not move on, and this end's
//! pings.

use std::time::{Duration, Instant};

use super::conversation::Conversation;
use super::link::Link;
use super::progress::{CRUMBS, Progress};
use super::reading::{Reading, send_farewell};
use crate::transport::stream::Close;
use crate::wire::{self, HELLO_DEADLINE, Message, Refusal};

/// The shortest interval in which the conversation is told that bytes have come.
const REPORT: Duration = Duration::from_millis(50);

/// The times of the last bytes in each direction.
pub(super) struct Watch {
    opened: Instant,
    last_bytes: Instant,
    spoke: Instant,
    /// When the conversation was last told that bytes have come.
    reported: Instant,
    /// The progress of the frame under way.
    pub(super) progress: Progress,
}

impl Watch {
    pub(super) fn new() -> Watch {
        let now = Instant::now();
        Watch { opened: now, last_bytes: now, spoke: now, reported: now, progress: Progress::default() }
    }

    /// The connection is open.
    pub(super) fn opened(&mut self) {
        let now = Instant::now();
        (self.opened, self.last_bytes, self.spoke) = (now, now, now);
    }

    /// The peer has sent bytes.
    pub(super) fn alive(&mut self, now: Instant) {
        self.last_bytes = now;
    }

    /// Whether to tell the conversation that bytes have come.
    pub(super) fn is_to_report(&mut self, now: Instant) -> bool {
        let due = now.duration_since(self.reported) > REPORT;
        if due {
            self.reported = now;
        }
        due
    }

    /// The kernel has taken bytes.
    pub(super) fn spoke(&mut self) {
        self.spoke = Instant::now();
    }

    /// Handles what is due, and returns the time of the next call.
    ///
    /// # Errors
    /// The connection ends.
    pub(super) fn tick(
        &mut self,
        now: Instant,
        reading: &Reading,
        conversation: &mut impl Conversation,
        link: &Link,
    ) -> Result<Option<Instant>, Close> {
        let wanted = conversation.tick(now)?;
        let Some(silence) = conversation.silence() else {
            let deadline = self.opened + HELLO_DEADLINE;
            if now >= deadline {
                let why = format!("no greeting within {HELLO_DEADLINE:?}");
                send_farewell(conversation, link, Refusal::Other(why.clone()));
                return Err(Close::Asked(why.into()));
            }
            return Ok(Some(wanted.map_or(deadline, |wanted| wanted.min(deadline))));
        };
        if reads(reading, link) && now >= self.last_bytes + silence {
            return Err(Close::Asked(format!("silent for {silence:?}").into()));
        }
        let pause = pause(silence);
        self.mark(now, reading, conversation, link);
        let Ok(check) = self.progress.check(reading.seen(), now, pause) else {
            let refusal = stuck(reading, pause);
            let why = refusal.to_string();
            send_farewell(conversation, link, refusal);
            return Err(Close::Asked(why.into()));
        };
        if link.is_stuffed() {
            return Err(Close::Asked("the peer does not take its messages".into()));
        }
        if now >= self.spoke + pause {
            self.spoke = now;
            link.send_message(0, Message::Ping);
        }
        let next = (self.spoke + pause).min(self.last_bytes + silence).max(now + Duration::from_millis(10));
        let next = [check, wanted].into_iter().flatten().fold(next, Instant::min);
        self.progress.promised(next);
        Ok(Some(next))
    }

    /// Notes whether a frame is under way. True if [`tick`](Self::tick) must check it soon.
    pub(super) fn mark(
        &mut self,
        now: Instant,
        reading: &Reading,
        conversation: &impl Conversation,
        link: &Link,
    ) -> bool {
        let silence = conversation.silence().filter(|_| reads(reading, link));
        let (Some(frame), Some(silence)) = (reading.under_way(), silence) else {
            self.progress.clear();
            return false;
        };
        self.progress.under_way(frame, reading.seen(), now, pause(silence))
    }
}

/// Whether this end receives. While it does not, it cannot see what the peer does.
pub(super) fn reads(reading: &Reading, link: &Link) -> bool {
    !reading.is_held_up() && !link.is_full()
}

/// The refusal of a frame that does not move on.
fn stuck(reading: &Reading, pause: Duration) -> Refusal {
    let (what, expected, got) = reading.describe();
    let got = format!("{got}, and then not {CRUMBS} more in {pause:.1?}");
    Refusal::Frame { what, expected, got }
}

/// The longest pause of a living peer within a frame.
fn pause(silence: Duration) -> Duration {
    wire::ping_after(silence.as_millis() as u32)
}
