//! `gradfs trace`: a timeline of what a mount does, recorded for some seconds and written as JSON for Perfetto.
//!
//! The daemon records while the file [`TRACE_FILE`] of the mount is open, and the first read ends that. So a trace ends
//! with this command, however that ends.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::mountpoint;
use crate::progress;
use crate::session::trace::TRACE_FILE;
use crate::signals::Interrupt;

/// The longest trace.
const MAX_LENGTH: Duration = Duration::from_secs(3600);
/// Longest wait for a trace that has just been closed: the kernel tells of a close a moment later.
const MAX_CLOSING: Duration = Duration::from_secs(1);
/// How often it is looked whether a signal has come.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// As many bytes are read at once.
const PIECE: usize = 1 << 20;

/// The length of a trace from a command line.
///
/// # Errors
/// Why it is none.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds
        .filter(|length| !length.is_zero() && *length <= MAX_LENGTH)
        .ok_or_else(|| format!("a number of seconds above 0 and up to {} is needed", MAX_LENGTH.as_secs()))
}

/// Records the mount on `mountpoint` for so long, and writes what it did to `output`.
///
/// # Errors
/// When nothing is recorded, or it cannot be written. `output` is then as it was.
pub fn run(mountpoint: &Path, length: Duration, output: &Path) -> Result<(), Error> {
    // Before there are threads.
    let interrupt = Interrupt::install()?;
    let mountpoint = mountpoint::serving(mountpoint)?;
    let shown = mountpoint.display();
    let mut trace = begin(&mountpoint)?;
    let mut target = Target::open(output)?;
    let began = Instant::now();
    let progress =
        progress::bar(progress::SECONDS, length.as_secs(), format!("tracing {shown} (Ctrl-C ends it early)"));
    while began.elapsed() < length && interrupt.why().is_none() {
        progress.set_position(began.elapsed().as_secs());
        std::thread::sleep(SIGNAL_CHECK_INTERVAL.min(length.saturating_sub(began.elapsed())));
    }
    progress.finish_and_clear();
    let took = began.elapsed().min(length);
    let (bytes, lost) = copy(&mut trace, &mut target, &mountpoint)?;
    target.finish()?;
    let output = output.display();
    println!(
        "gradfs: traced {shown} for {:.1} s: {output}, {bytes} bytes; open it in https://ui.perfetto.dev",
        took.as_secs_f64()
    );
    if lost > 0 {
        eprintln!(
            "gradfs: warning: {lost} events of the beginning are not in it, as newer ones took their place"
        );
        eprintln!("gradfs: hint: trace for a shorter time");
    }
    Ok(())
}

/// Opens the trace of a mount, which begins it.
fn begin(mountpoint: &Path) -> Result<File, Error> {
    let path = mountpoint.join(TRACE_FILE);
    let deadline = Instant::now() + MAX_CLOSING;
    let error = loop {
        match mountpoint::opened(&path) {
            Ok(file) => return Ok(file),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline => {
                std::thread::sleep(SIGNAL_CHECK_INTERVAL);
            }
            Err(error) => break error,
        }
    };
    let hint = match error.raw_os_error() {
        Some(libc::EBUSY) => "one trace of a mount runs at a time: wait until the other one has ended",
        Some(libc::EACCES | libc::EPERM) => "run the command as the owner of the mount",
        Some(libc::ENOENT) => "its daemon is of an older release, which cannot trace",
        _ => "see the log of the mount",
    };
    Err(Error::new(format!("no trace of {} can begin", mountpoint.display())).caused_by(error).hint(hint))
}

