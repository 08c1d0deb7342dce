//! Errors as C sees them: a negative errno, and a text that the thread can ask for.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::io;
use std::time::Duration;

use libmodelio::vocabulary::controls::ControlError;
use libmodelio::{
    ClientError, ConnectError, ContributeError, RegistryError, SetError, ShardError, WriteRefused,
};
use nix::errno::Errno;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Why a call fails.
#[derive(Debug)]
pub(crate) struct Failure {
    pub errno: Errno,
    pub text: String,
}

pub(crate) type Outcome<T> = Result<T, Failure>;

impl Failure {
    pub(crate) fn new(errno: Errno, text: impl Into<String>) -> Failure {
        Failure { errno, text: text.into() }
    }

    pub(crate) fn invalid(text: impl Into<String>) -> Failure {
        Failure::new(Errno::EINVAL, text)
    }
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Failure {
        Failure::new(errno, errno.desc())
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::new(Errno::from_raw(error.raw_os_error().unwrap_or(Errno::EIO as i32)), error.to_string())
    }
}

impl From<ShardError> for Failure {
    fn from(error: ShardError) -> Failure {
        Failure::new(error.errno(), error.to_string())
    }
}

impl From<ContributeError> for Failure {
    fn from(error: ContributeError) -> Failure {
        Failure::new(error.errno(), error.to_string())
    }
}

impl From<WriteRefused> for Failure {
    fn from(error: WriteRefused) -> Failure {
        Failure::new(error.errno(), error.to_string())
    }
}

impl From<SetError> for Failure {
    fn from(error: SetError) -> Failure {
        match error {
            SetError::Refused(ControlError::Unknown(_)) => Failure::new(Errno::ENOENT, error.to_string()),
            SetError::Refused(_) => Failure::invalid(error.to_string()),
            SetError::Unanswered(error) => error.into(),
        }
    }
}

impl From<ConnectError> for Failure {
    fn from(error: ConnectError) -> Failure {
        let errno = match &error {
            ConnectError::Registry(RegistryError::NoModel(_) | RegistryError::Deleted(_)) => Errno::ENOENT,
            ConnectError::Registry(_) | ConnectError::Client(ClientError::Unreachable { .. }) => {
                Errno::EHOSTUNREACH
            }
            ConnectError::Client(ClientError::Start(_)) => Errno::ENOMEM,
            ConnectError::Client(ClientError::Record { .. } | ClientError::Transport { .. }) => {
                Errno::EPROTONOSUPPORT
            }
        };
        Failure::new(errno, error.to_string())
    }
}

/// The outcome as C's: a number, or a negative errno, whose text the thread keeps.
pub(crate) fn answer(outcome: Outcome<usize>) -> isize {
    match outcome {
        Ok(value) => value.cast_signed(),
        Err(Failure { errno, text }) => {
            let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
            LAST.with_borrow_mut(|last| *last = text);
            -(errno as isize)
        }
    }
}

/// [`answer`] of a call that counts nothing.
pub(crate) fn done(outcome: Outcome<()>) -> c_int {
    answer(outcome.map(|()| 0)) as c_int
}

pub(crate) fn timeout(milliseconds: u32) -> Duration {
    Duration::from_millis(milliseconds.into())
}

/// A string of C's.
///
/// # Safety
/// `text` is null, or a string that ends with a zero and does not change meanwhile.
pub(crate) unsafe fn string<'a>(text: *const c_char, what: &str) -> Outcome<&'a str> {
    if text.is_null() {
        return Err(Failure::invalid(format!("{what} is NULL")));
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| Failure::invalid(format!("{what} is not UTF-8")))
}

/// Stores a result of C's.
///
/// # Safety
/// `place` is null, or memory of its type that the caller may write.
pub(crate) unsafe fn store<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: the caller's promise. The place may hold anything before.
        unsafe { place.write(value) };
    }
}

/// Refuses to open what nobody could close.
pub(crate) fn check_place<T>(place: *mut T) -> Outcome<()> {
    if place.is_null() { Err(Failure::invalid("the place for the handle is NULL")) } else { Ok(()) }
}

/// The bytes of C's memory.
///
/// # Safety
/// `data` is null, or `size` bytes that do not change meanwhile.
pub(crate) unsafe fn bytes<'a>(data: *const u8, size: usize) -> Outcome<&'a [u8]> {
    match (data.is_null(), size) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Failure::invalid("the data is NULL")),
        _ if size > isize::MAX as usize => Err(Failure::invalid("the data is longer than memory can be")),
        // SAFETY: the caller's promise.
        _ => Ok(unsafe { std::slice::from_raw_parts(data, size) }),
    }
}

/// Why the thread's last call that failed did so. The text stays until its next call that fails. It is empty before the
/// first one.
#[unsafe(no_mangle)]
pub extern "C" fn modelio_error() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}

/// The version of the library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn modelio_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}
