//! Whole new weights: written bytes become a version at the commit, all at once; the rest keeps its value. A program may
//! map memory instead, all of which is published when a step ends.

use std::collections::BTreeMap;
use std::sync::Arc;

use libmodelio::mapped::MappedMemory;
use libmodelio::publisher::Publisher;
use libmodelio::vocabulary::meta::{Meta, OWN};
use libmodelio::vocabulary::ranges;
use parking_lot::Mutex;

use super::contribution::{Ending, Withdraw};
use super::error::{CallError, CallResult, Done, LastRefusal};
use super::explained::explained;
use super::file_headers::refuse_header;
use super::model::Model;
use super::named::NamedWrites;
use super::written::Written;
use crate::own_thread::on_own_thread;

/// Weights that are being written. After each commit the next write begins anew.
pub struct Publication {
    model: Arc<Model>,
    publisher: Mutex<Option<Arc<Publisher>>>,
    /// Where it is kept why a call has failed.
    refusal: Arc<LastRefusal>,
    /// What is written is a safetensors file, and not bytes at the model's offsets.
    named: Option<NamedWrites>,
    /// The writes since the last end.
    written: Mutex<Written>,
    /// What the program says of the next version.
    meta: Arc<Mutex<Meta>>,
    /// The memory that a program may map.
    mapped: Option<Mapped>,
}

/// Memory that a program stores new weights into.
struct Mapped {
    memory: Arc<MappedMemory>,
    /// The contents that are being published.
    shipping: Arc<Mutex<Option<Arc<Publisher>>>>,
}

impl Publication {
    /// Begins one.
    ///
    /// # Errors
    /// EACCES where weights may not be written now, ENOMEM.
    pub fn open(model: &Arc<Model>) -> CallResult<Publication> {
        Ok(Publication::new(model, Some(publisher(model)?), None))
    }

    /// Begins one that may be mapped, too. Takes the memory for that.
    ///
    /// # Errors
    /// EACCES where weights may not be written now, ENOMEM.
    pub fn open_mapped(model: &Arc<Model>) -> CallResult<Publication> {
        may_publish(model)?;
        let memory = MappedMemory::new(&model.job, "gradfs-publish")?;
        memory.prefault().map_err(|error| CallError::new(libc::ENOMEM, error.to_string()))?;
        let mapped = Mapped { memory: Arc::new(memory), shipping: Arc::default() };
        Ok(Publication::new(model, None, Some(mapped)))
    }

    fn new(model: &Arc<Model>, publisher: Option<Arc<Publisher>>, mapped: Option<Mapped>) -> Publication {
        let (model, publisher) = (Arc::clone(model), Mutex::new(publisher));
        let refusal = Arc::clone(&model.own_refusal);
        let (written, meta) = (Mutex::default(), Arc::default());
        Publication { model, publisher, refusal, named: None, written, meta, mapped }
    }

    /// The same for a file that is written by tensors' names, and keeps its refusals here.
    pub fn by_names(self, refusal: Option<Arc<LastRefusal>>) -> Publication {
        let named = Some(NamedWrites::new(&self.model.layout));
        Publication { named, refusal: refusal.unwrap_or_else(|| Arc::clone(&self.refusal)), ..self }
    }

    /// The memory to map, if it may be mapped.
    pub fn mapped(&self) -> Option<&MappedMemory> {
        self.mapped.as_ref().map(|mapped| &*mapped.memory)
    }

    /// Whether something was written since the last commit.
    pub fn is_open(&self) -> bool {
        self.publisher.lock().as_ref().is_some_and(|publisher| publisher.is_open())
    }

    /// Whether something was written since the last end, or refused.
    pub fn wrote(&self) -> bool {
        self.written.lock().is_pending()
    }

    /// Whether something was written that no close has told of.
    pub fn is_begun(&self) -> bool {
        self.written.lock().is_begun()
    }

    /// The coming commit is to take all bytes or nothing, if nothing was written yet.
    pub fn must_be_whole(&self) {
        if self.named.is_none() {
            self.written.lock().truncate();
        }
    }

    /// The file was truncated to the model's size: what is not written is zeros. (A program that maps gets its size so.)
    pub fn extended(&self) {
        if self.mapped.is_none() && self.named.is_none() {
            self.written.lock().extend();
        }
    }

    /// The program takes back what was written, and begins a whole file.
    pub fn take_back(&self) {
        let written = self.publisher.lock().take_if(|publisher| publisher.is_open());
        drop(written);
        self.written.lock().begin_anew();
        *self.meta.lock() = Meta::default();
        self.named.iter().for_each(NamedWrites::begin_anew);
        self.must_be_whole();
    }

