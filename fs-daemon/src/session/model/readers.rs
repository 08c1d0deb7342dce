//! Readers of a model: programs that run its versions, say which, and take part in no step.

use libmodelio::client::wait_for;
use libmodelio::vocabulary::ids::{ReaderId, Version};
use libmodelio::vocabulary::readers::{ReaderState, least_applied};
use libmodelio::vocabulary::shard_error::ShardError;

use super::Model;
use crate::session::error::{CallError, CallResult, Done};

impl Model {
    /// The reader of this name, of any mount.
    pub fn reader_named(&self, name: &str) -> Option<ReaderState> {
        self.whole().job.readers().into_iter().find(|reader| reader.name == name)
    }

    /// The reader of this number.
    ///
    /// # Errors
    /// ENOENT if it has gone.
    pub fn reader(&self, reader: ReaderId) -> CallResult<ReaderState> {
        self.whole().job.reader(reader).ok_or_else(CallError::not_found)
    }

    /// The least version that readers of the job have applied; that of one, if one is asked for.
    ///
    /// # Errors
    /// ENOENT if that one has gone.
    pub fn applied(&self, reader: Option<ReaderId>) -> CallResult<Option<Version>> {
        match reader {
            Some(reader) => Ok(self.reader(reader)?.applied),
            None => Ok(least_applied(&self.whole().job.readers())),
        }
    }

    /// A reader of this mount begins. Waits for the job's answer.
    ///
    /// # Errors
    /// EEXIST for a name in use, EDQUOT if there are as many as there may be.
    pub fn begin_reader(&self, name: &str) -> CallResult<ReaderState> {
        let host = nix::unistd::gethostname().ok().and_then(|host| host.into_string().ok());
        let (host, prompt) = (host.unwrap_or_default(), self.prompt());
        wait_for(prompt, |done| self.whole().job.begin_reader(name.to_owned(), host, prompt, done))?;
        tracing::info!(model = self.name, reader = name, "reads");
        // Its client may have been given up just now.
        self.reader_named(name).ok_or_else(|| ShardError::NoReader(name.to_owned()).into())
    }

    /// A reader of this mount ends. Waits for the job's answer.
    ///
    /// # Errors
    /// ENOENT if there is none of the name, EACCES for one of another mount.
    pub fn end_reader(&self, name: &str) -> CallResult<()> {
        let prompt = self.prompt();
        wait_for(prompt, |done| self.whole().job.end_reader(name.to_owned(), prompt, done))?;
        tracing::info!(model = self.name, reader = name, "reads no more");
        Ok(())
    }

    /// The version that `text` says a reader runs. It must be one that there is, as far as this mount knows.
    ///
    /// # Errors
    /// EINVAL, or ENOENT if the reader has gone.
    pub fn applied_by(&self, reader: ReaderId, text: &[u8]) -> CallResult<(String, Version)> {
        let name = self.reader(reader)?.name;
        let text = std::str::from_utf8(text).map_err(|_| not_applied("not text"))?.trim();
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = is_number.then(|| text.parse().ok()).flatten();
        let got = Version(number.ok_or_else(|| not_applied("not the decimal number of a version"))?);
        let newest = self.whole().job.state().version.max(self.whole().job.version());
        if got > newest {
            return Err(not_applied(&ShardError::NoVersionYet { got, newest }.to_string()));
        }
        Ok((name, got))
    }

    /// A reader of this mount runs what `text` says.
    ///
    /// # Errors
    /// As [`Self::applied_by`] and the job have them.
    pub fn applies(&self, reader: ReaderId, text: &[u8], done: Done<()>) {
        let (name, version) = match self.applied_by(reader, text) {
            Ok(applied) => applied,
            Err(error) => return done(Err(error)),
        };
        let answered = move |outcome: Result<(), ShardError>| done(outcome.map_err(CallError::from));
        self.whole().job.applies(name, version, self.prompt(), Box::new(answered));
    }
}

/// What was written as applied cannot be.
pub fn not_applied(why: &str) -> CallError {
    CallError::new(libc::EINVAL, format!("applied: {why}"))
}
