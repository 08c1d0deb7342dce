//! The command line of a cluster: a registry, shards, the models on them, and mounts of those.
//!
//! Each command has its arguments here, and becomes a checked configuration by `config`. They are offered once they
//! are variants of [`super::Command`], one by one or all of them by a flattened [`ClusterCommand`].

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand, ValueHint};

use super::rdma::{RdmaArgs, RdmaListenArgs};
use super::{BackgroundArgs, JobArgs, element_types, layers};
use crate::config::Layer;
use crate::config::cluster::{
    CLUSTER, CreateConfig, DeleteConfig, DrainConfig, IOS, MountConfig, RegistryConfig, ShardConfig,
    StatusConfig, TRANSPORTS,
};
use crate::error::Error;

const REGISTRY_EXAMPLES: &str = "\
Examples:
  On the host node1; ADDR of the others is then node1 (the port, 7070, can be left out):
    gradfs registry --listen 0.0.0.0

The registry is a small table of shards and models; no data goes through it. For a single shard
none is needed: gradfs shard without --registry, or with its own address there, serves it itself.";

const SHARD_EXAMPLES: &str = "\
Examples:
  One shard that is its own registry:
    gradfs shard --listen 10.0.0.1

  The same in the background; it returns when the shard answers:
    gradfs shard --background --listen 10.0.0.1

  One more, on another host; nothing else has to be told of it:
    gradfs shard --listen 0.0.0.0 --advertise node2 --registry 10.0.0.1

  Only with RDMA, over one of two devices; without --rdma it is used where there is a device:
    gradfs shard --listen 10.0.0.1 --rdma on --rdma-device mlx5_1

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

Without --registry and GRADFS_REGISTRY, the registry on this host is asked.

Settings can be changed while the job runs, through any mount:
    echo 0.01 > /mnt/job/llama/control/learning_rate";

const MOUNT_EXAMPLES: &str = "\
Examples:
  All models of the registry:
    gradfs mount /mnt/job --registry node1

  Two of them, over TCP even to shards on this host:
    gradfs mount /mnt/job llama value --registry node1 --transport tcp

  By RDMA, or not at all:
    gradfs mount /mnt/job --registry node1 --transport rdma --rdma-device mlx5_0

  In the background, with the registry in the environment; it returns when the mount answers:
    GRADFS_REGISTRY=node1 gradfs mount --background /mnt/job

Its end is that of any mount: gradfs unmount /mnt/job";

const STATUS_EXAMPLES: &str = "\
Examples:
  Shards and models of a registry:
    gradfs status --registry node1

  For a program:
    gradfs status --registry node1 --json | jq '.shards[].address'

Without --registry and GRADFS_REGISTRY, the registry on this host is asked. The exit status is 3 while a job
waits for a shard, and once one has failed.";

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

When it succeeds the shard can be stopped, and takes no more models. If it fails, or is interrupted, before
anything has moved, nothing has changed; once something has, the shard takes no more models until --cancel.
While its blocks are brought a job stands still, for half of its control/timeout at most.";

/// What to do with a cluster.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Serve the table of shards and models
    #[command(after_help = REGISTRY_EXAMPLES)]
    Registry(RegistryArgs),
    /// Hold and aggregate partitions of models, for mounts on any host
    #[command(after_help = SHARD_EXAMPLES)]
    Shard(Box<ShardArgs>),
    /// Load a model into shards, or make a blank one
    #[command(after_help = CREATE_EXAMPLES)]
    Create(Box<CreateArgs>),
    /// Mount models that shards hold
    #[command(after_help = MOUNT_EXAMPLES)]
    Mount(Box<MountArgs>),
    /// Tell which shards and models there are, and how they are
    #[command(after_help = STATUS_EXAMPLES)]
    Status(StatusArgs),
    /// Delete a model from its shards
    #[command(after_help = DELETE_EXAMPLES)]
    Delete(DeleteArgs),
    /// Move all that a shard has to other shards, and give it no more; or take that back
    #[command(after_help = DRAIN_EXAMPLES)]
    Drain(DrainArgs),
}

/// What all commands have.
#[derive(Args, Debug, Default)]
struct CommonArgs {
    /// Where the registry is; the port, 7070, can be left out (or GRADFS_REGISTRY)
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::Hostname)]
    registry: Option<String>,
    /// TOML file with the same options as keys, those of other commands too
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
}

impl CommonArgs {
    /// `flags` with those that all have, the environment `variables`, and the file.
    fn layers(self, mut flags: Layer, variables: impl IntoIterator<Item = (OsString, OsString)>) -> Layers {
        flags.set("registry", self.registry);
        layers(&CLUSTER, flags, self.config, variables)
    }
}

