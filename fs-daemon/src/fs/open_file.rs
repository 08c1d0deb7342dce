//! Open files: the parts of a version, contributions, new weights and small texts.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use libmodelio::contributor::Wrote;
use libmodelio::vocabulary::ids::Version;

use super::Fs;
use super::changes::ChangesFile;
use super::model_tree::ModelTree;
use super::temporary::Temporary;
use super::text_file::TextFile;
use crate::session::all_reduce::AllReduceFile;
use crate::session::capture::Capture;
use crate::session::contribution::{Contribution, Ending, Withdraw};
use crate::session::error::{CallError, CallResult, Done};
use crate::session::publication::Publication;
use crate::session::trace::Trace;
use libmodelio::reader::Reader;

/// The function of an open file.
pub enum OpenFile {
    /// Reads a version.
    Version(VersionFile),
    /// Contributes as a learner, and for `device` reads too.
    Contribution {
        /// The file's model.
        tree: Arc<ModelTree>,
        /// The contribution that it writes.
        contribution: Arc<Contribution>,
    },
    /// Writes new weights, through `weights` or `publish`.
    Publication {
        /// The file's model.
        tree: Arc<ModelTree>,
        /// The publication that it writes.
        publication: Arc<Publication>,
        /// Stays while the file is open: the version that `weights` shows, or the inode of `publish`.
        _keeps: Box<dyn Any + Send + Sync>,
    },
    /// A file to be renamed.
    Temporary {
        /// The file's model.
        tree: Arc<ModelTree>,
        /// Its bytes.
        file: Arc<Temporary>,
    },
    /// Reads what has changed from one version to another.
    Changes(ChangesFile),
    /// Reduces numbers of a learner with those of others.
    AllReduce(AllReduceFile),
    /// Reads a file that came with the model.
    Companion {
        /// The file's model.
        tree: Arc<ModelTree>,
        /// The number of the file.
        index: usize,
    },
    /// Reads (and for `control/*` writes) a small text.
    Text(TextFile),
    /// A snapshot of the job.
    Snapshot(Capture),
    /// A trace of the mount.
    Trace(Trace),
}

/// A part of a version, behind a header.
pub struct VersionFile {
    /// The version.
    pub reader: Reader,
    /// The header in front of the bytes.
    pub header: Arc<[u8]>,
    /// The bytes of the model behind the header.
    pub bytes: Range<u64>,
}

impl Fs {
    /// Reads up to `len` bytes at `offset` and gives them to `with`, without a copy where possible.
    pub fn read<R>(
        &self,
        file: &OpenFile,
        offset: u64,
        len: usize,
        with: impl FnOnce(CallResult<&[u8]>) -> R,
    ) -> R {
        match file {
            OpenFile::Version(VersionFile { reader, header, bytes }) => {
                read_version(reader, header, bytes, offset, len, with)
            }
            OpenFile::Contribution { tree, contribution } => {
                let size = tree.model.layout.size();
                if let Some(reader) = contribution.reader() {
                    return read_version(&reader, &[], &(0..size), offset, len, with);
                }
                let end = offset.saturating_add(len as u64).min(size);
                let mut bytes = vec![0; end.saturating_sub(offset) as usize];
                contribution.load_mapped(offset, &mut bytes);
                with(Ok(&bytes))
            }
            OpenFile::Text(text) => match self.read_text(text, offset) {
                Ok(text) => with(Ok(part(text.as_bytes(), offset, len))),
                Err(error) => with(Err(error)),
            },
            OpenFile::Changes(file) => with(Ok(&file.read(offset, len))),
            OpenFile::Temporary { file, .. } => file.read(offset, len, |bytes| with(Ok(bytes))),
            OpenFile::AllReduce(of) => with(Ok(part(&of.results(offset), 0, len))),
            OpenFile::Companion { tree, index } => {
                with(Ok(part(&tree.model.companions[*index].contents, offset, len)))
            }
            OpenFile::Snapshot(capture) => capture.read(offset, len, |bytes| with(Ok(bytes))),
            OpenFile::Trace(trace) => trace.read(offset, len, |bytes| with(Ok(bytes))),
            OpenFile::Publication { tree, publication, .. } => {
                let Some(memory) = publication.mapped() else {
                    return with(Err(CallError::new(libc::EBADF, "not open for reading")));
                };
                let end = offset.saturating_add(len as u64).min(tree.model.layout.size());
                let mut bytes = vec![0; end.saturating_sub(offset) as usize];
                memory.load(offset, &mut bytes);
                with(Ok(&bytes))
            }
        }
    }
}

