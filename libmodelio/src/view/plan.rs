//! A plan: which tensors a view has, and of which parts of a model's tensors they are made.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;

use super::hf_llama::HfLlama;
use super::names::{captures, filled};
use super::part::{Part, PlanError, Split, Wanted, unfit};
use crate::formats::named::{Convert, conversion};
use crate::vocabulary::layout::{DType, LayoutError, MAX_TENSORS, ModelLayout, Tensor, shown};
use crate::wire::MAX_PARTS_OF_SET;

/// The longest text of a plan, in bytes.
pub const MAX_PLAN: usize = 1 << 20;

/// The text of a plan.
#[derive(Debug, Deserialize)]
struct Text {
    #[serde(default)]
    tensors: Vec<Entry>,
    style: Option<Style>,
    #[serde(flatten)]
    ready_made: BTreeMap<String, serde_json::Value>,
    /// The tensors that nothing else has read follow as they are.
    #[serde(default)]
    rest: bool,
    /// Each byte of the model must be in the view, once.
    #[serde(default)]
    all: bool,
    publish: Option<Publish>,
}

/// What the plan says of publishing.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Publish {
    part: Option<u32>,
    of: Option<u32>,
    #[serde(default)]
    all: bool,
}

/// The part of new weights that a written view is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The part's number.
    pub part: u32,
    /// The number of parts.
    pub of: u32,
    /// Whether the parts must have all of the model.
    pub all: bool,
}

#[derive(Clone, Copy, Debug, Deserialize)]
enum Style {
    #[serde(rename = "hf-llama")]
    HfLlama,
}

/// One tensor of the view, or one for each tensor that a pattern matches; or a part of one.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: Option<String>,
    #[serde(default)]
    concat: Vec<Entry>,
    dim: Option<usize>,
    cast: Option<String>,
    from: Option<String>,
    #[serde(default)]
    slice: BTreeMap<usize, [usize; 2]>,
    split: Option<Split>,
    #[serde(default)]
    transpose: bool,
}

/// A part of a tensor of the model, and its place in the view.
#[derive(Debug)]
pub(super) struct Move {
    pub(super) part: Part,
    /// The tensor of the view, and where the part begins in a dimension of it.
    pub(super) target: usize,
    pub(super) dim: usize,
    pub(super) at: usize,
    pub(super) convert: Option<Convert>,
}

/// What makes a view of a version of one model.
#[derive(Debug)]
pub struct ViewPlan {
    pub(super) source: Arc<ModelLayout>,
    pub(super) target: Arc<ModelLayout>,
    pub(super) moves: Vec<Move>,
    share: Option<Share>,
}

