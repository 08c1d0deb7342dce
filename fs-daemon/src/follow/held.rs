//! A model that is followed, and a version of it that stays (edge module).

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::error::{DAEMON_ENDED, Error};
use crate::mountpoint;

/// Milliseconds between two looks whether the mount is there: a detached one goes on for whoever has its files open.
const MOUNT_CHECK_INTERVAL: u16 = 2000;

/// So long a model that was deleted may take to be made anew.
const MADE_ANEW: Duration = Duration::from_secs(10);

/// A model in a mount.
pub struct Model {
    path: PathBuf,
    /// Its file `version`, which wakes pollers.
    version: File,
}

/// A version in memory, as long as this lives.
pub struct Held {
    /// The directory of its model.
    pub model: PathBuf,
    /// Its number.
    pub version: u64,
    /// Its directory, while it is the newest or a retained one.
    pub path: PathBuf,
    /// What its publisher has said of it.
    pub meta: serde_json::Value,
    directory: File,
    _weights: File,
}

impl Model {
    /// The model at `path`, or the one of the mount there.
    ///
    /// # Errors
    /// There is none, or there are several.
    pub fn find(path: &Path) -> Result<Model, Error> {
        let (mount, rest) = mountpoint::of(path)?;
        // A learner has a file `version`, too.
        let is_model = |name: &str| !name.contains('/') && mount.join(name).join("layout").is_file();
        let mut models = vec![rest.to_string_lossy().into_owned()];
        if models[0].is_empty() {
            models = mountpoint::names(&mount).unwrap_or_default();
        }
        models.retain(|name| is_model(name));
        let [name] = &models[..] else {
            let message = format!("{} is not the directory of a model", path.display());
            let which = format!("name one of the mount {}, as gradfs follow /mnt/job/llama", mount.display());
            return Err(Error::usage(message).hint(which));
        };
        let path = mount.join(name);
        match mountpoint::opened(&path.join("version")) {
            Ok(version) => Ok(Model { path, version }),
            Err(error) => Err(gone(&path, error)),
        }
    }

    /// The number of the newest version.
    ///
    /// # Errors
    /// The mount has ended.
    pub fn version(&self) -> io::Result<u64> {
        let mut text = [0; 32];
        let read = self.version.read_at(&mut text, 0)?;
        let number = String::from_utf8_lossy(&text[..read]).trim().parse();
        number.map_err(|_| ErrorKind::InvalidData.into())
    }

    /// Waits for a version above `seen`, or for any of a model that was made anew, and holds it.
    ///
    /// # Errors
    /// The mount or the model has gone, or the version cannot be read.
    pub fn newer_than(&mut self, mut seen: Option<u64>) -> io::Result<Held> {
        let mut missing: Option<Instant> = None;
        loop {
            let version = match self.version() {
                // The model was restored: its files are other ones, with higher numbers.
                Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => {
                    self.version = mountpoint::opened(&self.path.join("version"))?;
                    self.version()?
                }
                outcome => outcome?,
            };
            if seen.is_none_or(|seen| version > seen) {
                match self.hold(version) {
                    // A newer one has come since.
                    Err(error) if error.kind() == ErrorKind::NotFound && self.version()? > version => {
                        continue;
                    }
                    held => return held,
                }
            }
            let version = PollFd::new(self.version.as_fd(), PollFlags::POLLIN);
            match poll(&mut [version], PollTimeout::from(MOUNT_CHECK_INTERVAL)) {
                Ok(0) => {
                    let (path, before) = (self.path.join("version"), self.version.metadata()?);
                    let mount = fs::metadata(self.path.parent().unwrap_or(&self.path))?;
                    if mount.dev() != before.dev() {
                        return Err(ErrorKind::NotFound.into());
                    }
                    match fs::metadata(&path) {
                        Ok(now) if now.ino() == before.ino() => missing = None,
                        Ok(_) => (self.version, seen, missing) = (mountpoint::opened(&path)?, None, None),
                        Err(error) if error.kind() == ErrorKind::NotFound => {
                            if missing.get_or_insert_with(Instant::now).elapsed() > MADE_ANEW {
                                return Err(error);
                            }
                        }
                        Err(error) => return Err(error),
                    }
                }
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn hold(&self, version: u64) -> io::Result<Held> {
        let path = self.path.join("versions").join(version.to_string());
        let (directory, _weights) = (File::open(&path)?, File::open(path.join("weights"))?);
        let meta = serde_json::from_reader(File::open(path.join("meta.json"))?)?;
        Ok(Held { model: self.path.clone(), version, path, meta, directory, _weights })
    }

    /// What to say when it cannot be read.
    pub fn gone(&self, error: io::Error) -> Error {
        gone(&self.path, error)
    }
}

impl Held {
    /// Its directory, as long as this lives, for processes of this user on this host.
    pub fn held_path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.directory.as_raw_fd()).into()
    }
}

fn gone(path: &Path, error: io::Error) -> Error {
    let hint = match error.raw_os_error() {
        Some(libc::ENOTCONN | libc::ECONNABORTED) => DAEMON_ENDED,
        _ => "the model or its mount may have gone; the log of the mount says why",
    };
    Error::new(format!("{} cannot be followed", path.display())).caused_by(error).hint(hint)
}
