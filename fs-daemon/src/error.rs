//! The error that a user of `gradfs` sees: the failure, the remedy, and the exit code.
//!
//! Errors inside the filesystem carry an errno and live with the code that answers the kernel; this
//! type is for the command line, where a person reads the text.

use std::error::Error as StdError;

use ps_backend::snapshot::SnapshotError;

use crate::shown::shown;

/// A failed command: the failure, the remedy, and the cause underneath.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// The failure, naming the offending thing.
    pub message: String,
    /// The remedy.
    pub hint: Option<String>,
    /// The cause, shown after the message.
    pub source: Option<Box<dyn StdError + Send + Sync>>,
    /// The command was used wrongly, as opposed to having failed: decides the exit code.
    pub usage: bool,
}

impl Error {
    /// The command was right and could not be carried out.
    pub fn new(message: impl Into<String>) -> Error {
        Error { message: message.into(), hint: None, source: None, usage: false }
    }

    /// The command or its configuration is wrong.
    pub fn usage(message: impl Into<String>) -> Error {
        Error { usage: true, ..Error::new(message) }
    }

    /// Adds what the user can do about it.
    pub fn hint(mut self, hint: impl Into<String>) -> Error {
        self.hint = Some(hint.into());
        self
    }

    /// Adds what to do where a job cannot go on from the newest snapshot of its own store.
    pub fn of_own_store(self, store: &str) -> Error {
        self.hint(format!(
            "gradfs snapshots {store} lists older ones: in place of --state, --from {store}#VERSION --snapshot-to {store} \
             goes on from one"
        ))
    }

    /// Adds where the text is from that is wrong.
    pub fn of(self, origin: &str) -> Error {
        Error { message: format!("{origin}: {}", self.message), ..self }
    }

    /// Adds the cause.
    pub fn caused_by(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Error {
        self.source = Some(source.into());
        self
    }

    /// 2 for wrong usage, 1 for a failure at run time.
    pub fn exit_code(&self) -> u8 {
        if self.usage { 2 } else { 1 }
    }
}

/// The hint where a mount has ended while a command reads from it.
pub const DAEMON_ENDED: &str =
    "the daemon of the mount has ended, and nothing was saved; its log says why it ended";

/// Turns a snapshot's fault into an error for the user of the command.
impl From<SnapshotError> for Error {
    fn from(error: SnapshotError) -> Error {
        let hint = match &error {
            SnapshotError::NoManifest(_) => "save it again: gradfs save MOUNT/NAME DIR",
            SnapshotError::Exists(_) => {
                "name another directory, or replace what is there by this snapshot with --replace"
            }
            SnapshotError::Occupied(_) => {
                "name another directory; --replace would remove it, and all files there with names as a snapshot's"
            }
            SnapshotError::Nested(_) => "name another directory",
            SnapshotError::Busy(_) => "name another directory, or wait until it has ended",
            SnapshotError::Replaced(_) => "try again when gradfs save has ended",
            SnapshotError::Damaged { .. } | SnapshotError::Tensors { .. } => {
                "nothing was changed; copy the snapshot again from where it was saved, or use another one"
            }
            SnapshotError::Format { .. } => "use the release that has saved it",
            SnapshotError::OtherModel(_) => "name the model that it is of, or leave it out",
            SnapshotError::File { error, .. }
                if matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED)) =>
            {
                DAEMON_ENDED
            }
            SnapshotError::Room { .. } => "free memory on the host that has the model, or use more shards",
            _ => return Error::new(error.to_string()),
        };
        Error::new(error.to_string()).hint(hint)
    }
}

/// The whole report, as printed on stderr: the message with its causes, then the hint. A peer's words may be among them.
pub fn report(error: &Error) -> String {
    // Further lines are indented: none of them looks like one of gradfs's own.
    let indented = |text: &str| text.lines().map(shown).collect::<Vec<_>>().join("\n  ");
    let mut text = format!("gradfs: error: {}", indented(&chain(error)));
    if let Some(hint) = &error.hint {
        text.push_str(&format!("\ngradfs: hint: {}", indented(hint)));
    }
    text
}

/// The message with its causes.
pub fn chain(error: &Error) -> String {
    let mut text = error.message.clone();
    let mut cause = StdError::source(error);
    while let Some(source) = cause {
        let said = source.to_string();
        // Many errors repeat their cause in their own text.
        if !text.ends_with(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        cause = source.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_names_message_cause_and_hint() {
        let error = Error::new("cannot read a.safetensors")
            .caused_by(std::io::Error::other("disk on fire"))
            .hint("use another disk");
        assert_eq!(
            report(&error),
            "gradfs: error: cannot read a.safetensors: disk on fire\ngradfs: hint: use another disk"
        );
        assert_eq!(error.exit_code(), 1);
        assert_eq!(Error::usage("x").exit_code(), 2);
        let refused = Error::new("refused").caused_by(std::io::Error::other("\u{1b}no\ngradfs: ready"));
        assert_eq!(report(&refused), "gradfs: error: refused: \\u{1b}no\n  gradfs: ready");
    }
}
