//! The tensors whose values a rule averages in a model of gradients. A client must know them, because of such a tensor a
//! contribution brings all or nothing, and its values cross a network as they are.

use std::ops::Range;

use crate::vocabulary::controls::Controls;
use crate::vocabulary::layout::ModelLayout;
use crate::vocabulary::reducer::Reducer;
use crate::vocabulary::tensor_rules::TensorRules;

/// The averaged tensors of a model, by the newest settings.
#[derive(Debug, Default)]
pub struct Averaged {
    /// The settings that they follow from.
    of: (Reducer, TensorRules),
    /// Their numbers, in order.
    tensors: Vec<usize>,
}

impl Averaged {
    /// Follows the settings.
    pub fn follow(&mut self, layout: &ModelLayout, controls: &Controls) {
        if (self.of.0, &self.of.1) == (controls.reducer, &controls.tensors) {
            return;
        }
        self.of = (controls.reducer, controls.tensors.clone());
        self.tensors.clear();
        if controls.tensors.reducers().any(Reducer::averages_values) {
            let names = layout.tensors().iter().map(|tensor| tensor.name.as_str());
            // The coordinator has checked that the rules fit the model.
            let groups = controls.tensors.resolve(names).map(|(_, groups)| groups).unwrap_or_default();
            self.tensors.extend(groups.averaged(controls.reducer).flatten());
        }
    }

    /// Their numbers, in order.
    pub fn tensors(&self) -> &[usize] {
        &self.tensors
    }

    /// Whether one of them has bytes in this range.
    pub fn overlaps(&self, layout: &ModelLayout, bytes: &Range<u64>) -> bool {
        let of = |tensor: usize| &layout.tensors()[tensor].bytes;
        let first = self.tensors.partition_point(|&tensor| of(tensor).end <= bytes.start);
        self.tensors[first..].iter().map(|&tensor| of(tensor)).any(|of| {
            // Behind the range there may be one that is empty, and no byte of it is there.
            of.start < bytes.end && !of.is_empty()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocabulary::layout::DType;

    #[test]
    fn the_averaged_tensors_follow_from_the_rules_and_the_models_reducer() {
        let sizes = [("a", 3), ("bn.mean", 5), ("none", 0), ("bn.var", 4), ("b", 7)];
        let tensors = sizes.map(|(name, count)| (name.to_owned(), DType::F32, vec![count]));
        let layout = ModelLayout::new(tensors.to_vec(), 64 << 10).unwrap();
        let rules = Controls::default().with("tensors", "bn.* reducer=average\nnone reducer=average").unwrap();
        let mut averaged = Averaged::default();
        averaged.follow(&layout, &rules);
        assert_eq!(averaged.tensors(), [1, 2, 3]);
        for (bytes, overlaps) in
            [(0..12, false), (0..13, true), (12..14, true), (40..48, true), (48..76, false), (0..76, true)]
        {
            assert_eq!(averaged.overlaps(&layout, &bytes), overlaps, "{bytes:?}");
        }
        averaged.follow(&layout, &rules.with("reducer", "average").unwrap());
        assert_eq!(averaged.tensors(), [0usize; 0], "all of it is models");
        averaged.follow(&layout, &rules.with("tensors", "bn.* frozen").unwrap());
        assert_eq!(averaged.tensors(), [0usize; 0]);
    }
}
