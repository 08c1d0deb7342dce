//! The names in the tree: lookup, readdir, mkdir and rmdir.

use std::ffi::OsStr;
use std::sync::Arc;

use libmodelio::vocabulary::controls::SETTINGS;
use libmodelio::vocabulary::ids::{LearnerId, Version};
use libmodelio::vocabulary::members::{LeaveReason, MAX_LEARNER_NAME, is_learner_name, wrong_reader_name};
use libmodelio::vocabulary::readers::{APPLIED_BY_ALL, is_reader_name};

use super::Owner;
use super::attr::Attributes;
use super::changes;
use super::model_tree::ModelTree;
use super::node::{File, MapsTo, Node};
use super::paths::Child;
use super::views;
use super::{Fs, stale};
use crate::own_thread::on_own_thread;
use crate::session::error::{CallError, CallResult, Done};
use crate::session::learner::wrong_learner_name;
use crate::session::model::Model;
use crate::session::trace::TRACE_FILE;

/// A directory entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Inode number.
    pub ino: u64,
    /// The file that it leads to.
    pub node: Node,
    /// Name.
    pub name: String,
    /// The offset of the next entry.
    pub next: u64,
}

/// Names of a directory and where they lead.
type Names<'a> = Box<dyn Iterator<Item = (String, Node)> + 'a>;

/// Longest name of a file, as for most filesystems. The kernel would ask for up to 1,024 bytes.
const MAX_NAME: usize = 255;

/// The weights in `hf/`, by the name that libraries look for.
pub(super) const HF_WEIGHTS: &str = "model.safetensors";

impl Fs {
    /// The inode that `name` in `parent` leads to now. The kernel knows one more name of its version then: each success
    /// is to be followed by a [`Fs::forget`] in the end.
    ///
    /// # Errors
    /// ENOENT; ESTALE in `tensors/` of a version that has gone, so that the kernel looks `tensors` up and tries again.
    pub fn lookup(&self, parent: u64, name: &OsStr) -> CallResult<Attributes> {
        self.lookup_by(parent, name, |node| self.note(node))
    }

    /// The same for names of a learner that was dropped, as one of its programs sees them: its directory is there with
    /// the reason in `error`, and ENOTCONN takes the place of all other files. `None` if it is no such name, or
    /// `has_used` says that the caller has not used the learner.
    pub fn lookup_dropped(
        &self,
        parent: u64,
        name: &OsStr,
        has_used: impl Fn(&Model, LearnerId) -> bool,
    ) -> Option<CallResult<Attributes>> {
        let Ok(Node::Model(index, dir)) = self.node(parent) else { return None };
        let tree = self.tree(index).ok()?;
        let (model, name) = (&tree.model, name.to_str()?);
        let (id, dropped) = match dir {
            File::Learners => model.dropped_named(name)?,
            File::Learner(id) => (id, model.dropped(id)?),
            _ => return None,
        };
        let file = match (dir, name) {
            (File::Learners, _) => File::Learner(id),
            (_, "error") => File::LearnerError(id),
            _ => return has_used(model, id).then(|| Err(dropped.error())),
        };
        has_used(model, id).then(|| self.attributes(Node::Model(index, file).ino()))
    }

    /// Like [`Self::lookup`], but `note` notes names of versions, as [`Self::note`] does. They may have gone by then.
    pub(crate) fn lookup_by(
        &self,
        parent: u64,
        name: &OsStr,
        note: impl Fn(Node) -> CallResult<Option<bool>>,
    ) -> CallResult<Attributes> {
        if name.len() > MAX_NAME {
            return Err(too_long(name, MAX_NAME));
        }
        let name = name.to_str().ok_or_else(CallError::not_found)?;
        let mut node = self.named(parent, name)?;
        let noted = loop {
            if let Some(noted) = note(node)? {
                break noted;
            }
            // The version has gone since. A name of the newest one leads to another one now.
            match self.named(parent, name)? {
                other if other != node => node = other,
                _ => return Err(gone(node)),
            }
        };
        let attributes = self.attributes(node.ino()).map_err(|_| {
            if noted {
                self.forget(node.ino(), 1);
            }
            gone(node)
        })?;
        // Directories of a version or of a learner can disappear while they are in use.
        if let Node::Model(index, file) = node
            && let Some(version) = file.version()
            && let Some(Node::Model(_, dir)) = Node::from_ino(parent)
            && !matches!(dir, File::Dir | File::View(_) | File::Versions)
        {
            self.looked_up.looked_up(index, version, node.ino(), parent, name);
        }
        Ok(attributes)
    }

