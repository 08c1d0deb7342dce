//! The command line of a cluster: a registry, shards, the models on them, and mounts of those.
//!
//! Each command has its arguments here, and becomes a checked configuration by `config`. They are offered once they
//! are variants of [`super::Command`], one by one or all of them by a flattened [`ClusterCommand`].

use std::path::PathBuf;
use std::sync::LazyLock;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand, ValueHint};
use libmodelio::client::TransportChoice;
use libmodelio::transport::reactor::Choice;
use libmodelio::wire::Checksum;
use strum::VariantNames as _;

use super::given::{Given, Variables, options_of};
use super::rdma::{RdmaArgs, RdmaListenArgs};
use super::{BackgroundArgs, BlankArgs, FromArgs, JobArgs, MountingArgs, StateArgs};
use crate::config::Vocabulary;
use crate::config::cluster::{
    CreateConfig, DeleteConfig, DrainConfig, MountConfig, RegistryConfig, SaveConfig, ShardConfig,
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

/// The vocabulary of the cluster's commands. One file can hold the keys of all commands, and each command
/// takes the keys it knows. So a new host uses the file of the other hosts, and only its `listen` differs.
pub static CLUSTER: LazyLock<Vocabulary> = LazyLock::new(|| {
    let commands = [options_of::<ShardArgs>(), options_of::<CreateArgs>(), options_of::<MountArgs>()];
    Vocabulary::new(commands.into_iter().flatten(), "gradfs COMMAND --help")
});

/// Options of all commands.
#[derive(Args, Debug)]
struct CommonArgs {
    /// Where the registry is; the port, 7070, can be left out (or GRADFS_REGISTRY)
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::Hostname)]
    registry: Option<String>,
    /// TOML file with the same options as keys, those of other commands too
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
}

/// The arguments of `gradfs registry`.
#[derive(Args, Debug)]
pub struct RegistryArgs {
    #[command(flatten)]
    pub background: BackgroundArgs,
    /// Where to listen, as host:port; 0.0.0.0 is all addresses of this host, port 0 any free one
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::Hostname)]
    listen: Option<String>,
    /// Let everybody who reaches the address of --listen read, change and delete the models, from other hosts, too: there
    /// is no authentication
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    insecure: Option<String>,
    /// TOML file with the same options as keys, those of other commands too
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
}

/// The arguments of `gradfs shard`.
#[derive(Args, Debug)]
pub struct ShardArgs {
    #[command(flatten)]
    pub background: BackgroundArgs,
    /// Where to listen, as host:port; 0.0.0.0 is all addresses of this host, port 0 any free one
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::Hostname)]
    listen: Option<String>,
    /// Let everybody who reaches the address of --listen read, change and delete the models, from other hosts, too: there
    /// is no authentication
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    insecure: Option<String>,
    /// Where others reach this shard [default: where it listens]
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::Hostname)]
    advertise: Option<String>,
    /// Threads that add contributions up [default: 2]
    #[arg(long, value_name = "N")]
    threads: Option<String>,
    #[command(flatten)]
    state: StateArgs,
    /// How bytes go through sockets [default: auto]
    #[arg(long, value_parser = PossibleValuesParser::new(Choice::VARIANTS))]
    io: Option<String>,
    /// Whether blocks that are sent over TCP have a checksum; off for a network that checks by itself. Each end decides
    /// for what it sends [default: on]
    #[arg(long, value_parser = PossibleValuesParser::new(Checksum::VARIANTS))]
    checksum: Option<String>,
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

/// The arguments of `gradfs create`.
#[derive(Args, Debug)]
pub struct CreateArgs {
    /// What to call the model: its directory in mounts
    name: Option<String>,
    #[command(flatten)]
    common: CommonArgs,

    /// Load it from this safetensors file, or directory of a Hugging Face checkpoint
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Model")]
    model: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Model")]
    blank: BlankArgs,
    #[command(flatten, next_help_heading = "Model")]
    snapshot: FromArgs,
    /// Shards to stripe it over, the least loaded first [default: all that have room for their part]
    #[arg(long, value_name = "N")]
    shards: Option<String>,

    #[command(flatten)]
    job: JobArgs,
}

/// The arguments of `gradfs mount`.
#[derive(Args, Debug)]
pub struct MountArgs {
    /// The empty directory to mount on
    #[arg(value_name = "MOUNTPOINT", value_hint = ValueHint::DirPath)]
    mount: Option<PathBuf>,
    /// Models to show [default: all that the registry has]
    #[arg(value_name = "MODEL")]
    models: Vec<String>,
    #[command(flatten)]
    pub background: BackgroundArgs,
    #[command(flatten)]
    mounting: MountingArgs,
    /// Which way bytes go to shards; auto is shm to those on this host, and rdma, where both ends have it, or
    /// tcp to others [default: auto]
    #[arg(long, value_parser = PossibleValuesParser::new(TransportChoice::VARIANTS))]
    transport: Option<String>,
    /// Connections for blocks to each shard, 1 to 16; with RDMA, queue pairs [default: 2]
    #[arg(long, value_name = "N")]
    connections: Option<String>,
    /// How bytes go through sockets [default: auto]
    #[arg(long, value_parser = PossibleValuesParser::new(Choice::VARIANTS))]
    io: Option<String>,
    /// Whether blocks that are sent over TCP have a checksum; off for a network that checks by itself. Each end decides
    /// for what it sends [default: on]
    #[arg(long, value_parser = PossibleValuesParser::new(Checksum::VARIANTS))]
    checksum: Option<String>,
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    rdma: RdmaArgs,
}

/// The arguments of `gradfs status`.
#[derive(Args, Debug)]
pub struct StatusArgs {
    /// Only this: a mount, the directory of a model in it, or a model's name in the registry
    #[arg(value_name = "PATH|NAME", value_hint = ValueHint::DirPath)]
    of: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    common: CommonArgs,
}

/// The arguments of `gradfs save`.
#[derive(Args, Debug)]
pub struct SaveArgs {
    /// The model: its directory in a mount, or its name in the registry
    #[arg(value_name = "MOUNT/NAME", value_hint = ValueHint::DirPath)]
    model: PathBuf,
    /// The directory to write; made if it is not there
    #[arg(value_hint = ValueHint::DirPath)]
    dir: PathBuf,
    /// Put the snapshot in the place of the one that is there, and of all files with names as a snapshot's
    #[arg(long)]
    replace: bool,
    /// Most bytes of tensors in one file of the model
    #[arg(long, value_name = "SIZE", default_value = "5000000000")]
    piece_size: String,
    #[command(flatten)]
    common: CommonArgs,
}

/// The arguments of `gradfs delete`.
#[derive(Args, Debug)]
pub struct DeleteArgs {
    /// The model
    name: String,
    #[command(flatten)]
    common: CommonArgs,
}

/// The arguments of `gradfs drain`.
#[derive(Args, Debug)]
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
        SaveConfig::merge(&self.model, &self.dir, &self.piece_size, self.replace, &layers)
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
