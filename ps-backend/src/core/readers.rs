//! Readers: programs that run versions and take part in no step. The next version may wait for them.
//!
//! With `hold_for_readers` at k, version n + 1 waits while a reader has applied something, and less than n + 1 - k. A
//! version of which a plan has begun waits no more. A wait ends after the lease, or half of the timeout if that is
//! less, so that whoever waits still has an answer in time. The readers that it was for are given up then: no version
//! waits for them until they apply again.

use std::collections::{BTreeMap, BTreeSet};

use libmodelio::vocabulary::ids::{ClientId, ReaderId, Version};
use libmodelio::vocabulary::members::{MAX_LEARNER_NAME, wrong_reader_name};
use libmodelio::vocabulary::readers::{
    MAX_HOST, MAX_READER_ID, MAX_READERS, MAX_READERS_OF_CLIENT, ReaderState, is_reader_name,
};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::Message;
use serde::{Deserialize, Serialize};

use super::waits::MAX_NAMES;
use super::{JobCore, Now};

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Reader {
    pub(super) client: ClientId,
    pub(super) state: ReaderState,
}

/// The readers of a job, and the wait for them.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Readers {
    pub(super) table: BTreeMap<ReaderId, Reader>,
    next: u32,
    /// The number of the newest news.
    revision: u64,
    /// The readers that are new, or have changed or gone, since those.
    pub(super) changed: BTreeSet<ReaderId>,
    /// The version before the one that waits, and since when.
    #[serde(skip)]
    wait: Option<(Version, Now)>,
}

impl Readers {
    pub(super) fn find(&mut self, client: ClientId, name: &str) -> Result<&mut Reader, ShardError> {
        let found = self.table.values_mut().find(|reader| reader.state.name == name);
        let found = found.ok_or_else(|| ShardError::NoReader(name.to_owned()))?;
        if found.client == client {
            return Ok(found);
        }
        let why = format!("reader {name:?} is one of another mount, on host {}", found.state.host);
        Err(ShardError::NotAllowed(why))
    }

    /// The next number that no reader has.
    fn number(&mut self) -> ReaderId {
        // There are far fewer readers than numbers.
        loop {
            self.next = (self.next + 1) % MAX_READER_ID;
            if self.next != 0 && !self.table.contains_key(&ReaderId(self.next)) {
                return ReaderId(self.next);
            }
        }
    }

    pub(super) fn begin(
        &mut self,
        client: ClientId,
        name: &str,
        host: String,
        staged: Version,
    ) -> Result<(), ShardError> {
        if !is_reader_name(name) {
            let start: String = name.chars().take(MAX_LEARNER_NAME).collect();
            return Err(ShardError::NotAllowed(wrong_reader_name(start)));
        }
        if self.table.values().any(|reader| reader.state.name == name) {
            return Err(ShardError::ReaderTaken(name.to_owned()));
        }
        let of_client = self.table.values().filter(|reader| reader.client == client).count();
        for (count, most, who) in
            [(self.table.len(), MAX_READERS, "a job"), (of_client, MAX_READERS_OF_CLIENT, "a mount")]
        {
            if count >= most {
                return Err(ShardError::TooManyReaders(most, who.to_owned()));
            }
        }
        let is_usual = |c: &char| c.is_ascii_graphic();
        let host = host.chars().filter(is_usual).take(MAX_HOST).collect();
        let (reader, name) = (self.number(), name.to_owned());
        let (applied, is_own, is_given_up) = (None, false, false);
        let state = ReaderState { reader, name, host, is_own, staged, applied, is_given_up };
        self.table.insert(reader, Reader { client, state });
        self.changed.insert(reader);
        Ok(())
    }

    /// Removes these. Returns whether there were any.
    pub(super) fn end(&mut self, is_it: impl Fn(&Reader) -> bool) -> bool {
        let gone: Vec<ReaderId> =
            self.table.extract_if(.., |_, reader| is_it(reader)).map(|of| of.0).collect();
        self.changed.extend(&gone);
        !gone.is_empty()
    }

    /// Whether a job can have these.
    pub(super) fn is_sound(&self) -> bool {
        self.table.len() <= MAX_READERS && self.table.values().all(|reader| reader.state.is_sound())
    }

    /// Notes whether the version after this one is `held`, if there is such, and somebody waits for it.
    pub(super) fn note_wait(&mut self, held: Option<Version>, waits: bool, now: Now) {
        self.wait.take_if(|(version, _)| held != Some(*version));
        if let Some(version) = held.filter(|_| waits) {
            self.wait.get_or_insert((version, now));
        }
    }