    /// Writes. Bytes may be written again until the commit.
    ///
    /// # Errors
    /// EFBIG past the end, EINVAL while a commit runs; EACCES and ENOMEM as for [`Self::open`].
    pub fn write(&self, offset: u64, data: &[u8]) -> CallResult<()> {
        let outcome = match &self.named {
            None => refuse_header(offset, data).and_then(|()| self.store(offset, data)),
            Some(named) => named
                .write(offset, data, |at, bytes| self.store(at, bytes))
                .and_then(|()| named.take_metadata().map_or(Ok(Meta::default()), |of| kept(&self.model, of)))
                .and_then(|meta| self.describe(meta.iter())),
        };
        self.written.lock().note(offset, data.len(), &outcome);
        outcome.inspect_err(|error| self.refusal.note(error, true))
    }

    /// Says something of the version that the next commit makes. It belongs to what is written: a file that is taken back,
    /// or refused, takes it along.
    ///
    /// # Errors
    /// EINVAL for what a version cannot have. Nothing has changed then.
    pub fn describe<N: Into<String>, T: Into<String>>(
        &self,
        texts: impl IntoIterator<Item = (N, T)>,
    ) -> CallResult<()> {
        let added = self.meta.lock().add(texts);
        let added = added.map_err(|error| CallError::new(libc::EINVAL, error.to_string()));
        added.inspect_err(|error| self.refusal.note(error, true))
    }

    /// What the program has said so far of the version that the next commit makes.
    pub fn meta(&self) -> Meta {
        self.meta.lock().clone()
    }

    fn store(&self, offset: u64, data: &[u8]) -> CallResult<()> {
        let publisher = match &mut *self.publisher.lock() {
            Some(publisher) => Arc::clone(publisher),
            none => Arc::clone(none.insert(publisher(&self.model)?)),
        };
        publisher.write(offset, data).map_err(|error| explained(&self.model, error))
    }

    /// Writes the holes of a file that has some.
    fn write_holes(&self) -> CallResult<()> {
        const PIECE: u64 = 1 << 20;
        let written = self.publisher.lock().as_ref().map_or_else(Vec::new, |publisher| publisher.written());
        let all = std::iter::once(0..self.model.layout.size()).collect::<Vec<_>>();
        for hole in ranges::without(&all, &written) {
            for at in (hole.start..hole.end).step_by(PIECE as usize) {
                self.store(at, &vec![0; PIECE.min(hole.end - at) as usize])?;
            }
        }
        Ok(())
    }

    /// Publishes what was written, or if that is nothing and a step ends, the mapped memory. `done` hears of it once the
    /// version is out.
    pub fn commit(self: &Arc<Self>, ending: Ending, done: Done<()>) {
        let written = self.written.lock().end();
        let is_short = self.publisher.lock().as_ref().is_none_or(|publisher| publisher.is_short());
        if is_short && !written.has_holes() {
            return self.commit_written(&written, Ok(()), ending, done);
        }
        // Zeros and the search for NaN may take long.
        let this = Arc::clone(self);
        on_own_thread("gradfs-publish", move || {
            let holes = if written.has_holes() { this.write_holes() } else { Ok(()) };
            this.commit_written(&written, holes, ending, done);
        });
    }

    /// Publishes this. `holes`: whether its holes could be written.
    fn commit_written(&self, written: &Written, holes: CallResult<()>, ending: Ending, done: Done<()>) {
        let named = self.named.as_ref();
        let whole = named.map_or(Ok(()), NamedWrites::check_end);
        named.iter().for_each(|named| named.begin_anew());
        let refused = written.check_refused(ending == Ending::Close).and(holes).and(whole);
        let is_mapped = ending == Ending::Step && !self.is_open() && refused.is_ok();
        let take_meta = || std::mem::take(&mut *self.meta.lock());
        if let Some(mapped) = self.mapped.as_ref().filter(|_| is_mapped) {
            // The mapping is whole, as a truncated file is to be.
            *self.written.lock() = Written::default();
            let (meta, kept) = (take_meta(), Arc::clone(&self.meta));
            let said = meta.clone();
            // The memory stays the program's. So does what was said of it, until that is a version.
            let answer: Done<()> = Box::new(move |outcome| {
                let mut now = kept.lock();
                if outcome.is_err() && now.is_empty() {
                    *now = said;
                }
                drop(now);
                done(outcome);
            });
            return mapped.publish(&self.model, meta, answer);
        }
        if !written.is_pending() {
            return done(Ok(()));
        }
        let meta = take_meta();
        let publisher = self.publisher.lock().take_if(|publisher| publisher.is_open());
        let (takes, refusal) = (publisher.is_some(), Arc::clone(&self.refusal));
        let is_whole = publisher.as_ref().is_some_and(|publisher| publisher.is_complete());
        let answer = move |outcome: CallResult<()>| {
            match &outcome {
                Ok(()) => refusal.ended(takes),
                Err(error) => refusal.note(error, false),
            }
            done(outcome);
        };
        let narrow = refused.and_then(|()| match self.named {
            None => written.check_narrow(&self.model.layout),
            Some(_) => Ok(None),
        });
        let must_be_whole = written.is_truncated() && !is_whole;
        let checked = narrow.and_then(|hint| {
            if let Some(hint) = hint.filter(|_| !written.is_truncated()) {
                tracing::warn!(model = self.model.name, "{hint}");
            }
            self.check(publisher.as_deref(), must_be_whole)
        });
        match checked {
            Err(error) => {
                if written.is_truncated() {
                    let mut rest = self.written.lock();
                    rest.truncate();
                    rest.refuse_rest(&error, ending == Ending::Close);
                }
                answer(Err(error));
            }
            Ok(()) => match publisher {
                None => answer(Ok(())),
                Some(publisher) => send(&self.model, publisher, meta, Box::new(answer)),
            },
        }
    }

