//! Parts of a model's tensors, and the tensors of a view that they make.

use std::ops::Range;

use serde::Deserialize;

use crate::formats::named::conversion;
use crate::vocabulary::layout::{DType, LayoutError, Tensor, shown};

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

    pub(super) fn elements(&self) -> u128 {
        self.ranges.iter().map(|range| range.len() as u128).product()
    }

    pub(super) fn meets(&self, other: &Part) -> bool {
        let meet = |(a, b): (&Range<usize>, &Range<usize>)| a.start < b.end && b.start < a.end;
        self.ranges.iter().zip(&other.ranges).all(meet)
    }
}

impl Wanted {
    pub(super) fn whole(index: usize, tensor: &Tensor) -> Wanted {
        Wanted { name: tensor.name.clone(), parts: vec![Part::whole(index, tensor)], dim: 0, cast: None }
    }

    /// Its name, type and shape.
    pub(super) fn shaped(&self, tensors: &[Tensor]) -> Result<(String, DType, Vec<usize>), PlanError> {
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
