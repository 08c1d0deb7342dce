//! Views of a model: what a plan makes of each of its versions, as the share of one rank.
//!
//! | module | holds |
//! |---|---|
//! | `names` | patterns of tensors' names |
//! | `part` | parts of tensors, and the tensors that they make |
//! | `hf_llama` | the ready-made plan for models with the names of Llama |
//! | `plan` | the text of a plan, and what its entries mean for a model |
//! | `fill` | the bytes of a view, from those of a version |
//!
//! Pure. The bytes of a version come by a [`Source`].

mod fill;
mod hf_llama;
mod names;
mod part;
mod plan;

pub use fill::{Flat, Source, Tile, fill, inverse, reads};
pub use part::PlanError;
pub use plan::{MAX_PLAN, Share, ViewPlan};

#[cfg(test)]
mod tests;
