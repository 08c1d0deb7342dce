//! Names that lead to another inode after a new version: the kernel is told to drop them from its cache.

use super::filesystem::Fs;
use super::looked_up::Fate;
use super::model_tree::ModelTree;
use super::node::{File, Node};

/// The kernel's cache of names. Must not be called from within a request, or under a lock.
pub trait Kernel: Send + Sync {
    /// `name` in directory `parent` leads elsewhere now.
    fn forget_name(&self, parent: u64, name: &str);
}

impl ModelTree {
    /// After a new version, has the kernel drop the name `tensors` and gives the answers that wait for it.
    /// One thread calls this.
    pub fn drop_tensors_name(&self, kernel: &dyn Kernel) {
        let dir = Node::Model(self.index, File::Dir).ino();
        self.tensors_name.drop_name(|| kernel.forget_name(dir, "tensors"));
    }
}

impl Fs {
    /// Drops names that lead to new inodes from the kernel's cache. The kernel then lets go of the old inodes
    /// once nobody has them open or mapped, and their memory can be used again.
    pub fn drop_moved_names(&self, tree: &ModelTree, kernel: &dyn Kernel, patient: bool) {
        let (index, model) = (tree.index, &tree.model);
        let dir = Node::Model(index, File::Dir).ino();
        for name in ["weights", "weights.safetensors"] {
            kernel.forget_name(dir, name);
        }
        for learner in model.learners() {
            kernel.forget_name(Node::Model(index, File::Learner(learner.id)).ino(), "weights");
        }
        let versions = Node::Model(index, File::Versions).ino();
        let retained = model.job.retained();
        for old in model.job.versions() {
            if !retained.contains(&old) {
                kernel.forget_name(versions, &old.to_string());
            }
        }
        self.drop_old_names(tree, kernel, patient);
    }

    /// A lookup that was under way while its name was dropped brings the name back: dropped again, for as
    /// long as versions are there that nobody should want any more.
    pub fn drop_leftovers(&self, kernel: &dyn Kernel) {
        for tree in self.trees() {
            if tree.model.job.versions().len() > tree.model.job.retained().len() {
                self.drop_moved_names(&tree, kernel, false);
            }
        }
    }

    /// Makes the kernel let go of names in directories of versions that are no longer retained.
    fn drop_old_names(&self, tree: &ModelTree, kernel: &dyn Kernel, patient: bool) {
        let job = &tree.model.job;
        let retained = job.retained();
        let fate = |version| match job.get(version) {
            _ if retained.contains(&version) => Fate::Stays,
            Some(_) => Fate::Held,
            None => Fate::Gone,
        };
        for (parent, name) in self.looked_up.to_drop(tree.index, patient, fate) {
            kernel.forget_name(parent, &name);
        }
    }
}
