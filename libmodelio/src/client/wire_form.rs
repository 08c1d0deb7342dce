//! The form in which contributions cross a network, and what they have lost by it.

use std::sync::Arc;

use super::averaged::Averaged;
use super::core::ClientCore;
use super::residual::Residuals;
use crate::vocabulary::coding::Coding;
use crate::vocabulary::ids::PlanId;
use crate::vocabulary::layout::ModelLayout;
use crate::vocabulary::reducer::Reducer;

/// The form in force, and what it has lost.
#[derive(Default)]
pub(super) struct WireForm {
    /// What coded blocks have lost, as long as blocks are coded.
    residuals: Option<Arc<Residuals>>,
    /// The reducer that they are of, the bits of the loss scale, and the tensors that are averaged.
    unit: Option<(Reducer, u32, Arc<[usize]>)>,
    /// The tensors whose values are averaged.
    averaged: Averaged,
    /// The form in force when the log last said where it has no effect.
    pub(super) logged: Option<Coding>,
}

impl WireForm {
    /// The tensors whose values are averaged. They are sorted.
    pub(super) fn averaged(&self) -> &Arc<[usize]> {
        self.averaged.tensors()
    }

    /// The bytes that residuals take.
    pub(super) fn taken(&self) -> u64 {
        self.residuals.as_ref().map_or(0, |residuals| residuals.taken())
    }

    /// Blocks are coded for `plan` from now on; `counted` is the newest of this client's plans that counts.
    pub(super) fn begin(&self, plan: PlanId, counted: PlanId) {
        if let Some(residuals) = &self.residuals {
            residuals.begin(plan, counted);
        }
    }

    /// Follows the settings. Forgets residuals, and gives their memory back, once contributions go in full. With another
    /// reducer or loss scale, what was lost has another unit than what comes; and so it has if other tensors are averaged.
    pub(super) fn follow(&mut self, layout: &ModelLayout, core: &mut ClientCore) {
        if self.averaged.follow(layout, &core.state().controls) {
            core.set_averaged(self.averaged.blocks(layout));
        }
        let controls = &core.state().controls;
        let averaged = Arc::clone(self.averaged.tensors());
        let unit = Some((controls.reducer, controls.hyper.loss_scale.to_bits(), averaged));
        let is_full = controls.wire.is_none() && core.coding().is_none();
        if is_full || self.unit != unit && self.unit.is_some() {
            self.residuals = None;
        }
        self.unit = unit;
    }

    /// The residuals of all blocks, which begin empty for this plan.
    pub(super) fn residuals(&mut self, blocks: u32, plan: PlanId) -> &Arc<Residuals> {
        self.residuals.get_or_insert_with(|| Arc::new(Residuals::new(blocks, plan)))
    }
}
