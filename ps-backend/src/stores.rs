//! Places where snapshots are kept: a local directory, or a bucket of an object store.
//!
//! | module | holds |
//! |---|---|
//! | `directory` | objects as files of a directory, on its disk when a call returns |
//! | `direct` | files that are read and written past the kernel's cache |
//! | `bucket` | objects of S3, GCS or Azure, by the crate `object_store` |
//!
//! An object is there as a whole or not at all. Calls block, and every wait in them has a deadline.

mod bucket;
mod direct;
mod directory;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use bucket::Bucket;
pub use directory::Directory;

/// The most bytes of an object that [`Objects::get`] reads: the longest description of a snapshot.
pub const MAX_WHOLE: u64 = 1 << 30;

/// Why a store does not do it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The address names no store.
    #[error("{url:?} names no place for snapshots: {why}")]
    Url {
        /// The address.
        url: String,
        /// The fault.
        why: String,
    },
    /// There is no such object.
    #[error("there is no {0}")]
    Missing(String),
    /// There is such an object.
    #[error("{0} is there already")]
    Exists(String),
    /// The store refuses, fails, or cannot be reached.
    #[error("{name}: {why}")]
    Failed {
        /// The object, with its store.
        name: String,
        /// The store's reason.
        why: String,
    },
}

/// What becomes of an object that has the name of a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// The new one takes its place.
    Replaced,
    /// It stays, and the new one is refused. Of several writers, one succeeds.
    Kept,
}

/// An object in a list.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Listed {
    /// Its name, with its folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
}

/// Named objects. A name is words with slashes in between.
pub trait Objects: Send + Sync + fmt::Debug {
    /// The address of the store.
    fn url(&self) -> &str;

    /// Keeps an object, which consists of `parts` one behind the other. It is durable afterwards.
    ///
    /// # Errors
    /// [`StoreError`]; [`StoreError::Exists`] only with [`Existing::Kept`].
    fn put(&self, name: &str, parts: &[&[u8]], existing: Existing) -> Result<(), StoreError>;

    /// The whole of an object of at most [`MAX_WHOLE`] bytes.
    ///
    /// # Errors
    /// [`StoreError`].
    fn get(&self, name: &str) -> Result<Vec<u8>, StoreError>;

    /// Fills `bytes` with those of an object from `offset` on.
    ///
    /// # Errors
    /// [`StoreError`], also for an object that ends before.
    fn read_at(&self, name: &str, offset: u64, bytes: &mut [u8]) -> Result<(), StoreError>;

    /// The objects in a folder, by their names. A folder that is not there is empty.
    ///
    /// # Errors
    /// [`StoreError`].
    fn list(&self, folder: &str) -> Result<Vec<Listed>, StoreError>;

    /// Removes an object, if it is there.
    ///
    /// # Errors
    /// [`StoreError`].
    fn delete(&self, name: &str) -> Result<(), StoreError>;

    /// Removes what writers have left in a folder that did not come to their end. Nobody else may write there now.
    ///
    /// # Errors
    /// [`StoreError`].
    fn tidy(&self, folder: &str) -> Result<(), StoreError>;
}

/// Whether this names a store by its kind (`s3://…`), and not by a path.
pub fn is_url(text: &str) -> bool {
    let scheme = text.split_once("://").map(|(scheme, _)| scheme);
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
    scheme.is_some_and(|scheme| !scheme.is_empty() && scheme.bytes().all(is_letter))
}

/// The directory that a store is in, if it is one: of a `file://` address, or of a path.
pub fn path_of(text: &str) -> Option<PathBuf> {
    match text.strip_prefix("file://") {
        Some(path) => Some(PathBuf::from(path)),
        None => (!is_url(text)).then(|| PathBuf::from(text)),
    }
}

/// Opens the store at an address: `file:///absolute/path`, a path, `s3://bucket/prefix`, `gs://bucket/prefix`
/// or `az://container/prefix`. Credentials are those of the environment, by the names that the tools of each
/// vendor use (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME`).
/// Nothing is asked of the store yet.
///
/// # Errors
/// [`StoreError::Url`].
pub fn open(url: &str) -> Result<Arc<dyn Objects>, StoreError> {
    if url.contains('#') {
        let why = "a # is not part of an address".into();
        return Err(StoreError::Url { url: url.to_owned(), why });
    }
    match path_of(url) {
        Some(path) if url.starts_with("file://") && !path.is_absolute() => {
            Err(StoreError::Url { url: url.to_owned(), why: "a file:// address has an absolute path".into() })
        }
        Some(path) => Ok(Arc::new(Directory::new(&absolute(&path).components().collect::<PathBuf>()))),
        None => Ok(Arc::new(Bucket::open(url)?)),
    }
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// An address that means the same in every process of a host, in one spelling: a path is absolute in it. An empty one stays so.
pub fn absolute_url(url: &str) -> String {
    match path_of(url) {
        _ if url.is_empty() => String::new(),
        // The components leave out what changes nothing.
        Some(path) => absolute(&path).components().collect::<PathBuf>().to_string_lossy().into_owned(),
        None => url.trim_end_matches('/').to_owned(),
    }
}

#[cfg(test)]
mod tests;
