//! `gradfs shard` and `gradfs registry`: processes that listen until they are told to stop.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::transport::rdma::RdmaOptions;
use libmodelio::transport::reactor::Choice;
use libmodelio::wire::Checksum;
use ps_backend::server::{self, RdmaUse, Server, ServerOptions};
use ps_backend::state_copies::StateCopies;

use super::drain::HandOver;
use crate::background::Ready;
use crate::config::cluster::{RegistryConfig, ShardConfig};
use crate::config::endpoint::Endpoint;
use crate::config::registry::RegistryAt;
use crate::device;
use crate::error::Error;
use crate::memory;
use crate::metrics;
use crate::signals;

/// The address to listen on. One that other hosts reach must be meant to be: the protocol knows no authentication.
pub(super) fn listen_address(listen: &Endpoint, insecure: bool) -> Result<SocketAddr, Error> {
    let address = server::resolve(&listen.to_string()).map_err(|why| {
        Error::new(format!("cannot listen: {why}")).hint("name an address of this host, or 0.0.0.0 for all")
    })?;
    if insecure || address.ip().is_loopback() {
        return Ok(address);
    }
    Err(Error::new(format!("cannot listen on {listen}: other hosts reach it, and there is no authentication")).hint(
        "on a network where everybody may read, change and delete the models, add --insecure; else name a loopback address",
    ))
}

/// Runs a shard.
///
/// # Errors
/// Anything that keeps it from being there.
pub fn run(mut config: ShardConfig, ready: Ready) -> Result<(), Error> {
    config.registry = config.registry.take().filter(|registry| !config.is_the_registry(registry));
    let advertise = config.advertise.clone();
    let options = ServerOptions {
        listen: listen_address(&config.listen, config.insecure)?,
        advertise: Some(advertise.to_string()).filter(|_| advertise.port != 0),
        registry: config.registry.as_ref().map(RegistryAt::to_string),
        registry_state: config.registry_state,
        holds_blocks: true,
        threads: config.threads,
        state: config.state,
        device: device::open(config.device)?,
        io: config.io,
        checksum: config.checksum,
        rdma: config.rdma,
        rdma_port: config.rdma_port,
        rdma_options: config.rdma_options,
        device_memory: None,
        snapshot_rate: config.snapshot_rate,
    };
    let stop = Stop { within: config.stop_timeout, registry: config.registry.as_ref() };
    serve(options, config.metrics.as_ref(), ready, stop, |server| {
        let registry = match &config.registry {
            Some(registry) => format!("registry {registry}"),
            None => "and is the registry".to_owned(),
        };
        format!("shard {} listens on {}, {registry}; {}", server.shard(), server.address(), server.backend())
    })
}

/// Runs a registry.
///
/// # Errors
/// Anything that keeps it from being there.
pub fn run_registry(config: RegistryConfig, ready: Ready) -> Result<(), Error> {
    let options = ServerOptions {
        listen: listen_address(&config.listen, config.insecure)?,
        advertise: None,
        registry: config.registry.as_ref().map(RegistryAt::to_string),
        registry_state: config.state,
        holds_blocks: false,
        threads: 1,
        state: StateCopies::default(),
        device: None,
        io: Choice::Auto,
        checksum: Checksum::On,
        rdma: RdmaUse::Off,
        rdma_port: None,
        rdma_options: RdmaOptions::default(),
        device_memory: None,
        snapshot_rate: None,
    };
    let stop = Stop { within: Duration::ZERO, registry: None };
    serve(options, None, ready, stop, |server| {
        let passes_on = config.registry.as_ref().map(|at| format!(", and passes all on to {at}"));
        format!(
            "the registry listens on {}{}; {}",
            server.address(),
            passes_on.unwrap_or_default(),
            server.backend()
        )
    })
}

/// What a process that is told to end does with its models.
struct Stop<'a> {
    /// How long that may take.
    within: Duration,
    /// The registry, if it is elsewhere: it stays, and so do models that have moved.
    registry: Option<&'a RegistryAt>,
}

fn serve(
    options: ServerOptions,
    metrics: Option<&Endpoint>,
    ready: Ready,
    stop: Stop<'_>,
    describe: impl FnOnce(&Server) -> String,
) -> Result<(), Error> {
    let stops = signals::install()?;
    memory::raise_file_limit();
    if options.rdma != RdmaUse::Off {
        memory::raise_lock_limit();
    }
    let bound = metrics.map(metrics::bind).transpose()?;
    let server = Arc::new(Server::start(options).map_err(|error| Error::new(error.to_string()))?);
    let of_metrics = Arc::clone(&server);
    let scraped =
        bound.map(|bound| bound.serve(move || metrics::shard::page(&of_metrics.status()))).transpose()?;
    println!("gradfs: {}", describe(&server));
    if !server.address().ip().is_loopback() {
        println!(
            "gradfs: there is no authentication: whoever reaches this address can read, change and delete the models"
        );
    }
    if let Some(metrics) = &scraped {
        println!("gradfs: {metrics}");
    }
    let by_command = format!("kill {}", std::process::id());
    println!("gradfs: {}", ready.announcement("Ctrl-C", &by_command));
    ready.announce()?;
    let why = stops.wait();
    tracing::info!("stopping: {why}");
    let kept = stop.keep_all(&server);
    drop(scraped);
    server.shut_down();
    kept
}

impl Stop<'_> {
    /// Has the last snapshots taken, and then moves the models to other shards, which disturbs no job. So whatever
    /// becomes of the move, nothing is lost. A model that has no store and does not move is lost, as people must know.
    fn keep_all(&self, server: &Server) -> Result<(), Error> {
        let begun = Instant::now();
        if !self.within.is_zero() {
            server.take_no_more();
        }
        if !server.holds_models() {
            return Ok(());
        }
        let registry = self.registry.filter(|_| !self.within.is_zero());
        let hand_over = registry.and_then(|registry| HandOver::begin(registry, server.shard()));
        let left = || self.within.saturating_sub(begun.elapsed());
        let saved = server.save_all(left());
        let (moved, outcome) = hand_over.map(|of| of.run(left())).unwrap_or((Vec::new(), Ok(())));
        if let Err(error) = outcome {
            tracing::info!("not all models are moved to other shards: {error}");
        }
        let mut failed = Vec::new();
        for (model, saved) in saved {
            match saved {
                _ if moved.contains(&model) => println!("gradfs: {model} has moved to other shards"),
                Ok(Some(version)) => println!("gradfs: version {version} of {model} is in its store"),
                Ok(None) => tracing::warn!(
                    "its blocks of {model} are lost (gradfs drain moves them off a shard); --snapshot-to would keep them"
                ),
                Err(why) => failed.push(format!("{model}: {why}")),
            }
        }
        if failed.is_empty() {
            return Ok(());
        }
        let lost = "blocks are lost: no last snapshot was saved";
        Err(Error::new(lost)
            .caused_by(failed.join("; "))
            .hint("the snapshot before stands: gradfs snapshots lists it"))
    }
}
