//! Sizes, modes and times.

use std::time::SystemTime;

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::members::LifeSign;
use libmodelio::vocabulary::shard_error::ShardError;

use super::model_tree::ModelTree;
use super::node::{File, FileKind, Node};
use super::text;
use super::text_file::setting_of;
use super::{FileUse, Fs, Owner, TENSORS_LINK};
use crate::session::error::{CallError, CallResult};
use crate::session::model::Model;

/// The attributes that stat(2) shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Inode number.
    pub ino: u64,
    /// Bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u16,
    /// Directory, link or regular file.
    pub kind: FileKind,
    /// Links: subdirectories and two for a directory.
    pub links: u32,
    /// Last change.
    pub modified: SystemTime,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Good read and write size.
    pub block_size: u32,
    /// How long the kernel may keep it.
    pub keep: Keep,
}

/// How long the kernel may keep attributes without asking again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// The attributes must not be cached: they change.
    No,
    /// A few milliseconds: they are asked for with every path, and soon show that the daemon is gone.
    Briefly,
    /// They never change.
    Forever,
}

impl Fs {
    /// A learner and the files in its directory belong to the user who made it.
    fn owner_of(&self, node: Node) -> Owner {
        let owner = |index, file: File| {
            let tree = self.tree(index).ok()?;
            if let Some(reader) = file.reader() {
                return tree.owner_of_reader(reader);
            }
            if let File::View(number) | File::ViewPlan(number) = file {
                return tree.views.owner(number).ok();
            }
            let (model, id) = (&tree.model, file.learner()?);
            let learner = model.learner(id).ok().map(|learner| learner.owner);
            learner.or_else(|| Some(model.dropped(id)?.owner)).flatten()
        };
        let owner = match node {
            Node::Model(index, file) => owner(index, file),
            _ => None,
        };
        owner.unwrap_or(self.access.owner)
    }

    /// Attributes of an inode.
    ///
    /// # Errors
    /// ENOENT for learners and versions that are gone.
    pub fn attributes(&self, ino: u64) -> CallResult<Attributes> {
        let node = self.node(ino)?;
        let (uid, gid) = self.owner_of(node);
        let mode = self.access.mode(use_of(node));
        let base = Attributes {
            ino,
            size: 0,
            mode,
            kind: node.kind(),
            links: if node.is_dir() { 2 } else { 1 },
            modified: self.started,
            uid,
            gid,
            block_size: 1 << 20,
            keep: Keep::No,
        };
        match node {
            Node::Root => {
                Ok(Attributes { links: 2 + self.shown().len() as u32, keep: Keep::Briefly, ..base })
            }
            Node::Readme => {
                let size = text::readme(&self.shown()).len() as u64;
                Ok(Attributes { size, keep: Keep::Briefly, ..base })
            }
            // How long it is is known when it is over.
            Node::Trace => Ok(base),
            Node::Model(index, file) => self.file_attributes(&*self.tree(index)?, file, base),
        }
    }

