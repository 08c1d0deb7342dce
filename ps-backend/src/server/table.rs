//! The registry in this process: the table with its lock and clock, and the interface that other processes reach over
//! the network.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use libmodelio::registry::table::{Answer, Given, RegistryCore};
use libmodelio::registry::{Registry, RegistryError};
use libmodelio::wire::{Refusal, RegistryAnswer, RegistryRequest};
use parking_lot::Mutex;
use serde_json::{Value, json};

/// The registry in this process.
pub(super) struct Table {
    core: Mutex<RegistryCore>,
    started: Instant,
}

impl Table {
    pub(super) fn new() -> Table {
        Table { core: Mutex::new(RegistryCore::new()), started: Instant::now() }
    }

    /// Answers a request of this process.
    pub(super) fn handle(&self, request: &RegistryRequest, payload: &[u8]) -> Result<Answer, Refusal> {
        self.handle_from(None, request, payload)
    }

    /// Answers a request that came from an address.
    pub(super) fn handle_from(
        &self,
        from: Option<IpAddr>,
        request: &RegistryRequest,
        payload: &[u8],
    ) -> Result<Answer, Refusal> {
        // Nobody waits for the table meanwhile.
        let given = Given::of(request, payload)?;
        self.core.lock().answer(from, request, given, self.age())
    }

    /// The known shards, and how long ago each has announced itself.
    pub(super) fn announcements(&self) -> Value {
        let age = self.age();
        let core = self.core.lock();
        let shards = core.announcements().map(|(record, last_announced)| {
            let seconds =
                last_announced.map(|last_announced| age.saturating_sub(last_announced).as_secs_f64());
            json!({ "shard": record.shard.0, "address": record.address, "seconds": seconds })
        });
        shards.collect()
    }

    /// How long the registry has been running.
    pub(super) fn age(&self) -> Duration {
        self.started.elapsed()
    }
}

/// The registry of this process, behind the interface of remote ones.
pub(super) struct Local<'a>(pub &'a Table);

impl Registry for Local<'_> {
    fn ask(
        &self,
        request: RegistryRequest,
        payload: &[u8],
        _: Instant,
    ) -> Result<(RegistryAnswer, Vec<u8>), RegistryError> {
        let answer = self.0.handle(&request, payload)?;
        Ok((answer.message, answer.payload.map(|payload| payload.to_vec()).unwrap_or_default()))
    }
}
