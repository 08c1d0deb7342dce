//! The newest version with its masters and optimizer state, block by block: reading it for another partition, and loading
//! it as the first one.
//!
//! This module holds `unsafe`; the module above explains why it is sound.

use std::borrow::Cow;
use std::sync::Arc;

use libmodelio::bytes::block::span;
use libmodelio::bytes::kernels;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::wire::DataKind;

use super::buffer::VersionBuffer;
use super::places::{block_span, element_span, has_narrow, narrow, reduced};
use super::state::{State, StateBuffer};
use crate::device::{Array, Arrays, DeviceError};

/// The newest version. Until this is dropped, only computations that have begun may go on.
#[derive(Debug)]
pub(super) struct Newest {
    layout: Arc<ModelLayout>,
    weights: Arc<VersionBuffer>,
    state: Arc<StateBuffer>,
    arrays: Option<Arc<Arrays>>,
}

impl Newest {
    pub(super) fn new(layout: &Arc<ModelLayout>, weights: Arc<VersionBuffer>, state: &State) -> Newest {
        let (layout, arrays) = (Arc::clone(layout), state.arrays.clone());
        Newest { layout, weights, state: Arc::clone(&state.copies[0]), arrays }
    }

    /// The memory of the weights.
    pub(super) fn memory(&self) -> &Mapping {
        self.weights.region.memory()
    }

