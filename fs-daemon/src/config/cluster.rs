//! The configuration of a cluster's commands, merged from flags, environment and file, and checked.
//!
//! The commands have one vocabulary. One file can hold the keys of all commands, and each command takes the
//! keys it knows. So a new host uses the file of the other hosts, and only its `listen` differs.

pub mod rdma;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::Duration;

use libmodelio::client::TransportChoice;
use libmodelio::transport::rdma::RdmaOptions;
use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::controls::Controls;
use libmodelio::wire::Checksum;
use ps_backend::device::DeviceName;
use ps_backend::server::RdmaUse;
use ps_backend::state_copies::StateCopies;
use strum::VariantNames;

use super::endpoint::{DEFAULT_PORT, Endpoint};
use super::{Layer, Merged, ModelSource, name_fault, number, size, utf8};
use crate::error::Error;
use crate::mountpoint;

/// Most shards that a model can be striped over.
const MAX_SHARDS: u16 = 1024;
const THREADS_OF_SHARD: &str =
    "threads add contributions up; one for each core that the shard may use is most";
const DEFAULT_CONNECTIONS: usize = 2;
const MAX_CONNECTIONS: usize = 16;
const CONNECTIONS: &str = "connections to each shard carry blocks; as many are busy as there are threads";
const MOUNT_USAGE: &str = "name the directory to mount on: gradfs mount /mnt/job --registry node1";
const CREATE_USAGE: &str =
    "load it with --model FILE.safetensors, or make a blank one with --size 1GiB --dtype bf16";
const LISTEN_USAGE: &str =
    "say where to listen: --listen 10.0.0.1:7070, or --listen 0.0.0.0 for all addresses";
const REGISTRY_USAGE: &str =
    "say where the registry is: --registry node1:7070, GRADFS_REGISTRY, or registry in the file";

/// Everything `gradfs registry` needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct RegistryConfig {
    /// The address to listen on.
    pub listen: Endpoint,
    /// That address may be open to other hosts.
    pub insecure: bool,
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
    pub registry: Option<Endpoint>,
    /// The address where metrics are served, if they are.
    pub metrics: Option<Endpoint>,
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
    pub registry: Endpoint,
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
    pub mounting: super::Mounting,
    /// The models to show; none: all that the registry has.
    pub models: Vec<String>,
    /// The registry.
    pub registry: Endpoint,
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
}

/// Everything `gradfs status` needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct StatusConfig {
    /// What is asked for.
    pub of: StatusOf,
    /// The registry; this host's registry if none is given.
    pub registry: Endpoint,
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
    /// The registry.
    pub registry: Endpoint,
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
    Named(String, Endpoint),
}

/// Everything `gradfs drain` needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct DrainConfig {
    /// The shard.
    pub shard: ShardName,
    /// The registry.
    pub registry: Endpoint,
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
        let merged = Merged(layers);
        Ok(RegistryConfig { listen: merged.listen()?, insecure: merged.switch("insecure")? })
    }
}

impl ShardConfig {
    /// Merges `layers`, the strongest first.
    pub fn merge(layers: &[Layer]) -> Result<ShardConfig, Error> {
        let merged = Merged(layers);
        let listen = merged.listen()?;
        // The port that it listens on may be any free one, and then so may this.
        let needs_port = listen.port != 0;
        let parse = |origin: &str, text: &str| to_connect_to(origin, text, listen.port, needs_port);
        let advertise = match merged.parsed("advertise", parse)? {
            Some(advertise) => advertise,
            None if listen.is_unspecified() => {
                let message = format!("with --listen {listen} others cannot tell where this shard is");
                return Err(Error::usage(message)
                    .hint("add --advertise HOST: a name or an address of this host that all others reach"));
            }
            None => listen.clone(),
        };
        // A registry's own configuration may name itself: one file with `registry` serves all hosts.
        let registry = merged.registry()?.filter(|registry| *registry != advertise && *registry != listen);
        let (device, state) = merged.device()?;
        Ok(ShardConfig {
            listen,
            insecure: merged.switch("insecure")?,
            advertise,
            registry,
            metrics: merged.metrics()?,
            threads: merged.threads(THREADS_OF_SHARD)?,
            state,
            device,
            io: merged.word("io", Choice::VARIANTS, Choice::default())?,
            checksum: merged.checksum()?,
            rdma: merged.rdma_use()?,
            rdma_port: merged.rdma_port()?,
            rdma_options: merged.rdma()?,
        })
    }

