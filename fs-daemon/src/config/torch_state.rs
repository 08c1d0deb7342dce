//! Optimizer state that torch has saved, for a model that is created with it: the Python package makes a snapshot of the
//! two.

use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::error::Error;

const ELSEWHERE: &str = "install the Python package for python3 (pip install gradfs torch), or convert where it is: \
                         python -m gradfs.convert MODEL SNAPSHOT/ --state FILE; then gradfs create NAME --from SNAPSHOT/";

/// A snapshot of `model` and of the state in `file`, in a directory that goes with what is returned. `names` is a file of the
/// optimizer's parameters, and `reducer` tells Adam from AdamW.
///
/// # Errors
/// What the package says, or that it is not there.
pub(super) fn snapshot_of(
    model: &Path,
    file: &Path,
    names: Option<&Path>,
    reducer: Option<&str>,
) -> Result<TempDir, Error> {
    let failed = || Error::new(format!("cannot take the optimizer's state of {}", file.display()));
    if model.is_dir() {
        return Err(failed().caused_by(format!("{} is a directory", model.display())).hint(ELSEWHERE));
    }
    let dir = tempfile::tempdir().map_err(|error| failed().caused_by(error))?;
    let mut convert = Command::new("python3");
    convert.args(["-m", "gradfs.convert"]).arg(model).arg(dir.path().join("snapshot"));
    convert.arg("--state").arg(file);
    if let Some(names) = names {
        convert.arg("--names").arg(names);
    }
    let reducer = reducer.map(str::to_ascii_lowercase);
    if let Some(which) = reducer.filter(|reducer| ["adam", "adamw"].contains(&reducer.as_str())) {
        convert.args(["--optimizer", which.as_str()]);
    }
    let done = convert.output().map_err(|error| match error.kind() {
        ErrorKind::NotFound => failed().caused_by("there is no python3").hint(ELSEWHERE),
        _ => failed().caused_by(error),
    })?;
    if done.status.success() {
        return Ok(dir);
    }
    let said = String::from_utf8_lossy(&done.stderr);
    let last = said.lines().rfind(|line| !line.is_empty()).unwrap_or("the converter has failed");
    let why = last.trim_start_matches("gradfs.convert: error: ").replace("--names", "--optimizer-names");
    let why = why.replace("give --optimizer", "give --reducer adam or adamw");
    let is_missing = why.contains("No module named");
    let error = failed().caused_by(why);
    Err(if is_missing { error.hint(ELSEWHERE) } else { error })
}
