//! The error of a call: an errno for the program, a sentence for people.

use libmodelio::contributor::ContributeError;
use libmodelio::tracker::WriteRefused;
use libmodelio::vocabulary::shard_error::ShardError;

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
        let errno = match &error {
            ShardError::UnknownLearner(_) => libc::ENOTCONN,
            ShardError::NameTaken(_) => libc::EEXIST,
            ShardError::TooManyLearners(_) => libc::EDQUOT,
            ShardError::StepOutOfOrder { .. }
            | ShardError::BadBlock { .. }
            | ShardError::OutOfRange
            | ShardError::Scattered(_)
            | ShardError::NonFinite(_) => libc::EINVAL,
            ShardError::Stopped { .. } => libc::ECANCELED,
            ShardError::TimedOut(_) => libc::ETIMEDOUT,
            ShardError::Interrupted => libc::EINTR,
            ShardError::Unreachable | ShardError::Lost(_) => libc::EIO,
            ShardError::OutOfMemory(_) => libc::ENOMEM,
            ShardError::OutOfFiles(_) => libc::ENFILE,
            ShardError::NotAllowed(_) => libc::EACCES,
        };
        CallError::new(errno, error.to_string())
    }
}

impl From<WriteRefused> for CallError {
    fn from(refused: WriteRefused) -> CallError {
        let errno = match refused {
            WriteRefused::PastEnd { .. } => libc::EFBIG,
            WriteRefused::Rewrite(_) | WriteRefused::Sealed => libc::EINVAL,
        };
        CallError::new(errno, refused.to_string())
    }
}

impl From<ContributeError> for CallError {
    fn from(error: ContributeError) -> CallError {
        match error {
            ContributeError::Shard(error) => error.into(),
            ContributeError::Refused(refused) => refused.into(),
            ContributeError::HalfElement(_)
            | ContributeError::PartOfAveraged(_)
            | ContributeError::Writing => CallError::new(libc::EINVAL, error.to_string()),
            ContributeError::Busy => CallError::new(libc::EBUSY, error.to_string()),
            ContributeError::Dropped | ContributeError::Counts(_) | ContributeError::MayCount(_) => {
                CallError::new(libc::EIO, error.to_string())
            }
        }
    }
}
