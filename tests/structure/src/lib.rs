//! Rules about the structure of the product's sources. They say how many fields a struct may have, and where an `impl`
//! may stand. No files import each other in a circle, and no files of one type call each other so. What only tests
//! compile is left out.

pub mod calls;
pub mod circles;
pub mod fields;
pub mod impls;
pub mod sources;
