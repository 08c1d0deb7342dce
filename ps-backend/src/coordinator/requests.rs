//! The numbers of one client's requests: which have come, which are answered, and which answers the client has.
//!
//! Anybody can connect under a client's number. The numbers that a connection states are valid as long as the
//! connection lasts. A request that the client had not made when it connected was somebody else's. Answers over
//! earlier connections are kept until this one has lasted for long: if it were a stranger's, the client itself would
//! have connected by then. Answers over one connection do not displace those of another.

use std::collections::BTreeMap;

use libmodelio::wire::{MAX_SKIPPED, Message, Refusal};
use serde::{Deserialize, Serialize};

use crate::core::Now;

/// The most answers that are kept for a connection that acknowledges none, and for all earlier connections together.
pub(super) const MAX_ANSWERS: usize = 8192;

/// The length, in characters, to which the reason for refusing a setting is cut when it is kept.
const KEPT_REASON: usize = 100;

/// The number of one of the client's connections.
type Connection = u64;

/// A request's number, and the connection over which it first came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Asked {
    pub(super) number: u64,
    over: Connection,
}

/// The record of an incoming request.
pub(super) enum Known<'a> {
    /// There is no record.
    New,
    /// It waits for its answer, or the client has the answer.
    Nothing,
    /// The request was made before the client was given up.
    Late,
    /// The request was carried out, and this is the answer.
    Answered(&'a Message),
}

/// The requests of one client.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Requests {
    /// The connection that counts, since when it has existed, and whether that is long.
    connection: Connection,
    since: Now,
    settled: bool,
    /// On this connection, the client has stated that it had made no request above this one.
    made: u64,
    /// On this connection, the client has stated that it has all answers up to this one.
    acked_through: u64,
    /// The number of the last acknowledgement, also if the requests up to it never came.
    stated: Option<u64>,
    /// The highest number of a request that came, over any connection.
    newest: u64,
    /// Answers that the client may not have.
    answered: BTreeMap<u64, (Connection, Message)>,
    /// Requests without an answer.
    open: BTreeMap<u64, Connection>,
    /// Requests up to this one are from a time before the client was given up.
    before: u64,
}

impl Requests {
    /// The requests of a client that was given up when its highest number was `before`. 0 for a new client.
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

    /// The client connects. Numbers from its earlier connections are no longer valid.
    pub(super) fn connects(&mut self, now: Now) {
        self.connection += 1;
        (self.since, self.settled) = (now, false);
        (self.made, self.acked_through, self.stated) = (u64::MAX, 0, None);
        // The client's numbers follow those it has made, so numbers that it has not reached are the highest ones
        // here.
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

    /// Checks that the client can have made so many requests.
    ///
    /// # Errors
    /// When it cannot.
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
    /// When it cannot have made so many requests.
    pub(super) fn numbered(&mut self, acked_through: u64, newest: u64) -> Result<(), Refusal> {
        self.reaches(acked_through.max(newest))?;
        // A repeated or late statement takes nothing back.
        let acked_through = acked_through.max(self.stated.unwrap_or_default());
        self.made = self.made.min(newest);
        self.stated = Some(acked_through);
        // The client may have given up requests that are still under way. They do not count as acknowledged.
        self.acked_through = acked_through.min(self.newest);
        self.forget();
        Ok(())
    }

    /// Time passes. A connection that has lasted for `long` is the client's.
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

    /// Takes a request, which will be answered.
    pub(super) fn opens(&mut self, number: u64) -> Asked {
        self.open.insert(number, self.connection);
        self.newest = self.newest.max(number);
        Asked { number, over: self.connection }
    }

    /// Whether the request has no answer yet.
    pub(super) fn is_open(&self, asked: Asked) -> bool {
        self.open.get(&asked.number) == Some(&asked.over)
    }

    /// Whether request `number` was made before this one.
    pub(super) fn is_before(&self, number: u64, asked: Asked) -> bool {
        number < asked.number && (asked.over == self.connection || number < asked.number.min(self.made))
    }

    /// Records an answer. If the answer can be lost it is `kept` until the client has it. Returns whether to send it:
    /// nobody waits for the answer to a stranger's request.
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

    /// The number of kept answers.
    pub(super) fn kept(&self) -> usize {
        self.answered.len()
    }

    /// Whether this connection has more unacknowledged answers than a client leaves.
    pub(super) fn is_full(&self) -> bool {
        let over_this = |(over, _): &&(Connection, Message)| *over == self.connection;
        self.answered.len() >= MAX_ANSWERS && self.answered.values().filter(over_this).count() >= MAX_ANSWERS
    }

    /// Whether no answer is kept, and no request is open.
    pub(super) fn is_done(&self) -> bool {
        self.open.is_empty() && self.answered.is_empty()
    }

    /// The number that the client has acknowledged over this connection.
    pub(super) fn acked_through(&self) -> Option<u64> {
        self.stated
    }
}

/// The kept form of an answer. Its reason is cut, because reasons may be long. A setting that is asked for again is
/// refused again anyway.
fn in_short(answer: &Message) -> Message {
    match answer {
        Message::Refused(Refusal::Control(why)) => {
            Message::Refused(Refusal::Control(why.chars().take(KEPT_REASON).collect()))
        }
        answer => answer.clone(),
    }
}