    /// Whether `registry` is this shard itself under another name: the address that it advertises, or an
    /// address of this host on the port that the shard listens on for all of them.
    pub fn is_the_registry(&self, registry: &Endpoint) -> bool {
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
        let merged = Merged(layers);
        let block_size = merged.block_size()?;
        let name = merged.parsed("name", model_name)?.ok_or_else(|| {
            Error::usage("the model has no name")
                .hint("gradfs create NAME: the name becomes a directory in mounts")
        })?;
        let source = merged.sources("model", block_size, CREATE_USAGE)?.pop();
        let source = source.ok_or_else(|| Error::usage("no model is given").hint(CREATE_USAGE))?;
        Ok(CreateConfig {
            name,
            source,
            registry: merged.registry_or_here()?,
            shards: merged.whole(
                "shards",
                1..=MAX_SHARDS,
                "leave it out to stripe the model over all shards that there are",
            )?,
            block_size,
            controls: merged.controls()?,
        })
    }
}

impl MountConfig {
    /// Merges `layers`, the strongest first.
    pub fn merge(layers: &[Layer]) -> Result<MountConfig, Error> {
        let merged = Merged(layers);
        let mut models: Vec<String> = Vec::new();
        if let Some((origin, names)) = merged.get("models") {
            for name in names {
                let name = model_name(&origin, utf8(&origin, name)?)?;
                if models.contains(&name) {
                    return Err(Error::usage(format!("{origin}: {name} is named twice")).hint("name it once"));
                }
                models.push(name);
            }
        }
        if models.len() > super::MAX_MODELS {
            let message =
                format!("{} models are more than a mount shows ({})", models.len(), super::MAX_MODELS);
            return Err(Error::usage(message).hint("mount them in several places"));
        }
        Ok(MountConfig {
            mounting: merged.mounting(MOUNT_USAGE)?,
            models,
            registry: merged.registry_needed()?,
            transport: merged.word("transport", TransportChoice::VARIANTS, TransportChoice::default())?,
            connections: merged
                .whole("connections", 1..=MAX_CONNECTIONS, CONNECTIONS)?
                .unwrap_or(DEFAULT_CONNECTIONS),
            io: merged.word("io", Choice::VARIANTS, Choice::default())?,
            checksum: merged.checksum()?,
            rdma: merged.rdma()?,
        })
    }
}

impl StatusConfig {
    /// Merges `layers`, the strongest first.
    pub fn merge(of: Option<&Path>, layers: &[Layer], json: bool) -> Result<StatusConfig, Error> {
        let of = match of {
            None => StatusOf::All,
            Some(path) if !is_name(path) || mountpoint::of(path).is_ok() => StatusOf::Mount(path.to_owned()),
            Some(name) => {
                let name = utf8("PATH|NAME", &name.as_os_str().to_owned())?.to_owned();
                StatusOf::Model(model_name("PATH|NAME", &name)?)
            }
        };
        Ok(StatusConfig { of, registry: Merged(layers).registry_or_here()?, json })
    }
}

impl DeleteConfig {
    /// Merges `layers`, the strongest first. Only the command line names the model to delete.
    pub fn merge(name: &str, layers: &[Layer]) -> Result<DeleteConfig, Error> {
        Ok(DeleteConfig { name: model_name("NAME", name)?, registry: Merged(layers).registry_needed()? })
    }
}

