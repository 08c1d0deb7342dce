//! The memory of a model on a device: its weights or their masters, and optimizer state.
//!
//! Elements lie there in the order in which sums have them, one word each, and two of F64. The arrays belong to the
//! newest version, and are changed in place when the next one counts. If the device fails meanwhile, they have no
//! meaning any more: every later use of them fails, and names that failure.
//!
//! This module holds `unsafe`: it orders copies. It is sound because no function returns before they are done.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use libmodelio::bytes::mmap::Mapping;
use libmodelio::vocabulary::groups::Steps;
use parking_lot::Mutex;

use super::lanes::{Places, Versions};
use super::{Accelerator, DeviceError, Does, Memory, Runs, Stream};

/// One of the arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Array {
    /// Weights, or masters of narrow weights.
    Values,
    /// Optimizer state.
    Slot(usize),
}

/// The arrays of a model.
#[derive(Debug)]
pub struct Arrays {
    values: Memory,
    /// Changed between plans only. A use has clones.
    slots: Mutex<[Option<Arc<Memory>>; 2]>,
    /// Sums that were copied from. Their owners see that others have them, and keep their pages.
    sums: Mutex<Vec<Arc<Mapping>>>,
    failed: OnceLock<DeviceError>,
    accelerator: Arc<Accelerator>,
}

impl Arrays {
    /// Takes memory for so many words, and for so many slots. All values are zero.
    ///
    /// # Errors
    /// [`DeviceError::Room`] names what is needed in all.
    pub fn new(accelerator: &Arc<Accelerator>, words: usize, slots: usize) -> Result<Arrays, DeviceError> {
        let bytes = words.max(1) * 4;
        accelerator.check(Arrays::bytes_of(words, slots))?;
        let arrays = Arrays {
            values: Memory::take(accelerator.device(), bytes)?,
            slots: Mutex::default(),
            sums: Mutex::default(),
            failed: OnceLock::new(),
            accelerator: Arc::clone(accelerator),
        };
        arrays.clear(&arrays.values)?;
        arrays.prepare(slots, false)?;
        Ok(arrays)
    }

    /// The bytes of so many words with so many slots.
    pub fn bytes_of(words: usize, slots: usize) -> u64 {
        (words.max(1) as u64 * 4).saturating_mul(1 + slots as u64)
    }

    /// The device.
    pub fn accelerator(&self) -> &Arc<Accelerator> {
        &self.accelerator
    }

    /// The bytes of values and of slots.
    pub fn bytes(&self) -> (u64, u64) {
        let slots: usize = self.slots.lock().iter().flatten().map(|slot| slot.len()).sum();
        (self.values.len() as u64, slots as u64)
    }

    /// The number of slots.
    pub fn slots(&self) -> usize {
        self.slots.lock().iter().flatten().count()
    }

