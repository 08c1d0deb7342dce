//! The reducers, which say what a shard does with contributions; their hyper-parameters and the constants of
//! one step.
//!
//! Plain data and parsing only. The arithmetic is in `ps_backend::reducers`; semantics follow PyTorch's
//! optimizers of the same names, with the hyper-parameters in fp32.

use serde::{Deserialize, Serialize};
use strum::{IntoEnumIterator, VariantNames};

use crate::vocabulary::norm::Norm;

/// How the contributions to an element become one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Combine {
    /// They are added up.
    Sum,
    /// The last one takes the place of the others, byte by byte: what it has not written takes no part.
    Last,
}

impl Combine {
    /// Whether the value depends on their order, and on which bytes each has written.
    pub fn replaces(self) -> bool {
        self == Combine::Last
    }
}

/// What learners write as their contribution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, strum::EnumIter)]
pub enum Content {
    /// What is added up: a gradient.
    #[default]
    Gradient,
    /// New values.
    Values,
    /// The weights that the learner has come to, beginning from a version. What is sent is their difference.
    Model,
    /// The weights that the learner has come to, beginning from its own replica of the model. What is sent is the
    /// replica's correction.
    Replica,
}

impl Content {
    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Content::Gradient => "gradients",
            Content::Values => "new values",
            Content::Model => "models",
            Content::Replica => "replicas",
        }
    }

    /// Whether a reducer that takes `other` can take such contributions. Bytes can be gradients or values, as the
    /// reducer takes them; differences and corrections are nothing else.
    pub fn fits(self, other: Content) -> bool {
        self == other || !self.is_weights() && !other.is_weights()
    }

    /// Whether learners write weights, of which something else is sent.
    pub fn is_weights(self) -> bool {
        matches!(self, Content::Model | Content::Replica)
    }
}

/// What reducers of one kind have in common.
struct ReducerKind {
    content: Content,
    reads: &'static [&'static str],
}

/// The properties of a reducer besides its arithmetic.
struct Facts {
    combine: Combine,
    state: &'static [&'static str],
    kind: ReducerKind,
    reads: &'static [&'static str],
}

/// Those that add contributions up.
const ADDS: ReducerKind =
    ReducerKind { content: Content::Gradient, reads: &["clip_norm", "clip_value", "loss_scale"] };
/// Optimizers.
const STEPS: ReducerKind = ReducerKind {
    content: Content::Gradient,
    reads: &[
        "learning_rate",
        "learning_rate_floor",
        "weight_decay",
        "aggregation",
        "clip_norm",
        "clip_value",
        "loss_scale",
    ],
};
/// Those that put a value in the place of another.
const PUTS: ReducerKind = ReducerKind { content: Content::Values, reads: &[] };
/// Those that go from the model to the mean of its learners' models.
const MEANS: ReducerKind = ReducerKind { content: Content::Model, reads: &[] };
/// Those by which the learners' replicas and the model attract each other.
const PULLS: ReducerKind = ReducerKind { content: Content::Replica, reads: &["elasticity"] };

