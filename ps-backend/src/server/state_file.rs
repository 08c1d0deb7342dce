//! The registry's table in a file, so that a restarted registry knows what it knew. The file is a hint: shards that
//! announce themselves know better.
//!
//! It is a list of changes, each with its length and checksum. A change that was not written whole ends it. It is written
//! anew at each start, and when most of it is out of date; another process that reads it meanwhile sees the one or the
//! other.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libmodelio::bytes::crc32c::crc32c;
use libmodelio::registry::table::{Kept, KeptModel, KeptShard};
use libmodelio::vocabulary::ids::Generation;
use serde::{Deserialize, Serialize};

/// What the file begins with.
const FORMAT: &[u8] = b"gradfs registry state 1\n";
/// The file may have this many bytes more than twice of what is up to date.
const SLACK: usize = 1 << 20;

/// A change of the table.
#[derive(Serialize, Deserialize)]
enum Change {
    /// All shards.
    Shards(Vec<KeptShard>),
    /// All deleted models.
    Deleted(Vec<(String, Generation)>),
    /// A model is new, or has another record.
    Model(String, KeptModel, Vec<u8>),
    /// A model is gone.
    Gone(String),
}

/// The file, and the table as it has it.
pub(super) struct StateFile {
    path: PathBuf,
    file: File,
    kept: Kept,
    written: usize,
    /// Why the last change is not in the file.
    trouble: Option<String>,
}

impl StateFile {
    /// Opens the file, or makes it.
    ///
    /// # Errors
    /// If it is another file, another process has it, or it cannot be read and written.
    pub(super) fn open(path: &Path) -> io::Result<StateFile> {
        let mut file = locked(path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let kept = match bytes.strip_prefix(FORMAT) {
            Some(changes) => read(changes, path),
            None if FORMAT.starts_with(&bytes) => Kept::default(),
            None => {
                return Err(io::Error::other(
                    "it is no state of a registry of this release: name another one",
                ));
            }
        };
        let mut state = StateFile { path: path.to_owned(), file, kept, written: 0, trouble: None };
        state.write_anew()?;
        Ok(state)
    }

    /// The table.
    pub(super) fn kept(&self) -> &Kept {
        &self.kept
    }

    /// Writes what has changed. If that fails, the log says so, and the next change writes all.
    pub(super) fn keep(&mut self, after: Kept) {
        let before = std::mem::replace(&mut self.kept, after);
        let written = match self.trouble {
            None => self.append(&before),
            Some(_) => self.write_anew(),
        };
        let trouble = written.err().map(|error| error.to_string());
        if let Some(error) = trouble.as_ref().filter(|_| self.trouble != trouble) {
            let path = self.path.display();
            tracing::warn!(%path, %error, "the registry's state is not written: a restart knows what it knew before");
        }
        self.trouble = trouble;
    }

    fn append(&mut self, before: &Kept) -> io::Result<()> {
        let frames = frames(before, &self.kept)?;
        self.written += frames.len();
        if self.written > 2 * self.len() + SLACK {
            return self.write_anew();
        }
        self.file.write_all(&frames)
    }

    /// About how many bytes a file has that is up to date.
    fn len(&self) -> usize {
        const ENTRY: usize = 64;
        let models: usize = self.kept.models.values().map(|(model, _)| model.len + ENTRY).sum();
        models + (self.kept.shards.len() + self.kept.deleted.len()) * ENTRY
    }

    /// Puts a file with this table alone in the place of the one that is there.
    fn write_anew(&mut self) -> io::Result<()> {
        let mut name = self.path.clone().into_os_string();
        name.push(".new");
        let new = PathBuf::from(name);
        let mut file = locked(&new)?;
        file.set_len(0)?;
        let frames = frames(&Kept::default(), &self.kept)?;
        file.write_all(FORMAT)?;
        file.write_all(&frames)?;
        file.sync_all()?;
        std::fs::rename(&new, &self.path)?;
        self.written = frames.len();
        self.file = file;
        Ok(())
    }
}

/// The file at `path`, which no other registry has.
fn locked(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(io::Error::other("another registry has it: each needs its own")),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

fn read(mut bytes: &[u8], path: &Path) -> Kept {
    let mut kept = Kept::default();
    while !bytes.is_empty() {
        let Some(change) = next(&mut bytes) else {
            let (path, lost) = (path.display(), bytes.len());
            tracing::warn!(%path, lost, "the end of the registry's state is damaged: what shards tell makes up for it");
            break;
        };
        match change {
            Change::Shards(shards) => kept.shards = shards,
            Change::Deleted(deleted) => kept.deleted = deleted,
            Change::Model(name, model, record) => {
                kept.models.insert(name, (model, record.into()));
            }
            Change::Gone(name) => {
                kept.models.remove(&name);
            }
        }
    }
    kept
}

/// The next change, if it is whole.
fn next(bytes: &mut &[u8]) -> Option<Change> {
    let (len, rest) = bytes.split_first_chunk::<4>()?;
    let (sum, rest) = rest.split_first_chunk::<4>()?;
    let (change, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    let change =
        (crc32c(change) == u32::from_le_bytes(*sum)).then(|| postcard::from_bytes(change).ok())??;
    *bytes = rest;
    Some(change)
}

/// What has changed from one table to the other.
fn frames(before: &Kept, after: &Kept) -> io::Result<Vec<u8>> {
    let mut changes = Vec::new();
    if before.shards != after.shards {
        changes.push(Change::Shards(after.shards.clone()));
    }
    if before.deleted != after.deleted {
        changes.push(Change::Deleted(after.deleted.clone()));
    }
    for (name, (model, record)) in &after.models {
        if before.models.get(name).is_none_or(|(_, before)| !Arc::ptr_eq(before, record)) {
            changes.push(Change::Model(name.clone(), model.clone(), record.to_vec()));
        }
    }
    let gone = before.models.keys().filter(|name| !after.models.contains_key(*name));
    changes.extend(gone.cloned().map(Change::Gone));
    let mut frames = Vec::new();
    for change in &changes {
        let bytes = postcard::to_stdvec(change).map_err(io::Error::other)?;
        let len = u32::try_from(bytes.len()).map_err(io::Error::other)?;
        frames.extend_from_slice(&len.to_le_bytes());
        frames.extend_from_slice(&crc32c(&bytes).to_le_bytes());
        frames.extend_from_slice(&bytes);
    }
    Ok(frames)
}

#[cfg(test)]
mod tests;
