//! The numbers of one client's requests: which have come, which are answered, and which answers the client
//! has.
//!
//! Anybody can connect under a client's number. The numbers that a connection states hold as long as the
//! connection does. A request that the client had not made when it connected was somebody else's. Answers of
//! earlier connections are kept until this one has lasted for long: if it were a stranger's, the client
//! itself would have connected by then. Answers over one connection do not push out those of another.

use std::collections::BTreeMap;

use libmodelio::wire::{MAX_SKIPPED, Message, Refusal};
use serde::{Deserialize, Serialize};

use crate::core::Now;

/// The number of answers that are kept for a connection that acknowledges none, and for all earlier ones.
pub(super) const MAX_ANSWERS: usize = 8192;

/// The part of the reason that is kept of a refused setting, in characters.
const KEPT_REASON: usize = 100;

/// A connection of the client, counted.
type Connection = u64;

/// The number of a request, and the connection over which it came first.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Asked {
    pub(super) number: u64,
    over: Connection,
}

/// The record of an incoming request.
pub(super) enum Known<'a> {
    /// There is no record.
    New,
    /// It waits for its answer, or the client has that.
    Nothing,
    /// The request was made before the client was given up.
    Late,
    /// Its answer.
    Answered(&'a Message),
}

/// The requests of one client.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Requests {
    /// The one that counts, since when, and whether that is long ago.
    connection: Connection,
    since: Now,
    settled: bool,
    /// The client had made no request above this one when it connected, as it says.
    made: u64,
    /// It has all answers up to this one, as it says over this connection.
    acked_through: u64,
    /// The newest number that the client has stated; it includes requests that never came.
    stated: Option<u64>,
    /// The highest number of a request that came, over whichever connection.
    newest: u64,
    /// Answers that it may not have had.
    answered: BTreeMap<u64, (Connection, Message)>,
    /// Requests that are not answered yet.
    open: BTreeMap<u64, Connection>,
    /// Requests up to this one were made in a time after which the client was given up.
    before: u64,
}

impl Requests {
    /// The requests of a client that was given up when the highest number was `before`; 0 for another client.
    pub(super) fn new(before: u64) -> Requests {
        Requests {
            connection: 0,
            since: Now::ZERO,
            settled: false,
            made: u64::MAX,
            acked_through: 0,
            stated: None,
            newest: before,
            answered: BTreeMap::new(),
            open: BTreeMap::new(),
            before,
        }
    }

    /// The client connects: numbers that were stated over its earlier connections no longer hold.
    pub(super) fn connects(&mut self, now: Now) {
        self.connection += 1;
        (self.since, self.settled) = (now, false);
        (self.made, self.acked_through, self.stated) = (u64::MAX, 0, None);
        // The client counts on from what it has made: a number that it has not reached is higher than its own.
        while self.answered.len() > MAX_ANSWERS {
            self.answered.pop_last();
        }
    }

    /// Whether a request can have been the client's.
    fn is_its_own(&self, number: u64, over: Connection) -> bool {
        over == self.connection || number <= self.made
    }

    /// The highest number so far.
    pub(super) fn newest(&self) -> u64 {
        self.newest
    }

    /// # Errors
    /// If the client cannot have asked so often.
    pub(super) fn reaches(&self, number: u64) -> Result<(), Refusal> {
        let newest = self.newest;
        if number.saturating_sub(newest) <= MAX_SKIPPED {
            return Ok(());
        }
        Err(Refusal::Other(format!(
            "request {number} is too far ahead: the newest of the client is {newest}"
        )))
    }

    /// The client states that it has all answers up to `acked_through`, and has made no request above `newest`.
    ///
    /// # Errors
    /// If it cannot have asked so often.
    pub(super) fn numbered(&mut self, acked_through: u64, newest: u64) -> Result<(), Refusal> {
        self.reaches(acked_through.max(newest))?;
        self.made = self.made.min(newest);
        self.stated = Some(acked_through);
        // The client may have given up requests that are still on their way here: they do not count as
        // acknowledged.
        self.acked_through = acked_through.min(self.newest);
        self.forget();
        Ok(())
    }