    /// The node that a name leads to at this moment.
    fn named(&self, parent: u64, name: &str) -> CallResult<Node> {
        match self.node(parent)? {
            Node::Root if name == "README" => Ok(Node::Readme),
            Node::Root if name == TRACE_FILE => Ok(Node::Trace),
            Node::Root => {
                let tree = self.shown().into_iter().find(|tree| tree.model.name == name);
                let index = tree.map(|tree| tree.index).ok_or_else(|| {
                    // Nobody waits for the answer of others. A model that has come is there soon.
                    self.has_models_looked_for();
                    CallError::not_found()
                })?;
                Ok(Node::Model(index, File::Dir))
            }
            Node::Readme | Node::Trace => Err(CallError::new(libc::ENOTDIR, "no directory")),
            Node::Model(index, File::View(number)) if name != views::PLAN => {
                let view = self.tree(index)?.views.tree(number)?.ok_or_else(CallError::not_found)?;
                let file = Some(name).filter(|name| views::FILES.contains(name));
                let file = file.and_then(|name| lookup_in(&view, File::Dir, name));
                Ok(Node::Model(view.index, file.ok_or_else(CallError::not_found)?))
            }
            Node::Model(index, dir) => {
                let tree = self.tree(index)?;
                Ok(Node::Model(index, lookup_in(&tree, dir, name).ok_or_else(CallError::not_found)?))
            }
        }
    }

    /// Notes that the kernel knows a name of the version that an inode shows, if it shows one; `None` if that has gone.
    pub(crate) fn note(&self, node: Node) -> CallResult<Option<bool>> {
        let Node::Model(index, file) = node else { return Ok(Some(false)) };
        let Some(version) = file.names() else { return Ok(Some(false)) };
        let noted = self.tree(index)?.model.job.look_up(version);
        if noted && self.passthrough && file.is_flat() {
            self.bypassed.looked_up(node.ino());
        }
        Ok(noted.then_some(true))
    }

    /// Names in a directory, `.` and `..` first, from the one at `from` on: to `each` until that is false.
    ///
    /// # Errors
    /// ENOTDIR, ENOENT.
    pub fn list(&self, ino: u64, from: u64, mut each: impl FnMut(Entry) -> bool) -> CallResult<()> {
        let node = self.node(ino)?;
        let skip = from as usize;
        let tree = match node {
            Node::Model(index, _) => Some(self.tree(index)?),
            _ => None,
        };
        let (parent, names): (Node, Names<'_>) = match node {
            Node::Root => {
                let models = self.shown().into_iter();
                let models = models.map(|t| (t.model.name.clone(), Node::Model(t.index, File::Dir)));
                let readme = std::iter::once(("README".to_owned(), Node::Readme));
                (node, Box::new(readme.chain(models).skip(skip.saturating_sub(2))))
            }
            Node::Readme | Node::Trace => return Err(CallError::new(libc::ENOTDIR, "no directory")),
            Node::Model(index, File::View(number)) => {
                let views = &tree.as_deref().ok_or_else(CallError::not_found)?.views;
                let mut names = vec![(views::PLAN.to_owned(), Node::Model(index, File::ViewPlan(number)))];
                if let Some(view) = views.tree(number)? {
                    let files = fixed_files(&view.model, File::Dir).into_iter();
                    let files = files.filter(|(name, _)| views::FILES.contains(name));
                    names.extend(files.map(|(name, file)| (name.to_owned(), Node::Model(view.index, file))));
                }
                let names = names.into_iter().skip(skip.saturating_sub(2));
                (Node::Model(index, File::Views), Box::new(names))
            }
            Node::Model(index, dir) => {
                let tree = tree.as_deref().ok_or_else(CallError::not_found)?;
                let files = list_in(tree, dir, skip.saturating_sub(2))?;
                (
                    parent_of(tree, dir)?,
                    Box::new(files.map(move |(name, file)| (name, Node::Model(index, file)))),
                )
            }
        };
        let dots = [(".".to_owned(), node), ("..".to_owned(), parent)].into_iter().skip(skip);
        for (next, (name, node)) in (from + 1..).zip(dots.chain(names)) {
            if !each(Entry { ino: node.ino(), node, name, next }) {
                break;
            }
        }
        Ok(())
    }

