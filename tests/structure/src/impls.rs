//! Where the methods of a type stand.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use syn::Item;

use crate::fields::plain_name;
use crate::sources::{Crate, Module};

/// The files with methods of a type that are neither the file of the type nor a private child of that: by the name of the
/// type.
pub fn elsewhere(of: &Crate) -> BTreeMap<String, BTreeSet<String>> {
    let mut defined = HashMap::<String, Vec<&Module>>::new();
    for module in &of.modules {
        for item in &module.items {
            let name = match item {
                Item::Struct(item) => &item.ident,
                Item::Enum(item) => &item.ident,
                Item::Union(item) => &item.ident,
                _ => continue,
            };
            defined.entry(name.to_string()).or_default().push(module);
        }
    }
    let private: BTreeSet<&[String]> =
        of.modules.iter().filter(|module| module.is_private).map(|module| &module.path[..]).collect();
    // The module of the type is around the one of the `impl`, and each module between is private.
    let is_inner = |inner: &[String], outer: &[String]| {
        inner.starts_with(outer) && (outer.len() + 1..=inner.len()).all(|len| private.contains(&inner[..len]))
    };
    let mut found = BTreeMap::<String, BTreeSet<String>>::new();
    for module in &of.modules {
        for item in &module.items {
            let Item::Impl(item) = item else { continue };
            let Some(name) = plain_name(&item.self_ty).filter(|_| item.trait_.is_none()) else { continue };
            let Some(homes) = defined.get(&name) else { continue };
            let is_home = |home: &&Module| home.file == module.file || is_inner(&module.path, &home.path);
            if !homes.iter().any(is_home) {
                found.entry(name).or_default().insert(module.file.display().to_string());
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        elsewhere(&Crate::of_text(text)).into_keys().collect()
    }

    #[test]
    fn methods_stand_in_the_file_of_their_type_or_in_its_private_children() {
        let inner = |vis: &str| {
            format!(
                "mod a {{ pub struct T; {vis} mod b {{ mod c {{ impl super::super::T {{ fn f() {{}} }} }} }} }}"
            )
        };
        assert!(names(&inner("")).is_empty());
        assert_eq!(names(&inner("pub(super)")), ["T"]);
        assert_eq!(names("mod a { pub struct T; } mod b { impl super::a::T { fn f() {} } }"), ["T"]);
        assert!(
            names("mod a { pub struct T; } mod b { impl Clone for super::a::T {} }").is_empty(),
            "of a trait"
        );
    }
}
