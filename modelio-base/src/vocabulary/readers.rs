//! The readers of a job: programs that run its versions and take part in no step.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::ids::{ReaderId, Version};
use super::members::is_learner_name;

/// The most readers of a job.
pub const MAX_READERS: usize = 1024;
/// The most readers of one client.
pub const MAX_READERS_OF_CLIENT: usize = 256;
/// The longest name of a reader's host, in bytes.
pub const MAX_HOST: usize = 64;
/// The name in `readers/` that is a file's, and no reader's.
pub const APPLIED_BY_ALL: &str = "applied";
/// One more than the highest number of a reader.
pub const MAX_READER_ID: u32 = 1 << 20;

/// Whether a reader may be called so: as a learner, but not as that file.
pub fn is_reader_name(name: &str) -> bool {
    is_learner_name(name) && name != APPLIED_BY_ALL
}

/// A reader, as its job knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReaderState {
    /// Its number.
    pub reader: ReaderId,
    /// The name in `readers/<name>`.
    pub name: String,
    /// The host of its client.
    pub host: String,
    /// Whether it is of the client that is told.
    pub is_own: bool,
    /// The newest version whose bytes its client has.
    pub staged: Version,
    /// The version that it runs. None if it has run none yet.
    pub applied: Option<Version>,
    /// A version has waited for it in vain: none waits for it until it applies again.
    pub is_given_up: bool,
}

impl ReaderState {
    /// Whether a reader can be so. What comes from another process may be anything.
    pub fn is_sound(&self) -> bool {
        self.reader.0 < MAX_READER_ID && is_reader_name(&self.name) && self.host.len() <= MAX_HOST
    }

    /// How a status shows it.
    pub fn to_json(&self) -> Value {
        json!({
            "id": self.name,
            "host": self.host,
            "staged": self.staged,
            "applied": self.applied,
            "given_up": self.is_given_up,
        })
    }
}

/// The least version that readers run. Those that have run none do not count. None if all of them are so.
pub fn least_applied(readers: &[ReaderState]) -> Option<Version> {
    readers.iter().filter_map(|reader| reader.applied).min()
}