    /// A learner joins, or a reader begins, for `owner`. The job is asked, so the answer may come later.
    ///
    /// # Errors
    /// EPERM outside of `learners/` and `readers/`, EEXIST, EINVAL or ENAMETOOLONG for an invalid name, EDQUOT.
    pub fn make_dir(self: &Arc<Self>, parent: u64, name: &OsStr, owner: Owner, done: Done<Attributes>) {
        if let Ok(Node::Model(index, File::Readers)) = self.node(parent) {
            return self.make_reader(index, name, owner, done);
        }
        if let Ok(Node::Model(index, File::Views)) = self.node(parent) {
            let made = self.tree(index).and_then(|tree| tree.views.begin(name, owner));
            let dir = |number| self.attributes(Node::Model(index, File::View(number)).ino());
            return done(made.and_then(dir));
        }
        let (tree, name) = match self.joins_as(parent, name) {
            Ok((tree, name)) => (tree, name.to_owned()),
            Err(error) => return done(Err(error)),
        };
        let this = Arc::clone(self);
        on_own_thread("gradfs-join", move || {
            let is_shared = ![0, this.access.owner.0].contains(&owner.0);
            let may_join = if is_shared { tree.model.check_share(owner.0) } else { Ok(()) };
            let joined = may_join.and_then(|()| tree.model.join(&name, Some(owner)));
            if let Err(error) = &joined
                && !tree.model.job.holds_versions()
            {
                tree.model.own_refusal.explain(error);
            }
            let dir = |id| this.attributes(Node::Model(tree.index, File::Learner(id)).ino());
            done(joined.and_then(|learner| dir(learner.id)));
        });
    }

    fn make_reader(self: &Arc<Self>, index: u8, name: &OsStr, owner: Owner, done: Done<Attributes>) {
        let tree = match self.tree(index) {
            Ok(tree) => tree,
            Err(error) => return done(Err(error)),
        };
        let named = reader_name(name).inspect_err(|error| tree.model.own_refusal.note(error, false));
        let name = match named {
            Ok(name) => name.to_owned(),
            Err(error) => return done(Err(error)),
        };
        let this = Arc::clone(self);
        on_own_thread("gradfs-reads", move || {
            let begun = tree.model.begin_reader(&name);
            let begun = begun.inspect_err(|error| tree.model.own_refusal.note(error, false));
            done(begun.and_then(|reader| {
                tree.owns_reader(owner, reader.reader);
                this.attributes(Node::Model(tree.index, File::Reader(reader.reader)).ino())
            }));
        });
    }

