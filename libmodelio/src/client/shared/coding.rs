//! Which blocks cross the network coded, and why others do not.

use std::sync::Arc;

use crate::client::payloads::residual::Residuals;
use crate::client::payloads::sum;
use crate::client::payloads::wire_form::FullBecause;
use crate::client::shared::{Inner, Shared};
use crate::vocabulary::coding::Coding;
use crate::vocabulary::ids::{BlockId, PlanId};
use crate::vocabulary::transport_kind::TransportKind;

impl Shared {
    /// Why contributions go in full over this transport.
    pub(in crate::client) fn full_because(
        &self,
        inner: &Inner,
        transport: TransportKind,
    ) -> Option<FullBecause> {
        let is_coded = |tensor: &crate::vocabulary::layout::Tensor| Coding::is_of(tensor.dtype);
        match transport {
            TransportKind::InProcess => Some(FullBecause::InProcess),
            TransportKind::SharedMemory => Some(FullBecause::SharedMemory),
            TransportKind::Rdma => Some(FullBecause::Rdma),
            TransportKind::Tcp if self.is_small(inner) => Some(FullBecause::Small),
            TransportKind::Tcp if inner.controls().reducer.combine().replaces() => {
                Some(FullBecause::Replaces)
            }
            TransportKind::Tcp if !self.layout.tensors().iter().any(is_coded) => Some(FullBecause::NoTensor),
            TransportKind::Tcp => None,
        }
    }

    /// How a block of so many sources is coded: `None` if the form would not be shorter, or if the block has values
    /// that are averaged. A form that is as long brings what the block has lost before.
    pub(in crate::client) fn codes(
        &self,
        inner: &mut Inner,
        plan: PlanId,
        block: BlockId,
        coding: Coding,
        sources: usize,
    ) -> Option<(Coding, Arc<Residuals>)> {
        if self.is_small(inner) || sources == 0 || inner.core.averages(block) {
            return None;
        }
        let full = sum::shape(&self.layout, block, sources, false).1;
        let coded = coding.block_bytes(&self.layout, block);
        let blocks = self.layout.blocks();
        let residuals = inner.form.residuals(blocks, plan);
        let is_worth_it = coded < full || coded == full && residuals.holds(block);
        is_worth_it.then(|| (coding, Arc::clone(residuals)))
    }

    /// Says in the log, once for each value, where `wire` has no effect.
    pub(in crate::client) fn say_coding(&self, inner: &mut Inner) {
        let coding = inner.controls().wire;
        if std::mem::replace(&mut inner.form.logged, coding) == coding {
            return;
        }
        let Some(coding) = coding else { return };
        for (partition, shard) in inner.core.shards().iter().enumerate() {
            let transport = match self.shards.local() {
                Some(_) => TransportKind::InProcess,
                None => inner.peers.transport(partition),
            };
            if let Some(why) = self.full_because(inner, transport) {
                let model = &self.model;
                tracing::warn!(%model, %shard, "control/wire ({coding}) has no effect on the way to this shard: {why}");
            }
        }
    }
}
