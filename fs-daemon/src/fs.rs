//! The filesystem of one mount: its models, the state that all its files share, and their owners and modes; within, the
//! tree: names, inodes, attributes and what the files are, apart from how the kernel asks for them and from who opens
//! them.
//!
//! [`crate::session`] does the work behind the files. Nothing here blocks for long: a call that has to wait takes a
//! callback.

pub mod model_tree;
pub mod node;
pub mod text;

mod attr;
mod changes;
mod draft;
mod looked_up;
mod names;
mod open;
mod open_file;
mod paths;
mod plans;
mod renaming;
mod temporary;
mod tensors_name;
mod text_file;
mod trees;
mod views;

use std::sync::mpsc::SyncSender;
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime};

use libmodelio::vocabulary::meta::{self, Meta};
use parking_lot::Mutex;

use crate::session::error::{CallError, CallResult};
use crate::session::learner::Learner;
use crate::session::model::{Model, OnlyOne};

pub use attr::{Attributes, Keep};
pub use changes::WantedChanges;
pub use open::{OpenRequest, Way};
pub use open_file::OpenFile;
pub use text_file::Announced;

use draft::DraftRoom;
use looked_up::{Bypassed, Fate, LookedUpNames};
use model_tree::{Kernel, ModelTree};
use names::HF_WEIGHTS;
use node::{File, MAX_MODELS, MapsTo, Node};
use text::MountStatus;
use trees::Trees;

/// Tells what `status.json` shows of the mount.
pub type StatusSource = Box<dyn Fn() -> MountStatus + Send + Sync>;

/// How the names of all attributes begin.
const USER: &str = "user.";
const VERSION: &str = "user.gradfs.version";
/// Version, epoch and what the publisher has said, as JSON. It is in no list, so that no copy gets it.
const ABOUT: &str = "user.gradfs.about";
const EPOCH: &str = "user.gradfs.epoch";
const DTYPE: &str = "user.gradfs.dtype";
const SHAPE: &str = "user.gradfs.shape";
const ERROR: &str = "user.gradfs.error";
/// Where to borrow the memory, and the key to it. It is in no list: copies of a file should not have it.
const MEMORY: &str = "user.gradfs.memory";

/// Where a learner's `tensors` leads.
pub const TENSORS_LINK: &str = "../../tensors";

/// The filesystem of one mount.
pub struct Fs {
    trees: Trees<ModelTree>,
    /// Told when a name is looked up that is no model's: one may have come.
    unknown: Mutex<Option<SyncSender<()>>>,
    /// Whether reads and mappings may bypass the daemon.
    pub passthrough: bool,
    access: Access,
    started: SystemTime,
    looked_up: LookedUpNames,
    bypassed: Bypassed,
    one_trace: OnlyOne,
    status: StatusSource,
    /// Values of settings that programs are still writing.
    drafts: DraftRoom,
    /// The socket's name at which the memory of versions is lent, once it is.
    lender: OnceLock<String>,
}

impl Fs {
    /// A filesystem with these models.
    ///
    /// # Panics
    /// With more than [`MAX_MODELS`].
    pub fn new(models: Vec<Arc<Model>>, passthrough: bool, access: Access, status: StatusSource) -> Fs {
        assert!(models.len() <= MAX_MODELS, "{} models", models.len());
        let fs = Fs {
            trees: Trees::default(),
            unknown: Mutex::default(),
            passthrough,
            access,
            started: SystemTime::now(),
            looked_up: LookedUpNames::default(),
            bypassed: Bypassed::default(),
            one_trace: OnlyOne::default(),
            status,
            drafts: DraftRoom::default(),
            lender: OnceLock::new(),
        };
        models.into_iter().for_each(|model| drop(fs.add(model)));
        fs
    }

    /// Shows one more model; `None` if the mount has shown as many as it can.
    pub fn add(&self, model: Arc<Model>) -> Option<Arc<ModelTree>> {
        self.add_at(model, None)
    }

    /// The same of a view, in its directory.
    pub fn add_at(&self, model: Arc<Model>, home: Option<u64>) -> Option<Arc<ModelTree>> {
        self.trees.add(Instant::now(), home.is_none(), |index| ModelTree::new(model, index, home))
    }

    /// A model goes on in another life, whose tree has the views of the one before.
    pub fn take_views(&self, tree: &ModelTree, before: &ModelTree) {
        plans::take_views(tree, before);
    }

    /// Whether one more model can be shown.
    pub fn has_room(&self) -> bool {
        self.trees.has_room(Instant::now())
    }

