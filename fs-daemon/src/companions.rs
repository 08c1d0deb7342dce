//! The files that belong to a checkpoint besides its weights: configuration, tokenizer, description of an adapter.

use std::fs;
use std::path::Path;

use crate::error::Error;
use crate::session::model::Companion;

/// The most bytes of all such files: tokenizers take some tens of megabytes.
const MAX_BYTES: u64 = 256 << 20;
/// Endings of files that hold weights, or say where they lie.
const WEIGHTS: [&str; 14] = [
    ".safetensors",
    ".index.json",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".gguf",
    ".ot",
    ".tflite",
    ".npz",
];

/// Reads those in `dir`, by rising name. Directories, hidden files and weights are left out. If nobody `asked` for them,
/// so are files that cannot be read or are large, and the log says so.
///
/// # Errors
/// If somebody has asked: a directory or file that cannot be read; more than 256 MiB.
pub fn read(dir: &Path, asked: bool) -> Result<Vec<Companion>, Error> {
    let failed = |error| Error::new(format!("cannot read {}", dir.display())).caused_by(error);
    let (mut found, mut bytes) = (Vec::new(), 0);
    for entry in dir.read_dir().map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let lower = name.to_lowercase();
        if name.starts_with('.') || WEIGHTS.iter().any(|end| lower.ends_with(end)) {
            continue;
        }
        let found_file = fs::metadata(&path).and_then(|stat| match stat {
            stat if !stat.is_file() => Ok(None),
            stat if !asked && bytes + stat.len() > MAX_BYTES => Err(std::io::ErrorKind::FileTooLarge.into()),
            stat if bytes + stat.len() > MAX_BYTES => Ok(Some((stat.len(), Vec::new()))),
            stat => fs::read(&path).map(|contents| Some((stat.len(), contents))),
        });
        let (len, contents) = match found_file {
            Ok(Some(file)) => file,
            Ok(None) => continue,
            Err(error) if !asked => {
                tracing::warn!(path = %path.display(), %error, "not shown in hf/");
                continue;
            }
            Err(error) => return Err(failed(error)),
        };
        bytes += len;
        if bytes > MAX_BYTES {
            let what = format!("{} has more than {} MiB beside the weights", dir.display(), MAX_BYTES >> 20);
            return Err(
                Error::usage(what).hint("give --with-files a directory of the few files that belong there")
            );
        }
        found.push(Companion { name: name.to_owned(), contents });
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
        std::os::unix::fs::symlink("/nonexistent", dir.path().join("dangles")).unwrap();
        fs::File::create(dir.path().join("large")).unwrap().set_len(MAX_BYTES).unwrap();
        assert!(read(dir.path(), true).is_err());
        let found = read(dir.path(), false).unwrap();
        assert_eq!(
            found.iter().map(|file| file.name.as_str()).collect::<Vec<_>>(),
            ["config.json", "tokenizer.json"]
        );
        assert_eq!(found[0].contents, b"config.json");
        assert!(read(&dir.path().join("none"), true).is_err());
    }
}
