//! Which names there are: lookup, readdir, mkdir and rmdir.

use std::ffi::OsStr;
use std::sync::Arc;

use libmodelio::transport::LeaveReason;
use libmodelio::vocabulary::controls::SETTINGS;
use libmodelio::vocabulary::ids::{LearnerId, Version};

use super::access::Owner;
use super::beside::beside;
use super::errno::{FsError, FsResult};
use super::model::Model;
use super::node::{File, Node};
use super::paths::Child;
use super::{Attributes, Done, Fs};

/// A directory entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Inode number.
    pub ino: u64,
    /// Whether it is a directory.
    pub is_dir: bool,
    /// Name.
    pub name: String,
    /// Where the entry after it is.
    pub next: u64,
}

/// Names of a directory and where they lead.
type Names<'a> = Box<dyn Iterator<Item = (String, Node)> + 'a>;

/// Longest learner name.
const MAX_LEARNER_NAME: usize = 64;
/// Longest name of a file, as for most filesystems. The kernel would ask for up to 1,024 bytes.
const MAX_NAME: usize = 255;

impl Fs {
    /// The inode that `name` in `parent` leads to now. Inodes of versions are pinned: each success is to
    /// be followed by a [`Fs::forget`] in the end.
    ///
    /// # Errors
    /// ENOENT; ESTALE in `tensors/` of a version that has gone, so that the kernel looks `tensors` up and tries again.
    pub fn lookup(&self, parent: u64, name: &OsStr) -> FsResult<Attributes> {
        if name.len() > MAX_NAME {
            return Err(too_long(name, MAX_NAME));
        }
        let name = name.to_str().ok_or_else(FsError::not_found)?;
        let mut node = self.named(parent, name)?;
        let pinned = loop {
            if let Some(pinned) = self.pin(node)? {
                break pinned;
            }
            // The version has gone since. A name of the newest one leads to another one now.
            match self.named(parent, name)? {
                other if other != node => node = other,
                _ => return Err(gone(node)),
            }
        };
        let attributes = self.attributes(node.ino()).map_err(|_| {
            if pinned {
                self.forget(node.ino(), 1);
            }
            gone(node)
        })?;
        // Directories that can go while they are in use: of a version, or of a learner.
        if let Node::Model(index, file) = node
            && let Some(version) = file.version()
            && let Some(Node::Model(_, dir)) = Node::from_ino(parent)
            && !matches!(dir, File::Dir | File::Versions)
        {
            self.cached.looked_up(index, version, node.ino(), parent, name);
        }
        Ok(attributes)
    }

    /// What a name leads to at this moment.
    fn named(&self, parent: u64, name: &str) -> FsResult<Node> {
        match self.node(parent)? {
            Node::Root if name == "README" => Ok(Node::Readme),
            Node::Root => {
                let model = self.models.iter().find(|model| model.name == name);
                Ok(Node::Model(model.ok_or_else(FsError::not_found)?.index, File::Dir))
            }
            Node::Readme => Err(FsError::new(libc::ENOTDIR, "README is no directory")),
            Node::Model(index, dir) => {
                let model = self.model(index)?;
                Ok(Node::Model(index, lookup_in(model, dir, name).ok_or_else(FsError::not_found)?))
            }
        }
    }

    /// Pins the version that an inode shows, if it shows one; `None` if that has gone.
    fn pin(&self, node: Node) -> FsResult<Option<bool>> {
        let Node::Model(index, file) = node else { return Ok(Some(false)) };
        let Some(version) = file.pins() else { return Ok(Some(false)) };
        Ok(self.model(index)?.job.pin(version).then_some(true))
    }

    /// Names in a directory, `.` and `..` first, from the one at `from` on: to `each` until that is false.
    ///
    /// # Errors
    /// ENOTDIR, ENOENT.
    pub fn list(&self, ino: u64, from: u64, mut each: impl FnMut(Entry) -> bool) -> FsResult<()> {
        let node = self.node(ino)?;
        let skip = from as usize;
        let (parent, names): (Node, Names<'_>) = match node {
            Node::Root => {
                let models = self.models.iter().map(|m| (m.name.clone(), Node::Model(m.index, File::Dir)));
                let readme = std::iter::once(("README".to_owned(), Node::Readme));
                (node, Box::new(readme.chain(models).skip(skip.saturating_sub(2))))
            }
            Node::Readme => return Err(FsError::new(libc::ENOTDIR, "README is no directory")),
            Node::Model(index, dir) => {
                let model = self.model(index)?;
                let files = list_in(model, dir, skip.saturating_sub(2))?;
                (
                    parent_of(model, dir)?,
                    Box::new(files.map(move |(name, file)| (name, Node::Model(index, file)))),
                )
            }
        };
        let dots = [(".".to_owned(), node), ("..".to_owned(), parent)].into_iter().skip(skip);
        for (next, (name, node)) in (from + 1..).zip(dots.chain(names)) {
            if !each(Entry { ino: node.ino(), is_dir: node.is_dir(), name, next }) {
                break;
            }
        }
        Ok(())
    }

