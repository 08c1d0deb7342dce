//! Opening files: pinning versions, waiting for one's own step, joining as the mount's learner.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use libmodelio::publisher::Publisher;
use libmodelio::transport::{Message, Region, Reply};
use libmodelio::vocabulary::controls::SETTINGS;
use libmodelio::vocabulary::ids::{LearnerId, Version};
use parking_lot::Mutex;
use ps_backend::core::LastCommit;

use super::beside::beside;
use super::doubts::Then;
use super::errno::{FsError, FsResult};
use super::handle::{ContributionHandle, Handle, PublishHandle, TextHandle, Users, VersionHandle};
use super::model::{Learner, Model};
use super::node::{File, Node};
use super::refusal::explained;
use super::waits::Asked;
use super::{Caller, Done, Fs, text};
use crate::fuse::process::Process;

/// An opened file, and how the kernel should treat it.
#[derive(Clone, Debug)]
pub struct Opened {
    /// Its number.
    pub fh: u64,
    /// The way of its bytes.
    pub way: Way,
}

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

/// The parts of open(2)'s flags that matter here.
#[derive(Clone, Copy, Debug)]
struct Flags {
    read: bool,
    write: bool,
    append: bool,
    nonblocking: bool,
}

impl Flags {
    fn new(flags: i32) -> Flags {
        let mode = flags & libc::O_ACCMODE;
        Flags {
            read: mode != libc::O_WRONLY,
            write: mode != libc::O_RDONLY,
            append: flags & libc::O_APPEND != 0,
            nonblocking: flags & libc::O_NONBLOCK != 0,
        }
    }
}

/// One open(2), perhaps put aside.
struct Request {
    model: Arc<Model>,
    node: Node,
    file: File,
    flags: Flags,
    caller: Caller,
}

impl Request {
    /// Whether it may be the first to map a learner's region.
    fn maps_first(&self) -> bool {
        let is_gradients = matches!(self.file, File::Gradients | File::LearnerGradients(_));
        let is_ready = |learner: Arc<Learner>| learner.mapped_ready.load(Ordering::Relaxed);
        is_gradients && self.flags.read && !self.contributes_as().is_some_and(is_ready)
    }

    /// Whether the mount's own learner has to join first.
    fn joins(&self) -> bool {
        let is_own = matches!(self.file, File::Gradients | File::Device);
        is_own && self.flags.write && self.model.own_learner().is_none()
    }

    /// Whose contribution it would write into.
    fn contributes_as(&self) -> Option<Arc<Learner>> {
        match self.file {
            File::Gradients | File::Device if self.flags.write => {
                self.model.learner_named(&self.model.own_name)
            }
            File::LearnerGradients(id) if self.flags.write => self.model.learner(id).ok(),
            _ => None,
        }
    }
}

