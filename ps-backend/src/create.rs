//! Making and deleting a model on the shards of a registry: from the side of whoever asks for it.

mod placing;
mod restore;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::registry::{Registry, RegistryError};
use libmodelio::vocabulary::block_map::{BlockMap, MapError};
use libmodelio::vocabulary::ids::{Generation, ShardId};
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::{DataKind, Lineage, Message, ModelRecord, Moved, RecordError, ShardRecord};

use libmodelio::vocabulary::controls::Controls;
use serde_json::{Map, Value};

use self::placing::{Candidate, choose};
pub use self::restore::{Restored, Restorer, restore};
use crate::core::JobRecord;
use crate::memory::MemoryUse;
use crate::partition::store::kept_range;
use crate::snapshot::{self, Piece, SnapshotError};
use crate::state_copies::StateCopies;

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
    /// Shards to stripe it over; without a number all that have room for their part.
    pub shards: Option<usize>,
    /// The record of the job that it goes on from, if it begins at a snapshot.
    pub record: Option<&'a JobRecord>,
    /// The store and the name of the snapshot, if shards can read it by themselves. What one of them cannot read is sent to
    /// it.
    pub place: Option<(&'a str, &'a str)>,
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
    /// A shard refused a request, or did not answer it.
    #[error("shard {shard} at {address}: {error}")]
    Shard {
        /// The shard.
        shard: ShardId,
        /// The address of the shard.
        address: String,
        /// The refusal of the shard, or why it gave no answer.
        error: AdminError,
    },
    /// A shard of the model that the registry has not heard of lately.
    #[error("shard {0} is not announced: it is stopped, or cut off")]
    NotAnnounced(ShardId),
    /// The work with this shard was given up, because another shard failed.
    #[error("given up because of another shard")]
    Stopped,
    /// There is no thread to ask a shard with.
    #[error("a shard could not be asked: {0}")]
    Thread(String),
    /// The store of the model's snapshots is another one's, or cannot be written.
    #[error("cannot take over the store of its snapshots: {0}")]
    Claim(SnapshotError),
    /// The bytes of the model cannot be had.
    #[error("cannot read the model: {0}")]
    Source(#[from] SnapshotError),
    /// The mount whose weights it goes on with has not brought them.
    #[error("the mount that has newer weights has not brought them within its time")]
    NotBrought,
    /// The system gives no random number for the generation.
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

/// The time for a small request.
const PROMPT: Duration = Duration::from_secs(10);
/// The time for a shard to say what it has. A shard that does not answer is asked for blocks only if there is no other.
const ASKED: Duration = Duration::from_secs(2);
/// The time for a request that takes memory. A gigabyte takes seconds if the kernel has to find the memory first.
const PATIENT: Duration = Duration::from_secs(300);
/// The time to send a block. A link may be slow.
const SENDING: Duration = Duration::from_secs(60);

/// Fills a buffer with a piece of what the model begins with, or leaves it empty where that is zero; called by several
/// threads.
pub type Source<'a> = dyn Fn(Piece, &mut Vec<u8>) -> Result<(), SnapshotError> + Sync + 'a;

/// Told of bytes that are at their shard, by several threads. It can return an interruption.
pub type Progress<'a> = dyn Fn(u64) -> Result<(), SnapshotError> + Sync + 'a;

/// Makes a model: chooses shards, has them take memory, and has them load what it begins with, or sends them that, all at
/// once.
///
/// # Errors
/// [`CreateError`]; nothing is left of the model then, as far as the shards can be reached.
pub fn create(
    registry: &dyn Registry,
    new: &NewModel<'_>,
    source: &Source<'_>,
    progress: &Progress<'_>,
) -> Result<ModelRecord, CreateError> {
    let shards = registry.shards(Instant::now() + PROMPT)?;
    let (draining, there): (Vec<_>, Vec<_>) = shards.into_iter().partition(|shard| shard.draining);
    // A shard without blocks is no shard of the model.
    let blocks = new.layout.blocks() as usize;
    let wanted = new.shards.unwrap_or(1);
    if there.len() < wanted.min(blocks) || wanted == 0 {
        let draining = draining.iter().map(|shard| format!("{} at {}", shard.shard, shard.address)).collect();
        return Err(CreateError::TooFewShards { wanted, there: there.len(), draining });
    }
    let needed = MemoryUse::of_partition(new.layout, new.controls, Some(StateCopies::default()));
    let there = choose(ask(there), new.shards, blocks, needed.total());
    let ids: Vec<ShardId> = there.iter().map(|shard| shard.shard).collect();
    let map = BlockMap::striped(new.layout.blocks(), &ids)?;
    let generation = new_generation().map_err(|error| CreateError::Random(error.to_string()))?;
    let (controls, metadata) = (new.controls.clone(), new.metadata.clone());
    let mut record = ModelRecord::new(new.name, generation, new.layout, metadata, &map, ids[0], controls)?;
    if let Some(job) = new.record {
        record.lineage.reserved = Lineage::reserved_for(job.version);
        record.lineage.begins = job.version;
    }
    registry.put(&record, None, Instant::now() + PROMPT)?;
    record.ready = true;
    let unready = ModelRecord { ready: false, ..record.clone() };
    let made = make(new, (&map, &unready), &there, (source, progress), None)
        .and_then(|()| Ok(put_ready(registry, &record, &there)?));
    if let Err(error) = made {
        // The partitions that were made are of no use. A shard that cannot be reached now learns that from the
        // registry, and a registry from the shards.
        let _ = registry.delete(new.name, generation, Instant::now() + PROMPT);
        forget(&record, &there);
        return Err(error);
    }
    Ok(record)
}

/// A number that no earlier life of a model has had.
///
/// # Errors
/// If the system has no random numbers.
pub(crate) fn new_generation() -> Result<Generation, getrandom::Error> {
    let mut random = [0; 8];
    getrandom::fill(&mut random)?;
    Ok(Generation(u64::from_le_bytes(random).max(1)))
}

/// Asks all shards at once what they hold, and what memory they have left.
fn ask(shards: Vec<ShardRecord>) -> Vec<Candidate> {
    let standing = |shard: &ShardRecord| {
        let until = Instant::now() + ASKED;
        let mut peer = AdminPeer::connect(&shard.address, until).ok()?;
        match peer.request(&Message::Status, &[], until).ok()? {
            (Message::Text, status) => {
                let status: Map<String, Value> = serde_json::from_slice(&status).ok()?;
                serde_json::from_value(Value::Object(status)).ok()
            }
            _ => None,
        }
    };
    std::thread::scope(|scope| {
        let asked: Vec<_> = shards
            .into_iter()
            .map(|record| {
                let of = record.clone();
                (record, std::thread::Builder::new().spawn_scoped(scope, move || standing(&of)))
            })
            .collect();
        let candidate =
            |(record, answer): (ShardRecord, io::Result<std::thread::ScopedJoinHandle<'_, _>>)| {
                let standing = answer.ok().and_then(|answer| answer.join().ok()).flatten();
                Candidate { record, standing }
            };
        asked.into_iter().map(candidate).collect()
    })
}

/// Tells the registry that all blocks are there. If the registry is out of reach, this repeats the request for a while.
fn put_ready(
    registry: &dyn Registry,
    record: &ModelRecord,
    shards: &[ShardRecord],
) -> Result<(), RegistryError> {
    const RETRY_PAUSE: Duration = Duration::from_millis(200);
    let deadline = Instant::now() + PROMPT;
    loop {
        let answer = match registry.put(record, Some(record.epoch), deadline) {
            // The registry was restarted meanwhile. The coordinator may have told it of the model already.
            Err(RegistryError::NoModel(_)) => registry.restore(record, shards, deadline),
            outcome => outcome,
        };
        match answer {
            Err(RegistryError::Peer(_)) if Instant::now() + RETRY_PAUSE < deadline => {
                std::thread::sleep(RETRY_PAUSE)
            }
            outcome => return outcome,
        }
    }
}

/// Makes a model on its shards. If `brings` is there, others bring some of what it begins with: once the shards have taken
/// their memory, and before they load the rest.
fn make(
    new: &NewModel<'_>,
    (map, record): (&BlockMap, &ModelRecord),
    shards: &[ShardRecord],
    (source, progress): (&Source<'_>, &Progress<'_>),
    brings: Option<&dyn Fn() -> Result<(), CreateError>>,
) -> Result<(), CreateError> {
    let begins = new.record.map(serde_json::to_vec).transpose();
    let load = Load {
        layout: new.layout,
        optimizer: new.record.map(|record| record.optimizer),
        begins: begins.map_err(|error| SnapshotError::Invalid(error.to_string()))?,
        map,
        record,
        encoded: &record.encode()?,
        place: new.place,
        source,
        progress,
        over: AtomicBool::new(false),
    };
    match brings {
        None => load.at_each(shards, |shard| load.fill(&mut load.take_memory(shard)?, shard))?,
        Some(brings) => {
            load.at_each(shards, |shard| load.take_memory(shard).map(drop))?;
            brings()?;
            load.at_each(shards, |shard| load.fill(&mut connected(shard)?, shard))?;
        }
    }
    // The coordinator comes last: it begins the job.
    for shard in shards.iter().filter(|shard| shard.shard == record.coordinator) {
        let loaded = Message::Loaded { generation: record.generation };
        connected(shard)?.request(&loaded, &[], Instant::now() + PATIENT).map_err(failed_at(shard))?;
    }
    Ok(())
}

fn connected(shard: &ShardRecord) -> Result<AdminPeer, CreateError> {
    AdminPeer::connect(&shard.address, Instant::now() + PROMPT).map_err(failed_at(shard))
}

/// Fails if one has: by what went wrong, rather than that others have stopped because of it.
fn all_loaded(outcomes: Vec<Result<(), CreateError>>) -> Result<(), CreateError> {
    let mut failed: Vec<CreateError> = outcomes.into_iter().filter_map(Result::err).collect();
    let cause = failed.iter().position(|error| !matches!(error, CreateError::Stopped));
    match failed.is_empty() {
        true => Ok(()),
        false => Err(failed.swap_remove(cause.unwrap_or(0))),
    }
}

fn joined<T>(thread: io::Result<std::thread::ScopedJoinHandle<'_, T>>) -> Result<T, CreateError> {
    let thread = thread.map_err(|error| CreateError::Thread(error.to_string()))?;
    thread.join().map_err(|_| CreateError::Thread("it panicked".into()))
}

/// What is sent to shards.
struct Load<'a> {
    layout: &'a ModelLayout,
    map: &'a BlockMap,
    record: &'a ModelRecord,
    encoded: &'a [u8],
    /// Whose state it begins with, if it begins at a snapshot, and the record of its job.
    optimizer: Option<Reducer>,
    begins: Option<Vec<u8>>,
    place: Option<(&'a str, &'a str)>,
    source: &'a Source<'a>,
    progress: &'a Progress<'a>,
    /// It has failed somewhere: the others need not go on.
    over: AtomicBool,
}

