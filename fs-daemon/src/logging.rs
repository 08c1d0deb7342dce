//! Where log lines go and which are shown: stderr, warnings only, unless `-v` or `GRADFS_LOG` says more.

use std::io::{IsTerminal, stderr};

use tracing_subscriber::EnvFilter;

use crate::error::Error;

/// Names the filter, in tracing's syntax (`debug`, `warn,gradfs=trace`); beats `-v`.
pub const LOG_VARIABLE: &str = "GRADFS_LOG";

/// Starts logging. `verbose` counts the `-v` flags: none warns, one informs, two debug, three trace.
pub fn init(verbose: u8) -> Result<(), Error> {
    let asked = std::env::var(LOG_VARIABLE).ok().filter(|text| !text.trim().is_empty());
    let filter = filter(verbose, asked.as_deref())?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        // A log that nobody can read any more must not take a thread of the mount with it.
        .log_internal_errors(false)
        .with_target(verbose > 1)
        .try_init()
        .map_err(|e| Error::new("cannot start logging").caused_by(e))
}

fn filter(verbose: u8, asked: Option<&str>) -> Result<EnvFilter, Error> {
    let text = match (asked, verbose) {
        (Some(text), _) => text,
        // The binding's own chatter is of use only to who asks for everything; what matters of it is
        // reported by us.
        // Nor is it an error that a reply cannot be sent, which is all that its module `reply` complains of:
        // the program that waited for it was killed, and the kernel has forgotten the request.
        (None, 0) => "warn,fuser=error,fuser::reply=off",
        (None, 1) => "info,fuser=warn",
        (None, 2) => "debug,fuser=info",
        (None, _) => "trace",
    };
    EnvFilter::builder().parse(text).map_err(|e| {
        Error::usage(format!("{LOG_VARIABLE}={text} is no log filter"))
            .caused_by(e)
            .hint("use error, warn, info, debug or trace, or module=level pairs separated by commas")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels() {
        assert!(filter(0, None).unwrap().to_string().contains("warn"));
        assert!(filter(1, None).unwrap().to_string().contains("info"));
        assert!(filter(2, None).unwrap().to_string().contains("debug"));
        assert_eq!(filter(9, None).unwrap().to_string(), "trace");
    }

    #[test]
    fn replies_that_nobody_waits_for_are_shown_to_who_asks() {
        let shown = |verbose, asked| {
            let log = tracing_subscriber::fmt().with_env_filter(filter(verbose, asked).unwrap()).finish();
            tracing::subscriber::with_default(log, || {
                // The target that the log bridge gives: the module that logs.
                let reply = tracing::enabled!(target: "fuser::reply", tracing::Level::ERROR);
                (reply, tracing::enabled!(target: "fuser::session", tracing::Level::ERROR))
            })
        };
        assert_eq!(shown(0, None), (false, true));
        for (verbose, asked) in [(1, None), (2, None), (3, None), (0, Some("warn"))] {
            assert_eq!(shown(verbose, asked), (true, true), "{verbose} {asked:?}");
        }
    }

    #[test]
    fn variable_beats_flags_and_nonsense_is_refused() {
        assert_eq!(filter(2, Some("error")).unwrap().to_string(), "error");
        let error = filter(0, Some("gradfs=loud")).unwrap_err();
        assert!(error.message.contains("GRADFS_LOG=gradfs=loud"), "{}", error.message);
        assert_eq!(error.exit_code(), 2);
    }
}
