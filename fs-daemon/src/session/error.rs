//! The error of a call: an errno for the program, a sentence for people.

use libmodelio::contributor::ContributeError;
use libmodelio::tracker::WriteRefused;
use libmodelio::vocabulary::shard_error::ShardError;
use parking_lot::Mutex;

/// Why a call fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CallError {
    /// The errno that the program sees.
    pub errno: i32,
    /// The text for the log and the learner's `error`.
    pub message: String,
}

/// Result of a call.
pub type CallResult<T> = Result<T, CallError>;

/// Called once with the outcome of a call, perhaps from another thread.
pub type Done<T> = Box<dyn FnOnce(CallResult<T>) + Send>;

impl CallError {
    /// An errno with its sentence.
    pub fn new(errno: i32, message: impl Into<String>) -> CallError {
        CallError { errno, message: message.into() }
    }

    /// The requested thing does not exist, or no longer.
    pub fn not_found() -> CallError {
        CallError::new(libc::ENOENT, "no such file")
    }

    /// Whether the error is ordinary and not worth a line in the log.
    pub fn is_quiet(&self) -> bool {
        matches!(
            self.errno,
            libc::ENOENT
                | libc::EAGAIN
                | libc::ESTALE
                | libc::ENODATA
                | libc::ENOTDIR
                | libc::ERANGE
                | libc::EOPNOTSUPP
        )
    }
}

impl From<ShardError> for CallError {
    fn from(error: ShardError) -> CallError {
        CallError::new(error.errno() as i32, error.to_string())
    }
}

impl From<WriteRefused> for CallError {
    fn from(refused: WriteRefused) -> CallError {
        CallError::new(refused.errno() as i32, refused.to_string())
    }
}

impl From<ContributeError> for CallError {
    fn from(error: ContributeError) -> CallError {
        CallError::new(error.errno() as i32, error.to_string())
    }
}

/// The text of the last refusal of a learner's calls.
///
/// A program that fails closes its files on the way out, and such a close may succeed. So the text stays until a
/// contribution has been taken in which no call was refused.
#[derive(Default)]
pub struct LastRefusal(Mutex<Last>);

#[derive(Default)]
struct Last {
    text: Option<String>,
    /// Why a call failed that no contribution was refused by.
    explained: Option<String>,
    /// Some call of the open contribution was refused.
    in_open: bool,
}

impl LastRefusal {
    /// A call was refused. `is_open`: the contribution that it was part of goes on.
    pub fn note(&self, error: &CallError, is_open: bool) {
        if !error.is_quiet() {
            *self.0.lock() = Last { text: Some(error.message.clone()), explained: None, in_open: is_open };
        }
    }

    /// Says why a call failed, however ordinary its errno is. No contribution was refused, and the text of one that was
    /// stays before it.
    pub fn explain(&self, error: &CallError) {
        self.0.lock().explained = Some(error.message.clone());
    }

    /// A contribution ended without a refusal of its end. `taken`: something was written.
    pub fn ended(&self, taken: bool) {
        let mut last = self.0.lock();
        if taken && !last.in_open {
            (last.text, last.explained) = (None, None);
        }
        last.in_open = false;
    }

    /// The text, if there is one.
    pub fn text(&self) -> Option<String> {
        let last = self.0.lock();
        let texts: Vec<&str> =
            [&last.text, &last.explained].into_iter().flatten().map(String::as_str).collect();
        (!texts.is_empty()).then(|| texts.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_stays_until_a_contribution_without_one() {
        let last = LastRefusal::default();
        let refused = CallError::new(libc::EFBIG, "too long");
        last.note(&refused, true);
        last.ended(true);
        assert_eq!(last.text().as_deref(), Some("too long"), "its program has only closed the file");
        last.ended(false);
        assert!(last.text().is_some(), "nothing was taken");
        last.ended(true);
        assert_eq!(last.text(), None);
        last.note(&refused, false);
        last.ended(true);
        assert_eq!(last.text(), None, "the refusal was the end of its contribution");
        last.note(&CallError::not_found(), false);
        assert_eq!(last.text(), None, "of no interest");
    }

    #[test]
    fn why_a_lookup_failed_is_told_and_hides_no_refusal() {
        let last = LastRefusal::default();
        let why = CallError::new(libc::ENOENT, "it is not known");
        last.explain(&why);
        assert_eq!(last.text().as_deref(), Some("it is not known"));
        last.note(&CallError::new(libc::EINVAL, "a NaN"), false);
        last.explain(&why);
        assert_eq!(last.text().as_deref(), Some("a NaN\nit is not known"));
    }
}
