//! `gradfs mount`: models whose shards are on a network, as files of this host.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::client::{ClientOptions, Job, RelayPort, TransportChoice};
use libmodelio::registry::Registry;
use libmodelio::transport::reactor::{Backend, Choice, Reactor, ReactorOptions};
use libmodelio::transport::tcp::{SocketOptions, bind};
use libmodelio::view::ViewPlan;
use libmodelio::vocabulary::ids::{Generation, ShardId};
use libmodelio::vocabulary::transport_kind::NO_RDMA;
use libmodelio::wire::{Fate, HeldPartition, ModelRecord, ShardRecord};
use ps_backend::server;

use super::offer::WeightsOffer;
use super::shard::listen_address;
use super::{deadline, explain_new_registry, registry, registry_error};
use crate::background::Ready;
use crate::companions;
use crate::config::MAX_MODELS;
use crate::config::cluster::{MountConfig, Shows, Via, source_towards};
use crate::config::endpoint::Endpoint;
use crate::error::{self, Error};
use crate::memory;
use crate::serve::{self, Changes, Later, Loaded};
use crate::session::model::{Model, Snapshots};
use crate::session::view::ViewMaker;

/// Mounts the models that are asked for and serves them until told to stop.
///
/// # Errors
/// Anything that keeps it from mounting; nothing is left mounted then.
pub fn run(config: &MountConfig, ready: Ready) -> Result<(), Error> {
    if config.transport == TransportChoice::Rdma && !gradfs_rdma::IS_BUILT_IN {
        return Err(Error::new(format!("--transport rdma: {NO_RDMA}")));
    }
    if matches!(config.transport, TransportChoice::Auto | TransportChoice::Rdma) {
        memory::raise_lock_limit();
    }
    serve::serve(&config.mounting, ready, || {
        let registry = registry(&config.registry)?;
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
        let reactor = ReactorOptions {
            threads: config.mounting.threads,
            choice: config.io,
            ..ReactorOptions::default()
        };
        let reactor = Reactor::start(&reactor).map_err(|error| Error::new(error.to_string()))?;
        let reactor = Arc::new(reactor);
        let mut models = Vec::new();
        let (config, complained, offered) = (config.clone(), HashMap::new(), HashMap::new());
        let (relay, lives) = (None, HashMap::new());
        let mut found = Found { config, registry, reactor, relay, lives, complained, offered };
        for name in &names {
            if models.len() >= MAX_MODELS {
                return Err(Error::usage(format!("more than {MAX_MODELS} models")));
            }
            let record = found.registry.model(name, deadline()).map_err(failed)?;
            if !record.ready && record.lineage.restored == 0 && found.config.models.is_empty() {
                tracing::warn!(model = %name, "still being created: shown when it is there");
                continue;
            }
            models.push(found.begin(record)?);
        }
        if models.is_empty() {
            let error = Error::new(format!("of the models at {} none is there yet", found.config.registry));
            return Err(error.hint("try again when they are created"));
        }
        Ok(Loaded { models, later: Some(Box::new(found)), at_end: None })
    })
}

/// The models of a registry that this mount shows.
struct Found {
    config: MountConfig,
    registry: Arc<dyn Registry>,
    /// One set of threads moves the bytes of all models.
    reactor: Arc<Reactor>,
    /// The end for other mounts, once there is a model.
    relay: Option<Arc<RelayPort>>,
    /// The life of each model that was shown, by its name.
    lives: HashMap<String, HeldPartition>,
    /// Why models are not shown, as far as that was said.
    complained: HashMap<String, String>,
    /// The restored lives that weights of this mount were offered to.
    offered: HashMap<String, Generation>,
}

/// A model that is being restored is waited for so long.
const RESTORED: Duration = Duration::from_secs(60);
/// The longest wait for the shards of a model that was restored, before the registry is asked again.
const ANOTHER_LIFE: Duration = Duration::from_secs(3);
/// The pause before the registry is asked again whether a restored model is there.
const LOOKS: Duration = Duration::from_millis(200);

impl Found {
    /// Takes part in a model. If it is restored meanwhile, in its next life.
    fn begin(&mut self, mut record: ModelRecord) -> Result<Arc<Model>, Error> {
        let (at, until) = (self.config.registry.clone(), Instant::now() + RESTORED);
        let failed = |error| registry_error(&at, error);
        loop {
            let is_restored = |record: &ModelRecord| !record.ready && record.lineage.restored > 0;
            let before = (record.generation, is_restored(&record));
            let begun = match before.1 && Instant::now() < until {
                true => None,
                false => {
                    let shards = self.registry.shards(deadline()).map_err(failed)?;
                    Some(self.connect(&record, &shards))
                }
            };
            match begun {
                Some(Ok(model)) => return Ok(model),
                Some(Err(error)) => {
                    record = self.registry.model(&record.name, deadline()).map_err(failed)?;
                    if record.generation == before.0 && !is_restored(&record) || Instant::now() >= until {
                        return Err(error);
                    }
                }
                None => {
                    std::thread::sleep(LOOKS);
                    record = self.registry.model(&record.name, deadline()).map_err(failed)?;
                }
            }
        }
    }

