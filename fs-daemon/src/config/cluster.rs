//! The configuration of a cluster's commands, merged from flags, environment and file, and checked.
//!
//! The commands have one vocabulary. One file can hold the keys of all commands, and each command takes the
//! keys it knows. So a new host uses the file of the other hosts, and only its `listen` differs.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use clap::{ArgAction, Args, Subcommand, ValueHint};
use libmodelio::client::TransportChoice;
use libmodelio::transport::rdma::RdmaOptions;
use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::controls::Controls;
use libmodelio::wire::Checksum;
use ps_backend::device::DeviceName;
use ps_backend::server::RdmaUse;
use ps_backend::state_copies::StateCopies;
use strum::VariantNames;

use super::endpoint::{DEFAULT_PORT, Endpoint, METRICS_PORT, RELAY_PORT};
use super::layer::{merged, options_of, strongest};
use super::rdma::{RdmaArgs, RdmaListenArgs};
use super::registry::RegistryAt;
use super::values::{number, size, switch, whole, word};
use super::{
    BackgroundArgs, BlankArgs, FromArgs, Layer, MAX_MODELS, ModelSource, Mounting, Settings, StateArgs,
    Vocabulary, name_fault,
};
use crate::error::Error;
use crate::mountpoint;

/// Most shards that a model can be striped over.
const MAX_SHARDS: u16 = 1024;
const SHARDS: &str = "leave it out to stripe the model over all shards that there are";
/// Most threads that add contributions up.
const MAX_THREADS: usize = 256;
const THREADS: &str = "threads add contributions up; one for each core that the shard may use is most";
const MAX_CONNECTIONS: usize = 16;
const CONNECTIONS: &str = "connections to each shard carry blocks; as many are busy as there are threads";
const MOUNT_USAGE: &str = "name the directory to mount on: gradfs mount /mnt/job --registry node1";
const CREATE_USAGE: &str =
    "load it with --model FILE.safetensors, or make a blank one with --size 1GiB --dtype bf16";
const LISTEN_USAGE: &str =
    "say where to listen: --listen 10.0.0.1:7070, or --listen 0.0.0.0 for all addresses";
const VIA_USAGE: &str = "add --via auto";
const REGISTRY_USAGE: &str =
    "say where the registry is: --registry node1:7070, GRADFS_REGISTRY, or registry in the file";

/// The vocabulary of the cluster's commands. One file can hold the keys of all commands, and each command
/// takes the keys it knows. So a new host uses the file of the other hosts, and only its `listen` differs.
pub static CLUSTER: LazyLock<Vocabulary> = LazyLock::new(|| {
    let commands = [options_of::<ShardArgs>(), options_of::<CreateArgs>(), options_of::<MountArgs>()];
    Vocabulary::new(commands.into_iter().flatten(), "gradfs COMMAND --help")
});

/// Options of all commands.
#[derive(Args, Debug)]
pub struct CommonArgs {
    /// Where the registry is; the port, 7070, can be left out. Or etcd://a:2379,b:2379,c:2379[/PREFIX], where it is in an
    /// etcd; etcds:// for TLS (or GRADFS_REGISTRY)
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::Hostname, value_parser = RegistryAt::parse)]
    registry: Option<RegistryAt>,
    /// TOML file with the same options as keys, those of other commands too
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
}

/// Where a process of a cluster listens.
#[derive(Args, Debug)]
struct ListenArgs {
    /// Where to listen, as host:port; 0.0.0.0 is all addresses of this host, port 0 any free one
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::Hostname, value_parser = |text: &str| Endpoint::parse(text, DEFAULT_PORT))]
    listen: Option<Endpoint>,
    /// Let everybody who reaches the address of --listen read, change and delete the models, from other hosts, too: there
    /// is no authentication
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", hide_default_value = true, action = ArgAction::Set, value_parser = switch)]
    insecure: bool,
}

/// What a registry keeps.
#[derive(Args, Debug)]
struct RegistryStateArgs {
    /// Keep the registry's table in this file, so that it knows shards and models at once when it is restarted; counts
    /// where this process is the registry [default: none]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    registry_state: Option<PathBuf>,
}