/// The reducers, one entry each: how it combines contributions, what it keeps for each weight, by torch's names, its
/// kind, and which hyper-parameters it reads besides those of its kind. A reducer's name in lower case is its word in
/// control files, messages and help.
macro_rules! reducers {
    ($($(#[$about:meta])* $name:ident: $combine:ident, [$($state:literal),*], $kind:ident, [$($read:ident),*];)*) => {
        /// How contributions become the next weights.
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize,
            strum::Display, strum::EnumIter, strum::EnumString, strum::IntoStaticStr, strum::VariantNames,
        )]
        #[serde(rename_all = "lowercase")]
        #[strum(serialize_all = "lowercase", parse_err_ty = UnknownWord, parse_err_fn = no_reducer)]
        pub enum Reducer { $($(#[$about])* $name,)* }

        impl Reducer {
            fn facts(self) -> Facts {
                match self {
                    $(Self::$name => Facts {
                        combine: Combine::$combine,
                        state: &[$($state),*],
                        kind: $kind,
                        reads: &[$(stringify!($read)),*],
                    },)*
                }
            }
        }
    };
}

reducers! {
    /// `w' = carry * w + sum of contributions`; never averaged.
    Sum: Sum, [], ADDS, [carry];
    /// `w' = w - lr * g`, with L2 weight decay in `g`.
    #[default]
    Sgd: Sum, [], STEPS, [];
    /// SGD with heavy-ball momentum. State: the momentum buffer.
    Momentum: Sum, ["momentum_buffer"], STEPS, [momentum, dampening];
    /// SGD with Nesterov momentum. State: the momentum buffer.
    Nesterov: Sum, ["momentum_buffer"], STEPS, [momentum, dampening];
    /// Adam with L2 weight decay. State: first and second moment.
    Adam: Sum, ["exp_avg", "exp_avg_sq"], STEPS, [beta1, beta2, epsilon];
    /// Adam with decoupled weight decay. State: first and second moment.
    AdamW: Sum, ["exp_avg", "exp_avg_sq"], STEPS, [beta1, beta2, epsilon];
    /// RMSprop with L2 weight decay. State: the running mean of the squared gradient.
    RmsProp: Sum, ["square_avg"], STEPS, [alpha, epsilon];
    /// Adagrad with L2 weight decay. State: the sum of the squared gradients.
    AdaGrad: Sum, ["sum"], STEPS, [epsilon];
    /// Lion with decoupled weight decay. State: the running gradient.
    Lion: Sum, ["exp_avg"], STEPS, [beta1, beta2];
    /// Momentum whose gradient is scaled, tensor by tensor, to a share of the weights' norm. State: the momentum
    /// buffer.
    Lars: Sum, ["momentum_buffer"], STEPS, [momentum, dampening, trust_coefficient];
    /// Adam whose step is scaled, tensor by tensor, to the weights' norm. State: first and second moment.
    Lamb: Sum, ["exp_avg", "exp_avg_sq"], STEPS, [beta1, beta2, epsilon];
    /// `w'` is the value the last contribution holds; without one, `w` stays.
    Assign: Last, [], PUTS, [];
    /// `w' = w + mean of (learner's weights - what they began from)`. Of single tensors in a model of gradients, `w'`
    /// is the mean of the values that learners have written.
    Average: Sum, [], MEANS, [];
    /// Elastic averaging: `w'` is `w` plus the corrections of the replicas.
    Easgd: Sum, [], PULLS, [];
    /// Synchronous model averaging: elastic averaging with momentum of the central model. State: the momentum buffer.
    Sma: Sum, ["momentum_buffer"], PULLS, [learning_rate, learning_rate_floor, momentum];
    /// A step of Nesterov momentum along the mean of the learners' changes. State: the momentum buffer.
    Diloco: Sum, ["momentum_buffer"], MEANS, [learning_rate, learning_rate_floor, momentum];
}

impl Reducer {
    /// The names of all, in the order messages list them.
    pub const NAMES: &[&str] = <Reducer as VariantNames>::VARIANTS;

    /// All reducers, in the order messages list them.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::iter()
    }

    /// The lower-case name.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// How several contributions become one value.
    pub fn combine(self) -> Combine {
        self.facts().combine
    }

    /// Whether some tensors can have this reducer in a model whose own is `model`: what one contribution brings is
    /// gradients, and perhaps values of averaged tensors, or else all of it is something else.
    pub fn mixes_with(self, model: Reducer) -> bool {
        let adds = self.content() == Content::Gradient;
        self == model || model.content() == Content::Gradient && (adds || self.averages_values())
    }

    /// Whether some tensors of a model of gradients can have this reducer. Of these tensors, learners write their
    /// values, and the mean of the values is the next one.
    pub fn averages_values(self) -> bool {
        self == Reducer::Average
    }

    /// Whether the reducer takes elements of all types: elements that are not floats can replace others, but
    /// not be added to them.
    pub fn takes_all_types(self) -> bool {
        self.combine().replaces()
    }

    /// What learners write.
    pub fn content(self) -> Content {
        self.facts().kind.content
    }

    /// Whether contributions may count more or less than others.
    pub fn takes_weighted(self) -> bool {
        matches!(self.content(), Content::Gradient | Content::Model)
    }

    /// Whether another learning rate makes the averaging begin anew: the replicas and the momentum of the central
    /// model.
    pub fn restarts(self) -> bool {
        self == Reducer::Sma
    }

    /// Whether whole new weights may be written between its versions, which are no contribution.
    pub fn takes_weights(self) -> bool {
        self.combine().replaces()
    }

    /// Values of optimizer state kept for each weight.
    pub fn state_slots(self) -> usize {
        self.facts().state.len()
    }

    /// Whether weights of 16 and 8 bits have fp32 masters. Values that replace others need none.
    pub fn keeps_masters(self) -> bool {
        !self.combine().replaces()
    }

    /// Torch's name for a value of state.
    ///
    /// # Panics
    /// If the reducer keeps fewer values.
    pub fn state_name(self, slot: usize) -> &'static str {
        self.facts().state[slot]
    }

    /// Whether the reducer reads the hyper-parameter of this name.
    pub fn reads(self, name: &str) -> bool {
        let Facts { kind, reads, .. } = self.facts();
        kind.reads.iter().chain(reads).any(|read| *read == name)
    }

    /// The hyper-parameters of a job with this reducer, as long as nobody sets others: those of torch's optimizer of this
    /// name, and of a reducer that torch does not have, those of its inventors.
    pub fn defaults(self) -> Hyper {
        let mut hyper = Hyper::default();
        for of in PARAMETERS {
            if let Some((_, default)) = self.own_defaults().iter().find(|(name, _)| *name == of.name) {
                *(of.of)(&mut hyper) = *default;
            }
        }
        hyper
    }

    /// The defaults that are not those in the table of the parameters.
    fn own_defaults(self) -> &'static [(&'static str, f32)] {
        match self {
            Reducer::AdamW => &[("weight_decay", 0.01)],
            Reducer::RmsProp | Reducer::Lars => &[("learning_rate", 0.01)],
            Reducer::AdaGrad => &[("learning_rate", 0.01), ("epsilon", 1e-10)],
            Reducer::Lion => &[("learning_rate", 1e-4), ("beta2", 0.99)],
            Reducer::Diloco => &[("learning_rate", 0.7)],
            _ => &[],
        }
    }

    /// Whether a step must know the norm of the whole gradient before it can change a block.
    pub fn measures(self, hyper: &Hyper) -> bool {
        hyper.clip_norm > 0.0 && self.reads("clip_norm")
    }

    /// Whether the step of a tensor depends on norms of that tensor.
    pub fn is_layerwise(self) -> bool {
        matches!(self, Reducer::Lars | Reducer::Lamb)
    }

    /// Whether [`Hyper::aggregation`] applies, as it does to all optimizers.
    pub fn averages(self) -> bool {
        self.reads("aggregation")
    }

    /// Whether the mean of the contributions counts, and not their sum.
    fn takes_mean(self, hyper: &Hyper) -> bool {
        self.content() == Content::Model || self.averages() && hyper.aggregation == Aggregation::Mean
    }
}