    fn joins_as<'a>(&self, parent: u64, name: &'a OsStr) -> CallResult<(Arc<ModelTree>, &'a str)> {
        let Node::Model(index, File::Learners) = self.node(parent)? else {
            return Err(CallError::new(
                libc::EPERM,
                "directories can only be made in learners/, readers/ and views/",
            ));
        };
        Ok((self.tree(index)?, learner_name(name)?))
    }

    /// Why no file can be made in `parent`. In `control/` its name is a setting's, and misspelt.
    pub fn refuse_file(&self, parent: u64, name: &OsStr) -> CallError {
        let name = String::from_utf8_lossy(name.as_encoded_bytes());
        match self.node(parent) {
            Ok(Node::Model(_, File::Controls)) => {
                let names = SETTINGS.iter().map(|(name, _)| *name);
                let meant = nearest(&name, names).map(|meant| format!(": did you mean {meant}?"));
                let what = format!("control/ has no setting {name:?}{}", meant.unwrap_or_default());
                CallError::new(libc::ENOENT, what)
            }
            _ => CallError::new(libc::EPERM, format!("no file can be made: {name:?}")),
        }
    }

    /// A learner leaves, or a reader ends. The job is asked, so the answer may come later.
    ///
    /// # Errors
    /// EPERM outside of `learners/` and `readers/`, ENOENT.
    pub fn remove_dir(&self, parent: u64, name: &OsStr, done: Done<()>) {
        if let Ok(Node::Model(index, File::Readers)) = self.node(parent) {
            let (tree, name) = (self.tree(index), name.to_string_lossy().into_owned());
            return on_own_thread("gradfs-reads", move || {
                done(tree.and_then(|tree| tree.model.end_reader(&name)));
            });
        }
        if let Ok(Node::Model(index, File::Views)) = self.node(parent) {
            return done(self.tree(index).and_then(|tree| tree.views.end(name)));
        }
        if let Ok(Node::Model(index, File::Learners)) = self.node(parent)
            && let (Ok(tree), Some(name)) = (self.tree(index), name.to_str())
            && tree.model.learner_named(name).is_none()
            && let Some((gone, _)) = tree.model.dropped_named(name)
        {
            // It is out of the job already, and its program knows that now.
            tree.model.forget_dropped(|id, _| id == gone);
            return done(Ok(()));
        }
        let (model, learner) = match self.leaves_as(parent, name) {
            Ok((model, learner)) => (model, learner),
            Err(error) => return done(Err(error)),
        };
        on_own_thread("gradfs-leave", move || {
            done(model.leave(learner, LeaveReason::Asked).map(|()| {
                // The directory disappears with this answer, without waiting for the job's.
                model.left(learner, LeaveReason::Asked);
            }));
        });
    }

    fn leaves_as(&self, parent: u64, name: &OsStr) -> CallResult<(Arc<Model>, LearnerId)> {
        let Node::Model(index, File::Learners) = self.node(parent)? else {
            return Err(CallError::new(
                libc::EPERM,
                "only directories in learners/, readers/ and views/ can be removed",
            ));
        };
        let model = Arc::clone(&self.tree(index)?.model);
        let learner =
            name.to_str().and_then(|name| model.learner_named(name)).ok_or_else(CallError::not_found)?;
        Ok((model, learner.id))
    }
}

/// The name that needs the fewest edits to become `name`. With more than a third of the letters changed, anything would
/// resemble some name.
fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let plain = name.replace('-', "_").to_lowercase();
    let edits = known.map(|known| (strsim::levenshtein(&plain, known), known)).min()?;
    (edits.0 <= plain.chars().count() / 3).then_some(edits.1)
}

fn too_long(name: &OsStr, most: usize) -> CallError {
    let start = String::from_utf8_lossy(&name.as_encoded_bytes()[..16]);
    let message = format!("name \"{start}…\" has {} bytes: {most} is the most", name.len());
    CallError::new(libc::ENAMETOOLONG, message)
}

fn learner_name(name: &OsStr) -> CallResult<&str> {
    if name.len() > MAX_LEARNER_NAME {
        return Err(too_long(name, MAX_LEARNER_NAME));
    }
    name.to_str().filter(|name| is_learner_name(name)).ok_or_else(|| wrong_learner_name(name))
}

fn reader_name(name: &OsStr) -> CallResult<&str> {
    if name.len() > MAX_LEARNER_NAME {
        return Err(too_long(name, MAX_LEARNER_NAME));
    }
    let wrong = || CallError::new(libc::EINVAL, wrong_reader_name(name));
    name.to_str().filter(|name| is_reader_name(name)).ok_or_else(wrong)
}

/// The version that `node` shows has gone.
fn gone(node: Node) -> CallError {
    match node {
        Node::Model(_, File::Tensors(..) | File::Tensor(..)) => stale(),
        _ => CallError::not_found(),
    }
}

fn parent_of(tree: &ModelTree, dir: File) -> CallResult<Node> {
    Ok(Node::Model(
        tree.index,
        match dir {
            File::Dir => return Ok(Node::Root),
            File::HuggingFace | File::Versions | File::Tensors(_, 0) => {
                return Node::from_ino(tree.home).ok_or_else(CallError::not_found);
            }
            File::Retained(_) => File::Versions,
            File::RetainedHuggingFace(version) | File::RetainedTensors(version, 0) => File::Retained(version),
            File::RetainedTensors(version, d) => File::RetainedTensors(version, tree.paths.get(d)?.parent),
            File::Tensors(version, d) if d != 0 => File::Tensors(version, tree.paths.get(d)?.parent),
            File::Learner(_) => File::Learners,
            File::Reader(_) => File::Readers,
            _ => File::Dir,
        },
    ))
}