impl ViewPlan {
    /// Reads a plan for a model.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn new(text: &str, source: &Arc<ModelLayout>) -> Result<ViewPlan, PlanError> {
        let text: Text = serde_json::from_str(text)?;
        if text.style.is_some() && text.rest {
            return unfit("a style has the rest already: leave \"rest\" out".into());
        }
        let tensors = source.tensors();
        let mut wanted = Vec::new();
        for entry in &text.tensors {
            entry.expand(source, &mut wanted)?;
        }
        let is_read = read_by(&wanted, tensors.len());
        let mut rank = None;
        match text.style {
            Some(Style::HfLlama) => {
                let options = serde_json::Value::Object(text.ready_made.into_iter().collect());
                let style: HfLlama = serde_json::from_value(options)?;
                style.expand(source, &is_read, &mut wanted)?;
                rank = style.rank();
            }
            None if let Some(name) = text.ready_made.keys().next() => {
                return unfit(format!("the plan has {name:?}, which is unknown, or goes with a style alone"));
            }
            None => {}
        }
        if text.rest {
            let is_read = read_by(&wanted, tensors.len());
            let left = (0..tensors.len()).filter(|&tensor| !is_read[tensor]);
            wanted.extend(left.map(|tensor| Wanted::whole(tensor, &tensors[tensor])));
        }
        if wanted.is_empty() {
            return unfit("the plan has no tensor: give it \"tensors\", \"style\" or \"rest\"".into());
        }
        if text.all {
            check_all(tensors, &wanted)?;
        }
        let share = match (text.publish, rank) {
            (Some(Publish { part: Some(part), of: Some(of), all }), _) => Some(Share { part, of, all }),
            (Some(Publish { part: None, of: None, all }), Some((part, of))) => Some(Share { part, of, all }),
            (None, Some((part, of))) => Some(Share { part, of, all: false }),
            (None, None) => None,
            (Some(_), _) => {
                return unfit(
                    "publish: give both \"part\" and \"of\", or a style without experts, which has them"
                        .into(),
                );
            }
        };
        if let Some(Share { part, of, .. }) = share
            && (part >= of || of > MAX_PARTS_OF_SET)
        {
            return unfit(format!("publish: there is no part {part} of {of}, of at most {MAX_PARTS_OF_SET}"));
        }
        let plan = ViewPlan { share, ..ViewPlan::of(source, wanted)? };
        if text.publish.is_some() {
            plan.check_inverse()?;
        }
        Ok(plan)
    }

    /// The tensors that one of these patterns matches, as they are.
    ///
    /// # Errors
    /// [`PlanError`], also of a pattern that matches none.
    pub fn of_tensors(patterns: &[String], source: &Arc<ModelLayout>) -> Result<ViewPlan, PlanError> {
        let matches = |pattern: &String, tensor: &Tensor| captures(pattern, &tensor.name).is_some();
        let tensors = source.tensors();
        if let Some(none) = patterns.iter().find(|pattern| !tensors.iter().any(|of| matches(pattern, of))) {
            return unfit(format!("no tensor of the model matches {:?}", shown(none)));
        }
        let wanted = tensors.iter().enumerate();
        let wanted = wanted.filter(|(_, tensor)| patterns.iter().any(|pattern| matches(pattern, tensor)));
        ViewPlan::of(source, wanted.map(|(index, tensor)| Wanted::whole(index, tensor)).collect())
    }

    fn of(source: &Arc<ModelLayout>, wanted: Vec<Wanted>) -> Result<ViewPlan, PlanError> {
        let tensors = source.tensors();
        let shaped: Result<Vec<_>, _> = wanted.iter().map(|of| of.shaped(tensors)).collect();
        let target = Arc::new(ModelLayout::new(shaped?, source.block_size())?);
        let mut moves = Vec::new();
        for Wanted { name, parts, dim, .. } in wanted {
            let Some(index) = target.tensor_index(&name) else { continue };
            let mut at = 0;
            for part in parts {
                let (len, from) = (part.shape().get(dim).copied().unwrap_or(0), tensors[part.tensor].dtype);
                let convert = conversion(from, target.tensors()[index].dtype);
                moves.push(Move { part, target: index, dim, at, convert });
                at += len;
            }
        }
        Ok(ViewPlan { source: Arc::clone(source), target, moves, share: None })
    }

    /// The part of new weights that a view of this plan is. None if the plan does not say it.
    pub fn share(&self) -> Option<Share> {
        self.share
    }

    /// Checks that a view can be turned back into the pieces of the model that it was made of.
    ///
    /// # Errors
    /// [`PlanError::Unfit`] names a tensor that is cast, transposed or there twice.
    pub fn check_inverse(&self) -> Result<(), PlanError> {
        let tensors = self.source.tensors();
        let changed = |of: &&Move| of.convert.is_some() || of.part.transpose;
        if let Some(of) = self.moves.iter().find(changed) {
            let how = if of.convert.is_some() { "cast" } else { "transposed" };
            let name = shown(&tensors[of.part.tensor].name);
            return unfit(format!("tensor {name:?} is {how}, and such a view can only be read"));
        }
        match twice(tensors, self.moves.iter().map(|of| &of.part)) {
            Some(name) => unfit(format!("the view has parts of tensor {name:?} twice, and can only be read")),
            None => Ok(()),
        }
    }

    /// The tensors of the view.
    pub fn layout(&self) -> &Arc<ModelLayout> {
        &self.target
    }
}

/// The tensors that are read.
fn read_by(wanted: &[Wanted], tensors: usize) -> Vec<bool> {
    let mut is_read = vec![false; tensors];
    wanted.iter().flat_map(|of| &of.parts).for_each(|part| is_read[part.tensor] = true);
    is_read
}

