//! What is known of the accumulator's sums, for steps that depend on their norms.

use libmodelio::vocabulary::norm::{Quantity, Squares, TensorNorms, TensorSquares};
use serde::{Deserialize, Serialize};

/// The measurements of what the accumulator holds. Something else is added: they are void.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Measured {
    #[serde(skip)]
    is_under_way: bool,
    /// The sum of the squares of the gradient.
    squares: Option<f64>,
    /// The norms of tensors.
    #[serde(skip)]
    norms: Option<Vec<TensorNorms>>,
}

impl Measured {
    /// A measurement begins. The norms of tensors depend on that of the gradient.
    pub(super) fn begins(&mut self, quantity: Quantity) {
        (self.is_under_way, self.norms) = (true, None);
        if quantity == Quantity::Gradient {
            self.squares = None;
        }
    }

    /// The measurement under way has no result.
    pub(super) fn stops(&mut self) {
        self.is_under_way = false;
    }

    /// The work under way is done. It has measured this, or only added.
    pub(super) fn accumulated(&mut self, measured: Option<&Squares>) {
        self.is_under_way = false;
        match measured {
            // Nothing is added with the norms of tensors if the gradient was measured before.
            Some(Squares::Tensors(all)) => self.norms = Some(all.iter().map(TensorSquares::norms).collect()),
            Some(Squares::Gradient(sum)) => self.squares = Some(sum.value()),
            None => self.forget(),
        }
    }

    /// The accumulator holds something else now.
    pub(super) fn forget(&mut self) {
        (self.squares, self.norms) = (None, None);
    }

    /// The weights are others now.
    pub(super) fn forget_norms(&mut self) {
        self.norms = None;
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.is_under_way
    }

    pub(super) fn squares(&self) -> Option<f64> {
        self.squares
    }

    pub(super) fn norms(&self) -> Option<&[TensorNorms]> {
        self.norms.as_deref()
    }
}
