//! Groups of tensors that are reduced each in its own way, like the parameter groups of torch's optimizers; and the
//! reducer of each tensor. Plain data.

use std::ops::Range;

use fixedbitset::FixedBitSet;
use serde::{Deserialize, Serialize};

use crate::vocabulary::reducer::{Content, Reducer, Step, decimal};

/// What the tensors of a group have in place of the model's settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Overrides {
    /// Their reducer.
    pub reducer: Option<Reducer>,
    /// Their weight decay.
    pub weight_decay: Option<f32>,
    /// The factor on their learning rate.
    pub learning_rate_scale: Option<f32>,
}

impl Overrides {
    /// Whether contributions to a model with this reducer hold values of the tensors, whose mean counts.
    fn averages(&self, model: Reducer) -> bool {
        model.content() == Content::Gradient && self.reducer.is_some_and(Reducer::averages_values)
    }

    /// The step of the group in a version that has this step for the model.
    fn step(&self, of_model: &Step) -> Step {
        let mut step = of_model.clone();
        step.reducer = self.reducer.unwrap_or(step.reducer);
        step.of_values = self.averages(of_model.reducer);
        if let Some(decay) = self.weight_decay {
            step.hyper.weight_decay = decay;
        }
        if let Some(scale) = self.learning_rate_scale {
            // As a program multiplies the numbers that it would give to torch.
            let rate = decimal(step.hyper.learning_rate) * decimal(scale);
            step.hyper.learning_rate = (rate as f32).min(f32::MAX);
        }
        step
    }
}

/// The number of a group. Tensors of group 0 have the model's settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GroupId(pub u16);

impl GroupId {
    /// The tensors that have the model's settings.
    pub const MODEL: GroupId = GroupId(0);

    fn index(self) -> Option<usize> {
        usize::from(self.0).checked_sub(1)
    }
}

/// The groups of a model's tensors. Without any, all tensors have the model's settings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Groups {
    /// Of the groups from 1 on.
    overrides: Vec<Overrides>,
    /// How many tensors in a row are of which group. Empty without groups.
    tensors: Vec<(u32, GroupId)>,
}

impl Groups {
    /// The groups of tensors, by the overrides of each tensor.
    pub fn new(of_tensors: impl IntoIterator<Item = Overrides>) -> Groups {
        let mut groups = Groups::default();
        for overrides in of_tensors {
            let group = match groups.overrides.iter().position(|known| *known == overrides) {
                _ if overrides == Overrides::default() => 0,
                Some(known) => known + 1,
                None => {
                    groups.overrides.push(overrides);
                    groups.overrides.len()
                }
            };
            push(&mut groups.tensors, 1, GroupId(group as u16));
        }
        if groups.overrides.is_empty() { Groups::default() } else { groups }
    }

    /// Whether all tensors have the model's settings.
    pub fn is_empty(&self) -> bool {
        self.overrides.is_empty()
    }

    /// How many tensors in a row are of which group. There are none if all tensors have the model's settings.
    pub fn runs(&self) -> &[(u32, GroupId)] {
        &self.tensors
    }

    /// The tensors whose values are averaged in a model with this reducer, as ranges.
    pub fn averaged(&self, model: Reducer) -> impl Iterator<Item = Range<usize>> {
        let of = |group: GroupId| group.index().and_then(|index| self.overrides.get(index));
        let mut end = 0;
        let runs = self.tensors.iter().map(move |&(count, group)| {
            end += count as usize;
            (end - count as usize..end, group)
        });
        runs.filter(move |&(_, group)| of(group).is_some_and(|of| of.averages(model))).map(|(range, _)| range)
    }

    /// The steps of all groups in a version that has this step for the model.
    pub fn steps(&self, of_model: &Step) -> Steps {
        let groups = self.overrides.iter().map(|overrides| overrides.step(of_model)).collect();
        Steps { model: of_model.clone(), groups }
    }