/// The version directory of this name, if it is retained. Only the plain decimal number is a name.
fn retained(model: &Model, name: &str) -> Option<Version> {
    let version = Version(name.parse().ok()?);
    (version.to_string() == name && model.job.retained().contains(&version)).then_some(version)
}

/// The entries of a directory that always has the same names; empty for others.
fn fixed_files(model: &Model, dir: File) -> Vec<(&'static str, File)> {
    let newest = || model.job.version();
    let mut files = match dir {
        // The lookup of `publish` gives a number of its own.
        File::Dir => vec![
            ("weights", File::Weights(newest())),
            ("weights.safetensors", File::Safetensors(newest())),
            ("tensors", File::Tensors(newest(), 0)),
            ("gradients", File::Gradients(MapsTo::PageCache)),
            ("gradients.safetensors", File::NamedGradients),
            ("publish", File::Publish(0)),
            ("publish.safetensors", File::NamedPublish),
            ("hf", File::HuggingFace),
            ("device", File::Device),
            ("version", File::VersionText),
            ("durable_version", File::DurableText),
            ("versions", File::Versions),
            ("learners", File::Learners),
            ("readers", File::Readers),
            ("views", File::Views),
            (views::SET, File::Set),
            ("control", File::Controls),
            ("settings.json", File::Settings),
            ("status.json", File::Status),
            ("layout", File::Layout),
            ("error", File::Error),
            ("snapshot", File::Snapshot),
        ],
        File::Retained(version) => vec![
            ("weights", File::RetainedWeights(version)),
            ("weights.safetensors", File::RetainedSafetensors(version)),
            ("tensors", File::RetainedTensors(version, 0)),
            ("hf", File::RetainedHuggingFace(version)),
            ("version", File::RetainedText(version)),
            ("meta.json", File::RetainedMeta(version)),
        ],
        File::Learner(id) => vec![
            ("weights", File::LearnerWeights(id, newest())),
            ("weights.safetensors", File::LearnerSafetensors(id, newest())),
            ("tensors", File::LearnerTensors(id)),
            ("gradients", File::LearnerGradients(id, MapsTo::PageCache)),
            ("gradients.safetensors", File::LearnerNamedGradients(id)),
            ("publish.safetensors", File::LearnerNamedPublish(id)),
            ("all_reduce", File::LearnerAllReduce(id)),
            ("version", File::LearnerVersion(id)),
            ("weight", File::LearnerWeight(id)),
            ("status", File::LearnerStatus(id)),
            ("error", File::LearnerError(id)),
        ],
        File::Readers => vec![(APPLIED_BY_ALL, File::ReadersApplied)],
        File::Reader(id) => vec![("staged", File::ReaderStaged(id)), ("applied", File::ReaderApplied(id))],
        File::HuggingFace => vec![(HF_WEIGHTS, File::Safetensors(newest()))],
        File::RetainedHuggingFace(version) => vec![(HF_WEIGHTS, File::RetainedSafetensors(version))],
        File::Controls => {
            (0..).zip(SETTINGS.iter()).map(|(i, (name, _))| (*name, File::Control(i))).collect()
        }
        _ => Vec::new(),
    };
    files.retain(|(name, _)| dir != File::Dir || views::has(model, name));
    files
}

/// The files beside the weights in `hf/`.
fn companions(model: &Model, dir: File) -> impl Iterator<Item = (String, File)> {
    let has_some = matches!(dir, File::HuggingFace | File::RetainedHuggingFace(_));
    let names = model.companions.iter().filter(move |_| has_some).map(|file| file.name.clone());
    names.zip((0..).map(File::Companion))
}

fn companion(model: &Model, dir: File, name: &str) -> Option<File> {
    companions(model, dir).find(|(known, _)| known == name).map(|(_, file)| file)
}