impl Fs {
    /// Opens an inode with open(2)'s `flags`. Waits, through `done`, for the version that holds the
    /// learner's last step, at most `control/timeout`.
    pub fn open(self: &Arc<Self>, ino: u64, flags: i32, caller: Caller, done: Done<Opened>) {
        let flags = Flags::new(flags);
        let node = match self.node(ino) {
            Ok(node) => node,
            Err(error) => return done(Err(error)),
        };
        let Node::Model(index, file) = node else {
            return done(read_only(flags, "README").and_then(|()| self.open_text(node, None, caller)));
        };
        let model = match self.model(index) {
            Ok(model) => Arc::clone(model),
            Err(error) => return done(Err(error)),
        };
        // Those that show the newest version wait for the learner's own step.
        let waits_for = match file {
            File::LearnerWeights(learner, _) => Some(learner),
            File::Weights(_) | File::Safetensors(_) | File::Tensor(..) | File::Device => {
                model.learner_named(&model.own_name).map(|learner| learner.id)
            }
            _ => None,
        };
        let is_second_look =
            |learner, version| self.second_looks.is_expected(caller.tid, index, learner, version);
        let learner = waits_for
            .filter(|_| flags.read)
            .filter(|&learner| !file.version().is_some_and(|version| is_second_look(learner, version)));
        let last_commit = learner.map(|learner| (learner, model.job.last_commit(learner)));
        let done: Done<Opened> = match model.refusal_of(file) {
            Some(refusal) => Box::new(move |outcome| {
                if let Err(error) = &outcome {
                    refusal.note(error, false);
                }
                done(outcome);
            }),
            None => done,
        };
        // Whoever opens the newest version knows of it.
        let done = match file {
            File::Weights(_) | File::Safetensors(_) | File::LearnerWeights(..) | File::Device
                if flags.read =>
            {
                model.done_when_told(done)
            }
            _ => done,
        };
        let request = Request { model, node, file, flags, caller };
        match (last_commit, file.version()) {
            (Some((learner, LastCommit::In(version))), Some(named)) if named < version => {
                // The version with its step came out between the lookup of the name and this.
                let newest = request.model.job.version();
                self.second_looks.expect(caller.tid, index, learner, named, newest);
                done(Err(FsError::look_again()));
            }
            (None | Some((_, LastCommit::In(_))), _) => self.open_when_settled(request, done),
            (Some((_, LastCommit::Waits)), _) if flags.nonblocking => {
                done(Err(FsError::new(libc::EAGAIN, "the version with your last step is not out yet")));
            }
            (Some((learner, LastCommit::Waits)), _) => self.open_after_step(learner, request, done),
        }
    }

    fn open_after_step(self: &Arc<Self>, learner: LearnerId, request: Request, done: Done<Opened>) {
        let this = Arc::clone(self);
        let done = self.guard_open(request.caller, done);
        let channel = Arc::clone(&request.model.channel);
        channel.send(
            Message::AwaitStep { learner },
            request.model.timeout(),
            Box::new(move |result| match (result, request.file.version()) {
                (Ok(Reply::Version(newest)), Some(named)) => {
                    let (tid, model) = (request.caller.tid, request.model.index);
                    this.second_looks.expect(tid, model, learner, named, newest);
                    done(Err(FsError::look_again()));
                }
                (Ok(_), _) => this.open_when_settled(request, done),
                (Err(error), _) => done(Err(explained(&request.model, error))),
            }),
        );
    }

    /// Opens a file, but not to write into a contribution of which it is not yet known whether it counts: its
    /// program is ending just now.
    fn open_when_settled(self: &Arc<Self>, request: Request, done: Done<Opened>) {
        let Some(learner) = request.contributes_as().filter(|learner| learner.doubts.is_any()) else {
            return self.open_beside(request, done);
        };
        if request.flags.nonblocking {
            return done(Err(FsError::new(libc::EAGAIN, "a program that has ended is still being settled")));
        }
        let deadline = Instant::now() + request.model.timeout();
        let this = Arc::clone(self);
        let done = self.guard_open(request.caller, done);
        let open: Then = Box::new(move |outcome| match outcome {
            Ok(()) => this.open_beside(request, done),
            Err(error) => done(Err(error)),
        });
        if let Some(open) = learner.doubts.wait(None, deadline, open) {
            open(Ok(()));
        }
    }

    /// Opens a file; where that takes long, because a region's pages have to be taken first or the job has to be asked,
    /// on a thread of its own.
    fn open_beside(self: &Arc<Self>, request: Request, done: Done<Opened>) {
        if !request.maps_first() && !request.joins() {
            return done(self.open_file(&request));
        }
        let this = Arc::clone(self);
        beside("gradfs-open", move || done(this.open_file(&request)));
    }

    fn guard_open(self: &Arc<Self>, caller: Caller, done: Done<Opened>) -> Done<Opened> {
        let of_late = Arc::clone(self);
        self.waits.guard(caller, done, Asked::Answer, move |opened: Opened| of_late.release(opened.fh))
    }

