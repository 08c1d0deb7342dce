//! `versions/<n>/changes-since-<m>.safetensors` and `.patch`: what has changed from one version to another.
//!
//! The lookup of a name asks the shards, on a thread of its own. The positions are kept for the open that follows, and as
//! long as a file of them is open. If others have taken their room before the open, the kernel is sent back to look the
//! name up again.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsStr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use libmodelio::bytes::changes::Changed;
use libmodelio::client::ChangesError;
use libmodelio::formats::changes::{Collector, ModelChanges, TooMuch};
use libmodelio::reader::Reader;
use libmodelio::vocabulary::ids::{BlockId, Version};
use parking_lot::Mutex;

use super::node::{File, MAX_BACK, Node};
use super::{Fs, stale};
use crate::session::error::{CallError, CallResult};
use crate::session::model::Model;

/// The most pairs of versions whose changes are kept, and the share of the model's bytes that they take at most.
const MAX_KEPT: usize = 8;
const SHARE: u64 = 4;
/// An open follows its lookup within this time. Meanwhile there is this much more room.
const YOUNG: Duration = Duration::from_secs(1);
const MORE_ROOM: usize = 2;
/// How long shards may take to say what has changed between two versions that are in memory.
const ASKED_FOR: Duration = Duration::from_secs(1);

/// The changes that were looked up last, the newest in front.
#[derive(Default)]
pub struct KeptChanges {
    kept: Mutex<VecDeque<(Arc<ModelChanges>, Instant)>>,
    /// All changes that are kept or that an open file has. A file that is open needs no room above.
    used: Mutex<HashMap<(Version, Version), Weak<ModelChanges>>>,
    /// Held by the thread that asks the shards, so that they are asked once at a time.
    asking: Mutex<()>,
}

impl KeptChanges {
    fn get(&self, base: Version, version: Version) -> Option<Arc<ModelChanges>> {
        let mut kept = self.kept.lock();
        let at = kept.iter().position(|(changes, _)| changes.versions() == (base, version));
        let Some((found, _)) = at.and_then(|at| kept.remove(at)) else {
            return self.used.lock().get(&(base, version))?.upgrade();
        };
        kept.push_front((Arc::clone(&found), Instant::now()));
        Some(found)
    }

    /// The length of such a file.
    pub(super) fn len_of(&self, file: File) -> CallResult<u64> {
        let changes = self.of(file)?;
        Ok(if matches!(file, File::Patch(..)) { changes.patch_len() } else { changes.sparse_len() })
    }

    /// Opens such a file of a model. The first open of a patch sums the version.
    pub(super) fn open(&self, model: &Model, file: File) -> CallResult<ChangesFile> {
        let changes = self.of(file)?;
        let (_, version) = changes.versions();
        let reader = Reader::open(&model.job, version).ok_or_else(stale)?;
        let is_patch = matches!(file, File::Patch(..));
        if is_patch {
            changes.checksum(|range| reader.bytes(range));
        }
        Ok(ChangesFile { reader, changes, is_patch })
    }

    /// Whether the open of a file has to sum a version first.
    pub(super) fn sums(&self, file: File) -> bool {
        matches!(file, File::Patch(..)) && self.of(file).is_ok_and(|changes| !changes.is_summed())
    }

    fn of(&self, file: File) -> CallResult<Arc<ModelChanges>> {
        versions_of(file).and_then(|(base, version)| self.get(base, version)).ok_or_else(stale)
    }

    fn keep(&self, changes: ModelChanges, size: u64, now: Instant) -> Arc<ModelChanges> {
        let (versions, changes) = (changes.versions(), Arc::new(changes));
        let mut kept = self.kept.lock();
        kept.retain(|(other, _)| other.versions() != versions);
        kept.push_front((Arc::clone(&changes), now));
        let taken =
            |kept: &VecDeque<(Arc<ModelChanges>, _)>| kept.iter().map(|(of, _)| of.taken()).sum::<u64>();
        while let Some((_, used)) = kept.back() {
            let more = if now.saturating_duration_since(*used) < YOUNG { MORE_ROOM } else { 1 };
            let (most, room) = (MAX_KEPT * more, size / SHARE * more as u64);
            if kept.len() <= most && (kept.len() == 1 || taken(&kept) <= room) {
                break;
            }
            kept.pop_back();
        }
        let mut used = self.used.lock();
        used.retain(|_, changes| changes.strong_count() > 0);
        used.insert(versions, Arc::downgrade(&changes));
        changes
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.kept.lock().len()
    }
}

