//! The registry in this process: the table with its lock and clock, and the interface that other processes reach over
//! the network.

use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use libmodelio::registry::table::{Answer, Given, Now, RegistryCore};
use libmodelio::registry::{Registry, RegistryError};
use libmodelio::wire::{Refusal, RegistryAnswer, RegistryRequest};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::state_file::StateFile;

/// For this long shards that a state file names count as there. Those that are announce themselves meanwhile.
const GRACE: Duration = Duration::from_secs(10);

/// The registry in this process.
pub(super) struct Table {
    core: Mutex<RegistryCore>,
    started: Instant,
    /// Where it is kept for a restart. Locked before the table.
    file: Option<Mutex<StateFile>>,
}

impl Table {
    /// The table that a state file has, or an empty one.
    ///
    /// # Errors
    /// If there is a file, and it cannot be used.
    pub(super) fn new(state: Option<&Path>) -> io::Result<Table> {
        let file = state.map(StateFile::open).transpose()?;
        let core = match &file {
            Some(file) => RegistryCore::of(file.kept(), Now::ZERO, GRACE, true),
            None => RegistryCore::new(),
        };
        Ok(Table { core: Mutex::new(core), started: Instant::now(), file: file.map(Mutex::new) })
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
        let reads = matches!(
            request,
            RegistryRequest::Shards
                | RegistryRequest::Refused
                | RegistryRequest::Models
                | RegistryRequest::Model { .. }
        );
        let file = self.file.as_ref().filter(|_| !reads).map(Mutex::lock);
        let (answer, kept) = {
            let mut core = self.core.lock();
            let answer = core.answer(from, request, given, self.age());
            (answer, file.is_some().then(|| core.kept(self.age())))
        };
        // Those who only read do not wait for the disk.
        if let (Some(mut file), Some(kept)) = (file, kept) {
            file.keep(kept);
        }
        answer
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
