//! Readers: programs that run the job's versions, say which, and take part in no step.

use std::time::Duration;

use super::Job;
use super::requests::plain;
use crate::client::options::Done;
use crate::vocabulary::ids::{ReaderId, Version};
use crate::vocabulary::readers::ReaderState;
use crate::wire::{Message, ReaderDoes};

impl Job {
    /// The readers of the job, of all its clients, by their numbers.
    pub fn readers(&self) -> Vec<ReaderState> {
        self.shared.inner.lock().core.readers().cloned().collect()
    }

    /// One of them.
    pub fn reader(&self, reader: ReaderId) -> Option<ReaderState> {
        self.shared.inner.lock().core.reader(reader).cloned()
    }

    /// A reader of this client begins, on `host`. It is among [`Self::readers`] once `done` hears of the success.
    pub fn begin_reader(&self, name: String, host: String, timeout: Duration, done: Done<()>) {
        let staged = self.shared.inner.lock().core.version();
        self.reader_does(name, ReaderDoes::Begins { host, staged }, timeout, done);
    }

    /// A reader of this client runs this version now.
    pub fn applies(&self, name: String, version: Version, timeout: Duration, done: Done<()>) {
        self.reader_does(name, ReaderDoes::Applies(version), timeout, done);
    }

    /// A reader of this client ends.
    pub fn end_reader(&self, name: String, timeout: Duration, done: Done<()>) {
        self.reader_does(name, ReaderDoes::Ends, timeout, done);
    }

    fn reader_does(&self, name: String, does: ReaderDoes, timeout: Duration, done: Done<()>) {
        self.request(Message::Reader { name, does }, timeout, plain(done));
    }
}
