//! Small text files, which show the present state at each read. Some can be written: `control/*` with one value each, for the
//! whole job, `settings.json` with several that are set together, a learner's `weight`, and what a reader has applied. What
//! is written is a draft until a close applies it.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libmodelio::client::SetError;
use libmodelio::contributor::Wrote;
use libmodelio::view::MAX_PLAN;
use libmodelio::vocabulary::controls::{ControlError, MAX_TEXT, SETTINGS};
use libmodelio::vocabulary::ids::{LearnerId, ReaderId, Version};
use libmodelio::vocabulary::settings_json::{self, SETTINGS_JSON, is_incomplete};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::vocabulary::weight::{NoWeight, Weight};
use parking_lot::Mutex;

use super::Fs;
use super::draft::{Draft, NotTaken};
use super::model_tree::ModelTree;
use super::node::{File, Node};
use super::plans::{make_view, read_plan};
use super::text;
use crate::own_thread::on_own_thread;
use crate::session::error::{CallError, CallResult, Done};
use crate::session::learner::Learner;
use crate::session::model::not_applied;
use crate::session::written_view::WrittenView;

/// An open text file.
pub struct TextFile {
    /// The file's node.
    pub node: Node,
    /// The file's model; `None` for the mount's own README.
    tree: Option<Arc<ModelTree>>,
    /// Its contents as of the last read from the start.
    text: Mutex<Arc<str>>,
    /// What was last read, for poll.
    seen: AtomicU64,
    /// What is being written, in a file that was opened for that.
    draft: Option<Mutex<Draft>>,
}

impl Fs {
    /// Opens one.
    ///
    /// # Errors
    /// ENOENT for learners and versions that are gone.
    pub(super) fn open_text(
        &self,
        node: Node,
        tree: Option<&Arc<ModelTree>>,
        writes: bool,
    ) -> CallResult<TextFile> {
        let file = TextFile {
            node,
            tree: tree.cloned(),
            text: Mutex::new(Arc::from("")),
            seen: AtomicU64::new(u64::MAX),
            draft: writes.then(|| Mutex::new(Draft::of(&self.drafts))),
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
            *file.text.lock() = match (file.node, &file.tree) {
                // It never changes, and may be long.
                (Node::Model(_, File::Layout), Some(tree)) => Arc::clone(&tree.layout),
                _ => self.render(file)?.into(),
            };
        }
        Ok(Arc::clone(&file.text.lock()))
    }

    fn render(&self, handle: &TextFile) -> CallResult<String> {
        let Some(tree) = &handle.tree else { return Ok(text::readme(&self.shown())) };
        let Node::Model(_, file) = handle.node else { return Err(CallError::not_found()) };
        let is_version = matches!(file, File::VersionText | File::LearnerVersion(_) | File::DurableText);
        if let Some(error) = tree.model.goes_on_elsewhere().filter(|_| is_version) {
            return Err(error);
        }
        Ok(match file {
            File::VersionText | File::LearnerVersion(_) => {
                let version = tree.shown_version();
                handle.seen.store(version.0, Ordering::Relaxed);
                format!("{version}\n")
            }
            File::DurableText => {
                let text = text::durable(&tree.model);
                handle.seen.store(number_of(&text), Ordering::Relaxed);
                text
            }
            File::ReadersApplied | File::ReaderApplied(_) | File::ReaderStaged(_) => {
                let text = text::of_reader(&tree.model, file)?;
                handle.seen.store(number_of(&text), Ordering::Relaxed);
                text
            }
            File::ViewPlan(number) => tree.views.plan(number)?.to_string(),
            File::Set => tree.model.written_view().ok_or_else(CallError::not_found)?.set(),
            File::RetainedText(version) => format!("{version}\n"),
            File::RetainedMeta(version) => text::meta(&tree.model, version),
            File::Status => text::status(tree, &self.mount_status()),
            File::LearnerWeight(id) => text::weight(&tree.model, id)?,
            File::LearnerStatus(id) => text::learner_status(&tree.model, id)?,
            File::Error | File::LearnerError(_) => text::error(tree, file)?,
            File::Control(_) | File::Settings => setting_of(file)
                .and_then(|name| text::setting(&tree.model, name))
                .ok_or_else(CallError::not_found)?,
            _ => return Err(CallError::not_found()),
        })
    }
}

