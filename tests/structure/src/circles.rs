//! Which file imports which, and whether that goes in circles.
//!
//! A file has an arrow to another if it names something that the other defines. A name that is re-exported leads to the
//! file that defines it. What a module names of those that it is within is no arrow, for it is an inner part of them; but
//! the crate's own file is no such part. Names that a macro defines, and paths within macro calls, are not seen.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use syn::visit::Visit;
use syn::{Ident, Item, UseTree, visit};

use crate::sources::{Crate, Module};

/// File -> the files that it imports.
pub type Arrows = BTreeMap<String, BTreeSet<String>>;

/// What the names of a module mean.
struct Scope<'a> {
    module: &'a Module,
    /// Names that it defines.
    own: HashSet<String>,
    /// Names that it imports, with the paths that they stand for.
    imported: HashMap<String, Vec<String>>,
    /// Modules of which it imports all names.
    globs: Vec<Vec<String>>,
}

struct Names<'a>(HashMap<&'a [String], Scope<'a>>);

/// The arrows of a crate.
pub fn arrows(of: &Crate) -> Arrows {
    let names = Names::new(of);
    let mut arrows = Arrows::new();
    for module in &of.modules {
        let mut paths = Paths::default();
        module.items.iter().for_each(|item| paths.visit_item(item));
        for path in paths.0 {
            let Some(target) = names.home(&names.absolute(&module.path, &path), 0) else { continue };
            let is_within = module.path.starts_with(&target.path) && !target.path.is_empty();
            if target.file != module.file && !is_within {
                let file = |module: &Module| module.file.display().to_string();
                arrows.entry(file(module)).or_default().insert(file(target));
            }
        }
    }
    arrows
}