    fn file_attributes(&self, tree: &ModelTree, file: File, base: Attributes) -> CallResult<Attributes> {
        let model = &tree.model;
        let newest = || published(model, model.job.version()).unwrap_or(tree.started);
        let of = |version: Version| published(model, version).ok_or_else(CallError::not_found);
        let size = model.layout.size();
        if let File::LearnerGradients(id, _) | File::LearnerVersion(id) = file {
            model.learner(id)?;
        }
        if let Some(reader) = file.reader() {
            model.reader(reader)?;
        }
        let sized = |size| Attributes { size, modified: newest(), ..base };
        let of_text = |text: String| sized(text.len() as u64);
        let of_version = |size, version| -> CallResult<Attributes> {
            Ok(Attributes { size, modified: of(version)?, keep: Keep::Forever, ..base })
        };
        Ok(match file {
            File::Dir => Attributes { links: 9, keep: Keep::Briefly, ..sized(0) },
            File::Weights(v) | File::RetainedWeights(v) | File::LearnerWeights(_, v) => of_version(size, v)?,
            File::Safetensors(v) | File::RetainedSafetensors(v) | File::LearnerSafetensors(_, v) => {
                of_version(tree.safetensors_header_len + size, v)?
            }
            File::Tensors(v, directory) | File::RetainedTensors(v, directory) => {
                let links = 2 + tree.paths.get(directory)?.directories.len() as u32;
                Attributes { links, ..of_version(0, v)? }
            }
            File::Retained(v) => Attributes { links: 4, ..of_version(0, v)? },
            File::Tensor(v, i) | File::RetainedTensor(v, i) => {
                if i as usize >= model.layout.tensors().len() {
                    return Err(CallError::not_found());
                }
                of_version(tree.npy_size(i), v)?
            }
            File::RetainedText(v) => of_version(text_len(v), v)?,
            File::RetainedMeta(v) => of_version(text::meta(model, v).len() as u64, v)?,
            File::Sparse(v, _) | File::Patch(v, _) => of_version(tree.changes.len_of(file)?, v)?,
            // Opened for each step, and only the time changes.
            File::Gradients(_) | File::LearnerGradients(..) => {
                Attributes { keep: Keep::Briefly, ..sized(size) }
            }
            File::Device | File::Publish(_) => sized(size),
            // How long a file is that is written by names, its program decides.
            File::NamedGradients
            | File::LearnerNamedGradients(_)
            | File::NamedPublish
            | File::LearnerNamedPublish(_)
            | File::LearnerAllReduce(_)
            | File::HuggingFace => sized(0),
            File::RetainedHuggingFace(v) => of_version(0, v)?,
            File::Companion(i) => {
                let file = model.companions.get(i as usize).ok_or_else(CallError::not_found)?;
                Attributes { size: file.contents.len() as u64, keep: Keep::Forever, ..base }
            }
            File::Temporary(n) => {
                let file = tree.temporaries.get(n).ok_or_else(CallError::not_found)?;
                Attributes { size: file.size(), uid: file.owner.0, gid: file.owner.1, ..base }
            }
            File::LearnerTensors(id) => {
                model.learner(id)?;
                sized(TENSORS_LINK.len() as u64)
            }
            File::VersionText | File::LearnerVersion(_) => sized(text_len(model.job.offered_version())),
            File::DurableText => of_text(text::durable(model)),
            File::Status => of_text(text::status(tree, &self.mount_status())),
            File::Layout => Attributes { size: tree.layout.len() as u64, keep: Keep::Forever, ..base },
            File::Versions => Attributes { links: 2 + model.job.retained().len() as u32, ..sized(0) },
            File::Learners => Attributes { links: 2 + model.learners().len() as u32, ..base },
            File::Learner(id) => {
                let joined = match model.dropped(id) {
                    Some(dropped) => dropped.joined,
                    None => model.learner(id)?.joined,
                };
                Attributes { modified: joined, ..base }
            }
            File::Readers => Attributes { links: 2 + model.whole().job.readers().len() as u32, ..base },
            File::Reader(_) => base,
            File::Views => Attributes { links: 2 + tree.views.names().len() as u32, ..base },
            File::View(number) => {
                let dirs = if tree.views.tree(number)?.is_some() { 3 } else { 0 };
                Attributes { links: 2 + dirs, ..base }
            }
            File::Set => of_text(model.written_view().ok_or_else(CallError::not_found)?.set()),
            File::ViewPlan(number) => Attributes { size: tree.views.plan(number)?.len() as u64, ..base },
            File::ReadersApplied | File::ReaderStaged(_) | File::ReaderApplied(_) => {
                of_text(text::of_reader(model, file)?)
            }
            File::LearnerStatus(id) => of_text(text::learner_status(model, id)?),
            File::LearnerWeight(id) => of_text(text::weight(model, id)?),
            File::Error | File::LearnerError(_) => of_text(text::error(tree, file)?),
            // How long it is is known when it is taken.
            File::Snapshot | File::Controls => base,
            File::Control(_) | File::Settings => {
                let text = setting_of(file).and_then(|name| text::setting(model, name));
                Attributes { size: text.ok_or_else(CallError::not_found)?.len() as u64, ..base }
            }
        })
    }

