//! A registry in an etcd. Whoever asks reads what the request needs, has the table's own rules answer it, and writes what
//! they changed in one transaction, which fails if somebody else has changed the table meanwhile; then it begins again.
//!
//! | key | value |
//! |---|---|
//! | `table` | the format; written with each change of the table, so that its revision is the table's |
//! | `shards` | all shards: their records, whether they hold partitions, and whether they have announced themselves |
//! | `alive/NUMBER` | the shard's address; the key lives as long as the shard's lease |
//! | `refused/ADDRESS` | a shard that is refused, as long as it asks |
//! | `models/NAME` | what the table knows of a model, and where its record is |
//! | `records/NAME/ID/PART` | its record in parts, for etcd limits the size of a request |
//! | `deleted` | the deleted models |
//!
//! The time of no host is compared with that of another: etcd alone measures leases.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gradfs_stores::etcd::{Credentials, Entry, Etcd, EtcdError, EtcdUrl, Read, Write};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::table::{Answer, Given, Kept, KeptModel, KeptShard, Now, RegistryCore};
use super::{Registry, RegistryError};
use crate::admin::AdminError;
use crate::vocabulary::ids::{Generation, ShardId};
use crate::wire::{HeldPartition, Refusal, RefusedShard, RegistryAnswer, RegistryRequest, ShardRecord};

/// What `table` has; another release may write another one.
const FORMAT: &[u8] = b"gradfs registry 1";
/// Bytes of a part of a record. etcd takes 1.5 MiB in a request.
const PART: usize = 1 << 20;
/// Most partitions, and most deleted models, for which one transaction reads keys: it has 128 operations.
const HELD_AT_ONCE: usize = 50;
/// The table is built and asked at one moment.
const NOW: Now = Duration::from_secs(1);
/// The longest pause before another try.
const PAUSE: Duration = Duration::from_millis(200);

/// The registry in an etcd.
#[derive(Debug)]
pub struct EtcdRegistry {
    etcd: Etcd,
}

/// The value of `models/NAME`.
#[derive(Clone, Serialize, Deserialize)]
struct Head {
    model: KeptModel,
    /// The name of the record's parts.
    id: u64,
}

/// What a request needs of the table, besides the shards.
#[derive(Default)]
struct Needs {
    /// All models, without their records.
    all_models: bool,
    /// Or those of these names.
    models: BTreeSet<String>,
    /// The record of this model.
    record: Option<String>,
    deleted: bool,
    refused: bool,
}

impl Needs {
    fn of(request: &RegistryRequest, given: Option<&Given<'_>>) -> Needs {
        let named = |names: &mut dyn Iterator<Item = &String>| names.cloned().collect();
        let none = Needs::default();
        match request {
            RegistryRequest::Announce { .. } | RegistryRequest::Refused => Needs { refused: true, ..none },
            RegistryRequest::Models | RegistryRequest::Lost { .. } => Needs { all_models: true, ..none },
            RegistryRequest::Keep { model, .. } => {
                Needs { all_models: true, record: Some(model.clone()), ..none }
            }
            RegistryRequest::Model { name } => {
                Needs { models: named(&mut [name].into_iter()), record: Some(name.clone()), ..none }
            }
            RegistryRequest::Put { .. }
            | RegistryRequest::Restore { .. }
            | RegistryRequest::Succeed { .. } => {
                let record = given.map(|given| given.name().to_owned());
                Needs { all_models: true, record, deleted: true, ..none }
            }
            RegistryRequest::Delete { name, .. } => {
                Needs { models: named(&mut [name].into_iter()), deleted: true, ..none }
            }
            RegistryRequest::Holding { held, deleted, .. } => {
                let (held, deleted) = (held.iter().map(|one| &one.model), deleted.iter().map(|one| &one.0));
                Needs { models: named(&mut held.chain(deleted)), deleted: true, ..none }
            }
            _ => none,
        }
    }
}

