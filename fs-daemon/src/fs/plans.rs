//! The plans of views: reading them, and showing what they make.

use std::sync::Arc;

use libmodelio::view::{PlanError, ViewPlan};

use super::model_tree::ModelTree;
use super::node::{File, MAX_MODELS, Node};
use super::views::View;
use crate::session::error::{CallError, CallResult};
use crate::session::view::ViewMaker;

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

/// The views of a model's life before are those of this one, too.
pub(super) fn take_views(tree: &ModelTree, before: &ModelTree) {
    for (name, number) in before.views.names() {
        let of = before.views.with(number, |view| (view.owner(), Arc::clone(&view.plan)));
        let taken = of.and_then(|(owner, plan)| {
            let number = tree.views.begin(name.as_ref(), owner)?;
            if plan.is_empty() { Ok(()) } else { make_view(tree, number, plan.as_bytes()) }
        });
        if let Err(error) = taken {
            tracing::warn!(model = tree.model.name, view = name, "is not made again: {error}");
        }
    }
}

/// The view of this number shows what a plan makes, from its first version on. Waits for that.
///
/// # Errors
/// EINVAL, ENOSPC, ENOENT if the view has gone, and those of [`ViewMaker::start`]. The view is as it was then.
pub(super) fn make_view(tree: &ModelTree, number: u32, text: &[u8]) -> CallResult<()> {
    let (text, plan) = read_plan(tree, text)?;
    let has_it = |view: &mut View<ModelTree>| (view.name.clone(), view.made.is_some() && view.plan == text);
    let (name, has_it) = tree.views.with(number, has_it)?;
    if has_it {
        return Ok(());
    }
    let (model, maker) = ViewMaker::start(&tree.model, &name, plan)?;
    let home = Node::Model(tree.index, File::View(number)).ino();
    let shown = tree.views.show.get().and_then(|show| show(model, home)).ok_or_else(|| {
        let what =
            format!("{MAX_MODELS} models and plans of views are in use: remove views that are not needed");
        CallError::new(libc::ENOSPC, what)
    })?;
    let made = |view: &mut View<ModelTree>| {
        (std::mem::replace(&mut view.plan, text), view.made.replace((shown, maker)))
    };
    tree.views.with(number, made).map(drop)
}
