//! Rules for single tensors, like the parameter groups of torch's optimizers. Parsing and matching only.

use std::fmt;
use std::str::FromStr;

use fixedbitset::FixedBitSet;
use serde::{Deserialize, Serialize};

use crate::vocabulary::frozen::matches;
use crate::vocabulary::groups::{Groups, Overrides};
use crate::vocabulary::reducer::{Content, PARAMETERS, Reducer};

/// The most runs of tensors with one group each: every plan tells them to every shard.
const MOST_RUNS: usize = 65_536;
/// The words of a rule.
const WORDS: &str = "frozen, weight_decay=NUMBER, learning_rate_scale=NUMBER or reducer=NAME";

/// A rule for the tensors whose names match its pattern, unless an earlier rule counts for them.
#[derive(Clone, Debug, PartialEq)]
struct Rule {
    pattern: String,
    /// The tensors are never reduced.
    frozen: bool,
    overrides: Overrides,
}

/// Rules, one a line: a pattern of names, and what counts for the tensors that match it. For a tensor that several
/// patterns match, the first one counts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TensorRules(Vec<Rule>);

/// Why a text is no rules, or why rules do not fit a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    /// A line is no rule.
    #[error("line {line}: {why}")]
    Line {
        /// The number of the line, from 1 on.
        line: usize,
        /// What is wrong, and what would do.
        why: String,
    },
    /// A pattern matches no tensor.
    #[error("no tensor has a name that matches the pattern {0:?}")]
    NoMatch(String),
    /// Other rules count for all tensors that a pattern matches.
    #[error(
        "the rule for {0:?} never counts, because earlier rules count for all of its tensors: \
         move it up, or leave it out"
    )]
    Unreachable(String),
    /// The tensors change their groups too often.
    #[error("the rules cut the model's tensors into {0} runs, the limit is {MOST_RUNS}: use fewer patterns")]
    TooManyRuns(usize),
}

impl FromStr for TensorRules {
    type Err = RuleError;

    /// Lines without a pattern mean nothing.
    fn from_str(text: &str) -> Result<TensorRules, RuleError> {
        let lines = (1..).zip(text.lines()).filter(|(_, text)| !text.trim().is_empty());
        let rule =
            |(line, text): (usize, &str)| text.parse().map_err(|NoRule(why)| RuleError::Line { line, why });
        lines.map(rule).collect::<Result<_, _>>().map(TensorRules)
    }
}

impl TryFrom<String> for TensorRules {
    type Error = RuleError;

    fn try_from(text: String) -> Result<TensorRules, RuleError> {
        text.parse()
    }
}

impl From<TensorRules> for String {
    fn from(rules: TensorRules) -> String {
        rules.to_string()
    }
}

impl fmt::Display for TensorRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().enumerate().try_for_each(|(line, rule)| {
            f.write_str(if line > 0 { "\n" } else { "" })?;
            rule.fmt(f)
        })
    }
}

/// Why a line is no rule.
struct NoRule(String);

impl FromStr for Rule {
    type Err = NoRule;

    fn from_str(line: &str) -> Result<Rule, NoRule> {
        let mut words = line.split_whitespace();
        let pattern = words.next().unwrap_or_default().to_owned();
        let mut rule = Rule { pattern, frozen: false, overrides: Overrides::default() };
        for word in words {
            let plain = word.to_ascii_lowercase();
            let (name, value) =
                plain.split_once('=').map_or((&*plain, None), |(name, value)| (name, Some(value)));
            let of = &mut rule.overrides;
            let repeats = match (name, value) {
                ("frozen", None) => std::mem::replace(&mut rule.frozen, true),
                ("weight_decay", Some(value)) => {
                    let decay = number(word, "weight_decay", value)?;
                    of.weight_decay.replace(decay).is_some()
                }
                ("learning_rate_scale", Some(value)) => {
                    // A factor is as a rate: not negative.
                    let scale = number(word, "learning_rate", value)?;
                    of.learning_rate_scale.replace(scale).is_some()
                }
                ("reducer", Some(value)) => of.reducer.replace(reducer(value)?).is_some(),
                _ => {
                    let why = format!("{word:?} is not {WORDS}; in a pattern, ? stands for a space");
                    return Err(NoRule(why));
                }
            };
            if repeats {
                return Err(NoRule(format!("{name} stands there twice")));
            }
        }
        Ok(rule)
    }
}

