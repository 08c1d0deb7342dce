//! The directories below `tensors/`, which the names of tensors make by their `/`. They are the same in every version.

use libmodelio::vocabulary::layout::{ModelLayout, Tensor};

use crate::session::error::{CallError, CallResult};

/// The directories of one model, by number; 0 is `tensors/` itself.
pub struct TensorPaths(Vec<Directory>);

/// One directory.
pub struct Directory {
    /// Number of the directory that it is in.
    pub parent: u32,
    /// Numbers of the directories in it, by name.
    pub directories: Vec<u32>,
    /// Indices of the tensors in it, in the order of the layout.
    tensors: Vec<u32>,
    /// A tensor below it, and how many bytes of that tensor's name are the directory's path.
    path: (u32, usize),
}

/// An entry of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Child {
    /// The directory with this number.
    Directory(u32),
    /// The tensor with this index.
    Tensor(u32),
}

impl Directory {
    fn new(parent: u32, path: (u32, usize)) -> Directory {
        Directory { parent, directories: Vec::new(), tensors: Vec::new(), path }
    }

    /// Without a `/` at its end; empty for `tensors/`.
    fn path<'a>(&self, tensors: &'a [Tensor]) -> &'a str {
        &tensors[self.path.0 as usize].name[..self.path.1]
    }

    fn name<'a>(&self, tensors: &'a [Tensor]) -> &'a str {
        last_component(self.path(tensors))
    }
}

impl TensorPaths {
    /// The directories that the names of `tensors` make.
    pub fn new(tensors: &[Tensor]) -> TensorPaths {
        let mut directories = vec![Directory::new(0, (0, 0))];
        let name = |index: u32| tensors[index as usize].name.as_str();
        let mut nested: Vec<u32> = (0..tensors.len() as u32).filter(|&i| name(i).contains('/')).collect();
        nested.sort_unstable_by(|&a, &b| name(a).cmp(name(b)));
        // Sorted, the names below one directory follow each other: those above the last one are all that can go on.
        let mut above: Vec<u32> = Vec::new();
        let mut holder = vec![0; tensors.len()];
        for tensor in nested {
            let is_below = |&directory: &u32| {
                let path = directories[directory as usize].path(tensors);
                name(tensor).strip_prefix(path).is_some_and(|rest| rest.starts_with('/'))
            };
            above.truncate(above.partition_point(is_below));
            for (end, _) in name(tensor).match_indices('/').skip(above.len()) {
                let (number, parent) = (directories.len() as u32, above.last().copied().unwrap_or(0));
                directories.push(Directory::new(parent, (tensor, end)));
                directories[parent as usize].directories.push(number);
                above.push(number);
            }
            holder[tensor as usize] = above.last().copied().unwrap_or(0);
        }
        for (tensor, &directory) in holder.iter().enumerate() {
            directories[directory as usize].tensors.push(tensor as u32);
        }
        // `a.b/` is before `a/` so far.
        for number in 0..directories.len() {
            let mut inside = std::mem::take(&mut directories[number].directories);
            let of = |directory: &u32| directories[*directory as usize].name(tensors);
            inside.sort_unstable_by(|a, b| of(a).cmp(of(b)));
            directories[number].directories = inside;
        }
        TensorPaths(directories)
    }

    /// How many there are, `tensors/` included.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The directory with this number.
    ///
    /// # Errors
    /// ENOENT.
    pub fn get(&self, directory: u32) -> CallResult<&Directory> {
        self.0.get(directory as usize).ok_or_else(CallError::not_found)
    }

    /// The entry `name` of a directory. `layout` is the one that the directories are made of, here and below.
    pub fn lookup(&self, layout: &ModelLayout, directory: u32, name: &str) -> Option<Child> {
        let tensors = layout.tensors();
        let directory = self.0.get(directory as usize)?;
        let of = |number: &u32| self.0[*number as usize].name(tensors);
        if let Ok(found) = directory.directories.binary_search_by(|number| of(number).cmp(name)) {
            return Some(Child::Directory(directory.directories[found]));
        }
        let file = name.strip_suffix(".npy")?;
        let tensor = match directory.path(tensors) {
            "" => layout.tensor_index(file),
            path => layout.tensor_index(&format!("{path}/{file}")),
        };
        tensor.map(|index| Child::Tensor(index as u32))
    }

