//! Who waits for an answer of the coordinator's, or for a version.

use std::collections::HashMap;

use crate::client::core::Token;
use crate::client::options::{Answered, Done};
use crate::vocabulary::ids::Version;
use crate::vocabulary::shard_error::ShardError;
use crate::wire::{Message, Refusal};

/// The completions of requests and waits, by their tokens.
pub(super) struct Callers {
    answers: HashMap<Token, Answered>,
    waits: HashMap<Token, Done<Version>>,
    next: Token,
}

/// Completions with their outcomes.
#[derive(Default)]
pub(super) struct Answers {
    answers: Vec<(Answered, Result<Message, Refusal>)>,
    waits: Vec<(Done<Version>, Result<Version, ShardError>)>,
}

impl Callers {
    pub(super) fn new() -> Callers {
        Callers { answers: HashMap::new(), waits: HashMap::new(), next: 1 }
    }

    /// A token that nobody has.
    pub(super) fn token(&mut self) -> Token {
        let token = self.next;
        self.next += 1;
        token
    }

    /// `done` waits for the answer to a request.
    pub(super) fn asks(&mut self, done: Answered) -> Token {
        let token = self.token();
        self.answers.insert(token, done);
        token
    }

    /// `done` waits for a version.
    pub(super) fn waits(&mut self, done: Done<Version>) -> Token {
        let token = self.token();
        self.waits.insert(token, done);
        token
    }

    /// All who wait: nothing comes any more.
    pub(super) fn dismiss(&mut self) -> Answers {
        let gone = || Refusal::Shard(ShardError::Unreachable);
        Answers {
            answers: self.answers.drain().map(|(_, done)| (done, Err(gone()))).collect(),
            waits: self.waits.drain().map(|(_, done)| (done, Err(ShardError::Unreachable))).collect(),
        }
    }
}

impl Answers {
    /// A request is answered.
    pub(super) fn answer(&mut self, callers: &mut Callers, token: Token, result: Result<Message, Refusal>) {
        self.answers.extend(callers.answers.remove(&token).map(|done| (done, result)));
    }

    /// A wait is over.
    pub(super) fn awaited(
        &mut self,
        callers: &mut Callers,
        token: Token,
        result: Result<Version, ShardError>,
    ) {
        self.waits.extend(callers.waits.remove(&token).map(|done| (done, result)));
    }

    /// Calls the completions. No lock may be held.
    pub(super) fn give(self) {
        self.waits.into_iter().for_each(|(done, result)| done(result));
        self.answers.into_iter().for_each(|(done, result)| done(result));
    }
}
