//! The optimizer state and fp32 masters of a partition, in two copies or in one, or on a device.
//!
//! One copy is changed in place, which cannot be undone: a version that changes it is computed once it counts. Of a
//! model on a device ([`crate::device`]) they lie there, with a copy of the newest weights. The device changes them in
//! place, and every version by it is computed once it counts.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libmodelio::bytes::available;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::vocabulary::reducer::{Reducer, Step};
use libmodelio::wire::Work;
use smallvec::SmallVec;

use super::buffer::VOID;
use super::error::PartitionError;
use super::places::has_narrow;
use crate::device::{Accelerator, Arrays};
use crate::state_copies::StateCopies;

/// Where optimizer state is, and what computes versions.
#[derive(Clone, Debug)]
pub enum Home {
    /// The host.
    Host(StateCopies),
    /// A device.
    Device(Arc<Accelerator>),
}

impl Home {
    /// The number of copies of state in the host's memory, if it is there.
    pub fn copies(&self) -> Option<StateCopies> {
        match self {
            Home::Host(copies) => Some(*copies),
            Home::Device(_) => None,
        }
    }
}

impl Default for Home {
    fn default() -> Home {
        Home::Host(StateCopies::default())
    }
}

/// Optimizer state and fp32 masters of one version, in the order of reducible elements.
#[derive(Debug, Default)]
pub(super) struct StateBuffer {
    pub(super) master: Option<Arc<Mapping>>,
    pub(super) slots: [Option<Arc<Mapping>>; 2],
    /// The version whose state each block has, or [`VOID`].
    pub(super) stamps: Vec<AtomicU64>,
}

impl StateBuffer {
    /// A slot, if the reducer of `step` has it.
    pub(super) fn slot(&self, slot: usize, step: &Step) -> Option<&Mapping> {
        self.slots[slot].as_deref().filter(|_| slot < step.reducer.state_slots())
    }
}

/// The state of all versions.
#[derive(Debug)]
pub(super) struct State {
    layout: Arc<ModelLayout>,
    /// Whether some elements have masters.
    has_narrow: bool,
    /// The state of the newest version, and of the next one unless there is one copy.
    pub(super) copies: SmallVec<[Arc<StateBuffer>; 2]>,
    /// The state on a device, if it is there. Then the host has none.
    pub(super) arrays: Option<Arc<Arrays>>,
    /// Whether the optimizer's slots are no longer zero.
    pub(super) slots_used: bool,
}

impl State {
    /// Empty state, which [`Self::prepare`] takes memory for. On a device, memory is taken for that of `reducer`.
    pub(super) fn new(
        layout: &Arc<ModelLayout>,
        home: &Home,
        reducer: Reducer,
    ) -> Result<State, PartitionError> {
        let (copies, arrays) = match home {
            Home::Host(copies) => (copies.count(), None),
            Home::Device(accelerator) => {
                let words = layout.elements() as usize;
                (1, Some(Arc::new(Arrays::new(accelerator, words, reducer.state_slots())?)))
            }
        };
        Ok(State {
            layout: Arc::clone(layout),
            has_narrow: (0..layout.blocks()).any(|block| has_narrow(layout, BlockId(block))),
            copies: (0..copies).map(|_| Arc::default()).collect(),
            arrays,
            slots_used: false,
        })
    }

    /// Whether work of a plan changes state that cannot be restored. Then its version is computed once it counts.
    pub(super) fn changes_in_place(&self, work: &Work) -> bool {
        let (slots, masters) = match work {
            Work::Reduce { step, groups, .. } => {
                let reducer = groups.widest(step.reducer);
                (reducer.state_slots(), reducer.keeps_masters())
            }
            // There may be masters by the time it begins.
            Work::Assign { .. } => (0, true),
            Work::Add { .. } | Work::Measure { .. } => return false,
        };
        self.arrays.is_some() || self.copies.len() == 1 && (self.has_narrow && masters || slots > 0)
    }

