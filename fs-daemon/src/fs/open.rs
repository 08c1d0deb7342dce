//! Opening files: the modes that each file allows, and what an open has to wait for.

use std::sync::Arc;

use libmodelio::bytes::region::Region;
use libmodelio::vocabulary::ids::{LearnerId, Version};

use super::model_tree::{ModelTree, safetensors_header};
use super::node::{File, MapsTo, Node};
use super::open_file::{OpenFile, VersionFile};
use super::{Fs, stale};
use crate::session::all_reduce::AllReduceFile;
use crate::session::capture::Capture;
use crate::session::contribution::Contribution;
use crate::session::error::{CallError, CallResult, Done};
use crate::session::learner::Learner;
use crate::session::model::Model;
use crate::session::publication::Publication;
use crate::session::trace::Trace;
use libmodelio::reader::Reader;

/// The way of an open file's bytes.
#[derive(Clone, Debug)]
pub enum Way {
    /// Reads and mappings go straight to this memory.
    Bypass(Region),
    /// Mappings go straight to this memory; reads and writes come to the daemon, several at once.
    MapBypass(Region),
    /// Everything comes to the daemon, nothing is cached.
    Direct,
    /// Reads come to the daemon once and stay in the page cache: the file never changes.
    Cached,
}

/// One open(2), which may have to wait.
pub struct OpenRequest {
    node: Node,
    /// The file's model; `None` for the mount's own README.
    tree: Option<Arc<ModelTree>>,
    reads: bool,
    writes: bool,
    appends: bool,
    /// It asks for a mapping of the memory itself: O_DIRECT, and to read and write.
    pub maps_memory: bool,
    /// It must not wait.
    pub is_nonblocking: bool,
    /// Whether a process that uses the mount's own learner makes it.
    pub is_own: bool,
    /// Whether the thread that opens it may work for long, and wait for the job's answer.
    pub may_wait: bool,
}

impl OpenRequest {
    /// The inode.
    pub fn ino(&self) -> u64 {
        self.node.ino()
    }

    /// The model's tree, and the file to open in it.
    pub fn file(&self) -> Option<(&Arc<ModelTree>, File)> {
        match self.node {
            Node::Model(_, file) => self.tree.as_ref().map(|tree| (tree, file)),
            _ => None,
        }
    }

    /// The inode of the same file whose mappings are as this open asks, if its own inode's are not.
    pub fn other_inode(&self) -> Option<u64> {
        let Node::Model(index, file) = self.node else { return None };
        let maps = if self.maps_memory { MapsTo::Memory } else { MapsTo::PageCache };
        let other = file.mapping(maps);
        // A file that is only written cannot be mapped.
        (other != file && self.reads && self.writes).then(|| Node::Model(index, other).ino())
    }

    /// If the file shows the newest version: the learner that it shows that to, if it is one. The files of the model
    /// itself show the mount's own learner's only to its own processes: what one program has written keeps no other one
    /// from reading.
    pub fn shows_newest_to(&self) -> Option<Option<LearnerId>> {
        let (_, file) = self.file().filter(|_| self.reads)?;
        match file {
            File::LearnerWeights(learner, _) | File::LearnerSafetensors(learner, _) => Some(Some(learner)),
            _ if is_newest(file) => {
                let own = self.own_learner().filter(|_| self.is_own || self.writes);
                Some(own.map(|learner| learner.id))
            }
            _ => None,
        }
    }

    /// The learner whose weights this opens, only to read.
    pub fn attends(&self) -> Option<Arc<Learner>> {
        let (tree, file) = self.file().filter(|_| self.reads && !self.writes)?;
        match file {
            File::LearnerWeights(id, _) | File::LearnerSafetensors(id, _) => tree.model.learner(id).ok(),
            _ => None,
        }
    }

    /// The mount's own learner, if this reads a file in which its processes find their own step.
    pub fn own_learner(&self) -> Option<Arc<Learner>> {
        let (tree, file) = self.file().filter(|_| self.reads)?;
        is_newest(file).then(|| tree.model.learner_named(&tree.model.own_name)).flatten()
    }