    /// The reducers of the groups, if `reducer` is the model's, and that one.
    pub fn reducers(&self, reducer: Reducer) -> impl Iterator<Item = Reducer> {
        std::iter::once(reducer).chain(self.overrides.iter().filter_map(|overrides| overrides.reducer))
    }

    /// Whether the steps of some tensors depend on norms of those tensors, if `reducer` is the model's.
    pub fn are_layerwise(&self, reducer: Reducer) -> bool {
        self.reducers(reducer).any(Reducer::is_layerwise)
    }

    /// The reducer that keeps the most state, if `reducer` is the model's.
    pub fn widest(&self, reducer: Reducer) -> Reducer {
        widest(self.reducers(reducer)).unwrap_or(reducer)
    }

    /// Checks that these can be the groups of `tensors` tensors in a model with this reducer. Groups from another
    /// process may be anything.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self, tensors: u64, reducer: Reducer) -> Result<(), String> {
        let got: u64 = self.tensors.iter().map(|(count, _)| u64::from(*count)).sum();
        if got != tensors && !(self.overrides.is_empty() && self.tensors.is_empty()) {
            return Err(format!("the groups are of {got} tensors, the model has {tensors}"));
        }
        if let Some((_, group)) =
            self.tensors.iter().find(|(_, group)| group.index() >= Some(self.overrides.len()))
        {
            return Err(format!("group {} of {}", group.0, self.overrides.len()));
        }
        let mut others = self.overrides.iter().filter_map(|overrides| overrides.reducer);
        match others.find(|other| !other.mixes_with(reducer)) {
            Some(other) => Err(format!("a group with reducer {other} in a model with reducer {reducer}")),
            None => Ok(()),
        }
    }
}

/// A mark of the set of tensors whose values are averaged, by which two sets are told apart: a hash. That of no tensor
/// is the default, and no other set has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AveragedMark(pub u32);

impl AveragedMark {
    /// Of these tensors, in order.
    pub fn of(tensors: impl IntoIterator<Item = usize>) -> AveragedMark {
        // FNV-1a, by whole numbers. Only the empty set has zero.
        let mark = tensors.into_iter().fold(None, |mark: Option<u64>, tensor| {
            let before = mark.unwrap_or(0xCBF2_9CE4_8422_2325);
            Some((before ^ tensor as u64).wrapping_mul(0x0000_0100_0000_01B3))
        });
        AveragedMark(mark.map_or(0, |mark| ((mark >> 32) as u32 ^ mark as u32).max(1)))
    }
}

/// The contents of a contribution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contents {
    /// The kind of data that its learner has written.
    pub content: Content,
    /// The tensors of which it has values, because they are averaged in a model of gradients.
    pub averaged: AveragedMark,
}

/// The steps of the groups of a version.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Steps {
    model: Step,
    /// From group 1 on.
    groups: Vec<Step>,
}

/// One for all tensors.
impl From<Step> for Steps {
    fn from(model: Step) -> Steps {
        Steps { model, groups: Vec::new() }
    }
}

impl Steps {
    /// The model's, for tensors without a group.
    pub fn model(&self) -> &Step {
        &self.model
    }

    /// A group's, with `t` of the tensor that took the most steps.
    pub fn of_group(&self, group: GroupId) -> &Step {
        group.index().and_then(|index| self.groups.get(index)).unwrap_or(&self.model)
    }
}

/// The reducer of each tensor, by runs of tensors with the same one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorReducers(Vec<(u32, Reducer)>);

impl TensorReducers {
    /// Of a model with so many tensors, whose groups are these.
    pub fn new(tensors: usize, reducer: Reducer, groups: &Groups) -> TensorReducers {
        let mut runs = Vec::new();
        for &(count, group) in &groups.tensors {
            let overrides = group.index().and_then(|index| groups.overrides.get(index));
            push(&mut runs, count, overrides.and_then(|of| of.reducer).unwrap_or(reducer));
        }
        if runs.is_empty() {
            runs.push((tensors as u32, reducer));
        }
        TensorReducers(runs)
    }

