//! Gradients whose sums are known and exact: small whole numbers.

use anyhow::{Result, bail};

use crate::memory::Memory;

const PERIOD: usize = 97;

fn gradient(index: usize, rank: usize) -> f32 {
    (index % PERIOD + rank + 1) as f32
}

/// Fills `memory` with the gradients of learner `rank`.
pub fn fill(memory: &mut Memory, rank: usize) {
    // SAFETY: borrowed exclusively.
    let values = unsafe { memory.values_mut(0, memory.len()) };
    for (index, value) in values.iter_mut().enumerate() {
        *value = gradient(index, rank);
    }
}

/// Fails unless `weights` are `pushes` times the sum of the gradients of `learners` learners.
pub fn check(weights: &[f32], learners: usize, pushes: usize) -> Result<()> {
    for (index, value) in weights.iter().enumerate() {
        let right = (0..learners).map(|rank| gradient(index, rank)).sum::<f32>() * pushes as f32;
        if *value != right {
            bail!("element {index} is {value} after {pushes} pushes of {learners} learners, not {right}");
        }
    }
    Ok(())
}
