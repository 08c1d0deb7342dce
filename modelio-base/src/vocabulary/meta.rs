//! What a publisher says of its version: texts by name, as in a safetensors file's `__metadata__`. Pure.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The most bytes of all names and texts together. Every state of the job that clients are sent has them.
pub const MAX_META: usize = 4096;
/// The longest name, so that `user.<name>` is one of an extended attribute.
const MAX_NAME: usize = 250;
/// Names that begin so are gradfs' own attributes.
pub const OWN: &str = "gradfs.";

/// The texts of one version, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, String>", into = "BTreeMap<String, String>")]
pub struct Meta(Option<Arc<BTreeMap<String, String>>>);

/// Why a version cannot have these.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetaError {
    /// The name cannot be one.
    #[error(
        "{0:?} is no name for metadata: use 1 to {MAX_NAME} bytes without control characters, not {OWN:?} in front"
    )]
    Name(String),
    /// The text has a zero byte.
    #[error("the metadata {0:?} has a zero byte")]
    Zero(String),
    /// All together are too long.
    #[error("the metadata takes {0} bytes, and a version keeps {MAX_META}: publish less of it")]
    TooLong(usize),
}

impl Meta {
    /// The text of this name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.as_ref()?.get(name).map(String::as_str)
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().flat_map(|texts| texts.iter()).map(|(name, text)| (name.as_str(), text.as_str()))
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// These and those of `other`, which replace those of the same name.
    ///
    /// # Errors
    /// If they cannot be a version's. Nothing has changed then.
    pub fn add<N: Into<String>, T: Into<String>>(
        &mut self,
        other: impl IntoIterator<Item = (N, T)>,
    ) -> Result<(), MetaError> {
        let mut texts = BTreeMap::from(self.clone());
        texts.extend(other.into_iter().map(|(name, text)| (name.into(), text.into())));
        *self = Meta::try_from(texts)?;
        Ok(())
    }
}

impl TryFrom<BTreeMap<String, String>> for Meta {
    type Error = MetaError;

    fn try_from(texts: BTreeMap<String, String>) -> Result<Meta, MetaError> {
        let is_name = |name: &str| {
            (1..=MAX_NAME).contains(&name.len())
                && !name.starts_with(OWN)
                && !name.contains(|c: char| c.is_control())
        };
        if let Some(name) = texts.keys().find(|name| !is_name(name)) {
            return Err(MetaError::Name(name.chars().take(MAX_NAME).collect()));
        }
        if let Some((name, _)) = texts.iter().find(|(_, text)| text.contains('\0')) {
            return Err(MetaError::Zero(name.clone()));
        }
        let bytes = texts.iter().map(|(name, text)| name.len() + text.len()).sum();
        if bytes > MAX_META {
            return Err(MetaError::TooLong(bytes));
        }
        Ok(Meta(Some(texts).filter(|texts| !texts.is_empty()).map(Arc::new)))
    }
}

impl From<Meta> for BTreeMap<String, String> {
    fn from(meta: Meta) -> BTreeMap<String, String> {
        meta.0.map(Arc::unwrap_or_clone).unwrap_or_default()
    }
}

/// A JSON object: a line.
impl fmt::Display for Meta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: serde_json::Map<String, serde_json::Value> =
            self.iter().map(|(name, text)| (name.to_owned(), text.into())).collect();
        serde_json::Value::from(texts).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_has_bounds() {
        let mut meta = Meta::default();
        assert!(meta.is_empty() && meta.to_string() == "{}");
        meta.add([("step", "7"), ("note", "a \"b\" ü\n")]).unwrap();
        meta.add([("step", "8")]).unwrap();
        assert_eq!((meta.get("step"), meta.get("none")), (Some("8"), None));
        assert_eq!(meta.to_string(), r#"{"note":"a \"b\" ü\n","step":"8"}"#);
        let before = meta.clone();
        for name in ["", "a\nb", "gradfs.version", &"n".repeat(251)] {
            let outcome = meta.add([(name, "1")]);
            assert!(matches!(outcome, Err(MetaError::Name(_))), "{name:?}");
        }
        assert_eq!(meta.add([("z", "\0")]), Err(MetaError::Zero("z".to_owned())));
        assert!(matches!(meta.add([("long", "x".repeat(MAX_META))]), Err(MetaError::TooLong(_))));
        assert_eq!(meta, before, "a refusal changes nothing");
        let bytes = postcard::to_stdvec(&meta).unwrap();
        assert_eq!(postcard::from_bytes::<Meta>(&bytes).unwrap(), meta);
        let wrong = postcard::to_stdvec(&BTreeMap::from([("", "1")])).unwrap();
        assert!(postcard::from_bytes::<Meta>(&wrong).is_err(), "a peer's are checked, too");
    }
}
