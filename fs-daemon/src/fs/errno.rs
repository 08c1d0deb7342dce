//! The errors of filesystem calls: an errno for the program, a sentence for the log.

use libmodelio::contributor::ContributeError;
use libmodelio::tracker::WriteRefused;
use libmodelio::transport::ShardError;

/// Why a call fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct FsError {
    /// What the program sees.
    pub errno: i32,
    /// What the log says.
    pub message: String,
}

/// Result of a filesystem call.
pub type FsResult<T> = Result<T, FsError>;

impl FsError {
    /// An errno with its sentence.
    pub fn new(errno: i32, message: impl Into<String>) -> FsError {
        FsError { errno, message: message.into() }
    }

    /// No such file.
    pub fn not_found() -> FsError {
        FsError::new(libc::ENOENT, "no such file")
    }

    /// The inode shows an older version than the caller must see: the kernel looks the name up again.
    pub fn look_again() -> FsError {
        FsError::new(libc::ESTALE, "a newer version is out")
    }

    /// Whether it belongs to everyday life and is not worth a line in the log.
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

impl From<ShardError> for FsError {
    fn from(error: ShardError) -> FsError {
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
        FsError::new(errno, error.to_string())
    }
}

impl From<WriteRefused> for FsError {
    fn from(refused: WriteRefused) -> FsError {
        let errno = match refused {
            WriteRefused::PastEnd { .. } => libc::EFBIG,
            WriteRefused::Rewrite(_) | WriteRefused::Sealed => libc::EINVAL,
        };
        FsError::new(errno, refused.to_string())
    }
}

impl From<ContributeError> for FsError {
    fn from(error: ContributeError) -> FsError {
        match error {
            ContributeError::Shard(error) => error.into(),
            ContributeError::Refused(refused) => refused.into(),
            ContributeError::HalfElement(_) => FsError::new(libc::EINVAL, error.to_string()),
            ContributeError::Busy => FsError::new(libc::EBUSY, error.to_string()),
            ContributeError::Dropped => FsError::new(libc::EIO, error.to_string()),
        }
    }
}
