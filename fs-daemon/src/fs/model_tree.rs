//! One model's part of the tree: the state that its files need besides the model itself.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use libmodelio::formats::layout::layout_text;
use libmodelio::formats::npy;
use libmodelio::vocabulary::ids::{ReaderId, Version};
use libmodelio::vocabulary::layout::header;
use parking_lot::Mutex;

use super::Owner;
use super::changes::KeptChanges;
use super::node::{File, MAX_PUBLICATIONS, Node};
use super::paths::TensorPaths;
use super::temporary::Temporaries;
use super::tensors_name::TensorsName;
use super::views::Views;
use crate::session::error::Done;
use crate::session::error::LastRefusal;
use crate::session::model::{Model, Snapshots};
use crate::session::publication::Publication;

/// The kernel's cache of names. Must not be called from within a request, or under a lock.
pub trait Kernel: Send + Sync {
    /// `name` in directory `parent` leads elsewhere now.
    fn forget_name(&self, parent: u64, name: &str);
}

/// The directory of one model.
pub struct ModelTree {
    /// The model.
    pub model: Arc<Model>,
    /// Its index in the mount.
    pub index: u8,
    /// The directory that has its files.
    pub home: u64,
    /// When it was mounted.
    pub started: SystemTime,
    /// Header of `tensors/<name>.npy`, by tensor.
    pub npy_headers: Vec<Arc<[u8]>>,
    /// The file `layout`.
    pub layout: Arc<str>,
    /// Directories below `tensors/`.
    pub paths: TensorPaths,
    /// The name `tensors` in the kernel.
    pub tensors_name: TensorsName,
    /// The name `publish`.
    pub publications: Arc<Publications>,
    /// Views of it.
    pub views: Views<ModelTree>,
    /// Files that programs are about to rename.
    pub temporaries: Temporaries,
    /// What has changed from one version to another, as looked up last.
    pub(super) changes: Arc<KeptChanges>,
    /// Length of the header of `weights.safetensors`, the same in all versions.
    pub safetensors_header_len: u64,
    /// Whoever knows this may borrow the model's memory. None if the system had no random number.
    pub key: Option<String>,
    /// User and group of each reader that was made here.
    reader_owners: Mutex<BTreeMap<ReaderId, Owner>>,
}

/// A name that nobody can guess.
///
/// # Errors
/// When the system has no random numbers yet.
pub fn unguessable() -> io::Result<String> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    Ok(format!("{:032x}", u128::from_ne_bytes(random)))
}

impl ModelTree {
    /// After a new version, has the kernel drop the name `tensors` and gives the answers that wait for it.
    /// One thread calls this.
    pub fn drop_tensors_name(&self, kernel: &dyn Kernel) {
        self.tensors_name.drop_name(|| kernel.forget_name(self.home, "tensors"));
    }

    /// The tree of `model`, as the one of this `index`. A view is in the directory `home` of another tree.
    pub fn new(model: Arc<Model>, index: u8, home: Option<u64>) -> ModelTree {
        let tensors = model.layout.tensors();
        ModelTree {
            index,
            home: home.unwrap_or(Node::Model(index, File::Dir).ino()),
            started: SystemTime::now(),
            npy_headers: tensors.iter().map(|tensor| npy::npy_header(tensor).into()).collect(),
            layout: layout_text(tensors).into(),
            paths: TensorPaths::new(tensors),
            tensors_name: TensorsName::default(),
            publications: Arc::default(),
            views: Views::default(),
            temporaries: Temporaries::default(),
            changes: Arc::default(),
            safetensors_header_len: safetensors_header(&model, Version(0)).len() as u64,
            key: unguessable().ok(),
            reader_owners: Mutex::default(),
            model,
        }
    }

    /// Whether it is a view, which is only read.
    pub fn is_view(&self) -> bool {
        matches!(self.model.snapshots, Snapshots::Never(_) | Snapshots::PartOf(_))
    }

    /// The newest version that may be announced. A program that knows of a version expects it, or a newer
    /// one, below `tensors`.
    pub fn shown_version(&self) -> Version {
        self.tensors_name.shown(self.model.job.offered_version())
    }