    /// The model is gone: its name leads nowhere from now on. False if that was so before.
    pub fn hide(&self, model: &Model) -> bool {
        self.trees.hide(|tree| std::ptr::eq(&*tree.model, model))
    }

    /// Takes out the models that are gone and whose files nobody uses. Who reads a version keeps its memory, and no
    /// more.
    pub fn take_unused(&self) -> Vec<Arc<ModelTree>> {
        self.trees.take_unused(Instant::now())
    }

    /// The kernel is about to be told of an inode, and will forget it.
    pub fn tells(&self, ino: u64) {
        if let Some(Node::Model(index, _)) = Node::from_ino(ino) {
            self.trees.tells(index);
        }
    }

    /// The kernel has forgotten an inode so many times.
    pub fn is_forgotten(&self, ino: u64, count: u64) {
        self.forget(ino, count);
        if let Some(Node::Model(index, _)) = Node::from_ino(ino) {
            self.trees.is_forgotten(index, count);
        }
    }

    /// Has `wake` told when a name is looked up in the root that is no model's.
    pub fn on_unknown(&self, wake: SyncSender<()>) {
        *self.unknown.lock() = Some(wake);
    }

    /// It is looked soon whether models have come or gone.
    pub fn has_models_looked_for(&self) {
        if let Some(wake) = &*self.unknown.lock() {
            let _ = wake.try_send(());
        }
    }

    /// The models, in the order of their indices, those too that are gone and still in use.
    pub fn trees(&self) -> Vec<Arc<ModelTree>> {
        self.trees.all(false)
    }

    /// The models whose names are in the root, in the order of their indices.
    pub fn shown(&self) -> Vec<Arc<ModelTree>> {
        self.trees.all(true)
    }

