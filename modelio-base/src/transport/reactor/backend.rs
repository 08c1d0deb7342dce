//! The backend of a reactor: io_uring, or plain sockets and epoll if io_uring cannot be used. It is chosen once, at
//! the start, and the reason is logged.

use std::fmt;

use nix::errno::Errno;
use strum::{EnumString, VariantNames};

/// The configured choice. Read from text as `auto`, `uring` or `poll`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumString, VariantNames)]
#[strum(serialize_all = "lowercase")]
pub enum Choice {
    /// io_uring if it can be used.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Plain sockets and epoll.
    Poll,
}

/// The backend in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    /// io_uring.
    Uring,
    /// Plain sockets and epoll.
    Poll {
        /// Why it is not io_uring.
        because: NotUring,
    },
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Backend::Uring => f.write_str("io_uring"),
            Backend::Poll { because } => write!(f, "epoll ({because})"),
        }
    }
}

/// Why io_uring is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotUring {
    /// The configuration excludes it.
    #[error("as configured")]
    Configured,
    /// The kernel does not have it, or a filter hides it.
    #[error("io_uring is not there: {0}, by the kernel or a seccomp filter")]
    Absent(Errno),
    /// An administrator has turned it off.
    #[error("io_uring is turned off: sysctl kernel.io_uring_disabled is {0}")]
    TurnedOff(u8),
    /// io_uring is denied, though the sysctl allows it.
    #[error("io_uring is denied: {0}, probably by a seccomp filter")]
    Denied(Errno),
    /// The kernel's io_uring lacks what is needed here, which Linux 6.1 has.
    #[error("io_uring lacks {0}, which Linux 6.1 has")]
    TooOld(&'static str),
    /// Something else, such as a limit on locked memory.
    #[error("io_uring fails: {0}")]
    Failed(Errno),
}

impl NotUring {
    /// Made from the errno of creating or entering a ring, and from the text of the sysctl
    /// `kernel.io_uring_disabled`.
    pub(super) fn from_errno(errno: Errno, sysctl: Option<&str>) -> NotUring {
        let disabled = sysctl.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        match errno {
            Errno::ENOSYS => NotUring::Absent(errno),
            Errno::EPERM | Errno::EACCES if disabled > 0 => NotUring::TurnedOff(disabled),
            Errno::EPERM | Errno::EACCES => NotUring::Denied(errno),
            Errno::EINVAL => NotUring::TooOld("its single-issuer mode"),
            _ => NotUring::Failed(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_distinguished() {
        let because = |errno, sysctl| NotUring::from_errno(errno, sysctl);
        assert_eq!(because(Errno::EPERM, Some("2\n")), NotUring::TurnedOff(2));
        assert_eq!(because(Errno::EPERM, Some("0\n")), NotUring::Denied(Errno::EPERM));
        assert_eq!(because(Errno::EPERM, None), NotUring::Denied(Errno::EPERM));
        assert_eq!(because(Errno::ENOSYS, None), NotUring::Absent(Errno::ENOSYS));
        assert_eq!(because(Errno::ENOMEM, Some("0")), NotUring::Failed(Errno::ENOMEM));
        assert!(because(Errno::EINVAL, None).to_string().contains("Linux 6.1"));
    }

    #[test]
    fn choices_are_text() {
        let choices: Vec<Choice> = Choice::VARIANTS.iter().map(|text| text.parse().unwrap()).collect();
        assert_eq!(choices, [Choice::Auto, Choice::Uring, Choice::Poll]);
        assert!("epoll".parse::<Choice>().is_err());
    }
}