impl Load<'_> {
    /// Each shard on its own thread: a slow one, or one that is short of memory, keeps nobody's connection silent.
    fn at_each(
        &self,
        shards: &[ShardRecord],
        what: impl Fn(&ShardRecord) -> Result<(), CreateError> + Sync,
    ) -> Result<(), CreateError> {
        let of_shard = |shard| {
            let outcome = what(shard);
            if outcome.is_err() {
                self.over.store(true, Ordering::Relaxed);
            }
            outcome
        };
        all_loaded(std::thread::scope(|scope| {
            let begun = |shard| std::thread::Builder::new().spawn_scoped(scope, move || of_shard(shard));
            let threads: Vec<_> = shards.iter().map(begun).collect();
            threads.into_iter().map(|thread| joined(thread).and_then(|outcome| outcome)).collect()
        }))
    }

    /// A shard takes its memory.
    fn take_memory(&self, shard: &ShardRecord) -> Result<AdminPeer, CreateError> {
        let (failed, generation) = (failed_at(shard), self.record.generation);
        let mut peer = connected(shard)?;
        peer.request(&Message::Create, self.encoded, Instant::now() + PATIENT).map_err(&failed)?;
        if let Some(record) = &self.begins {
            let begin = Message::BeginAt { generation };
            peer.request(&begin, record, Instant::now() + PATIENT).map_err(&failed)?;
        }
        Ok(peer)
    }

    /// A shard takes its blocks, and has said that they are all there.
    fn fill(&self, peer: &mut AdminPeer, shard: &ShardRecord) -> Result<(), CreateError> {
        if !self.loads_by_itself(peer, shard)? {
            self.send(peer, shard)?;
        }
        // Answered after all that came before it. The coordinator is told that it is all when the others have theirs.
        let last = match self.record.coordinator == shard.shard {
            true => Message::Status,
            false => Message::Loaded { generation: self.record.generation },
        };
        peer.request(&last, &[], Instant::now() + PATIENT).map_err(failed_at(shard))?;
        Ok(())
    }

    /// Has a shard read its blocks from a store. False if it cannot, or there is no store.
    fn loads_by_itself(&self, peer: &mut AdminPeer, shard: &ShardRecord) -> Result<bool, CreateError> {
        let Some((from, name)) = self.place else { return Ok(false) };
        let generation = self.record.generation;
        let load = Message::LoadCopy { generation, from: from.to_owned(), name: name.to_owned() };
        let mut before = 0;
        loop {
            let (dealt, ended) = match peer.request(&load, &[], Instant::now() + PROMPT) {
                Ok((Message::Saved { dealt, ended, .. }, _)) => (dealt, ended),
                Ok((other, _)) => {
                    let (address, what) = (shard.address.clone(), other.name());
                    return Err(failed_at(shard)(AdminError::Unexpected { address, what }));
                }
                // Its host may see another directory, or have no credentials. If the snapshot is damaged, sending fails.
                Err(AdminError::Refusal(why)) => {
                    tracing::warn!(shard = %shard.shard, "the shard cannot read {from}, so its blocks are sent: {why}");
                    return Ok(false);
                }
                Err(error) => return Err(failed_at(shard)(error)),
            };
            (self.progress)(dealt.saturating_sub(before))?;
            if ended {
                return Ok(true);
            }
            if self.over.load(Ordering::Relaxed) {
                return Err(CreateError::Stopped);
            }
            before = dealt;
        }
    }

    fn send(&self, peer: &mut AdminPeer, shard: &ShardRecord) -> Result<(), CreateError> {
        let (failed, generation) = (failed_at(shard), self.record.generation);
        let kinds: Vec<DataKind> = match self.optimizer {
            Some(optimizer) => snapshot::all_kinds(optimizer).collect(),
            None => vec![DataKind::Weights],
        };
        let pieces =
            self.map.blocks_of(shard.shard).flat_map(|block| kinds.iter().map(move |&what| (block, what)));
        let mut bytes = Vec::new();
        for (block, what) in pieces {
            if kept_range(self.layout, block, what).is_empty() {
                continue;
            }
            if self.over.load(Ordering::Relaxed) {
                return Err(CreateError::Stopped);
            }
            (self.source)((block, what), &mut bytes)?;
            let load = Message::Load { generation, block, what };
            if let Err(error) = peer.notify(&load, &bytes, Instant::now() + SENDING) {
                return Err(failed(why(peer, error)));
            }
            (self.progress)(bytes.len() as u64)?;
        }
        Ok(())
    }
}