/// How blocks go through sockets.
#[derive(Args, Debug)]
struct SocketArgs {
    /// How bytes go through sockets
    #[arg(long, default_value = "auto", value_parser = word::<Choice>(Choice::VARIANTS))]
    io: Choice,
    /// Whether blocks that are sent over TCP have a checksum; off for a network that checks by itself. Each end decides
    /// for what it sends
    #[arg(long, default_value = "on", value_parser = word::<Checksum>(Checksum::VARIANTS))]
    checksum: Checksum,
}

/// The arguments of `gradfs registry`.
#[derive(Args, Debug)]
pub struct RegistryArgs {
    #[command(flatten)]
    pub background: BackgroundArgs,
    #[command(flatten)]
    listen: ListenArgs,
    #[command(flatten)]
    kept: RegistryStateArgs,
    #[command(flatten)]
    common: CommonArgs,
    /// Copy models and what is known of their shards from one registry into another, and end
    #[command(subcommand)]
    pub action: Option<RegistryAction>,
}

/// What to do with registries.
#[derive(Debug, Subcommand)]
pub enum RegistryAction {
    /// Copy all models of one registry into another one
    #[command(after_help = include_str!("../cli/help/registry_copy.txt").trim_end())]
    Copy {
        /// The registry that has them: ADDR, or etcd://...
        #[arg(value_parser = RegistryAt::parse)]
        from: RegistryAt,
        /// The registry that takes them
        #[arg(value_parser = RegistryAt::parse)]
        to: RegistryAt,
    },
}

/// The arguments of `gradfs shard`.
#[derive(Args, Debug)]
pub struct ShardArgs {
    #[command(flatten)]
    pub background: BackgroundArgs,
    #[command(flatten)]
    listen: ListenArgs,
    /// Where others reach this shard [default: where it listens]
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::Hostname)]
    advertise: Option<String>,
    /// Threads that add contributions up
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = whole(1..=MAX_THREADS, THREADS))]
    threads: usize,
    #[command(flatten)]
    of_state: StateArgs,
    #[command(flatten)]
    sockets: SocketArgs,
    /// Serve metrics for Prometheus here, as host:port; port 0 is any free one [default: none; port 9464]
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::Hostname, value_parser = |text: &str| Endpoint::parse(text, METRICS_PORT))]
    metrics: Option<Endpoint>,
    /// Seconds for last snapshots and moves to other shards when the shard is told to end; a second signal ends it
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = whole(0..=MAX_STOP, STOP))]
    stop_timeout: usize,
    /// The most bytes a second that snapshots write into their stores, as 200MiB: other traffic has the rest
    #[arg(long, value_name = "SIZE", value_parser = snapshot_rate)]
    snapshot_rate: Option<u64>,
    #[command(flatten)]
    kept: RegistryStateArgs,
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
    /// Go on with the optimizer's state in this file of torch.save, which is that of the weights of --model. The gradfs
    /// package of python3 reads it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Model")]
    optimizer_state: Option<PathBuf>,
    /// The names of the optimizer's parameters in its order, one a line, if that file does not have them
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "optimizer_state", help_heading = "Model")]
    optimizer_names: Option<PathBuf>,
    /// Shards to stripe it over, the least loaded first [default: all that have room for their part]
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_SHARDS, SHARDS))]
    shards: Option<u16>,

    #[command(flatten)]
    settings: Settings,
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
    /// Hold nothing of the models but views of them (views/NAME), for which only the bytes that they need are read
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", hide_default_value = true, action = ArgAction::Set, value_parser = switch)]
    views_only: bool,
    /// Show only the tensors whose names match, with * and ?, and read only their bytes; may be repeated
    #[arg(long = "tensors", value_name = "PATTERN")]
    tensors_shown: Vec<String>,
    #[command(flatten)]
    pub background: BackgroundArgs,
    #[command(flatten)]
    mounting: Mounting,
    /// Which way bytes go to shards; auto is shm to those on this host, and rdma, where both ends have it, or
    /// tcp to others
    #[arg(long, default_value = "auto", value_parser = word::<TransportChoice>(TransportChoice::VARIANTS))]
    transport: TransportChoice,
    /// Connections for blocks to each shard, 1 to 16; with RDMA, queue pairs
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = whole(1..=MAX_CONNECTIONS, CONNECTIONS))]
    connections: usize,
    /// Pull versions from other mounts in place of shards: auto for those that the model's coordinator names, which pull
    /// from this one in turn; or by the one at an address, with the port of its --via-listen [default: none; port 7071]
    #[arg(long, value_name = "auto|ADDR", value_hint = ValueHint::Hostname, value_parser = via)]
    via: Option<Via>,
    /// Where other mounts pull from this one, as host:port [default with --via auto: a free port of the address by which
    /// it reaches the model's coordinator]
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::Hostname, value_parser = |text: &str| Endpoint::parse(text, RELAY_PORT))]
    via_listen: Option<Endpoint>,
    /// With --via auto: the zone of this host. Mounts of one zone pull from each other where they can
    #[arg(long, value_name = "NAME", value_parser = zone)]
    zone: Option<String>,
    #[command(flatten)]
    sockets: SocketArgs,
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
    pub of: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    common: CommonArgs,
}