    /// The readers that the version after `version` waits for, if it may be `ahead` of them.
    fn behind(&self, version: Version, ahead: u32) -> impl Iterator<Item = &Reader> {
        self.table.values().filter(move |reader| {
            let applied = reader.state.applied.filter(|_| ahead > 0 && !reader.state.is_given_up);
            applied.is_some_and(|applied| applied.0.saturating_add(ahead.into()) <= version.0)
        })
    }
}

impl JobCore {
    /// Whether the job has readers of `client`.
    pub fn has_readers(&self, client: ClientId) -> bool {
        self.making.readers.table.values().any(|reader| reader.client == client)
    }

    /// The readers, as `client` is told of them.
    pub fn readers(&self, client: Option<ClientId>) -> Vec<ReaderState> {
        let told = |of: &Reader| ReaderState { is_own: Some(of.client) == client, ..of.state.clone() };
        self.making.readers.table.values().map(told).collect()
    }

    /// All readers, for `client`.
    pub fn tell_readers(&self, client: ClientId) -> Message {
        let (revision, readers) = (self.making.readers.revision, self.readers(Some(client)));
        Message::Readers { since: None, revision, readers, gone: Vec::new() }
    }

    /// The revision of the readers that clients were told of.
    pub fn readers_revision(&self) -> u64 {
        self.making.readers.revision
    }

    /// What has changed in the readers since the last call, if anything has, for each of `clients`.
    pub fn take_reader_news(&mut self, clients: &[ClientId]) -> Vec<(ClientId, Message)> {
        let readers = &mut self.making.readers;
        let changed = std::mem::take(&mut readers.changed);
        if changed.is_empty() {
            return Vec::new();
        }
        let since = readers.revision;
        readers.revision += 1;
        let (there, gone): (Vec<ReaderId>, Vec<ReaderId>) =
            changed.into_iter().partition(|reader| readers.table.contains_key(reader));
        let news = |&client: &ClientId| {
            let known = there.iter().filter_map(|reader| readers.table.get(reader));
            let told = |of: &Reader| ReaderState { is_own: of.client == client, ..of.state.clone() };
            let (since, revision) = (Some(since), readers.revision);
            let readers = known.map(told).collect();
            (client, Message::Readers { since, revision, readers, gone: gone.clone() })
        };
        clients.iter().map(news).collect()
    }

    /// Whether the next version has a buffer, and waits for no reader.
    pub(super) fn has_room(&self) -> bool {
        self.making.has_buffer() && !self.is_held_by_readers() && !self.lacks_number()
    }

    /// Whether the next version has to wait for readers.
    pub(super) fn is_held_by_readers(&self) -> bool {
        !self.provisional.is_under_way() && self.behind().next().is_some()
    }

    fn behind(&self) -> impl Iterator<Item = &Reader> {
        self.making.readers.behind(self.version, self.controls.hold_for_readers)
    }

    /// The readers that somebody waits for, who would make the next version: the first of their names.
    pub fn held_by(&self) -> Vec<String> {
        let behind = self.behind().filter(|_| self.making.readers.wait.is_some());
        behind.take(MAX_NAMES).map(|reader| reader.state.name.clone()).collect()
    }

    /// When the readers that somebody waits for are given up.
    pub(super) fn readers_are_due(&self) -> Option<Now> {
        let lease = Some(self.controls.lease).filter(|lease| !lease.is_zero());
        let limit = (self.controls.timeout / 2).min(lease.unwrap_or(Now::MAX));
        self.making.readers.wait.map(|(_, since)| since.saturating_add(limit))
    }

    /// Gives up readers that somebody has waited for long enough. Returns whether there were any.
    pub(super) fn give_up_readers(&mut self, now: Now) -> bool {
        if self.readers_are_due().is_none_or(|due| due > now) {
            return false;
        }
        let late: Vec<ReaderId> = self.behind().map(|reader| reader.state.reader).collect();
        let readers = &mut self.making.readers;
        for late in &late {
            let Some(Reader { state, .. }) = readers.table.get_mut(late) else { continue };
            state.is_given_up = true;
            let (reader, host) = (&state.name, &state.host);
            tracing::warn!(reader, host, "versions wait no more for this reader until it applies one again");
        }
        readers.changed.extend(late);
        true
    }
}
