//! The files that a model is loaded from: one safetensors file, or the files of a Hugging Face checkpoint,
//! which is a directory or the index in it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use libmodelio::formats::safetensors::Header;
use serde::Deserialize;

use crate::error::Error;

/// File names: the index of a checkpoint, and the only file of a checkpoint without an index.
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// What is in the name of any index, in front of the variant (`fp16.`), if there is one, and of `json`.
const INDEX_WORD: &str = ".safetensors.index.";

/// The files of a model, in the order in which their tensors lie in it, and the file that the index names for
/// each tensor.
#[derive(Debug)]
pub struct Checkpoint {
    /// The paths of the files, in the order of their names.
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
        if path.join(INDEX).exists() {
            return Checkpoint::indexed(&path.join(INDEX));
        }
        if path.join(SINGLE).exists() {
            return Ok(Checkpoint::single(path.join(SINGLE)));
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
        let is_part = |file: &PathBuf| file.to_string_lossy().contains("-of-");
        let bad = |what: String, hint| Err(Error::new(format!("{shown} has {what}")).hint(hint));
        match (&indices[..], &found[..]) {
            ([index], _) => Checkpoint::indexed(index),
            ([], [file]) => Ok(Checkpoint::single(file.clone())),
            ([], []) => Err(Error::new(format!("there is no safetensors file in {shown}"))),
            ([], _) if found.iter().all(is_part) => bad(
                format!("{} safetensors files of one model, and no {INDEX}", found.len()),
                "copy the checkpoint again, with its index",
            ),
            ([], _) => bad(format!("{} safetensors files, and no {INDEX}", found.len()), "name one of them"),
            _ => bad(format!("the indices of {} models", indices.len()), "name one of them"),
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
        let mut found = BTreeSet::new();
        for (file, header) in self.files.iter().zip(headers) {
            let name = file.file_name().and_then(OsStr::to_str).unwrap_or_default();
            for tensor in &header.tensors {
                if map.get(&tensor.name).map(String::as_str) != Some(name) {
                    return Err(bad(format!(
                        "{name} has tensor {:?}, but the index does not place that tensor in this file",
                        tensor.name
                    )));
                }
                // The layout will complain about two tensors with one name.
                found.insert(&tensor.name);
            }
        }
        match map.iter().find(|(tensor, _)| !found.contains(tensor)) {
            Some((tensor, name)) => Err(bad(format!("{name} lacks tensor {tensor:?}"))),
            None => Ok(()),
        }
    }
}

fn is_index(path: &Path) -> bool {
    path.file_name().and_then(OsStr::to_str).is_some_and(|name| {
        let ending = name.split_once(INDEX_WORD).map(|(_, ending)| ending);
        // A variant is one word: `model.safetensors.index.json.bak` is a copy that nobody means.
        ending.is_some_and(|ending| {
            ending == "json" || ending.strip_suffix(".json").is_some_and(|variant| !variant.contains('.'))
        })
    })
}

/// The name of a model that is loaded from `path`: the name of its file, or of the directory of its
/// checkpoint.
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