/// The longest time for last snapshots.
const MAX_STOP: usize = 24 * 60 * 60;
const STOP: &str = "seconds; what ends the shard may give it less";

/// Bytes a second. With less, a pack of a snapshot takes so long that it looks as if nothing went on.
fn snapshot_rate(text: &str) -> Result<u64, Error> {
    match size(text)? {
        rate @ MIN_RATE.. => Ok(rate),
        _ => Err(Error::usage(format!("{text} a second is too slow")).hint("allow 1MiB or more")),
    }
}

const MIN_RATE: u64 = 1 << 20;

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
    #[arg(long, value_name = "SIZE", default_value = "5000000000", value_parser = piece_size)]
    piece_size: u64,
    #[command(flatten)]
    common: CommonArgs,
}

/// The arguments of `gradfs delete`.
#[derive(Args, Debug)]
pub struct DeleteArgs {
    /// The model
    pub name: String,
    /// Remove its snapshots as well
    #[arg(long)]
    pub snapshots: bool,
    #[command(flatten)]
    common: CommonArgs,
}

/// The arguments of `gradfs drain`.
#[derive(Args, Debug)]
pub struct DrainArgs {
    /// The shard, as gradfs status lists it: its number, or host:port
    #[arg(value_hint = ValueHint::Hostname)]
    pub shard: String,
    /// Seconds after which it is given up; a model that has not moved by then stays where it is
    #[arg(long, value_name = "SECONDS", default_value = "600")]
    pub timeout: String,
    /// Seconds for which a job may stand still meanwhile [default: half of the model's control/timeout]
    #[arg(long, value_name = "SECONDS")]
    pub hold: Option<String>,
    /// Stop draining it: what moves is stopped, and the shard takes models again
    #[arg(long, conflicts_with_all = ["timeout", "hold"])]
    pub cancel: bool,
    #[command(flatten)]
    common: CommonArgs,
}

/// Everything `gradfs registry` needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct RegistryConfig {
    /// The address to listen on.
    pub listen: Endpoint,
    /// That address may be open to other hosts.
    pub insecure: bool,
    /// The etcd that has the table; `None`: it is here.
    pub registry: Option<RegistryAt>,
    /// Where the table is kept for a restart.
    pub state: Option<PathBuf>,
}

/// Everything `gradfs shard` needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardConfig {
    /// The address to listen on.
    pub listen: Endpoint,
    /// That address may be open to other hosts.
    pub insecure: bool,
    /// The address that others reach the shard at. Port 0 stands for the port that it turns out to listen on.
    pub advertise: Endpoint,
    /// The registry; `None`: it serves that itself, where it listens. It does so, too, if names that differ here turn out
    /// to be its own ([`Self::is_the_registry`]).
    pub registry: Option<RegistryAt>,
    /// Where its table is kept for a restart, if it serves that itself.
    pub registry_state: Option<PathBuf>,
    /// The address where metrics are served, if they are.
    pub metrics: Option<Endpoint>,
    /// How long the last snapshots may take.
    pub stop_timeout: Duration,
    /// The most bytes a second that snapshots write.
    pub snapshot_rate: Option<u64>,
    /// Threads that add contributions up, at least one.
    pub threads: usize,
    /// Copies of optimizer state.
    pub state: StateCopies,
    /// The device that computes versions.
    pub device: DeviceName,
    /// How bytes are moved.
    pub io: Choice,
    /// Whether blocks are sent with a checksum.
    pub checksum: Checksum,
    /// Whether the shard takes connections by RDMA.
    pub rdma: RdmaUse,
    /// The port for them; `None` for the number of the TCP port.
    pub rdma_port: Option<u16>,
    /// How RDMA is used.
    pub rdma_options: RdmaOptions,
}

