//! `views/<name>/`: a plan, and the files of the model that it makes.
//!
//! That model has an index of its own in the mount, as any model, and no name in the root. Another plan makes another
//! model: so the kernel never takes an inode of the one for one of the other.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::sync::{Arc, OnceLock};

use libmodelio::vocabulary::members::is_learner_name;
use parking_lot::Mutex;

use super::Owner;
use super::node::MAX_VIEWS;
use crate::session::error::{CallError, CallResult};
use crate::session::model::{Model, Snapshots};
use crate::session::view::ViewMaker;

/// The file that makes a view.
pub(super) const PLAN: &str = "plan";
/// The most views of a model at once.
const MOST: usize = 256;
/// The files of a model that a view has, too.
pub(super) const FILES: [&str; 9] =
    ["weights", "weights.safetensors", "tensors", "hf", "version", "versions", "layout", "publish", SET];
/// The file that names the set of the part which is written to `publish`.
pub(super) const SET: &str = "set";

/// The files beside its views of a model that the mount does not hold.
pub(super) const BESIDE: [&str; 10] = [
    "views",
    "version",
    "durable_version",
    "layout",
    "readers",
    "learners",
    "control",
    "settings.json",
    "status.json",
    "error",
];

/// The files that a model of which a part is shown has besides.
const ABOUT_PARTS: [&str; 3] = ["readers", "status.json", "error"];

/// Whether the directory of a model has this file.
pub(super) fn has(model: &Model, name: &str) -> bool {
    match &model.snapshots {
        Snapshots::Never(None) | Snapshots::PartOf(_) if ["publish", SET].contains(&name) => false,
        Snapshots::PartOf(_) => FILES.contains(&name) || ABOUT_PARTS.contains(&name),
        Snapshots::Never(_) => FILES.contains(&name),
        _ if name == SET => false,
        _ => model.job.holds_versions() || BESIDE.contains(&name),
    }
}

/// Shows one more model in the directory of this number. None if the mount has shown as many as it can.
type Show<T> = Box<dyn Fn(Arc<Model>, u64) -> Option<Arc<T>> + Send + Sync>;

/// The views of one model, whose trees are `T`.
pub struct Views<T> {
    /// By number, and the next number.
    table: Mutex<(BTreeMap<u32, View<T>>, u32)>,
    pub(super) show: OnceLock<Show<T>>,
}

impl<T> Default for Views<T> {
    fn default() -> Views<T> {
        Views { table: Mutex::default(), show: OnceLock::new() }
    }
}

pub(super) struct View<T> {
    pub(super) name: String,
    owner: Owner,
    pub(super) plan: Arc<str>,
    /// The model that the plan makes, and who makes its versions.
    pub(super) made: Option<(Arc<T>, ViewMaker)>,
}

impl<T> View<T> {
    pub(super) fn owner(&self) -> Owner {
        self.owner
    }
}

impl<T> Views<T> {
    /// Views are shown so.
    pub fn shown_by(&self, show: Show<T>) {
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
        if views.len() >= MOST {
            return Err(CallError::new(libc::EDQUOT, format!("there are {MOST} views, the most of a model")));
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

    pub(super) fn with<R>(&self, number: u32, with: impl FnOnce(&mut View<T>) -> R) -> CallResult<R> {
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
    pub(super) fn tree(&self, number: u32) -> CallResult<Option<Arc<T>>> {
        self.with(number, |view| view.made.as_ref().map(|(tree, _)| Arc::clone(tree)))
    }

    /// Those that have a plan.
    pub(super) fn made(&self) -> Vec<Arc<T>> {
        self.table.lock().0.values().filter_map(|view| Some(Arc::clone(&view.made.as_ref()?.0))).collect()
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
}