    /// Whether an inode can be given this mode and owner. Both are fixed, so only what it has already changes nothing:
    /// `cp -p` and `chown -R` set that.
    ///
    /// # Errors
    /// EPERM for any other; ENOENT.
    pub fn check_change(
        &self,
        ino: u64,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> CallResult<()> {
        if mode.or(uid).or(gid).is_none() || matches!(self.node(ino)?, Node::Model(_, File::Temporary(_))) {
            return Ok(());
        }
        let has = self.attributes(ino)?;
        let is_same = mode.is_none_or(|mode| mode & 0o7777 == u32::from(has.mode))
            && uid.is_none_or(|uid| uid == has.uid)
            && gid.is_none_or(|gid| gid == has.gid);
        if is_same { Ok(()) } else { Err(CallError::new(libc::EPERM, "modes and owners are fixed")) }
    }

    /// Somebody sets the time of an inode. If it is a learner's directory, its program says that it works.
    ///
    /// # Errors
    /// ENOTCONN if that learner is no longer in the job; ENOENT.
    pub fn touch(&self, ino: u64) -> CallResult<()> {
        let Node::Model(model, File::Learner(id)) = self.node(ino)? else { return Ok(()) };
        let job = &self.tree(model)?.model.job;
        if !job.has_learner(id) {
            return Err(ShardError::UnknownLearner(id).into());
        }
        job.touch(id, LifeSign::Works);
        Ok(())
    }

    /// Whether an inode can be truncated to `size`. The size is fixed, and truncation to nothing begins a new
    /// write.
    ///
    /// # Errors
    /// EINVAL for another size, EACCES for a file that is only read.
    pub fn check_truncation(&self, ino: u64, size: u64) -> CallResult<()> {
        match self.node(ino)? {
            Node::Model(
                _,
                File::Control(_)
                | File::Settings
                | File::LearnerWeight(_)
                | File::ReaderApplied(_)
                | File::ViewPlan(_)
                | File::Set
                | File::Temporary(_),
            ) => Ok(()),
            Node::Model(_, file) if file.is_named() || matches!(file, File::LearnerAllReduce(_)) => Ok(()),
            Node::Model(
                _,
                File::Gradients(_)
                | File::LearnerGradients(..)
                | File::Device
                | File::Weights(_)
                | File::Publish(_),
            ) => {
                let whole = self.attributes(ino)?.size;
                if size == 0 || size == whole {
                    return Ok(());
                }
                let what = format!("the size is fixed at {whole} bytes by the model");
                Err(CallError::new(libc::EINVAL, what))
            }
            Node::Model(..) | Node::Trace => Err(CallError::new(libc::EACCES, "read-only")),
            _ => Err(CallError::new(libc::EACCES, "README is read-only")),
        }
    }

    /// Size of the filesystem for statfs(2): version buffers that may exist, in all models; the free ones
    /// are those that do not hold a version. Free files are those of learners that may still join.
    pub fn space(&self) -> Space {
        let mut space = Space { block_size: 4096, ..Space::default() };
        for tree in self.trees() {
            let model = &tree.model;
            let pages = model.layout.size().div_ceil(4096);
            let controls = model.job.controls();
            let (most, most_learners) = (u64::from(controls.max_versions), u64::from(controls.max_learners));
            let used = model.job.versions().len() as u64;
            space.blocks += pages * most;
            space.free += pages * most.saturating_sub(used);
            let learners = model.learners().len() as u64;
            let files =
                39 + model.companions.len() as u64 + (model.layout.tensors().len() + tree.paths.len()) as u64;
            space.free_files += most_learners.saturating_sub(learners) * FILES_OF_LEARNER;
            space.files += files + most_learners.max(learners) * FILES_OF_LEARNER;
        }
        space
    }
}

/// The numbers that statfs(2) shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// Bytes of a block.
    pub block_size: u32,
    /// Blocks in all.
    pub blocks: u64,
    /// Free ones.
    pub free: u64,
    /// Files: those there are, and those of learners that may still join.
    pub files: u64,
    /// The latter.
    pub free_files: u64,
}

/// A learner's directory and what is in it.
const FILES_OF_LEARNER: u64 = 12;

/// The use of an inode.
fn use_of(node: Node) -> FileUse {
    match node {
        Node::Model(_, File::Learners | File::Readers | File::Views) => FileUse::Learners,
        Node::Model(
            _,
            File::Weights(_)
            | File::Control(_)
            | File::Settings
            | File::LearnerWeight(_)
            | File::ViewPlan(_)
            | File::Set
            | File::ReaderApplied(_),
        ) => FileUse::Shared,
        Node::Model(
            _,
            File::Gradients(_)
            | File::LearnerGradients(..)
            | File::Device
            | File::Publish(_)
            | File::LearnerAllReduce(_)
            | File::Temporary(_),
        ) => FileUse::Contribute,
        Node::Model(_, file) if file.is_named() => FileUse::Contribute,
        Node::Model(_, File::Snapshot) | Node::Trace => FileUse::Owner,
        _ if node.is_dir() => FileUse::Dir,
        _ => FileUse::Read,
    }
}

fn published(model: &Model, version: Version) -> Option<SystemTime> {
    model.job.get(version).map(|view| view.published)
}

fn text_len(version: Version) -> u64 {
    version.to_string().len() as u64 + 1
}
