//! Files that programs make, rename and remove: those that become a contribution or new weights ([`super::temporary`]).
//!
//! A rename holds a lock on its directory. So it waits for no learner: it returns once the file was found to be good, and
//! its bytes are on their way. Whoever closes the file hears the rest, and the learner's `error` has it.

use std::ffi::OsStr;
use std::sync::Arc;

use libmodelio::formats::named::NamedStream;

use super::model_tree::ModelTree;
use super::node::{File, Node};
use super::temporary::{Lives, Temporaries, Temporary};
use super::{Fs, OpenFile, Owner};
use crate::own_thread::on_own_thread;
use crate::session::contribution::{Contribution, Ending};
use crate::session::error::{CallError, CallResult, Done};
use crate::session::learner::Learner;
use crate::session::model::Model;
use crate::session::publication::{Publication, kept};

/// Bytes of a file that are looked at, or written, at once.
const PIECE: usize = 1 << 20;

/// A file that is about to be committed by its rename.
pub struct Renaming {
    tree: Arc<ModelTree>,
    target: File,
    file: Arc<Temporary>,
}

/// The receiver of a renamed file's tensors.
enum Sink {
    Contribution(Arc<Contribution>),
    Publication(Arc<Publication>),
}

impl Fs {
    /// Makes a file, of user and group `owner`. It is gone with the program `maker`; if that is not known, when nobody has
    /// it open.
    ///
    /// # Errors
    /// EPERM for other names, ENOENT for a name in `control/`, EEXIST, ENOSPC.
    pub fn make_file(
        &self,
        parent: u64,
        name: &OsStr,
        owner: Owner,
        maker: Option<Lives>,
    ) -> CallResult<(u64, OpenFile)> {
        let (Node::Model(index, dir), Some(text)) = (self.node(parent)?, name.to_str()) else {
            return Err(self.refuse_file(parent, name));
        };
        if !Temporaries::may_be_called(dir, text) {
            return Err(self.refuse_file(parent, name));
        }
        let tree = self.tree(index)?;
        if let File::Learner(id) = dir {
            tree.model.learner(id)?;
        }
        let file = tree.temporaries.make(dir, text, (owner, maker), &tree.model.layout)?;
        let ino = Node::Model(index, File::Temporary(file.number)).ino();
        Ok((ino, OpenFile::Temporary { tree, file }))
    }

    /// Removes such a file.
    ///
    /// # Errors
    /// ENOENT; EPERM for others, which are there for good.
    pub fn remove_file(&self, parent: u64, name: &OsStr) -> CallResult<()> {
        let (tree, file) = self.temporary(parent, name)?;
        tree.temporaries.remove(file.number);
        file.discard();
        Ok(())
    }

    /// The file with this inode number, if it is such a file.
    pub fn temporary_of(&self, ino: u64) -> Option<Arc<Temporary>> {
        match Node::from_ino(ino) {
            Some(Node::Model(index, File::Temporary(number))) => {
                self.tree(index).ok()?.temporaries.get(number)
            }
            _ => None,
        }
    }

    fn temporary(&self, parent: u64, name: &OsStr) -> CallResult<(Arc<ModelTree>, Arc<Temporary>)> {
        let fixed = || CallError::new(libc::EPERM, "the files of a model are there for good");
        let (Node::Model(index, dir), Some(name)) = (self.node(parent)?, name.to_str()) else {
            return Err(fixed());
        };
        if !Temporaries::may_be_called(dir, name) {
            return Err(fixed());
        }
        let tree = self.tree(index)?;
        let file = tree.temporaries.named(dir, name).ok_or_else(CallError::not_found)?;
        Ok((tree, file))
    }

    /// Checks a rename, and changes nothing.
    ///
    /// # Errors
    /// EPERM unless a temporary file is renamed onto a file that takes tensors by name, in its own directory. EINVAL for a
    /// file that this cannot take; `error` has the reason, too.
    pub fn check_rename(
        &self,
        (parent, name): (u64, &OsStr),
        (new_parent, new_name): (u64, &OsStr),
    ) -> CallResult<Renaming> {
        let (tree, file) = self.temporary(parent, name)?;
        let target = match (file.parent, new_name.to_str()) {
            (File::Dir, Some("gradients.safetensors")) => Some(File::NamedGradients),
            (File::Dir, Some("publish.safetensors")) => Some(File::NamedPublish),
            (File::Learner(id), Some("gradients.safetensors")) => Some(File::LearnerNamedGradients(id)),
            (File::Learner(id), Some("publish.safetensors")) => Some(File::LearnerNamedPublish(id)),
            _ => None,
        };
        let what =
            "a temporary file becomes gradients.safetensors or publish.safetensors of its own directory";
        let target = target.filter(|_| parent == new_parent);
        let target = target.ok_or_else(|| CallError::new(libc::EPERM, what))?;
        let renaming = Renaming { tree, target, file };
        renaming.check().inspect_err(|error| renaming.note(error))?;
        Ok(renaming)
    }
}

impl Renaming {
    fn model(&self) -> &Arc<Model> {
        &self.tree.model
    }