    /// A learner joins, for `owner`. The job is asked, so the answer may come later.
    ///
    /// # Errors
    /// EPERM outside of `learners/`, EEXIST, EINVAL or ENAMETOOLONG for an unfit name, EDQUOT.
    pub fn make_dir(self: &Arc<Self>, parent: u64, name: &OsStr, owner: Owner, done: Done<Attributes>) {
        let (model, name) = match self.joins_as(parent, name) {
            Ok((model, name)) => (Arc::clone(model), name.to_owned()),
            Err(error) => return done(Err(error)),
        };
        let this = Arc::clone(self);
        beside("gradfs-join", move || {
            let joined = model.join(&name, Some(owner));
            let dir = |id| this.attributes(Node::Model(model.index, File::Learner(id)).ino());
            done(joined.and_then(|learner| dir(learner.id)));
        });
    }

    fn joins_as<'a>(&self, parent: u64, name: &'a OsStr) -> FsResult<(&Arc<Model>, &'a str)> {
        let Node::Model(index, File::Learners) = self.node(parent)? else {
            return Err(FsError::new(libc::EPERM, "directories can only be made in learners/"));
        };
        Ok((self.model(index)?, learner_name(name)?))
    }

    /// A learner leaves. The job is asked, so the answer may come later.
    ///
    /// # Errors
    /// EPERM outside of `learners/`, ENOENT.
    pub fn remove_dir(self: &Arc<Self>, parent: u64, name: &OsStr, done: Done<()>) {
        let (model, learner) = match self.leaves_as(parent, name) {
            Ok((model, learner)) => (Arc::clone(model), learner),
            Err(error) => return done(Err(error)),
        };
        let this = Arc::clone(self);
        beside("gradfs-leave", move || {
            done(model.leave(learner, LeaveReason::Asked).map(|()| {
                // The directory goes with the answer, not whenever the chore comes round.
                this.learner_left(&model, learner, LeaveReason::Asked);
            }));
        });
    }

    fn leaves_as(&self, parent: u64, name: &OsStr) -> FsResult<(&Arc<Model>, LearnerId)> {
        let Node::Model(index, File::Learners) = self.node(parent)? else {
            return Err(FsError::new(libc::EPERM, "only directories in learners/ can be removed"));
        };
        let model = self.model(index)?;
        let learner =
            name.to_str().and_then(|name| model.learner_named(name)).ok_or_else(FsError::not_found)?;
        Ok((model, learner.id))
    }
}

fn too_long(name: &OsStr, most: usize) -> FsError {
    let start = String::from_utf8_lossy(&name.as_encoded_bytes()[..16]);
    let message = format!("name \"{start}…\" has {} bytes: {most} is the most", name.len());
    FsError::new(libc::ENAMETOOLONG, message)
}