impl SaveConfig {
    /// Merges `layers`, the strongest first. Only the command line names the model to save and the directory.
    pub fn merge(
        model: &Path,
        dir: &Path,
        piece_size: &str,
        replaces: bool,
        layers: &[Layer],
    ) -> Result<SaveConfig, Error> {
        let model = if is_name(model) && !model.join("snapshot").exists() {
            let name = utf8("MOUNT/NAME", &model.as_os_str().to_owned())?.to_owned();
            SavedModel::Named(model_name("MOUNT/NAME", &name)?, Merged(layers).registry_or_here()?)
        } else {
            SavedModel::Mounted(model.to_owned())
        };
        let piece_size = match size("--piece-size", piece_size)? {
            0 => return Err(Error::usage("--piece-size: a file cannot be empty").hint("try 1GiB")),
            piece_size => piece_size,
        };
        Ok(SaveConfig { model, dir: dir.to_owned(), piece_size, replaces })
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
            Err(_) => ShardName::At(to_connect_to("SHARD", shard, DEFAULT_PORT, true)?),
        };
        let what = "a number of seconds";
        let timeout = number("--timeout", timeout, what, 1..=MAX_DRAIN, "it is 600 where none is given")?;
        let hint = "left out, it is half of the model's control/timeout";
        let hold = hold.map(|text| number("--hold", text, what, MIN_HOLD..=MAX_HOLD, hint)).transpose()?;
        Ok(DrainConfig {
            shard,
            registry: Merged(layers).registry_needed()?,
            timeout: Duration::from_secs(timeout),
            hold: hold.map(Duration::from_secs_f64),
            cancel,
        })
    }
}

impl Merged<'_> {
    fn listen(&self) -> Result<Endpoint, Error> {
        let listen = self.parsed("listen", |origin, text| Endpoint::parse(origin, text, DEFAULT_PORT))?;
        listen.ok_or_else(|| Error::usage("no address to listen on is given").hint(LISTEN_USAGE))
    }

    fn checksum(&self) -> Result<Checksum, Error> {
        self.word("checksum", Checksum::VARIANTS, Checksum::default())
    }

    fn registry(&self) -> Result<Option<Endpoint>, Error> {
        self.parsed("registry", |origin, text| to_connect_to(origin, text, DEFAULT_PORT, true))
    }

    fn registry_needed(&self) -> Result<Endpoint, Error> {
        self.registry()?.ok_or_else(|| Error::usage("no registry is given").hint(REGISTRY_USAGE))
    }

    /// The registry; this host's registry if none is given.
    fn registry_or_here(&self) -> Result<Endpoint, Error> {
        let here = || Endpoint { host: "localhost".into(), port: DEFAULT_PORT };
        Ok(self.registry()?.unwrap_or_else(here))
    }
}

/// Whether a path can be a model's name as well.
fn is_name(path: &Path) -> bool {
    path.components().count() == 1 && path.file_name() == Some(path.as_os_str())
}

/// Whether `address` is one of this host's: packets to such an address also come from it. Sends nothing.
fn is_of_this_host(address: &SocketAddr) -> bool {
    let any: IpAddr =
        if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let source = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect(address)?;
        socket.local_addr()
    });
    address.ip().is_loopback() || source.is_ok_and(|source| source.ip() == address.ip())
}

fn model_name(origin: &str, name: &str) -> Result<String, Error> {
    match name_fault(name) {
        None => Ok(name.to_owned()),
        Some(fault) => Err(Error::usage(format!("{origin}: {name:?} cannot name a model: {fault}"))
            .hint("the name becomes a directory in mounts")),
    }
}

/// The endpoint that `text` names, refused if one can listen on it, but not connect to it. `needs_port`: 0 is no port.
fn to_connect_to(origin: &str, text: &str, default_port: u16, needs_port: bool) -> Result<Endpoint, Error> {
    let endpoint = Endpoint::parse(origin, text, default_port)?;
    if endpoint.is_unspecified() {
        let message =
            format!("{origin}: {} stands for all addresses: nobody can connect to it", endpoint.host);
        return Err(Error::usage(message).hint("name the host, or one of its addresses"));
    }
    if needs_port && endpoint.port == 0 {
        return Err(Error::usage(format!("{origin}: nobody can connect to port 0"))
            .hint(format!("name its port, or leave it out for {default_port}")));
    }
    Ok(endpoint)
}

#[cfg(test)]
mod tests;
