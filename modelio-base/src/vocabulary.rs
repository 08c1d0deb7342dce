//! The words of gradfs as types: identities, a model's layout and its blocks, settings and reducers. Plain data; no
//! file, no socket, no thread.

pub mod block_map;
pub mod block_ranges;
pub mod block_slot;
pub mod coding;
pub mod controls;
pub mod dtype;
pub mod frozen;
pub mod groups;
pub mod ids;
pub mod layout;
pub mod members;
pub mod meta;
pub mod norm;
pub mod partly;
pub mod phase;
pub mod ranges;
pub mod readers;
pub mod reducer;
pub mod schedule;
pub mod settings_json;
pub mod shard_error;
pub mod snapshots;
pub mod strided;
pub mod tensor_rules;
pub mod tensor_steps;
pub mod transport_kind;
pub mod weight;
