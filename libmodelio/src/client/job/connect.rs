//! Connecting to a job: over a network to the shards of its model, or to the shard in this process. Both wait for a
//! first version.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::Job;
use crate::client::core::{ClientCore, Now};
use crate::client::options::{ClientError, ClientOptions, TransportChoice};
use crate::client::peers::routes::Routes;
use crate::client::shards::Shards;
use crate::client::shared::{Inner, Shared};
use crate::client::versions::{self, Versions};
use crate::timer::{self, Timed};
use crate::transport::local::{Recipient, Shard};
use crate::transport::rdma::{Endpoint, IS_BUILT_IN};
use crate::transport::reactor::{Reactor, ReactorOptions};
use crate::transport::shm;
use crate::vocabulary::ids::ClientId;
use crate::vocabulary::layout::ModelLayout;
use crate::vocabulary::transport_kind::NO_RDMA;
use crate::wire::{MAX_SMALL_MODEL, Message, ModelRecord, Protocol, ShardRecord};

impl Job {
    /// Connects to the shards of a model and waits until a first version is here.
    ///
    /// # Errors
    /// [`ClientError`], after `options.patience` at the latest.
    pub fn connect(
        record: &ModelRecord,
        shards: &[ShardRecord],
        options: ClientOptions,
    ) -> Result<Job, ClientError> {
        let model = record.name.clone();
        let bad = |why: String| ClientError::Record { model: model.clone(), why };
        let layout = Arc::new(record.layout().map_err(|error| bad(error.to_string()))?);
        let map = record.block_map().map_err(|error| bad(error.to_string()))?;
        let start = |error: &dyn std::fmt::Display| ClientError::Start(error.to_string());
        let id = random_id()?;
        let core = ClientCore::new(&map).apart(id);
        let is_small = layout.size() <= u64::from(MAX_SMALL_MODEL) && map.shares().len() == 1;
        let core = if is_small { core.sends_with_commits() } else { core };
        let core = match options.pulls {
            None => core,
            Some(policy) => core.pulls(policy),
        };
        let offer = options.relay.as_ref().filter(|_| options.via.is_none()).map(|relay| Message::Relay {
            address: relay.address().to_string(),
            zone: relay.zone().to_owned(),
            host: shm::host(),
        });
        let core = core.by_relays(offer, options.via.clone());
        let core = if options.holds_versions { core } else { core.holds_nothing() };
        let (transport, connections) = (options.transport, options.connections);
        if transport == TransportChoice::Rdma && !IS_BUILT_IN {
            return Err(ClientError::Transport { model, why: NO_RDMA.to_owned() });
        }
        let routes = Routes::new(&map, record.coordinator, shards, transport, connections).map_err(bad)?;
        if let Some(why) = routes.partitions.iter().find_map(|place| place.barred.clone()) {
            return Err(ClientError::Transport { model, why });
        }
        let reactor = match &options.reactor {
            Some(reactor) => Arc::clone(reactor),
            None => {
                let own = ReactorOptions {
                    threads: options.threads,
                    choice: options.io,
                    ..ReactorOptions::default()
                };
                Arc::new(Reactor::start(&own).map_err(|error| start(&error))?)
            }
        };
        let size = layout.size() as usize;
        let mut endpoint = None;
        if transport == TransportChoice::Rdma {
            // If RDMA is required, a missing device is an error at once.
            let opened = Endpoint::open(&options.rdma, Protocol::NEWEST.number());
            let opened = opened
                .map_err(|error| ClientError::Transport { model: model.clone(), why: error.to_string() })?;
            endpoint = Some(Ok(opened));
        }
        let mut versions = Versions::new(size);
        if options.holds_versions {
            versions.add_spare(versions::spare(size).map_err(|error| start(&error))?, usize::MAX);
        }
        let inner = Inner::new(core, versions, routes);
        let reached = Shards::Connected(reactor.handle());
        // The job holds the threads, so that it can end them.
        let options = ClientOptions { reactor: None, ..options };
        let shared = Shared::new((id, record), layout, inner, options, reached);
        *shared.rdma_endpoint.lock() = endpoint;
        if let Some(relay) = &shared.options.relay {
            relay.serves(&shared.model, shared.this.clone());
        }
        Job::begin(shared, Some(reactor))
    }

    /// A job whose only shard is in this process. `meet` introduces its client there.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn of_shard_here(
        record: &ModelRecord,
        layout: Arc<ModelLayout>,
        shard: Arc<dyn Shard>,
        meet: impl FnOnce(ClientId),
    ) -> Result<Job, ClientError> {
        let bad = |why: &dyn std::fmt::Display| {
            let (model, why) = (record.name.clone(), why.to_string());
            ClientError::Record { model, why }
        };
        let map = record.block_map().map_err(|error| bad(&error))?;
        let id = random_id()?;
        let mut core = ClientCore::new(&map).reads_in_place();
        let mut actions = Vec::new();
        core.coordinator_up(Now::ZERO, &mut actions);
        core.shard_up(0, Now::ZERO, &mut actions);
        let inner = Inner::new(core, Versions::new(layout.size() as usize), Routes::here(map.epoch()));
        let reached = Shards::here(Arc::clone(&shard));
        let shared = Shared::new((id, record), layout, inner, ClientOptions::default(), reached);
        let end: std::sync::Weak<dyn Recipient> = Arc::downgrade(&shared) as std::sync::Weak<dyn Recipient>;
        if !shard.mailbox().join(end) {
            return Err(bad(&"the shard in this process has a client already"));
        }
        meet(id);
        shared.with_core(|_, _, taken| taken.append(&mut actions));
        Job::begin(shared, None)
    }

    fn begin(shared: Arc<Shared>, reactor: Option<Arc<Reactor>>) -> Result<Job, ClientError> {
        let timed = Arc::downgrade(&shared);
        let alarm = timer::watch(timed as Weak<dyn Timed>);
        shared.lifetime.keep(alarm.map_err(|error| ClientError::Start(error.to_string()))?);
        let job = Job {
            shared,
            reactor: Mutex::new(reactor),
            lent: Mutex::default(),
            on_arrival: AtomicU64::new(0),
            next_key: AtomicU64::new(1 << 32),
        };
        job.await_first()?;
        Ok(job)
    }

    /// Waits until a version is here, as long as some of it comes within each patience.
    fn await_first(&self) -> Result<(), ClientError> {
        let patience = self.shared.options.patience;
        let came = || self.shared.accounts.tally.read().pulled_bytes;
        let (mut before, mut deadline) = (came(), Instant::now() + patience);
        let mut inner = self.shared.inner.lock();
        while !inner.core.shows_any() {
            if self.shared.lifetime.wait_until(&mut inner, deadline) {
                continue;
            }
            let now = came();
            if now == before {
                let why = inner.peers.why_nothing_came(patience);
                return Err(ClientError::Unreachable { model: self.shared.model.clone(), why });
            }
            (before, deadline) = (now, Instant::now() + patience);
        }
        Ok(())
    }
}

fn random_id() -> Result<ClientId, ClientError> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|error| ClientError::Start(error.to_string()))?;
    Ok(ClientId(u64::from_le_bytes(random)))
}