    /// Makes sure that all copies of state have exactly what `reducer` needs. `fresh` starts its slots from zero. Their
    /// pages are promised, for [`Self::memory`] to be pre-faulted. No version may be being built. Returns whether there are
    /// masters now which there were not: those of the newest version have to be made of its weights.
    ///
    /// # Errors
    /// When there is no memory. Then there are no new masters.
    pub(super) fn prepare(&mut self, reducer: Reducer, fresh: bool) -> Result<bool, PartitionError> {
        let keeps_masters = self.has_narrow && reducer.keeps_masters();
        let mut masters = Vec::new();
        let (fresh, bytes) = (fresh && self.slots_used, self.layout.elements() as usize * 4);
        let new = || -> io::Result<Arc<Mapping>> {
            let mapping = Arc::new(Mapping::anonymous(bytes)?);
            available::promise(&mapping)?;
            Ok(mapping)
        };
        if let Some(arrays) = &self.arrays {
            arrays.prepare(reducer.state_slots(), fresh)?;
        } else if bytes > 0 {
            for (side, shared) in self.copies.iter_mut().enumerate() {
                // Builders have clones while they exist. Between them this is the only owner.
                let Some(state) = Arc::get_mut(shared) else {
                    return Err(io::Error::other("optimizer state is in use").into());
                };
                if state.stamps.is_empty() {
                    let stamp = if side == 0 { 0 } else { VOID };
                    state.stamps = (0..self.layout.blocks()).map(|_| AtomicU64::new(stamp)).collect();
                }
                if !keeps_masters {
                    state.master = None;
                }
                for (i, slot) in state.slots.iter_mut().enumerate() {
                    if i >= reducer.state_slots() {
                        *slot = None;
                    } else if slot.is_none() || fresh {
                        // The old memory is given back first, because both together may not fit.
                        *slot = None;
                        *slot = Some(new()?);
                    }
                }
                if keeps_masters && state.master.is_none() {
                    masters.push(new()?);
                }
            }
        }
        let are_new = !masters.is_empty();
        for (state, master) in self.copies.iter_mut().filter_map(Arc::get_mut).zip(masters) {
            state.master = Some(master);
        }
        if are_new {
            let of_next = self.copies.iter().skip(1).flat_map(|state| &state.stamps);
            of_next.for_each(|stamp| stamp.store(VOID, Ordering::Relaxed));
        }
        self.slots_used &= !fresh;
        Ok(are_new)
    }

    /// Whether [`Self::prepare`] would neither take nor clear memory.
    pub(super) fn is_prepared(&self, reducer: Reducer, fresh: bool) -> bool {
        let wanted = reducer.state_slots();
        let is_there = |state: &Arc<StateBuffer>| {
            let slots = state.slots[..wanted].iter().all(Option::is_some);
            let masters = self.has_narrow && reducer.keeps_masters();
            !state.stamps.is_empty() && slots && state.master.is_some() == masters
        };
        let clears = fresh && self.slots_used && wanted > 0;
        !clears
            && match &self.arrays {
                Some(arrays) => arrays.slots() >= wanted,
                None => self.copies.iter().all(is_there),
            }
    }

    /// The memory of masters and slots.
    pub(super) fn memory(&self) -> impl Iterator<Item = &Arc<Mapping>> {
        let all = self.copies.iter().flat_map(|state| state.slots.iter().chain([&state.master]));
        all.flatten()
    }

    /// The bytes of masters and slots that are taken from the system.
    pub(super) fn taken(&self) -> u64 {
        self.memory().map(|memory| memory.taken()).sum()
    }

    /// Bytes of fp32 masters, and of the optimizer's slots, in the host's memory.
    pub(super) fn bytes(&self) -> (u64, u64) {
        let len = |mapping: &Option<Arc<Mapping>>| mapping.as_ref().map_or(0, |mapping| mapping.len() as u64);
        let masters = self.copies.iter().map(|state| len(&state.master)).sum();
        (masters, self.copies.iter().flat_map(|state| &state.slots).map(len).sum())
    }
}