    /// The data of `block`, copied from a device if it is there. It is empty if there is none of that kind.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    ///
    /// # Panics
    /// If there is no such block.
    pub(super) fn bytes(&self, block: BlockId, what: DataKind) -> Result<Cow<'_, [u8]>, DeviceError> {
        let span = block_span(&self.layout, block);
        let place = span.start * 4..span.end * 4;
        let array = match what {
            DataKind::Weights => return Ok(self.weights.bytes(self.layout.block_bytes(block)).into()),
            DataKind::Masters if !has_narrow(&self.layout, block) => return Ok(Cow::default()),
            DataKind::Masters => Array::Values,
            DataKind::Slot(slot) => Array::Slot(usize::from(slot)),
        };
        let Some(arrays) = &self.arrays else {
            if what == DataKind::Masters && self.state.master.is_none() {
                return Ok(self.widened(block).into());
            }
            // SAFETY: the newest version's state is immutable while no new version is computed.
            let bytes = self.mapping(what).map(|mapping| unsafe { mapping.bytes(place) });
            return Ok(bytes.unwrap_or_default().into());
        };
        let mut bytes = arrays.read(array, place.clone())?.unwrap_or_default();
        // Elements without a master have zeros in its place, as in the host's memory.
        for (segment, wire) in reduced(&self.layout, block).filter(|_| array == Array::Values) {
            let elements = element_span(segment, wire);
            if !wire.is_narrow() {
                bytes[elements.start * 4 - place.start..elements.end * 4 - place.start].fill(0);
            }
        }
        Ok(bytes.into())
    }

    /// The host's memory of all data of a kind other than weights.
    fn mapping(&self, what: DataKind) -> Option<&Mapping> {
        match what {
            DataKind::Weights => None,
            DataKind::Masters => self.state.master.as_deref(),
            DataKind::Slot(slot) => self.state.slots.get(usize::from(slot))?.as_deref(),
        }
    }

    /// The kinds of data that `block` has room for, besides its weights.
    pub(super) fn wants(&self, block: BlockId) -> Vec<DataKind> {
        let masters = self.state.master.is_some() || self.arrays.is_some();
        let masters = (masters && has_narrow(&self.layout, block)).then_some(DataKind::Masters);
        let slots = match &self.arrays {
            Some(arrays) => arrays.slots(),
            None => self.state.slots.iter().flatten().count(),
        };
        let any = !block_span(&self.layout, block).is_empty();
        masters.into_iter().chain((0..slots as u8).map(DataKind::Slot)).filter(|_| any).collect()
    }

    /// Makes all masters of the weights.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    pub(super) fn make_masters(&self) -> Result<(), DeviceError> {
        // SAFETY: no version is being built, so nobody reads masters or writes the newest weights.
        (0..self.layout.blocks()).try_for_each(|block| unsafe { self.filled(BlockId(block)) })
    }

    /// Makes the masters that a block would have, from its weights. Elements without a master have zeros.
    fn widened(&self, block: BlockId) -> Vec<u8> {
        let all = block_span(&self.layout, block);
        let mut wide = vec![0.0; all.len()];
        for (segment, wire) in narrow(&self.layout, block) {
            let elements = element_span(segment, wire);
            let room = &mut wide[elements.start - all.start..elements.end - all.start];
            kernels::widen(wire, self.weights.bytes(segment.bytes.clone()), room);
        }
        kernels::bytes(&wide).to_vec()
    }

    /// A block's weights were loaded. Its masters follow from them, and so do the weights on a device.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    ///
    /// # Safety
    /// The conditions of [`Self::load`].
    pub(super) unsafe fn filled(&self, block: BlockId) -> Result<(), DeviceError> {
        let mut wide = Vec::new();
        for (segment, wire) in reduced(&self.layout, block) {
            let elements = element_span(segment, wire);
            // SAFETY: passed on to the caller.
            let weights = unsafe { self.memory().bytes(span(&segment.bytes)) };
            match (&self.arrays, &self.state.master) {
                (Some(arrays), _) if wire.is_narrow() => {
                    wide.resize(elements.len(), 0.0);
                    kernels::widen(wire, weights, &mut wide);
                    arrays.write(Array::Values, elements.start * 4, kernels::bytes(&wide))?;
                }
                (Some(arrays), _) => arrays.write(Array::Values, elements.start * 4, weights)?,
                // SAFETY: passed on to the caller.
                (None, Some(master)) if wire.is_narrow() => unsafe {
                    kernels::widen(wire, weights, master.floats_mut(elements));
                },
                _ => {}
            }
        }
        Ok(())
    }

    /// Loads data of a block: its weights first. Without bytes, state is zero.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    ///
    /// # Panics
    /// If the bytes do not fit.
    ///
    /// # Safety
    /// The block belongs to this thread alone, and nobody reads the version yet.
    pub(super) unsafe fn load(
        &self,
        block: BlockId,
        what: DataKind,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        let elements = block_span(&self.layout, block);
        let place = elements.start * 4..elements.end * 4;
        match (&self.arrays, what) {
            // SAFETY: passed on to the caller.
            (_, DataKind::Weights) => unsafe {
                let room = self.memory().bytes_mut(span(&self.layout.block_bytes(block)));
                kernels::stream_copy(bytes, room);
                self.filled(block)?;
            },
            (Some(arrays), DataKind::Slot(slot)) => {
                let zeros = if bytes.is_empty() { vec![0; place.len()] } else { Vec::new() };
                let bytes = if bytes.is_empty() { &zeros } else { bytes };
                arrays.write(Array::Slot(usize::from(slot)), place.start, bytes)?;
            }
            // The places of masters hold the weights of elements that have none.
            (Some(arrays), DataKind::Masters) => {
                for (segment, wire) in narrow(&self.layout, block) {
                    let elements = element_span(segment, wire);
                    let masters = &bytes[elements.start * 4 - place.start..elements.end * 4 - place.start];
                    arrays.write(Array::Values, elements.start * 4, masters)?;
                }
            }
            (None, what) => {
                // SAFETY: passed on to the caller.
                let room = self.mapping(what).map(|mapping| unsafe { mapping.bytes_mut(place) });
                match room {
                    Some(room) if bytes.is_empty() => room.fill(0),
                    Some(room) => kernels::stream_copy(bytes, room),
                    None => {}
                }
            }
        }
        Ok(())
    }
}
