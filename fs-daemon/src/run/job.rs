//! The job that learners of `gradfs run` join: its directory in a mount, and what its `status.json` says.

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::error::{DAEMON_ENDED, Error};
use crate::mountpoint;

/// How long a learner's name may be in use after it has left.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);
const LEAVE_CHECK_INTERVAL: Duration = Duration::from_millis(20);
const EXAMPLE: &str = "name the directory of a model in a mount: gradfs run -n 4 /mnt/job/llama -- COMMAND";

/// The directory of a model in a mount.
#[derive(Clone, Debug)]
pub struct Job(PathBuf);

/// `status.json`, as far as it is used here.
#[derive(Debug, Default, Deserialize)]
pub struct Status {
    pub state: String,
    pub version: u64,
    pub contributions: u64,
    pub learners: Vec<Learner>,
    pub control: HashMap<String, String>,
}

/// A learner in it.
#[derive(Debug, Deserialize)]
pub struct Learner {
    pub id: String,
    pub incarnation: u64,
    pub step: u64,
    pub stall_share: Option<f64>,
}

impl Job {
    /// # Errors
    /// `path` is no model of a mount that answers.
    pub fn find(path: &Path) -> Result<Job, Error> {
        let shown = path.display();
        let none = || Error::usage(format!("{shown} is not the directory of a model in a mount"));
        let found = if path.is_symlink() { fs::canonicalize(path) } else { std::path::absolute(path) };
        let path: PathBuf =
            found.map_err(|error| none().caused_by(error).hint(EXAMPLE))?.components().collect();
        let (Some(parent), Some(_)) = (path.parent(), path.file_name()) else {
            return Err(none().hint(EXAMPLE));
        };
        let mount = match mountpoint::serving(parent) {
            Ok(mount) => mount,
            Err(why) => {
                return Err(match models(&path) {
                    Some(models) => none().hint(format!("{shown} is a mount; its models are {models}")),
                    None => none().caused_by(why).hint(EXAMPLE),
                });
            }
        };
        if path.join("learners").is_dir() {
            return Ok(Job(path));
        }
        let models = models(&mount).unwrap_or_default();
        Err(none().hint(format!("{} is a mount; its models are {models}", mount.display())))
    }

    /// The directory of a learner.
    pub fn learner(&self, name: &str) -> PathBuf {
        self.0.join("learners").join(name)
    }

    /// A learner joins.
    ///
    /// # Errors
    /// The name is taken, or no more learners may join.
    pub fn join(&self, name: &str) -> Result<(), Error> {
        let path = self.learner(name);
        let Err(error) = fs::create_dir(&path) else {
            attend(&path);
            return Ok(());
        };
        let shown = path.display();
        let hint = match error.raw_os_error() {
            Some(libc::EEXIST) => {
                let message = format!("a learner of the name {name} is in the job already");
                return Err(Error::new(message).hint(format!(
                    "give yours another name with --name PREFIX, or have it leave if nobody uses it: rmdir {shown}"
                )));
            }
            Some(libc::EINVAL | libc::ENAMETOOLONG) => {
                "--name takes letters, digits, -, _ and . (not in front), 64 of them with the rank".into()
            }
            Some(libc::EDQUOT) => "the job has as many learners as it may (control/max_learners)".into(),
            Some(libc::EACCES | libc::EPERM) => {
                "run the command as the owner of the mount, or mount with --umask 007 and --allow-other"
                    .into()
            }
            Some(libc::ENOTCONN | libc::ECONNABORTED) => DAEMON_ENDED.to_owned(),
            _ => format!("{}/error or the log of the mount may say why", self.0.display()),
        };
        Err(Error::new(format!("cannot join with mkdir {shown}")).caused_by(error).hint(hint))
    }

    /// A learner leaves; it may have left by itself.
    ///
    /// # Errors
    /// It stays, for a reason that is no end of the mount.
    pub fn leave(&self, name: &str) -> Result<(), Error> {
        match fs::remove_dir(self.learner(name)) {
            Ok(()) => Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENOTCONN | libc::ECONNABORTED) => Ok(()),
                _ => Err(Error::new(format!("learner {name} cannot leave")).caused_by(error)),
            },
        }
    }

    /// A learner leaves and joins again. What the mount learns late of its old process does not touch the new learner.
    ///
    /// # Errors
    /// As [`Self::join`].
    pub fn rejoin(&self, name: &str) -> Result<(), Error> {
        self.leave(name)?;
        let deadline = Instant::now() + LEAVE_TIMEOUT;
        while self.learner(name).is_dir() && Instant::now() < deadline {
            std::thread::sleep(LEAVE_CHECK_INTERVAL);
        }
        self.join(name)
    }

    /// Reads `status.json`. The call waits for as long as a mount hangs.
    ///
    /// # Errors
    /// It cannot be read, as when the daemon has ended.
    pub fn status(&self) -> io::Result<Status> {
        Ok(serde_json::from_str(&fs::read_to_string(self.0.join("status.json"))?)?)
    }
}

impl Status {
    /// A warning, if the first version will wait for more learners than `count` new ones.
    pub fn waits_for_more_than(&self, count: u32, shown: &str) -> Option<String> {
        let wanted: usize = self.control.get("learners")?.parse().ok()?;
        let there = self.learners.len() + count as usize;
        let waits = self.learners.is_empty() || self.state == "forming";
        (waits && there < wanted).then(|| {
            format!(
                "the job waits for {wanted} learners before its next version, and with {count} more it has {there}: \
                 start the others, or echo {there} > {shown}/control/learners"
            )
        })
    }
}

/// The names of the models of the mount on `path`.
fn models(path: &Path) -> Option<String> {
    let mount = mountpoint::serving(path).ok()?;
    let entries = fs::read_dir(mount).ok()?.filter_map(Result::ok);
    let directories = entries.filter(|entry| entry.path().is_dir());
    let mut names: Vec<_> = directories.map(|entry| entry.path().display().to_string()).collect();
    names.sort();
    Some(names.join(", "))
}

/// Opens the learner's `weights`. So the learner stays for as long as this process lives: its own process may take long
/// before it opens anything.
fn attend(learner: &Path) {
    // If the version is not here yet, it is enough to have asked.
    let _ = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(learner.join("weights"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(state: &str, learners: &str) -> Status {
        let text = format!(
            r#"{{"state":"{state}","version":3,"contributions":9,"x":1,
                "learners":[{learners}],"control":{{"learners":"4"}}}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn a_job_that_waits_for_more_is_said() {
        let one = r#"{"id":"a","incarnation":1,"step":2,"stall_share":null}"#;
        let said = status("forming", "").waits_for_more_than(2, "/m/x").unwrap();
        assert!(said.contains("waits for 4") && said.contains("echo 2 > /m/x/control/learners"), "{said}");
        assert!(status("forming", one).waits_for_more_than(3, "").is_none());
        assert!(status("running", one).waits_for_more_than(1, "").is_none(), "a running job goes on");
        assert!(status("running", "").waits_for_more_than(1, "").is_some(), "all have left");
    }

    #[test]
    fn what_is_no_model_of_a_mount_is_refused() {
        for path in ["/", "/tmp", "/no/such/thing"] {
            let error = Job::find(Path::new(path)).unwrap_err();
            assert!(error.usage && error.message.contains(path) && error.hint.is_some(), "{error:?}");
        }
    }
}