    /// Whether the written bytes may become a version. `is_incomplete`: some required bytes are missing.
    fn check(&self, publisher: Option<&Publisher>, is_incomplete: bool) -> CallResult<()> {
        if let Some(refused) = publisher.and_then(Publisher::failed) {
            return Err(explained(&self.model, refused));
        }
        if is_incomplete {
            let size = self.model.layout.size();
            return Err(CallError::new(
                libc::EINVAL,
                format!(
                    "the file was truncated, but not all of its {size} bytes were written; nothing has changed"
                ),
            ));
        }
        let Some(publisher) = publisher else { return Ok(()) };
        let written = publisher.written();
        let mut cuts = written.iter().flat_map(|range| [range.start, range.end]);
        if let Some(half) = cuts.find(|&cut| self.model.layout.splits_element(cut)) {
            let message = format!("what was written ends at byte {half}, in the middle of an element");
            return Err(CallError::new(libc::EINVAL, message));
        }
        publisher.check_finite().map_err(|error| explained(&self.model, error))
    }

    /// Ends the wait for a commit of the bytes written by now, or of the mapped memory, if something can.
    pub fn withdrawal(&self) -> Option<Withdraw> {
        let written = self.publisher.lock().clone();
        let shipping = self.mapped.as_ref().map(|mapped| Arc::clone(&mapped.shipping));
        if written.is_none() && shipping.is_none() {
            return None;
        }
        Some(Arc::new(move || {
            // The lock is not held over a withdrawal, which may answer the commit.
            let shipped = shipping.as_ref().and_then(|shipping| shipping.lock().clone());
            written.iter().chain(&shipped).for_each(|publisher| publisher.withdraw());
        }))
    }
}

impl Mapped {
    /// Publishes all of the memory, which stays the program's: readers get a copy. Unless that is short, a thread of its own
    /// makes it.
    fn publish(&self, model: &Arc<Model>, meta: Meta, done: Done<()>) {
        let (model, shipping) = (Arc::clone(model), Arc::clone(&self.shipping));
        let begun = {
            let mut shipping = shipping.lock();
            match &*shipping {
                Some(_) => Err(CallError::new(libc::EBUSY, "the mapped weights are still being published")),
                None => publisher(&model).map(|publisher| Arc::clone(shipping.insert(publisher))),
            }
        };
        let publisher = match begun {
            Ok(publisher) => publisher,
            Err(error) => {
                model.own_refusal.note(&error, false);
                return done(Err(error));
            }
        };
        let memory = Arc::clone(&self.memory);
        let is_short = publisher.is_short();
        let work = move || {
            let of = Arc::clone(&model);
            let answer: Done<()> = Box::new(move |outcome| {
                *shipping.lock() = None;
                match &outcome {
                    Ok(()) => of.own_refusal.ended(true),
                    Err(error) => of.own_refusal.note(error, false),
                }
                done(outcome);
            });
            match publisher.write_all(&memory) {
                Ok(()) => send(&model, publisher, meta, answer),
                Err(error) => answer(Err(explained(&model, error))),
            }
        };
        match is_short {
            true => work(),
            false => on_own_thread("gradfs-publish", work),
        }
    }
}

/// What of a file's `__metadata__` its version keeps: all but what the mount's own files of the model say, too.
///
/// # Errors
/// EINVAL if that cannot be kept.
pub fn kept(model: &Model, mut metadata: BTreeMap<String, String>) -> CallResult<Meta> {
    metadata.retain(|name, text| !name.starts_with(OWN) && model.metadata.get(name) != Some(text));
    Meta::try_from(metadata).map_err(|error| CallError::new(libc::EINVAL, error.to_string()))
}

/// Whether weights may be written now.
fn may_publish(model: &Model) -> CallResult<()> {
    match model.written_view() {
        Some(part) => part.may_publish(),
        None => Ok(model.job.may_assign()?),
    }
}

/// Publishes what was written.
fn send(model: &Arc<Model>, publisher: Arc<Publisher>, meta: Meta, done: Done<()>) {
    if let Some(part) = model.written_view() {
        return part.publish(publisher, meta, done);
    }
    let of = Arc::clone(model);
    publisher
        .commit(meta, model.timeout(), move |result| done(result.map_err(|error| explained(&of, error))));
}

/// A buffer for a version to come.
fn publisher(model: &Model) -> CallResult<Arc<Publisher>> {
    may_publish(model)?;
    Ok(Arc::new(Publisher::new(Arc::clone(&model.job))?))
}