/// A tensor or a directory of tensors, in a directory of the newest version or of a retained one.
fn tensor_file(version: Version, is_retained: bool, child: Child) -> File {
    match (child, is_retained) {
        (Child::Directory(i), false) => File::Tensors(version, i),
        (Child::Directory(i), true) => File::RetainedTensors(version, i),
        (Child::Tensor(i), false) => File::Tensor(version, i),
        (Child::Tensor(i), true) => File::RetainedTensor(version, i),
    }
}

fn lookup_in(tree: &ModelTree, dir: File, name: &str) -> Option<File> {
    let model = &tree.model;
    match dir {
        File::Tensors(version, directory) | File::RetainedTensors(version, directory) => {
            let child = tree.paths.lookup(&model.layout, directory, name)?;
            return Some(tensor_file(version, matches!(dir, File::RetainedTensors(..)), child));
        }
        File::Versions => return retained(model, name).map(File::Retained),
        File::Views => return tree.views.named(name).map(File::View),
        File::View(number) if name == views::PLAN => return Some(File::ViewPlan(number)),
        File::Learners => return model.learner_named(name).map(|learner| File::Learner(learner.id)),
        File::Learner(id) => drop(model.learner(id).ok()?),
        File::Retained(version) if name.starts_with("changes-") => return changes::named(version, name),
        File::Reader(id) => drop(model.reader(id).ok()?),
        File::Readers if name != APPLIED_BY_ALL => {
            return model.reader_named(name).map(|reader| File::Reader(reader.reader));
        }
        File::Dir if !views::has(model, name) => {
            return tree.temporaries.named(dir, name).map(|file| File::Temporary(file.number));
        }
        // Before its version is looked up, which may then be this one or a later one.
        File::Dir if name == "tensors" => tree.tensors_name.keep(|| model.job.version()),
        File::Dir if name == "publish" => return Some(File::Publish(tree.publications.number())),
        _ => {}
    }
    let fixed = fixed_files(model, dir).into_iter().find(|(known, _)| *known == name).map(|(_, file)| file);
    let temporary = || tree.temporaries.named(dir, name).map(|file| File::Temporary(file.number));
    fixed.or_else(|| companion(model, dir, name)).or_else(temporary)
}

/// The entries of a directory, without the first `skip` names.
fn list_in(
    tree: &ModelTree,
    dir: File,
    skip: usize,
) -> CallResult<Box<dyn Iterator<Item = (String, File)> + '_>> {
    let model = &tree.model;
    let few: Vec<_> = match dir {
        // There may be many tensors, and a listing is continued by later calls, so skipped names are not even
        // formatted.
        File::Tensors(version, directory) | File::RetainedTensors(version, directory) => {
            let is_retained = matches!(dir, File::RetainedTensors(..));
            let children = tree.paths.list(&model.layout, directory, skip)?;
            let file = move |(name, child)| (name, tensor_file(version, is_retained, child));
            return Ok(Box::new(children.map(file)));
        }
        File::Versions => {
            let versions = model.job.retained();
            versions.into_iter().map(|v| (v.to_string(), File::Retained(v))).collect()
        }
        File::Learners => {
            let learners = model.learners();
            learners.into_iter().map(|l| (l.name.clone(), File::Learner(l.id))).collect()
        }
        File::Views => {
            let views = tree.views.names().into_iter();
            views.map(|(name, number)| (name, File::View(number))).collect()
        }
        File::Readers => {
            let readers =
                model.whole().job.readers().into_iter().map(|of| (of.name, File::Reader(of.reader)));
            std::iter::once((APPLIED_BY_ALL.to_owned(), File::ReadersApplied)).chain(readers).collect()
        }
        _ if !dir.is_dir() => return Err(CallError::new(libc::ENOTDIR, "no directory")),
        _ => {
            if let File::Learner(id) = dir {
                model.learner(id)?;
            }
            if let File::Reader(id) = dir {
                model.reader(id)?;
            }
            let fixed = fixed_files(model, dir).into_iter().map(|(name, file)| (name.to_owned(), file));
            fixed.chain(companions(model, dir)).collect()
        }
    };
    Ok(Box::new(few.into_iter().skip(skip)))
}