/// A name of such a file, that is looked up.
pub struct WantedChanges {
    model: Arc<Model>,
    kept: Arc<KeptChanges>,
    base: Version,
    version: Version,
}

/// An open file of changes.
pub struct ChangesFile {
    reader: Reader,
    changes: Arc<ModelChanges>,
    is_patch: bool,
}

impl ChangesFile {
    /// Up to `len` bytes at `offset`.
    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let bytes = |range| self.reader.bytes(range);
        match self.is_patch {
            true => self.changes.read_patch(offset, len, bytes),
            false => self.changes.read_sparse(offset, len, bytes),
        }
    }

    /// The version that it leads to.
    pub fn version(&self) -> Version {
        self.reader.version()
    }
}

/// The file of this name in the directory of `version`, if it is such a name.
pub(super) fn named(version: Version, name: &str) -> Option<File> {
    let (base, of) = parsed(name)?;
    let back = version.0.checked_sub(base).filter(|back| (1..MAX_BACK).contains(back))?;
    Some(of(version, back as u32))
}

/// A file of a version, by how far back the older one is.
type Kind = fn(Version, u32) -> File;

/// The older version in such a name, and the kind of file.
fn parsed(name: &str) -> Option<(u64, Kind)> {
    let (base, of): (_, Kind) = match name.strip_prefix("changes-since-")? {
        name if name.ends_with(".patch") => (name.strip_suffix(".patch")?, File::Patch),
        name => (name.strip_suffix(".safetensors")?, File::Sparse),
    };
    let number: u64 = base.parse().ok().filter(|number: &u64| number.to_string() == base)?;
    Some((number, of))
}

/// The versions of such a file, the older one first.
pub(super) fn versions_of(file: File) -> Option<(Version, Version)> {
    match file {
        File::Sparse(version, back) | File::Patch(version, back) => {
            Some((Version(version.0.checked_sub(back.into())?), version))
        }
        _ => None,
    }
}

impl Fs {
    /// The file of changes that `name` in `parent` is looked up for, if its changes have to be asked for first.
    pub fn wants_changes(&self, parent: u64, name: &OsStr) -> Option<WantedChanges> {
        let Some(Node::Model(index, File::Retained(version))) = Node::from_ino(parent) else { return None };
        let (name, tree) = (name.to_str()?, self.tree(index).ok()?);
        let Some(file) = named(version, name) else {
            let (base, _) = parsed(name)?;
            let what = match base < version.0 {
                true => format!("{name}: version {base} is too old for version {version}"),
                false => format!("{name}: version {base} is not older than version {version}"),
            };
            tree.model.own_refusal.explain(&CallError::new(libc::ENOENT, what));
            return None;
        };
        let (base, version) = versions_of(file)?;
        let is_kept = tree.changes.get(base, version).is_some();
        let (model, kept) = (Arc::clone(&tree.model), Arc::clone(&tree.changes));
        (!is_kept).then_some(WantedChanges { model, kept, base, version })
    }
}

impl WantedChanges {
    /// Asks the shards what has changed. The lookup finds that as long as the result lives.
    ///
    /// # Errors
    /// ENOENT if that is not known, ETIMEDOUT, EFBIG, EIO. The model's `error` has the reason.
    pub fn find(&self) -> CallResult<Arc<ModelChanges>> {
        self.try_find().inspect_err(|error| self.model.own_refusal.explain(error))
    }