/// A number that this hyper-parameter could have.
fn number(word: &str, parameter: &str, value: &str) -> Result<f32, NoRule> {
    let domain = PARAMETERS.iter().find(|known| known.name == parameter).map(|known| &known.domain);
    let text = domain.map_or("a number", |domain| domain.text);
    let number = value.parse().ok().filter(|number| domain.is_none_or(|domain| (domain.holds)(*number)));
    number.ok_or_else(|| NoRule(format!("{word:?}: {value:?} is not {text}")))
}

fn reducer(value: &str) -> Result<Reducer, NoRule> {
    let fits = |of: &Reducer| of.content() == Content::Gradient || of.averages_values();
    let known = || Reducer::all().filter(fits);
    known().find(|reducer| reducer.name() == value).ok_or_else(|| {
        let why = match value.parse::<Reducer>() {
            Ok(other) => format!("reducer {other} is for whole models"),
            Err(_) => format!("unknown reducer {value:?}"),
        };
        NoRule(format!("{why}: use one of {}", known().map(Reducer::name).collect::<Vec<_>>().join(", ")))
    })
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.pattern)?;
        let Overrides { reducer, weight_decay, learning_rate_scale } = self.overrides;
        if self.frozen {
            f.write_str(" frozen")?;
        }
        if let Some(decay) = weight_decay {
            write!(f, " weight_decay={decay}")?;
        }
        if let Some(scale) = learning_rate_scale {
            write!(f, " learning_rate_scale={scale}")?;
        }
        reducer.map_or(Ok(()), |reducer| write!(f, " reducer={reducer}"))
    }
}

impl TensorRules {
    /// The reducers that rules name.
    pub fn reducers(&self) -> impl Iterator<Item = Reducer> {
        self.0.iter().filter_map(|rule| rule.overrides.reducer)
    }

