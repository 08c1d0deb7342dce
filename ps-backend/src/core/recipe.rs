//! What versions are computed with: reducer, constants, frozen tensors and groups; and the optimizer state that exists.

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::groups::{Groups, TensorReducers};
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::reducer::{Hyper, Reducer};
use libmodelio::vocabulary::tensor_steps::TensorSteps;
use serde::{Deserialize, Serialize};

use super::state::{OfTensors, Tensors};

/// Reducer, constants, frozen tensors and groups of a version.
pub(super) type Params = (Reducer, Hyper, OfTensors);

/// What the coming version is computed with, for a model of this shape.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Recipe {
    blocks: usize,
    tensors: usize,
    /// That of the coming version, once part of it was computed.
    fixed: Option<Params>,
    /// What the settings say of single tensors.
    of_tensors: OfTensors,
    /// The reducer of each tensor by the settings.
    reducers: TensorReducers,
    /// The reducer of each tensor whose optimizer state exists.
    state_of: TensorReducers,
    /// The state begins anew on top of this version.
    restart: Option<Version>,
    /// Replicas of the model begin anew with this version.
    replicas_since: Version,
    /// The optimizer steps of each tensor since its state was zero.
    steps: TensorSteps,
}

impl Recipe {
    /// For a model without optimizer state.
    pub(super) fn new(blocks: usize, tensors: usize, reducer: Reducer) -> Recipe {
        let reducers = TensorReducers::new(tensors, reducer, &Groups::default());
        let frozen = Tensors(FixedBitSet::with_capacity(tensors));
        Recipe {
            blocks,
            tensors,
            fixed: None,
            of_tensors: OfTensors { frozen, groups: Groups::default() },
            state_of: reducers.clone(),
            reducers,
            restart: None,
            replicas_since: Version(0),
            steps: TensorSteps::uniform(tensors, 0),
        }
    }

    /// The number of the model's blocks.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// The number of the model's tensors.
    pub(super) fn tensors(&self) -> usize {
        self.tensors
    }

    /// That of the version after `version`.
    pub(super) fn of_next(&self, controls: &Controls, version: Version) -> Params {
        let set = || (controls.reducer, controls.hyper_after(version), self.of_tensors.clone());
        self.fixed.clone().unwrap_or_else(set)
    }

    /// That of the coming version, if part of it was computed.
    pub(super) fn fixed(&self) -> Option<&Params> {
        self.fixed.as_ref()
    }

    /// Part of the version after `version` is computed: settings change it no more.
    pub(super) fn fix(&mut self, controls: &Controls, version: Version) {
        self.fixed = Some(self.of_next(controls, version));
    }

    /// Nothing of the coming version is computed.
    pub(super) fn release(&mut self) {
        self.fixed = None;
    }

    /// The settings name these tensors, and this reducer for the model.
    ///
    /// # Panics
    /// If this is not a set of the model's tensors.
    pub(super) fn set_tensors(&mut self, frozen: FixedBitSet, groups: Groups, reducer: Reducer) {
        assert_eq!(frozen.len(), self.tensors, "tensors of the model");
        self.of_tensors = OfTensors { frozen: Tensors(frozen), groups };
        self.set_reducer(reducer);
    }

    /// The settings name this reducer for the model.
    pub(super) fn set_reducer(&mut self, reducer: Reducer) {
        self.reducers = TensorReducers::new(self.tensors, reducer, &self.of_tensors.groups);
    }

    /// The state begins anew on top of `version`, if there is any: the versions up to it have corrections of old replicas.
    pub(super) fn restart_at(&mut self, version: Version) {
        if self.has_state() {
            self.replicas_since = version;
            self.restart = Some(version);
        }
    }

    /// New settings take effect for the version after `version`, unless part of it was computed.
    pub(super) fn settle(&mut self, version: Version) {
        if self.fixed.is_some() {
            return;
        }
        let anew = self.restart.take_if(|at| *at <= version).is_some();
        if self.state_of == self.reducers && !anew {
            return;
        }
        if !anew {
            (self.replicas_since, self.restart) = (version, None);
        }
        self.steps = match anew {
            true => TensorSteps::uniform(self.tensors, 0),
            false => self.steps.restarted(&self.state_of, &self.reducers),
        };
        self.state_of = self.reducers.clone();
    }

    /// The steps of the tensors in the coming version, of which these are reduced.
    pub(super) fn next_steps(&self, written: &FixedBitSet) -> TensorSteps {
        self.steps.next(written)
    }

    /// A version with these steps was made.
    pub(super) fn reduced(&mut self, steps: &TensorSteps) {
        self.steps = self.steps.after(steps);
    }

    /// Whether any optimizer state is there.
    pub(super) fn has_state(&self) -> bool {
        self.steps.highest() > 0
    }

    /// The optimizer steps of each tensor since its state was zero.
    pub(super) fn steps(&self) -> &TensorSteps {
        &self.steps
    }

    /// The reducer of each tensor whose optimizer state exists.
    pub(super) fn state_of(&self) -> &TensorReducers {
        &self.state_of
    }

    /// Replicas of the model begin anew with this version.
    pub(super) fn replicas_since(&self) -> Version {
        self.replicas_since
    }

    /// Goes on from the state of a record; without reducers of single tensors, all tensors have `reducer`.
    pub(super) fn restore(&mut self, reducers: Option<TensorReducers>, reducer: Reducer, steps: TensorSteps) {
        let uniform = || TensorReducers::new(self.tensors, reducer, &Groups::default());
        self.state_of = reducers.unwrap_or_else(uniform);
        self.steps = steps;
    }

    /// Whether it can be of a model of this shape, with `reducer` in the settings.
    pub(super) fn is_sound(&self, blocks: usize, tensors: usize, reducer: Reducer) -> bool {
        self.blocks == blocks
            && self.tensors == tensors
            && self.steps.tensors() == tensors as u64
            && self.of_tensors.is_sound(tensors, reducer)
            && self.fixed.as_ref().is_none_or(|(reducer, _, of)| of.is_sound(tensors, *reducer))
            && [&self.reducers, &self.state_of].iter().all(|of| of.tensors() == tensors as u64)
    }
}