/// The form of a sum of contributions that an optimizer sees.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    strum::Display,
    strum::EnumIter,
    strum::EnumString,
    strum::VariantNames,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase", parse_err_ty = UnknownWord, parse_err_fn = no_aggregation)]
pub enum Aggregation {
    /// Divided by the number of contributions.
    #[default]
    Mean,
    /// Left as it is.
    Sum,
}

/// A name that is not a reducer's or an aggregation's; the message lists the valid ones.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown {kind} {got:?}: use one of {}", known.join(", "))]
pub struct UnknownWord {
    kind: &'static str,
    got: String,
    known: &'static [&'static str],
}

fn no_reducer(got: &str) -> UnknownWord {
    UnknownWord { kind: "reducer", got: got.to_owned(), known: Reducer::NAMES }
}

fn no_aggregation(got: &str) -> UnknownWord {
    UnknownWord { kind: "aggregation", got: got.to_owned(), known: Aggregation::VARIANTS }
}

/// The numbers that a hyper-parameter can be.
#[derive(Debug)]
pub struct Domain {
    /// Whether this value is allowed.
    pub holds: fn(f32) -> bool,
    /// The allowed values, in words.
    pub text: &'static str,
}

const FINITE: Domain = Domain { holds: f32::is_finite, text: "a finite number" };
const NOT_NEGATIVE: Domain = Domain { holds: |x| x.is_finite() && x >= 0.0, text: "a finite number >= 0" };
// Below this the denominator of a weight that never had a gradient could round to zero.
const POSITIVE: Domain = Domain { holds: |x| x.is_finite() && x >= 1e-30, text: "a finite number >= 1e-30" };
const TO_ONE: Domain = Domain { holds: |x| (0.0..=1.0).contains(&x), text: "a number from 0 to 1" };
const BELOW_ONE: Domain = Domain { holds: |x| (0.0..1.0).contains(&x), text: "a number from 0 to below 1" };