    fn open_file(&self, request: &Request) -> FsResult<Opened> {
        let &Request { ref model, node, file, flags, caller } = request;
        match file {
            File::Weights(version) if flags.write => self.open_publish(model, node, version, flags, caller),
            File::Weights(version) | File::RetainedWeights(version) | File::LearnerWeights(_, version) => {
                read_only(flags, "this version of weights")?;
                self.open_version(model, version, |_| {})
            }
            File::Safetensors(version) | File::RetainedSafetensors(version) => {
                read_only(flags, "weights.safetensors")?;
                let header = model.safetensors_header(version);
                self.open_version(model, version, |handle| handle.header = header)
            }
            File::Tensor(version, index) | File::RetainedTensor(version, index) => {
                read_only(flags, "a tensor")?;
                let index = index as usize;
                let tensor = model.layout.tensors().get(index).ok_or_else(FsError::not_found)?;
                self.open_version(model, version, |handle| {
                    handle.header = Arc::clone(&model.npy_headers[index]);
                    handle.bytes = tensor.bytes.clone();
                })
            }
            File::Gradients => {
                writable_contribution(flags)?;
                self.open_contribution(model, &model.join_own()?, flags, caller, false)
            }
            File::LearnerGradients(id) => {
                writable_contribution(flags)?;
                self.open_contribution(model, &model.learner(id)?, flags, caller, false)
            }
            File::Device if flags.write => {
                no_append(flags)?;
                self.open_contribution(model, &model.join_own()?, flags, caller, true)
            }
            File::Device => {
                let handle = VersionHandle::pin_newest(model).ok_or_else(FsError::not_found)?;
                self.insert(Handle::Version(handle), Way::Direct)
            }
            File::Control(index) => {
                let (name, _) = SETTINGS.get(index as usize).ok_or_else(FsError::not_found)?;
                tracing::trace!(setting = name, "open");
                self.open_text(node, Some(model), caller)
            }
            File::VersionText
            | File::Status
            | File::RetainedText(_)
            | File::LearnerVersion(_)
            | File::LearnerStatus(_)
            | File::Error
            | File::LearnerError(_) => {
                read_only(flags, "this file")?;
                self.open_text(node, Some(model), caller)
            }
            _ => Err(FsError::new(libc::EISDIR, "is a directory")),
        }
    }

    fn insert(&self, handle: Handle, way: Way) -> FsResult<Opened> {
        let fh = self.handles.insert(handle);
        let fh = fh.ok_or_else(|| FsError::new(libc::ENFILE, "too many open files in this mount"))?;
        Ok(Opened { fh, way })
    }

    /// Opens a version to read; `shape` says which part of it, and behind which header.
    fn open_version(
        &self,
        model: &Arc<Model>,
        version: Version,
        shape: impl FnOnce(&mut VersionHandle),
    ) -> FsResult<Opened> {
        let mut handle = VersionHandle::pin(model, version).ok_or_else(FsError::look_again)?;
        shape(&mut handle);
        // Passthrough has no offset: only the flat file is the memory itself.
        let flat = handle.header.is_empty() && handle.bytes == (0..model.layout.size());
        let way =
            if flat && self.passthrough { Way::Bypass(handle.memory.region().clone()) } else { Way::Cached };
        self.insert(Handle::Version(handle), way)
    }

