//! `gradfs mount`: models whose shards are on a network, as files of this host.

use std::sync::Arc;

use libmodelio::client::{ClientOptions, Job, TransportChoice};
use libmodelio::registry::Registry;
use libmodelio::transport::NO_RDMA;
use libmodelio::transport::reactor::{Backend, Choice, Reactor, ReactorOptions};
use libmodelio::wire::{ModelRecord, ShardRecord};

use super::{deadline, explain_new_registry, registry, registry_error};
use crate::background::Ready;
use crate::config::cluster::MountConfig;
use crate::error::Error;
use crate::memory;
use crate::serve;
use crate::session::model::{Model, Snapshots};

/// Mounts the models that are asked for and serves them until told to stop.
///
/// # Errors
/// Anything that keeps it from mounting; nothing is left mounted then.
pub fn run(config: &MountConfig, ready: Ready) -> Result<(), Error> {
    if config.transport == TransportChoice::Rdma && !cfg!(feature = "rdma") {
        return Err(Error::new(format!("--transport rdma: {NO_RDMA}")));
    }
    if matches!(config.transport, TransportChoice::Auto | TransportChoice::Rdma) {
        memory::raise_lock_limit();
    }
    serve::serve(&config.mounting, ready, || {
        let registry: Arc<dyn Registry> = Arc::new(registry(&config.registry));
        let failed = |error| registry_error(&config.registry, error);
        let names = match &config.models[..] {
            [] => registry.models(deadline()).map_err(failed)?,
            names => names.to_vec(),
        };
        if names.is_empty() {
            let error = Error::new(format!("the registry at {} has no models", config.registry))
                .hint("make one: gradfs create NAME --model FILE.safetensors --registry …");
            return Err(explain_new_registry(&config.registry, error));
        }
        let shards = registry.shards(deadline()).map_err(failed)?;
        // One set of threads moves the bytes of all models.
        let reactor = ReactorOptions {
            threads: config.mounting.threads,
            choice: config.io,
            ..ReactorOptions::default()
        };
        let reactor = Reactor::start(&reactor).map_err(|error| Error::new(error.to_string()))?;
        let reactor = Arc::new(reactor);
        let mut models = Vec::new();
        for name in &names {
            let index = u8::try_from(models.len()).map_err(|_| Error::usage("more than 256 models"))?;
            let record = registry.model(name, deadline()).map_err(failed)?;
            if !record.ready && config.models.is_empty() {
                tracing::warn!(model = %name, "still being created: not shown; mount it by its name when it is there");
                continue;
            }
            models.push(Arc::new(connect(&record, &shards, (&registry, &reactor), index, config)?));
        }
        if models.is_empty() {
            let error = Error::new(format!("of the models at {} none is there yet", config.registry));
            return Err(error.hint("try again when they are created"));
        }
        Ok(models)
    })
}

fn connect(
    record: &ModelRecord,
    shards: &[ShardRecord],
    (registry, reactor): (&Arc<dyn Registry>, &Arc<Reactor>),
    index: u8,
    config: &MountConfig,
) -> Result<Model, Error> {
    let name = &record.name;
    if !record.ready {
        return Err(Error::new(format!("model {name} is still being created")).hint("try again when it is"));
    }
    let layout = record.layout().map_err(|error| Error::new(format!("model {name}")).caused_by(error))?;
    memory::check_shown(name, layout.size())?;
    let (io, transport, checksum) = (config.io, config.transport, config.checksum);
    let (registry, reactor) = (Some(Arc::clone(registry)), Some(Arc::clone(reactor)));
    let rdma = config.rdma.clone();
    let (threads, connections) = (config.mounting.threads, config.connections);
    let options = ClientOptions {
        reactor,
        threads,
        io,
        transport,
        checksum,
        connections,
        rdma,
        registry,
        ..ClientOptions::default()
    };
    let job = Job::connect(record, shards, options)
        .map_err(|error| Error::new(format!("cannot take part in {name}")).caused_by(error))?;
    for shard in job.shards() {
        let (address, blocks) = (shard.address.unwrap_or_default(), shard.blocks);
        tracing::info!(model = %name, shard = %shard.shard, %address, transport = %shard.transport, blocks, "connected");
    }
    let backend = job.backend();
    if index == 0 && io == Choice::Auto && backend != Backend::Uring.to_string() {
        tracing::warn!("bytes do not go through io_uring, which is slower: {backend}");
    }
    tracing::info!(model = %name, io = %backend, "connected");
    let snapshots = Snapshots::Registry(config.registry.to_string());
    Ok(Model::new(name.clone(), job, record.metadata.clone(), own_learner(), snapshots))
}

/// The name of this mount's own learner: other mounts of the job have theirs.
fn own_learner() -> String {
    const LONGEST: usize = 64;
    let host = nix::unistd::gethostname().unwrap_or_default();
    let fits = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let host: String = host.to_string_lossy().chars().filter(fits).collect();
    let pid = std::process::id();
    let room = LONGEST - "mount--".len() - pid.to_string().len();
    let host: String = host.chars().take(room).collect();
    format!("mount-{host}-{pid}")
}

#[cfg(test)]
mod tests {
    use super::own_learner;

    #[test]
    fn the_mounts_own_learner_has_a_name_that_a_directory_can_have() {
        let name = own_learner();
        assert!(name.starts_with("mount-") && name.len() <= 64, "{name}");
        assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)), "{name}");
    }
}