/// The groups of files that import each other.
pub fn circles(arrows: &Arrows) -> Vec<BTreeSet<String>> {
    let reached = |from: &String| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(file) = next.pop() {
            for to in arrows.get(file).into_iter().flatten() {
                if seen.insert(to.clone()) {
                    next.push(to);
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&String, BTreeSet<String>> =
        arrows.keys().map(|from| (from, reached(from))).collect();
    let group = |from: &&String| -> BTreeSet<String> {
        let back = |to: &&String| reached.get(to).is_some_and(|of_to| of_to.contains(*from));
        reached[*from].iter().filter(back).cloned().collect()
    };
    let groups: BTreeSet<_> = reached.keys().map(group).filter(|group| !group.is_empty()).collect();
    groups.into_iter().collect()
}

impl<'a> Names<'a> {
    fn new(of: &'a Crate) -> Names<'a> {
        let mut names = Names(HashMap::new());
        for module in &of.modules {
            let mut scope =
                Scope { module, own: HashSet::new(), imported: HashMap::new(), globs: Vec::new() };
            for item in &module.items {
                match item {
                    Item::Use(item) => leaves(&item.tree, &mut Vec::new(), &mut |path, name| match name {
                        Some(name) => {
                            scope.imported.insert(name.to_string(), path);
                        }
                        None => scope.globs.push(path),
                    }),
                    other => scope.own.extend(defined(other).map(Ident::to_string)),
                }
            }
            names.0.insert(&module.path, scope);
        }
        names
    }

    /// A path as `module` writes it, from the crate's root; empty if it leads out of the crate.
    fn absolute(&self, module: &[String], path: &[String]) -> Vec<String> {
        let Some(first) = path.first() else { return Vec::new() };
        let (base, rest) = match first.as_str() {
            "crate" => (Vec::new(), &path[1..]),
            "self" => (module.to_vec(), &path[1..]),
            "super" => {
                let ups = path.iter().take_while(|word| *word == "super").count();
                (module[..module.len().saturating_sub(ups)].to_vec(), &path[ups..])
            }
            name => {
                let is_there = self.0.get(module).is_some_and(|scope| {
                    let child = [module, &[name.to_owned()]].concat();
                    scope.own.contains(name)
                        || scope.imported.contains_key(name)
                        || self.0.contains_key(&child[..])
                });
                if !is_there {
                    return Vec::new();
                }
                (module.to_vec(), path)
            }
        };
        base.into_iter().chain(rest.iter().cloned()).collect()
    }

    /// The module that defines what a path from the root means.
    fn home(&self, path: &[String], hops: usize) -> Option<&'a Module> {
        const MOST_HOPS: usize = 16;
        if path.is_empty() || hops > MOST_HOPS {
            return None;
        }
        let len = (0..=path.len()).rev().find(|len| self.0.contains_key(&path[..*len]))?;
        let scope = &self.0[&path[..len]];
        let Some(name) = path.get(len).filter(|name| !scope.own.contains(*name)) else {
            return Some(scope.module);
        };
        let onward = |to: &[String]| {
            let to = self.absolute(&path[..len], to);
            let whole: Vec<String> = to.iter().chain(&path[len + 1..]).cloned().collect();
            if to.is_empty() { None } else { self.home(&whole, hops + 1) }
        };
        if let Some(target) = scope.imported.get(name) {
            return onward(target);
        }
        scope.globs.iter().find_map(|glob| {
            let inner = self.absolute(&path[..len], glob);
            let is_there = self
                .0
                .get(&inner[..])
                .is_some_and(|of| of.own.contains(name) || of.imported.contains_key(name));
            is_there.then(|| onward(&[&glob[..], std::slice::from_ref(name)].concat()))?
        })
    }
}

/// Calls `leaf` with each path of a tree of imports, and the name that it gets; None for all names.
fn leaves(tree: &UseTree, before: &mut Vec<String>, leaf: &mut dyn FnMut(Vec<String>, Option<&Ident>)) {
    let with = |before: &[String], last: &Ident| {
        // `use a::{self}` means a.
        let own = (last != "self").then(|| last.to_string());
        before.iter().cloned().chain(own).collect::<Vec<_>>()
    };
    match tree {
        UseTree::Path(path) => {
            before.push(path.ident.to_string());
            leaves(&path.tree, before, leaf);
            before.pop();
        }
        UseTree::Name(name) => leaf(with(before, &name.ident), Some(&name.ident)),
        UseTree::Rename(name) => leaf(with(before, &name.ident), Some(&name.rename)),
        UseTree::Glob(_) => leaf(before.clone(), None),
        UseTree::Group(group) => group.items.iter().for_each(|tree| leaves(tree, before, leaf)),
    }
}

fn defined(item: &Item) -> Option<&Ident> {
    match item {
        Item::Const(item) => Some(&item.ident),
        Item::Enum(item) => Some(&item.ident),
        Item::Fn(item) => Some(&item.sig.ident),
        Item::Macro(item) => item.ident.as_ref(),
        Item::Static(item) => Some(&item.ident),
        Item::Struct(item) => Some(&item.ident),
        Item::Trait(item) => Some(&item.ident),
        Item::Type(item) => Some(&item.ident),
        Item::Union(item) => Some(&item.ident),
        _ => None,
    }
}

/// All paths of some items, also the imported ones.
#[derive(Default)]
struct Paths(HashSet<Vec<String>>);

impl<'ast> Visit<'ast> for Paths {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            self.0.insert(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        // What is only passed on is no import.
        if matches!(item.vis, syn::Visibility::Inherited) {
            leaves(&item.tree, &mut Vec::new(), &mut |path, _| {
                self.0.insert(path);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Vec<Vec<String>> {
        circles(&arrows(&Crate::of_text(text))).into_iter().map(|group| group.into_iter().collect()).collect()
    }

    #[test]
    fn files_that_import_each_other_are_found() {
        let circle =
            "mod a { use crate::b::B; pub struct A(B); } mod b { pub struct B; fn f(_: super::a::A) {} }";
        assert_eq!(of(circle), [["a.rs", "b.rs"]]);
        assert!(of("mod a { use crate::b::B; pub struct A(B); } mod b { pub struct B; }").is_empty());
    }

    #[test]
    fn a_name_that_is_passed_on_leads_to_the_file_that_defines_it() {
        let through = |what: &str| {
            format!(
                "mod a {{ mod inner {{ pub struct I; }} pub {what}; use crate::b::B; }} \
                 mod b {{ use crate::a::I; pub struct B(I); }}"
            )
        };
        assert!(of(&through("use inner::I")).is_empty());
        assert!(of(&through("use inner::*")).is_empty());
        assert_eq!(of(&through("struct I")), [["a.rs", "b.rs"]]);
    }

    #[test]
    fn a_module_may_use_what_it_is_within() {
        assert!(
            of("mod a { mod b { use super::A; pub struct B(A); } use b::B; pub struct A(B); }").is_empty()
        );
    }
}
