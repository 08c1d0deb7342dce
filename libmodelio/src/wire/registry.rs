//! The registry's records of shards and models, and its requests and answers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::bounded::{list, map};
use super::lineage::Lineage;
use crate::vocabulary::controls::Controls;
use crate::vocabulary::ids::{Epoch, Generation, ShardId, Version};
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
    /// The address that it listens on, `host:port`.
    pub address: String,
    /// The machine that it runs on (boot ID and network namespace), so that a client on the same machine
    /// knows.
    pub host: String,
    /// It takes no new models, and its blocks are moving elsewhere.
    pub draining: bool,
    /// The address where it takes connections by RDMA, `host:port`; empty if it does not.
    pub rdma: String,
}

/// A shard that is not listed though it announces itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedShard {
    /// Its record, with the number that it has asked for.
    pub record: ShardRecord,
    /// The refusal.
    pub why: String,
}

/// A model whose blocks are lost, and that is to be restored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostModel {
    /// Its name.
    pub model: String,
    /// The life that it has lost.
    pub generation: Generation,
    /// The shards that do not have its blocks any more.
    pub shards: Vec<ShardId>,
}

/// The models whose blocks are lost, for a shard.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Losses {
    /// These models.
    pub models: Vec<LostModel>,
    /// The shards without which a model that can be restored has lost blocks, and that are not known to be dead.
    pub needed: Vec<ShardRecord>,
    /// The number of living shards before the one that asks.
    pub rank: u32,
}

/// A model, its layout and who owns which block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelRecord {
    /// Its name.
    pub name: String,
    /// The life of that name.
    pub generation: Generation,
    /// Tensors in the order of the layout: name, element type as safetensors spells it, shape.
    #[serde(deserialize_with = "list::<MAX_TENSORS, _, _>")]
    pub tensors: Vec<(String, String, Vec<u64>)>,
    /// `__metadata__` of the file it came from.
    #[serde(deserialize_with = "map::<MAX_METADATA, _>")]
    pub metadata: BTreeMap<String, String>,
    /// Bytes of a block.
    pub block_size: u32,
    /// The epoch of the block map.
    pub epoch: Epoch,
    /// The block map: runs of blocks with their owner, in order.
    pub owners: Vec<(ShardId, u32)>,
    /// The shard that makes the job's decisions.
    pub coordinator: ShardId,
    /// Settings that it was created with.
    pub controls: Controls,
    /// Its blocks are all at their shards.
    pub ready: bool,
    /// The lives that it goes on from.
    pub lineage: Lineage,
}

/// A part of a model that a shard holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldPartition {
    /// The model.
    pub model: String,
    /// The life of the model.
    pub generation: Generation,
    /// The epoch of the block map that the part belongs to.
    pub epoch: Epoch,
}

/// The registry's verdict on a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fate {
    /// The model is there, under this block map.
    Known {
        /// Its epoch.
        epoch: Epoch,
    },
    /// The registry does not know the model. That proves nothing: it may have been started anew.
    Unknown,
    /// The model was deleted.
    Deleted,
    /// The name has another life.
    Taken {
        /// The life of the model.
        generation: Generation,
    },
}

/// A question to the registry, or an order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RegistryRequest {
    /// A shard is there, and says so again before its lease is over. Answered by `Shard`.
    Announce {
        /// The shard's record; its number is the one that it was given before, or 0.
        record: ShardRecord,
        /// Silence after which it is gone, in milliseconds.
        lease_ms: u32,
        /// It holds parts of models under its number, and so keeps it.
        bound: bool,
    },
    /// It goes. Answered by `Done`.
    Withdraw {
        /// The shard.
        shard: ShardId,
    },
    /// A shard is to take no new models. Answered by `Done`.
    Drain {
        /// The shard.
        shard: ShardId,
    },
    /// Asks for the shards. Answered by `Shards`.
    Shards,
    /// Asks for the models. Answered by `Models`.
    Models,
    /// Asks for one model. Answered by `Model` with the record as the payload.
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
        /// The life of the model.
        generation: Generation,
    },
    /// A shard may take models again. Answered by `Done`.
    Undrain {
        /// The shard.
        shard: ShardId,
    },
    /// Asks for the fate of the parts that a shard holds. Answered by `Fates`.
    Holding {
        /// The shard that asks.
        shard: ShardId,
        /// Its parts.
        #[serde(deserialize_with = "list::<MAX_HELD, _, _>")]
        held: Vec<HeldPartition>,
        /// Deleted models that the shard still remembers: the newest ones.
        #[serde(deserialize_with = "list::<MAX_HELD, _, _>")]
        deleted: Vec<(String, Generation)>,
    },
    /// A model that is there, as the payload, by a shard that holds a part of it: for a registry that was started
    /// anew. Answered by `Done`.
    Restore {
        /// Its shards, as far as they are known; `draining` means nothing here.
        shards: Vec<ShardRecord>,
    },
    /// Asks for the shards that want to be listed and are refused. Answered by `Refused`.
    Refused,
    /// What a model's coordinator needs to be known if blocks are lost. Answered by `Done`.
    Keep {
        /// The model.
        model: String,
        /// The life of the model.
        generation: Generation,
        /// The epoch of its block map.
        epoch: Epoch,
        /// Versions have numbers below this one. A smaller one than is known changes nothing.
        reserved: Version,
        /// The store that it is restored from, or nothing.
        store: String,
        /// Whether it then goes on with newer weights, if a mount that lives has some.
        newest: bool,
    },
    /// A model is restored: the record, of a new life, as the payload. The life before counts as deleted. Answered by
    /// `Done`.
    Succeed {
        /// The life before.
        generation: Generation,
        /// The epoch of its block map.
        epoch: Epoch,
    },
    /// Asks for the models whose blocks are lost. Answered by `Losses`.
    Lost {
        /// The shard that asks.
        shard: ShardId,
        /// The models that it has parts of.
        #[serde(deserialize_with = "list::<MAX_HELD, _, _>")]
        held: Vec<Generation>,
        /// Those that it is restoring.
        #[serde(deserialize_with = "list::<MAX_HELD, _, _>")]
        makes: Vec<Generation>,
    },
}

/// The answers of the registry.
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
    /// The request is carried out.
    Done,
    /// To `Holding`.
    Fates {
        /// The shard is to take no new models.
        draining: bool,
        /// The fate of each part, in order.
        fates: Vec<Fate>,
    },
    /// Shards that were refused, as long as they go on asking.
    Refused(Vec<RefusedShard>),
    /// To `Lost`.
    Losses(Losses),
}