type Layers = Result<Vec<Layer>, Error>;

/// The arguments of `gradfs registry`.
#[derive(Args, Debug, Default)]
pub struct RegistryArgs {
    #[command(flatten)]
    pub background: BackgroundArgs,
    /// Where to listen, as host:port; 0.0.0.0 is all addresses of this host, port 0 any free one
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::Hostname)]
    listen: Option<String>,
    /// TOML file with the same options as keys, those of other commands too
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
}

impl RegistryArgs {
    /// The configuration that these flags, the environment `variables` and the file they name ask for.
    pub fn config(
        self,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<RegistryConfig, Error> {
        let mut flags = CLUSTER.flags();
        flags.set("listen", self.listen);
        RegistryConfig::merge(&layers(&CLUSTER, flags, self.config, variables)?)
    }
}

/// The arguments of `gradfs shard`.
#[derive(Args, Debug, Default)]
pub struct ShardArgs {
    #[command(flatten)]
    pub background: BackgroundArgs,
    /// Where to listen, as host:port; 0.0.0.0 is all addresses of this host, port 0 any free one
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::Hostname)]
    listen: Option<String>,
    /// Where others reach this shard [default: where it listens]
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::Hostname)]
    advertise: Option<String>,
    /// Threads that add contributions up [default: 2]
    #[arg(long, value_name = "N")]
    threads: Option<String>,
    /// How bytes go through sockets [default: auto]
    #[arg(long, value_parser = PossibleValuesParser::new(IOS))]
    io: Option<String>,
    /// Serve metrics for Prometheus here, as host:port; port 0 is any free one [default: none; port 9464]
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::Hostname)]
    metrics: Option<String>,
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    rdma_listen: RdmaListenArgs,
    #[command(flatten)]
    rdma: RdmaArgs,
}

impl ShardArgs {
    /// The configuration that these flags, the environment `variables` and the file they name ask for.
    pub fn config(
        self,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<ShardConfig, Error> {
        let mut flags = CLUSTER.flags();
        for (key, value) in [
            ("listen", self.listen),
            ("advertise", self.advertise),
            ("threads", self.threads),
            ("io", self.io),
            ("metrics", self.metrics),
        ] {
            flags.set(key, value);
        }
        self.rdma_listen.add_to(&mut flags);
        self.rdma.add_to(&mut flags);
        ShardConfig::merge(&self.common.layers(flags, variables)?)
    }
}

/// The arguments of `gradfs create`.
#[derive(Args, Debug, Default)]
pub struct CreateArgs {
    /// What to call the model: its directory in mounts
    name: Option<String>,
    #[command(flatten)]
    common: CommonArgs,

    /// Load it from this safetensors file, or directory of a Hugging Face checkpoint
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Model")]
    model: Option<PathBuf>,
    /// Make it blank, of this size: 1GiB, 1048576
    #[arg(long, value_name = "SIZE", help_heading = "Model")]
    size: Option<String>,
    /// Element type of the blank model [default: f32]
    #[arg(long, value_parser = element_types(), ignore_case = true, help_heading = "Model")]
    dtype: Option<String>,
    /// Shards to stripe it over [default: all that there are]
    #[arg(long, value_name = "N", help_heading = "Model")]
    shards: Option<String>,
    /// Unit of transfer, locking and versioning: a power of two, 64KiB to 4MiB [default: 256KiB]
    #[arg(long, value_name = "SIZE", help_heading = "Model")]
    block_size: Option<String>,

