//! The form in which contributions cross a network, and what they have lost by it.

use std::sync::Arc;

use crate::client::core::ClientCore;
use crate::client::payloads::averaged::Averaged;
use crate::client::payloads::residual::Residuals;
use crate::vocabulary::coding::Coding;
use crate::vocabulary::ids::PlanId;
use crate::vocabulary::layout::ModelLayout;
use crate::vocabulary::reducer::Reducer;

/// Why contributions cross the network in full, whatever the setting is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
pub enum FullBecause {
    /// No network is crossed.
    #[strum(to_string = "the shard is in this process")]
    InProcess,
    /// The shard reads them where they lie.
    #[strum(to_string = "contributions go through shared memory")]
    SharedMemory,
    /// Slots and regions have the size of full blocks.
    #[strum(to_string = "contributions go by RDMA")]
    Rdma,
    /// A message has all of it.
    #[strum(to_string = "contributions to so small a model go with their commits")]
    Small,
    /// Nothing could make up for what is lost.
    #[strum(to_string = "reducer assign takes values as they are")]
    Replaces,
    /// Its elements have no other form.
    #[strum(to_string = "the model has no tensor of fp32 or a narrower type")]
    NoTensor,
}

/// The form in force, and what it has lost.
#[derive(Default)]
pub(in crate::client) struct WireForm {
    /// What coded blocks have lost, as long as blocks are coded.
    residuals: Option<Arc<Residuals>>,
    /// The reducer that they are of, the bits of the loss scale, and the tensors that are averaged.
    unit: Option<(Reducer, u32, Arc<[usize]>)>,
    /// The tensors whose values are averaged.
    averaged: Averaged,
    /// The form in force when the log last said where it has no effect.
    pub(in crate::client) logged: Option<Coding>,
}

impl WireForm {
    /// The tensors whose values are averaged. They are sorted.
    pub(in crate::client) fn averaged(&self) -> &Arc<[usize]> {
        self.averaged.tensors()
    }

    /// The bytes that residuals take.
    pub(in crate::client) fn taken(&self) -> u64 {
        self.residuals.as_ref().map_or(0, |residuals| residuals.taken())
    }

    /// Blocks are coded for `plan` from now on; `counted` is the newest of this client's plans that counts.
    pub(in crate::client) fn begin(&self, plan: PlanId, counted: PlanId) {
        if let Some(residuals) = &self.residuals {
            residuals.begin(plan, counted);
        }
    }

    /// Follows the settings. Forgets residuals, and gives their memory back, once contributions go in full. With another
    /// reducer or loss scale, what was lost has another unit than what comes; and so it has if other tensors are averaged.
    pub(in crate::client) fn follow(&mut self, layout: &ModelLayout, core: &mut ClientCore) {
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
    pub(in crate::client) fn residuals(&mut self, blocks: u32, plan: PlanId) -> &Arc<Residuals> {
        self.residuals.get_or_insert_with(|| Arc::new(Residuals::new(blocks, plan)))
    }
}
