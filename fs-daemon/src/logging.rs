//! The destination and level of log lines: stderr, warnings only, unless `-v` or `GRADFS_LOG` says more.

use std::fs::{File, OpenOptions};
use std::io::{IsTerminal, Write, stderr};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use clap::Args;
use clap::builder::PossibleValuesParser;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::writer::{BoxMakeWriter, MakeWriter};

use crate::error::{self, Error};
use crate::shown::shown;

/// Names the filter, in tracing's syntax (`debug`, `warn,gradfs=trace`); beats `-v`.
pub const LOG_VARIABLE: &str = "GRADFS_LOG";

/// Options about the log, which all commands have.
#[derive(Args, Debug, Default)]
pub struct LogArgs {
    /// Say more: -v informs, -vv debugs (GRADFS_LOG takes a filter instead)
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = "Log")]
    pub verbose: u8,
    /// Append log lines to this file [default: stderr]
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "GRADFS_LOG_FILE",
        hide_env = true,
        help_heading = "Log"
    )]
    pub log_file: Option<PathBuf>,
    /// Lines for people, or one JSON object each
    #[arg(long, global = true, env = "GRADFS_LOG_FORMAT", hide_env = true, default_value = "text", ignore_case = true,
          value_parser = PossibleValuesParser::new(["text", "json"]), help_heading = "Log")]
    pub log_format: String,
}

/// The log that [`init`] has opened, for the last words of the process.
static LOG: OnceLock<Log> = OnceLock::new();

struct Log {
    file: Option<Arc<File>>,
    json: bool,
}

/// Starts logging. `plain` leaves colours out even where stderr is a terminal now.
///
/// # Errors
/// A filter that is none, or a file that cannot be opened.
pub fn init(args: &LogArgs, plain: bool) -> Result<(), Error> {
    let asked = std::env::var(LOG_VARIABLE).ok().filter(|text| !text.trim().is_empty());
    let filter = filter(args.verbose, asked.as_deref())?;
    let file = args.log_file.as_deref().map(open).transpose()?.map(Arc::new);
    let colours = file.is_none() && !plain && stderr().is_terminal();
    let json = args.log_format.eq_ignore_ascii_case("json");
    let writer = match &file {
        // A line is one write to a file that is opened to append: lines of several processes stay whole.
        Some(file) => BoxMakeWriter::new(Arc::clone(file)),
        None => BoxMakeWriter::new(stderr),
    };
    // JSON has control characters escaped already.
    let writer = Lines { writer, escapes: !json, colours };
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .with_ansi(colours)
        // A log that nobody can read any more must not take a thread of the mount with it.
        .log_internal_errors(false)
        .with_target(args.verbose > 1);
    let started = if json {
        lines.json().flatten_event(true).with_current_span(false).with_span_list(false).try_init()
    } else {
        lines.try_init()
    };
    started.map_err(|e| Error::new("cannot start logging").caused_by(e))?;
    let _ = LOG.set(Log { file, json });
    Ok(())
}

/// Makes writers of lines. Peers' words may be in a line, and must not look like another line, nor change a terminal.
struct Lines<W> {
    writer: W,
    escapes: bool,
    colours: bool,
}

impl<'a> MakeWriter<'a> for Lines<BoxMakeWriter> {
    type Writer = Lines<<BoxMakeWriter as MakeWriter<'a>>::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        Lines { writer: self.writer.make_writer(), escapes: self.escapes, colours: self.colours }
    }
}

impl<W: Write> Write for Lines<W> {
    /// The subscriber writes each line at once.
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        if !self.escapes {
            return self.writer.write(line);
        }
        let text = String::from_utf8_lossy(line);
        let text = text.strip_suffix('\n').unwrap_or(&text);
        let mut parts = text.split('\u{1b}');
        let mut escaped = parts.next().map(shown).unwrap_or_default().into_owned();
        for part in parts {
            escaped.push_str(if self.colours && is_colour(part) { "\u{1b}" } else { "\\u{1b}" });
            escaped.push_str(&shown(part));
        }
        escaped.push('\n');
        self.writer.write_all(escaped.as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.writer.flush()
    }
}

