//! What a client asks the registry when a shard has said that the model has moved, or shards are out of reach.

use std::time::Instant;

use crate::vocabulary::ids::Epoch;
use crate::wire::Moved;

/// Why a connection ends over which a shard has said that the model has moved.
pub(super) const IN_QUESTION: &str = "the registry is asked whether the model has moved, as the shard says";

/// A shard has said that the model is where it is now, and the registry has not said so yet.
pub(super) struct Unconfirmed {
    pub(super) moved: Moved,
    pub(super) since: Instant,
    /// Whether the coordinator was met where the model was before.
    pub(super) met: bool,
}

/// What is asked of the registry.
#[derive(Default)]
pub(super) struct Inquiry {
    pub(super) under_way: bool,
    /// Questions since all shards were last there.
    pub(super) tries: u32,
    /// The next one.
    pub(super) next: Option<Instant>,
    /// What a shard has said that is to be confirmed, and which shard that was.
    pub(super) word: Option<(Moved, String)>,
    /// What the process at the coordinator's address has said when it knew nothing of the job that it coordinated.
    pub(super) lost: Option<String>,
    /// How often in a row the registry had another life of the name.
    pub(super) other_lives: u32,
    /// The epoch of what a shard has said that the registry knows nothing of, and until when it is not asked of it again.
    pub(super) refused: Option<(Epoch, Instant)>,
}