/// What was read.
struct Table {
    kept: Kept,
    /// Of the last change.
    revision: i64,
    /// The leases of `alive/NUMBER`, by addresses, and the number.
    alive: BTreeMap<String, (ShardId, i64)>,
    /// The leases of `refused/ADDRESS`.
    refused: BTreeMap<String, i64>,
}

impl Table {
    /// Whether the announcement of a shard changes no number, so that the models do not matter.
    fn knows(&self, record: &ShardRecord, bound: bool) -> bool {
        let known = self.kept.shards.iter().find(|shard| shard.record.address == record.address);
        let claims = bound && record.shard.0 != 0;
        known.is_some_and(|known| !claims || known.record.shard == record.shard)
    }
}

/// The lease that an announcement asks for, once it was granted.
struct Lease {
    address: String,
    seconds: i64,
    granted: Option<i64>,
}

impl EtcdRegistry {
    /// The registry in the etcd at `url`, with the credentials of the environment. Connects at the first call.
    ///
    /// # Errors
    /// [`RegistryError::Peer`] if these do not go together, or not with the URL.
    pub fn open(url: EtcdUrl) -> Result<EtcdRegistry, RegistryError> {
        let etcd = Credentials::of_environment().and_then(|credentials| Etcd::new(url, &credentials));
        Ok(EtcdRegistry { etcd: etcd.map_err(AdminError::Etcd)? })
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.etcd.url().prefix)
    }

    fn read(&self, needs: &Needs, deadline: Instant) -> Result<Table, RegistryError> {
        let key = |key: &str| Read::Key(self.key(key));
        let prefix = |prefix: &str| Read::Prefix(self.key(prefix));
        let mut reads = vec![key("table"), key("shards"), prefix("alive/")];
        reads.push(if needs.refused { prefix("refused/") } else { key("refused/") });
        reads.push(if needs.deleted { key("deleted") } else { key("deleted/") });
        match needs.all_models {
            true => reads.push(prefix("models/")),
            false => reads.extend(needs.models.iter().map(|name| key(&format!("models/{name}")))),
        }
        let (read, at) = self.etcd.read(&reads, None, deadline)?;
        let mut read = read.into_iter();
        let mut next = || read.next().unwrap_or_default();
        let format = next().pop();
        if format.as_ref().is_some_and(|format| format.value != FORMAT) {
            let what = format!("{} is of another release: use the same one everywhere", self.key("table"));
            return Err(RegistryError::Refused(Refusal::other(what)));
        }
        let shards: Vec<(ShardRecord, bool, bool)> = self.only(next())?.unwrap_or_default();
        let mut alive = BTreeMap::new();
        for entry in next() {
            let number = entry.key.rsplit('/').next().and_then(|number| number.parse().ok());
            let number = ShardId(number.ok_or_else(|| damaged(&entry.key))?);
            alive.insert(self.decoded::<String>(&entry)?, (number, entry.lease));
        }
        let mut refused = BTreeMap::new();
        let mut kept = Kept::default();
        for entry in next() {
            let shard: RefusedShard = self.decoded(&entry)?;
            refused.insert(shard.record.address.clone(), entry.lease);
            kept.refused.push(shard);
        }
        kept.deleted = self.only(next())?.unwrap_or_default();
        for entry in read.flatten() {
            let Head { model, id } = self.decoded(&entry)?;
            let name = entry.key.rsplit('/').next().unwrap_or_default().to_owned();
            let record = match needs.record.as_ref() == Some(&name) {
                true => self.record(&name, id, model.len, at, deadline)?,
                false => Vec::new(),
            };
            kept.models.insert(name, (model, record.into()));
        }
        let living = |record: &ShardRecord| alive.get(&record.address).is_some_and(|at| at.0 == record.shard);
        let shard = |(record, holds, announced)| {
            let living = living(&record);
            KeptShard { living, record, holds, announced }
        };
        kept.shards = shards.into_iter().map(shard).collect();
        Ok(Table { kept, revision: format.map_or(0, |format| format.revision), alive, refused })
    }

    /// A model's record, as it was at a revision.
    fn record(
        &self,
        name: &str,
        id: u64,
        len: usize,
        at: i64,
        deadline: Instant,
    ) -> Result<Vec<u8>, RegistryError> {
        let mut record = Vec::with_capacity(len);
        for part in 0..parts(len) {
            let key = self.key(&part_of(name, id, part));
            let (read, _) = self.etcd.read(&[Read::Key(key.clone())], Some(at), deadline)?;
            let entry = read.into_iter().flatten().next().ok_or_else(|| damaged(&key))?;
            record.extend_from_slice(&entry.value);
        }
        if record.len() == len { Ok(record) } else { Err(damaged(&self.key(&part_of(name, id, 0)))) }
    }

    fn decoded<T: DeserializeOwned>(&self, entry: &Entry) -> Result<T, RegistryError> {
        postcard::from_bytes(&entry.value).map_err(|_| damaged(&entry.key))
    }

    fn only<T: DeserializeOwned>(&self, entries: Vec<Entry>) -> Result<Option<T>, RegistryError> {
        entries.first().map(|entry| self.decoded(entry)).transpose()
    }

    /// Writes what has changed. False if somebody else has changed the table since it was read.
    fn write(
        &self,
        table: &Table,
        after: &Kept,
        lease: &mut Option<Lease>,
        deadline: Instant,
    ) -> Result<bool, RegistryError> {
        let mut writes = Vec::new();
        let lasting = |kept: &Kept| -> Vec<(ShardRecord, bool, bool)> {
            kept.shards.iter().map(|of| (of.record.clone(), of.holds, of.announced)).collect()
        };
        let shards = lasting(after);
        if shards != lasting(&table.kept) {
            writes.push(Write::Put(self.key("shards"), encoded(&shards)?, 0));
        }
        if after.deleted != table.kept.deleted {
            writes.push(Write::Put(
                self.key("deleted"),
                encoded::<Vec<(String, Generation)>>(&after.deleted)?,
                0,
            ));
        }
        for (name, (model, bytes)) in &after.models {
            let before = table.kept.models.get(name);
            if before.is_none_or(|(_, before)| !Arc::ptr_eq(before, bytes)) {
                self.put_record(name, model, bytes, &mut writes, deadline)?;
            }
        }
        for name in table.kept.models.keys().filter(|name| !after.models.contains_key(*name)) {
            writes.push(Write::Delete(self.key(&format!("models/{name}"))));
            writes.push(self.range(&format!("records/{name}/"), &format!("records/{name}0")));
        }
        if !writes.is_empty() {
            writes.push(Write::Put(self.key("table"), FORMAT.to_vec(), 0));
        }
        self.write_leased(table, after, lease, &mut writes, deadline)?;
        if writes.is_empty() {
            return Ok(true);
        }
        let table_key = self.key("table");
        Ok(self.etcd.write(Some((&table_key, table.revision)), writes, deadline)?)
    }

    /// A model's new record. More than one part is written before the transaction, under a name that nobody reads before
    /// it; the transaction removes the parts of all other names.
    fn put_record(
        &self,
        name: &str,
        model: &KeptModel,
        bytes: &[u8],
        writes: &mut Vec<Write>,
        deadline: Instant,
    ) -> Result<(), RegistryError> {
        let id = random()?;
        let part =
            |(part, bytes): (usize, &[u8])| Write::Put(self.key(&part_of(name, id, part)), bytes.to_vec(), 0);
        let own = format!("records/{name}/{id:016x}");
        writes.push(self.range(&format!("records/{name}/"), &format!("{own}/")));
        writes.push(self.range(&format!("{own}0"), &format!("records/{name}0")));
        match parts(bytes.len()) {
            1 => writes.push(part((0, bytes))),
            _ => {
                for one in bytes.chunks(PART).enumerate() {
                    self.etcd.write(None, vec![part(one)], deadline)?;
                }
            }
        }
        let head = Head { model: model.clone(), id };
        writes.push(Write::Put(self.key(&format!("models/{name}")), encoded(&head)?, 0));
        Ok(())
    }

    fn range(&self, from: &str, to: &str) -> Write {
        Write::DeleteRange(self.key(from), self.key(to))
    }

    /// The keys that live as long as a lease. The shard that announces itself renews its own.
    fn write_leased(
        &self,
        table: &Table,
        after: &Kept,
        lease: &mut Option<Lease>,
        writes: &mut Vec<Write>,
        deadline: Instant,
    ) -> Result<(), RegistryError> {
        let mut alive: BTreeMap<ShardId, &str> = BTreeMap::new();
        for KeptShard { record, .. } in after.shards.iter().filter(|shard| shard.living) {
            alive.insert(record.shard, &record.address);
            let known = table.alive.get(&record.address).copied();
            let held = known.map(|(_, held)| held);
            let held = self.lease(&record.address, held, lease, deadline)?;
            if known != Some((record.shard, held)) {
                let key = self.key(&format!("alive/{}", record.shard));
                writes.push(Write::Put(key, encoded(&record.address)?, held));
            }
        }
        for (number, _) in table.alive.values().filter(|(number, _)| !alive.contains_key(number)) {
            writes.push(Write::Delete(self.key(&format!("alive/{number}"))));
        }
        for shard in &after.refused {
            let address = &shard.record.address;
            let known = table.refused.get(address).copied();
            let held = self.lease(address, known, lease, deadline)?;
            if known != Some(held) || !table.kept.refused.contains(shard) {
                writes.push(Write::Put(self.key(&format!("refused/{address}")), encoded(shard)?, held));
            }
        }
        let is_refused =
            |address: &&String| after.refused.iter().any(|shard| shard.record.address == **address);
        for address in table.refused.keys().filter(|address| !is_refused(address)) {
            writes.push(Write::Delete(self.key(&format!("refused/{address}"))));
        }
        Ok(())
    }

    /// The lease of a shard's key: the one that it has, which is renewed for the shard that announces itself, or a new one.
    fn lease(
        &self,
        address: &str,
        held: Option<i64>,
        lease: &mut Option<Lease>,
        deadline: Instant,
    ) -> Result<i64, RegistryError> {
        let Some(lease) = lease.as_mut().filter(|lease| lease.address == address) else {
            return held.ok_or_else(|| RegistryError::Refused(Refusal::other("a shard without a lease")));
        };
        if let Some(held) = held
            && lease.granted.is_none_or(|granted| granted == held)
            && self.etcd.renew(held, deadline)? >= lease.seconds
        {
            return Ok(held);
        }
        match lease.granted {
            Some(granted) => Ok(granted),
            None => Ok(*lease.granted.insert(self.etcd.grant(lease.seconds, deadline)?)),
        }
    }

    fn once(
        &self,
        request: &RegistryRequest,
        payload: &[u8],
        deadline: Instant,
    ) -> Result<(RegistryAnswer, Vec<u8>), RegistryError> {
        let given = Given::of(request, payload)?;
        let mut needs = Needs::of(request, given.as_ref());
        let mut lease = match request {
            RegistryRequest::Announce { record, lease_ms, .. } => {
                let (address, seconds) = (record.address.clone(), i64::from(lease_ms.div_ceil(1000)));
                Some(Lease { address, seconds, granted: None })
            }
            _ => None,
        };
        let mut pause = Duration::from_millis(2);
        loop {
            let table = self.read(&needs, deadline)?;
            if let RegistryRequest::Announce { record, bound, .. } = request
                && !needs.all_models
                && !table.knows(record, *bound)
            {
                needs.all_models = true;
                continue;
            }
            let mut core = RegistryCore::of(&table.kept, NOW, NOW, false);
            let answer = core.answer(None, request, given.clone(), NOW);
            if self.write(&table, &core.kept(NOW), &mut lease, deadline)? {
                let Answer { message, payload } = answer?;
                return Ok((message, payload.map(|payload| payload.to_vec()).unwrap_or_default()));
            }
            if Instant::now() + pause > deadline {
                let (members, why) =
                    (self.etcd.url().members.join(","), "others change the table all the time");
                return Err(EtcdError::Unavailable { members, why: why.to_owned() }.into());
            }
            // Those who wait for each other do not come back at the same time.
            std::thread::sleep(pause.mul_f64(random()? as f64 / u64::MAX as f64));
            pause = (pause * 2).min(PAUSE);
        }
    }
}