    /// The version that this open would hold. None if it holds none.
    pub fn holds(&self) -> Option<Version> {
        let (tree, file) = self.file().filter(|_| self.reads)?;
        match file {
            File::Device => Some(tree.model.job.version()),
            File::RetainedText(_) | File::RetainedMeta(_) => None,
            file => file.version(),
        }
    }

    /// The learner whose contribution this open would write into.
    pub fn contributes_as(&self) -> Option<Arc<Learner>> {
        let (tree, file) = self.file().filter(|_| self.writes)?;
        match file {
            File::Gradients(_) | File::NamedGradients | File::Device => {
                tree.model.learner_named(&tree.model.own_name)
            }
            File::LearnerGradients(id, _) | File::LearnerNamedGradients(id) => tree.model.learner(id).ok(),
            _ => None,
        }
    }

    /// Whether the open is of a file that contributes.
    pub fn contributes(&self) -> bool {
        let file = self.file().filter(|_| self.writes).map(|(_, file)| file);
        matches!(
            file,
            Some(
                File::Gradients(_)
                    | File::NamedGradients
                    | File::Device
                    | File::LearnerGradients(..)
                    | File::LearnerNamedGradients(_)
            )
        )
    }

    /// Whether the open takes long: it takes a region's pages first, or asks the job.
    pub fn takes_long(&self) -> bool {
        let Some((tree, file)) = self.file() else { return false };
        if file == File::Snapshot || tree.changes.sums(file) {
            return true;
        }
        if matches!(file, File::Publish(_)) {
            return self.reads;
        }
        let is_own = matches!(file, File::Gradients(_) | File::NamedGradients | File::Device);
        let joins = is_own && self.writes && tree.model.own_learner().is_none();
        let is_ready = |learner: Arc<Learner>| learner.is_mapping_ready();
        joins || (file.maps().is_some() && self.reads && !self.contributes_as().is_some_and(is_ready))
    }

    /// Wraps `done`: the file's learner shows a failure, and a success announces a version.
    pub fn done_when_shown<T: Send + 'static>(&self, done: Done<T>) -> Done<T> {
        let Some((tree, file)) = self.file() else { return done };
        let done: Done<T> = match tree.refusal_of(file) {
            Some(refusal) => Box::new(move |outcome| {
                done(outcome.inspect_err(|error| refusal.note(error, false)));
            }),
            None => done,
        };
        match file {
            // A program that opens the newest version learns of it.
            File::Weights(_)
            | File::Safetensors(_)
            | File::LearnerWeights(..)
            | File::LearnerSafetensors(..)
            | File::Device
                if self.reads =>
            {
                tree.done_when_shown(done)
            }
            _ => done,
        }
    }

    /// Does what takes long about an open that contributes: the mount's own learner joins, and a mapping takes its
    /// pages.
    ///
    /// # Errors
    /// Those of [`Fs::open`].
    pub fn prepare(&self) -> CallResult<()> {
        let Some((tree, file)) = self.file().filter(|_| self.may_wait && self.contributes()) else {
            return Ok(());
        };
        self.contributor(&tree.model, file, Model::join_own)?;
        Ok(())
    }

    /// The learner that contributes through this file, ready for that. `own` finds that of the mount.
    fn contributor(
        &self,
        model: &Model,
        file: File,
        own: impl FnOnce(&Model) -> CallResult<Arc<Learner>>,
    ) -> CallResult<Arc<Learner>> {
        match file {
            File::Device => self.no_append()?,
            _ => self.writable_contribution(file)?,
        }
        let learner = match file {
            File::LearnerGradients(id, _) | File::LearnerNamedGradients(id) => model.learner(id)?,
            _ => {
                model.refuse_own_replica()?;
                own(model)?
            }
        };
        if file.maps().is_some() && self.reads {
            learner.make_mapping_ready().map_err(|error| CallError::new(libc::ENOMEM, error.to_string()))?;
        } else {
            learner.make_staging_ready();
        }
        Ok(learner)
    }

    fn read_only(&self, what: &str) -> CallResult<()> {
        match self.writes {
            true => Err(CallError::new(libc::EACCES, format!("{what} is read-only"))),
            false => Ok(()),
        }
    }

    fn no_append(&self) -> CallResult<()> {
        if self.appends {
            let what = "the file has a fixed size: write at offsets, do not append (> instead of >>)";
            return Err(CallError::new(libc::EINVAL, what));
        }
        Ok(())
    }

    fn writable_contribution(&self, file: File) -> CallResult<()> {
        if file.is_named() && self.reads {
            let what = "this file is write-only (read weights.safetensors instead)";
            return Err(CallError::new(libc::EACCES, what));
        }
        if !self.writes {
            let what = "gradients is write-only (read weights instead)";
            return Err(CallError::new(libc::EACCES, what));
        }
        self.no_append()
    }
}

