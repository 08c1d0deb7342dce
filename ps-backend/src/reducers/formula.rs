//! Steps in the form that the kernels of a device take: the name of a formula, and its constants.
//!
//! The constants are those of the reducer's `Op`, in the order in which `device/kernels.cu` numbers them.

/// The most constants of a formula.
pub const CONSTANTS: usize = 9;

/// What a kernel computes. A kernel's name is the formula's in snake case, and the type of its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::EnumIter, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Function {
    /// The sum itself.
    Total,
    /// The sum, scaled.
    Scaled,
    /// The same, added to a share of the old weights.
    Carried,
    /// A step against the gradient.
    Sgd,
    /// The first step along a running gradient.
    MomentumFirst,
    /// A later one.
    Momentum,
    /// The first step of Nesterov's method.
    NesterovFirst,
    /// A later one.
    Nesterov,
    /// A step along the first moment, in units of the root of the second.
    Adam,
    /// A step in units of the root of the mean square.
    #[strum(serialize = "rmsprop")]
    RmsProp,
    /// A step in units of the root of the sum of squares.
    #[strum(serialize = "adagrad")]
    AdaGrad,
    /// A step of one size, in the direction of the running gradient.
    Lion,
}

impl Function {
    /// The formula's name.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Values of state for each element.
    pub fn slots(self) -> usize {
        match self {
            Function::Total | Function::Scaled | Function::Carried | Function::Sgd => 0,
            Function::MomentumFirst | Function::Momentum | Function::NesterovFirst | Function::Nesterov => 1,
            Function::RmsProp | Function::AdaGrad | Function::Lion => 1,
            Function::Adam => 2,
        }
    }
}

/// One step of a reducer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Formula {
    /// What is computed.
    pub function: Function,
    /// The constants, for all types but F64.
    pub single: [f32; CONSTANTS],
    /// The constants for F64.
    pub double: [f64; CONSTANTS],
}

impl Formula {
    /// The formula with these constants.
    pub fn new<const N: usize>(function: Function, single: [f32; N], double: [f64; N]) -> Formula {
        const { assert!(N <= CONSTANTS, "a kernel has room for nine constants") };
        let mut formula = Formula { function, single: [0.0; CONSTANTS], double: [0.0; CONSTANTS] };
        formula.single[..N].copy_from_slice(&single);
        formula.double[..N].copy_from_slice(&double);
        formula
    }
}
