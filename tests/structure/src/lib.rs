//! Rules about the structure of the product's sources: how many fields a struct may have, where an `impl` may stand, and
//! that no files import each other in a circle. What only tests compile is left out.

pub mod circles;
pub mod fields;
pub mod impls;
pub mod sources;