impl Fs {
    /// A request to open an inode with open(2)'s `flags`.
    ///
    /// # Errors
    /// ENOENT.
    pub fn open_request(&self, ino: u64, flags: i32) -> CallResult<OpenRequest> {
        let node = self.node(ino)?;
        let tree = match node {
            Node::Model(index, _) => Some(self.tree(index)?),
            _ => None,
        };
        let mode = flags & libc::O_ACCMODE;
        Ok(OpenRequest {
            node,
            tree,
            reads: mode != libc::O_WRONLY,
            writes: mode != libc::O_RDONLY,
            appends: flags & libc::O_APPEND != 0,
            maps_memory: self.passthrough && mode == libc::O_RDWR && flags & libc::O_DIRECT != 0,
            is_nonblocking: flags & libc::O_NONBLOCK != 0,
            is_own: false,
            may_wait: true,
        })
    }

    /// Opens the file without waiting for anything, after [`OpenRequest::prepare`].
    ///
    /// # Errors
    /// EACCES and EINVAL where the file cannot be opened so, ESTALE where the version of a name is gone, ENOENT,
    /// ENOMEM.
    pub fn open(&self, request: &OpenRequest) -> CallResult<(OpenFile, Way)> {
        let Some((tree, file)) = request.file() else {
            if request.node == Node::Trace {
                request.read_only("the trace")?;
                let models = self.trees().iter().map(|tree| Arc::clone(&tree.model)).collect();
                return Ok((OpenFile::Trace(Trace::begin(models, &self.one_trace)?), Way::Direct));
            }
            request.read_only("README")?;
            return self.open_text_of(request);
        };
        let model = &tree.model;
        if tree.is_view()
            && !matches!(
                request.file().map(|(_, file)| file),
                Some(File::Publish(_) | File::Set | File::ReaderApplied(_))
            )
        {
            request.read_only("a view")?;
        }
        if request.shows_newest_to() == Some(None)
            && let Some(why) = model.job.refuses_readers()
        {
            let what =
                format!("no memory for another version, which waits until readers close theirs: {why}");
            return Err(CallError::new(libc::ENOMEM, what));
        }
        let all = 0..model.layout.size();
        match file {
            File::Weights(version) if request.writes => self.open_publication(request, tree, version),
            File::Weights(version) | File::RetainedWeights(version) | File::LearnerWeights(_, version) => {
                request.read_only("this version of weights")?;
                let reader = self.reader(model, file, version)?;
                // Passthrough has no offset: only the flat file is the memory itself.
                let bypasses = self.bypasses(request, tree, version);
                let way = if bypasses { Way::Bypass(reader.region().clone()) } else { Way::Cached };
                Ok((OpenFile::Version(VersionFile { reader, header: Arc::new([]), bytes: all }), way))
            }
            File::Safetensors(version)
            | File::RetainedSafetensors(version)
            | File::LearnerSafetensors(_, version) => {
                request.read_only("weights.safetensors")?;
                let reader = self.reader(model, file, version)?;
                let header = safetensors_header(model, version);
                Ok((OpenFile::Version(VersionFile { reader, header, bytes: all }), Way::Cached))
            }
            File::Tensor(version, index) | File::RetainedTensor(version, index) => {
                request.read_only("a tensor")?;
                let index = index as usize;
                let tensor = model.layout.tensors().get(index).ok_or_else(CallError::not_found)?;
                let reader = Reader::open(&model.job, version).ok_or_else(stale)?;
                let (header, bytes) = (Arc::clone(&tree.npy_headers[index]), tensor.bytes.clone());
                Ok((OpenFile::Version(VersionFile { reader, header, bytes }), Way::Cached))
            }
            File::Sparse(..) | File::Patch(..) => {
                request.read_only("a file of changes")?;
                Ok((OpenFile::Changes(tree.changes.open(model, file)?), Way::Direct))
            }
            File::Gradients(_)
            | File::LearnerGradients(..)
            | File::NamedGradients
            | File::LearnerNamedGradients(_) => open_gradients(request, tree, file),
            File::NamedPublish | File::LearnerNamedPublish(_) => {
                request.writable_contribution(file)?;
                let (tree, publication) =
                    (Arc::clone(tree), Publication::open(model)?.by_names(tree.refusal_of(file)));
                let publication = Arc::new(publication);
                Ok((OpenFile::Publication { tree, publication, _keeps: Box::new(()) }, Way::Direct))
            }
            File::LearnerAllReduce(id) => {
                request.no_append()?;
                let learner = model.learner(id)?;
                Ok((OpenFile::AllReduce(AllReduceFile::new(Arc::clone(model), learner)), Way::Direct))
            }
            File::Temporary(number) => {
                let file = tree.temporaries.get(number).ok_or_else(CallError::not_found)?;
                Ok((OpenFile::Temporary { tree: Arc::clone(tree), file }, Way::Direct))
            }
            File::Companion(index) => {
                request.read_only("a file that came with the model")?;
                let (tree, index) = (Arc::clone(tree), index as usize);
                model.companions.get(index).ok_or_else(CallError::not_found)?;
                Ok((OpenFile::Companion { tree, index }, Way::Cached))
            }
            File::Publish(number) => open_publish(request, tree, number),
            File::Device if request.writes => open_device(request, tree),
            File::Device => {
                let reader = Reader::newest(&model.job).ok_or_else(CallError::not_found)?;
                let file = VersionFile { reader, header: Arc::new([]), bytes: all };
                Ok((OpenFile::Version(file), Way::Direct))
            }
            File::Control(_)
            | File::Settings
            | File::LearnerWeight(_)
            | File::ReaderApplied(_)
            | File::ViewPlan(_)
            | File::Set => self.open_text_of(request),
            File::VersionText
            | File::DurableText
            | File::Status
            | File::Layout
            | File::RetainedText(_)
            | File::RetainedMeta(_)
            | File::LearnerVersion(_)
            | File::LearnerStatus(_)
            | File::ReadersApplied
            | File::ReaderStaged(_)
            | File::Error
            | File::LearnerError(_) => {
                request.read_only("this file")?;
                self.open_text_of(request)
            }
            File::Snapshot => {
                request.read_only("snapshot")?;
                Ok((OpenFile::Snapshot(Capture::open(model)?), Way::Direct))
            }
            _ => Err(CallError::new(libc::EISDIR, "is a directory")),
        }
    }

