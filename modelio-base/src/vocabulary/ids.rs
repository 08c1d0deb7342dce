//! The identifiers of gradfs, one type each, so that a block is never taken for a shard.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// Index of a fixed-size piece of the model's flat byte range.
    BlockId(u32)
);
id!(
    /// A parameter-server process (or thread group) that owns a set of blocks.
    ShardId(u16)
);
id!(
    /// One training process, unique within the life of a job; a name that rejoins keeps no number.
    LearnerId(u32)
);
id!(
    /// One reader of a job. Its number may be another reader's once it has gone.
    ReaderId(u32)
);
id!(
    /// One life of a learner name: a learner that returns has a new incarnation.
    Incarnation(u32)
);
id!(
    /// A complete, immutable state of the model. Version 0 is the loaded model.
    Version(u64)
);
id!(
    /// A learner's step: its first contribution is step 1.
    Step(u64)
);
id!(
    /// Generation of a block map; a newer one fences an older one.
    Epoch(u64)
);
id!(
    /// One life of a process that contributes or reads over a network: a mount's daemon, or a program that
    /// uses the client library. The number is drawn at random when the process starts.
    ClientId(u64)
);
id!(
    /// One piece of work that a model's coordinator gives its shards: adding up, or making a version. A
    /// number is never used twice.
    PlanId(u64)
);
id!(
    /// One life of a model name: a model that is deleted and created again is another model.
    Generation(u64)
);

impl Version {
    /// The version after this one. Peers may name any number: there is none after the last.
    pub fn next(self) -> Version {
        Version(self.0.saturating_add(1))
    }
}

impl Step {
    /// The step after this one; as for versions.
    pub fn next(self) -> Step {
        Step(self.0.saturating_add(1))
    }
}

impl BlockId {
    /// The number as an index into per-block tables.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