/// A hyper-parameter that is a number.
#[derive(Debug)]
pub struct Parameter {
    /// Its name, which is that of its control file.
    pub name: &'static str,
    /// The allowed values.
    pub domain: Domain,
    /// Its purpose.
    pub meaning: &'static str,
    /// Its place.
    pub of: fn(&mut Hyper) -> &mut f32,
}

impl Parameter {
    /// Its value.
    pub fn get(&self, hyper: &Hyper) -> f32 {
        *(self.of)(&mut hyper.clone())
    }

    /// Its value as people write it: very small numbers with an exponent.
    pub fn text(&self, hyper: &Hyper) -> String {
        let value = self.get(hyper);
        if self.name == "epsilon" { format!("{value:e}") } else { value.to_string() }
    }

    /// Its defaults, for help texts: the one of most reducers, and those that others have.
    pub fn defaults(&self) -> String {
        let own = Reducer::all()
            .filter(|reducer| reducer.own_defaults().iter().any(|(name, _)| *name == self.name));
        let own = own.map(|reducer| format!("; {reducer}: {}", self.text(&reducer.defaults())));
        std::iter::once(self.text(&Hyper::default())).chain(own).collect()
    }

    /// The reducers that read it, for help texts.
    pub fn readers(&self) -> String {
        let reads = |reducer: &Reducer| reducer.reads(self.name);
        let all = Reducer::all().filter(|reducer| reducer.averages()).all(|reducer| reads(&reducer));
        let others = Reducer::all().filter(|reducer| reads(reducer) && !(all && reducer.averages()));
        let optimizers = all.then_some("optimizers").into_iter();
        optimizers.chain(others.map(Reducer::name)).collect::<Vec<_>>().join(", ")
    }
}

/// The hyper-parameters that are numbers, one line each: default, domain and meaning. [`Reducer::own_defaults`] has the
/// defaults that single reducers have in place of these.
macro_rules! parameters {
    ($($name:ident = $default:literal, $domain:expr, $meaning:literal;)*) => {
        /// Hyper-parameters of all reducers together; each reducer reads those it has in PyTorch.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct Hyper {
            $(#[doc = $meaning] pub $name: f32,)*
            /// Mean or sum of the contributions.
            pub aggregation: Aggregation,
        }

        impl Default for Hyper {
            fn default() -> Self {
                Self { $($name: $default,)* aggregation: Aggregation::Mean }
            }
        }

        /// All of [`Hyper`] that are numbers, in the order help lists them.
        pub const PARAMETERS: &[Parameter] = &[$(Parameter {
            name: stringify!($name),
            domain: $domain,
            meaning: $meaning,
            of: |hyper| &mut hyper.$name,
        },)*];
    };
}

parameters! {
    learning_rate = 0.001, NOT_NEGATIVE, "step size, at the end of the warm-up";
    learning_rate_floor = 0.0, NOT_NEGATIVE, "step size at the end of a schedule";
    momentum = 0.9, TO_ONE, "weight of the running gradient";
    dampening = 0.0, TO_ONE, "share of the new gradient left out, but at the first step";
    beta1 = 0.9, BELOW_ONE, "decay of the first moment; lion: share of the running gradient in a step";
    beta2 = 0.999, BELOW_ONE, "decay of the second moment; lion: of the running gradient";
    alpha = 0.99, BELOW_ONE, "decay of the mean square of the gradient";
    epsilon = 1e-8, POSITIVE, "added to the denominator";
    weight_decay = 0.0, NOT_NEGATIVE, "pull towards zero, decoupled for adamw, lamb and lion";
    trust_coefficient = 0.001, POSITIVE, "share of a tensor's norm that its step has at learning rate 1";
    carry = 1.0, FINITE, "how much of the old weights stays: 1 adds to them, 0 is an all-reduce";
    clip_norm = 0.0, NOT_NEGATIVE, "a gradient whose norm is larger is scaled down to it; 0 is never";
    clip_value = 0.0, NOT_NEGATIVE, "larger elements of a gradient are set to it, or to its negative; 0 is never";
    loss_scale = 1.0, POSITIVE, "gradients are divided by it";
    elasticity = 0.0, TO_ONE, "share of the way by which a replica and the model attract each other; 0 is 1/learners";
}

