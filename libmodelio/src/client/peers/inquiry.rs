//! The client's questions to the registry. It asks when a shard has reported a move, or when shards are out of reach.

use std::time::Instant;

use crate::vocabulary::ids::Epoch;
use crate::wire::Moved;

/// Why a connection ends over which a shard has reported a move.
pub(in crate::client) const IN_QUESTION: &str =
    "the registry is asked whether the model has moved, as the shard says";

/// A move that a shard has reported, and that the registry has not confirmed yet.
pub(in crate::client) struct Unconfirmed {
    pub(in crate::client) moved: Moved,
    pub(in crate::client) since: Instant,
    /// Whether the coordinator was reached at the old place.
    pub(in crate::client) met: bool,
}

/// The state of the questions to the registry.
#[derive(Default)]
pub(in crate::client) struct Inquiry {
    pub(in crate::client) under_way: bool,
    /// The number of questions since all shards were last in reach.
    pub(in crate::client) tries: u32,
    /// The time of the next question.
    pub(in crate::client) next: Option<Instant>,
    /// A reported move that waits for confirmation, and the shard that reported it.
    pub(in crate::client) report: Option<(Moved, String)>,
    /// The answer of a process at the coordinator's address that knows nothing of the job.
    pub(in crate::client) lost: Option<String>,
    /// How often in a row the registry had another generation of the model.
    pub(in crate::client) other_lives: u32,
    /// The epoch of a reported move that the registry does not know, and until when the registry is not asked about
    /// it again.
    pub(in crate::client) refused: Option<(Epoch, Instant)>,
}