impl Entry {
    /// The tensors that the entry means.
    fn expand(&self, source: &ModelLayout, wanted: &mut Vec<Wanted>) -> Result<(), PlanError> {
        let Entry { name, concat, dim, cast, from, slice, split, transpose } = self;
        let is_plain = slice.is_empty() && split.is_none() && !transpose && from.is_none() && name.is_some();
        let is_part = |of: &Entry| of.name.is_none() && of.cast.is_none() && of.is_single();
        let parts = match &concat[..] {
            [] if self.is_single() => std::slice::from_ref(self),
            [_, ..] if is_plain && concat.iter().all(is_part) => &concat[..],
            _ => {
                let what =
                    "an entry has \"from\" and what is done with that, or \"name\", \"concat\" and \"dim\"";
                let of = name.as_ref().or(from.as_ref());
                return unfit(match of {
                    Some(of) => format!("{what}: see that of {:?}", shown(of)),
                    None => format!("{what}: one has neither \"name\" nor \"from\""),
                });
            }
        };
        let cast = cast.as_deref().map(DType::parse).transpose();
        let cast = cast.map_err(|error| PlanError::Unfit(format!("cast: {error}")))?;
        let first = parts[0].from.as_deref().unwrap_or_default();
        let matches = |tensor: &Tensor| captures(first, &tensor.name);
        let mut found =
            source.tensors().iter().filter_map(|tensor| Some((tensor, matches(tensor)?))).peekable();
        if found.peek().is_none() {
            return unfit(match first.contains(['*', '?']) {
                true => format!("no tensor has a name that matches {:?}", shown(first)),
                false => format!("the model has no tensor {:?}", shown(first)),
            });
        }
        for (tensor, captured) in found {
            let fill = |pattern: &str| {
                let why = || format!("{pattern:?} has more * than {first:?}, which say what they stand for");
                filled(pattern, &captured).ok_or_else(|| PlanError::Unfit(why()))
            };
            let of = |(at, part): (usize, &Entry)| match part.from.as_deref() {
                Some(from) if at > 0 => part.of(source, &fill(from)?),
                _ => part.of(source, &tensor.name),
            };
            let parts: Result<Vec<Part>, PlanError> = parts.iter().enumerate().map(of).collect();
            let name = name.as_deref().map_or_else(|| Ok(tensor.name.clone()), fill)?;
            wanted.push(Wanted { name, parts: parts?, dim: dim.unwrap_or(0), cast });
            if wanted.len() > MAX_TENSORS {
                return Err(LayoutError::TooManyTensors(wanted.len()).into());
            }
        }
        Ok(())
    }

    fn is_single(&self) -> bool {
        self.from.is_some() && self.concat.is_empty() && self.dim.is_none()
    }

    fn of(&self, source: &ModelLayout, name: &str) -> Result<Part, PlanError> {
        let Some(index) = source.tensor_index(name) else {
            return unfit(format!("the model has no tensor {:?}", shown(name)));
        };
        let tensor = &source.tensors()[index];
        let mut part = Part::whole(index, tensor);
        for (&dim, &[start, end]) in &self.slice {
            match part.ranges.get_mut(dim) {
                Some(range) if start < end && end <= range.end => *range = start..end,
                _ => {
                    let (name, shape) = (shown(name), &tensor.shape);
                    let what = format!("slice [{start}, {end}] of dimension {dim}");
                    return unfit(format!("tensor {name:?} of shape {shape:?} has no {what}"));
                }
            }
        }
        if let Some(split) = self.split {
            part.split(split, tensor)?;
        }
        if self.transpose && tensor.shape.len() != 2 {
            let (name, shape) = (shown(name), &tensor.shape);
            return unfit(format!("tensor {name:?} has the shape {shape:?}: transpose takes two dimensions"));
        }
        part.transpose = self.transpose;
        let changes = part != Part::whole(index, tensor);
        if changes && tensor.dtype.size_bytes().is_none() {
            let (name, dtype) = (shown(name), tensor.dtype);
            return unfit(format!(
                "tensor {name:?} of {dtype} has elements of less than a byte: take it whole"
            ));
        }
        Ok(part)
    }
}

/// The parts of each tensor.
fn by_tensor<'a>(tensors: &[Tensor], parts: impl Iterator<Item = &'a Part>) -> Vec<Vec<&'a Part>> {
    let mut of: Vec<Vec<&Part>> = vec![Vec::new(); tensors.len()];
    parts.for_each(|part| of[part.tensor].push(part));
    of
}

/// The name of a tensor of which some element is in two of these parts.
fn twice<'a>(tensors: &[Tensor], parts: impl Iterator<Item = &'a Part>) -> Option<String> {
    let meet = |parts: &Vec<&Part>| {
        (1..parts.len()).any(|at| parts[..at].iter().any(|other| other.meets(parts[at])))
    };
    let found = by_tensor(tensors, parts).iter().position(meet);
    found.map(|tensor| shown(&tensors[tensor].name).to_string())
}

/// Each byte of the model is in the view, once.
fn check_all(tensors: &[Tensor], wanted: &[Wanted]) -> Result<(), PlanError> {
    let all = || wanted.iter().flat_map(|of| &of.parts);
    if let Some(name) = twice(tensors, all()) {
        return unfit(format!("the plan overlaps: it has parts of tensor {name:?} twice"));
    }
    for (tensor, parts) in tensors.iter().zip(by_tensor(tensors, all())) {
        let elements: u128 = tensor.shape.iter().map(|&len| len as u128).product();
        if parts.iter().map(|part| part.elements()).sum::<u128>() < elements {
            let what = "which \"all\" demands";
            return unfit(format!("the plan leaves out parts of tensor {:?}, {what}", shown(&tensor.name)));
        }
    }
    Ok(())
}
