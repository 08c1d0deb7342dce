//! What commands print: `println!`, `print!`, `eprintln!` and `eprint!` of this crate, which hide those of `std`.
//!
//! Those of `std` panic when the reader of a pipe has gone, as `head` does when it has seen enough. That is no error here.
//! Any other error, such as a full disk's, is said on stderr once, and the command fails.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};

/// Something could not be printed.
static FAILED: AtomicBool = AtomicBool::new(false);

/// Prints to stdout.
pub fn out(text: Arguments<'_>) {
    let mut stdout = io::stdout().lock();
    printed(stdout.write_fmt(text).and_then(|()| stdout.flush()));
}

/// Something was printed to stdout, or was not.
pub fn printed(outcome: io::Result<()>) {
    if let Err(error) = outcome
        && error.kind() != ErrorKind::BrokenPipe
        && !fail()
    {
        err(format_args!("gradfs: error: cannot print: {error}\n"));
    }
}

/// Something could not be printed. Returns whether that was so before.
pub fn fail() -> bool {
    FAILED.swap(true, Ordering::Relaxed)
}

/// Whether something could not be printed to stdout, and its reader has not gone.
pub fn has_failed() -> bool {
    FAILED.load(Ordering::Relaxed)
}

/// Prints to stderr. If that fails, there is nobody left to tell.
pub fn err(text: Arguments<'_>) {
    let _ = io::stderr().lock().write_fmt(text);
}

macro_rules! print {
    ($($text:tt)*) => { $crate::printing::out(format_args!($($text)*)) };
}

macro_rules! println {
    ($($text:tt)*) => { $crate::printing::out(format_args!("{}\n", format_args!($($text)*))) };
}

macro_rules! eprint {
    ($($text:tt)*) => { $crate::printing::err(format_args!($($text)*)) };
}

macro_rules! eprintln {
    ($($text:tt)*) => { $crate::printing::err(format_args!("{}\n", format_args!($($text)*))) };
}
