//! Errors out of what calls of the libraries return.

use nix::errno::Errno;

use super::VerbsError;

impl VerbsError {
    pub(super) fn last(doing: &'static str) -> VerbsError {
        VerbsError::Call { doing, errno: Errno::last() }
    }

    /// Checks a call that returns 0 or -1 with `errno`.
    pub(super) fn check(doing: &'static str, result: libc::c_int) -> Result<(), VerbsError> {
        if result == 0 { Ok(()) } else { Err(VerbsError::last(doing)) }
    }

    /// Checks a call that returns 0 or an error's number.
    pub(super) fn check_number(doing: &'static str, result: libc::c_int) -> Result<(), VerbsError> {
        match result {
            0 => Ok(()),
            -1 => Err(VerbsError::last(doing)),
            number => Err(VerbsError::Call { doing, errno: Errno::from_raw(number.abs()) }),
        }
    }
}