    /// Time passes: a connection that has lasted for `long` is the client's.
    pub(super) fn tick(&mut self, long: Now, now: Now) {
        if !self.settled && now.saturating_sub(self.since) >= long {
            self.settled = true;
            self.before = self.before.min(self.made);
            self.forget();
        }
    }

    /// Forgets answers that nobody will ask for.
    fn forget(&mut self) {
        let (connection, settled, made, acked_through) =
            (self.connection, self.settled, self.made, self.acked_through);
        self.answered.retain(|number, (over, _)| match *over == connection {
            true => *number > acked_through,
            false => !settled || (*number > acked_through && *number <= made),
        });
    }

    /// The record of this request.
    pub(super) fn known(&self, number: u64) -> Known<'_> {
        let is_open = self.open.get(&number).is_some_and(|over| self.is_its_own(number, *over));
        let answer = self.answered.get(&number).filter(|(over, _)| self.is_its_own(number, *over));
        match answer {
            _ if number <= self.acked_through || is_open => Known::Nothing,
            Some((_, answer)) => Known::Answered(answer),
            None if number <= self.before.min(self.made) => Known::Late,
            None => Known::New,
        }
    }

    /// The request is taken, and will be answered.
    pub(super) fn opens(&mut self, number: u64) -> Asked {
        self.open.insert(number, self.connection);
        self.newest = self.newest.max(number);
        Asked { number, over: self.connection }
    }

    /// Whether the request waits for its answer.
    pub(super) fn is_open(&self, asked: Asked) -> bool {
        self.open.get(&asked.number) == Some(&asked.over)
    }

    /// Whether request `number` was made before this one.
    pub(super) fn is_before(&self, number: u64, asked: Asked) -> bool {
        number < asked.number && (asked.over == self.connection || number < asked.number.min(self.made))
    }

    /// Records the answer, which is `kept` until the client has it if it can be lost. Returns whether to send it: nobody waits
    /// for the answer to a stranger's request.
    pub(super) fn answers(&mut self, asked: Asked, answer: &Message, kept: bool) -> bool {
        let Asked { number, over } = asked;
        if !self.is_open(asked) {
            return false;
        }
        self.open.remove(&number);
        // Nobody waits for the answer to a request that was given up.
        let is_wanted = match over == self.connection {
            true => number > self.stated.unwrap_or_default(),
            false => !self.settled || (number > self.acked_through && number <= self.made),
        };
        if is_wanted && kept {
            self.answered.insert(number, (over, in_short(answer)));
        }
        self.is_its_own(number, over)
    }

    /// Answers that are kept.
    pub(super) fn kept(&self) -> usize {
        self.answered.len()
    }

    /// Whether more answers are kept over this connection than a client leaves unacknowledged.
    pub(super) fn is_full(&self) -> bool {
        let over_this = |(over, _): &&(Connection, Message)| *over == self.connection;
        self.answered.len() >= MAX_ANSWERS && self.answered.values().filter(over_this).count() >= MAX_ANSWERS
    }

    /// Whether nothing is kept, and nothing waits.
    pub(super) fn is_done(&self) -> bool {
        self.open.is_empty() && self.answered.is_empty()
    }

    /// The number that the client has acknowledged over this connection.
    pub(super) fn acked_through(&self) -> Option<u64> {
        self.stated
    }
}

/// The kept form of an answer: reasons may be long, and a setting that is asked for again is refused again.
fn in_short(answer: &Message) -> Message {
    match answer {
        Message::Refused(Refusal::Control(why)) => {
            Message::Refused(Refusal::Control(why.chars().take(KEPT_REASON).collect()))
        }
        answer => answer.clone(),
    }
}
