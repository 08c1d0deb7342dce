//! `views/<name>/`: a plan, and the files of the model that it makes.
//!
//! That model has an index of its own in the mount, as any model, and no name in the root. Another plan makes another
//! model: so the kernel never takes an inode of the one for one of the other.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::sync::{Arc, OnceLock};

use libmodelio::view::{PlanError, ViewPlan};
use libmodelio::vocabulary::members::is_learner_name;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::Owner;
use super::model_tree::ModelTree;
use super::node::{File, MAX_MODELS, MAX_VIEWS, Node};
use crate::session::error::{CallError, CallResult};
use crate::session::model::{Model, Snapshots};
use crate::session::view::ViewMaker;

/// The file that makes a view.
pub(super) const PLAN: &str = "plan";
/// The files of a model that a view has, too.
pub(super) const FILES: [&str; 7] =
    ["weights", "weights.safetensors", "tensors", "hf", "version", "versions", "layout"];

/// The files beside its views of a model that the mount does not hold.
pub(super) const BESIDE: [&str; 9] =
    ["views", "version", "layout", "readers", "learners", "control", "settings.json", "status.json", "error"];

/// Whether the directory of a model has this file.
pub(super) fn has(model: &Model, name: &str) -> bool {
    match &model.snapshots {
        // It stands there in place of its model, so somebody looks for its status.
        Snapshots::Never => FILES.contains(&name) || name == "status.json",
        _ => model.job.holds_versions() || BESIDE.contains(&name),
    }
}

/// Shows one more model in the directory of this number. None if the mount has shown as many as it can.
type Show = Box<dyn Fn(Arc<Model>, u64) -> Option<Arc<ModelTree>> + Send + Sync>;

/// The views of one model.
#[derive(Default)]
pub struct Views {
    /// By number, and the next number.
    table: Mutex<(BTreeMap<u32, View>, u32)>,
    show: OnceLock<Show>,
}

struct View {
    name: String,
    owner: Owner,
    plan: Arc<str>,
    /// The model that the plan makes, and who makes its versions.
    made: Option<(Arc<ModelTree>, ViewMaker)>,
}

impl Views {
    /// Views are shown so.
    pub fn shown_by(&self, show: Show) {
        let _ = self.show.set(show);
    }

    /// Makes one, with no plan.
    ///
    /// # Errors
    /// EINVAL for its name, EEXIST, EDQUOT.
    pub(super) fn begin(&self, name: &OsStr, owner: Owner) -> CallResult<u32> {
        let Some(name) = name.to_str().filter(|name| is_learner_name(name)) else {
            let what = format!("view name {name:?}: use a name that a learner could have");
            return Err(CallError::new(libc::EINVAL, what));
        };
        let (views, next) = &mut *self.table.lock();
        if views.values().any(|view| view.name == name) {
            return Err(CallError::new(libc::EEXIST, format!("there is a view {name:?}")));
        }
        if *next >= MAX_VIEWS {
            return Err(CallError::new(
                libc::EDQUOT,
                format!("{MAX_VIEWS} views have been made: mount again"),
            ));
        }
        let (number, name) = (*next, name.to_owned());
        *next += 1;
        views.insert(number, View { name, owner, plan: Arc::from(""), made: None });
        Ok(number)
    }

    /// Removes one. Whoever has its files open keeps what they show.
    ///
    /// # Errors
    /// ENOENT.
    pub(super) fn end(&self, name: &OsStr) -> CallResult<()> {
        let number = self.named(name.to_str().unwrap_or_default()).ok_or_else(CallError::not_found)?;
        let ended = self.table.lock().0.remove(&number);
        ended.map(drop).ok_or_else(CallError::not_found)
    }

    fn with<R>(&self, number: u32, with: impl FnOnce(&mut View) -> R) -> CallResult<R> {
        self.table.lock().0.get_mut(&number).map(with).ok_or_else(CallError::not_found)
    }

    /// The number of the view of this name.
    pub(super) fn named(&self, name: &str) -> Option<u32> {
        self.table.lock().0.iter().find(|(_, view)| view.name == name).map(|(number, _)| *number)
    }

    /// Names and numbers.
    pub(super) fn names(&self) -> Vec<(String, u32)> {
        self.table.lock().0.iter().map(|(number, view)| (view.name.clone(), *number)).collect()
    }

    /// The user who has made it.
    pub(super) fn owner(&self, number: u32) -> CallResult<Owner> {
        self.with(number, |view| view.owner)
    }

    /// Its plan.
    pub(super) fn plan(&self, number: u32) -> CallResult<Arc<str>> {
        self.with(number, |view| Arc::clone(&view.plan))
    }

    /// The model that it shows. None without a plan.
    pub(super) fn tree(&self, number: u32) -> CallResult<Option<Arc<ModelTree>>> {
        self.with(number, |view| view.made.as_ref().map(|(tree, _)| Arc::clone(tree)))
    }

    /// There may be a new version.
    pub fn wake(&self) {
        self.table
            .lock()
            .0
            .values()
            .filter_map(|view| view.made.as_ref())
            .for_each(|(_, maker)| maker.wake());
    }

    /// What a status says of them.
    pub(super) fn to_json(&self) -> Value {
        let of = |view: &View| {
            let model = view.made.as_ref().map(|(tree, _)| &tree.model);
            let (version, size) = (model.map(|of| of.job.version()), model.map(|of| of.layout.size()));
            json!({ "id": view.name, "version": version, "size_bytes": size })
        };
        self.table.lock().0.values().map(of).collect()
    }
}

/// Reads a plan for a model.
///
/// # Errors
/// EINVAL.
pub(super) fn read_plan(tree: &ModelTree, text: &[u8]) -> CallResult<(Arc<str>, ViewPlan)> {
    let invalid = |why: String| CallError::new(libc::EINVAL, format!("plan: {why}"));
    let text = std::str::from_utf8(text).map_err(|_| invalid("not text".into()))?;
    let plan =
        ViewPlan::new(text, &tree.model.layout).map_err(|error: PlanError| invalid(error.to_string()))?;
    Ok((Arc::from(text), plan))
}

/// The view of this number shows what a plan makes, from its first version on. Waits for that.
///
/// # Errors
/// EINVAL, ENOSPC, ENOENT if the view has gone, and those of [`ViewMaker::start`]. The view is as it was then.
pub(super) fn make_view(tree: &ModelTree, number: u32, text: &[u8]) -> CallResult<()> {
    let (text, plan) = read_plan(tree, text)?;
    let has_it = |view: &mut View| (view.name.clone(), view.made.is_some() && view.plan == text);
    let (name, has_it) = tree.views.with(number, has_it)?;
    if has_it {
        return Ok(());
    }
    let (model, maker) = ViewMaker::start(&tree.model, &name, plan)?;
    let home = Node::Model(tree.index, File::View(number)).ino();
    let shown = tree.views.show.get().and_then(|show| show(model, home)).ok_or_else(|| {
        let what = format!("{MAX_MODELS} models and plans of views have been shown: mount again");
        CallError::new(libc::ENOSPC, what)
    })?;
    let made = |view: &mut View| (std::mem::replace(&mut view.plan, text), view.made.replace((shown, maker)));
    tree.views.with(number, made).map(drop)
}