impl TextFile {
    /// What the file announces, if it announces anything, and the model that this is of.
    pub fn announces(&self) -> Option<(Announced, &Arc<ModelTree>)> {
        let tree = self.tree.as_ref()?;
        let Node::Model(_, file) = self.node else { return None };
        match file {
            File::VersionText | File::LearnerVersion(_) => Some((Announced::Versions, tree)),
            File::ReadersApplied | File::ReaderApplied(_) | File::ReaderStaged(_) => {
                Some((Announced::Readers, tree))
            }
            File::DurableText => Some((Announced::Durable, tree)),
            _ => None,
        }
    }

    /// The file's model, if it is of one.
    pub(super) fn tree(&self) -> Option<&Arc<ModelTree>> {
        self.tree.as_ref()
    }

    /// Whether a read would show something else than the last one did. A reader that has gone is news.
    pub fn has_news(&self) -> bool {
        let seen = self.seen.load(Ordering::Relaxed);
        if self.tree.as_ref().is_some_and(|tree| tree.model.goes_on_elsewhere().is_some()) {
            return true;
        }
        match (self.announces(), self.node) {
            (Some((Announced::Versions, tree)), _) => tree.shown_version() != Version(seen),
            (Some((Announced::Durable, tree)), _) => number_of(&text::durable(&tree.model)) != seen,
            (Some((Announced::Readers, tree)), Node::Model(_, file)) => {
                text::of_reader(&tree.model, file).map_or(true, |text| number_of(&text) != seen)
            }
            _ => true,
        }
    }

    /// Whether it was opened to write.
    pub fn is_writable(&self) -> bool {
        self.draft.is_some()
    }

    /// The file was emptied: the setting will have no value, unless one is written.
    pub(super) fn empty(&self) {
        if let Some(draft) = &self.draft {
            draft.lock().empty();
        }
    }

    /// Whether a close has something to apply, or a refusal to report.
    pub fn is_pending(&self) -> bool {
        self.draft.as_ref().is_some_and(|draft| draft.lock().is_pending())
    }

    /// Whether something was written that no close has applied.
    pub fn is_written(&self) -> bool {
        self.draft.as_ref().is_some_and(|draft| draft.lock().is_written())
    }

    /// Takes a piece of a new value. Whatever ends with a newline must be one, and the coordinator must be there to
    /// take it: shells show no errors of close. So a setting is asked for: see [`Self::await_settings`]. A plan is made a
    /// view at once, by [`Self::make_written`].
    ///
    /// # Errors
    /// EINVAL for a value that does not fit, or a piece that does not follow the others; ENOMEM if drafts hold as much
    /// as they may; EBADF for a file not open for writing. The next end fails, too.
    pub(super) fn write(&self, offset: u64, data: &[u8]) -> CallResult<Wrote> {
        let mut draft = self.draft.as_ref().ok_or_else(not_writable)?.lock();
        let longest = self.longest();
        let written = draft.write(offset, data, longest, || self.present());
        let outcome = match written.map_err(|why| self.not_taken(why)) {
            Ok(true) => self.check(&self.unchecked(&draft, data.len())).map(|_| {
                let is_plan = self.view().is_some() && is_whole(draft.whole());
                if is_plan || self.setting_name().is_some() { Wrote::Asks } else { Wrote::Taken }
            }),
            other => other.map(|_| Wrote::Taken),
        };
        outcome.map_err(|error| self.refuse(&mut draft, error))
    }

    /// Whether it is the plan of a view.
    pub fn is_plan(&self) -> bool {
        self.view().is_some()
    }

    /// Makes the view of a plan that was written whole.
    pub fn make_written(&self, done: Done<()>) {
        let Some(((_, number), draft)) = self.view().zip(self.draft.as_ref()) else {
            return done(Err(not_writable()));
        };
        let plan = draft.lock().whole().to_vec();
        self.make_view(number, plan, done);
    }

    /// The plan that was written makes no view. The next end fails, too.
    pub fn not_made(&self, error: CallError) -> CallError {
        self.draft.iter().for_each(|draft| draft.lock().refuse(&error));
        error
    }

