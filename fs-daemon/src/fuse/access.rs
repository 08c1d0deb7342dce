//! Checks whether this process may mount, before a model is loaded.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt as _;

use nix::unistd::geteuid;

use crate::error::Error;

const DEVICE: &str = "/dev/fuse";
const CONF: &str = "/etc/fuse.conf";
/// The line of [`CONF`] that lets users mount for others.
const PERMISSION: &str = "user_allow_other";

/// Checks the device, and for a mount that others may use without root the permission for it.
///
/// # Errors
/// Fails with the obstacle, and with what root can do about it.
pub fn check(allow_other: bool) -> Result<(), Error> {
    open_device().map_err(|error| {
        let (what, hint) = device_fault(&error);
        Error::new(format!("cannot mount: {what}")).caused_by(error).hint(hint)
    })?;
    // If the file cannot be read, fusermount3 still can read it, and decides.
    let conf = fs::read_to_string(CONF).unwrap_or_else(|_| PERMISSION.into());
    if allow_other && !geteuid().is_root() && !lets_users_allow_others(&conf) {
        return Err(
            Error::new(format!("--allow-other: {CONF} does not permit it to users")).hint(permit_others())
        );
    }
    Ok(())
}

/// The remedy for a mount that failed.
pub fn hint(error: &io::Error) -> String {
    if error.to_string().contains(PERMISSION) {
        return permit_others();
    }
    "gradfs needs /dev/fuse, and root or the fusermount3 program (Debian: apt-get install fuse3)".into()
}

fn permit_others() -> String {
    format!("add a line with {PERMISSION} to {CONF} (as root), or leave --allow-other out")
}

fn open_device() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(DEVICE)
}

fn device_fault(error: &io::Error) -> (String, &'static str) {
    match error.raw_os_error() {
        Some(libc::ENOENT) => (
            format!("there is no {DEVICE}"),
            "load the module (as root: modprobe fuse), or start the container with --device /dev/fuse",
        ),
        Some(libc::EACCES | libc::EPERM) => {
            let user = geteuid();
            let rights = fs::metadata(DEVICE).map(|device| {
                let (mode, owner, group) = (device.mode() & 0o7777, device.uid(), device.gid());
                format!(" (mode {mode:04o}, owner {owner}, group {group})")
            });
            (
                format!("user {user} may not open {DEVICE}{}", rights.unwrap_or_default()),
                "as root: chmod 0666 /dev/fuse; a container has to be started with --device /dev/fuse",
            )
        }
        _ => (format!("{DEVICE} cannot be opened"), "load the module (as root: modprobe fuse)"),
    }
}

fn lets_users_allow_others(conf: &str) -> bool {
    conf.lines().any(|line| line.split('#').next().is_some_and(|line| line.trim() == PERMISSION))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_line_itself_permits_others() {
        for conf in ["user_allow_other", "mount_max = 9\n  user_allow_other  # for jobs\n"] {
            assert!(lets_users_allow_others(conf), "{conf:?}");
        }
        for conf in
            ["", "#user_allow_other", "# user_allow_other\nuser_allow_others\n", "no user_allow_other"]
        {
            assert!(!lets_users_allow_others(conf), "{conf:?}");
        }
    }

    #[test]
    fn a_refusal_of_fusermount_gets_the_hint_that_helps() {
        let said =
            "fusermount3: option allow_other only allowed if 'user_allow_other' is set in /etc/fuse.conf";
        assert!(hint(&io::Error::other(said)).contains("add a line with user_allow_other to /etc/fuse.conf"));
        assert!(hint(&io::Error::other("fusermount3: fuse device not found")).contains("fuse3"));
    }
}
