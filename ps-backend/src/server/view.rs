//! A view in this process: a model whose versions somebody makes of those of another model, under their numbers. It has
//! no learners and no coordinator, and its client only reads.
//!
//! This module holds `unsafe`: it fills buffers. Each place says why that is sound.

use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use libmodelio::bytes::available;
use libmodelio::bytes::block::{pinned_bytes, span};
use libmodelio::bytes::changes::Changed;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::region::{Region, RegionKey};
use libmodelio::client::Job;
use libmodelio::transport::local::{
    HeldVersion, Mail, Mailbox, MailboxEnd, Pushed, Recipient, Shard, ShardMemory, SharedBlock,
};
use libmodelio::vocabulary::block_map::BlockMap;
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::{BlockId, Generation, LearnerId, ShardId, Version};
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::vocabulary::meta::Meta;
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::{JobState, Message, ModelRecord, Refusal};
use parking_lot::Mutex;

use super::local::LocalError;
use crate::partition::store::changes::ChangeLog;

/// The versions of a view.
pub struct ViewShard {
    layout: Arc<ModelLayout>,
    mailbox: Mailbox,
    shelf: Mutex<Shelf>,
}

struct Shelf {
    /// What the client is told.
    state: JobState,
    newest: Option<(Arc<Region>, SystemTime)>,
    /// All buffers, those too that nobody needs.
    buffers: Vec<Arc<Region>>,
    /// The most of them.
    most: usize,
    next_key: u64,
    changes: ChangeLog,
}

impl Shelf {
    /// Whether a buffer is neither shown, nor held, nor being filled, nor lent.
    fn is_free(buffer: &Arc<Region>) -> bool {
        Shelf::is_idle(buffer) && !buffer.memory().is_lent()
    }

    fn is_idle(buffer: &Arc<Region>) -> bool {
        Arc::strong_count(buffer) == 1 && Arc::strong_count(buffer.memory()) == 1
    }

    /// Lets go of what programs outside have for ever, and of more free buffers than so many.
    fn trim(&mut self, mut free: usize) {
        self.buffers.retain(|buffer| {
            let is_kept = !Shelf::is_idle(buffer) || free > 0 && !buffer.memory().is_lent();
            free -= usize::from(Shelf::is_idle(buffer) && is_kept);
            is_kept
        });
    }

    fn has_room(&self) -> bool {
        self.buffers.len() < self.most || self.buffers.iter().any(Shelf::is_free)
    }
}

impl ViewShard {
    /// A view with no version yet.
    pub fn new(layout: &Arc<ModelLayout>) -> Arc<ViewShard> {
        let changes = ChangeLog::new(layout.size(), 0);
        let (state, buffers) = (JobState::default(), Vec::new());
        let most = state.controls.most_buffers();
        let shelf = Shelf { state, newest: None, buffers, most, next_key: 1, changes };
        Arc::new_cyclic(|this: &Weak<ViewShard>| {
            let mailbox =
                Mailbox::new(this.clone() as Weak<dyn Recipient>, this.clone() as Weak<dyn Recipient>);
            ViewShard { layout: Arc::clone(layout), mailbox, shelf: Mutex::new(shelf) }
        })
    }

    /// Its client, once there is a version. `generation` is that of the model.
    ///
    /// # Errors
    /// [`LocalError`].
    pub fn job(self: &Arc<Self>, name: &str, generation: Generation) -> Result<Job, LocalError> {
        const SHARD: ShardId = ShardId(0);
        let (layout, controls) = (&self.layout, self.state().controls);
        let map = BlockMap::striped(layout.blocks(), &[SHARD])?;
        let record = ModelRecord::new(name, generation, layout, Default::default(), &map, SHARD, controls)?;
        let shard = Arc::clone(self) as Arc<dyn Shard>;
        Ok(Job::of_shard_here(&record, Arc::clone(layout), shard, |_| self.tell())?)
    }

