//! The data of the newest version, block by block, for another partition: reading it here, and loading it there.
//!
//! This module holds `unsafe`; the module above explains why it is sound.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use libmodelio::bytes::kernels::{self, Wire};
use libmodelio::bytes::mmap::Mapping;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::wire::Kept;

use super::elements::element_span;
use super::{Loading, RegionStore, StateBuffer, VersionBuffer};
use crate::device::{Array, Arrays, DeviceError};

/// The newest version with its masters and optimizer state.
#[derive(Debug)]
pub(crate) struct Keeping {
    layout: Arc<ModelLayout>,
    front: Arc<VersionBuffer>,
    state: Arc<StateBuffer>,
    arrays: Option<Arc<Arrays>>,
}

impl RegionStore {
    /// A handle on the data of the newest version. Until it is dropped, only computations that have begun may go on.
    pub(crate) fn keeping(&self) -> Option<Keeping> {
        let front = self.newest()?;
        let (state, arrays) = (Arc::clone(&self.state[0]), self.arrays.clone());
        Some(Keeping { layout: Arc::clone(&self.layout), front, state, arrays })
    }

    /// The version to load is this one instead of version 0. This must be called before anything is loaded.
    pub(crate) fn begin_at(&mut self, version: Version) {
        debug_assert!(!self.versions.is_complete(), "others read it");
        let Some(first) = self.newest() else { return };
        for block in (0..self.layout.blocks()).map(BlockId) {
            first.stamp(block, version.0);
            self.changed[block.index()].store(version.0, Ordering::Relaxed);
        }
        for stamp in &self.state[0].stamps {
            stamp.store(version.0, Ordering::Relaxed);
        }
        self.versions.load_as(version);
    }

    /// Optimizer state was loaded, so it is not zero.
    pub(crate) fn state_loaded(&mut self) {
        self.slots_used = true;
    }
}

impl Keeping {
    /// The data of `block`, copied from a device if it is there. It is empty if there is none of that kind.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    ///
    /// # Panics
    /// If there is no such block.
    pub(crate) fn bytes(&self, block: BlockId, what: Kept) -> Result<Cow<'_, [u8]>, DeviceError> {
        let mapping = match (what, &self.arrays) {
            (Kept::Weights, _) => return Ok(self.front.bytes(self.layout.block_bytes(block)).into()),
            (_, Some(arrays)) => return Ok(self.on_device(arrays, block, what)?.into()),
            (what, None) => self.mapping(block, what),
        };
        // SAFETY: the newest version's state is immutable while no new version is computed.
        let bytes =
            mapping.as_ref().map(|mapping| unsafe { mapping.bytes(state_bytes(&self.layout, block)) });
        Ok(bytes.unwrap_or_default().into())
    }

    fn mapping(&self, block: BlockId, what: Kept) -> &Option<Mapping> {
        match what {
            Kept::Weights => &None,
            Kept::Masters if has_narrow(&self.layout, block) => &self.state.master,
            Kept::Masters => &None,
            Kept::Slot(slot) => self.state.slots.get(usize::from(slot)).unwrap_or(&None),
        }
    }

    /// Masters or state on a device. Elements without a master have zeros in its place, as in the host's memory.
    fn on_device(&self, arrays: &Arrays, block: BlockId, what: Kept) -> Result<Vec<u8>, DeviceError> {
        let range = state_bytes(&self.layout, block);
        let array = match what {
            Kept::Slot(slot) => Array::Slot(usize::from(slot)),
            _ if has_narrow(&self.layout, block) => Array::Values,
            _ => return Ok(Vec::new()),
        };
        let start = range.start;
        let mut bytes = arrays.read(array, range)?.unwrap_or_default();
        for segment in self.layout.segments(block).iter().filter(|_| array == Array::Values) {
            let Some(wire) = Wire::of(segment.dtype).filter(|wire| !wire.is_narrow()) else { continue };
            let elements = element_span(segment, wire);
            bytes[elements.start * 4 - start..elements.end * 4 - start].fill(0);
        }
        Ok(bytes)
    }
}

impl Loading {
    /// Whether `bytes` can be the data of `block`: they are as many as there are here, or none.
    pub(crate) fn fits(&self, block: BlockId, what: Kept, bytes: &[u8]) -> bool {
        let of_state = || bytes.is_empty() || bytes.len() == state_bytes(&self.layout, block).len();
        match what {
            Kept::Weights => {
                bytes.len() as u64 == {
                    let range = self.layout.block_bytes(block);
                    range.end - range.start
                }
            }
            Kept::Masters => {
                let wanted = has_narrow(&self.layout, block) && self.has_masters();
                if wanted { !bytes.is_empty() && of_state() } else { bytes.is_empty() }
            }
            Kept::Slot(_) => of_state(),
        }
    }