/// Everything `gradfs create` needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct CreateConfig {
    /// The model's name.
    pub name: String,
    /// The source of its first weights.
    pub source: ModelSource,
    /// The registry; this host's registry if none is given.
    pub registry: RegistryAt,
    /// Shards to stripe it over; `None`: all that there are.
    pub shards: Option<u16>,
    /// Bytes of a block: a power of two, 64 KiB to 4 MiB.
    pub block_size: u32,
    /// The job's settings.
    pub controls: Controls,
}

/// Everything `gradfs mount` needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct MountConfig {
    /// How to mount.
    pub mounting: Mounting,
    /// The models to show; none: all that the registry has.
    pub models: Vec<String>,
    /// How much of them.
    pub shows: Shows,
    /// The registry.
    pub registry: RegistryAt,
    /// The way that bytes go.
    pub transport: TransportChoice,
    /// Whether blocks are sent with a checksum.
    pub checksum: Checksum,
    /// Connections for blocks to each shard, at least one.
    pub connections: usize,
    /// How they are moved.
    pub io: Choice,
    /// How RDMA is used, where it is.
    pub rdma: RdmaOptions,
    /// The mounts that versions are pulled from in place of shards.
    pub via: Option<Via>,
    /// The address where other mounts pull from this one, if it is named.
    pub via_listen: Option<Endpoint>,
    /// The zone of this host.
    pub zone: String,
}

/// The mounts that a mount pulls from.
#[derive(Clone, Debug, PartialEq)]
pub enum Via {
    /// The coordinators of the mount's models name them.
    Auto,
    /// This one.
    At(Endpoint),
}

/// How much of its models a mount shows, and holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Shows {
    /// All.
    All,
    /// Views alone.
    Views,
    /// The tensors that one of these patterns matches.
    Tensors(Vec<String>),
}

/// Everything `gradfs status` needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct StatusConfig {
    /// What is asked for.
    pub of: StatusOf,
    /// The registry; this host's registry if none is given.
    pub registry: RegistryAt,
    /// Whether the output is JSON, for programs.
    pub json: bool,
}

/// The object of `gradfs status`.
#[derive(Clone, Debug, PartialEq)]
pub enum StatusOf {
    /// All that the registry has.
    All,
    /// One model of the registry.
    Model(String),
    /// A mount, or a directory in it.
    Mount(PathBuf),
}

/// Everything `gradfs delete` needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct DeleteConfig {
    /// The model.
    pub name: String,
    /// Whether its snapshots are removed as well.
    pub snapshots: bool,
    /// The registry.
    pub registry: RegistryAt,
}

/// Everything `gradfs save` needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct SaveConfig {
    /// The model to save.
    pub model: SavedModel,
    /// The directory to save into.
    pub dir: PathBuf,
    /// Most bytes of tensors in one file of the model.
    pub piece_size: u64,
    /// A snapshot that is there is to be replaced.
    pub replaces: bool,
}

/// A model that is saved.
#[derive(Clone, Debug, PartialEq)]
pub enum SavedModel {
    /// The model's directory in a mount.
    Mounted(PathBuf),
    /// A name in a registry; in this host's registry if none is given.
    Named(String, RegistryAt),
}

/// Everything `gradfs drain` needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct DrainConfig {
    /// The shard.
    pub shard: ShardName,
    /// The registry.
    pub registry: RegistryAt,
    /// When to give up.
    pub timeout: Duration,
    /// How long a job may stand still for it, if that is not left to the model's settings.
    pub hold: Option<Duration>,
    /// Whether the drain is to be taken back.
    pub cancel: bool,
}

/// How a shard is named on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShardName {
    /// The number that the registry has given the shard.
    Number(u16),
    /// The address that the shard advertises.
    At(Endpoint),
}

impl fmt::Display for ShardName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ShardName::Number(number) => write!(f, "shard {number}"),
            ShardName::At(endpoint) => endpoint.fmt(f),
        }
    }
}

/// Longest time for which a shard can be drained by one command.
const MAX_DRAIN: u64 = 7 * 24 * 3600;
/// Times in seconds for which a job can be held.
const MIN_HOLD: f64 = 0.1;
const MAX_HOLD: f64 = 24.0 * 3600.0;