    /// Makes sure that there are exactly so many slots. `fresh` ones are zero.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn prepare(&self, count: usize, fresh: bool) -> Result<(), DeviceError> {
        self.check()?;
        let mut slots = self.slots.lock();
        slots[count.min(2)..].fill(None);
        for slot in &mut slots[..count.min(2)] {
            let new = slot.is_none();
            if new {
                self.accelerator.check(self.values.len() as u64)?;
                *slot = Some(Arc::new(Memory::take(self.accelerator.device(), self.values.len())?));
            }
            if let Some(slot) = slot.as_ref().filter(|_| new || fresh) {
                self.clear(slot)?;
            }
        }
        Ok(())
    }

    /// # Errors
    /// The failure of the device, if it has failed while it changed the arrays.
    pub fn check(&self) -> Result<(), DeviceError> {
        self.failed.get().map_or(Ok(()), |failed| Err(failed.clone()))
    }

    fn array(&self, array: Array) -> Option<Arc<Memory>> {
        match array {
            Array::Values => None,
            Array::Slot(slot) => self.slots.lock().get(slot).cloned().flatten(),
        }
    }

    fn with<T>(
        &self,
        array: Array,
        does: impl FnOnce(&Memory) -> Result<T, DeviceError>,
    ) -> Result<Option<T>, DeviceError> {
        self.check()?;
        match (array, self.array(array)) {
            (Array::Values, _) => does(&self.values).map(Some),
            (_, Some(slot)) => does(&slot).map(Some),
            (_, None) => Ok(None),
        }
    }

    /// Sets an array to zero.
    fn clear(&self, memory: &Memory) -> Result<(), DeviceError> {
        let stream = self.accelerator.single.lock();
        let device = self.accelerator.device();
        // SAFETY: the memory is this model's, no plan uses it, and the work is done when this returns.
        let ordered = unsafe { device.clear(*stream, memory.at(0..memory.len()), memory.len()) };
        self.done(*stream, ordered)
    }

    /// Waits for the work of a stream, also if some of it could not be ordered.
    fn done(&self, stream: Stream, ordered: Result<(), DeviceError>) -> Result<(), DeviceError> {
        let ended = self.accelerator.device().synchronize(stream);
        ordered.and(ended)
    }

    /// Writes bytes of an array, from this byte on. It does nothing if there is no such slot.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    ///
    /// # Panics
    /// If they are out of bounds.
    pub fn write(&self, array: Array, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let written = self.with(array, |memory| {
            let to = memory.at(at..at + bytes.len());
            let stream = self.accelerator.single.lock();
            // SAFETY: the bytes are borrowed, and the copy is done when this returns.
            let ordered = unsafe { self.accelerator.device().upload(*stream, bytes, to) };
            self.done(*stream, ordered)
        });
        written.map(|_| ())
    }

    /// Reads bytes of an array. `None` if there is no such slot.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    ///
    /// # Panics
    /// If they are out of bounds.
    pub fn read(&self, array: Array, range: Range<usize>) -> Result<Option<Vec<u8>>, DeviceError> {
        self.with(array, |memory| {
            let mut bytes = vec![0; range.len()];
            let from = memory.at(range);
            let stream = self.accelerator.single.lock();
            // SAFETY: the bytes are this function's, and the copy is done before anybody reads them.
            let ordered = unsafe { self.accelerator.device().download(*stream, from, &raw mut bytes[..]) };
            self.done(*stream, ordered).map(|()| bytes)
        })
    }

    /// Pins a buffer for versions.
    pub fn pin(&self, version: &Mapping) {
        self.accelerator.pin(version);
    }

    /// Does runs for a version's steps, and returns when the version in the host's memory is made. Sums that lie in the
    /// version are read first.
    ///
    /// # Errors
    /// [`DeviceError::Failed`]. Then the model is lost.
    ///
    /// # Safety
    /// The conditions of [`super::lanes::Lanes::run`].
    pub unsafe fn run(
        &self,
        steps: &Steps,
        front: &Arc<Mapping>,
        back: &Arc<Mapping>,
        runs: &Runs,
    ) -> Result<(), DeviceError> {
        self.check()?;
        let sums = runs.all().iter().filter_map(|run| match &run.does {
            Does::Reduce { sums, .. } => Some(sums),
            Does::Adopt => None,
        });
        for sum in sums.flatten().filter(|sum| !Arc::ptr_eq(sum, back)) {
            let mut known = self.sums.lock();
            if !known.iter().any(|known| Arc::ptr_eq(known, sum)) {
                known.push(Arc::clone(sum));
                self.accelerator.pin(sum);
            }
        }
        self.accelerator.pin(back);
        let slots = self.slots.lock().clone();
        let places = Places { values: &self.values, slots: slots.each_ref().map(Option::as_deref) };
        let mut lanes = self.accelerator.lanes.lock();
        // SAFETY: passed on to the caller.
        let outcome = unsafe { lanes.run(steps, places, Versions { front, back }, runs.all()) };
        outcome.map_err(|error| self.failed.get_or_init(|| error).clone())
    }
}
