//! Format 2: a snapshot in a store of objects, which the shards of a model write together.
//!
//! Data lie in *packs*, objects of up to [`PACK_BYTES`] bytes. A *piece* is the data of one kind of one block. The
//! description of a snapshot says in which pack each of its pieces lies, and its hash. A piece that is as it was in the
//! snapshot before is not written again: the description names the pack of then. The description is written last, so what
//! has none is no snapshot.
//!
//! | module | holds |
//! |---|---|
//! | `places` | where pieces lie, and their hashes |
//! | `part` | what one process writes of a snapshot |
//! | `description` | the object without which there is no snapshot |
//! | `reader` | a snapshot in a store as a source |
//! | `fill` | the memory of a partition is filled from one |
//! | `shelf::claims` | whose snapshots a store has |
//! | `shelf::whole` | a snapshot whose data are all in one process |
//! | `shelf` | all snapshots of a store: which there are, and which of them stay |

mod description;
mod fill;
mod part;
mod places;
mod reader;
mod shelf;

pub use description::Description;
pub use fill::Filling;
pub use part::{Pace, Part, Stepping, write_part};
pub use places::{Pack, PieceHash, Place, Places};
pub use reader::PackedReader;
pub(crate) use shelf::now;
pub use shelf::{Keep, Shelf};

/// The most bytes of a pack, if a piece is not longer.
pub(crate) const PACK_BYTES: usize = 64 << 20;

#[cfg(test)]
mod tests;