impl Registry for EtcdRegistry {
    fn ask(
        &self,
        request: RegistryRequest,
        payload: &[u8],
        deadline: Instant,
    ) -> Result<(RegistryAnswer, Vec<u8>), RegistryError> {
        let RegistryRequest::Holding { shard, held, deleted } = request else {
            return self.once(&request, payload, deadline);
        };
        let ask = |held: &[HeldPartition], deleted: &[(String, Generation)]| {
            let (held, deleted) = (held.to_vec(), deleted.to_vec());
            self.once(&RegistryRequest::Holding { shard, held, deleted }, &[], deadline)
        };
        if held.len() + deleted.len() <= HELD_AT_ONCE {
            return ask(&held, &deleted);
        }
        // A model that is deleted is so for all that follows.
        for deleted in deleted.chunks(HELD_AT_ONCE) {
            ask(&[], deleted)?;
        }
        let (mut is_draining, mut all) = (false, Vec::with_capacity(held.len()));
        for held in held.chunks(HELD_AT_ONCE) {
            if let (RegistryAnswer::Fates { draining, fates }, _) = ask(held, &[])? {
                is_draining = draining;
                all.extend(fates);
            }
        }
        if held.is_empty() {
            return ask(&[], &[]);
        }
        Ok((RegistryAnswer::Fates { draining: is_draining, fates: all }, Vec::new()))
    }
}