impl RegistryConfig {
    /// Merges `layers`, the strongest first.
    pub fn merge(layers: &[Layer]) -> Result<RegistryConfig, Error> {
        let ListenArgs { listen, insecure } = merged(layers)?;
        let RegistryStateArgs { registry_state: state } = merged(layers)?;
        let named = strongest(layers, "registry").filter(|(origin, _)| origin.starts_with("--"));
        if let (Some((origin, _)), Some(RegistryAt::Process(at))) = (named, registry(layers)?) {
            let message = format!(
                "{origin} {at}: gradfs registry serves the table itself, or passes on what is in an etcd"
            );
            return Err(Error::usage(message).hint("leave it out, or name an etcd: --registry etcd://a:2379"));
        }
        // A file for all hosts names this process itself.
        let registry = registry(layers)?.filter(|registry| registry.process().is_none());
        if let (Some(at), Some(_)) = (&registry, &state) {
            let message = format!("the table is in {at}, which keeps it itself");
            return Err(Error::usage(message).hint("leave registry_state or registry out"));
        }
        let listen = needed(listen, "address to listen on", LISTEN_USAGE)?;
        Ok(RegistryConfig { listen, insecure, registry, state })
    }
}

impl ShardConfig {
    /// Merges `layers`, the strongest first.
    pub fn merge(layers: &[Layer]) -> Result<ShardConfig, Error> {
        let args: ShardArgs = merged(layers)?;
        let listen = needed(args.listen.listen, "address to listen on", LISTEN_USAGE)?;
        let advertise = match args.advertise {
            Some(text) => {
                let origin = strongest(layers, "advertise").map(|(origin, _)| origin).unwrap_or_default();
                // The port that it listens on may be any free one, and then so may this.
                let reached = Endpoint::reached(text.trim(), listen.port, listen.port != 0);
                reached.map_err(|error| error.of(&origin))?
            }
            None if listen.is_unspecified() => {
                let message = format!("with --listen {listen} others cannot tell where this shard is");
                return Err(Error::usage(message)
                    .hint("add --advertise HOST: a name or an address of this host that all others reach"));
            }
            None => listen.clone(),
        };
        // A registry's own configuration may name itself: one file with `registry` serves all hosts.
        let is_other = |registry: &RegistryAt| {
            registry.process().is_none_or(|registry| *registry != advertise && *registry != listen)
        };
        let (device, state) = args.of_state.checked()?;
        Ok(ShardConfig {
            registry: args.common.registry.filter(is_other),
            registry_state: args.kept.registry_state,
            insecure: args.listen.insecure,
            metrics: args.metrics,
            stop_timeout: Duration::from_secs(args.stop_timeout as u64),
            snapshot_rate: args.snapshot_rate,
            threads: args.threads,
            state,
            device,
            io: args.sockets.io,
            checksum: args.sockets.checksum,
            rdma: args.rdma_listen.rdma,
            rdma_port: args.rdma_listen.rdma_port,
            rdma_options: args.rdma.into(),
            listen,
            advertise,
        })
    }

    /// Whether `registry` is this shard itself under another name: the address that it advertises, or an
    /// address of this host on the port that the shard listens on for all of them.
    pub fn is_the_registry(&self, registry: &RegistryAt) -> bool {
        let Some(registry) = registry.process() else { return false };
        let at = |endpoint: &Endpoint| -> Vec<SocketAddr> {
            endpoint.to_string().to_socket_addrs().map(Iterator::collect).unwrap_or_default()
        };
        let wanted = at(registry);
        let own = [at(&self.listen), at(&self.advertise)].concat();
        let takes_all = self.listen.is_unspecified() && registry.port == self.listen.port;
        wanted.iter().any(|address| own.contains(address) || takes_all && is_of_this_host(address))
    }
}

impl CreateConfig {
    /// Merges `layers`, the strongest first.
    pub fn merge(layers: &[Layer]) -> Result<CreateConfig, Error> {
        let CreateArgs { name, common, blank, shards, settings, .. } = merged(layers)?;
        let name = name.ok_or_else(|| {
            Error::usage("the model has no name")
                .hint("gradfs create NAME: the name becomes a directory in mounts")
        })?;
        let origin = strongest(layers, "name").map(|(origin, _)| origin).unwrap_or_default();
        let name = model_name(&origin, &name)?;
        let source = blank.sources(layers, "model", CREATE_USAGE)?.pop();
        let source = source.ok_or_else(|| Error::usage("no model is given").hint(CREATE_USAGE))?;
        let controls = settings.controls(layers)?;
        Ok(CreateConfig {
            name,
            source,
            registry: common.registry.unwrap_or_default(),
            shards,
            block_size: blank.block_size,
            controls,
        })
    }
}

