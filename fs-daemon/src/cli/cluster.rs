//! The commands of a cluster: a registry, shards, the models on them, and mounts of those.

use clap::Subcommand;

use crate::config::cluster::{
    CreateArgs, DeleteArgs, DrainArgs, MountArgs, RegistryArgs, SaveArgs, ShardArgs, StatusArgs,
};
use crate::config::snapshots::{SnapshotArgs, SnapshotsArgs, VerifyArgs};

/// What to do with a cluster.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Serve the table of shards and models
    #[command(after_help = include_str!("help/registry.txt").trim_end())]
    Registry(RegistryArgs),
    /// Hold and aggregate partitions of models, for mounts on any host
    #[command(after_help = include_str!("help/shard.txt").trim_end())]
    Shard(ShardArgs),
    /// Load a model into shards, or make a blank one
    #[command(after_help = include_str!("help/create.txt").trim_end())]
    Create(CreateArgs),
    /// Mount models that shards hold
    #[command(after_help = include_str!("help/mount.txt").trim_end())]
    Mount(MountArgs),
    /// Tell which shards and models there are, or what a mount has, and how they are
    #[command(after_help = include_str!("help/status.txt").trim_end())]
    Status(StatusArgs),
    /// Save a snapshot of a job, while it runs
    #[command(after_help = include_str!("help/save.txt").trim_end())]
    Save(SaveArgs),
    /// Have the shards of a job write a snapshot into a directory or an object store, while it runs
    #[command(after_help = include_str!("help/snapshot.txt").trim_end())]
    Snapshot(SnapshotArgs),
    /// List the snapshots of a store, or export one
    #[command(after_help = include_str!("help/snapshots.txt").trim_end())]
    Snapshots(SnapshotsArgs),
    /// Read all of a snapshot, and compare it with its checksums
    #[command(after_help = include_str!("help/verify.txt").trim_end())]
    Verify(VerifyArgs),
    /// Delete a model from its shards
    #[command(after_help = include_str!("help/delete.txt").trim_end())]
    Delete(DeleteArgs),
    /// Move all that a shard has to other shards, and give it no more; or take that back
    #[command(after_help = include_str!("help/drain.txt").trim_end())]
    Drain(DrainArgs),
}

#[cfg(test)]
mod tests;