    fn connect(&mut self, record: &ModelRecord, shards: &[ShardRecord]) -> Result<Arc<Model>, Error> {
        let is_first = self.lives.is_empty();
        if is_first {
            self.relay = relay(&self.config, &self.reactor, record, shards)?;
        }
        let (registry, reactor, relay) = (&self.registry, &self.reactor, &self.relay);
        let model = connect(record, shards, (registry, reactor, relay), is_first, &self.config)?;
        let ModelRecord { name, generation, epoch, .. } = record;
        let held = HeldPartition { model: name.clone(), generation: *generation, epoch: *epoch };
        self.lives.insert(name.clone(), held);
        Ok(model)
    }

    /// The models that were deleted, as the registry says. One that was restarted may not know a model yet, and says
    /// so.
    fn gone(&self, shown: &[Arc<Model>]) -> Vec<Arc<Model>> {
        let (models, held): (Vec<_>, Vec<HeldPartition>) =
            shown.iter().filter_map(|model| Some((model, self.lives.get(&model.name)?.clone()))).unzip();
        let fates = self.registry.holding(ShardId(0), &held, &[], deadline());
        let fates = fates.map(|(_, fates)| fates).unwrap_or_default();
        let is_gone = |fate: &Fate| matches!(fate, Fate::Deleted | Fate::Taken { .. });
        models
            .into_iter()
            .zip(&fates)
            .filter(|(_, fate)| is_gone(fate))
            .map(|(of, _)| Arc::clone(of))
            .collect()
    }

    /// A model that is being restored may go on with weights that this mount has. They are offered once to each of its lives.
    fn offer(&mut self, model: &Arc<Model>, record: &ModelRecord) {
        let ModelRecord { name, generation, .. } = record;
        if record.ready || !record.lineage.newest || self.offered.get(name) == Some(generation) {
            return;
        }
        let shards = self.registry.shards(deadline()).unwrap_or_default();
        let by = shards.iter().find(|shard| shard.shard == record.lineage.by);
        if let Some(offer) = by.and_then(|by| WeightsOffer::of(model.whole(), *generation, &by.address)) {
            self.offered.insert(name.clone(), *generation);
            offer.make();
        }
    }

    /// A model of this name may be there by now. What keeps it from being shown is said once.
    fn come(&mut self, name: &str) -> Option<Arc<Model>> {
        let tried = self.try_come(name);
        let why = tried.as_ref().err().map(error::chain);
        if let Some(why) = &why
            && self.complained.get(name) != Some(why)
        {
            tracing::warn!(model = name, "not shown: {why}");
        }
        match why {
            Some(why) => self.complained.insert(name.to_owned(), why),
            None => self.complained.remove(name),
        };
        tried.ok().flatten()
    }

    fn try_come(&mut self, name: &str) -> Result<Option<Arc<Model>>, Error> {
        let at = self.config.registry.clone();
        let failed = |error| registry_error(&at, error);
        let record = self.registry.model(name, deadline()).map_err(failed)?;
        if !record.ready {
            return Ok(None);
        }
        let shards = self.registry.shards(deadline()).map_err(failed)?;
        self.connect(&record, &shards).map(Some)
    }
}

impl Later for Found {
    fn look(&mut self, shown: &[Arc<Model>], room: bool) -> Changes {
        // The shards that the models are on do not need it, and clients say that it is away.
        let Ok(names) = self.registry.models(deadline()) else { return Changes::default() };
        let (mut gone, mut replaced) = (Vec::new(), Vec::new());
        for model in self.gone(shown) {
            let record = self.registry.model(&model.name, deadline());
            let goes_on = |record: &ModelRecord| record.lineage.follows(model.whole().job.lineage());
            match record {
                // It is shown as it was until its next life can be.
                Ok(record) if goes_on(&record) => {
                    self.offer(&model, &record);
                    replaced.extend(self.come(&model.name).map(|new| (model, new)));
                }
                _ => gone.push(model),
            }
        }
        let is_shown = |name: &String| {
            let of = |models: &[Arc<Model>]| models.iter().any(|model| model.name == *name);
            of(shown) && !of(&gone)
        };
        let wanted = |name: &String| self.config.models.is_empty() || self.config.models.contains(name);
        let new: Vec<String> =
            names.into_iter().filter(|name| room && wanted(name) && !is_shown(name)).collect();
        let come = new.iter().filter_map(|name| self.come(name)).collect();
        Changes { come, gone, replaced }
    }
}

