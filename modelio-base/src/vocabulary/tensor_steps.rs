//! Optimizer steps, tensor by tensor: the tensors that a version changes, and the number of steps that each
//! has taken.
//!
//! Plain data. A step normally changes all tensors, and all have as many steps behind them: one run says it.
use std::ops::Range;

use fixedbitset::FixedBitSet;
use serde::{Deserialize, Serialize};

use crate::vocabulary::groups::{GroupId, Groups, Steps, TensorReducers};
use crate::vocabulary::layout::PartitionLayout;
use crate::vocabulary::norm::{Norm, TensorFactors};
use crate::vocabulary::reducer::Step;

/// A number for each tensor, by runs of tensors with the same number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<(u32, u64)>")]
pub struct TensorSteps(Vec<(u32, u64)>);

/// From runs as a message has them: they need not be what [`TensorSteps::runs`] would give.
impl From<Vec<(u32, u64)>> for TensorSteps {
    fn from(runs: Vec<(u32, u64)>) -> TensorSteps {
        let mut steps = TensorSteps::default();
        runs.iter().for_each(|&(count, step)| steps.push(count, step));
        steps
    }
}

impl TensorSteps {
    /// All of `tensors` tensors at `step`.
    pub fn uniform(tensors: usize, step: u64) -> TensorSteps {
        TensorSteps(vec![(tensors as u32, step)])
    }

    /// How many tensors in a row have which number. Neighbours differ, and none is empty.
    pub fn runs(&self) -> &[(u32, u64)] {
        &self.0
    }

    /// The number of tensors.
    pub fn tensors(&self) -> u64 {
        self.0.iter().map(|&(count, _)| u64::from(count)).sum()
    }

    /// The highest number.
    pub fn highest(&self) -> u64 {
        self.0.iter().map(|&(_, step)| step).max().unwrap_or_default()
    }

    /// The number of one tensor.
    pub fn of(&self, tensor: usize) -> u64 {
        let mut end = 0;
        let run = self.0.iter().find(|(count, _)| {
            end += *count as usize;
            tensor < end
        });
        run.map_or(0, |&(_, step)| step)
    }

    /// The steps of a version that changes `written`, after these: 0 for tensors that stay as they are.
    #[must_use]
    pub fn next(&self, written: &FixedBitSet) -> TensorSteps {
        let mut next = TensorSteps::default();
        let mut at = 0;
        for &(count, step) in &self.0 {
            for tensor in at..at + count as usize {
                next.push(1, if written.contains(tensor) { step.saturating_add(1) } else { 0 });
            }
            at += count as usize;
        }
        next
    }

    /// These steps, except that tensors begin anew which have another reducer in `after` than in `before`.
    #[must_use]
    pub fn restarted(&self, before: &TensorReducers, after: &TensorReducers) -> TensorSteps {
        let anew = before.differing(after);
        let mut steps = TensorSteps::default();
        let mut at = 0;
        for &(count, step) in &self.0 {
            for tensor in at..at + count as usize {
                steps.push(1, if anew.contains(tensor) { 0 } else { step });
            }
            at += count as usize;
        }
        steps
    }

    /// The steps of each tensor when a version with the steps `made` is out.
    #[must_use]
    pub fn after(&self, made: &TensorSteps) -> TensorSteps {
        let mut after = TensorSteps::default();
        let (mut before, mut made) = (self.0.iter().copied(), made.0.iter().copied());
        let (mut old, mut new) = (before.next(), made.next());
        while let (Some((olds, step)), Some((news, next))) = (old, new) {
            let count = olds.min(news);
            after.push(count, if next == 0 { step } else { next });
            old = if olds > count { Some((olds - count, step)) } else { before.next() };
            new = if news > count { Some((news - count, next)) } else { made.next() };
        }
        after
    }

    fn push(&mut self, count: u32, step: u64) {
        match self.0.last_mut() {
            _ if count == 0 => {}
            Some((last, of)) if *of == step => *last = last.saturating_add(count),
            _ => self.0.push((count, step)),
        }
    }
}

