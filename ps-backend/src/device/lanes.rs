//! Copies to a device, its kernels, and copies from it, which overlap.
//!
//! There are three streams: of copies to the device, of kernels, and of copies from the device. Each lane has memory on
//! the device for the sums of one run. A run's sums are copied there, its kernel waits for that, and the copy of its
//! weights waits for the kernel. So while one run is computed, the sums of the next ones are on their way, and so are
//! the weights of earlier ones. A lane's memory is used again by a later run: its sums wait for the kernel that has
//! read those before, and its kernel waits for the copy of narrow weights.
//!
//! One stream copies in each direction. More would share the device's copy engines, and those of one direction would
//! take those of the other.
//!
//! This module holds `unsafe`. It is sound because [`Lanes::run`] returns only when no work that it has ordered is
//! left, also if it fails.

use std::sync::Arc;

use libmodelio::bytes::kernels::Wire;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::vocabulary::groups::Steps;
use smallvec::SmallVec;

use super::runs::MAX_WORDS;
use super::{Address, Adoption, Device, DeviceError, Does, Event, Launch, Memory, Run, Stream};
use crate::reducers;

/// The number of lanes.
const LANES: usize = 4;
/// Words by which a run's first word may miss a multiple of 16 bytes, rounded up.
const MARGIN: usize = 4;
/// Bytes of a lane's room for one sum. The rooms begin at multiples of 256 bytes.
const SUM: usize = ((MAX_WORDS + MARGIN) * 4).next_multiple_of(256);
/// Bytes of a lane's room for narrow weights, of 16 bits at most.
const NARROW: usize = ((MAX_WORDS + MARGIN) * 2).next_multiple_of(256);

/// The bytes of a device that [`Lanes`] take.
pub const BYTES: u64 = (LANES * (2 * SUM + NARROW)) as u64;

/// The arrays of a model on the device.
#[derive(Clone, Copy, Debug)]
pub struct Places<'a> {
    /// Weights, and masters of narrow weights.
    pub values: &'a Memory,
    /// Optimizer state.
    pub slots: [Option<&'a Memory>; 2],
}

/// The two versions in the host's memory.
#[derive(Clone, Copy, Debug)]
pub struct Versions<'a> {
    /// The newest.
    pub front: &'a Mapping,
    /// The one that is made.
    pub back: &'a Mapping,
}

/// The lanes of a device.
#[derive(Debug)]
pub struct Lanes {
    device: Arc<dyn Device>,
    lanes: Vec<Lane>,
    /// Copies to the device.
    there: Stream,
    /// Kernels.
    kernels: Stream,
    /// Copies from the device.
    back: Stream,
}

#[derive(Debug)]
struct Lane {
    /// The sums of its run are on the device.
    uploaded: Event,
    /// The kernel of its run is done.
    computed: Event,
    /// The weights of its run are in the host's memory.
    copied: Event,
    /// Room for two sums.
    sums: Memory,
    /// Room for narrow weights.
    narrow: Memory,
}