impl MountConfig {
    /// Merges `layers`, the strongest first.
    pub fn merge(layers: &[Layer]) -> Result<MountConfig, Error> {
        // The directory comes before the models.
        let has_mount =
            strongest(layers, "mount").is_some_and(|(_, values)| values.iter().any(|it| !it.is_empty()));
        let args: MountArgs = match has_mount {
            true => merged(layers)?,
            false => return Err(Error::usage("no mountpoint is given").hint(MOUNT_USAGE)),
        };
        let mut models: Vec<String> = Vec::new();
        for name in args.models {
            let origin = strongest(layers, "models").map(|(origin, _)| origin).unwrap_or_default();
            let name = model_name(&origin, &name)?;
            if models.contains(&name) {
                return Err(Error::usage(format!("{origin}: {name} is named twice")).hint("name it once"));
            }
            models.push(name);
        }
        if models.len() > MAX_MODELS {
            let message = format!("{} models are more than a mount shows ({MAX_MODELS})", models.len());
            return Err(Error::usage(message).hint("mount them in several places"));
        }
        let is_auto = args.via == Some(Via::Auto);
        for (option, has, needs) in [
            ("via_listen", args.via_listen.is_some(), args.via.is_some()),
            ("zone", args.zone.is_some(), is_auto),
        ] {
            if has && !needs {
                return Err(
                    Error::usage(format!("{option} is of mounts that pull from each other")).hint(VIA_USAGE)
                );
            }
        }
        let listens = is_auto || args.via_listen.is_some();
        let mounting = args.mounting.at(layers, MOUNT_USAGE, listens)?;
        let shows = match (args.views_only, args.tensors_shown) {
            (views, patterns) if patterns.is_empty() => {
                if views {
                    Shows::Views
                } else {
                    Shows::All
                }
            }
            (false, patterns) => Shows::Tensors(patterns),
            (true, _) => {
                let message = "--views-only and --tensors are two ways to show a part of a model";
                return Err(Error::usage(message).hint("leave one of them out"));
            }
        };
        if shows != Shows::All && mounting.nbd.is_some() {
            let message = "--nbd serves whole models, which --views-only and --tensors do not hold";
            return Err(Error::usage(message).hint("leave one of them out"));
        }
        if shows != Shows::All && args.via.is_some() {
            let message =
                "--via is of mounts that pull whole versions; --views-only and --tensors hold a part";
            return Err(Error::usage(message).hint("leave one of them out"));
        }
        Ok(MountConfig {
            mounting,
            via: args.via,
            via_listen: args.via_listen,
            zone: args.zone.unwrap_or_default(),
            models,
            shows,
            registry: needed(args.common.registry, "registry", REGISTRY_USAGE)?,
            transport: args.transport,
            connections: args.connections,
            io: args.sockets.io,
            checksum: args.sockets.checksum,
            rdma: args.rdma.into(),
        })
    }
}

impl StatusConfig {
    /// Merges `layers`, the strongest first.
    pub fn merge(of: Option<&Path>, layers: &[Layer], json: bool) -> Result<StatusConfig, Error> {
        let of = match of {
            None => StatusOf::All,
            Some(path) if !is_name(path) || mountpoint::of(path).is_ok() => StatusOf::Mount(path.to_owned()),
            Some(name) => StatusOf::Model(model_name("PATH|NAME", utf8("PATH|NAME", name)?)?),
        };
        Ok(StatusConfig { of, registry: registry(layers)?.unwrap_or_default(), json })
    }
}

impl DeleteConfig {
    /// Merges `layers`, the strongest first. Only the command line names the model to delete.
    pub fn merge(name: &str, snapshots: bool, layers: &[Layer]) -> Result<DeleteConfig, Error> {
        let name = model_name("NAME", name)?;
        let registry = needed(registry(layers)?, "registry", REGISTRY_USAGE)?;
        Ok(DeleteConfig { name, snapshots, registry })
    }
}