    /// Keeps why it fails where its program looks.
    fn note(&self, error: &CallError) {
        if let Some(refusal) = self.tree.refusal_of(self.target) {
            refusal.note(error, false);
        }
    }

    fn check(&self) -> CallResult<()> {
        let mut stream = NamedStream::new(Arc::clone(&self.model().layout));
        let (mut at, size) = (0, self.file.size());
        while at < size && stream.end().is_none() {
            self.file.read(at, PIECE, |piece| stream.write(at, piece, |_, _| Ok::<_, CallError>(())))?;
            at += PIECE as u64;
        }
        stream.check_size(size)?;
        let is_published = matches!(self.target, File::NamedPublish | File::LearnerNamedPublish(_));
        match stream.take_metadata().filter(|_| is_published) {
            Some(metadata) => kept(self.model(), metadata).map(drop),
            None => Ok(()),
        }
    }

    /// The learner that the file becomes a contribution of. The mount's own one joins.
    fn learner(&self) -> CallResult<Option<Arc<Learner>>> {
        let id = match self.target {
            File::NamedGradients => {
                self.model().refuse_own_replica()?;
                return self.model().join_own().map(Some);
            }
            File::LearnerNamedGradients(id) => id,
            _ => return Ok(None),
        };
        self.model().learner(id).map(Some)
    }

    fn sink(&self, uses: impl FnOnce(&Arc<ModelTree>, &Arc<Learner>)) -> CallResult<Sink> {
        let model = self.model();
        Ok(match self.learner()? {
            None => Sink::Publication(Arc::new(
                Publication::open(model)?.by_names(self.tree.refusal_of(self.target)),
            )),
            Some(learner) => {
                uses(&self.tree, &learner);
                learner.make_staging_ready();
                Sink::Contribution(Arc::new(Contribution::open(model, learner, false, None).by_names()))
            }
        })
    }

    /// Takes the file's bytes, writes and commits them. `uses` hears of the learner that contributes. `done` hears once the
    /// bytes are on their way, or when that waits for another step; the file's closes hear the outcome.
    pub fn run(self, uses: impl FnOnce(&Arc<ModelTree>, &Arc<Learner>) + Send + 'static, done: Done<()>) {
        let before = match self.tree.temporaries.follows(self.target, &self.file) {
            Ok(before) => before,
            Err(error) => {
                self.note(&error);
                return done(Err(error));
            }
        };
        self.tree.temporaries.remove(self.file.number);
        let bytes = self.file.renamed();
        match before {
            None => self.begin(bytes, uses, done),
            Some(before) => {
                before.closed(Box::new(move |_| {
                    self.file.goes_on();
                    self.begin(bytes, uses, Box::new(drop));
                }));
                done(Ok(()));
            }
        }
    }

    /// Writes and commits what the file had, when no earlier one is under way.
    fn begin(
        self,
        bytes: Vec<u8>,
        uses: impl FnOnce(&Arc<ModelTree>, &Arc<Learner>) + Send + 'static,
        done: Done<()>,
    ) {
        on_own_thread("gradfs-rename", move || {
            let sink = match self.sink(uses) {
                Ok(sink) => sink,
                Err(error) => {
                    self.note(&error);
                    self.file.over(Err(error.clone()));
                    return done(Err(error));
                }
            };
            let Sink::Contribution(contribution) = &sink else { return self.commit(&sink, &bytes, done) };
            if contribution.can_write() {
                return self.commit(&sink, &bytes, done);
            }
            // The step before this one waits for other learners.
            done(Ok(()));
            let next = Arc::clone(contribution);
            next.name_step(Box::new(move |named| match named {
                Ok(()) => on_own_thread("gradfs-rename", move || self.commit(&sink, &bytes, Box::new(drop))),
                Err(error) => {
                    self.note(&error);
                    sink.closed();
                    self.file.over(Err(error));
                }
            }));
        });
    }

    fn commit(&self, sink: &Sink, bytes: &[u8], done: Done<()>) {
        let mut pieces = (0..).step_by(PIECE).zip(bytes.chunks(PIECE));
        let written = pieces.try_for_each(|(at, piece)| sink.write(at, piece));
        done(written.clone());
        let (file, end) = (Arc::clone(&self.file), sink.end());
        let over: Done<()> = Box::new(move |outcome| {
            end();
            file.over(written.and(outcome));
        });
        match sink {
            Sink::Contribution(contribution) => contribution.commit(Ending::Close, over),
            Sink::Publication(publication) => publication.commit(Ending::Close, over),
        }
    }
}

impl Sink {
    fn write(&self, at: u64, piece: &[u8]) -> CallResult<()> {
        match self {
            Sink::Contribution(contribution) => contribution.write_now(at, piece),
            Sink::Publication(publication) => publication.write(at, piece),
        }
    }

    fn closed(&self) {
        (self.end())();
    }

    /// Returns the end of its use.
    fn end(&self) -> impl FnOnce() + Send + 'static {
        let contribution = match self {
            Sink::Contribution(contribution) => Some(Arc::clone(contribution)),
            Sink::Publication(_) => None,
        };
        move || contribution.iter().for_each(|contribution| contribution.closed())
    }
}