impl OpenFile {
    /// Writes. `from_mapping`: the kernel writes back pages that a program stored through mmap.
    ///
    /// # Errors
    /// Fails as [`Contribution::write`], [`Publication::write`] and
    /// [`TextFile::write`](super::text_file::TextFile::write) do, and with EBADF for a file not open for writing.
    pub fn write(&self, offset: u64, data: &[u8], from_mapping: bool) -> CallResult<Wrote> {
        match self {
            OpenFile::Contribution { contribution, .. } if from_mapping => {
                contribution.store_mapped(offset, data)?;
            }
            OpenFile::Contribution { contribution, .. } => return contribution.write(offset, data),
            OpenFile::Publication { publication, .. } => {
                match publication.mapped().filter(|_| from_mapping) {
                    Some(memory) => memory.store(offset, data)?,
                    None => publication.write(offset, data)?,
                }
            }
            OpenFile::Text(text) => return text.write(offset, data),
            OpenFile::Temporary { file, .. } => file.write(offset, data)?,
            OpenFile::Version(_)
            | OpenFile::Changes(_)
            | OpenFile::AllReduce(_)
            | OpenFile::Companion { .. }
            | OpenFile::Snapshot(_)
            | OpenFile::Trace(_) => {
                return Err(CallError::new(libc::EBADF, "not open for writing"));
            }
        }
        Ok(Wrote::Taken)
    }

    /// fallocate(2). Of `gradients` it declares bytes of the mapping final: [`Contribution::declare_final`].
    ///
    /// # Errors
    /// As that does, and EINVAL for other files. (For EOPNOTSUPP the C library would write zeros instead.)
    pub fn declare_final(&self, offset: u64, len: u64, is_stored_here: bool) -> CallResult<()> {
        match self {
            OpenFile::Contribution { contribution, .. } => {
                contribution.declare_final(offset, len, is_stored_here)
            }
            OpenFile::Version(_)
            | OpenFile::Changes(_)
            | OpenFile::Publication { .. }
            | OpenFile::Temporary { .. }
            | OpenFile::AllReduce(_)
            | OpenFile::Companion { .. }
            | OpenFile::Text(_)
            | OpenFile::Snapshot(_)
            | OpenFile::Trace(_) => Err(CallError::new(
                libc::EINVAL,
                "only bytes of gradients can be declared final with fallocate",
            )),
        }
    }

    /// Ends what was written.
    pub fn end(&self, ending: Ending, done: Done<()>) {
        match self {
            OpenFile::Contribution { contribution, .. } => contribution.commit(ending, done),
            OpenFile::Publication { publication, .. } => publication.commit(ending, done),
            OpenFile::Text(text) => text.end(done),
            _ => done(Ok(())),
        }
    }

    /// Whether a close has something to end: a write, a refusal to report, or a setting that was emptied.
    pub fn is_pending(&self) -> bool {
        match self {
            OpenFile::Contribution { contribution, .. } => contribution.wrote(),
            OpenFile::Publication { publication, .. } => publication.wrote(),
            OpenFile::Text(text) => text.is_pending(),
            _ => false,
        }
    }

    /// Whether something was written through this file since the last end. Unlike [`Self::is_pending`], a setting that
    /// was emptied alone is not.
    pub fn is_written(&self) -> bool {
        match self {
            OpenFile::Text(text) => text.is_written(),
            _ => self.is_pending(),
        }
    }

