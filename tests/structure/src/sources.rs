//! The modules of a crate, as its files declare them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use syn::{Attribute, Item, Meta, Visibility};

/// A module: a file, or a part of one in braces.
pub struct Module {
    /// The names from the crate's root down to it; empty for the root.
    pub path: Vec<String>,
    /// Its file, from the root of the repository.
    pub file: PathBuf,
    /// Only the module around it, and what is within that, can name it.
    pub is_private: bool,
    /// What it holds, without tests.
    pub items: Vec<Item>,
}

/// A crate of the product.
pub struct Crate {
    /// Its modules: each one stands behind the one that it is within.
    pub modules: Vec<Module>,
}

impl Crate {
    /// Reads the crate whose root is `root`, such as `libmodelio/src/lib.rs`, in the repository at `repository`.
    ///
    /// # Errors
    /// A file that is not there or is no Rust.
    pub fn read(repository: &Path, root: &str) -> io::Result<Crate> {
        let mut read = Crate { modules: Vec::new() };
        let items = items_of(&repository.join(root))?;
        let file = PathBuf::from(root);
        let below = file.parent().map(Path::to_owned).unwrap_or_default();
        read.take(repository, (Vec::new(), file, false), &below, items)?;
        Ok(read)
    }

    /// The crate of one file with this text, whose modules are all in braces.
    ///
    /// # Panics
    /// If it is no Rust, or has modules elsewhere.
    pub fn of_text(text: &str) -> Crate {
        let mut read = Crate { modules: Vec::new() };
        let items = syn::parse_file(text).expect("Rust").items;
        let root = (Vec::new(), PathBuf::from("lib.rs"), false);
        read.take(Path::new("/nowhere"), root, Path::new(""), items).expect("modules in braces");
        // For the rules, each module is a file.
        for module in &mut read.modules {
            module.file = PathBuf::from(format!("{}.rs", module.path.join("/")));
        }
        read
    }

    /// Takes a module, and those that it declares. The files of those are in `below`.
    fn take(
        &mut self,
        repository: &Path,
        (path, file, is_private): (Vec<String>, PathBuf, bool),
        below: &Path,
        items: Vec<Item>,
    ) -> io::Result<()> {
        let (modules, items): (Vec<_>, Vec<_>) = items
            .into_iter()
            .filter(|item| !attributes(item).iter().any(is_of_tests))
            .partition(|item| matches!(item, Item::Mod(_)));
        self.modules.push(Module { path: path.clone(), file: file.clone(), is_private, items });
        for module in modules {
            let Item::Mod(module) = module else { continue };
            let name = module.ident.to_string();
            let is_private = matches!(module.vis, Visibility::Inherited);
            let inner = path.iter().cloned().chain([name.clone()]).collect();
            let inner_below = below.join(&name);
            match module.content {
                Some((_, items)) => {
                    self.take(repository, (inner, file.clone(), is_private), &inner_below, items)?;
                }
                None => {
                    let found = below.join(format!("{name}.rs"));
                    let items = items_of(&repository.join(&found))?;
                    self.take(repository, (inner, found, is_private), &inner_below, items)?;
                }
            }
        }
        Ok(())
    }
}

fn items_of(file: &Path) -> io::Result<Vec<Item>> {
    let wrong = |why: String| io::Error::other(format!("{}: {why}", file.display()));
    let text = fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
    syn::parse_file(&text).map(|file| file.items).map_err(|error| wrong(error.to_string()))
}

/// Whether something is there only for tests.
pub fn is_of_tests(attribute: &Attribute) -> bool {
    let Meta::List(list) = &attribute.meta else { return false };
    let words = list.tokens.to_string();
    list.path.is_ident("cfg")
        && (words == "test" || words.starts_with("any (test") || words.starts_with("any(test"))
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}