/// What a shard has said before it ended the connection, if it did.
fn why(peer: &mut AdminPeer, error: AdminError) -> AdminError {
    const LAST_WORD: Duration = Duration::from_secs(1);
    if !error.is_disconnect() {
        return error;
    }
    match peer.answer(Instant::now() + LAST_WORD) {
        Err(said @ AdminError::Disconnected { .. }) => said,
        _ => error,
    }
}

fn failed_at(shard: &ShardRecord) -> impl Fn(AdminError) -> CreateError {
    |error| CreateError::Shard { shard: shard.shard, address: shard.address.clone(), error }
}

/// Has all shards of a record forget the model, and those that it has moved to meanwhile. All are told, and those that
/// have not said that they have are returned: they do once they hear of it, from the registry if it was told.
pub fn forget(record: &ModelRecord, shards: &[ShardRecord]) -> Vec<CreateError> {
    let owners: BTreeSet<ShardId> = record.owners.iter().map(|(owner, _)| *owner).collect();
    let mut reached = BTreeSet::new();
    let mut left: Vec<ShardRecord> =
        shards.iter().filter(|shard| owners.contains(&shard.shard)).cloned().collect();
    let mut unconfirmed: Vec<CreateError> = owners
        .iter()
        .filter(|owner| !left.iter().any(|shard| shard.shard == **owner))
        .map(|&owner| CreateError::NotAnnounced(owner))
        .collect();
    while !left.is_empty() {
        reached.extend(left.iter().map(|shard| shard.shard));
        let answers = forget_at(record, &left);
        left.clear();
        for answer in answers {
            match answer {
                Ok(None) => {}
                Ok(Some(moved)) => {
                    let owns = |shard: &ShardRecord| {
                        moved.record.owners.iter().any(|(owner, _)| *owner == shard.shard)
                    };
                    let more = moved.shards.iter().filter(|shard| owns(shard) && reached.insert(shard.shard));
                    left.extend(more.cloned());
                }
                Err(error) => unconfirmed.push(error),
            }
        }
    }
    unconfirmed
}