    /// Whether a write through this file has not been ended, and can still be.
    pub fn is_unfinished(&self) -> bool {
        match self {
            OpenFile::Contribution { contribution, .. } => {
                contribution.is_begun() && contribution.learner().is_open()
            }
            OpenFile::Publication { publication, .. } => publication.is_begun(),
            _ => self.is_pending(),
        }
    }

    /// Whether it was opened to write.
    pub fn is_writable(&self) -> bool {
        match self {
            OpenFile::Contribution { .. } | OpenFile::Publication { .. } => true,
            OpenFile::Text(text) => text.is_writable(),
            _ => false,
        }
    }

    /// Ends the wait for that end.
    pub fn withdrawal(&self) -> Option<Withdraw> {
        match self {
            OpenFile::Contribution { contribution, .. } => Some(contribution.withdrawal()),
            OpenFile::Publication { publication, .. } => publication.withdrawal(),
            _ => None,
        }
    }

    /// The model that is written to.
    pub fn written_tree(&self) -> Option<&Arc<ModelTree>> {
        match self {
            OpenFile::Contribution { tree, .. } | OpenFile::Publication { tree, .. } => Some(tree),
            _ => None,
        }
    }

    /// The name of the model that it is written to, or whose setting it is.
    pub fn written_model(&self) -> Option<&str> {
        let tree = match self {
            OpenFile::Text(text) => text.tree(),
            other => other.written_tree(),
        };
        tree.map(|tree| tree.model.name.as_str())
    }

    /// The version whose bytes it reads.
    pub fn shown_version(&self) -> Option<Version> {
        match self {
            OpenFile::Version(file) => Some(file.reader.version()),
            OpenFile::Changes(file) => Some(file.version()),
            OpenFile::Contribution { contribution, .. } => contribution.reader().map(|of| of.version()),
            _ => None,
        }
    }

    /// The file was truncated to nothing by open(2): a setting becomes empty if nothing is written, `weights` and
    /// `publish` are to be written whole, and `gradients` up to a tensor's end.
    pub fn truncated(&self) {
        match self {
            OpenFile::Contribution { contribution, .. } => contribution.truncated(),
            OpenFile::Publication { publication, .. } => publication.must_be_whole(),
            OpenFile::Text(text) => text.empty(),
            _ => {}
        }
    }

    /// ftruncate(2) to nothing: what was written since the last end is taken back, as [`Contribution::take_back`] does.
    pub fn take_back(&self, done: Done<()>) {
        match self {
            OpenFile::Contribution { contribution, .. } => return contribution.take_back(done),
            OpenFile::Publication { publication, .. } => publication.take_back(),
            OpenFile::Text(text) => text.empty(),
            _ => {}
        }
        done(Ok(()));
    }

    /// ftruncate(2) to the model's size: in a file that was truncated before, what is not written is zeros.
    pub fn extended(&self) {
        match self {
            OpenFile::Contribution { contribution, .. } => contribution.extended(),
            OpenFile::Publication { publication, .. } => publication.extended(),
            _ => {}
        }
    }
}

fn part(bytes: &[u8], offset: u64, len: usize) -> &[u8] {
    let start = (offset.min(bytes.len() as u64)) as usize;
    &bytes[start..bytes.len().min(start + len)]
}

fn read_version<R>(
    reader: &Reader,
    header: &[u8],
    bytes: &Range<u64>,
    offset: u64,
    len: usize,
    with: impl FnOnce(CallResult<&[u8]>) -> R,
) -> R {
    let before = header.len() as u64;
    let size = before + (bytes.end - bytes.start);
    let end = offset.saturating_add(len as u64).min(size);
    let data = |from: u64, to: u64| reader.bytes(bytes.start + from - before..bytes.start + to - before);
    if offset >= end {
        with(Ok(&[]))
    } else if end <= before {
        with(Ok(part(header, offset, len)))
    } else if offset >= before {
        with(Ok(data(offset, end)))
    } else {
        with(Ok(&[part(header, offset, len), data(before, end)].concat()))
    }
}