impl Lanes {
    /// Takes the lanes' memory and streams.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn new(device: &Arc<dyn Device>) -> Result<Lanes, DeviceError> {
        let mut streams = Opened { device, streams: Vec::new(), events: Vec::new() };
        let [there, kernels, back] = [streams.stream()?, streams.stream()?, streams.stream()?];
        let mut lanes = Vec::new();
        for _ in 0..LANES {
            let [uploaded, computed, copied] = [streams.event()?, streams.event()?, streams.event()?];
            let (sums, narrow) = (Memory::take(device, 2 * SUM)?, Memory::take(device, NARROW)?);
            lanes.push(Lane { uploaded, computed, copied, sums, narrow });
        }
        // From here on, the lanes close them.
        (streams.streams, streams.events) = Default::default();
        Ok(Lanes { device: Arc::clone(device), lanes, there, kernels, back })
    }

    /// Does all runs for a version's steps, and returns when the weights are in the host's memory.
    ///
    /// # Errors
    /// [`DeviceError::Failed`]. Then what the arrays and the next version hold has no meaning. No work is left.
    ///
    /// # Safety
    /// The runs do not overlap, and lie within the arrays and the versions. Until this returns, nobody else uses their
    /// elements in the arrays and in the next version, and nobody writes them in their sums and in the newest version.
    pub unsafe fn run(
        &mut self,
        steps: &Steps,
        places: Places<'_>,
        versions: Versions<'_>,
        runs: &[Run],
    ) -> Result<(), DeviceError> {
        let ordered = runs.iter().zip((0..LANES).cycle()).try_for_each(|(run, lane)| {
            // SAFETY: passed on to the caller. All work ends below.
            unsafe { self.order(&self.lanes[lane], steps, places, versions, run) }
        });
        // The copies back have waited for everything else, unless something has failed.
        let mut outcome = ordered.and(self.device.synchronize(self.back));
        if outcome.is_err() {
            for stream in [self.there, self.kernels, self.back] {
                outcome = outcome.and(self.device.synchronize(stream));
            }
        }
        outcome
    }

    /// Orders the work of a run.
    ///
    /// # Safety
    /// The conditions of [`Self::run`], until all work is done.
    unsafe fn order(
        &self,
        lane: &Lane,
        steps: &Steps,
        places: Places<'_>,
        versions: Versions<'_>,
        run: &Run,
    ) -> Result<(), DeviceError> {
        let device = &*self.device;
        let values = words(places.values, run);
        device.wait(self.there, lane.computed)?;
        match &run.does {
            Does::Reduce { of, anew, sums } => {
                let mut at = SmallVec::<[Address; 2]>::new();
                for (number, sum) in sums.iter().enumerate() {
                    let to = lane.sum(number, run);
                    // SAFETY: the caller keeps the sum as it is, and the kernel that has read the lane's room was
                    // waited for.
                    unsafe {
                        let from = sum.bytes(run.words.start * 4..run.words.end * 4);
                        device.upload(self.there, from, to)?;
                    }
                    at.push(to);
                }
                device.record(self.there, lane.uploaded)?;
                device.wait(self.kernels, lane.uploaded)?;
                let step = of.step(steps);
                let formula = reducers::formula(&step, !at.is_empty());
                let slots = places.slots.map(|slot| slot.map(|slot| words(slot, run)));
                for slot in slots.into_iter().take(step.reducer.state_slots()).flatten().filter(|_| *anew) {
                    // SAFETY: the caller has this run's elements for itself.
                    unsafe { device.clear(self.kernels, slot, run.words.len() * 4)? };
                }
                let out = run.wire.is_narrow().then(|| lane.narrow.at(phase(run) * run.wire.size()..NARROW));
                if out.is_some() {
                    device.wait(self.kernels, lane.copied)?;
                }
                let count = run.words.len() / run.wire.words();
                let launch =
                    Launch { wire: run.wire, formula: &formula, count, values, slots, sums: &at, out };
                // SAFETY: the caller has this run's elements for itself. The sums have come, and the room for weights
                // is free: both were waited for.
                unsafe { device.reduce(self.kernels, &launch)? };
                device.record(self.kernels, lane.computed)?;
                device.wait(self.back, lane.computed)?;
                // SAFETY: the caller has this run's bytes of the version for itself. If its sum lies there, the kernel,
                // which was waited for, has read it.
                unsafe {
                    let to = versions.back.bytes_mut(run.bytes.clone());
                    device.download(self.back, out.unwrap_or(values), to)?;
                }
                device.record(self.back, lane.copied)
            }
            Does::Adopt => {
                let is_narrow = run.wire.is_narrow();
                // SAFETY: nobody writes the versions, the caller has this run's elements for itself, and the kernel
                // that has read the lane's room was waited for.
                unsafe {
                    let after = versions.back.bytes(run.bytes.clone());
                    let [old, new] = match is_narrow {
                        true => [0, 1].map(|number| lane.sum(number, run)),
                        false => [values; 2],
                    };
                    if is_narrow {
                        device.upload(self.there, versions.front.bytes(run.bytes.clone()), old)?;
                    }
                    device.upload(self.there, after, new)?;
                    device.record(self.there, lane.uploaded)?;
                    device.wait(self.kernels, lane.uploaded)?;
                    if is_narrow {
                        let count = run.words.len();
                        let adoption = Adoption { wire: run.wire, count, values, before: old, after: new };
                        device.adopt(self.kernels, &adoption)?;
                    }
                }
                device.record(self.kernels, lane.computed)?;
                device.wait(self.back, lane.computed)
            }
        }
    }
}

impl Lane {
    /// The room for one of two sums, at the run's distance from a multiple of 16 bytes.
    fn sum(&self, number: usize, run: &Run) -> Address {
        let start = number * SUM + phase(run) * 4;
        self.sums.at(start..start + run.words.len() * 4)
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        let events = self.lanes.iter().flat_map(|lane| [lane.uploaded, lane.computed, lane.copied]);
        events.for_each(|event| self.device.close_event(event));
        for stream in [self.there, self.kernels, self.back] {
            self.device.close_stream(stream);
        }
    }
}

/// Streams and events that are closed if something fails before they have an owner.
struct Opened<'a> {
    device: &'a Arc<dyn Device>,
    streams: Vec<Stream>,
    events: Vec<Event>,
}

impl Opened<'_> {
    fn stream(&mut self) -> Result<Stream, DeviceError> {
        let stream = self.device.open_stream()?;
        self.streams.push(stream);
        Ok(stream)
    }

    fn event(&mut self) -> Result<Event, DeviceError> {
        let event = self.device.open_event()?;
        self.events.push(event);
        Ok(event)
    }
}

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.events.drain(..).for_each(|event| self.device.close_event(event));
        self.streams.drain(..).for_each(|stream| self.device.close_stream(stream));
    }
}

/// The words by which a run's first word misses a multiple of 16 bytes.
fn phase(run: &Run) -> usize {
    run.words.start % MARGIN
}

/// The place of a run's words in an array.
fn words(array: &Memory, run: &Run) -> Address {
    debug_assert!(run.wire != Wire::F64 || run.words.len().is_multiple_of(2), "an F64 takes two words");
    array.at(run.words.start * 4..run.words.end * 4)
}
