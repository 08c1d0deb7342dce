//! The contents of a plan: its inputs, the step of its reducer, and the factors on that.

use std::collections::BTreeSet;
use std::sync::Arc;

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::groups::{GroupId, Groups};
use libmodelio::vocabulary::ids::LearnerId;
use libmodelio::vocabulary::norm::{Norm, TensorFactors};
use libmodelio::vocabulary::reducer;

use super::{Committed, JobCore, JobPlan, OfTensors, PayloadPlace, Tensors, Work, staleness};
use crate::reducers;

impl JobCore {
    /// The plan for the coming version. It has the committed contributions. If it is provisional, it also has those of
    /// these learners, which may hold any tensor.
    pub(super) fn reduce_plan(&self, provisional: Option<&BTreeSet<LearnerId>>) -> JobPlan {
        let kept = self.committed.iter().filter(|committed| committed.place == PayloadPlace::Staged);
        let mut inputs: Vec<_> = kept.map(|committed| Arc::clone(&committed.contribution)).collect();
        inputs.sort_by_key(|contribution| contribution.learner);
        let (reducer, mut hyper, OfTensors { frozen, groups }) = self.params();
        // A provisional plan has begun with the whole rate.
        if provisional.is_none() && !self.provisional.is_under_way() && self.divides_by_staleness() {
            hyper = staleness::of_stale(hyper, self.staleness());
        }
        let written = self.written(&frozen, provisional.is_some());
        let tensors = self.recipe.next_steps(&written);
        let contributions = (self.committed.len() + provisional.map_or(0, BTreeSet::len)) as u32;
        // Those that are not committed count once: no block is sent early of others.
        let weights = self.committed.iter().map(|committed| committed.contribution.weight.get());
        let weight = weights.chain(provisional.iter().flat_map(|of| of.iter().map(|_| 1.0))).sum();
        let weight = Some(Norm::new(weight)).filter(|_| weight != f64::from(contributions));
        let t = tensors.highest();
        let mut step = reducer::Step { reducer, hyper, contributions, weight, t, ..reducer::Step::default() };
        step.norm = self.measured.squares().map(|squares| Norm::new(step.scale() * squares.sqrt()));
        let factors = self.factors(&groups, &step, &written, provisional);
        let fresh_state = !self.recipe.has_state();
        let work = Work::Reduce { step, tensors, groups, factors, fresh_state };
        JobPlan { work, inputs, weights: None, provisional: provisional.cloned() }
    }

    /// The tensors that the coming version reduces. A provisional one may reduce any.
    pub(super) fn written(&self, frozen: &Tensors, is_provisional: bool) -> FixedBitSet {
        let mut written = FixedBitSet::with_capacity(self.recipe.tensors());
        if is_provisional {
            written.insert_range(..);
        }
        self.committed.iter().for_each(|committed| written.union_with(&committed.contribution.tensors));
        written.difference_with(&frozen.0);
        written
    }

    /// The factors of tensors: on the steps of those that were measured, and on the sums of values that not all
    /// contributions bring.
    fn factors(
        &self,
        groups: &Groups,
        step: &reducer::Step,
        written: &FixedBitSet,
        provisional: Option<&BTreeSet<LearnerId>>,
    ) -> TensorFactors {
        if self.measured.norms().is_none() && groups.averaged(step.reducer).next().is_none() {
            return TensorFactors::default();
        }
        let steps = groups.steps(step);
        let runs =
            groups.runs().iter().flat_map(|&(count, group)| std::iter::repeat_n(group, count as usize));
        let groups = runs.chain(std::iter::repeat(GroupId::MODEL));
        TensorFactors::new((0..self.recipe.tensors()).zip(groups).map(|(tensor, group)| {
            let step = steps.of_group(group);
            let without = |committed: &Committed| !committed.contribution.tensors.contains(tensor);
            if step.of_values {
                let lacks = written.contains(tensor) && self.committed.iter().any(without);
                return lacks.then(|| 1.0 / self.weight_of(tensor, provisional));
            }
            let norms = self.measured.norms().filter(|_| step.reducer.is_layerwise())?;
            norms.get(tensor).map(|norms| reducers::factor(step, *norms))
        }))
    }

    /// The weight of the contributions that have written a tensor. Those that are still written may do so: a block of
    /// the tensor is computed before their commit only if each of them has sent it.
    fn weight_of(&self, tensor: usize, provisional: Option<&BTreeSet<LearnerId>>) -> f64 {
        let brings = |committed: &&Committed| committed.contribution.tensors.contains(tensor);
        let committed = self.committed.iter().filter(brings).map(|of| of.contribution.weight.get());
        committed.sum::<f64>() + provisional.map_or(0, BTreeSet::len) as f64
    }
}
