//! Names of tensors as paths below `tensors/`: each is a file `<name>.npy`, and `/` in a name makes directories.

use super::{LayoutError, MAX_NAME_LEN, Tensor};

/// Longest directory name in bytes, as for most filesystems.
const MAX_DIRECTORY_LEN: usize = 255;
/// Longest file name in bytes without its `.npy`.
const MAX_FILE_LEN: usize = MAX_DIRECTORY_LEN - SUFFIX.len();
/// Most directories that the names may make, `tensors/` included.
pub const MAX_DIRECTORIES: usize = 1 << 20;

const SUFFIX: &str = ".npy";

/// Whether `name` can be a path and a key of a safetensors header.
pub fn check_name(name: &str) -> Result<(), LayoutError> {
    let (directories, file) = name.rsplit_once('/').map_or(("", name), |(path, file)| (path, file));
    let components = || name.split('/');
    let reason = match name {
        "" => "is empty",
        "__metadata__" => "is what safetensors keeps its metadata under",
        _ if components().any(str::is_empty) => {
            "begins or ends with '/' or has two in a row, so it is no path"
        }
        _ if components().any(|part| part == "." || part == "..") => {
            "has \".\" or \"..\" as a path component"
        }
        _ if name.contains('\0') => "contains a NUL byte, so it cannot be a file name",
        _ if file.len() > MAX_FILE_LEN => {
            "has more than 251 bytes in its last component: no file name is longer"
        }
        _ if directories.split('/').any(|part| part.len() > MAX_DIRECTORY_LEN) => {
            "has more than 255 bytes between two '/', so that cannot be a directory name"
        }
        _ if name.len() > MAX_NAME_LEN => "is longer than 2048 bytes, so it makes too long a path",
        _ => return Ok(()),
    };
    Err(LayoutError::BadName { name: shown(name), reason })
}

/// The beginning of `text`, long enough for a message: a text from a file may be megabytes long.
pub fn shown(text: &str) -> String {
    match text.char_indices().nth(MAX_FILE_LEN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Tensor indices by rising name; refuses names that are the same, or whose files and directories are.
pub(super) fn index_names(tensors: &[Tensor]) -> Result<Vec<u32>, LayoutError> {
    let name = |index: u32| tensors[index as usize].name.as_str();
    let mut by_name: Vec<u32> = (0..tensors.len() as u32).collect();
    by_name.sort_unstable_by(|&a, &b| name(a).cmp(name(b)));
    let mut directories = 1;
    let mut before = "";
    for &index in &by_name {
        let this = name(index);
        if this == before {
            return Err(LayoutError::DuplicateName(this.to_owned()));
        }
        // Names that begin with the same directory follow each other, so it is new where the name before has another.
        let same = this.bytes().zip(before.bytes()).take_while(|(a, b)| a == b).count();
        for (end, _) in this.match_indices('/').filter(|&(end, _)| end >= same) {
            directories += 1;
            let Some(file) = this[..end].strip_suffix(SUFFIX) else { continue };
            if by_name.binary_search_by(|&other| name(other).cmp(file)).is_ok() {
                return Err(LayoutError::FileAndDirectory { file: shown(file), other: shown(this) });
            }
        }
        before = this;
    }
    match directories {
        0..=MAX_DIRECTORIES => Ok(by_name),
        _ => Err(LayoutError::TooManyDirectories(directories)),
    }
}
