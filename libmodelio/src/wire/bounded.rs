//! Lists and maps that are decoded only up to a number of elements.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// A list of at most `MAX` elements. The limit is needed because a decoded list takes many times the memory
/// of its encoding.
pub(super) fn list<'de, const MAX: usize, D, T>(from: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    from.deserialize_seq(AtMost::<MAX, Vec<T>>(PhantomData))
}

/// Like [`list`], for a map.
pub(super) fn map<'de, const MAX: usize, D>(from: D) -> Result<BTreeMap<String, String>, D::Error>
where
    D: Deserializer<'de>,
{
    from.deserialize_map(AtMost::<MAX, BTreeMap<String, String>>(PhantomData))
}

struct AtMost<const MAX: usize, T>(PhantomData<T>);

impl<'de, const MAX: usize, T: Deserialize<'de>> Visitor<'de> for AtMost<MAX, Vec<T>> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {MAX} elements")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Vec<T>, A::Error> {
        let mut elements = Vec::new();
        while let Some(element) = from.next_element()? {
            if elements.len() == MAX {
                return Err(A::Error::invalid_length(MAX + 1, &self));
            }
            elements.push(element);
        }
        Ok(elements)
    }
}

impl<'de, const MAX: usize> Visitor<'de> for AtMost<MAX, BTreeMap<String, String>> {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {MAX} entries")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Self::Value, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some((key, value)) = from.next_entry()? {
            if entries.len() == MAX {
                return Err(A::Error::invalid_length(MAX + 1, &self));
            }
            entries.insert(key, value);
        }
        Ok(entries)
    }
}
