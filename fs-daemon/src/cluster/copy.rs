//! `gradfs registry copy`: the models of one registry in another one.

use std::collections::BTreeSet;

use libmodelio::registry::RegistryError;
use libmodelio::vocabulary::ids::ShardId;
use libmodelio::wire::ShardRecord;

use super::{deadline, registry, registry_error};
use crate::config::registry::RegistryAt;
use crate::error::Error;

/// Copies all models, and the numbers, addresses and drains of their shards. What is there stays: a record that is newer,
/// and all other models. Shards are listed when they announce themselves there.
///
/// # Errors
/// When one of them does not answer, or a model cannot be copied; the others are.
pub fn run(from: &RegistryAt, to: &RegistryAt) -> Result<(), Error> {
    if from == to {
        return Err(Error::usage(format!("{from} is named twice")).hint("gradfs registry copy FROM TO"));
    }
    let (source, target) = (registry(from)?, registry(to)?);
    let (of_source, of_target) = (|error| registry_error(from, error), |error| registry_error(to, error));
    let shards = source.shards(deadline()).map_err(of_source)?;
    let names = source.models(deadline()).map_err(of_source)?;
    let (mut owning, mut failed) = (BTreeSet::new(), Vec::new());
    for name in &names {
        let record = match source.model(name, deadline()) {
            // The model was deleted meanwhile.
            Err(RegistryError::NoModel(_)) => continue,
            outcome => outcome.map_err(of_source)?,
        };
        let owners: BTreeSet<ShardId> = record.owners.iter().map(|&(owner, _)| owner).collect();
        let known: Vec<ShardRecord> =
            shards.iter().filter(|shard| owners.contains(&shard.shard)).cloned().collect();
        match target.restore(&record, &known, deadline()) {
            Ok(()) | Err(RegistryError::Epoch { .. }) => owning.extend(known.iter().map(|shard| shard.shard)),
            Err(error @ RegistryError::Peer(_)) => return Err(of_target(error)),
            Err(error) => failed.push(format!("{name}: {error}")),
        }
    }
    for shard in shards.iter().filter(|shard| shard.draining && owning.contains(&shard.shard)) {
        target.drain(shard.shard, deadline()).map_err(of_target)?;
    }
    println!("gradfs: copied {} model(s) from {from} to {to}", names.len() - failed.len());
    if failed.is_empty() {
        return Ok(());
    }
    let what = format!("{} model(s) are not copied", failed.len());
    Err(Error::new(what).caused_by(failed.join("; ")).hint("delete what is in their place, and copy again"))
}