impl From<EtcdError> for RegistryError {
    fn from(error: EtcdError) -> RegistryError {
        AdminError::Etcd(error).into()
    }
}

fn parts(len: usize) -> usize {
    len.div_ceil(PART).max(1)
}

fn part_of(name: &str, id: u64, part: usize) -> String {
    format!("records/{name}/{id:016x}/{part}")
}

fn encoded<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, RegistryError> {
    postcard::to_stdvec(value).map_err(|error| RegistryError::Refused(Refusal::other(error)))
}

fn damaged(key: &str) -> RegistryError {
    let what = format!("its key {key} in etcd is damaged: delete it, and the shards tell what they know");
    RegistryError::Refused(Refusal::other(what))
}

fn random() -> Result<u64, RegistryError> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| RegistryError::Refused(Refusal::other(error)))?;
    Ok(u64::from_le_bytes(bytes))
}

/// What tests look at, and what time does otherwise.
#[cfg(test)]
impl EtcdRegistry {
    /// Ends the lease of a shard that is alive, or refused.
    pub(super) fn expire(
        &self,
        address: &str,
        refused: bool,
        deadline: Instant,
    ) -> Result<(), RegistryError> {
        let table = self.read(&Needs { refused: true, ..Needs::default() }, deadline)?;
        let alive = table.alive.get(address).map(|(_, lease)| lease);
        match if refused { table.refused.get(address) } else { alive } {
            Some(&lease) => Ok(self.etcd.revoke(lease, deadline)?),
            None => Ok(()),
        }
    }

    pub(super) fn known(&self, deadline: Instant) -> Result<Vec<ShardRecord>, RegistryError> {
        let table = self.read(&Needs::default(), deadline)?;
        Ok(table.kept.shards.into_iter().map(|shard| shard.record).collect())
    }

    /// Bytes of all records, those that nobody reads included.
    pub(super) fn record_bytes(&self, deadline: Instant) -> Result<usize, RegistryError> {
        let (read, _) = self.etcd.read(&[Read::Prefix(self.key("records/"))], None, deadline)?;
        Ok(read.iter().flatten().map(|entry| entry.value.len()).sum())
    }
}