    /// A reader of `version` for this file. A learner's own shows its replica, if it has one.
    fn reader(&self, model: &Arc<Model>, file: File, version: Version) -> CallResult<Reader> {
        let reader = Reader::open(&model.job, version).ok_or_else(stale)?;
        let replica = match file {
            File::LearnerWeights(id, _) | File::LearnerSafetensors(id, _) => {
                model.learner(id)?.replica(version)
            }
            _ => None,
        };
        Ok(match replica {
            Some(replica) => reader.showing(replica),
            None => reader,
        })
    }

    /// Whether opens of this inode of `version`, which the caller has open, bypass the daemon.
    fn bypasses(&self, request: &OpenRequest, tree: &ModelTree, version: Version) -> bool {
        self.passthrough && self.bypassed.opened(request.ino(), || tree.model.job.map_version(version))
    }

    fn open_text_of(&self, request: &OpenRequest) -> CallResult<(OpenFile, Way)> {
        let text = self.open_text(request.node, request.tree.as_ref(), request.writes)?;
        Ok((OpenFile::Text(text), Way::Direct))
    }

    fn open_publication(
        &self,
        request: &OpenRequest,
        tree: &Arc<ModelTree>,
        version: Version,
    ) -> CallResult<(OpenFile, Way)> {
        request.no_append()?;
        if request.reads {
            // A file that can be read and written can be mapped, and its mapping would be the version itself.
            return Err(CallError::new(libc::EACCES, "open weights write-only to publish new ones"));
        }
        let publication = Arc::new(Publication::open(&tree.model)?);
        let shown = Reader::open(&tree.model.job, version).ok_or_else(stale)?;
        // The same inode may be open for reading with passthrough; the kernel wants all opens of it to
        // name the same memory. Being write-only, this one cannot be mapped.
        let bypasses = self.bypasses(request, tree, version);
        let way = if bypasses { Way::MapBypass(shown.region().clone()) } else { Way::Direct };
        let tree = Arc::clone(tree);
        Ok((OpenFile::Publication { tree, publication, _keeps: Box::new(shown) }, way))
    }
}