/// How the elements of a tensor are reduced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Treatment {
    /// The step that the tensor takes. 0 if it stays as it is.
    pub t: u64,
    /// The group of the tensor.
    pub group: GroupId,
    /// The factor of the tensor, if it has one.
    pub factor: Option<Norm>,
}

impl Treatment {
    /// The step that the elements take, of the steps of all groups.
    pub fn step(self, steps: &Steps) -> Step {
        Step { t: self.t, factor: self.factor, ..steps.of_group(self.group).clone() }
    }
}

/// What the bytes of a layout have that their tensors have.
#[derive(Clone, Debug)]
pub struct ByTensor<T> {
    /// The end of each run, and what it has.
    runs: Vec<(u64, T)>,
}

/// How the bytes of a layout are reduced.
pub type ByteSteps = ByTensor<Treatment>;

impl<T> Default for ByTensor<T> {
    fn default() -> ByTensor<T> {
        ByTensor { runs: Vec::new() }
    }
}

impl ByteSteps {
    /// For a partition of a model, in the partition's bytes.
    pub fn of_partition(
        partition: &PartitionLayout,
        steps: &TensorSteps,
        groups: &Groups,
        factors: &TensorFactors,
    ) -> ByteSteps {
        let end_of = |tensor: usize| partition.tensor_ends().get(tensor).copied();
        ByteSteps::by_ends((steps, groups, factors), end_of).within(partition)
    }

    fn by_ends(
        (steps, groups, factors): (&TensorSteps, &Groups, &TensorFactors),
        end_of: impl Fn(usize) -> Option<u64>,
    ) -> ByteSteps {
        let mut bytes = ByteSteps::default();
        let mut at = 0;
        // Behind the last run, and without any, tensors have the model's settings and no factor.
        let mut groups = Countdown::new(groups.runs(), GroupId::MODEL);
        let mut factors = Countdown::new(factors.runs(), None);
        for &(mut count, t) in steps.runs() {
            while count > 0 {
                let ((of_group, group), (of_factor, factor)) = (groups.run(), factors.run());
                let part = count.min(of_group).min(of_factor);
                groups.pass(part);
                factors.pass(part);
                (count, at) = (count - part, at + part as usize);
                if let Some(end) = end_of(at - 1) {
                    bytes.push(end, Treatment { t, group, factor });
                }
            }
        }
        bytes
    }
}

/// The runs of tensors that are still to come.
struct Countdown<'a, T> {
    rest: std::slice::Iter<'a, (u32, T)>,
    left: u32,
    of: T,
    /// What tensors have behind the last run.
    beyond: T,
}

impl<'a, T: Copy> Countdown<'a, T> {
    fn new(runs: &'a [(u32, T)], beyond: T) -> Self {
        Countdown { rest: runs.iter(), left: 0, of: beyond, beyond }
    }

    /// How many tensors come that have the same, and what they have.
    fn run(&mut self) -> (u32, T) {
        while self.left == 0 {
            (self.left, self.of) = self.rest.next().copied().unwrap_or((u32::MAX, self.beyond));
        }
        (self.left, self.of)
    }

    fn pass(&mut self, count: u32) {
        self.left -= count;
    }
}

impl ByTensor<u32> {
    /// The number of each tensor, in the bytes of a partition.
    pub fn numbers(partition: &PartitionLayout) -> ByTensor<u32> {
        let mut model = ByTensor::default();
        partition.tensor_ends().iter().zip(0..).for_each(|(&end, tensor)| model.push(end, tensor));
        model.within(partition)
    }
}

