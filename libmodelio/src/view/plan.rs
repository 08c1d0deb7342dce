//! A plan: which tensors a view has, and of which parts of a model's tensors they are made.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use serde::Deserialize;

use super::hf_llama::HfLlama;
use super::names::{captures, filled};
use crate::formats::named::{Convert, conversion};
use crate::vocabulary::layout::{DType, LayoutError, MAX_TENSORS, ModelLayout, Tensor, shown};

/// The longest text of a plan, in bytes.
pub const MAX_PLAN: usize = 1 << 20;

/// Why a text is no plan for a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// It is not the JSON that a plan is.
    #[error("not a plan: {0}")]
    Json(#[from] serde_json::Error),
    /// Its tensors are no model.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// It does not fit the model.
    #[error("{0}")]
    Unfit(String),
}

pub(super) fn unfit<T>(why: String) -> Result<T, PlanError> {
    Err(PlanError::Unfit(why))
}

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

/// One of several equal parts of a dimension.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Split {
    pub(super) dim: usize,
    pub(super) of: usize,
    pub(super) part: usize,
}

/// A part of a tensor of the model: so much of each of its dimensions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) tensor: usize,
    pub(super) ranges: Vec<Range<usize>>,
    pub(super) transpose: bool,
}

/// A tensor of the view, made of parts that follow each other in one dimension.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) name: String,
    pub(super) parts: Vec<Part>,
    pub(super) dim: usize,
    pub(super) cast: Option<DType>,
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
        match text.style {
            Some(Style::HfLlama) => {
                let options = serde_json::Value::Object(text.ready_made.into_iter().collect());
                let style: HfLlama = serde_json::from_value(options)?;
                style.expand(source, &is_read, &mut wanted)?;
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
        ViewPlan::of(source, wanted)
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
        Ok(ViewPlan { source: Arc::clone(source), target, moves })
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
                return unfit(format!("{what}: see that of {:?}", name.as_ref().or(from.as_ref())));
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

impl Part {
    pub(super) fn whole(index: usize, tensor: &Tensor) -> Part {
        Part { tensor: index, ranges: tensor.shape.iter().map(|&len| 0..len).collect(), transpose: false }
    }

    /// Takes one of several equal parts.
    pub(super) fn split(&mut self, split: Split, tensor: &Tensor) -> Result<(), PlanError> {
        let (Split { dim, of, part }, name) = (split, shown(&tensor.name));
        let Some(range) = self.ranges.get_mut(dim) else {
            return unfit(format!("tensor {name:?} of shape {:?} has no dimension {dim}", tensor.shape));
        };
        if part >= of {
            return unfit(format!("tensor {name:?}: there is no part {part} of {of}, the first one is 0"));
        }
        if range.len() % of != 0 {
            let len = range.len();
            return unfit(format!(
                "tensor {name:?}: its dimension {dim} has {len}, which {of} does not divide"
            ));
        }
        let len = range.len() / of;
        *range = range.start + part * len..range.start + (part + 1) * len;
        Ok(())
    }

    /// Its shape, once it is transposed.
    pub(super) fn shape(&self) -> Vec<usize> {
        let shape = self.ranges.iter().map(|range| range.end - range.start);
        if self.transpose { shape.rev().collect() } else { shape.collect() }
    }

    fn elements(&self) -> u128 {
        self.ranges.iter().map(|range| range.len() as u128).product()
    }

    fn meets(&self, other: &Part) -> bool {
        let meet = |(a, b): (&Range<usize>, &Range<usize>)| a.start < b.end && b.start < a.end;
        self.ranges.iter().zip(&other.ranges).all(meet)
    }
}

impl Wanted {
    pub(super) fn whole(index: usize, tensor: &Tensor) -> Wanted {
        Wanted { name: tensor.name.clone(), parts: vec![Part::whole(index, tensor)], dim: 0, cast: None }
    }

    /// Its name, type and shape.
    fn shaped(&self, tensors: &[Tensor]) -> Result<(String, DType, Vec<usize>), PlanError> {
        let Wanted { name, parts, dim, cast } = self;
        let mut shape = parts[0].shape();
        let dtype = cast.unwrap_or(tensors[parts[0].tensor].dtype);
        for part in parts {
            let of = &tensors[part.tensor];
            let is_same = of.dtype.canonical() == dtype.canonical();
            if !is_same && cast.is_none() {
                let what = format!("{:?} is {}, and its first part {dtype}", shown(&of.name), of.dtype);
                return unfit(format!("tensor {name:?}: {what}: say with \"cast\" what it shall be"));
            }
            if !is_same && conversion(of.dtype, dtype).is_none() {
                let what =
                    format!("tensor {:?} is {}, which cannot be cast to {dtype}", shown(&of.name), of.dtype);
                return unfit(format!("{what} without loss, or as the model rounds"));
            }
            if parts.len() > 1 && dtype.size_bytes().is_none() {
                return unfit(format!(
                    "tensor {:?} of {dtype} cannot be part of another one",
                    shown(&of.name)
                ));
            }
        }
        for part in &parts[1..] {
            let next = part.shape();
            let fits = |at: usize| at == *dim || shape[at] == next[at];
            if next.len() != shape.len() || *dim >= shape.len() || !(0..shape.len()).all(fits) {
                let of = shown(&tensors[part.tensor].name);
                let what = format!("{of:?} with {next:?} does not follow {shape:?} in dimension {dim}");
                return unfit(format!("tensor {name:?}: {what}"));
            }
            shape[*dim] += next[*dim];
        }
        Ok((name.clone(), dtype, shape))
    }
}

/// Each byte of the model is in the view, once.
fn check_all(tensors: &[Tensor], wanted: &[Wanted]) -> Result<(), PlanError> {
    let mut read: Vec<Vec<&Part>> = vec![Vec::new(); tensors.len()];
    wanted.iter().flat_map(|of| &of.parts).for_each(|part| read[part.tensor].push(part));
    for (tensor, parts) in tensors.iter().zip(&read) {
        let overlaps = (1..parts.len()).any(|at| parts[..at].iter().any(|other| other.meets(parts[at])));
        if overlaps {
            return unfit(format!(
                "the plan overlaps: it has parts of tensor {:?} twice",
                shown(&tensor.name)
            ));
        }
        let elements: u128 = tensor.shape.iter().map(|&len| len as u128).product();
        if parts.iter().map(|part| part.elements()).sum::<u128>() < elements {
            let what = "which \"all\" demands";
            return unfit(format!("the plan leaves out parts of tensor {:?}, {what}", shown(&tensor.name)));
        }
    }
    Ok(())
}