impl Hyper {
    /// The reducer was `from` and becomes `to`: what has the default of the former gets that of the latter.
    pub fn follow(&mut self, from: Reducer, to: Reducer) {
        let (before, after) = (from.defaults(), to.defaults());
        for of in PARAMETERS.iter().filter(|of| of.get(&before) != of.get(&after)) {
            if of.get(self) == of.get(&before) {
                *(of.of)(self) = of.get(&after);
            }
        }
    }
}

/// The decimal number behind a hyper-parameter: a user who sets 0.01 means that, and not its fp32 approximation.
pub fn decimal(value: f32) -> f64 {
    use std::io::Write;
    let mut text = [0u8; 32];
    let mut rest = &mut text[..];
    let written = write!(rest, "{value:e}").map(|()| 32 - rest.len());
    let digits = written.ok().and_then(|len| std::str::from_utf8(&text[..len]).ok());
    digits.and_then(|digits| digits.parse().ok()).unwrap_or(f64::from(value))
}

/// One application of a reducer to a version.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// The reducer to compute.
    pub reducer: Reducer,
    /// With which constants.
    pub hyper: Hyper,
    /// Contributions behind the sources (an accumulator may hold several); 0 counts as 1.
    pub contributions: u32,
    /// The sum of their weights, if that is not their number.
    pub weight: Option<Norm>,
    /// Optimizer step, counted from 1: the first sets the momentum buffer, and Adam's bias correction
    /// depends on it.
    pub t: u64,
    /// The norm of the whole gradient, if the reducer [measures](Reducer::measures) it.
    pub norm: Option<Norm>,
    /// The factor of the tensor, which a plan has beside its step: on the step of a [layer-wise](Reducer::is_layerwise)
    /// reducer, or on the sum of values, if that is not one by their weight.
    #[serde(skip)]
    pub factor: Option<Norm>,
    /// Contributions hold values of these tensors, in a model of gradients. A whole model's step does not say so.
    #[serde(skip)]
    pub of_values: bool,
}

impl Step {
    /// The factor that makes the gradient of the sum of contributions, or the mean of the sum of values.
    pub fn scale(&self) -> f64 {
        if let Some(factor) = self.factor.filter(|_| self.of_values) {
            return factor.get();
        }
        let contributions = match self.reducer.takes_mean(&self.hyper) {
            true => self.weight.map_or(f64::from(self.contributions.max(1)), Norm::get),
            false => 1.0,
        };
        let is_scaled = self.hyper.loss_scale != 1.0 && !self.of_values;
        let loss_scale = if is_scaled { decimal(self.hyper.loss_scale) } else { 1.0 };
        1.0 / contributions / loss_scale
    }

    /// The factor on the step of the tensor.
    pub fn factor(&self) -> f64 {
        self.factor.map_or(1.0, Norm::get)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for reducer in Reducer::all() {
            assert_eq!(reducer.to_string().parse(), Ok(reducer));
            assert_eq!(reducer.name(), reducer.name().to_lowercase());
            assert_eq!(serde_json::to_string(&reducer).unwrap(), format!("{:?}", reducer.name()));
        }
        for aggregation in Aggregation::iter() {
            assert_eq!(aggregation.to_string().parse(), Ok(aggregation));
        }
    }