    /// Names in a directory without the first `skip`: directories, then tensors.
    ///
    /// # Errors
    /// ENOENT.
    pub fn list<'a>(
        &'a self,
        layout: &'a ModelLayout,
        directory: u32,
        skip: usize,
    ) -> CallResult<impl Iterator<Item = (String, Child)> + 'a> {
        let tensors = layout.tensors();
        let Directory { directories, tensors: files, .. } = self.get(directory)?;
        let rest = files.iter().skip(skip.saturating_sub(directories.len()));
        let directories = directories
            .iter()
            .skip(skip)
            .map(move |&number| (self.0[number as usize].name(tensors).to_owned(), Child::Directory(number)));
        let files = rest.map(move |&index| {
            (format!("{}.npy", last_component(&tensors[index as usize].name)), Child::Tensor(index))
        });
        Ok(directories.chain(files))
    }
}

fn last_component(path: &str) -> &str {
    path.rsplit_once('/').map_or(path, |(_, last)| last)
}

#[cfg(test)]
mod tests {
    use libmodelio::vocabulary::layout::DType;

    use super::*;

    fn layout(names: &[&str]) -> ModelLayout {
        let tensors = names.iter().map(|name| ((*name).to_owned(), DType::F32, vec![1]));
        ModelLayout::new(tensors.collect(), 64 << 10).unwrap()
    }

    /// All paths below a directory, as a walk finds them, after checking that each name leads where the listing says.
    fn walk(paths: &TensorPaths, layout: &ModelLayout, directory: u32, above: &str, found: &mut Vec<String>) {
        let children: Vec<_> = paths.list(layout, directory, 0).unwrap().collect();
        for skip in 0..=children.len() + 1 {
            let rest: Vec<_> = paths.list(layout, directory, skip).unwrap().collect();
            assert_eq!(rest, children[skip.min(children.len())..], "from {skip} on");
        }
        for (name, child) in children {
            assert_eq!(paths.lookup(layout, directory, &name), Some(child), "{name}");
            match child {
                Child::Tensor(index) => {
                    let path = format!("{above}{name}");
                    assert_eq!(path, format!("{}.npy", layout.tensors()[index as usize].name));
                    found.push(path);
                }
                Child::Directory(number) => {
                    assert_eq!(paths.get(number).unwrap().parent, directory);
                    found.push(format!("{above}{name}/"));
                    walk(paths, layout, number, &format!("{above}{name}/"), found);
                }
            }
        }
    }

    fn tree(names: &[&str]) -> Vec<String> {
        let (layout, mut found) = (layout(names), Vec::new());
        let paths = TensorPaths::new(layout.tensors());
        walk(&paths, &layout, 0, "", &mut found);
        let directories = found.iter().filter(|path| path.ends_with('/')).count();
        assert_eq!((paths.len(), found.len()), (1 + directories, names.len() + directories));
        found
    }

    #[test]
    fn slashes_make_directories() {
        assert_eq!(
            tree(&["head", "encoder/0/weight", "a", "encoder/1/weight", "encoder/0/bias", "encoder"]),
            [
                "encoder/",
                "encoder/0/",
                "encoder/0/weight.npy",
                "encoder/0/bias.npy",
                "encoder/1/",
                "encoder/1/weight.npy",
                "head.npy",
                "a.npy",
                "encoder.npy",
            ]
        );
    }

    #[test]
    fn names_that_sort_between_a_directory_and_what_is_in_it_do_no_harm() {
        let found =
            tree(&["a/x", "a.b/x", "a-/b/x", "a/b/c/d", "a/b.c/d", "a0/x", "a", "a/b", "a.npyx/y", "a/b-"]);
        let top: Vec<_> =
            found.iter().filter(|path| path.trim_end_matches('/').matches('/').count() == 0).collect();
        assert_eq!(top, ["a/", "a-/", "a.b/", "a.npyx/", "a0/", "a.npy"]);
    }

    #[test]
    fn without_slashes_there_is_one_directory_in_the_order_of_the_model() {
        assert_eq!(tree(&["z", "a", "m"]), ["z.npy", "a.npy", "m.npy"]);
    }

    #[test]
    fn other_names_lead_nowhere() {
        let layout = layout(&["a/b", "c"]);
        let paths = TensorPaths::new(layout.tensors());
        for name in ["a.npy", "c", "b.npy", "", ".npy", "c.npy.npy"] {
            assert_eq!(paths.lookup(&layout, 0, name), None, "{name}");
        }
        for name in ["c.npy", "b", "a"] {
            assert_eq!(paths.lookup(&layout, 1, name), None, "{name}");
        }
        assert_eq!(paths.lookup(&layout, 2, "c.npy"), None);
        assert_eq!(paths.get(2).err().map(|error| error.errno), Some(libc::ENOENT));
    }
}
