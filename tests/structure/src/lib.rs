//! Rules about the structure of the product's sources: how many fields a struct may have, where an `impl` may stand, and
//! that no files import each other in a circle, nor those of one type call each other so. What only tests compile is left out.

pub mod calls;
pub mod circles;
pub mod fields;
pub mod impls;
pub mod sources;
