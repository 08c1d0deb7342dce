//! The readers of the job, as the coordinator tells of them. Each telling names the revision that it changes, so that
//! the client notices if one was lost, and asks for all of them.

use std::collections::BTreeMap;

use super::{Action, ClientCore};
use crate::vocabulary::ids::{ReaderId, Version};
use crate::vocabulary::readers::{MAX_READERS, ReaderState};
use crate::wire::Message;

/// The readers of all clients, by their numbers.
#[derive(Debug, Default)]
pub(super) struct KnownReaders {
    revision: u64,
    table: BTreeMap<ReaderId, ReaderState>,
}

impl KnownReaders {
    /// Takes what the coordinator tells. False if something was lost before.
    fn take(
        &mut self,
        since: Option<u64>,
        revision: u64,
        readers: Vec<ReaderState>,
        gone: &[ReaderId],
    ) -> bool {
        if since.is_some_and(|since| since != self.revision) {
            return false;
        }
        if since.is_none() {
            self.table.clear();
        }
        self.table.retain(|reader, _| !gone.contains(reader));
        for state in readers.into_iter().filter(ReaderState::is_sound) {
            if self.table.len() < MAX_READERS || self.table.contains_key(&state.reader) {
                self.table.insert(state.reader, state);
            }
        }
        self.revision = revision;
        true
    }
}

impl ClientCore {
    /// The readers of the job, by their numbers.
    pub fn readers(&self) -> impl Iterator<Item = &ReaderState> {
        self.coordination.readers.table.values()
    }

    /// One of them.
    pub fn reader(&self, reader: ReaderId) -> Option<&ReaderState> {
        self.coordination.readers.table.get(&reader)
    }

    pub(super) fn take_readers(
        &mut self,
        (since, revision): (Option<u64>, u64),
        readers: Vec<ReaderState>,
        gone: &[ReaderId],
        actions: &mut Vec<Action>,
    ) {
        match self.coordination.readers.take(since, revision, readers, gone) {
            true => {
                actions.push(Action::Readers);
                self.tell_staged(self.version(), actions);
            }
            // The next state finds it, too, and is never far. The coordinator may leave a question that comes soon after
            // another one.
            false => self.notify(Message::TellReaders, actions),
        }
    }

    /// A state names this revision. What brings it has come before, unless it was lost.
    pub(super) fn check_readers(&mut self, revision: u64, actions: &mut Vec<Action>) {
        if revision != self.coordination.readers.revision {
            self.notify(Message::TellReaders, actions);
        }
    }

    /// Tells the coordinator that this version's bytes are here, if it does not know that of this client's readers.
    pub(super) fn tell_staged(&mut self, version: Version, actions: &mut Vec<Action>) {
        if self.readers().any(|reader| reader.is_own && reader.staged != version) {
            self.notify(Message::Staged { version }, actions);
        }
    }
}