    /// The number of tensors.
    pub fn tensors(&self) -> u64 {
        self.0.iter().map(|&(count, _)| u64::from(count)).sum()
    }

    /// The reducer of one tensor.
    pub fn of(&self, tensor: usize) -> Option<Reducer> {
        let mut end = 0;
        let run = self.0.iter().find(|(count, _)| {
            end += *count as usize;
            tensor < end
        });
        run.map(|&(_, reducer)| reducer)
    }

    /// Whether some tensors have another reducer than others.
    pub fn are_mixed(&self) -> bool {
        self.0.len() > 1
    }

    /// The reducer that keeps the most state.
    pub fn widest(&self) -> Reducer {
        widest(self.0.iter().map(|&(_, reducer)| reducer)).unwrap_or_default()
    }

    /// The tensors that have another reducer in `other`, of as many tensors.
    pub fn differing(&self, other: &TensorReducers) -> FixedBitSet {
        let each = |of: &TensorReducers| {
            of.0.clone().into_iter().flat_map(|(count, reducer)| std::iter::repeat_n(reducer, count as usize))
        };
        let mut differing = FixedBitSet::with_capacity(self.tensors() as usize);
        let pairs = each(self).zip(each(other)).enumerate();
        differing.extend(pairs.filter(|(_, (one, another))| one != another).map(|(tensor, _)| tensor));
        differing
    }
}

/// The first of those that keep the most state.
pub(super) fn widest(reducers: impl Iterator<Item = Reducer>) -> Option<Reducer> {
    reducers.reduce(|widest, next| if next.state_slots() > widest.state_slots() { next } else { widest })
}