/// Whether this comes behind the escape of a colour, or of another look of letters.
fn is_colour(text: &str) -> bool {
    let codes =
        |rest: &str| rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';').starts_with('m');
    text.strip_prefix('[').is_some_and(codes)
}

/// Opens a log to append to it, and makes it if need be.
///
/// # Errors
/// The system's error, with the name of the file.
pub fn open(path: &Path) -> Result<File, Error> {
    OpenOptions::new().append(true).create(true).open(path).map_err(|e| {
        Error::new(format!("cannot open the log {}", path.display()))
            .caused_by(e)
            .hint("name another file with --log-file")
    })
}

/// Says why the command fails, on stderr. A log that is elsewhere has it too.
pub fn report_failure(error: &Error) {
    let log = LOG.get().filter(|_| tracing::enabled!(tracing::Level::ERROR));
    let in_lines = log.is_some_and(|log| log.json || log.file.is_some());
    if in_lines {
        let chain = error::chain(error);
        match &error.hint {
            Some(hint) => tracing::error!(hint, "{chain}"),
            None => tracing::error!("{chain}"),
        }
    }
    // A line of another form would disturb a program that reads JSON from stderr.
    let json_on_stderr = log.is_some_and(|log| log.json && log.file.as_deref().is_none_or(is_stderr));
    let said_there = log.and_then(|log| log.file.as_deref()).is_some_and(is_stderr);
    if !json_on_stderr && !said_there {
        eprintln!("{}", error::report(error));
    }
}

/// Whether stderr leads to `file`, as it does in the background.
fn is_stderr(file: &File) -> bool {
    let identity = |file: &File| file.metadata().map(|found| (found.dev(), found.ino())).ok();
    let of_stderr = std::os::fd::AsFd::as_fd(&stderr()).try_clone_to_owned().map(File::from);
    of_stderr.is_ok_and(|stderr| identity(&stderr).is_some() && identity(&stderr) == identity(file))
}

fn filter(verbose: u8, asked: Option<&str>) -> Result<EnvFilter, Error> {
    let text = match (asked, verbose) {
        (Some(text), _) => text,
        // The binding's own log lines help only a user who asks for everything; we report the important ones.
        // Its module `reply` complains only when a reply cannot be sent. That is no error: the program that
        // waited for it was killed, and the kernel has forgotten the request.
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
    fn text_of_strangers_stays_within_its_line_of_the_log() {
        let (mut reads, writes) = std::io::pipe().unwrap();
        for colours in [false, true] {
            let writes = writes.try_clone().unwrap();
            let writer = BoxMakeWriter::new(move || writes.try_clone().unwrap());
            let lines = tracing_subscriber::fmt()
                .with_writer(Lines { writer, escapes: true, colours })
                .with_ansi(colours)
                .finish();
            let peer = "a\n1970 ERROR b\r\u{1b}[2J";
            tracing::subscriber::with_default(
                lines,
                || tracing::warn!(peer, name = %peer, "turned away: {peer}"),
            );
        }
        drop(writes);
        let said = std::io::read_to_string(&mut reads).unwrap();
        assert_eq!(said.lines().count(), 2, "{said:?}");
        assert!(!said.contains('\r') && !said.contains("\u{1b}[2J"), "{said:?}");
        assert!(!said.lines().next().unwrap().contains('\u{1b}'), "{said:?}");
    }

    #[test]
    fn variable_beats_flags_and_nonsense_is_refused() {
        assert_eq!(filter(2, Some("error")).unwrap().to_string(), "error");
        let error = filter(0, Some("gradfs=loud")).unwrap_err();
        assert!(error.message.contains("GRADFS_LOG=gradfs=loud"), "{}", error.message);
        assert_eq!(error.exit_code(), 2);
    }
}