    /// Shows the version that `fill` makes in `buffer`, which [`Shard::take_buffer`] gave and no version is in. It
    /// replaces an older one, which `fill` may read, with the settings from now on, and what was said of it.
    ///
    /// # Errors
    /// Those of `fill`, and nothing is shown.
    ///
    /// # Panics
    /// If it is no such buffer.
    pub fn make<E>(
        &self,
        buffer: Region,
        (version, controls, meta): (Version, Controls, Meta),
        fill: impl FnOnce(Option<(Version, &[u8])>, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (memory, before) = (Arc::clone(buffer.memory()), self.shelf.lock().newest.clone());
        drop(buffer);
        let mut shelf = self.shelf.lock();
        let ours = shelf.buffers.iter().find(|of| Arc::ptr_eq(of.memory(), &memory)).cloned();
        let keeper = ours.filter(|of| Arc::strong_count(of) == 2 && Arc::strong_count(&memory) == 2);
        let Some(buffer) = keeper.filter(|_| !memory.is_lent()) else {
            panic!("somebody else has the buffer of version {version}");
        };
        let old_version = shelf.state.version;
        shelf.changes.keep(controls.changes as usize);
        let changes = before.as_ref().and_then(|_| shelf.changes.next(self.layout.blocks()));
        drop(shelf);
        // SAFETY: no version is in the buffer, and nobody else has its memory but the shelf, which gives it to nobody
        // while this function has it.
        let out = unsafe { memory.bytes_mut(0..memory.len()) };
        let all = 0..self.layout.size();
        fill(before.as_ref().map(|(of, _)| (old_version, pinned_bytes(of.memory(), all))), out)?;
        for block in (0..self.layout.blocks()).map(BlockId) {
            let Some((changes, (before, _))) = changes.as_ref().zip(before.as_ref()) else { break };
            let bytes = self.layout.block_bytes(block);
            let (old, new) = (pinned_bytes(before.memory(), bytes.clone()), pinned_bytes(&memory, bytes));
            changes.set(block, Changed::between(old, new, self.layout.unit(block)));
        }
        let mut shelf = self.shelf.lock();
        shelf.changes.publish_after(old_version, version, changes);
        (shelf.state.sequence, shelf.state.version) = (shelf.state.sequence + 1, version);
        (shelf.state.controls, shelf.state.meta) = (controls, meta);
        shelf.newest = Some((buffer, SystemTime::now()));
        drop((shelf, before, memory));
        self.tell();
        self.shelf.lock().trim(1);
        Ok(())
    }

    fn tell(&self) {
        let state = Message::State(Box::new(self.state()));
        self.mailbox.put(MailboxEnd::Coordinator, MailboxEnd::Client, Mail::Message(0, state));
        self.mailbox.drain();
    }
}

impl Recipient for ViewShard {
    fn receive(self: Arc<Self>, _: MailboxEnd, mail: Mail) {
        if let Mail::Message(request @ 1.., _) = mail {
            let refused =
                Message::Refused(Refusal::Shard(ShardError::NotAllowed("a view is only read".into())));
            self.mailbox.put(MailboxEnd::Coordinator, MailboxEnd::Client, Mail::Message(request, refused));
        }
    }
}

impl Shard for ViewShard {
    fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    fn push(&self, _: SharedBlock<'_>, _: &dyn Fn() -> bool) -> Pushed {
        Pushed::Unwanted
    }

    fn version(&self, version: Version) -> Result<HeldVersion, Version> {
        let shelf = self.shelf.lock();
        match &shelf.newest {
            Some((buffer, published)) if shelf.state.version == version => {
                let region = Region::new(Arc::clone(buffer.memory()), buffer.key());
                Ok(HeldVersion { region, published: *published, hold: Arc::clone(buffer) as Arc<_> })
            }
            _ => Err(shelf.state.version),
        }
    }

    // A view records what it was told.
    fn wrote(&self, _: RegionKey, _: &[BlockId]) {}

    fn rewrites(&self, _: RegionKey) {}

    fn changed_since(&self, base: Version, version: Version) -> Option<Vec<Changed>> {
        let since = self.shelf.lock().changes.since(base, version)?;
        let blocks = (0..self.layout.blocks()).map(BlockId);
        Some(blocks.map(|block| since.changed(&self.layout, block)).collect())
    }

    fn execute(&self, work: Box<dyn FnOnce() + Send>) {
        work();
    }

    fn threads(&self) -> usize {
        1
    }

    fn set_buffers(&self, most: usize) {
        self.shelf.lock().most = most;
    }

    fn find_buffer(&self) -> bool {
        self.shelf.lock().has_room()
    }

    fn memory(&self) -> ShardMemory {
        let shelf = self.shelf.lock();
        let versions = shelf.buffers.iter().map(|buffer| buffer.memory().taken()).sum();
        ShardMemory { versions, ..ShardMemory::default() }
    }

    fn buffers(&self) -> (usize, usize) {
        let shelf = self.shelf.lock();
        (shelf.buffers.len(), shelf.buffers.iter().filter(|buffer| Shelf::is_free(buffer)).count())
    }

    fn shortage(&self) -> Option<String> {
        None
    }

    fn take_buffer(&self) -> Result<Region, ShardError> {
        let mut shelf = self.shelf.lock();
        shelf.trim(usize::MAX);
        let (key, most) = (RegionKey(shelf.next_key), shelf.most);
        shelf.next_key += 1;
        if let Some(buffer) = shelf.buffers.iter().find(|buffer| Shelf::is_free(buffer)) {
            return Ok(Region::new(Arc::clone(buffer.memory()), key));
        }
        if shelf.buffers.len() >= most {
            let why = format!("all {most} version buffers (twice control/max_versions) are in use");
            return Err(ShardError::OutOfMemory(why));
        }
        drop(shelf);
        let memory = memory(span(&(0..self.layout.size())).len());
        let memory = Arc::new(memory.map_err(|error| ShardError::no_memory(&error))?);
        self.shelf.lock().buffers.push(Arc::new(Region::new(Arc::clone(&memory), key)));
        Ok(Region::new(memory, key))
    }