    /// Whether there is room for masters.
    fn has_masters(&self) -> bool {
        self.state.master.is_some() || self.arrays.is_some()
    }

    /// The kinds of data that `block` has room for, besides its weights.
    pub(crate) fn wants(&self, block: BlockId) -> Vec<Kept> {
        let masters = self.has_masters() && has_narrow(&self.layout, block);
        let slots = match &self.arrays {
            Some(arrays) => arrays.slots(),
            None => self.state.slots.iter().flatten().count(),
        };
        let any = !state_bytes(&self.layout, block).is_empty();
        let masters = masters.then_some(Kept::Masters).into_iter();
        masters.chain((0..slots as u8).map(Kept::Slot)).filter(|_| any).collect()
    }

    /// Loads masters or optimizer state of a block whose weights are loaded. Without bytes they are zero.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    ///
    /// # Panics
    /// If the bytes do not fit.
    ///
    /// # Safety
    /// The conditions of [`Self::load`].
    pub(crate) unsafe fn load_state(
        &self,
        block: BlockId,
        what: Kept,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        if let Some(arrays) = &self.arrays {
            return self.load_on_device(arrays, block, what, bytes);
        }
        let mapping = match what {
            Kept::Weights => return Ok(()),
            Kept::Masters => &self.state.master,
            Kept::Slot(slot) => self.state.slots.get(usize::from(slot)).unwrap_or(&None),
        };
        if let Some(mapping) = mapping {
            // SAFETY: passed on to the caller.
            let room = unsafe { mapping.bytes_mut(state_bytes(&self.layout, block)) };
            match what {
                Kept::Slot(_) if bytes.is_empty() => room.fill(0),
                _ => kernels::stream_copy(bytes, room),
            }
        }
        Ok(())
    }

    /// The same on a device, where the places of masters hold the weights of elements that have none.
    fn load_on_device(
        &self,
        arrays: &Arrays,
        block: BlockId,
        what: Kept,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        let Range { start, end } = state_bytes(&self.layout, block);
        match what {
            Kept::Weights => Ok(()),
            Kept::Slot(slot) => {
                let zeros = if bytes.is_empty() { vec![0; end - start] } else { Vec::new() };
                let bytes = if bytes.is_empty() { &zeros } else { bytes };
                arrays.write(Array::Slot(usize::from(slot)), start, bytes)
            }
            Kept::Masters => self.layout.segments(block).iter().try_for_each(|segment| {
                let Some(wire) = Wire::of(segment.dtype).filter(|wire| wire.is_narrow()) else {
                    return Ok(());
                };
                let elements = element_span(segment, wire);
                let masters = &bytes[elements.start * 4 - start..elements.end * 4 - start];
                arrays.write(Array::Values, elements.start * 4, masters)
            }),
        }
    }
}

/// The place of a block's data among all data of that kind. It is empty if the block has none of that kind. The
/// reducer is not considered.
///
/// # Panics
/// If there is no such block.
pub fn kept_range(layout: &ModelLayout, block: BlockId, what: Kept) -> Range<u64> {
    match what {
        Kept::Weights => layout.block_bytes(block),
        Kept::Masters if !has_narrow(layout, block) => 0..0,
        Kept::Masters | Kept::Slot(_) => {
            let Range { start, end } = state_bytes(layout, block);
            start as u64..end as u64
        }
    }
}

/// The place of a block's masters and optimizer state. The elements of a block follow each other.
fn state_bytes(layout: &ModelLayout, block: BlockId) -> Range<usize> {
    let spans = layout.segments(block).iter().filter_map(|segment| {
        let wire = Wire::of(segment.dtype)?;
        Some(element_span(segment, wire))
    });
    let spans: Vec<_> = spans.collect();
    match (spans.first(), spans.last()) {
        (Some(first), Some(last)) => first.start * 4..last.end * 4,
        _ => 0..0,
    }
}

/// Whether some of the block's elements have masters.
fn has_narrow(layout: &ModelLayout, block: BlockId) -> bool {
    let mut wires = layout.segments(block).iter().filter_map(|segment| Wire::of(segment.dtype));
    wires.any(|wire| wire.is_narrow())
}
