//! The filesystem of one mount: its models, and the state that all its files share.

use std::sync::Arc;
use std::time::SystemTime;

use super::access::Access;
use super::looked_up::LookedUpNames;
use super::model_tree::ModelTree;
use super::node::{File, MAX_MODELS, Node};
use super::text::MountStatus;
use crate::session::error::{CallError, CallResult};
use crate::session::model::Model;
use crate::session::trace::OneTrace;

/// Tells what `status.json` shows of the mount.
pub type StatusSource = Box<dyn Fn() -> MountStatus + Send + Sync>;

/// The filesystem of one mount.
pub struct Fs {
    trees: Vec<Arc<ModelTree>>,
    /// Whether reads and mappings may bypass the daemon.
    pub(super) passthrough: bool,
    pub(super) access: Access,
    pub(super) started: SystemTime,
    pub(super) looked_up: LookedUpNames,
    pub(super) one_trace: OneTrace,
    status: StatusSource,
}

impl Fs {
    /// A filesystem with these models.
    ///
    /// # Panics
    /// With more than [`MAX_MODELS`].
    pub fn new(models: Vec<Arc<Model>>, passthrough: bool, access: Access, status: StatusSource) -> Fs {
        assert!(models.len() <= MAX_MODELS, "{} models", models.len());
        let trees = (0..=u8::MAX).zip(models).map(|(index, model)| Arc::new(ModelTree::new(model, index)));
        Fs {
            trees: trees.collect(),
            passthrough,
            access,
            started: SystemTime::now(),
            looked_up: LookedUpNames::default(),
            one_trace: OneTrace::default(),
            status,
        }
    }

    /// The models, in the order of their indices.
    pub fn trees(&self) -> &[Arc<ModelTree>] {
        &self.trees
    }

    /// Whether reads and mappings may bypass the daemon.
    pub fn is_passthrough(&self) -> bool {
        self.passthrough
    }

    /// Whether the name in `parent` that led to this inode leads to it for good.
    pub fn is_fixed(&self, parent: u64, ino: u64) -> bool {
        match (Node::from_ino(parent), Node::from_ino(ino)) {
            (_, Some(Node::Model(_, File::Learner(_) | File::Publish(_))) | None) => false,
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
    pub fn tree(&self, index: u8) -> CallResult<&Arc<ModelTree>> {
        self.trees.get(usize::from(index)).ok_or_else(CallError::not_found)
    }

    /// The model that an inode is of, and the learner whose file it is: what a line of the log names.
    pub fn whose(&self, ino: u64) -> (Option<Arc<Model>>, Option<String>) {
        let Some(Node::Model(index, file)) = Node::from_ino(ino) else { return (None, None) };
        let Ok(tree) = self.tree(index) else { return (None, None) };
        let model = &tree.model;
        let learner = match file {
            File::Gradients | File::Device => Some(model.own_name.clone()),
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
            && let (Some(version), Ok(tree)) = (file.version(), self.tree(index))
        {
            self.looked_up.forgotten(index, version, ino, count);
            if let Some(version) = file.pins() {
                tree.model.job.unpin(version, count);
            }
        }
    }
}

/// The inode shows an older version than the caller must see: the kernel looks the name up again.
pub fn stale() -> CallError {
    CallError::new(libc::ESTALE, "a newer version is out")
}