    #[test]
    fn defaults_are_of_parameters_that_a_reducer_reads() {
        assert_eq!(Reducer::default().defaults(), Hyper::default());
        for reducer in Reducer::all() {
            for (name, default) in reducer.own_defaults() {
                assert!(reducer.reads(name), "{reducer} {name}");
                let of = PARAMETERS.iter().find(|of| of.name == *name).unwrap();
                assert!(
                    (of.domain.holds)(*default) && of.get(&Hyper::default()) != *default,
                    "{reducer} {name}"
                );
                assert_eq!(of.get(&reducer.defaults()), *default);
            }
        }
        let rate = PARAMETERS.iter().find(|of| of.name == "learning_rate").unwrap();
        let said = "0.001; rmsprop: 0.01; adagrad: 0.01; lion: 0.0001; lars: 0.01; diloco: 0.7";
        assert_eq!(rate.defaults(), said);
    }

    #[test]
    fn a_mean_of_values_has_no_loss_scale_and_no_other_aggregation() {
        let hyper = Hyper { loss_scale: 8.0, aggregation: Aggregation::Sum, ..Hyper::default() };
        let sgd = Step { hyper, contributions: 4, ..Step::default() };
        let values = Step { reducer: Reducer::Average, of_values: true, ..sgd.clone() };
        assert_eq!((sgd.scale(), values.scale()), (0.125, 0.25));
        let weighed = Step { weight: Some(Norm::new(2.0)), ..values };
        assert_eq!(weighed.scale(), 0.5);
        let brought_by_one = Step { factor: Some(Norm::new(1.0)), ..weighed };
        assert_eq!(brought_by_one.scale(), 1.0);
    }

    #[test]
    fn tensors_of_a_model_have_reducers_that_take_what_it_brings() {
        use Reducer::{Adam, Assign, Average, Diloco, Sum};
        for (of_tensors, of_model, mixes) in [
            (Sum, Adam, true),
            (Average, Adam, true),
            (Average, Average, true),
            (Average, Diloco, false),
            (Average, Assign, false),
            (Diloco, Adam, false),
            (Assign, Adam, false),
            (Adam, Average, false),
        ] {
            assert_eq!(of_tensors.mixes_with(of_model), mixes, "{of_tensors} in a model of {of_model}");
        }
    }

    #[test]
    fn unknown_names_list_the_valid_ones() {
        for text in ["", "SGD", " sgd", "sgd\n", "larc"] {
            let message = text.parse::<Reducer>().unwrap_err().to_string();
            assert!(message.starts_with(&format!("unknown reducer {text:?}: ")), "{message}");
            assert!(message.contains("sum, sgd, momentum, nesterov, adam, adamw,"), "{message}");
        }
        assert!("avg".parse::<Aggregation>().unwrap_err().to_string().contains("mean, sum"));
    }

    #[test]
    fn a_reducer_reads_what_there_is() {
        let known =
            |name: &&str| *name == "aggregation" || PARAMETERS.iter().any(|known| known.name == *name);
        for reducer in Reducer::all() {
            let Facts { kind, reads, .. } = reducer.facts();
            assert!(kind.reads.iter().chain(reads).all(known), "{reducer}");
        }
        for parameter in PARAMETERS {
            assert!(!parameter.readers().is_empty(), "nobody reads {}", parameter.name);
            assert!((parameter.domain.holds)(parameter.get(&Hyper::default())), "{}", parameter.name);
        }
    }

    /// The rows that begin so in a document, up to the end of the table.
    fn rows<'a>(text: &'a str, head: &str) -> Vec<&'a str> {
        text.lines()
            .skip_while(|line| !line.starts_with(head))
            .take_while(|line| line.starts_with('|'))
            .collect()
    }

    #[test]
    fn the_documents_describe_every_reducer() {
        let semantics = include_str!("../../../docs/use/reducers.md");
        let names =
            rows(semantics, "| reducer |").into_iter().skip(2).filter_map(|row| row.split('`').nth(1));
        assert_eq!(names.collect::<Vec<_>>(), Reducer::NAMES);
        let state = rows(include_str!("../../../docs/use/memory.md"), "| optimizer state |")[0];
        for reducer in Reducer::all().filter(|reducer| reducer.state_slots() > 0) {
            assert!(state.contains(&format!("`{reducer}`")), "{reducer} is not in {state:?}");
        }
    }
}