/// Tells all of these at once. Where one says that the model has moved, it says where to.
fn forget_at(record: &ModelRecord, shards: &[ShardRecord]) -> Vec<Result<Option<Moved>, CreateError>> {
    let delete = |shard: &ShardRecord| {
        let answer = AdminPeer::connect(&shard.address, Instant::now() + PROMPT).and_then(|mut peer| {
            let delete = Message::Delete { model: record.name.clone(), generation: record.generation };
            peer.request(&delete, &[], Instant::now() + PROMPT)
        });
        match answer.map_err(failed_at(shard))? {
            (Message::Moved, payload) => Ok(Some(Moved::decode(&payload)?)),
            _ => Ok(None),
        }
    };
    std::thread::scope(|scope| {
        let asked: Vec<_> = shards
            .iter()
            .map(|shard| std::thread::Builder::new().spawn_scoped(scope, move || delete(shard)))
            .collect();
        asked.into_iter().map(|asked| joined(asked).and_then(|answer| answer)).collect()
    })
}

/// Deletes a model: its learners and readers are cut off. Shards that have not said that it is gone from them are
/// returned.
///
/// # Errors
/// [`CreateError`]; nothing is deleted then, unless it is the registry's answer that was lost.
pub fn delete(registry: &dyn Registry, name: &str) -> Result<Vec<CreateError>, CreateError> {
    let record = registry.model(name, Instant::now() + PROMPT)?;
    let shards = registry.shards(Instant::now() + PROMPT)?;
    registry.delete(name, record.generation, Instant::now() + PROMPT)?;
    let unconfirmed = forget(&record, &shards);
    if !unconfirmed.is_empty() {
        // Who holds no partition of it tells a registry that is started anew, so that the model does not come back.
        let others: Vec<ShardRecord> = shards
            .into_iter()
            .filter(|shard| record.owners.iter().all(|(owner, _)| *owner != shard.shard))
            .collect();
        forget_at(&record, &others);
    }
    Ok(unconfirmed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_upload_has_not_loaded() {
        let stopped = || Err(CreateError::Stopped);
        let thread = || Err(CreateError::Thread("it panicked".into()));
        assert!(all_loaded(vec![Ok(()), Ok(())]).is_ok());
        assert!(matches!(all_loaded(vec![Ok(()), stopped()]), Err(CreateError::Stopped)));
        assert!(matches!(all_loaded(vec![stopped(), stopped()]), Err(CreateError::Stopped)));
        assert!(matches!(all_loaded(vec![stopped(), thread(), Ok(())]), Err(CreateError::Thread(_))));
    }
}
