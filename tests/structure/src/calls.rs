//! Whether the files of one type call each other's methods in circles.
//!
//! In an `impl` of a type, `self.name(…)` calls the method of that name, if the type has one. So no types of
//! expressions are needed. Calls that go from part to part, through a local variable or by `Self::name(…)` are not
//! seen, nor are those within macros.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use syn::visit::{self, Visit};
use syn::{Expr, ExprMethodCall, ImplItem, Item, ItemImpl};

use crate::circles::{Arrows, circles};
use crate::fields::plain_name;
use crate::sources::{Crate, Module};

/// The circles, by the name of the type: each one is a group of files.
pub fn in_circles(of: &Crate) -> BTreeMap<String, Vec<BTreeSet<String>>> {
    let mut impls = HashMap::<String, Vec<(&Module, &ItemImpl)>>::new();
    for module in &of.modules {
        for item in &module.items {
            let Item::Impl(item) = item else { continue };
            if let Some(name) = plain_name(&item.self_ty).filter(|_| item.trait_.is_none()) {
                impls.entry(name).or_default().push((module, item));
            }
        }
    }
    let of_type = |(name, impls): (String, Vec<(&Module, &ItemImpl)>)| {
        let circles = circles(&arrows(&impls));
        (!circles.is_empty()).then_some((name, circles))
    };
    impls.into_iter().filter_map(of_type).collect()
}

fn arrows(impls: &[(&Module, &ItemImpl)]) -> Arrows {
    let file = |module: &Module| module.file.display().to_string();
    let mut homes = HashMap::<String, HashSet<String>>::new();
    for (module, item) in impls {
        for method in &item.items {
            if let ImplItem::Fn(method) = method {
                homes.entry(method.sig.ident.to_string()).or_default().insert(file(module));
            }
        }
    }
    let mut arrows = Arrows::new();
    for (module, item) in impls {
        let mut calls = Calls::default();
        calls.visit_item_impl(item);
        for name in calls.0 {
            // Types of one name in several modules may each have such a method.
            let Some(homes) = homes.get(&name).filter(|homes| homes.len() == 1) else { continue };
            let other = homes.iter().filter(|home| **home != file(module));
            arrows.entry(file(module)).or_default().extend(other.cloned());
        }
    }
    arrows
}

/// The names of the methods that are called on `self`.
#[derive(Default)]
struct Calls(HashSet<String>);

impl<'ast> Visit<'ast> for Calls {
    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        if matches!(&*call.receiver, Expr::Path(path) if path.path.is_ident("self")) {
            self.0.insert(call.method.to_string());
        }
        visit::visit_expr_method_call(self, call);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_type_that_call_each_other_are_found() {
        let text = |back: &str| {
            Crate::of_text(&format!(
                "struct T; struct U;
                 mod a {{ impl super::T {{ fn f(&self) {{ self.g(); }} }} }}
                 mod b {{ impl super::T {{ fn g(&self) {{ if true {{ {back} }} }} fn h(&self) {{}} }} }}
                 mod c {{ impl super::U {{ fn g(&self) {{ self.f(); }} }} }}"
            ))
        };
        assert_eq!(in_circles(&text("self.h(); other.f();")), BTreeMap::new());
        let found = in_circles(&text("self.f();"));
        let files = ["a.rs", "b.rs"].map(str::to_owned);
        assert_eq!(found, [("T".to_owned(), vec![files.into()])].into());
    }
}
