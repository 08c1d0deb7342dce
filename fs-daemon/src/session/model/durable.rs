//! Waiting until a version is in the job's store.

use std::time::{Duration, Instant};

use libmodelio::admin::AdminError;
use libmodelio::registry::{self, Registry, RegistryError};
use libmodelio::vocabulary::ids::Version;
use libmodelio::wire::ModelRecord;
use ps_backend::snapshot::AskedSnapshot;
use serde_json::Value;

use super::{Model, Snapshots};
use crate::session::error::{CallError, CallResult};

/// How often it is looked whether the job has heard of its snapshot.
const LOOKS: Duration = Duration::from_millis(2);

impl Model {
    /// Has the newest version saved, unless it is or a newer one, and waits for that.
    ///
    /// # Errors
    /// EINVAL without a store, ETIMEDOUT, and EIO with the reason why there is no snapshot.
    pub fn make_durable(&self) -> CallResult<()> {
        let (wanted, until) = (self.job.offered_version(), Instant::now() + self.timeout());
        if self.job.state().durable.is_some_and(|durable| durable >= wanted) {
            return Ok(());
        }
        if self.job.controls().snapshots.to.is_empty() {
            let what = "the job has no place for snapshots: set control/snapshot_to";
            return Err(CallError::new(libc::EINVAL, what));
        }
        match &self.snapshots {
            Snapshots::Here(shard) => {
                let saved = shard.upgrade().and_then(|shard| shard.saver()).map(|saver| saver.save_now());
                let ending = || Err("the job is being stopped".to_owned());
                saved.unwrap_or_else(ending).map(drop).map_err(|why| CallError::new(libc::EIO, why))
            }
            Snapshots::Registry(at) => self.ask_for_snapshot(at, wanted, until),
            Snapshots::Never(_) => Err(CallError::new(libc::EOPNOTSUPP, "a view has no snapshots")),
            Snapshots::PartOf(whole) => whole.make_durable(),
        }
    }

    /// Returns how the snapshots go that this process takes, or none if it takes no snapshots.
    pub fn snapshots_here(&self) -> Option<Value> {
        let Snapshots::Here(shard) = &self.whole().snapshots else { return None };
        shard.upgrade()?.saver()?.status()
    }

    fn ask_for_snapshot(&self, at: &str, wanted: Version, until: Instant) -> CallResult<()> {
        let failed = |why: &dyn std::fmt::Display| {
            let errno = if Instant::now() >= until { libc::ETIMEDOUT } else { libc::EIO };
            CallError::new(errno, format!("version {wanted} is not saved: {why}"))
        };
        let registry = registry::open(at).map_err(|error| failed(&error))?;
        let find = || coordinator(&*registry, &self.name, until).map_err(|error| failed(&error));
        let begun = AskedSnapshot::begin(("", true), until, find, |error: AdminError| failed(&error));
        let mut asked = begun?;
        while !asked.told.ended {
            asked.look(until).map_err(|error| failed(&error))?;
        }
        // It counts when the registry knows, too.
        while self.job.state().durable.is_none_or(|durable| durable < wanted) {
            if Instant::now() >= until || self.job.lost().is_some() {
                return Err(failed(&"it is in the store, and the registry does not know yet"));
            }
            std::thread::sleep(LOOKS);
        }
        Ok(())
    }
}

/// A model's record, and the address of its coordinator.
fn coordinator(
    registry: &dyn Registry,
    name: &str,
    until: Instant,
) -> Result<(ModelRecord, String), RegistryError> {
    let (record, shards) = (registry.model(name, until)?, registry.shards(until)?);
    let address = shards.into_iter().find(|shard| shard.shard == record.coordinator);
    let address = address.ok_or_else(|| RegistryError::NoModel(name.to_owned()))?.address;
    Ok((record, address))
}
