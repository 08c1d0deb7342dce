//! The commands of a cluster: a registry, shards, the models on them, and mounts of those.

use clap::Subcommand;

use super::given::{Given, Variables};
use crate::config::cluster::{
    CLUSTER, CreateArgs, CreateConfig, DeleteArgs, DeleteConfig, DrainArgs, DrainConfig, MountArgs,
    MountConfig, RegistryArgs, RegistryConfig, SaveArgs, SaveConfig, ShardArgs, ShardConfig, StatusArgs,
    StatusConfig,
};
use crate::error::Error;

const REGISTRY_EXAMPLES: &str = "\
Examples:
  On the host node1; ADDR of the others is then node1 (the port, 7070, can be left out):
    gradfs registry --listen 0.0.0.0 --insecure

The registry is a small table of shards and models; no data goes through it. For a single shard \
none is needed: gradfs shard without --registry, or with its own address there, serves it itself.";

const SHARD_EXAMPLES: &str = "\
Examples:
  One shard that is its own registry:
    gradfs shard --listen 10.0.0.1 --insecure

  The same in the background; it returns when the shard answers:
    gradfs shard --background --listen 10.0.0.1 --insecure

  One more, on another host; nothing else has to be configured for it:
    gradfs shard --listen 0.0.0.0 --insecure --advertise node2 --registry 10.0.0.1

  Only with RDMA, over one of two devices; without --rdma it is used where there is a device:
    gradfs shard --listen 10.0.0.1 --insecure --rdma on --rdma-device mlx5_1

  The same on every host, with a file and the host's own name; the one that the file names is the registry:
    printf 'registry = \"node1\"\\nlisten = \"0.0.0.0\"\\nthreads = 8\\n' > cluster.toml
    gradfs shard --config cluster.toml --advertise \"$(hostname -f)\"";

const CREATE_EXAMPLES: &str = "\
Examples:
  A model of a file, over all shards, for eight learners:
    gradfs create llama --model llama.safetensors --registry node1 --learners 8 --reducer adamw

  A blank one of 16 GiB of bf16 over four shards:
    export GRADFS_REGISTRY=node1
    gradfs create blank --size 16GiB --dtype bf16 --shards 4 --reducer sum

  One that goes on from a snapshot (gradfs save --help), whatever the number of its shards was:
    gradfs create llama --from /backup/llama --shards 3 --registry node1

Without --registry and GRADFS_REGISTRY, the registry on this host is asked.

Settings can be changed while the job runs, through any mount:
    echo 0.01 > /mnt/job/llama/control/learning_rate";

const MOUNT_EXAMPLES: &str = "\
Examples:
  All models of the registry:
    gradfs mount /mnt/job --registry node1

  Two of them, over TCP even to shards on this host:
    gradfs mount /mnt/job llama value --registry node1 --transport tcp

  Over TCP on a network that checks by itself; each end decides for what it sends:
    gradfs mount /mnt/job --registry node1 --checksum off

  By RDMA, or not at all:
    gradfs mount /mnt/job --registry node1 --transport rdma --rdma-device mlx5_0

  In the background, with the registry in the environment; it returns when the mount answers:
    GRADFS_REGISTRY=node1 gradfs mount --background /mnt/job

Its end is that of any mount: gradfs unmount /mnt/job";

const STATUS_EXAMPLES: &str = "\
Examples:
  Shards and models of a registry:
    gradfs status --registry node1

  One model: its shards, its learners, and who waits for whom:
    gradfs status llama --registry node1

  What a mount shows, that of gradfs up too; or one of its models:
    gradfs status /mnt/job
    gradfs status /mnt/job/llama

  For a program:
    gradfs status --registry node1 --json | jq '.shards[].address'

Without --registry and GRADFS_REGISTRY, the registry on this host is asked. The exit status is 3 while a job \
waits for a shard, and once one has failed.";

const SAVE_EXAMPLES: &str = "\
Examples:
  A model of a mount, of one process or of shards:
    gradfs save /mnt/job/llama /backup/llama

  The same by its name, from any host that reaches the shards:
    gradfs save llama /backup/llama --registry node1

  In the place of the snapshot that is there:
    gradfs save --replace /mnt/job/llama /backup/llama

  Go on from it, on any number of shards:
    gradfs create llama --from /backup/llama --registry node1

In one process it goes on by gradfs up --from /backup/llama /mnt/job.

The directory gets model.safetensors (in pieces with an index if it is large), optimizer.safetensors with \
tensors named as torch's state, and manifest.json, which takes its place last: until then the directory holds what it held before. \
The job stands still only while its memory is copied.";

const DELETE_EXAMPLES: &str = "\
Examples:
  The model and all that was trained; mounts that show it get errors from then on:
    gradfs delete llama --registry node1";

const DRAIN_EXAMPLES: &str = "\
Examples:
  A shard is to go: its blocks move to other shards, while the jobs run:
    gradfs drain node2:7070 --registry node1

  The same by its number, for an hour at most; said again, it goes on where it has stopped:
    gradfs drain 2 --registry node1 --timeout 3600

  Over a slow network, for a job whose commits may wait for long (control/timeout):
    gradfs drain 2 --registry node1 --hold 300

  It is to stay after all; what has moved stays where it is:
    gradfs drain --cancel 2 --registry node1

When it succeeds the shard can be stopped, and takes no more models. If it fails, or is interrupted, before \
anything has moved, nothing has changed; once something has, the shard takes no more models until --cancel. \
While its blocks are brought a job stands still, for half of its control/timeout at most.";

/// What to do with a cluster.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Serve the table of shards and models
    #[command(after_help = REGISTRY_EXAMPLES)]
    Registry(Given<RegistryArgs>),
    /// Hold and aggregate partitions of models, for mounts on any host
    #[command(after_help = SHARD_EXAMPLES)]
    Shard(Given<ShardArgs>),
    /// Load a model into shards, or make a blank one
    #[command(after_help = CREATE_EXAMPLES)]
    Create(Given<CreateArgs>),
    /// Mount models that shards hold
    #[command(after_help = MOUNT_EXAMPLES)]
    Mount(Given<MountArgs>),
    /// Tell which shards and models there are, or what a mount has, and how they are
    #[command(after_help = STATUS_EXAMPLES)]
    Status(Given<StatusArgs>),
    /// Save a snapshot of a job, while it runs
    #[command(after_help = SAVE_EXAMPLES)]
    Save(Given<SaveArgs>),
    /// Delete a model from its shards
    #[command(after_help = DELETE_EXAMPLES)]
    Delete(Given<DeleteArgs>),
    /// Move all that a shard has to other shards, and give it no more; or take that back
    #[command(after_help = DRAIN_EXAMPLES)]
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
