//! The optimizer as the model of a job has it: how many steps it has made of each tensor, and when it may begin anew.

use std::collections::BTreeSet;

use libmodelio::vocabulary::groups::TensorReducers;
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::vocabulary::tensor_steps::TensorSteps;

use crate::settings::Settings;

#[derive(Debug)]
struct OfTensor {
    reducer: Reducer,
    /// Steps since its state was zero.
    steps: u64,
    /// Since its last step, its reducer was another one for a while. So its state may be zero again.
    may_be_new: bool,
    /// The settings have changed its reducer since the last step was decided.
    chosen: bool,
    set: Reducer,
}

#[derive(Debug)]
pub struct Optimizer(Vec<OfTensor>);

fn of(reducers: &TensorReducers, tensor: usize) -> Reducer {
    reducers.of(tensor).expect("one of the model's tensors")
}

impl Optimizer {
    pub fn new(settings: &Settings) -> Optimizer {
        let reducers = settings.reducers(&settings.controls);
        let tensor = |at| {
            let reducer = of(&reducers, at);
            OfTensor { reducer, steps: 0, may_be_new: false, chosen: false, set: reducer }
        };
        Optimizer((0..reducers.tensors() as usize).map(tensor).collect())
    }

    /// The settings name these reducers from now on. They count from the next version of which nothing is computed yet.
    pub fn sets(&mut self, reducers: &TensorReducers) {
        for (at, tensor) in self.0.iter_mut().enumerate() {
            let new = of(reducers, at);
            tensor.chosen |= new != tensor.set;
            tensor.set = new;
        }
    }

    /// A step with these reducers is decided. What is written meanwhile counts from the next one. Returns the tensors
    /// whose state may begin anew with this step.
    pub fn decided(&mut self, reducers: &TensorReducers) -> BTreeSet<usize> {
        let chosen =
            self.0.iter().enumerate().filter(|(_, tensor)| tensor.chosen).map(|(at, _)| at).collect();
        for (at, tensor) in self.0.iter_mut().enumerate() {
            tensor.chosen = tensor.set != of(reducers, at);
        }
        chosen
    }

    /// Whether nobody misses the state of a tensor if it is lost now.
    pub fn may_lose(&self, tensor: usize) -> bool {
        self.0[tensor].chosen
    }

    /// A version is made by a step with these reducers, which says of each tensor which step it is. Tensors that nobody
    /// has written are at 0. Others go on, and begin anew only if their reducer was changed.
    pub fn steps(
        &mut self,
        version: Version,
        (reducers, steps): (&TensorReducers, &TensorSteps),
        (fresh, may_begin_anew): (bool, &BTreeSet<usize>),
        written: &BTreeSet<usize>,
    ) {
        for (at, tensor) in self.0.iter_mut().enumerate() {
            let reducer = of(reducers, at);
            tensor.may_be_new |= may_begin_anew.contains(&at);
            let is_new = reducer != tensor.reducer || tensor.steps == 0;
            assert!(
                !fresh || is_new || tensor.may_be_new,
                "version {version} begins tensor {at} anew, of which {} has made {} steps",
                tensor.reducer,
                tensor.steps
            );
            if is_new || fresh {
                tensor.steps = 0;
            }
            tensor.reducer = reducer;
            let step = steps.of(at);
            if !written.contains(&at) {
                assert_eq!(step, 0, "tensor {at} of version {version}, which nobody has written");
                continue;
            }
            if step == 1 && tensor.may_be_new {
                tensor.steps = 0;
            }
            tensor.steps += 1;
            tensor.may_be_new = false;
            assert_eq!(step, tensor.steps, "the step of tensor {at} in version {version}");
        }
    }
}