    /// Wraps `done`, so that it hears of a success only when all versions that exist by then may be
    /// announced.
    pub fn done_when_shown<T: Send + 'static>(self: &Arc<Self>, done: Done<T>) -> Done<T> {
        let tree = Arc::clone(self);
        Box::new(move |outcome| match outcome {
            Ok(value) => {
                tree.tensors_name.when_shown(tree.model.job.version(), move || done(Ok(value)));
            }
            Err(error) => done(Err(error)),
        })
    }

    /// A reader was made here for `owner`.
    pub fn owns_reader(&self, owner: Owner, reader: ReaderId) {
        let mut owners = self.reader_owners.lock();
        owners.retain(|known, _| self.model.whole().job.reader(*known).is_some_and(|reader| reader.is_own));
        owners.insert(reader, owner);
    }

    /// The readers that were made here begin again, in another life. They have applied no version of it.
    pub fn take_readers(&self, before: &ModelTree) {
        for reader in before.model.whole().job.readers() {
            let Some(owner) = before.owner_of_reader(reader.reader).filter(|_| reader.is_own) else {
                continue;
            };
            match self.model.begin_reader(&reader.name) {
                Ok(begun) => self.owns_reader(owner, begun.reader),
                Err(error) => {
                    let (model, reader) = (&self.model.name, &reader.name);
                    tracing::warn!(model, reader, "does not read as it did: {error}");
                }
            }
        }
    }

    /// Who owns a reader, if it was made here.
    pub fn owner_of_reader(&self, reader: ReaderId) -> Option<Owner> {
        self.reader_owners.lock().get(&reader).copied()
    }

    /// Size of a tensor's file.
    pub fn npy_size(&self, tensor: u32) -> u64 {
        let index = tensor as usize;
        let bytes = &self.model.layout.tensors()[index].bytes;
        self.npy_headers[index].len() as u64 + (bytes.end - bytes.start)
    }

    /// The place that keeps why calls on this file failed. Only files of learners have one: of the mount's
    /// own learner, and of others in the job.
    pub fn refusal_of(&self, file: File) -> Option<Arc<LastRefusal>> {
        match file {
            File::Weights(_)
            | File::Publish(_)
            | File::NamedPublish
            | File::Gradients(_)
            | File::NamedGradients
            | File::Device
            | File::Error
            | File::ViewPlan(_)
            | File::Set
            | File::Snapshot => Some(Arc::clone(&self.model.own_refusal)),
            file => {
                let id = file.learner()?;
                let dropped = || self.model.dropped(id).map(|dropped| Arc::clone(&dropped.refusal));
                self.model.learner(id).ok().map(|learner| Arc::clone(&learner.refusal)).or_else(dropped)
            }
        }
    }
}

/// Header of `weights.safetensors` of `version`. It names the version in its metadata, with a fixed width: all versions
/// have headers of the same length.
pub fn safetensors_header(model: &Model, version: Version) -> Arc<[u8]> {
    let mut metadata = model.metadata.clone();
    // Libraries refuse a file that does not say whose it is.
    metadata.entry("format".into()).or_insert_with(|| "pt".into());
    metadata.insert("gradfs.version".into(), format!("{:010}", version.0));
    header::header_bytes(model.layout.tensors(), &metadata).into()
}

/// The publications of one model.
#[derive(Default)]
pub struct Publications {
    looked_up: AtomicU64,
    /// The open publications, by number. A reference is empty until its open is complete.
    open: Mutex<HashMap<u64, Weak<Publication>>>,
}

/// Keeps a publication's inode from being opened again, until this is dropped.
pub struct OpenPublication {
    of: Arc<Publications>,
    number: u64,
}

impl Publications {
    /// A number that no earlier lookup got. Listings show 0, which no lookup gets.
    pub fn number(&self) -> u64 {
        1 + self.looked_up.fetch_add(1, Ordering::Relaxed) % (MAX_PUBLICATIONS - 1)
    }

    /// Opens the publication of this number. None if it is open.
    pub fn open(self: &Arc<Self>, number: u64) -> Option<OpenPublication> {
        let mut open = self.open.lock();
        if open.contains_key(&number) {
            return None;
        }
        open.insert(number, Weak::new());
        Some(OpenPublication { of: Arc::clone(self), number })
    }

    /// The publication of this number, if it is open.
    pub fn get(&self, number: u64) -> Option<Arc<Publication>> {
        self.open.lock().get(&number)?.upgrade()
    }
}

impl OpenPublication {
    /// The inode stands for this publication.
    pub fn is_of(&self, publication: &Arc<Publication>) {
        self.of.open.lock().insert(self.number, Arc::downgrade(publication));
    }
}

impl Drop for OpenPublication {
    fn drop(&mut self) {
        self.of.open.lock().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_open_once_at_a_time() {
        let publications = Arc::<Publications>::default();
        let (one, other) = (publications.number(), publications.number());
        assert!(one != 0 && one != other);
        let open = publications.open(one);
        assert!(open.is_some() && publications.open(one).is_none());
        assert!(publications.open(other).is_some());
        drop(open);
        assert!(publications.open(one).is_some());
    }

    #[test]
    fn numbers_begin_again_behind_the_highest() {
        let publications = Publications::default();
        publications.looked_up.store(MAX_PUBLICATIONS - 2, Ordering::Relaxed);
        assert_eq!((publications.number(), publications.number()), (MAX_PUBLICATIONS - 1, 1));
    }
}
