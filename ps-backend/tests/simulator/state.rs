//! What a shard keeps of a block besides the weights that it shows: masters, optimizer slots, and how many steps the
//! optimizer has made. All of it stands for what would be there: digests of what it was made from.

use libmodelio::vocabulary::reducer::Reducer;

use crate::history::{Content, Uid};
use crate::settings::tensors_of;

/// A block of the newest version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Block {
    pub weights: Content,
    pub state: State,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The unrounded sums, from which weights are made.
    pub masters: u64,
    /// What the optimizer remembers of each tensor that the block has a part of; zero where it remembers nothing.
    pub slots: [u64; 2],
    /// Steps of the optimizer since a tensor's slots were zero.
    pub t: [u64; 2],
}

/// One step of the optimizer, for one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Of each tensor that the block has a part of.
    pub reducers: [Reducer; 2],
    /// 0 for tensors that nobody has written.
    pub t: [u64; 2],
    /// It begins with slots of zero, whatever there is.
    pub fresh: bool,
}

impl Step {
    /// The one of `block`, where tensors have these reducers and are at these steps.
    pub fn of(block: u32, fresh: bool, of: impl Fn(usize) -> (Reducer, u64)) -> Step {
        let (mut reducers, mut t) = ([Reducer::Sum; 2], [0; 2]);
        for (at, tensor) in tensors_of(block).enumerate() {
            (reducers[at], t[at]) = of(tensor);
        }
        Step { reducers, t, fresh }
    }

    fn stays(&self) -> bool {
        self.t == [0; 2]
    }
}

/// The squares of the elements of a block's sum, as integers of f64, whose order does not matter.
pub fn squares(block: u32, added: &[Uid]) -> f64 {
    added.iter().map(|uid| mix(u64::from(*uid), u64::from(block)) >> 40).sum::<u64>() as f64
}

pub fn mix(digest: u64, with: u64) -> u64 {
    (digest ^ with).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23)
}

impl Block {
    /// The block of the next version, by a step with these contributions, in this order.
    pub fn stepped(&self, step: &Step, added: &[Uid]) -> Block {
        if step.stays() {
            return self.with(step, self.weights.same(), &[]);
        }
        let masters =
            added.iter().fold(self.state.masters.wrapping_add(1), |sum, uid| mix(sum, u64::from(*uid)));
        self.with(step, Content::of(masters, added), added)
    }

    /// The same if the newest contribution replaces the value. Without one, the value stays.
    pub fn replaced(&self, step: &Step, added: Option<&[Uid]>) -> Block {
        let weights = added.map_or_else(|| self.weights.same(), Content::replaced);
        self.with(step, weights, added.unwrap_or_default())
    }

    /// The block of the next version where only weights are written, or nothing: the optimizer is not asked.
    pub fn assigned(&self, added: Option<&[Uid]>) -> Block {
        let weights = added.map_or_else(|| self.weights.same(), Content::replaced);
        let masters = weights.digest();
        Block { weights, state: State { masters, ..self.state } }
    }

    fn with(&self, step: &Step, weights: Content, added: &[Uid]) -> Block {
        let slots = std::array::from_fn(|at| {
            // The first step of a tensor begins with slots of zero, too: its reducer may be another one than before.
            let before = if step.fresh || step.t[at] == 1 { 0 } else { self.state.slots[at] };
            match (step.reducers[at].state_slots(), step.t[at]) {
                (0, _) => 0,
                (_, 0) => before,
                (slots, t) => {
                    let begin = mix(mix(before, slots as u64), t);
                    added.iter().fold(begin, |all, uid| mix(all, u64::from(*uid)))
                }
            }
        });
        let mut t = if step.fresh { [0; 2] } else { self.state.t };
        t.iter_mut().zip(step.t).filter(|(_, new)| *new > 0).for_each(|(t, new)| *t = new);
        let masters = weights.digest();
        Block { weights, state: State { masters, slots, t } }
    }

    /// As a partition begins with it that has room for what this reducer keeps.
    pub fn kept_for(mut self, reducer: Reducer) -> Block {
        if reducer.state_slots() == 0 {
            self.state.slots = [0; 2];
        }
        self
    }
}