    /// Whether the name in `parent` that led to this inode leads to it for good.
    pub fn is_fixed(&self, parent: u64, ino: u64) -> bool {
        match (Node::from_ino(parent), Node::from_ino(ino)) {
            // Another plan makes other files.
            (Some(Node::Model(_, File::View(_))), _) | (_, Some(Node::Model(_, File::View(_)))) => false,
            (_, Some(Node::Model(_, File::Learner(_) | File::Publish(_) | File::Temporary(_))) | None) => {
                false
            }
            // A rename puts another inode in their place.
            (_, Some(Node::Model(_, file))) if file.is_named() => false,
            // The name leads to the inode that maps to the page cache.
            (_, Some(Node::Model(_, file))) if file.maps() == Some(MapsTo::Memory) => false,
            // Its changes are kept for a while only.
            (_, Some(Node::Model(_, file))) if file.is_changes() => false,
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
        self.trees.get(index).ok_or_else(CallError::not_found)
    }

    /// The model that an inode is of, and the learner whose file it is: what a line of the log names.
    pub fn whose(&self, ino: u64) -> (Option<Arc<Model>>, Option<String>) {
        let Some(Node::Model(index, file)) = Node::from_ino(ino) else { return (None, None) };
        let Ok(tree) = self.tree(index) else { return (None, None) };
        let model = &tree.model;
        let learner = match file {
            File::Gradients(_) | File::NamedGradients | File::Device => Some(model.own_name.clone()),
            file => file.learner().and_then(|id| model.learner(id).ok()).map(|learner| learner.name.clone()),
        };
        (Some(Arc::clone(model)), learner)
    }

    /// The facts about the mount in `status.json`, besides the model.
    fn mount_status(&self) -> MountStatus {
        (self.status)()
    }

    fn node(&self, ino: u64) -> CallResult<Node> {
        Node::from_ino(ino).ok_or_else(CallError::not_found)
    }

    /// `count` lookups of an inode are void: the kernel has forgotten them, or was not told of them.
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

    /// Drops names that lead to new inodes from the kernel's cache. The kernel then lets go of the old inodes
    /// once nobody has them open or mapped, and their memory can be used again.
    pub fn drop_moved_names(&self, tree: &ModelTree, kernel: &dyn Kernel, patient: bool) {
        let (index, model) = (tree.index, &tree.model);
        for name in ["weights", "weights.safetensors"] {
            kernel.forget_name(tree.home, name);
        }
        kernel.forget_name(Node::Model(index, File::HuggingFace).ino(), HF_WEIGHTS);
        for learner in model.learners() {
            let dir = Node::Model(index, File::Learner(learner.id)).ino();
            ["weights", "weights.safetensors"].iter().for_each(|name| kernel.forget_name(dir, name));
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

    /// The learner whose `tensors` a symbolic link is, and its model. It leads to [`TENSORS_LINK`].
    ///
    /// # Errors
    /// EINVAL for other files, ENOENT.
    pub fn link_of(&self, ino: u64) -> CallResult<(Arc<ModelTree>, Arc<Learner>)> {
        match self.node(ino)? {
            Node::Model(index, File::LearnerTensors(id)) => {
                let tree = self.tree(index)?;
                let learner = tree.model.learner(id)?;
                Ok((tree, learner))
            }
            _ => Err(CallError::new(libc::EINVAL, "no symbolic link")),
        }
    }

    /// Names of the extended attributes of an inode.
    ///
    /// # Errors
    /// ENOENT.
    pub fn xattrs(&self, ino: u64) -> CallResult<Vec<String>> {
        let Node::Model(index, file) = self.node(ino)? else { return Ok(Vec::new()) };
        let tree = self.tree(index)?;
        let own = [VERSION, EPOCH, DTYPE, SHAPE, ERROR].into_iter();
        let own = own.filter(|name| value(&tree, file, name).is_some()).map(str::to_owned);
        Ok(own.chain(said_of(&tree, file).iter().map(|(name, _)| format!("{USER}{name}"))).collect())
    }

    /// Sets one: says something of the version that an open `publish` makes.
    ///
    /// # Errors
    /// EPERM for other files, EINVAL for what a version cannot have, EOPNOTSUPP for other kinds of attributes, ENOENT.
    pub fn set_xattr(&self, ino: u64, name: &str, value: &[u8]) -> CallResult<()> {
        let name = name.strip_prefix(USER).ok_or_else(no_such_kind)?;
        let Node::Model(index, File::Publish(number)) = self.node(ino)? else {
            return Err(CallError::new(libc::EPERM, "attributes are set on an open publish alone"));
        };
        let tree = self.tree(index)?;
        let publication = tree.publications.get(number).ok_or_else(|| {
            let what = "attributes are set on the file descriptor of an open publish, not by its path";
            CallError::new(libc::EPERM, what)
        })?;
        // A copy of a mount's file brings these along. They are not the copy's.
        if name.starts_with(meta::OWN) {
            return Ok(());
        }
        let invalid = |_| CallError::new(libc::EINVAL, "attributes are texts in UTF-8");
        let text = std::str::from_utf8(value).map_err(invalid);
        let described = text.and_then(|text| publication.describe([(name, text)]));
        described.inspect_err(|error| tree.model.own_refusal.note(error, false))
    }

    /// The value of one.
    ///
    /// # Errors
    /// ENODATA when the inode does not have it, EOPNOTSUPP for kinds of attributes that no inode has, ENOENT.
    pub fn xattr(&self, ino: u64, name: &str) -> CallResult<String> {
        // Asked for by the kernel itself, often: answered before anything is looked up. Access control lists and
        // security labels are asked for by `ls -l`, of one file only where it hears that there are none at all.
        let short = name.strip_prefix(USER).ok_or_else(no_such_kind)?;
        let none = || CallError::new(libc::ENODATA, "no such attribute");
        let Node::Model(index, file) = self.node(ino)? else { return Err(none()) };
        let tree = self.tree(index)?;
        if !short.starts_with(meta::OWN) {
            return said_of(&tree, file).get(short).map(str::to_owned).ok_or_else(none);
        }
        if name == MEMORY && matches!(file, File::Weights(_) | File::RetainedWeights(_)) {
            let at = self.lender.get().zip(tree.key.as_ref());
            return at.map(|(socket, key)| format!("{socket} {key}")).ok_or_else(none);
        }
        value(&tree, file, name).ok_or_else(none)
    }

    /// The memory of versions is lent at the socket of this name.
    pub fn lends_at(&self, socket: String) {
        let _ = self.lender.set(socket);
    }

    /// The model that is shown and has this key, by which its memory is lent.
    pub fn with_key(&self, key: &str) -> Option<Arc<ModelTree>> {
        let shown = self.shown().into_iter().chain(self.trees().into_iter().filter(|tree| tree.is_view()));
        shown.into_iter().find(|tree| tree.key.as_deref() == Some(key))
    }
}

fn no_such_kind() -> CallError {
    CallError::new(libc::EOPNOTSUPP, "no such kind of attribute")
}

/// What the publisher of the file's version has said of it, or says of the one that it makes.
fn said_of(tree: &ModelTree, file: File) -> Meta {
    match file {
        File::Publish(number) => tree.publications.get(number).map(|publication| publication.meta()),
        file => file.version().map(|version| tree.model.job.meta(version)),
    }
    .unwrap_or_default()
}

/// The inode shows an older version than the caller must see: the kernel looks the name up again.
pub fn stale() -> CallError {
    CallError::new(libc::ESTALE, "a newer version is out")
}

fn value(tree: &ModelTree, file: File, name: &str) -> Option<String> {
    let tensors = tree.model.layout.tensors();
    let of_tensor = match file {
        File::Tensor(_, index) | File::RetainedTensor(_, index) => Some(tensors.get(index as usize)?),
        // A model of one tensor is that tensor.
        _ if tensors.len() == 1 => tensors.first(),
        _ => None,
    };
    let has_data = file.version().is_some()
        && !file.is_dir()
        && !file.is_changes()
        && !matches!(file, File::RetainedText(_) | File::RetainedMeta(_));
    let takes_data =
        matches!(file, File::Gradients(_) | File::LearnerGradients(..) | File::Device | File::Publish(_))
            || file.is_named();
    match name {
        VERSION if file.version().is_some() => file.version().map(|version| version.to_string()),
        VERSION if matches!(file, File::Device | File::VersionText) => Some(tree.shown_version().to_string()),
        ABOUT => file.version().map(|version| {
            let (epoch, meta) = (tree.model.job.generation(), tree.model.job.meta(version));
            format!("{{\"version\":{version},\"epoch\":{epoch},\"meta\":{meta}}}")
        }),
        EPOCH if file.version().is_some() => Some(tree.model.job.generation().to_string()),
        DTYPE if has_data || takes_data => Some(match of_tensor {
            Some(tensor) => tensor.dtype.name(),
            None if tensors.iter().all(|tensor| tensor.dtype == tensors[0].dtype) => tensors[0].dtype.name(),
            None => "mixed".to_owned(),
        }),
        SHAPE if has_data || takes_data => of_tensor.map(|tensor| {
            let sizes: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
            format!("[{}]", sizes.join(", "))
        }),
        ERROR => tree.refusal_of(file)?.text(),
        _ => None,
    }
}

/// The owner of the files in the mount, except of learners that others have made, and who else may use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// User and group.
    pub owner: Owner,
    /// Permission bits that are taken away from what each kind of file could have; `None` for the modes of a mount that
    /// only its owner writes to.
    pub umask: Option<u16>,
}

/// User and group of a file.
pub type Owner = (u32, u32);

/// The uses of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileUse {
    /// A directory in which nothing can be made.
    Dir,
    /// The directory in which learners are made and removed.
    Learners,
    /// Programs only read it.
    Read,
    /// Everybody may read it. A program that may write it changes the job for all.
    Shared,
    /// Contributions and publications.
    Contribute,
    /// Its owner reads it.
    Owner,
}

impl Access {
    /// The permission bits of a file.
    pub fn mode(&self, file: FileUse) -> u16 {
        let Some(umask) = self.umask else {
            return match file {
                FileUse::Dir | FileUse::Learners => 0o755,
                FileUse::Read => 0o444,
                FileUse::Shared => 0o644,
                FileUse::Contribute => 0o600,
                FileUse::Owner => 0o400,
            };
        };
        let bits = match file {
            FileUse::Dir => 0o755,
            // The mask decides who makes learners.
            FileUse::Learners => 0o777,
            FileUse::Read => 0o444,
            FileUse::Shared | FileUse::Contribute => 0o666,
            FileUse::Owner => 0o400,
        };
        let mode = bits & !umask;
        // As in /tmp: a user who makes learners removes only their own.
        if file == FileUse::Learners && mode & 0o022 != 0 { mode | 0o1000 } else { mode }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_opens_what_is_written_and_nothing_else() {
        let modes = |umask| {
            let access = Access { owner: (0, 0), umask };
            [
                FileUse::Dir,
                FileUse::Learners,
                FileUse::Read,
                FileUse::Shared,
                FileUse::Contribute,
                FileUse::Owner,
            ]
            .map(|file| access.mode(file))
        };
        assert_eq!(modes(None), [0o755, 0o755, 0o444, 0o644, 0o600, 0o400]);
        assert_eq!(modes(Some(0)), [0o755, 0o1777, 0o444, 0o666, 0o666, 0o400]);
        assert_eq!(modes(Some(0o027)), [0o750, 0o750, 0o440, 0o640, 0o640, 0o400]);
        assert_eq!(modes(Some(0o007)), [0o750, 0o1770, 0o440, 0o660, 0o660, 0o400]);
    }
}
