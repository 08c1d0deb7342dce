//! Which files a model is loaded from: one safetensors file, or those of a Hugging Face checkpoint, which is a directory
//! or the index in it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use libmodelio::formats::safetensors::Header;
use serde::Deserialize;

use crate::error::Error;

/// Names of the index of a checkpoint, and of the only file of a checkpoint without one.
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
const INDEX_ENDING: &str = ".safetensors.index.json";

/// The files of a model, in the order in which their tensors lie in it, and which tensor the index has where.
#[derive(Debug)]
pub struct Checkpoint {
    /// By name.
    pub files: Vec<PathBuf>,
    index: Option<(PathBuf, BTreeMap<String, String>)>,
}

/// The part of an index that is read.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Looks at what `path` is: a file, an index, or a directory.
    ///
    /// # Errors
    /// An index that cannot be read or leads out of its directory; a directory without a model, or with several.
    pub fn find(path: &Path) -> Result<Checkpoint, Error> {
        if !path.is_dir() {
            return if is_index(path) {
                Checkpoint::indexed(path)
            } else {
                Ok(Checkpoint::single(path.to_owned()))
            };
        }
        for (name, indexed) in [(INDEX, true), (SINGLE, false)] {
            let file = path.join(name);
            if file.exists() {
                return if indexed { Checkpoint::indexed(&file) } else { Ok(Checkpoint::single(file)) };
            }
        }
        let shown = path.display();
        let failed = |error| Error::new(format!("cannot read {shown}")).caused_by(error);
        let (mut found, mut indices) = (Vec::new(), Vec::new());
        for entry in path.read_dir().map_err(failed)? {
            let file = entry.map_err(failed)?.path();
            if is_index(&file) {
                indices.push(file);
            } else if file.extension() == Some(OsStr::new("safetensors")) {
                found.push(file);
            }
        }
        if let [index] = &indices[..] {
            return Checkpoint::indexed(index);
        }
        let is_part = |file: &PathBuf| file.to_string_lossy().contains("-of-");
        match (indices.len(), found.len()) {
            (0, 0) => Err(Error::new(format!("there is no safetensors file in {shown}"))),
            (0, 1) => Ok(Checkpoint::single(found.remove(0))),
            (0, several) if found.iter().all(is_part) => Err(Error::new(format!(
                "{shown} has {several} safetensors files of one model, and no {INDEX}"
            ))
            .hint("copy the checkpoint again, with its index")),
            (0, several) => {
                Err(Error::new(format!("{shown} has {several} safetensors files, and no {INDEX}"))
                    .hint("name one of them"))
            }
            (several, _) => {
                Err(Error::new(format!("{shown} has the indices of {several} models"))
                    .hint("name one of them"))
            }
        }
    }

    fn single(file: PathBuf) -> Checkpoint {
        Checkpoint { files: vec![file], index: None }
    }

    fn indexed(path: &Path) -> Result<Checkpoint, Error> {
        let bad = |why: String| Error::new(format!("cannot load {}: {why}", path.display()));
        let text = std::fs::read(path).map_err(|error| bad(error.to_string()))?;
        let Index { weight_map } = serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))?;
        let names: BTreeSet<&String> = weight_map.values().collect();
        if let Some(name) = names.iter().find(|name| Path::new(name).file_name() != Some(OsStr::new(name))) {
            return Err(bad(format!(
                "it names the file {name:?}: a plain name of a file in the same directory is expected"
            )));
        }
        if names.is_empty() {
            return Err(bad("it has no tensors".to_owned()));
        }
        let files = names.into_iter().map(|name| path.with_file_name(name)).collect();
        Ok(Checkpoint { files, index: Some((path.to_owned(), weight_map)) })
    }

    /// Holds the files' headers, in the order of [`Self::files`], against the index.
    ///
    /// # Errors
    /// A tensor that is not where the index has it, or that it does not have.
    pub fn check(&self, headers: &[Header]) -> Result<(), Error> {
        let Some((path, map)) = &self.index else { return Ok(()) };
        let bad = |why: String| {
            Error::new(format!("cannot load {}: {why}", path.display())).hint("copy the checkpoint again")
        };
        let mut there = 0;
        for (file, header) in self.files.iter().zip(headers) {
            let name = file.file_name().and_then(OsStr::to_str).unwrap_or_default();
            for tensor in &header.tensors {
                if map.get(&tensor.name).map(String::as_str) != Some(name) {
                    return Err(bad(format!(
                        "{name} has tensor {:?}, but the index does not place that tensor in this file",
                        tensor.name
                    )));
                }
            }
            there += header.tensors.len();
        }
        // Of two with one name the layout will complain.
        if there < map.len() {
            let found: BTreeSet<&str> =
                headers.iter().flat_map(|h| &h.tensors).map(|t| t.name.as_str()).collect();
            let missing = map.iter().find(|(tensor, _)| !found.contains(tensor.as_str()));
            let (tensor, name) = missing.unzip();
            return Err(bad(format!(
                "{} lacks tensor {:?}",
                name.map_or("", |n| n),
                tensor.map_or("", |t| t)
            )));
        }
        Ok(())
    }
}

fn is_index(path: &Path) -> bool {
    path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.ends_with(INDEX_ENDING))
}

/// The name of a model that is loaded from `path`: that of its file, or of the directory of its checkpoint.
pub fn name_of(path: &Path) -> Option<String> {
    let name = if is_index(path) {
        return folder_of(path);
    } else if path.is_dir() {
        std::path::absolute(path).ok()?.components().next_back()?.as_os_str().to_owned()
    } else {
        path.file_stem()?.to_owned()
    };
    name.into_string().ok()
}

/// The name of the directory that `path` lies in.
pub fn folder_of(path: &Path) -> Option<String> {
    std::path::absolute(path).ok()?.parent()?.file_name()?.to_str().map(str::to_owned)
}