/// The mount's own learner. If it has left since [`OpenRequest::prepare`], the kernel looks the name up again.
fn own(model: &Model) -> CallResult<Arc<Learner>> {
    model.own_learner().ok_or_else(stale)
}

/// Whether the file is the model's, and shows its newest version.
fn is_newest(file: File) -> bool {
    matches!(file, File::Weights(_) | File::Safetensors(_) | File::Tensor(..) | File::Device)
}

fn open_gradients(request: &OpenRequest, tree: &Arc<ModelTree>, file: File) -> CallResult<(OpenFile, Way)> {
    let learner = request.contributor(&tree.model, file, own)?;
    let way = match file.maps() {
        Some(MapsTo::Memory) => Way::MapBypass(learner.mapping().clone()),
        _ => Way::Direct,
    };
    let contribution = Contribution::open(&tree.model, learner, request.reads, None);
    let contribution = Arc::new(if file.is_named() { contribution.by_names() } else { contribution });
    Ok((OpenFile::Contribution { tree: Arc::clone(tree), contribution }, way))
}

fn open_publish(request: &OpenRequest, tree: &Arc<ModelTree>, number: u64) -> CallResult<(OpenFile, Way)> {
    if !request.writes {
        return Err(CallError::new(libc::EACCES, "publish is write-only (read weights instead)"));
    }
    request.no_append()?;
    let what = "this publication is open already: open publish by its path for another one";
    let inode = tree.publications.open(number).ok_or_else(|| CallError::new(libc::EBUSY, what))?;
    let publication = Arc::new(match request.reads {
        true => Publication::open_mapped(&tree.model)?,
        false => Publication::open(&tree.model)?,
    });
    let way = match publication.mapped().filter(|_| request.maps_memory) {
        Some(memory) => Way::MapBypass(memory.region().clone()),
        None => Way::Direct,
    };
    inode.is_of(&publication);
    let tree = Arc::clone(tree);
    Ok((OpenFile::Publication { tree, publication, _keeps: Box::new(inode) }, way))
}

fn open_device(request: &OpenRequest, tree: &Arc<ModelTree>) -> CallResult<(OpenFile, Way)> {
    let learner = request.contributor(&tree.model, File::Device, own)?;
    let reader = match request.reads {
        true => Some(Reader::newest(&tree.model.job).ok_or_else(CallError::not_found)?),
        false => None,
    };
    let contribution = Arc::new(Contribution::open(&tree.model, learner, false, reader));
    Ok((OpenFile::Contribution { tree: Arc::clone(tree), contribution }, Way::Direct))
}
