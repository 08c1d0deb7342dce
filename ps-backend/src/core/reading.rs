//! What readers do: they begin, apply versions, and end.

use libmodelio::vocabulary::ids::{ClientId, Version};
use libmodelio::vocabulary::shard_error::ShardError;

use super::readers::Reader;
use super::{Action, JobCore, Now};

impl JobCore {
    /// A reader of `client` begins.
    ///
    /// # Errors
    /// [`ShardError::ReaderTaken`], [`ShardError::TooManyReaders`]; [`ShardError::NotAllowed`] for an invalid name.
    pub fn begin_reader(
        &mut self,
        client: ClientId,
        name: &str,
        host: String,
        staged: Version,
    ) -> Result<(), ShardError> {
        self.making.readers.begin(client, name, host, staged.min(self.version))
    }

    /// A reader of `client` runs this version now, which may be an older one than before.
    ///
    /// # Errors
    /// [`ShardError::NoReader`], [`ShardError::NoVersionYet`]; [`ShardError::NotAllowed`] for one of another client.
    pub fn applies(
        &mut self,
        client: ClientId,
        name: &str,
        version: Version,
        now: Now,
        actions: &mut Vec<Action>,
    ) -> Result<(), ShardError> {
        let newest = self.version;
        let readers = &mut self.making.readers;
        let state = &mut readers.find(client, name)?.state;
        if version > newest {
            return Err(ShardError::NoVersionYet { got: version, newest });
        }
        let reader = state.reader;
        (state.applied, state.is_given_up) = (Some(version), false);
        readers.changed.insert(reader);
        self.advance(now, actions);
        Ok(())
    }

    /// A reader of `client` ends: no version waits for it.
    ///
    /// # Errors
    /// As [`Self::applies`] has them.
    pub fn end_reader(
        &mut self,
        client: ClientId,
        name: &str,
        now: Now,
        actions: &mut Vec<Action>,
    ) -> Result<(), ShardError> {
        let ended = self.making.readers.find(client, name)?.state.reader;
        self.making.readers.end(|reader| reader.state.reader == ended);
        self.advance(now, actions);
        Ok(())
    }

    /// A client is gone, and its readers with it.
    pub fn end_readers(&mut self, client: ClientId, now: Now, actions: &mut Vec<Action>) {
        if self.making.readers.end(|reader| reader.client == client) {
            self.advance(now, actions);
        }
    }

    /// The readers of `client` have the bytes of this version.
    pub fn staged(&mut self, client: ClientId, version: Version) {
        let (readers, version) = (&mut self.making.readers, version.min(self.version));
        for Reader { state, .. } in readers.table.values_mut().filter(|of| of.client == client) {
            if std::mem::replace(&mut state.staged, version) != version {
                readers.changed.insert(state.reader);
            }
        }
    }
}
