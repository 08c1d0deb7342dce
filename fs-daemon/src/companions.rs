//! The files that belong to a checkpoint besides its weights: configuration, tokenizer, description of an adapter.

use std::fs;
use std::path::Path;

use crate::error::Error;
use crate::session::model::Companion;

/// The most bytes of all such files: tokenizers take some tens of megabytes.
const MAX_BYTES: u64 = 256 << 20;
/// Endings of files that hold weights, or say where they lie.
const WEIGHTS: [&str; 10] =
    [".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf"];

/// Reads those in `dir`, by rising name. Directories, hidden files and weights are left out.
///
/// # Errors
/// A directory or file that cannot be read; more than 256 MiB.
pub fn read(dir: &Path) -> Result<Vec<Companion>, Error> {
    let failed = |error| Error::new(format!("cannot read {}", dir.display())).caused_by(error);
    let (mut found, mut bytes) = (Vec::new(), 0);
    for entry in dir.read_dir().map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let stat = fs::metadata(&path).map_err(failed)?;
        if !stat.is_file() || name.starts_with('.') || WEIGHTS.iter().any(|end| name.ends_with(end)) {
            continue;
        }
        bytes += stat.len();
        if bytes > MAX_BYTES {
            let what = format!("{} has more than {} MiB beside the weights", dir.display(), MAX_BYTES >> 20);
            return Err(
                Error::usage(what).hint("give --with-files a directory of the few files that belong there")
            );
        }
        found.push(Companion { name: name.to_owned(), contents: fs::read(&path).map_err(failed)? });
    }
    found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_belongs_to_weights_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        for name in [
            "tokenizer.json",
            "config.json",
            ".git",
            "model.safetensors",
            "model.safetensors.index.json",
            "x.bin",
        ] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        fs::create_dir(dir.path().join("onnx")).unwrap();
        let found = read(dir.path()).unwrap();
        assert_eq!(
            found.iter().map(|file| file.name.as_str()).collect::<Vec<_>>(),
            ["config.json", "tokenizer.json"]
        );
        assert_eq!(found[0].contents, b"config.json");
        assert!(read(&dir.path().join("none")).is_err());
    }
}
