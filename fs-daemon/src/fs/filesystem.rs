//! The filesystem of one mount: its models, and the state that all its files share.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::SystemTime;

use parking_lot::{Mutex, RwLock};

use super::access::Access;
use super::bypassed::Bypassed;
use super::draft::DraftRoom;
use super::looked_up::LookedUpNames;
use super::model_tree::ModelTree;
use super::node::{File, MAX_MODELS, MapsTo, Node};
use super::text::MountStatus;
use crate::session::error::{CallError, CallResult};
use crate::session::model::Model;
use crate::session::trace::OneTrace;

/// Tells what `status.json` shows of the mount.
pub type StatusSource = Box<dyn Fn() -> MountStatus + Send + Sync>;

/// The filesystem of one mount.
pub struct Fs {
    trees: RwLock<Vec<Slot>>,
    /// Told when a name is looked up that is no model's: one may have come.
    pub(super) unknown: Mutex<Option<SyncSender<()>>>,
    /// Whether reads and mappings may bypass the daemon.
    pub(super) passthrough: bool,
    pub(super) access: Access,
    pub(super) started: SystemTime,
    pub(super) looked_up: LookedUpNames,
    pub(super) bypassed: Bypassed,
    pub(super) one_trace: OneTrace,
    status: StatusSource,
    /// What is being written to settings.
    pub(super) drafts: DraftRoom,
}

/// The place of a model: its index is that of no other as long as the mount lasts, so the kernel never takes an old inode
/// for one of another model.
struct Slot {
    /// None once the model is gone and nobody uses its files.
    tree: Option<Arc<ModelTree>>,
    /// Whether its name is in the root.
    shown: bool,
}

impl Fs {
    /// A filesystem with these models.
    ///
    /// # Panics
    /// With more than [`MAX_MODELS`].
    pub fn new(models: Vec<Arc<Model>>, passthrough: bool, access: Access, status: StatusSource) -> Fs {
        assert!(models.len() <= MAX_MODELS, "{} models", models.len());
        let fs = Fs {
            trees: RwLock::default(),
            unknown: Mutex::default(),
            passthrough,
            access,
            started: SystemTime::now(),
            looked_up: LookedUpNames::default(),
            bypassed: Bypassed::default(),
            one_trace: OneTrace::default(),
            status,
            drafts: DraftRoom::default(),
        };
        models.into_iter().for_each(|model| drop(fs.add(model)));
        fs
    }

    /// Shows one more model; `None` if the mount has shown as many as it can.
    pub fn add(&self, model: Arc<Model>) -> Option<Arc<ModelTree>> {
        let mut trees = self.trees.write();
        let index = u8::try_from(trees.len()).ok()?;
        let tree = Arc::new(ModelTree::new(model, index));
        trees.push(Slot { tree: Some(Arc::clone(&tree)), shown: true });
        Some(tree)
    }

    /// Whether one more model can be shown.
    pub fn has_room(&self) -> bool {
        self.trees.read().len() < MAX_MODELS
    }

    /// The model is gone: its name leads nowhere from now on. False if that was so before.
    pub fn hide(&self, model: &Model) -> bool {
        let mut trees = self.trees.write();
        let of = |slot: &&mut Slot| slot.tree.as_ref().is_some_and(|tree| std::ptr::eq(&*tree.model, model));
        trees.iter_mut().find(of).is_some_and(|slot| std::mem::take(&mut slot.shown))
    }

    /// Takes out the models that are gone and whose files nobody uses. Who reads a version keeps its memory, and no more.
    pub fn take_unused(&self) -> Vec<Arc<ModelTree>> {
        let unused =
            |slot: &Slot| !slot.shown && slot.tree.as_ref().is_some_and(|tree| Arc::strong_count(tree) == 1);
        let mut trees = self.trees.write();
        trees.iter_mut().filter(|slot| unused(slot)).filter_map(|slot| slot.tree.take()).collect()
    }

    /// Has `wake` told when a name is looked up in the root that is no model's.
    pub fn on_unknown(&self, wake: SyncSender<()>) {
        *self.unknown.lock() = Some(wake);
    }

    /// The models, in the order of their indices, those too that are gone and still in use.
    pub fn trees(&self) -> Vec<Arc<ModelTree>> {
        self.trees.read().iter().filter_map(|slot| slot.tree.clone()).collect()
    }

    /// The models whose names are in the root, in the order of their indices.
    pub fn shown(&self) -> Vec<Arc<ModelTree>> {
        let trees = self.trees.read();
        trees.iter().filter(|slot| slot.shown).filter_map(|slot| slot.tree.clone()).collect()
    }

    /// Whether reads and mappings may bypass the daemon.
    pub fn is_passthrough(&self) -> bool {
        self.passthrough
    }

    /// Whether the name in `parent` that led to this inode leads to it for good.
    pub fn is_fixed(&self, parent: u64, ino: u64) -> bool {
        match (Node::from_ino(parent), Node::from_ino(ino)) {
            (_, Some(Node::Model(_, File::Learner(_) | File::Publish(_))) | None) => false,
            // The name leads to the inode that maps to the page cache.
            (_, Some(Node::Model(_, file))) if file.maps() == Some(MapsTo::Memory) => false,
            // The kernel is told to drop the name in time.
            (_, Some(Node::Model(_, File::Tensors(..)))) => true,
            // A version's own directory never changes.
            (Some(Node::Model(_, dir)), _) if dir.version().is_some() => true,
            (_, Some(Node::Model(_, file))) => file.version().is_none(),
            (_, Some(_)) => true,
        }
    }

    /// The model with this index.
    ///
    /// # Errors
    /// ENOENT.
    pub fn tree(&self, index: u8) -> CallResult<Arc<ModelTree>> {
        let trees = self.trees.read();
        trees.get(usize::from(index)).and_then(|slot| slot.tree.clone()).ok_or_else(CallError::not_found)
    }

    /// The model that an inode is of, and the learner whose file it is: what a line of the log names.
    pub fn whose(&self, ino: u64) -> (Option<Arc<Model>>, Option<String>) {
        let Some(Node::Model(index, file)) = Node::from_ino(ino) else { return (None, None) };
        let Ok(tree) = self.tree(index) else { return (None, None) };
        let model = &tree.model;
        let learner = match file {
            File::Gradients(_) | File::Device => Some(model.own_name.clone()),
            file => file.learner().and_then(|id| model.learner(id).ok()).map(|learner| learner.name.clone()),
        };
        (Some(Arc::clone(model)), learner)
    }

    /// The facts about the mount in `status.json`, besides the model.
    pub(super) fn mount_status(&self) -> MountStatus {
        (self.status)()
    }

    pub(super) fn node(&self, ino: u64) -> CallResult<Node> {
        Node::from_ino(ino).ok_or_else(CallError::not_found)
    }

    /// The kernel forgets `count` lookups of an inode.
    pub fn forget(&self, ino: u64, count: u64) {
        if let Some(Node::Model(index, file)) = Node::from_ino(ino)
            && let Some(version) = file.version()
        {
            self.looked_up.forgotten(index, version, ino, count);
            let Ok(tree) = self.tree(index) else { return };
            if file.is_flat() && self.bypassed.forgotten(ino, count) {
                tree.model.job.unmap_version(version);
            }
            if let Some(version) = file.names() {
                tree.model.job.forget(version, count);
            }
        }
    }
}

/// The inode shows an older version than the caller must see: the kernel looks the name up again.
pub fn stale() -> CallError {
    CallError::new(libc::ESTALE, "a newer version is out")
}