    /// Calls `done` when this mount knows the settings of the job that were in force by now, or cannot learn of them.
    pub fn await_settings(&self, done: impl FnOnce(Result<(), ShardError>) + Send + 'static) {
        let Some(tree) = &self.tree else { return done(Ok(())) };
        tree.model.job.await_controls(tree.model.prompt(), Box::new(done));
    }

    /// Judges again what was written, whose last `len` bytes are new, after [`Self::await_settings`].
    ///
    /// # Errors
    /// EINVAL for a value that contradicts a setting; ETIMEDOUT and EIO when the settings could not be learnt. The next
    /// end fails, too.
    pub fn judge(&self, len: usize, known: Result<(), ShardError>) -> CallResult<()> {
        let mut draft = self.draft.as_ref().ok_or_else(not_writable)?.lock();
        let outcome = match known {
            Ok(()) => self.check(&self.unchecked(&draft, len)).and_then(|why| why.map_or(Ok(()), Err)),
            Err(error) => Err(self.unanswered(error)),
        };
        outcome.map_err(|error| self.refuse(&mut draft, error))
    }

    /// The part of a draft to check when its last `len` bytes are new. JSON is checked as a whole.
    fn unchecked<'a>(&self, draft: &'a Draft, len: usize) -> Cow<'a, [u8]> {
        match self.setting_name() {
            Some(SETTINGS_JSON) => Cow::Borrowed(draft.whole()),
            _ if self.view().is_some() || self.part().is_some() => Cow::Borrowed(draft.whole()),
            _ => draft.unchecked(len),
        }
    }

    fn refuse(&self, draft: &mut Draft, error: CallError) -> CallError {
        draft.refuse(&error);
        self.note(&error);
        error
    }

    /// The view whose plan the file is, if it is one.
    fn view(&self) -> Option<(&Arc<ModelTree>, u32)> {
        match (self.node, &self.tree) {
            (Node::Model(_, File::ViewPlan(number)), Some(tree)) => Some((tree, number)),
            _ => None,
        }
    }

    /// The view whose next part's set the file names, if it does.
    fn part(&self) -> Option<&Arc<WrittenView>> {
        match (self.node, &self.tree) {
            (Node::Model(_, File::Set), Some(tree)) => tree.model.written_view(),
            _ => None,
        }
    }

    /// The longest text that it takes.
    fn longest(&self) -> usize {
        let other = || if self.view().is_some() { MAX_PLAN } else { MAX_TEXT };
        self.setting_name().map_or_else(other, settings_json::longest)
    }

    /// Applies what was written. `done` hears when the job has answered.
    ///
    /// # Errors
    /// EINVAL for a value that does not fit; ETIMEDOUT and EIO when nobody said whether it was changed; those of
    /// [`Self::write`].
    pub(super) fn end(&self, done: Done<()>) {
        let Some(taken) = self.draft.as_ref().and_then(|draft| draft.lock().take()) else {
            return self.sync(done);
        };
        let applied = match taken {
            Err(error) => Err(error),
            Ok(value) => match self.node {
                Node::Model(_, File::LearnerWeight(id)) => self.set_weight(id, &value),
                Node::Model(_, File::ReaderApplied(id)) => return self.applies(id, &value, done),
                Node::Model(_, File::ViewPlan(number)) => return self.make_view(number, value, done),
                _ if let Some(part) = self.part() => part.name_set(&value),
                _ => return self.set(&value, done),
            },
        };
        done(applied.inspect_err(|error| self.note(error)));
    }

    /// fsync(2) of a file that nothing was written to. Of a version's number it waits until that is durable.
    fn sync(&self, done: Done<()>) {
        let is_version = matches!(self.node, Node::Model(_, File::VersionText | File::DurableText));
        let Some(tree) = self.tree.clone().filter(|_| is_version) else { return done(Ok(())) };
        on_own_thread("gradfs-durable", move || {
            let outcome = tree.model.make_durable();
            done(outcome.inspect_err(|error| tree.model.own_refusal.note(error, false)));
        });
    }

    fn applies(&self, id: ReaderId, value: &[u8], done: Done<()>) {
        let Some(tree) = &self.tree else { return done(Err(not_writable())) };
        let refusal = Arc::clone(&tree.model.own_refusal);
        let applied =
            move |outcome: CallResult<()>| done(outcome.inspect_err(|error| refusal.note(error, false)));
        tree.model.applies(id, value, Box::new(applied));
    }

    fn make_view(&self, number: u32, plan: Vec<u8>, done: Done<()>) {
        let Some(tree) = self.tree.clone() else { return done(Err(not_writable())) };
        on_own_thread("gradfs-views", move || {
            let made = make_view(&tree, number, &plan);
            done(made.inspect_err(|error| tree.model.own_refusal.note(error, false)));
        });
    }

    fn set(&self, value: &[u8], done: Done<()>) {
        let (tree, name, value) = match self.setting(value) {
            Ok(parts) => parts,
            Err(error) => {
                self.note(&error);
                return done(Err(error));
            }
        };
        let (of_done, written) = (tree.model.name.clone(), value.trim().to_owned());
        let refusal = Arc::clone(&tree.model.own_refusal);
        let answer = move |outcome| match outcome {
            Ok(()) => {
                tracing::info!(model = of_done, setting = name, value = written, "set");
                done(Ok(()));
            }
            Err(error) => {
                let error = match error {
                    SetError::Refused(error) => invalid_value(name, &why(name, &error)),
                    SetError::Unanswered(error) => unanswered(name, error),
                };
                refusal.note(&error, false);
                done(Err(error));
            }
        };
        tree.model.job.set_control(name, value, tree.model.prompt(), Box::new(answer));
    }

    /// Whether `text` is a value, as far as that can be told before it is applied. Returns why it contradicts settings
    /// that this mount knows, if it does.
    fn check(&self, text: &[u8]) -> CallResult<Option<CallError>> {
        if let Node::Model(_, File::LearnerWeight(id)) = self.node {
            let (learner, weight) = self.weight(id, text)?;
            let checked = learner.check_weight(weight).map_err(|error| invalid_weight(&error.to_string()));
            return checked.map(|()| None);
        }
        if let (Node::Model(_, File::ReaderApplied(id)), Some(tree)) = (self.node, &self.tree) {
            return tree.model.applied_by(id, text).map(|_| None);
        }
        if let Some((tree, _)) = self.view() {
            return if is_whole(text) { read_plan(tree, text).map(|_| None) } else { Ok(None) };
        }
        if let Some(part) = self.part() {
            return part.read_set(text).map(|_| None);
        }
        let (tree, name, value) = self.setting(text)?;
        // The rest of it is still to come.
        if name == SETTINGS_JSON && is_incomplete(value) {
            return Ok(None);
        }
        let refused = tree.model.job.check_control(name, value).err();
        let why = refused.as_ref().map(|error| invalid_value(name, &why(name, error)));
        match refused {
            None | Some(ControlError::Conflict(_)) => Ok(why),
            Some(_) => why.map_or(Ok(None), Err),
        }
    }

    /// The value in force.
    fn present(&self) -> String {
        let text = self.tree.as_ref().and_then(|tree| match self.node {
            Node::Model(_, File::LearnerWeight(id)) => text::weight(&tree.model, id).ok(),
            Node::Model(_, File::ViewPlan(number)) => {
                tree.views.plan(number).ok().map(|text| text.to_string())
            }
            Node::Model(_, File::Set) => self.part().map(|part| part.set()),
            Node::Model(_, file @ File::ReaderApplied(_)) => text::of_reader(&tree.model, file).ok(),
            _ => text::setting(&tree.model, self.setting_name()?),
        });
        text.unwrap_or_default()
    }

    /// The setting that the file is, if it is one.
    fn setting_name(&self) -> Option<&'static str> {
        let Node::Model(_, file) = self.node else { return None };
        setting_of(file)
    }

    fn not_taken(&self, why: NotTaken) -> CallError {
        let name = self.setting_name();
        let most = self.longest() >> 10;
        let piece = format!("write the whole value, from its start, in at most {most} KiB");
        match (why, name) {
            (NotTaken::Piece, Some(name)) => invalid_value(name, &piece),
            (NotTaken::Piece, None) if matches!(self.node, Node::Model(_, File::ReaderApplied(_))) => {
                not_applied(&piece)
            }
            (NotTaken::Piece, None) if self.view().is_some() || self.part().is_some() => {
                CallError::new(libc::EINVAL, piece)
            }
            (NotTaken::Piece, None) => invalid_weight(&piece),
            (NotTaken::Room, _) => CallError::new(
                libc::ENOMEM,
                "too much is being written to settings: close some of them first",
            ),
        }
    }

    fn unanswered(&self, error: ShardError) -> CallError {
        let error = unanswered(self.setting_name().unwrap_or_default(), error);
        self.tree.iter().for_each(|tree| tree.model.own_refusal.note(&error, false));
        error
    }

    /// Keeps the reason in `error`, of the learner or the model.
    fn note(&self, error: &CallError) {
        let Some(tree) = &self.tree else { return };
        match self.node {
            Node::Model(_, File::LearnerWeight(id)) => {
                // One that has left has no file.
                tree.model.learner(id).iter().for_each(|learner| learner.refusal.note(error, false));
            }
            _ => tree.model.own_refusal.note(error, false),
        }
    }

    fn set_weight(&self, id: LearnerId, text: &[u8]) -> CallResult<()> {
        let (learner, weight) = self.weight(id, text)?;
        learner.set_weight(weight).map_err(|error| invalid_weight(&error.to_string()))
    }

    /// The learner whose weight to write, and the new weight.
    fn weight(&self, id: LearnerId, text: &[u8]) -> CallResult<(Arc<Learner>, Weight)> {
        let tree = self.tree.as_ref().ok_or_else(not_writable)?;
        let text = std::str::from_utf8(text).map_err(|_| invalid_weight("not text"))?;
        let weight = text.parse().map_err(|error: NoWeight| invalid_weight(&error.to_string()))?;
        Ok((tree.model.learner(id)?, weight))
    }

    /// The setting to write, its model, and the new text.
    fn setting<'a>(&self, text: &'a [u8]) -> CallResult<(&Arc<ModelTree>, &'static str, &'a str)> {
        let (Some(name), Some(tree)) = (self.setting_name(), &self.tree) else { return Err(not_writable()) };
        let value = std::str::from_utf8(text).map_err(|_| invalid_value(name, "not text"))?;
        Ok((tree, name, value))
    }
}