impl SaveConfig {
    /// Merges `args` and `layers`, the strongest first. Only the command line names the model to save and the directory.
    pub fn merge(args: &SaveArgs, layers: &[Layer]) -> Result<SaveConfig, Error> {
        let model = if is_name(&args.model) && !args.model.join("snapshot").exists() {
            let name = model_name("MOUNT/NAME", utf8("MOUNT/NAME", &args.model)?)?;
            SavedModel::Named(name, registry(layers)?.unwrap_or_default())
        } else {
            SavedModel::Mounted(args.model.clone())
        };
        Ok(SaveConfig { model, dir: args.dir.clone(), piece_size: args.piece_size, replaces: args.replace })
    }
}

impl DrainConfig {
    /// Merges `layers`, the strongest first. Only the command line names the shard to drain.
    pub fn merge(
        shard: &str,
        timeout: &str,
        hold: Option<&str>,
        cancel: bool,
        layers: &[Layer],
    ) -> Result<DrainConfig, Error> {
        let shard = match shard.parse::<u16>() {
            Ok(0) => {
                return Err(
                    Error::usage("SHARD: shards are numbered from 1").hint("gradfs status lists them")
                );
            }
            Ok(number) => ShardName::Number(number),
            Err(_) => ShardName::At(Endpoint::to_connect_to(shard).map_err(|error| error.of("SHARD"))?),
        };
        let what = "a number of seconds";
        let timeout = number(timeout, what, 1..=MAX_DRAIN, "it is 600 where none is given");
        let hint = "left out, it is half of the model's control/timeout";
        let hold = hold.map(|text| number(text, what, MIN_HOLD..=MAX_HOLD, hint)).transpose();
        Ok(DrainConfig {
            shard,
            registry: needed(registry(layers)?, "registry", REGISTRY_USAGE)?,
            timeout: Duration::from_secs(timeout.map_err(|error| error.of("--timeout"))?),
            hold: hold.map_err(|error| error.of("--hold"))?.map(Duration::from_secs_f64),
            cancel,
        })
    }
}

pub(super) fn piece_size(text: &str) -> Result<u64, Error> {
    match size(text)? {
        0 => Err(Error::usage("a file cannot be empty").hint("try 1GiB")),
        piece_size => Ok(piece_size),
    }
}

pub(super) fn registry(layers: &[Layer]) -> Result<Option<RegistryAt>, Error> {
    Ok(merged::<CommonArgs>(layers)?.registry)
}

fn needed<T>(place: Option<T>, what: &str, usage: &str) -> Result<T, Error> {
    place.ok_or_else(|| Error::usage(format!("no {what} is given")).hint(usage))
}

pub(super) fn utf8<'a>(origin: &str, path: &'a Path) -> Result<&'a str, Error> {
    path.to_str().ok_or_else(|| Error::usage(format!("{origin}: {path:?} is not valid UTF-8")))
}

/// Whether a path can be a model's name as well.
fn is_name(path: &Path) -> bool {
    path.components().count() == 1 && path.file_name() == Some(path.as_os_str())
}

fn via(text: &str) -> Result<Via, Error> {
    match text {
        "auto" => Ok(Via::Auto),
        text => Endpoint::reached(text, RELAY_PORT, true).map(Via::At),
    }
}

fn zone(text: &str) -> Result<String, Error> {
    const MAX_ZONE: usize = 64;
    if (1..=MAX_ZONE).contains(&text.len()) && text.chars().all(|c| c.is_ascii_graphic()) {
        return Ok(text.to_owned());
    }
    Err(Error::usage(format!("{text:?} is no zone"))
        .hint(format!("name it by 1 to {MAX_ZONE} letters and digits")))
}

/// The address of this host that packets to `address` come from. Sends nothing.
///
/// # Errors
/// The system's, if none do.
pub fn source_towards(address: &SocketAddr) -> std::io::Result<IpAddr> {
    let any: IpAddr =
        if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(address)?;
    Ok(socket.local_addr()?.ip())
}

/// Whether `address` is one of this host's: packets to such an address also come from it.
fn is_of_this_host(address: &SocketAddr) -> bool {
    let source = source_towards(address);
    address.ip().is_loopback() || source.is_ok_and(|source| source == address.ip())
}

pub(super) fn model_name(origin: &str, name: &str) -> Result<String, Error> {
    match name_fault(name) {
        None => Ok(name.to_owned()),
        Some(fault) => Err(Error::usage(format!("{origin}: {name:?} cannot name a model: {fault}"))
            .hint("the name becomes a directory in mounts")),
    }
}

#[cfg(test)]
mod tests;