/// Listens for other mounts that pull from this one, if they may.
fn relay(
    config: &MountConfig,
    reactor: &Reactor,
    record: &ModelRecord,
    shards: &[ShardRecord],
) -> Result<Option<Arc<RelayPort>>, Error> {
    if config.via != Some(Via::Auto) && config.via_listen.is_none() {
        return Ok(None);
    }
    let failed = |why: &dyn std::fmt::Display| {
        Error::new(format!("other mounts cannot pull from this one: {why}"))
            .hint("name an address of this host: --via-listen HOST:PORT")
    };
    let towards = || {
        let shard = shards.iter().find(|shard| shard.shard == record.coordinator);
        let shard = shard.ok_or_else(|| failed(&"the registry does not know the model's coordinator"))?;
        let address = server::resolve(&shard.address).map_err(|why| failed(&why))?;
        source_towards(&address).map_err(|error| failed(&error))
    };
    let listen = match &config.via_listen {
        Some(listen) => listen.clone(),
        None => Endpoint { host: towards()?.to_string(), port: 0 },
    };
    let options = SocketOptions::default();
    let bound = bind(listen_address(&listen, config.mounting.insecure)?, &options);
    let listener = bound.map_err(|error| failed(&format!("{listen}: {error}")))?;
    let mut address = listener.local_addr().map_err(|error| failed(&error))?;
    if address.ip().is_unspecified() {
        address.set_ip(towards()?);
    }
    let port = RelayPort::listen(&reactor.handle(), listener, address, config.zone.clone());
    let port = port.map_err(|error| failed(&error))?;
    tracing::info!(%address, "other mounts may pull from this one");
    Ok(Some(port))
}

fn connect(
    record: &ModelRecord,
    shards: &[ShardRecord],
    (registry, reactor, relay): (&Arc<dyn Registry>, &Arc<Reactor>, &Option<Arc<RelayPort>>),
    is_first: bool,
    config: &MountConfig,
) -> Result<Arc<Model>, Error> {
    let name = &record.name;
    if !record.ready {
        return Err(Error::new(format!("model {name} is still being created")).hint("try again when it is"));
    }
    let layout = record.layout().map_err(|error| Error::new(format!("model {name}")).caused_by(error))?;
    let holds_versions = config.shows == Shows::All;
    if holds_versions {
        memory::check_shown(name, layout.size())?;
    }
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
        holds_versions,
        rdma,
        relay: relay.clone(),
        via: match &config.via {
            Some(Via::At(relay)) => Some(relay.to_string()),
            Some(Via::Auto) | None => None,
        },
        is_followed: true,
        registry,
        patience: match record.lineage.restored {
            0 => ClientOptions::default().patience,
            // If it is lost again, the next life is there soon.
            _ => ANOTHER_LIFE,
        },
        ..ClientOptions::default()
    };
    let job = Job::connect(record, shards, options)
        .map_err(|error| Error::new(format!("cannot take part in {name}")).caused_by(error))?;
    for shard in job.shards() {
        let (address, blocks) = (shard.address.unwrap_or_default(), shard.blocks);
        tracing::info!(model = %name, shard = %shard.shard, %address, transport = %shard.transport, blocks, "connected");
    }
    let backend = job.backend();
    if is_first && io == Choice::Auto && backend != Backend::Uring.to_string() {
        tracing::warn!("bytes do not go through io_uring, which is slower: {backend}");
    }
    tracing::info!(model = %name, io = %backend, "connected");
    let snapshots = Snapshots::Registry(config.registry.to_string());
    let mut model = Model::new(name.clone(), job, record.metadata.clone(), own_learner(), snapshots);
    if let Some(dir) = &config.mounting.with_files {
        model.companions = companions::read(dir, true)?;
    }
    let Shows::Tensors(patterns) = &config.shows else { return Ok(Arc::new(model)) };
    let failed = |why: &dyn std::fmt::Display| Error::new(format!("model {name}: {why}"));
    let plan = ViewPlan::of_tensors(patterns, &model.layout).map_err(|error| failed(&error))?;
    memory::check_shown(name, plan.layout().size())?;
    ViewMaker::in_place_of(Arc::new(model), plan).map_err(|error| failed(&error))
}

/// The name of this mount's own learner: other mounts of the job have theirs.
fn own_learner() -> String {
    const MAX_NAME: usize = 64;
    let host = nix::unistd::gethostname().unwrap_or_default();
    let fits = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let host: String = host.to_string_lossy().chars().filter(fits).collect();
    let pid = std::process::id();
    let room = MAX_NAME - "mount--".len() - pid.to_string().len();
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
