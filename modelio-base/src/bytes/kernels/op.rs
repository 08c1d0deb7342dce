//! The computations of a pass, one line of elements at a time.

use std::marker::PhantomData;

use super::line::{Lanes, Scalar};

/// How one line becomes the next.
pub trait Op: Copy {
    /// The type that it computes in.
    type Scalar: Scalar;
    /// Whether it reads the old weights.
    const READS_WEIGHTS: bool = true;
    /// Whether it reads the old state.
    const READS_SLOTS: bool = true;
    /// Values of state for each weight.
    const SLOTS: usize = 0;

    /// `g` is the sum of the sources. Operands that are not read come as zero.
    fn step<L: Lanes<Scalar = Self::Scalar>>(&self, g: L, w: L, slots: [L; 2]) -> (L, [L; 2]);
}

/// The sum itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Total<S>(PhantomData<S>);

impl<S> Total<S> {
    /// A total of either type of numbers.
    pub fn new() -> Self {
        Self(PhantomData)
    }
}

impl<S: Scalar> Op for Total<S> {
    type Scalar = S;
    const READS_WEIGHTS: bool = false;

    #[inline(always)]
    fn step<L: Lanes<Scalar = Self::Scalar>>(&self, g: L, _: L, slots: [L; 2]) -> (L, [L; 2]) {
        (g, slots)
    }
}
