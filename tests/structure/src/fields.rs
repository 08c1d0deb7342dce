//! How many fields each struct has. Variants of enums do not count.

use std::collections::HashMap;

use syn::visit::{self, Visit};
use syn::{Item, ItemStruct, Type, TypePath};

use crate::sources::{Crate, is_of_tests};

/// A struct and the number of its fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Count {
    /// The name of the struct.
    pub name: String,
    /// Its file.
    pub file: String,
    /// Its fields. One whose type is used nowhere else, and has no methods, counts as the fields of that type, unless it
    /// holds options.
    pub fields: usize,
}

/// Counts the fields of all structs of a crate.
pub fn counts(of: &Crate) -> Vec<Count> {
    let items = || of.modules.iter().flat_map(|module| module.items.iter().map(move |item| (module, item)));
    let (mut structs, mut uses, mut has_methods) = (HashMap::<_, Vec<_>>::new(), Uses::default(), Vec::new());
    for (module, item) in items() {
        match item {
            Item::Struct(item) => {
                structs.entry(item.ident.to_string()).or_default().push((module, item));
                types(item).for_each(|of| uses.visit_type(of));
            }
            Item::Enum(item) => item.variants.iter().for_each(|variant| uses.visit_fields(&variant.fields)),
            Item::Impl(item) if item.trait_.is_none() => has_methods.extend(plain_name(&item.self_ty)),
            _ => {}
        }
    }
    let count = |item: &ItemStruct| {
        count(item, &|name| match structs.get(name).map(Vec::as_slice) {
            Some([(_, only)])
                if uses.0.get(name) == Some(&1)
                    && !name.ends_with("Options")
                    && !has_methods.iter().any(|has| has == name) =>
            {
                Some(only)
            }
            _ => None,
        })
    };
    let named = |(name, all): (&String, &Vec<(&crate::sources::Module, &ItemStruct)>)| {
        let count = |(module, item): &(&crate::sources::Module, &ItemStruct)| Count {
            name: name.clone(),
            file: module.file.display().to_string(),
            fields: count(item),
        };
        all.iter().map(count).collect::<Vec<_>>()
    };
    let mut counts: Vec<Count> = structs.iter().flat_map(named).collect();
    counts.sort_by(|one, other| other.fields.cmp(&one.fields).then_with(|| one.name.cmp(&other.name)));
    counts
}

fn count<'a>(item: &ItemStruct, holder: &dyn Fn(&str) -> Option<&'a ItemStruct>) -> usize {
    let of = |of: &Type| plain_name(of).and_then(|name| holder(&name)).map_or(1, |held| count(held, holder));
    types(item).map(of).sum()
}

/// The types of the fields that are there without tests.
fn types(item: &ItemStruct) -> impl Iterator<Item = &Type> {
    item.fields.iter().filter(|field| !field.attrs.iter().any(is_of_tests)).map(|field| &field.ty)
}

/// How often fields name each type, also within another one.
#[derive(Default)]
struct Uses(HashMap<String, usize>);

impl<'ast> Visit<'ast> for Uses {
    fn visit_type_path(&mut self, path: &'ast TypePath) {
        if let Some(last) = path.path.segments.last() {
            *self.0.entry(last.ident.to_string()).or_insert(0) += 1;
        }
        visit::visit_type_path(self, path);
    }
}

/// The name of a type without arguments, or that an `impl` is of.
pub(crate) fn plain_name(of: &Type) -> Option<String> {
    let Type::Path(path) = of else { return None };
    path.path.segments.last().map(|last| last.ident.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str, name: &str) -> usize {
        counts(&Crate::of_text(text)).into_iter().find(|count| count.name == name).unwrap().fields
    }

    #[test]
    fn a_type_that_only_holds_fields_counts_as_them() {
        let rest = "struct Held { a: u8, b: u8, c: u8 } struct Tuple(u8, u8);";
        assert_eq!(fields(&format!("struct Outer {{ a: u8, held: Held, t: Tuple }} {rest}"), "Outer"), 6);
        assert_eq!(
            fields(&format!("struct Outer {{ a: u8, held: Held, too: Held }} {rest}"), "Outer"),
            3,
            "used twice"
        );
        let boxed = "enum E { Some(Box<Held>) }";
        assert_eq!(
            fields(&format!("struct Outer {{ a: u8, held: Held }} {rest} {boxed}"), "Outer"),
            2,
            "used twice"
        );
        let methods = "impl Held { fn owns(&self) {} }";
        assert_eq!(
            fields(&format!("struct Outer {{ a: u8, held: Held }} {rest} {methods}"), "Outer"),
            2,
            "it owns them"
        );
    }

    #[test]
    fn what_only_tests_have_does_not_count() {
        assert_eq!(
            fields("struct One { a: u8, #[cfg(test)] b: u8 } #[cfg(test)] struct Two { a: u8 }", "One"),
            1
        );
    }
}