fn learner_name(name: &OsStr) -> FsResult<&str> {
    if name.len() > MAX_LEARNER_NAME {
        return Err(too_long(name, MAX_LEARNER_NAME));
    }
    let fits = |name: &&str| {
        !name.starts_with('.') && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    name.to_str().filter(fits).ok_or_else(|| {
        FsError::new(
            libc::EINVAL,
            format!("learner name {name:?}: use up to {MAX_LEARNER_NAME} letters, digits, '-', '_' and '.', not '.' first"),
        )
    })
}

/// The version that `node` shows has gone.
fn gone(node: Node) -> FsError {
    match node {
        Node::Model(_, File::Tensors(..) | File::Tensor(..)) => FsError::look_again(),
        _ => FsError::not_found(),
    }
}

fn parent_of(model: &Model, dir: File) -> FsResult<Node> {
    Ok(Node::Model(
        model.index,
        match dir {
            File::Dir => return Ok(Node::Root),
            File::Retained(_) => File::Versions,
            File::RetainedTensors(version, 0) => File::Retained(version),
            File::RetainedTensors(version, d) => File::RetainedTensors(version, model.paths.get(d)?.parent),
            File::Tensors(version, d) if d != 0 => File::Tensors(version, model.paths.get(d)?.parent),
            File::Learner(_) => File::Learners,
            _ => File::Dir,
        },
    ))
}

/// The version directory of this name, if it is retained. Only the plain decimal number is a name.
fn retained(model: &Model, name: &str) -> Option<Version> {
    let version = Version(name.parse().ok()?);
    (version.to_string() == name && model.job.retained().contains(&version)).then_some(version)
}

fn lookup_in(model: &Arc<Model>, dir: File, name: &str) -> Option<File> {
    let newest = || model.job.version();
    match dir {
        File::Dir => Some(match name {
            "weights" => File::Weights(newest()),
            "weights.safetensors" => File::Safetensors(newest()),
            "tensors" => {
                model.tensors_name.keep(newest);
                File::Tensors(newest(), 0)
            }
            "gradients" => File::Gradients,
            "device" => File::Device,
            "version" => File::VersionText,
            "status.json" => File::Status,
            "error" => File::Error,
            "versions" => File::Versions,
            "learners" => File::Learners,
            "control" => File::Controls,
            _ => return None,
        }),
        File::Tensors(version, directory) => {
            Some(match model.paths.lookup(&model.layout, directory, name)? {
                Child::Directory(i) => File::Tensors(version, i),
                Child::Tensor(i) => File::Tensor(version, i),
            })
        }
        File::RetainedTensors(version, directory) => {
            Some(match model.paths.lookup(&model.layout, directory, name)? {
                Child::Directory(i) => File::RetainedTensors(version, i),
                Child::Tensor(i) => File::RetainedTensor(version, i),
            })
        }
        File::Versions => retained(model, name).map(File::Retained),
        File::Retained(version) => Some(match name {
            "weights" => File::RetainedWeights(version),
            "weights.safetensors" => File::RetainedSafetensors(version),
            "tensors" => File::RetainedTensors(version, 0),
            "version" => File::RetainedText(version),
            _ => return None,
        }),
        File::Learners => model.learner_named(name).map(|learner| File::Learner(learner.id)),
        File::Learner(id) => {
            model.learner(id).ok()?;
            Some(match name {
                "weights" => File::LearnerWeights(id, newest()),
                "gradients" => File::LearnerGradients(id),
                "version" => File::LearnerVersion(id),
                "status" => File::LearnerStatus(id),
                "error" => File::LearnerError(id),
                _ => return None,
            })
        }
        File::Controls => {
            SETTINGS.iter().position(|(known, _)| *known == name).map(|i| File::Control(i as u32))
        }
        _ => None,
    }
}

/// What is in a directory, without the first `skip` names.
fn list_in(model: &Model, dir: File, skip: usize) -> FsResult<Box<dyn Iterator<Item = (String, File)> + '_>> {
    let fixed = |names: &[(&str, File)]| names.iter().map(|(n, f)| ((*n).to_owned(), *f)).collect::<Vec<_>>();
    let newest = model.job.version();
    // There may be many tensors, and a listing comes back for more: those before are not even formatted.
    let few = match dir {
        File::Tensors(version, directory) => {
            let children = model.paths.list(&model.layout, directory, skip)?;
            return Ok(Box::new(children.map(move |(name, child)| match child {
                Child::Directory(i) => (name, File::Tensors(version, i)),
                Child::Tensor(i) => (name, File::Tensor(version, i)),
            })));
        }
        File::RetainedTensors(version, directory) => {
            let children = model.paths.list(&model.layout, directory, skip)?;
            return Ok(Box::new(children.map(move |(name, child)| match child {
                Child::Directory(i) => (name, File::RetainedTensors(version, i)),
                Child::Tensor(i) => (name, File::RetainedTensor(version, i)),
            })));
        }
        File::Dir => fixed(&[
            ("weights", File::Weights(newest)),
            ("weights.safetensors", File::Safetensors(newest)),
            ("tensors", File::Tensors(newest, 0)),
            ("gradients", File::Gradients),
            ("device", File::Device),
            ("version", File::VersionText),
            ("versions", File::Versions),
            ("learners", File::Learners),
            ("control", File::Controls),
            ("status.json", File::Status),
            ("error", File::Error),
        ]),
        File::Versions => {
            let versions = model.job.retained();
            versions.into_iter().map(|v| (v.to_string(), File::Retained(v))).collect()
        }
        File::Retained(version) => fixed(&[
            ("weights", File::RetainedWeights(version)),
            ("weights.safetensors", File::RetainedSafetensors(version)),
            ("tensors", File::RetainedTensors(version, 0)),
            ("version", File::RetainedText(version)),
        ]),
        File::Learners => {
            let learners = model.learners();
            learners.into_iter().map(|l| (l.name.clone(), File::Learner(l.id))).collect()
        }
        File::Learner(id) => {
            model.learner(id)?;
            fixed(&[
                ("weights", File::LearnerWeights(id, newest)),
                ("gradients", File::LearnerGradients(id)),
                ("version", File::LearnerVersion(id)),
                ("status", File::LearnerStatus(id)),
                ("error", File::LearnerError(id)),
            ])
        }
        File::Controls => {
            let names = SETTINGS.iter().enumerate();
            names.map(|(i, (name, _))| ((*name).to_owned(), File::Control(i as u32))).collect()
        }
        _ => return Err(FsError::new(libc::ENOTDIR, "no directory")),
    };
    Ok(Box::new(few.into_iter().skip(skip)))
}
