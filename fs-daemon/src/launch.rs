//! `gradfs launch`: hands over to the Python package, which makes a job of a script.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use crate::error::Error;

/// Becomes `python -m gradfs.launch` with these arguments. It returns only if that cannot be started.
///
/// # Errors
/// Why not.
pub fn run(args: &[OsString]) -> Result<(), Error> {
    let python = interpreter();
    let error = Command::new(&python).args(["-m", "gradfs.launch"]).args(args).exec();
    Err(Error::new(format!("cannot start {}", python.display()))
        .caused_by(error)
        .hint("gradfs launch takes Python with the package: pip install the wheel that scripts/wheel builds"))
}

/// The interpreter of the environment that this program was installed into. Else the first on PATH.
fn interpreter() -> PathBuf {
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join("python3")));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| "python3".into())
}
