//! Views of a model: what a plan makes of each of its versions, as the share of one rank.
//!
//! | module | holds |
//! |---|---|
//! | `plan` | the text of a plan, and what its entries mean for a model |
//! | `names` | patterns of tensors' names |
//! | `hf_llama` | the ready-made plan for models with the names of Llama |
//! | `fill` | the bytes of a view, from those of a version |
//!
//! Pure. The bytes of a version come by a [`Source`].

mod fill;
mod hf_llama;
mod names;
mod plan;

pub use fill::{Flat, Source, fill, reads};
pub use plan::{MAX_PLAN, PlanError, ViewPlan};

#[cfg(test)]
mod tests;