/// Ends the trace and copies it. Returns its length, and how many events it has lost.
fn copy(trace: &mut File, target: &mut Target, mountpoint: &Path) -> Result<(u64, u64), Error> {
    let mut piece = vec![0; PIECE];
    let (mut bytes, mut lost) = (0, 0);
    loop {
        let failed =
            |error| Error::new(format!("the trace of {} is lost", mountpoint.display())).caused_by(error);
        let hint = "the daemon of the mount may have ended; its log says why";
        let read = trace.read(&mut piece).map_err(|error| failed(error).hint(hint))?;
        if bytes == 0 {
            lost = lost_events(&piece[..read]);
        }
        if read == 0 {
            return Ok((bytes, lost));
        }
        target.write(&piece[..read])?;
        bytes += read as u64;
    }
}

/// The number of lost events in the head of the document.
fn lost_events(head: &[u8]) -> u64 {
    const KEY: &str = "\"lost_events\":";
    let head = String::from_utf8_lossy(&head[..head.len().min(512)]);
    let digits = head.split_once(KEY).map_or("", |(_, rest)| rest.trim_start());
    digits.split(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

/// Where a trace goes. A file gets its name only when all is written.
struct Target {
    path: PathBuf,
    /// The file that is written, if it is not the one of that name.
    part: Option<PathBuf>,
    file: File,
}

impl Target {
    fn open(path: &Path) -> Result<Target, Error> {
        let failed = |error: io::Error| {
            let hint = "name another file with --output";
            Error::new(format!("cannot write {}", path.display())).caused_by(error).hint(hint)
        };
        // A device or a pipe is written as it is. A link leads to a file that is to be replaced.
        let kind = fs::metadata(path).map(|of| of.file_type());
        if kind.as_ref().is_ok_and(|kind| !kind.is_file()) {
            let file = OpenOptions::new().write(true).open(path).map_err(failed)?;
            return Ok(Target { path: path.to_owned(), part: None, file });
        }
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let name = path.file_name().ok_or_else(|| failed(io::ErrorKind::IsADirectory.into()))?;
        let mut part = name.to_owned();
        part.push(format!(".part-{}", std::process::id()));
        let part = path.with_file_name(part);
        let file = OpenOptions::new().write(true).create_new(true).open(&part).map_err(failed)?;
        Ok(Target { path, part: Some(part), file })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let written = self.file.write_all(bytes);
        written.map_err(|error| self.failed(error))
    }

    fn failed(&self, error: io::Error) -> Error {
        Error::new(format!("cannot write {}", self.path.display())).caused_by(error)
    }

    fn finish(mut self) -> Result<(), Error> {
        let Some(part) = &self.part else { return Ok(()) };
        fs::rename(part, &self.path).map_err(|error| self.failed(error))?;
        self.part = None;
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some(part) = &self.part {
            // The command has failed anyway.
            let _ = fs::remove_file(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_a_number_of_seconds() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(seconds("3600"), Ok(MAX_LENGTH));
        for wrong in ["", "0", "-1", "NaN", "inf", "1e300", "3601", "10s"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn lost_events_are_read_from_the_head() {
        assert_eq!(lost_events(b"{\"otherData\":{\"began\":1.5,\"lost_events\":17,\"x\":1}}"), 17);
        assert_eq!(lost_events(b"{}"), 0);
    }

    #[test]
    fn a_file_is_replaced_when_all_is_written_and_else_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace.json");
        let mut target = Target::open(&path).unwrap();
        target.write(b"one").unwrap();
        assert!(!path.exists());
        target.finish().unwrap();
        let mut other = Target::open(&path).unwrap();
        other.write(b"other").unwrap();
        drop(other);
        assert_eq!(fs::read(&path).unwrap(), b"one");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("trace.json", &link).unwrap();
        let mut linked = Target::open(&link).unwrap();
        linked.write(b"two").unwrap();
        linked.finish().unwrap();
        assert_eq!(
            (fs::read(&path).unwrap(), fs::read_dir(dir.path()).unwrap().count()),
            (b"two".to_vec(), 2)
        );
        assert!(link.is_symlink());
        assert!(Target::open(dir.path()).is_err() && Target::open(&dir.path().join("no/x")).is_err());
    }
}