    fn state(&self) -> JobState {
        self.shelf.lock().state.clone()
    }

    fn silence(&self, _: LearnerId) -> Duration {
        Duration::ZERO
    }
}

/// Memory that programs may map and none may write, with all its pages.
fn memory(size: usize) -> io::Result<Mapping> {
    available::check(size as u64)?;
    let memory = Mapping::memfd("gradfs-view", size)?;
    memory.seal()?;
    memory.prefault()?;
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use libmodelio::reader::Reader;
    use libmodelio::vocabulary::layout::{DType, MIN_BLOCK_SIZE};

    use super::*;

    fn view(retain: u32) -> (Arc<ViewShard>, Arc<Job>) {
        let layout = Arc::new(ModelLayout::blank(200_000, DType::F32, MIN_BLOCK_SIZE).unwrap());
        let shard = ViewShard::new(&layout);
        show(&shard, shard.take_buffer().unwrap(), 7, retain);
        let job = Arc::new(shard.job("v", Generation(3)).unwrap());
        (shard, job)
    }

    fn show(shard: &ViewShard, buffer: Region, version: u64, retain: u32) {
        let controls = Controls { retain, ..Controls::default() };
        let made = shard.make(buffer, (Version(version), controls, Meta::default()), |_, out| {
            out.fill(0);
            out[..4].fill(version as u8);
            Ok::<(), ()>(())
        });
        assert_eq!(made, Ok(()));
    }

    #[test]
    fn a_view_has_the_numbers_of_its_model_and_two_buffers() {
        let (shard, job) = view(0);
        assert_eq!((job.version(), job.generation()), (Version(7), Generation(3)));
        for version in [8, 11, 12, 20] {
            show(&shard, job.allocate().unwrap(), version, 0);
            assert_eq!(job.version(), Version(version));
            assert_eq!(
                Reader::newest(&job).unwrap().bytes(0..5),
                [[version as u8; 4].as_slice(), &[0]].concat()
            );
        }
        assert_eq!((job.versions(), shard.buffers()), (vec![Version(20)], (2, 1)));
    }

    #[test]
    fn a_version_of_a_view_that_somebody_reads_stays_as_it_is() {
        let (shard, job) = view(0);
        let held = Reader::newest(&job).unwrap();
        for version in 8..14 {
            show(&shard, job.allocate().unwrap(), version, 0);
            assert_eq!(held.bytes(0..4), [7; 4]);
        }
        assert_eq!((job.versions(), shard.buffers().0), (vec![Version(7), Version(13)], 3));
        drop(held);
        show(&shard, job.allocate().unwrap(), 14, 0);
        assert_eq!((job.versions(), shard.buffers()), (vec![Version(14)], (2, 1)));
    }

    #[test]
    fn what_has_changed_in_a_view_is_known_between_versions_that_it_had() {
        let (shard, job) = view(1);
        for version in [8, 11] {
            show(&shard, job.allocate().unwrap(), version, 1);
        }
        assert_eq!(job.retained(), [Version(11), Version(8)]);
        let is_known = |base, version| shard.changed_since(Version(base), Version(version)).is_some();
        assert!(is_known(7, 8) && is_known(8, 11) && is_known(7, 11));
        assert!(!is_known(9, 11) && !is_known(10, 11) && !is_known(8, 10) && !is_known(6, 8));
        let changed = shard.changed_since(Version(7), Version(11)).unwrap();
        assert!(changed[0] != Changed::Nothing && changed[1..].iter().all(|of| *of == Changed::Nothing));
    }

    #[test]
    fn a_view_whose_buffers_are_held_takes_no_more_than_it_may_and_is_not_torn() {
        let (shard, job) = view(0);
        let most = Controls::default().most_buffers();
        let mut held = vec![Reader::newest(&job).unwrap()];
        let mut version = 8;
        while let Ok(buffer) = job.allocate() {
            show(&shard, buffer, version, 0);
            held.push(Reader::newest(&job).unwrap());
            version += 1;
        }
        assert_eq!((held.len(), shard.buffers()), (most, (most, 0)));
        for (number, held) in (7..).zip(&held) {
            assert_eq!(held.bytes(0..4), [number; 4]);
        }
        held.remove(0);
        show(&shard, job.allocate().unwrap(), version, 0);
        held.remove(0);
        let failed = shard.make(
            job.allocate().unwrap(),
            (Version(99), Controls::default(), Meta::default()),
            |_, _| Err(5),
        );
        assert!(failed == Err(5) && job.version() == Version(version));
    }

    #[test]
    fn a_view_takes_part_in_nothing() {
        let (_, job) = view(0);
        let patience = Duration::from_secs(5);
        let joined = libmodelio::wait_for(patience, |done| job.join("a".into(), patience, done));
        assert!(matches!(joined, Err(ShardError::NotAllowed(why)) if why.contains("only read")));
    }
}
