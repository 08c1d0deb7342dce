//! Making and deleting a model on the shards of a registry: from the side of whoever asks for it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::block_map::{BlockMap, MapError};
use libmodelio::ids::{BlockId, Generation, ShardId};
use libmodelio::layout::ModelLayout;
use libmodelio::registry::{Registry, RegistryError};
use libmodelio::wire::{Message, ModelRecord, Moved, RecordError, ShardRecord};

use crate::controls::{Controls, SETTINGS};

/// A model that is to be made.
#[derive(Debug)]
pub struct NewModel<'a> {
    /// Its name.
    pub name: &'a str,
    /// Tensors and blocks.
    pub layout: &'a ModelLayout,
    /// `__metadata__` of the file it comes from.
    pub metadata: BTreeMap<String, String>,
    /// Settings.
    pub controls: &'a Controls,
    /// Shards to stripe it over.
    pub shards: usize,
}

/// Why a model cannot be made or deleted.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The registry's word.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// Fewer shards than asked for.
    #[error("{wanted} shards are wanted, but only {there} {}", too_few(draining))]
    TooFewShards {
        /// Asked for.
        wanted: usize,
        /// Announced and not draining.
        there: usize,
        /// Announced, but draining.
        draining: Vec<String>,
    },
    /// The blocks cannot be striped so.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The model does not fit a record.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A shard's word.
    #[error("shard {shard} at {address}: {error}")]
    Shard {
        /// Which.
        shard: ShardId,
        /// Where.
        address: String,
        /// What it said, or did not.
        error: AdminError,
    },
    /// The bytes of the model cannot be had.
    #[error("cannot read the model: {0}")]
    Source(#[from] io::Error),
    /// No random number.
    #[error("no random number: {0}")]
    Random(String),
}

fn too_few(draining: &[String]) -> String {
    match draining {
        [] => "are announced: start more, or ask for fewer (--shards)".to_owned(),
        names => format!(
            "take models (draining: shard {}): start more, ask for fewer (--shards), or take that back \
             (gradfs drain --cancel)",
            names.join(", shard ")
        ),
    }
}

/// For small requests.
const PROMPT: Duration = Duration::from_secs(10);
/// For taking memory: seconds a gigabyte where it has to be found first.
const PATIENT: Duration = Duration::from_secs(300);

/// Makes a model: chooses shards, has them take memory, and sends them version 0. `source` fills a buffer with the
/// bytes of a block; `progress` is told of bytes sent.
///
/// # Errors
/// [`CreateError`]; nothing is left of the model then, as far as the shards can be reached.
pub fn create(
    registry: &dyn Registry,
    new: &NewModel<'_>,
    source: &mut dyn FnMut(BlockId, &mut [u8]) -> io::Result<()>,
    progress: &mut dyn FnMut(u64),
) -> Result<ModelRecord, CreateError> {
    let shards = registry.shards(Instant::now() + PROMPT)?;
    let (draining, mut there): (Vec<_>, Vec<_>) = shards.into_iter().partition(|shard| shard.draining);
    // A shard without blocks is no shard of the model.
    let wanted = new.shards.min(new.layout.blocks() as usize);
    if there.len() < wanted || wanted == 0 {
        let draining = draining.iter().map(|shard| format!("{} at {}", shard.shard, shard.address)).collect();
        return Err(CreateError::TooFewShards { wanted: new.shards, there: there.len(), draining });
    }
    there.truncate(wanted);
    let ids: Vec<ShardId> = there.iter().map(|shard| shard.shard).collect();
    let map = BlockMap::striped(new.layout.blocks(), &ids)?;
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|error| CreateError::Random(error.to_string()))?;
    let generation = Generation(u64::from_le_bytes(random).max(1));
    let texts = SETTINGS.iter().map(|(name, _)| (*name).to_owned());
    let controls = texts.filter_map(|name| new.controls.get(&name).map(|value| (name, value))).collect();
    let metadata = new.metadata.clone();
    let mut record = ModelRecord::new(new.name, generation, new.layout, metadata, &map, ids[0], controls)?;
    registry.put(&record, None, Instant::now() + PROMPT)?;
    let made = make(new.layout, &map, &record, &there, source, progress);
    if let Err(error) = made {
        // What was made is of no use; what cannot be reached now is cleared away when it is created again.
        let _ = forget(&record, &there);
        let _ = registry.delete(new.name, generation, Instant::now() + PROMPT);
        return Err(error);
    }
    record.ready = true;
    registry.put(&record, Some(record.epoch), Instant::now() + PROMPT)?;
    Ok(record)
}