impl<T: Copy + PartialEq> ByTensor<T> {
    /// The same in the bytes of a partition of the model.
    fn within(self, partition: &PartitionLayout) -> ByTensor<T> {
        let model = self;
        if let [(_, of)] = model.runs[..] {
            return ByTensor { runs: vec![(partition.layout().size(), of)] };
        }
        let size = u64::from(partition.layout().block_size());
        let mut local = ByTensor::default();
        for (block, end) in partition.blocks().iter().zip((1..).map(|count| count * size)) {
            let start = u64::from(block.0) * size;
            for (bytes, of) in model.pieces(start..start + size) {
                local.push((end - size + bytes.end - start).min(partition.layout().size()), of);
            }
        }
        local
    }

    fn push(&mut self, end: u64, of: T) {
        match self.runs.last_mut() {
            Some((last, _)) if *last >= end => {}
            Some((last, same)) if *same == of => *last = end,
            _ if end == 0 => {}
            _ => self.runs.push((end, of)),
        }
    }

    /// `bytes` in pieces that have the same each. Allocates nothing.
    pub fn pieces(&self, bytes: Range<u64>) -> impl Iterator<Item = (Range<u64>, T)> {
        let first = self.runs.partition_point(|(end, _)| *end <= bytes.start);
        let mut at = bytes.start;
        self.runs[first..].iter().map_while(move |&(end, of)| {
            let piece = at..end.min(bytes.end);
            at = piece.end;
            (!piece.is_empty()).then_some((piece, of))
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::vocabulary::groups::Overrides;
    use crate::vocabulary::ids::BlockId;
    use crate::vocabulary::layout::{DType, ModelLayout};
    use crate::vocabulary::reducer::Reducer;
    use proptest::prelude::*;

    use super::*;

    fn set(tensors: &[bool]) -> FixedBitSet {
        tensors.iter().copied().enumerate().fold(
            FixedBitSet::with_capacity(tensors.len()),
            |mut set, (i, in_it)| {
                set.set(i, in_it);
                set
            },
        )
    }

    #[test]
    fn tensors_that_are_written_together_are_one_run() {
        let mut steps = TensorSteps::uniform(4, 0);
        for step in 1..=3 {
            let next = steps.next(&set(&[true; 4]));
            assert_eq!(next.runs(), [(4, step)]);
            steps = steps.after(&next);
        }
        let next = steps.next(&set(&[true, false, false, true]));
        assert_eq!(next.runs(), [(1, 4), (2, 0), (1, 4)]);
        steps = steps.after(&next);
        assert_eq!(steps.runs(), [(1, 4), (2, 3), (1, 4)]);
        steps = steps.after(&steps.next(&set(&[false, true, true, false])));
        assert_eq!(steps, TensorSteps::uniform(4, 4));
    }

    #[test]
    fn a_tensor_with_another_reducer_begins_anew() {
        let before = TensorReducers::new(4, Reducer::Adam, &Groups::default());
        let plain = Overrides { reducer: Some(Reducer::Sgd), ..Overrides::default() };
        let adam = Overrides { reducer: Some(Reducer::Adam), ..Overrides::default() };
        let groups = Groups::new([adam, Overrides::default(), plain, adam]);
        let after = TensorReducers::new(4, Reducer::Lion, &groups);
        let steps = TensorSteps::from(vec![(2, 7), (1, 5), (1, 7)]);
        assert_eq!(steps.restarted(&before, &after).runs(), [(1, 7), (2, 0), (1, 7)]);
        assert_eq!(steps.restarted(&before, &before), steps);
    }

    proptest! {
        #[test]
        fn each_tensor_counts_the_versions_that_change_it(versions in proptest::collection::vec(proptest::collection::vec(any::<bool>(), 7), 0..12)) {
            let mut counts = [0u64; 7];
            let mut steps = TensorSteps::uniform(7, 0);
            for written in &versions {
                let next = steps.next(&set(written));
                for (tensor, count) in counts.iter_mut().enumerate() {
                    *count += u64::from(written[tensor]);
                    prop_assert_eq!(next.of(tensor), if written[tensor] { *count } else { 0 });
                }
                steps = steps.after(&next);
                prop_assert_eq!(steps.tensors(), 7);
                prop_assert!(steps.runs().windows(2).all(|pair| pair[0].1 != pair[1].1));
            }
            for (tensor, count) in counts.iter().enumerate() {
                prop_assert_eq!(steps.of(tensor), *count);
            }
        }

        #[test]
        fn bytes_of_a_partition_have_the_steps_of_their_tensors(
            sizes in proptest::collection::vec(0usize..40_000, 1..9),
            at in proptest::collection::vec(0u64..3, 9),
            in_group in proptest::collection::vec(any::<bool>(), 9),
            owned in proptest::collection::vec(any::<bool>(), 64),
        ) {
            prop_assume!(sizes.iter().sum::<usize>() > 0);
            let tensors = sizes.iter().enumerate().map(|(i, &size)| (format!("t{i}"), DType::F32, vec![size]));
            let layout = ModelLayout::new(tensors.collect(), 64 << 10).unwrap();
            let runs: Vec<(u32, u64)> = at.iter().take(sizes.len()).map(|&step| (1, step)).collect();
            let steps = TensorSteps::from(runs.clone());
            let averaged = Overrides { reducer: Some(Reducer::Average), ..Overrides::default() };
            let of = |tensor: usize| if in_group[tensor] { averaged } else { Overrides::default() };
            let groups = Groups::new((0..sizes.len()).map(of));
            let by = |tensor: usize| (at[tensor] == 2).then_some(tensor as f64 / 2.0);
            let factors = TensorFactors::new((0..sizes.len()).map(by));
            let treatment = |tensor: usize| Treatment {
                t: steps.of(tensor),
                group: GroupId(in_group[tensor].into()),
                factor: by(tensor).map(Norm::new),
            };
            let mut blocks: Vec<BlockId> = (0..layout.blocks()).map(BlockId).collect();
            blocks.retain(|block| owned[block.index() % 64]);
            prop_assume!(!blocks.is_empty());
            let partition = layout.partition(&blocks).unwrap();
            let end_of = |tensor: usize| layout.tensors().get(tensor).map(|tensor| tensor.bytes.end);
            let whole = ByteSteps::by_ends((&steps, &groups, &factors), end_of);
            let local = ByteSteps::of_partition(&partition, &steps, &groups, &factors);
            for (i, &block) in blocks.iter().enumerate() {
                let (here, there) = (partition.layout().block_bytes(BlockId(i as u32)), layout.block_bytes(block));
                let expected: Vec<_> = whole
                    .pieces(there.clone())
                    .map(|(bytes, step)| (bytes.start - there.start + here.start..bytes.end - there.start + here.start, step))
                    .collect();
                for tensor in layout.tensors_in(&there) {
                    let bytes = &layout.tensors()[tensor].bytes;
                    let piece = expected.iter().find(|(piece, _)| {
                        piece.contains(&(bytes.start.max(there.start) - there.start + here.start))
                    });
                    prop_assert!(bytes.is_empty() || piece.unwrap().1 == treatment(tensor));
                }
                prop_assert_eq!(expected.first().map(|(bytes, _)| bytes.start), Some(here.start));
                prop_assert_eq!(expected.last().map(|(bytes, _)| bytes.end), Some(here.end));
                // Runs of a partition may be cut elsewhere; byte for byte they are the same.
                for byte in [here.start, (here.start + here.end) / 2, here.end - 1] {
                    let of = |pieces: &[(Range<u64>, Treatment)]| pieces.iter().find(|(piece, _)| piece.contains(&byte)).map(|(_, step)| *step);
                    let pieces: Vec<_> = local.pieces(here.clone()).collect();
                    prop_assert_eq!(of(&pieces), of(&expected));
                }
                let covered: u64 = local.pieces(here.clone()).map(|(piece, _)| piece.end - piece.start).sum();
                prop_assert_eq!(covered, here.end - here.start);
            }
        }
    }
}