    fn try_find(&self) -> CallResult<Arc<ModelChanges>> {
        let WantedChanges { model, kept, base, version } = self;
        let deadline = Instant::now() + model.timeout();
        let late = || {
            let what = "the shards have not said in time what has changed (control/timeout)";
            CallError::new(libc::ETIMEDOUT, what)
        };
        let _asking = kept.asking.try_lock_until(deadline).ok_or_else(late)?;
        if let Some(known) = kept.get(*base, *version) {
            return Ok(known);
        }
        let newer = Reader::open(&model.job, *version).ok_or_else(CallError::not_found)?;
        // What is in memory is compared, so that elements count that differ, and no others.
        let older = Reader::open(&model.job, *base);
        let soon = if older.is_some() { deadline.min(Instant::now() + ASKED_FOR) } else { deadline };
        let changed = match model.job.changed_since(*base, *version, soon) {
            Ok(changed) => changed,
            Err(_) if older.is_some() => vec![Changed::Whole; model.layout.blocks() as usize],
            Err(ChangesError::Unknown) => {
                let what = format!(
                    "it is not known what has changed from version {base} to {version}: version {base} is not in memory, \
                     and {}",
                    ChangesError::Unknown
                );
                return Err(CallError::new(libc::ENOENT, what));
            }
            Err(_) if Instant::now() >= deadline => return Err(late()),
            Err(error) => return Err(CallError::new(libc::EIO, error.to_string())),
        };
        let too_much = |error: TooMuch| CallError::new(libc::EFBIG, error.to_string());
        let mut collector = Collector::new(&model.layout);
        for (block, changed) in (0..).map(BlockId).zip(&changed) {
            let bytes = model.layout.block_bytes(block);
            let versions = older.as_ref().map(|older| (older.bytes(bytes.clone()), newer.bytes(bytes)));
            collector.block(block, changed, versions).map_err(too_much)?;
        }
        let mut metadata = model.metadata.clone();
        metadata.entry("format".into()).or_insert_with(|| "pt".into());
        let changes = collector.finish((*base, *version), &metadata).map_err(too_much)?;
        Ok(kept.keep(changes, model.layout.size(), Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use libmodelio::vocabulary::layout::{DType, ModelLayout};

    use super::*;

    #[test]
    fn only_plain_numbers_of_older_versions_are_names() {
        let of = |name: &str| named(Version(7), name);
        assert_eq!(of("changes-since-3.patch"), Some(File::Patch(Version(7), 4)));
        assert_eq!(of("changes-since-0.safetensors"), Some(File::Sparse(Version(7), 7)));
        for name in
            ["7.patch", "8.patch", "03.patch", "+3.patch", " 3.patch", "3", "3.npy", "-1.patch", ".patch"]
        {
            assert_eq!(of(&format!("changes-since-{name}")), None, "{name}");
        }
        assert_eq!(of("changes-3.patch"), None);
        assert_eq!(versions_of(File::Patch(Version(7), 4)), Some((Version(3), Version(7))));
    }

    #[test]
    fn the_changes_that_were_used_last_are_kept_within_their_share() {
        let layout = ModelLayout::blank(1 << 20, DType::BF16, 64 << 10).unwrap();
        let (kept, mut now) = (KeptChanges::default(), Instant::now());
        let changes = |base, changed: &Changed| {
            let mut collector = Collector::new(&layout);
            (0..layout.blocks()).for_each(|block| collector.block(BlockId(block), changed, None).unwrap());
            collector.finish((Version(base), Version(100)), &BTreeMap::new()).unwrap()
        };
        for base in 0..20 {
            now += 2 * YOUNG;
            kept.keep(changes(base, &Changed::Nothing), layout.size(), now);
            assert!(kept.get(Version(0), Version(100)).is_some(), "it is used again and again");
        }
        assert_eq!(kept.len(), MAX_KEPT);
        assert!(
            kept.get(Version(12), Version(100)).is_none() && kept.get(Version(13), Version(100)).is_some()
        );
        let (old, mut new) = (vec![0; 64 << 10], vec![0; 64 << 10]);
        new.iter_mut().step_by(6).for_each(|byte| *byte = 1);
        let open = kept.get(Version(13), Version(100)).unwrap();
        kept.keep(changes(30, &Changed::between(&old, &new, 2)), layout.size(), now + 2 * YOUNG);
        assert_eq!(kept.len(), 1, "it takes more than their share");
        let again = kept.get(Version(13), Version(100)).unwrap();
        assert!(Arc::ptr_eq(&open, &again), "whoever has them open keeps them");
        drop((open, again));
        assert!(kept.get(Version(13), Version(100)).is_none());
        (0..20).for_each(|base| {
            drop(kept.keep(changes(base, &Changed::Nothing), layout.size(), now + 3 * YOUNG))
        });
        assert_eq!(kept.len(), MORE_ROOM * MAX_KEPT, "an open may follow each lookup");
    }
}