/// What a poller waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Announced {
    /// Versions.
    Versions,
    /// What readers apply.
    Readers,
    /// Versions of which there is a snapshot.
    Durable,
}

/// The number that a line has, and one that no line has if it is empty.
fn number_of(line: &str) -> u64 {
    line.trim().parse().unwrap_or(u64::MAX - 1)
}

fn not_writable() -> CallError {
    CallError::new(libc::EBADF, "not open for writing")
}

fn invalid_weight(why: &str) -> CallError {
    CallError::new(libc::EINVAL, format!("weight: {why}"))
}

/// The setting that a file shows.
pub(super) fn setting_of(file: File) -> Option<&'static str> {
    match file {
        File::Control(index) => SETTINGS.get(index as usize).map(|(name, _)| *name),
        File::Settings => Some(SETTINGS_JSON),
        _ => None,
    }
}

/// Nobody said whether the setting was changed.
fn unanswered(name: &str, error: ShardError) -> CallError {
    let CallError { errno, message, .. } = error.into();
    CallError::new(errno, format!("{}: {message}", path_of(name)))
}

fn invalid_value(name: &str, why: &str) -> CallError {
    CallError::new(libc::EINVAL, format!("{}: {why}", path_of(name)))
}

/// Why a value is refused. Of several together, it begins with the one that is wrong.
fn why(name: &str, error: &ControlError) -> String {
    match error {
        ControlError::Invalid { name: wrong, .. } if *wrong != name => error.to_string(),
        _ => error.without_name(),
    }
}

fn path_of(setting: &str) -> String {
    if setting == SETTINGS_JSON { setting.to_owned() } else { format!("control/{setting}") }
}

/// Whether JSON is more than the beginning of some.
fn is_whole(text: &[u8]) -> bool {
    std::str::from_utf8(text).map_or(true, |text| !is_incomplete(text))
}