/// Adds a run of tensors.
fn push<T: Copy + PartialEq>(runs: &mut Vec<(u32, T)>, count: u32, of: T) {
    match runs.last_mut() {
        _ if count == 0 => {}
        Some((last, same)) if *same == of => *last = last.saturating_add(count),
        _ => runs.push((count, of)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocabulary::reducer::Hyper;

    const NONE: Overrides = Overrides { reducer: None, weight_decay: None, learning_rate_scale: None };
    const PLAIN: Overrides = Overrides { reducer: Some(Reducer::Sgd), ..NONE };
    const STILL: Overrides = Overrides { weight_decay: Some(0.0), ..NONE };

    #[test]
    fn tensors_with_the_same_overrides_are_a_group() {
        let groups = Groups::new([NONE, STILL, STILL, PLAIN, STILL]);
        let runs: Vec<_> = groups.runs().iter().map(|(count, group)| (*count, group.0)).collect();
        assert_eq!(runs, [(1, 0), (2, 1), (1, 2), (1, 1)]);
        assert_eq!(Groups::new([NONE; 3]), Groups::default());
        assert!(
            groups.check(5, Reducer::AdamW).is_ok() && Groups::default().check(5, Reducer::Assign).is_ok()
        );
        assert_eq!(groups.reducers(Reducer::AdamW).collect::<Vec<_>>(), [Reducer::AdamW, Reducer::Sgd]);
        assert_eq!(groups.widest(Reducer::AdamW), Reducer::AdamW);
    }

    #[test]
    fn a_group_has_the_models_step_with_its_overrides() {
        let hyper = Hyper { learning_rate: 0.001, weight_decay: 0.02, ..Hyper::default() };
        let model = Step { reducer: Reducer::AdamW, hyper, contributions: 3, t: 9, ..Step::default() };
        let slow = Overrides { learning_rate_scale: Some(0.1), ..STILL };
        let steps = Groups::new([slow, NONE, PLAIN]).steps(&model);
        assert_eq!(*steps.model(), model);
        let step = steps.of_group(GroupId(1));
        // 0.001f32 * 0.1f32 is another number.
        assert_eq!((step.hyper.learning_rate, step.hyper.weight_decay, step.t), (0.0001, 0.0, 9));
        assert_eq!((step.reducer, step.contributions), (Reducer::AdamW, 3));
        assert_eq!(steps.of_group(GroupId(2)).reducer, Reducer::Sgd);
        assert_eq!(*steps.of_group(GroupId::MODEL), model);
        let huge = Overrides { learning_rate_scale: Some(f32::MAX), ..NONE };
        let fast = Step { hyper: Hyper { learning_rate: f32::MAX, ..Hyper::default() }, ..model };
        assert_eq!(Groups::new([huge]).steps(&fast).of_group(GroupId(1)).hyper.learning_rate, f32::MAX);
    }

    #[test]
    fn sets_of_averaged_tensors_have_marks_of_their_own() {
        let sets = [vec![], vec![0], vec![1], vec![0, 1], vec![1, 2], vec![0, 1, 2], vec![1_000]];
        let marks: Vec<_> = sets.iter().map(|set| AveragedMark::of(set.iter().copied())).collect();
        assert_eq!(marks[0], AveragedMark::default());
        assert!(marks.iter().enumerate().all(|(at, mark)| !marks[..at].contains(mark)), "{marks:?}");
    }

    #[test]
    fn averaged_tensors_have_steps_of_values() {
        let averaged = Overrides { reducer: Some(Reducer::Average), ..NONE };
        let groups = Groups::new([NONE, averaged, averaged, PLAIN, averaged]);
        assert_eq!(groups.averaged(Reducer::Adam).collect::<Vec<_>>(), [1..3, 4..5]);
        assert_eq!(groups.averaged(Reducer::Average).count(), 0, "all of it is models");
        let steps = groups.steps(&Step { reducer: Reducer::Adam, contributions: 2, ..Step::default() });
        let [adam, average] = [0, 1].map(|group| steps.of_group(GroupId(group)));
        assert!(average.of_values && !adam.of_values && average.reducer == Reducer::Average);
        assert_eq!(average.scale(), 0.5);
    }

    #[test]
    fn groups_that_are_none_are_refused() {
        let groups = Groups::new([NONE, PLAIN]);
        assert!(groups.check(3, Reducer::Adam).unwrap_err().contains("of 2 tensors, the model has 3"));
        assert!(groups.check(2, Reducer::Assign).unwrap_err().contains("sgd"));
        let assigns = Groups::new([Overrides { reducer: Some(Reducer::Assign), ..NONE }]);
        assert!(assigns.check(1, Reducer::Sgd).unwrap_err().contains("assign"));
        let beyond = Groups { tensors: vec![(2, GroupId(2))], ..groups };
        assert!(beyond.check(2, Reducer::Adam).unwrap_err().contains("group 2 of 1"));
    }

    #[test]
    fn each_tensor_has_a_reducer() {
        let groups = Groups::new([STILL, PLAIN, NONE, NONE]);
        let mixed = TensorReducers::new(4, Reducer::Momentum, &groups);
        let of: Vec<_> = (0..5).map(|tensor| mixed.of(tensor)).collect();
        let (momentum, sgd) = (Some(Reducer::Momentum), Some(Reducer::Sgd));
        assert_eq!(of, [momentum, sgd, momentum, momentum, None]);
        assert!(mixed.are_mixed() && mixed.tensors() == 4 && mixed.widest() == Reducer::Momentum);
        let uniform = TensorReducers::new(4, Reducer::Sgd, &Groups::default());
        assert!(!uniform.are_mixed() && uniform.widest() == Reducer::Sgd);
        assert_eq!(uniform.differing(&mixed).ones().collect::<Vec<_>>(), [0, 2, 3]);
        assert_eq!(TensorReducers::new(4, Reducer::Sgd, &Groups::new([STILL; 4])), uniform);
    }
}