    #[command(flatten)]
    job: JobArgs,
}

impl CreateArgs {
    /// The configuration that these flags, the environment `variables` and the file they name ask for.
    pub fn config(
        self,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<CreateConfig, Error> {
        let mut flags = CLUSTER.flags();
        flags.set("model", self.model);
        for (key, value) in [
            ("name", self.name),
            ("size", self.size),
            ("dtype", self.dtype),
            ("shards", self.shards),
            ("block_size", self.block_size),
        ] {
            flags.set(key, value);
        }
        self.job.add_to(&mut flags);
        CreateConfig::merge(&self.common.layers(flags, variables)?)
    }
}

/// The arguments of `gradfs mount`.
#[derive(Args, Debug, Default)]
pub struct MountArgs {
    /// The empty directory to mount on
    #[arg(value_name = "MOUNTPOINT", value_hint = ValueHint::DirPath)]
    mount: Option<PathBuf>,
    /// Models to show [default: all that the registry has]
    #[arg(value_name = "MODEL")]
    models: Vec<String>,
    #[command(flatten)]
    pub background: BackgroundArgs,
    /// Threads that serve the filesystem [default: 2]
    #[arg(long, value_name = "N")]
    threads: Option<String>,
    /// Let other users use the mount (/etc/fuse.conf may have to permit it)
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          hide_possible_values = true)]
    allow_other: Option<String>,
    /// User that the files belong to, by name or number; learners belong to whoever made them [default: the daemon's]
    #[arg(long, value_name = "USER")]
    uid: Option<String>,
    /// Group that the files belong to, by name or number [default: the daemon's]
    #[arg(long, value_name = "GROUP")]
    gid: Option<String>,
    /// Permissions that files lack, in octal: 007 lets the group write and make learners, 0 everybody [default: only
    /// the owner writes]
    #[arg(long, value_name = "OCTAL")]
    umask: Option<String>,
    /// Serve reads through the daemon even where the kernel could bypass it
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          hide_possible_values = true)]
    no_passthrough: Option<String>,
    /// Which way bytes go to shards; auto is shm to those on this host, and rdma, where both ends have it, or
    /// tcp to others [default: auto]
    #[arg(long, value_parser = PossibleValuesParser::new(TRANSPORTS))]
    transport: Option<String>,
    /// Connections for blocks to each shard, 1 to 16; with RDMA, queue pairs [default: 2]
    #[arg(long, value_name = "N")]
    connections: Option<String>,
    /// How bytes go through sockets [default: auto]
    #[arg(long, value_parser = PossibleValuesParser::new(IOS))]
    io: Option<String>,
    /// Serve metrics for Prometheus here, as host:port; port 0 is any free one [default: none; port 9464]
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::Hostname)]
    metrics: Option<String>,
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    rdma: RdmaArgs,
}

impl MountArgs {
    /// The configuration that these flags, the environment `variables` and the file they name ask for.
    pub fn config(
        self,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<MountConfig, Error> {
        let mut flags = CLUSTER.flags();
        flags.set("mount", self.mount);
        flags.set("models", self.models);
        for (key, value) in [
            ("threads", self.threads),
            ("allow_other", self.allow_other),
            ("uid", self.uid),
            ("gid", self.gid),
            ("umask", self.umask),
            ("no_passthrough", self.no_passthrough),
            ("transport", self.transport),
            ("connections", self.connections),
            ("io", self.io),
            ("metrics", self.metrics),
        ] {
            flags.set(key, value);
        }
        self.rdma.add_to(&mut flags);
        MountConfig::merge(&self.common.layers(flags, variables)?)
    }
}

/// The arguments of `gradfs status`.
#[derive(Args, Debug, Default)]
pub struct StatusArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    common: CommonArgs,
}

impl StatusArgs {
    /// The configuration that these flags, the environment `variables` and the file they name ask for.
    pub fn config(
        self,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<StatusConfig, Error> {
        StatusConfig::merge(&self.common.layers(CLUSTER.flags(), variables)?, self.json)
    }
}

/// The arguments of `gradfs delete`.
#[derive(Args, Debug, Default)]
pub struct DeleteArgs {
    /// The model
    name: String,
    #[command(flatten)]
    common: CommonArgs,
}

impl DeleteArgs {
    /// The configuration that these flags, the environment `variables` and the file they name ask for.
    pub fn config(
        self,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<DeleteConfig, Error> {
        DeleteConfig::merge(&self.name, &self.common.layers(CLUSTER.flags(), variables)?)
    }
}

/// The arguments of `gradfs drain`.
#[derive(Args, Debug, Default)]
pub struct DrainArgs {
    /// The shard, as gradfs status lists it: its number, or host:port
    #[arg(value_hint = ValueHint::Hostname)]
    shard: String,
    /// Seconds after which it is given up; a model that has not moved by then stays where it is
    #[arg(long, value_name = "SECONDS", default_value = "600")]
    timeout: String,
    /// Seconds for which a job may stand still meanwhile [default: half of the model's control/timeout]
    #[arg(long, value_name = "SECONDS")]
    hold: Option<String>,
    /// Stop draining it: what moves is stopped, and the shard takes models again
    #[arg(long, conflicts_with_all = ["timeout", "hold"])]
    cancel: bool,
    #[command(flatten)]
    common: CommonArgs,
}

impl DrainArgs {
    /// The configuration that these flags, the environment `variables` and the file they name ask for.
    pub fn config(
        self,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<DrainConfig, Error> {
        let layers = self.common.layers(CLUSTER.flags(), variables)?;
        DrainConfig::merge(&self.shard, &self.timeout, self.hold.as_deref(), self.cancel, &layers)
    }
}

#[cfg(test)]
mod tests;
