//! The tensors whose values a rule averages in a model of gradients. A client must know them: a contribution brings all
//! or nothing of such a tensor, its values cross a network as they are, and a plan that has begun early must know who
//! brings them.

use std::sync::Arc;

use fixedbitset::FixedBitSet;

use crate::vocabulary::controls::Controls;
use crate::vocabulary::frozen::Frozen;
use crate::vocabulary::layout::ModelLayout;
use crate::vocabulary::reducer::Reducer;
use crate::vocabulary::tensor_rules::TensorRules;

/// The averaged tensors of a model, by the newest settings. Frozen ones are not among them.
#[derive(Debug, Default)]
pub(crate) struct Averaged {
    /// The settings that they follow from.
    of: (Reducer, TensorRules, Frozen),
    /// Their numbers, in order.
    tensors: Arc<[usize]>,
}

impl Averaged {
    /// Follows the settings. Returns whether they are others than before.
    pub(crate) fn follow(&mut self, layout: &ModelLayout, controls: &Controls) -> bool {
        if (self.of.0, &self.of.1, &self.of.2) == (controls.reducer, &controls.tensors, &controls.frozen) {
            return false;
        }
        self.of = (controls.reducer, controls.tensors.clone(), controls.frozen.clone());
        self.tensors = Arc::default();
        if controls.tensors.reducers().any(Reducer::averages_values) {
            let tensors = layout.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor.dtype));
            // The coordinator has checked that the rules fit the model.
            let (frozen, groups) = controls.of_tensors(tensors).unwrap_or_default();
            let averaged = groups.averaged(controls.reducer).flatten();
            self.tensors = averaged.filter(|tensor| !frozen.contains(*tensor)).collect();
        }
        true
    }

    /// Their numbers, in order.
    pub(crate) fn tensors(&self) -> &Arc<[usize]> {
        &self.tensors
    }

    /// The blocks that have bytes of them.
    pub(crate) fn blocks(&self, layout: &ModelLayout) -> FixedBitSet {
        let mut blocks = FixedBitSet::with_capacity(layout.blocks() as usize);
        let of = |tensor: &usize| layout.blocks_of(layout.tensors()[*tensor].bytes.clone());
        blocks.extend(self.tensors.iter().flat_map(of).map(|block| block.index()));
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocabulary::layout::DType;

    #[test]
    fn the_averaged_tensors_follow_from_the_rules_and_the_models_reducer() {
        let sizes = [("a", 20_000), ("bn.mean", 5), ("none", 0), ("bn.var", 20_000), ("b", 7)];
        let tensors = sizes.map(|(name, count)| (name.to_owned(), DType::F32, vec![count]));
        let layout = ModelLayout::new(tensors.to_vec(), 64 << 10).unwrap();
        let rules =
            Controls::default().with("tensors", "bn.* reducer=average\nnone reducer=average").unwrap();
        let mut averaged = Averaged::default();
        assert!(averaged.follow(&layout, &rules) && !averaged.follow(&layout, &rules));
        assert_eq!(averaged.tensors()[..], [1, 2, 3]);
        assert_eq!(averaged.blocks(&layout).ones().collect::<Vec<_>>(), [1, 2]);
        averaged.follow(&layout, &rules.with("frozen", "*.mean").unwrap());
        assert_eq!(averaged.tensors()[..], [2, 3], "what is frozen is not averaged");
        averaged.follow(&layout, &rules.with("reducer", "average").unwrap());
        assert_eq!(averaged.tensors()[..], [0usize; 0], "all of it is models");
        averaged.follow(&layout, &rules.with("tensors", "bn.* frozen").unwrap());
        assert_eq!(averaged.tensors()[..], [0usize; 0]);
    }
}