    /// The tensors that the rules freeze, and the groups of all tensors. `names` are those of the model's tensors, in
    /// order.
    ///
    /// # Errors
    /// All but [`RuleError::Line`].
    pub fn resolve<'a>(
        &self,
        names: impl ExactSizeIterator<Item = &'a str> + Clone,
    ) -> Result<(FixedBitSet, Groups), RuleError> {
        let mut frozen = FixedBitSet::with_capacity(names.len());
        if self.0.is_empty() {
            return Ok((frozen, Groups::default()));
        }
        let mut rule_of: Vec<Option<&Rule>> = vec![None; names.len()];
        for rule in &self.0 {
            let (mut any, mut counts) = (false, false);
            for (tensor, _) in names.clone().enumerate().filter(|(_, name)| matches(&rule.pattern, name)) {
                any = true;
                if rule_of[tensor].is_none() {
                    rule_of[tensor] = Some(rule);
                    counts = true;
                }
            }
            match (any, counts) {
                (false, _) => return Err(RuleError::NoMatch(rule.pattern.clone())),
                (_, false) => return Err(RuleError::Unreachable(rule.pattern.clone())),
                _ => {}
            }
        }
        let is_frozen =
            |(tensor, rule): (usize, &Option<&Rule>)| rule.is_some_and(|rule| rule.frozen).then_some(tensor);
        frozen.extend(rule_of.iter().enumerate().filter_map(is_frozen));
        let groups =
            Groups::new(rule_of.iter().map(|rule| rule.map(|rule| rule.overrides).unwrap_or_default()));
        match groups.runs().len() {
            runs if runs > MOST_RUNS => Err(RuleError::TooManyRuns(runs)),
            _ => Ok((frozen, groups)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocabulary::reducer::Step;

    fn rules(text: &str) -> TensorRules {
        text.parse().unwrap()
    }

    #[test]
    fn rules_are_read_as_they_are_written() {
        let text = "*.bias weight_decay=0\nhead*\nbody.* frozen learning_rate_scale=0.1 reducer=sgd";
        assert_eq!(rules(text).to_string(), text);
        let loose =
            "\n  *.bias\tWeight_Decay=0.0  \n\nhead*\nbody.* reducer=SGD learning_rate_scale=1e-1 FROZEN\n";
        assert_eq!(rules(loose), rules(text));
        assert_eq!(rules(" \n").to_string(), "");
        assert_eq!(rules(text).reducers().collect::<Vec<_>>(), [Reducer::Sgd]);
        assert_eq!(serde_json::to_string(&rules("a frozen")).unwrap(), r#""a frozen""#);
        assert!(serde_json::from_str::<TensorRules>(r#""a frosen""#).is_err());
    }

    #[test]
    fn lines_that_are_no_rule_are_refused_with_what_would_do() {
        for (line, why) in [
            ("a frosen", "\"frosen\" is not frozen, weight_decay=NUMBER, learning_rate_scale=NUMBER or"),
            ("my tensor frozen", "in a pattern, ? stands for a space"),
            ("a frozen=true", "\"frozen=true\" is not frozen"),
            ("a weight_decay", "\"weight_decay\" is not frozen"),
            ("a weight_decay=-1", "\"weight_decay=-1\": \"-1\" is not a finite number >= 0"),
            ("a weight_decay=", "\"\" is not a finite number >= 0"),
            ("a learning_rate_scale=inf", "\"inf\" is not a finite number >= 0"),
            ("a learning_rate_scale=NaN", "\"nan\" is not a finite number >= 0"),
            ("a learning_rate=1", "\"learning_rate=1\" is not frozen"),
            ("a reducer=assign", "reducer assign is for whole models: use one of sum, sgd, momentum"),
            ("a reducer=larc", "unknown reducer \"larc\": use one of sum, sgd"),
            ("a frozen frozen", "frozen stands there twice"),
            ("a reducer=sgd reducer=sgd", "reducer stands there twice"),
        ] {
            let error = format!("b frozen\n\n{line}\n").parse::<TensorRules>().unwrap_err().to_string();
            assert!(error.starts_with("line 3: ") && error.contains(why), "{line}: {error}");
        }
    }

    #[test]
    fn the_first_rule_that_matches_counts() {
        let names = ["bn.weight", "bn.bias", "head.weight", "head.bias", "body"];
        let of = |text: &str| rules(text).resolve(names.iter().copied());
        let (frozen, groups) =
            of("head.bias\n*.bias weight_decay=0\nhead.* frozen\nbn.* reducer=sum").unwrap();
        assert_eq!(frozen.ones().collect::<Vec<_>>(), [2]);
        let runs: Vec<_> = groups.runs().iter().map(|(count, group)| (*count, group.0)).collect();
        assert_eq!(runs, [(1, 1), (1, 2), (3, 0)]);
        let steps = groups.steps(&Step::default());
        assert_eq!(steps.of_group(groups.runs()[0].1).reducer, Reducer::Sum);
        assert_eq!(of("").unwrap(), (FixedBitSet::with_capacity(5), Groups::default()));
        let error = |text: &str| of(text).unwrap_err().to_string();
        assert_eq!(error("head.*\nbod"), "no tensor has a name that matches the pattern \"bod\"");
        let unreachable = error("*.bias\nbn.*\nbn.bias frozen");
        assert!(unreachable.starts_with("the rule for \"bn.bias\" never counts"), "{unreachable}");
    }

    #[test]
    fn rules_that_cut_a_model_into_too_many_runs_are_refused() {
        let names: Vec<String> = (0..65_538).map(|i| format!("{i}.{}", ["a", "b"][i % 2])).collect();
        let of = |text: &str| rules(text).resolve(names.iter().map(String::as_str)).map(|_| ());
        assert_eq!(of("*.a weight_decay=0"), Err(RuleError::TooManyRuns(65_538)));
        assert_eq!(of("*.a frozen"), Ok(()));
    }
}
