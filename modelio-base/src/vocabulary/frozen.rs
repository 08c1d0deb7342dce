//! Names of tensors that are never reduced, as patterns. Pure.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use fixedbitset::FixedBitSet;
use serde::{Deserialize, Serialize};

/// Patterns, one a line: `*` stands for any text, `?` for one character, everything else for itself. `/` is a character
/// like any other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frozen(Vec<String>);

/// A pattern that matches no tensor of the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no tensor has a name that matches the pattern {0:?}")]
pub struct NoMatch(pub String);

impl FromStr for Frozen {
    type Err = Infallible;

    /// White space around a pattern, and lines without one, mean nothing.
    fn from_str(text: &str) -> Result<Frozen, Infallible> {
        let patterns = text.lines().map(str::trim).filter(|pattern| !pattern.is_empty());
        Ok(Frozen(patterns.map(str::to_owned).collect()))
    }
}

impl fmt::Display for Frozen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

impl Frozen {
    /// The tensors that the patterns mean, of a model whose tensors have these `names`, in order.
    ///
    /// # Errors
    /// [`NoMatch`] names a pattern that matches none.
    pub fn tensors<'a>(
        &self,
        names: impl ExactSizeIterator<Item = &'a str> + Clone,
    ) -> Result<FixedBitSet, NoMatch> {
        let mut tensors = FixedBitSet::with_capacity(names.len());
        for pattern in &self.0 {
            let mut any = false;
            for (tensor, _) in names.clone().enumerate().filter(|(_, name)| matches(pattern, name)) {
                tensors.insert(tensor);
                any = true;
            }
            if !any {
                return Err(NoMatch(pattern.clone()));
            }
        }
        Ok(tensors)
    }
}

/// Whether `pattern` matches all of `name`.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    let (mut pattern, mut name) = (pattern.chars(), name.chars());
    // The position to continue from when the last star has to stand for one character more.
    let mut again = None;
    loop {
        let (before, here) = (name.clone(), pattern.next());
        match (here, name.next()) {
            (Some('*'), _) => {
                name = before;
                again = Some((pattern.clone(), name.clone()));
            }
            (Some('?'), Some(_)) => {}
            (Some(wanted), Some(got)) if wanted == got => {}
            (None, None) => return true,
            _ => {
                let Some((after, mut from)) = again.take() else { return false };
                if from.next().is_none() {
                    return false;
                }
                (pattern, name) = (after.clone(), from.clone());
                again = Some((after, from));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, expected) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("ab", "a", false),
            ("*", "", true),
            ("*", "anything", true),
            ("*.running_*", "bn.1.running_mean", true),
            ("*.running_*", "bn.1.weight", false),
            ("layer.?.w", "layer.1.w", true),
            ("layer.?.w", "layer.12.w", false),
            ("?", "ü", true),
            ("?", "", false),
            ("*a*b", "xaxxbaab", true),
            ("*a*b", "xaxxbaa", false),
            ("a**", "a", true),
            ("[a]", "a", false),
            ("enc*/weight", "encoder/0/weight", true),
            ("enc?der/0?weight", "encoder/0/weight", true),
            ("weight", "encoder/0/weight", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn a_pattern_that_no_tensor_matches_is_named() {
        let names = ["bn.weight", "bn.running_mean", "head"];
        let of = |text: &str| text.parse::<Frozen>().unwrap().tensors(names.iter().copied());
        let ones = |text: &str| of(text).unwrap().ones().collect::<Vec<_>>();
        assert!(ones("").is_empty());
        assert_eq!(ones(" *running* \n\nhead\n"), [1, 2]);
        let error = of("head\nbody.*").unwrap_err().to_string();
        assert_eq!(error, "no tensor has a name that matches the pattern \"body.*\"");
        assert_eq!(" a \n\nb".parse::<Frozen>().unwrap().to_string(), "a\nb");
    }
}