    fn open_contribution(
        &self,
        model: &Arc<Model>,
        learner: &Arc<Learner>,
        flags: Flags,
        caller: Caller,
        device: bool,
    ) -> FsResult<Opened> {
        let region = learner.contributor.mapped().clone();
        if !flags.read || device {
            model.make_staging_ready(learner);
        }
        if flags.read && !device && !learner.mapped_ready.swap(true, Ordering::Relaxed) {
            // It will be mapped: its pages are taken now, not one fault at a time in the program.
            region.memory().prefault().map_err(|error| FsError::new(libc::ENOMEM, error.to_string()))?;
        }
        let version = if device && flags.read {
            Some(VersionHandle::pin_newest(model).ok_or_else(FsError::not_found)?)
        } else {
            None
        };
        let mappable = flags.read && !device;
        let handle =
            ContributionHandle::new(Arc::clone(model), Arc::clone(learner), caller.tid, mappable, version);
        let way = match (device, self.passthrough) {
            (false, true) => Way::MapBypass(region),
            _ => Way::Direct,
        };
        let opened = self.insert(Handle::Contribution(handle), way)?;
        model.count_handle(learner, true);
        if let (Some(watcher), Some(process)) = (self.watcher.get(), Process::of_thread(caller.tid)) {
            model.watch(learner, process, watcher, self.watch_key());
        }
        if caller.tid == 0 {
            model.is_used_by_stranger(learner);
        }
        if caller.tid == 0 && !self.warned_of_strangers.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "a learner runs in a PID namespace that this daemon cannot see: if it is killed, what it has \
                 written by then counts. Start gradfs in a namespace that contains its learners"
            );
        }
        Ok(opened)
    }

    fn open_publish(
        &self,
        model: &Arc<Model>,
        node: Node,
        version: Version,
        flags: Flags,
        caller: Caller,
    ) -> FsResult<Opened> {
        no_append(flags)?;
        if flags.read {
            // A file that can be read and written can be mapped, and its mapping would be the version itself.
            return Err(FsError::new(libc::EACCES, "open weights write-only to publish new ones"));
        }
        model.job.may_assign()?;
        let publisher = Publisher::new(Arc::clone(&model.channel), model.timeout())?;
        let mut users = Users::default();
        let opener = users.note(caller.tid);
        let reads = VersionHandle::pin(model, version).ok_or_else(FsError::look_again)?;
        let region = reads.memory.region().clone();
        let handle = PublishHandle {
            model: Arc::clone(model),
            ino: node.ino(),
            opener,
            users: Mutex::new(users),
            publisher: Mutex::new(Some(Arc::new(publisher))),
            truncated: AtomicBool::new(false),
            reads,
        };
        // The same inode may be open for reading with passthrough; the kernel wants all opens of it to
        // name the same memory. Being write-only, this one cannot be mapped.
        let way = if self.passthrough { Way::MapBypass(region) } else { Way::Direct };
        self.insert(Handle::Publish(handle), way)
    }

    fn open_text(&self, node: Node, model: Option<&Arc<Model>>, caller: Caller) -> FsResult<Opened> {
        let handle = TextHandle {
            node,
            text: Mutex::new(Arc::from("")),
            seen: AtomicU64::new(u64::MAX),
            model: model.cloned(),
            opener: caller.tid,
            emptied: AtomicBool::new(false),
        };
        *handle.text.lock() = self.render(&handle)?.into();
        self.insert(Handle::Text(handle), Way::Direct)
    }

    /// What a text file says now.
    ///
    /// # Errors
    /// ENOENT for learners and versions that are gone.
    pub(super) fn render(&self, handle: &TextHandle) -> FsResult<String> {
        let Some(model) = &handle.model else { return Ok(text::readme(&self.models)) };
        let Node::Model(_, file) = handle.node else { return Err(FsError::not_found()) };
        Ok(match file {
            File::VersionText | File::LearnerVersion(_) => {
                let version = model.version_to_tell();
                handle.seen.store(version.0, Ordering::Relaxed);
                format!("{version}\n")
            }
            File::RetainedText(version) => format!("{version}\n"),
            File::Status => text::status(model, &self.mount_status()),
            File::LearnerStatus(id) => text::learner_status(model, id)?,
            File::Error | File::LearnerError(_) => text::error(model, file)?,
            File::Control(index) => {
                let (name, _) = SETTINGS.get(index as usize).ok_or_else(FsError::not_found)?;
                format!("{}\n", model.job.controls().get(name).unwrap_or_default())
            }
            _ => return Err(FsError::not_found()),
        })
    }
}

fn read_only(flags: Flags, what: &str) -> FsResult<()> {
    if flags.write { Err(FsError::new(libc::EACCES, format!("{what} is read-only"))) } else { Ok(()) }
}

fn no_append(flags: Flags) -> FsResult<()> {
    if flags.append {
        return Err(FsError::new(
            libc::EINVAL,
            "the file has a fixed size: write at offsets, do not append (> instead of >>)",
        ));
    }
    Ok(())
}

fn writable_contribution(flags: Flags) -> FsResult<()> {
    if !flags.write {
        return Err(FsError::new(libc::EACCES, "gradients is write-only (read weights instead)"));
    }
    no_append(flags)
}
