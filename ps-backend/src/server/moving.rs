//! A model's blocks on their way to other shards, under a new block map, while the job runs.
//!
//! The model's coordinator does it (`mover`, the edge of [`crate::moving`]): it has the shards of the new map take
//! memory, holds the job between two versions, has them fetch what the others keep, hands its own state over, and
//! replaces the record at the registry. That is the moment from which the new map is in force, and nothing can fail any
//! more. Then every shard is told to switch, and clients hear of the new map from whichever shard they speak to. Until
//! then the new partitions (`incoming`) are beside the old ones, and can be dropped. `docs/operate/network.md` has the
//! story.
//!
//! | module | holds |
//! |---|---|
//! | `incoming` | a partition that is to be, and its blocks from other shards |
//! | `incoming_partitions` | all of those, one of each life of a model, and the taking of their memory |
//! | `switching` | a new block map comes into force |
//! | `requests` | what shards ask of each other |
//! | `mover` | the coordinator's end |

mod incoming;
mod incoming_partitions;
mod mover;
mod requests;
mod switching;

pub(super) use incoming_partitions::IncomingPartitions;
pub(super) use mover::move_model;
pub(super) use requests::{between_shards, is_between_shards, kind_of};
pub(super) use switching::switch;
