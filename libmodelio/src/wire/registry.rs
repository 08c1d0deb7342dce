//! What a registry knows, and how it is asked: which shards there are, and which models.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::bounded::{list, map};
use crate::vocabulary::controls::Controls;
use crate::vocabulary::ids::{Epoch, Generation, ShardId};
use crate::vocabulary::layout::MAX_TENSORS;

/// Most entries of a record's metadata.
pub const MAX_METADATA: usize = 64 << 10;
/// Most parts, and most deleted models, that a shard tells of at once.
pub const MAX_HELD: usize = 1024;

/// A shard that has announced itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardRecord {
    /// Its number, as long as it announces itself from the same address.
    pub shard: ShardId,
    /// Where it listens, `host:port`.
    pub address: String,
    /// Which machine it runs on (boot ID and network namespace), so that a client on the same one knows.
    pub host: String,
    /// It takes no new models, and its blocks are moving elsewhere.
    pub draining: bool,
    /// Where it takes connections by RDMA, `host:port`; empty if it does not.
    pub rdma: String,
}

/// A shard that is not listed though it announces itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedShard {
    /// Its record, with the number that it has asked for.
    pub record: ShardRecord,
    /// What it was answered.
    pub why: String,
}

/// A model, its layout and who owns which block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelRecord {
    /// Its name.
    pub name: String,
    /// Which life of that name.
    pub generation: Generation,
    /// Tensors in the order of the layout: name, element type as safetensors spells it, shape.
    #[serde(deserialize_with = "list::<MAX_TENSORS, _, _>")]
    pub tensors: Vec<(String, String, Vec<u64>)>,
    /// `__metadata__` of the file it came from.
    #[serde(deserialize_with = "map::<MAX_METADATA, _>")]
    pub metadata: BTreeMap<String, String>,
    /// Bytes of a block.
    pub block_size: u32,
    /// Of the block map.
    pub epoch: Epoch,
    /// The block map: runs of blocks with their owner, in order.
    pub owners: Vec<(ShardId, u32)>,
    /// The shard that makes the job's decisions.
    pub coordinator: ShardId,
    /// Settings that it was created with.
    pub controls: Controls,
    /// Its blocks are all at their shards.
    pub ready: bool,
}

/// A part of a model that a shard holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// The model.
    pub model: String,
    /// Which life of it.
    pub generation: Generation,
    /// Of the block map that the part is of.
    pub epoch: Epoch,
}

/// What the registry knows of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fate {
    /// The model is there, under this block map.
    Known {
        /// Its epoch.
        epoch: Epoch,
    },
    /// The registry has not heard of it. That says nothing: it may have been started anew.
    Unknown,
    /// It was deleted.
    Deleted,
    /// The name has another life.
    Taken {
        /// Which.
        generation: Generation,
    },
}

/// A question to the registry, or an order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RegistryRequest {
    /// A shard is there, and says so again before its lease is over. Answered by `Shard`.
    Announce {
        /// Its record; the number is what it was told before, or 0.
        record: ShardRecord,
        /// Silence after which it is gone, in milliseconds.
        lease_ms: u32,
        /// It holds parts of models under its number, and so keeps it.
        bound: bool,
    },
    /// It goes. Answered by `Done`.
    Withdraw {
        /// Which.
        shard: ShardId,
    },
    /// A shard is to take no new models. Answered by `Done`.
    Drain {
        /// Which.
        shard: ShardId,
    },
    /// Which shards are there? Answered by `Shards`.
    Shards,
    /// Which models are there? Answered by `Models`.
    Models,
    /// What is this one? Answered by `Model` with the record as the payload.
    Model {
        /// Its name.
        name: String,
    },
    /// A new model, or the new state of one, as the payload. Answered by `Done`.
    Put {
        /// The epoch of the record that it replaces; `None` if there must not be one of that name.
        replaces: Option<Epoch>,
    },
    /// Forget a model. Answered by `Done`.
    Delete {
        /// Its name.
        name: String,
        /// Which life of it.
        generation: Generation,
    },
    /// A shard may take models again. Answered by `Done`.
    Undrain {
        /// Which.
        shard: ShardId,
    },
    /// What a shard holds: what becomes of it? Answered by `Fates`.
    Holding {
        /// Who asks.
        shard: ShardId,
        /// Its parts.
        #[serde(deserialize_with = "list::<MAX_HELD, _, _>")]
        held: Vec<Held>,
        /// Models that it was told to forget: the newest ones.
        #[serde(deserialize_with = "list::<MAX_HELD, _, _>")]
        deleted: Vec<(String, Generation)>,
    },
    /// A model that is there, as the payload, by a shard that holds a part of it: for a registry that was started
    /// anew. Answered by `Done`.
    Restore {
        /// Its shards, as far as they are known; `draining` means nothing here.
        shards: Vec<ShardRecord>,
    },
    /// Which shards ask to be listed and are refused? Answered by `Refused`.
    Refused,
}

/// What the registry answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RegistryAnswer {
    /// The shard's number.
    Shard(ShardId),
    /// All shards whose lease is not over.
    Shards(Vec<ShardRecord>),
    /// Names, by the alphabet.
    Models(Vec<String>),
    /// The payload is a [`ModelRecord`].
    Model,
    /// It is done.
    Done,
    /// To `Holding`.
    Fates {
        /// The shard is to take no new models.
        draining: bool,
        /// Of each part, in order.
        fates: Vec<Fate>,
    },
    /// Shards that were refused, as long as they go on asking.
    Refused(Vec<RefusedShard>),
}