fn make(
    layout: &ModelLayout,
    map: &BlockMap,
    record: &ModelRecord,
    shards: &[ShardRecord],
    source: &mut dyn FnMut(BlockId, &mut [u8]) -> io::Result<()>,
    progress: &mut dyn FnMut(u64),
) -> Result<(), CreateError> {
    let encoded = record.encode()?;
    let generation = record.generation;
    let mut block_bytes = vec![0; layout.block_size() as usize];
    let mut peers = Vec::new();
    for shard in shards {
        let failed = failed(shard);
        let mut peer = AdminPeer::connect(&shard.address, Instant::now() + PROMPT).map_err(&failed)?;
        peer.request(&Message::Create, &encoded, Instant::now() + PATIENT).map_err(&failed)?;
        for block in map.blocks_of(shard.shard) {
            let extent = layout.block_bytes(block);
            let bytes = &mut block_bytes[..(extent.end - extent.start) as usize];
            source(block, bytes)?;
            let load = Message::Load { generation, block };
            peer.tell(&load, bytes, Instant::now() + PROMPT).map_err(&failed)?;
            progress(bytes.len() as u64);
        }
        peers.push((shard, peer));
    }
    // The lead comes last: it begins the job.
    for (shard, mut peer) in peers.into_iter().rev() {
        let loaded = Message::Loaded { generation };
        peer.request(&loaded, &[], Instant::now() + PATIENT).map_err(failed(shard))?;
    }
    Ok(())
}

fn failed(shard: &ShardRecord) -> impl Fn(AdminError) -> CreateError {
    |error| CreateError::Shard { shard: shard.shard, address: shard.address.clone(), error }
}

/// Has all shards of a record forget the model, and those that it has moved to meanwhile. All are told.
///
/// # Errors
/// The first one.
pub fn forget(record: &ModelRecord, shards: &[ShardRecord]) -> Result<(), CreateError> {
    let owns = |record: &ModelRecord, shard: &ShardRecord| {
        record.owners.iter().any(|(owner, _)| *owner == shard.shard)
    };
    let mut outcome = Ok(());
    let mut left: VecDeque<ShardRecord> =
        shards.iter().filter(|shard| owns(record, shard)).cloned().collect();
    let mut told_of: BTreeSet<ShardId> = left.iter().map(|shard| shard.shard).collect();
    while let Some(shard) = left.pop_front() {
        let told = AdminPeer::connect(&shard.address, Instant::now() + PROMPT).and_then(|mut peer| {
            let delete = Message::Delete { model: record.name.clone(), generation: record.generation };
            peer.request(&delete, &[], Instant::now() + PROMPT)
        });
        match told.map_err(failed(&shard)) {
            Ok((Message::Moved, payload)) => match Moved::decode(&payload) {
                Ok(moved) => {
                    let owners = moved.shards.iter().filter(|shard| owns(&moved.record, shard));
                    left.extend(owners.filter(|shard| told_of.insert(shard.shard)).cloned());
                }
                Err(error) => outcome = outcome.and(Err(error.into())),
            },
            Ok(_) => {}
            Err(error) => outcome = outcome.and(Err(error)),
        }
    }
    outcome
}

/// Deletes a model: its learners and readers are cut off.
///
/// # Errors
/// [`CreateError`]; the registry has forgotten the model unless it is the registry that failed.
pub fn delete(registry: &dyn Registry, name: &str) -> Result<(), CreateError> {
    let record = registry.model(name, Instant::now() + PROMPT)?;
    let shards = registry.shards(Instant::now() + PROMPT)?;
    registry.delete(name, record.generation, Instant::now() + PROMPT)?;
    forget(&record, &shards)
}
