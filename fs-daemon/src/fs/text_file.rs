//! Small text files, which show the present state at each read. `control/*` can also be written: one value a
//! file, set for the whole job. So can a learner's `weight`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use libmodelio::client::SetError;
use libmodelio::vocabulary::controls::{LONGEST, SETTINGS};
use libmodelio::vocabulary::ids::{LearnerId, Version};
use libmodelio::vocabulary::weight::NoWeight;
use parking_lot::Mutex;

use super::filesystem::Fs;
use super::model_tree::ModelTree;
use super::node::{File, Node};
use super::text;
use crate::session::error::{CallError, CallResult, Done};

/// Longest value of a setting.
const MAX_SETTING: usize = LONGEST;

/// An open text file.
pub struct TextFile {
    /// The file's node.
    pub node: Node,
    /// The file's model; `None` for the mount's own README.
    tree: Option<Arc<ModelTree>>,
    /// Its contents as of the last read from the start.
    text: Mutex<Arc<str>>,
    /// The version that was last read, for poll.
    seen: AtomicU64,
    /// The file was emptied, and nothing was written since.
    emptied: AtomicBool,
}

impl Fs {
    /// Opens one.
    ///
    /// # Errors
    /// ENOENT for learners and versions that are gone.
    pub(super) fn open_text(&self, node: Node, tree: Option<&Arc<ModelTree>>) -> CallResult<TextFile> {
        let file = TextFile {
            node,
            tree: tree.cloned(),
            text: Mutex::new(Arc::from("")),
            seen: AtomicU64::new(u64::MAX),
            emptied: AtomicBool::new(false),
        };
        self.read_text(&file, 0)?;
        Ok(file)
    }

    /// The file's contents. As in sysfs, a read from the start shows the present state, and later reads show
    /// the rest of that.
    ///
    /// # Errors
    /// Fails as [`Self::open_text`] does.
    pub(super) fn read_text(&self, file: &TextFile, offset: u64) -> CallResult<Arc<str>> {
        if offset == 0 {
            *file.text.lock() = self.render(file)?.into();
        }
        Ok(Arc::clone(&file.text.lock()))
    }

    fn render(&self, handle: &TextFile) -> CallResult<String> {
        let Some(tree) = &handle.tree else { return Ok(text::readme(self.trees())) };
        let Node::Model(_, file) = handle.node else { return Err(CallError::not_found()) };
        Ok(match file {
            File::VersionText | File::LearnerVersion(_) => {
                let version = tree.shown_version();
                handle.seen.store(version.0, Ordering::Relaxed);
                format!("{version}\n")
            }
            File::RetainedText(version) => format!("{version}\n"),
            File::Status => text::status(tree, &self.mount_status()),
            File::Layout => return Ok(tree.layout.to_string()),
            File::LearnerWeight(id) => text::weight(&tree.model, id)?,
            File::LearnerStatus(id) => text::learner_status(&tree.model, id)?,
            File::Error | File::LearnerError(_) => text::error(tree, file)?,
            File::Control(index) => text::setting(&tree.model, index)?,
            _ => return Err(CallError::not_found()),
        })
    }
}

impl TextFile {
    /// The model whose versions the file announces, if it announces any.
    pub fn shows_versions_of(&self) -> Option<&Arc<ModelTree>> {
        match self.node {
            Node::Model(_, File::VersionText | File::LearnerVersion(_)) => self.tree.as_ref(),
            _ => None,
        }
    }

    /// Whether a read would show another version than the last one did.
    pub fn has_news(&self) -> bool {
        let seen = Version(self.seen.load(Ordering::Relaxed));
        self.shows_versions_of().is_none_or(|tree| tree.shown_version() != seen)
    }

    /// The file was emptied: the setting will have no value, unless one is written.
    pub(super) fn empty(&self) {
        self.emptied.store(true, Ordering::Relaxed);
    }

    /// Whether closing it makes the setting empty.
    pub fn is_emptied(&self) -> bool {
        self.emptied.load(Ordering::Relaxed)
    }

    /// Writes a setting. Answered when the job has answered.
    ///
    /// # Errors
    /// EINVAL for a value that does not fit or is not written at once, EBADF for a file that is no setting; ETIMEDOUT
    /// and EIO when nobody said whether it was changed.
    pub fn set(&self, offset: u64, data: &[u8], done: Done<()>) {
        // Whatever the result, closing does not empty the setting any more.
        self.emptied.store(false, Ordering::Relaxed);
        if let (Node::Model(_, File::LearnerWeight(id)), Some(tree)) = (self.node, &self.tree) {
            return done(set_weight(tree, id, offset, data));
        }
        let (tree, name, value) = match self.setting(offset, data) {
            Ok(parts) => parts,
            Err(error) => return done(Err(error)),
        };
        let (of_done, written) = (tree.model.name.clone(), value.trim().to_owned());
        let answer = move |outcome| match outcome {
            Ok(()) => {
                tracing::info!(model = of_done, setting = name, value = written, "set");
                done(Ok(()));
            }
            Err(SetError::Refused(error)) => done(Err(invalid_value(name, &error.without_name()))),
            Err(SetError::Unanswered(error)) => done(Err(error.into())),
        };
        tree.model.job.set_control(name, value, tree.model.prompt(), Box::new(answer));
    }

    /// The setting to write, its model, and the new text.
    fn setting<'a>(
        &self,
        offset: u64,
        data: &'a [u8],
    ) -> CallResult<(&Arc<ModelTree>, &'static str, &'a str)> {
        let (Node::Model(_, File::Control(index)), Some(tree)) = (self.node, &self.tree) else {
            return Err(CallError::new(libc::EBADF, "not open for writing"));
        };
        let (name, _) = SETTINGS.get(index as usize).ok_or_else(CallError::not_found)?;
        if offset != 0 || data.len() > MAX_SETTING {
            return Err(invalid_value(name, "write the whole value at once"));
        }
        let value = std::str::from_utf8(data).map_err(|_| invalid_value(name, "not text"))?;
        Ok((tree, name, value))
    }
}

fn set_weight(tree: &ModelTree, id: LearnerId, offset: u64, data: &[u8]) -> CallResult<()> {
    let learner = tree.model.learner(id)?;
    let invalid = |why: String| CallError::new(libc::EINVAL, format!("weight: {why}"));
    let set = || {
        let text = std::str::from_utf8(data).ok().filter(|_| offset == 0 && data.len() <= MAX_SETTING);
        let text = text.ok_or_else(|| invalid("write the whole number at once".into()))?;
        let weight = text.parse().map_err(|error: NoWeight| invalid(error.to_string()))?;
        learner.set_weight(weight).map_err(|error| invalid(error.to_string()))
    };
    set().inspect_err(|error| learner.refusal.note(error, false))
}

fn invalid_value(name: &str, why: &str) -> CallError {
    CallError::new(libc::EINVAL, format!("control/{name}: {why}"))
}
