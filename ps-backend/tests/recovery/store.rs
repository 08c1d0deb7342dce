//! The store of the job: the product's shelf of snapshots over objects in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::layout::{DType, MIN_BLOCK_SIZE, ModelLayout};
use ps_backend::core::{JobCore, JobRecord};
use ps_backend::partition::store::kept_range;
use ps_backend::snapshot::{Head, Pack, Place, Places, Shelf, SnapshotError, kinds, pieces};
use ps_backend::stores::{Existing, Listed, Objects, StoreError};

use super::content::Content;
use super::world::MODEL;

/// Objects in memory.
#[derive(Debug, Default)]
pub(super) struct Memory(Mutex<BTreeMap<String, Vec<u8>>>);

impl Memory {
    fn objects(&self) -> MutexGuard<'_, BTreeMap<String, Vec<u8>>> {
        self.0.lock().expect("nobody panics with it")
    }
}

impl Objects for Memory {
    fn url(&self) -> &str {
        "/s"
    }

    fn put(&self, name: &str, parts: &[&[u8]], existing: Existing) -> Result<(), StoreError> {
        let mut objects = self.objects();
        if existing == Existing::Kept && objects.contains_key(name) {
            return Err(StoreError::Exists(name.to_owned()));
        }
        objects.insert(name.to_owned(), parts.concat());
        Ok(())
    }

    fn get(&self, name: &str) -> Result<Vec<u8>, StoreError> {
        self.objects().get(name).cloned().ok_or_else(|| StoreError::Missing(name.to_owned()))
    }

    fn read_at(&self, name: &str, _: u64, _: &mut [u8]) -> Result<(), StoreError> {
        Err(StoreError::Missing(name.to_owned()))
    }

    fn list(&self, folder: &str) -> Result<Vec<Listed>, StoreError> {
        let (objects, folder) = (self.objects(), format!("{folder}/"));
        let inside = objects.range(folder.clone()..).take_while(|(name, _)| name.starts_with(&folder));
        Ok(inside.map(|(name, of)| Listed { name: name.clone(), bytes: of.len() as u64 }).collect())
    }

    fn delete(&self, name: &str) -> Result<(), StoreError> {
        self.objects().remove(name);
        Ok(())
    }

    fn tidy(&self, _: &str) -> Result<(), StoreError> {
        Ok(())
    }
}

/// A snapshot that a restoration goes on from.
#[derive(Clone)]
pub(super) struct Snapshot {
    pub(super) name: String,
    pub(super) record: JobRecord,
    places: Places,
}

/// What becomes of an object that is being written.
#[derive(Clone, Copy)]
pub(super) enum Torn {
    /// Its end is missing.
    Cut,
    /// A byte of it is another one.
    Changed,
}

pub(super) struct Store {
    memory: Arc<Memory>,
    pub(super) shelf: Shelf,
    pub(super) layout: ModelLayout,
    pub(super) controls: Controls,
    /// The head of a snapshot of a job that has just begun.
    head: Head,
}

impl Store {
    pub(super) fn new() -> Store {
        let tensors = vec![("w".to_owned(), DType::F32, vec![100_000])];
        let layout = ModelLayout::new(tensors, MIN_BLOCK_SIZE).unwrap();
        let controls = Controls::default().with_all([("consistency", "async")]).unwrap();
        let record = JobCore::new(layout.blocks(), 1, controls.clone()).record();
        let mut head = Head::new(MODEL, &layout, BTreeMap::new(), &controls, record);
        // The others are as they are by default, and take long to read.
        head.settings.retain(|name, _| name == "consistency");
        let memory = Arc::new(Memory::default());
        Store { shelf: Shelf::of(memory.clone()), memory, layout, controls, head }
    }

    /// The record of a job that has just begun.
    pub(super) fn begun(&self) -> JobRecord {
        self.head.record.clone()
    }

    /// Writes the packs of a snapshot, of which this process holds all, and where its pieces lie.
    pub(super) fn write_part(&self, id: u64, record: &JobRecord, content: &Content) {
        let mut places = Places::default();
        let (name, mut offset) = (Shelf::pack_name(id, 0) + "-00000", 0);
        let lengths = pieces(&self.layout, kinds(record)).map(|piece| {
            let range = kept_range(&self.layout, piece.0, piece.1);
            (piece, range.end - range.start)
        });
        let lengths: Vec<_> = lengths.collect();
        let bytes = lengths.iter().map(|(_, bytes)| bytes).sum();
        let pack = places.pack(&Pack { name: name.clone(), bytes });
        for (piece, bytes) in lengths {
            places.add(piece, Place { pack, offset, bytes: bytes as u32, hash: Default::default() });
            offset += bytes;
        }
        self.memory.put(&name, &[&content.encode()], Existing::Replaced).unwrap();
        self.shelf.add_part(id, 0, &places).unwrap();
    }

    /// Describes a snapshot of which all parts are written.
    pub(super) fn describe(&self, (id, claim): (u64, u64), record: JobRecord, places: Places) -> String {
        self.shelf.add((id, claim), Head { record, ..self.head.clone() }, 0, (places, 0)).unwrap()
    }

    /// The writer of a description ends while it is written.
    pub(super) fn tear(&self, name: &str, torn: Torn, at: usize) {
        let mut objects = self.memory.objects();
        let object = objects.get_mut(&format!("snapshots/{name}.json")).unwrap();
        let at = at % object.len();
        match torn {
            Torn::Cut => object.truncate(at),
            Torn::Changed => object[at] ^= 1,
        }
    }

    /// The name of the newest snapshot but for some.
    pub(super) fn newest(&self, passed_over: &BTreeSet<String>) -> Option<String> {
        self.shelf.names().unwrap().into_iter().rfind(|name| !passed_over.contains(name))
    }

    /// A snapshot, if its description is whole.
    pub(super) fn open(&self, name: String) -> Result<Snapshot, String> {
        match self.shelf.description(&name) {
            Ok(of) => Ok(Snapshot { name, record: of.head.record, places: of.places }),
            Err(SnapshotError::Damaged { .. } | SnapshotError::Store(StoreError::Missing(_))) => Err(name),
            Err(error) => panic!("{name} is not called damaged: {error}"),
        }
    }

    /// The content of a snapshot, if its packs are there.
    pub(super) fn load(&self, snapshot: &Snapshot) -> Option<Content> {
        let pack = snapshot.places.packs().first()?;
        self.memory.get(&pack.name).ok().map(|bytes| Content::decode(&bytes))
    }
}
