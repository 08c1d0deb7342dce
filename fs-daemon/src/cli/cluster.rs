//! The commands of a cluster: a registry, shards, the models on them, and mounts of those.

use clap::Subcommand;

use super::given::{Given, Variables};
use crate::config::cluster::{
    CLUSTER, CreateArgs, CreateConfig, DeleteArgs, DeleteConfig, DrainArgs, DrainConfig, MountArgs,
    MountConfig, RegistryArgs, RegistryConfig, SaveArgs, SaveConfig, ShardArgs, ShardConfig, StatusArgs,
    StatusConfig,
};
use crate::error::Error;

/// What to do with a cluster.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Serve the table of shards and models
    #[command(after_help = include_str!("help/registry.txt").trim_end())]
    Registry(Given<RegistryArgs>),
    /// Hold and aggregate partitions of models, for mounts on any host
    #[command(after_help = include_str!("help/shard.txt").trim_end())]
    Shard(Given<ShardArgs>),
    /// Load a model into shards, or make a blank one
    #[command(after_help = include_str!("help/create.txt").trim_end())]
    Create(Given<CreateArgs>),
    /// Mount models that shards hold
    #[command(after_help = include_str!("help/mount.txt").trim_end())]
    Mount(Given<MountArgs>),
    /// Tell which shards and models there are, or what a mount has, and how they are
    #[command(after_help = include_str!("help/status.txt").trim_end())]
    Status(Given<StatusArgs>),
    /// Save a snapshot of a job, while it runs
    #[command(after_help = include_str!("help/save.txt").trim_end())]
    Save(Given<SaveArgs>),
    /// Delete a model from its shards
    #[command(after_help = include_str!("help/delete.txt").trim_end())]
    Delete(Given<DeleteArgs>),
    /// Move all that a shard has to other shards, and give it no more; or take that back
    #[command(after_help = include_str!("help/drain.txt").trim_end())]
    Drain(Given<DrainArgs>),
}

impl Given<RegistryArgs> {
    /// The configuration that these flags, the environment `variables` and the file they name ask for.
    pub fn config(self, variables: impl Variables) -> Result<RegistryConfig, Error> {
        RegistryConfig::merge(&self.layers(&CLUSTER, variables)?)
    }
}

impl Given<ShardArgs> {
    /// The configuration that these flags, the environment `variables` and the file they name ask for.
    pub fn config(self, variables: impl Variables) -> Result<ShardConfig, Error> {
        ShardConfig::merge(&self.layers(&CLUSTER, variables)?)
    }
}

impl Given<CreateArgs> {
    /// The configuration that these flags, the environment `variables` and the file they name ask for.
    pub fn config(self, variables: impl Variables) -> Result<CreateConfig, Error> {
        CreateConfig::merge(&self.layers(&CLUSTER, variables)?)
    }
}

impl Given<MountArgs> {
    /// The configuration that these flags, the environment `variables` and the file they name ask for.
    pub fn config(self, variables: impl Variables) -> Result<MountConfig, Error> {
        MountConfig::merge(&self.layers(&CLUSTER, variables)?)
    }
}

impl Given<StatusArgs> {
    /// The configuration that these flags, the environment `variables` and the file they name ask for.
    pub fn config(self, variables: impl Variables) -> Result<StatusConfig, Error> {
        StatusConfig::merge(self.of.as_deref(), &self.layers(&CLUSTER, variables)?, self.json)
    }
}

impl Given<DeleteArgs> {
    /// The configuration that these flags, the environment `variables` and the file they name ask for.
    pub fn config(self, variables: impl Variables) -> Result<DeleteConfig, Error> {
        DeleteConfig::merge(&self.name, &self.layers(&CLUSTER, variables)?)
    }
}

impl Given<SaveArgs> {
    /// The configuration that these flags, the environment `variables` and the file they name ask for.
    pub fn config(self, variables: impl Variables) -> Result<SaveConfig, Error> {
        let layers = self.layers(&CLUSTER, variables)?;
        SaveConfig::merge(&self, &layers)
    }
}

impl Given<DrainArgs> {
    /// The configuration that these flags, the environment `variables` and the file they name ask for.
    pub fn config(self, variables: impl Variables) -> Result<DrainConfig, Error> {
        let layers = self.layers(&CLUSTER, variables)?;
        DrainConfig::merge(&self.shard, &self.timeout, self.hold.as_deref(), self.cancel, &layers)
    }
}

#[cfg(test)]
mod tests;
