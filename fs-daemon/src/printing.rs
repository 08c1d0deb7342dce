//! What commands print: `println!`, `print!`, `eprintln!` and `eprint!` of this crate, which hide those of `std`.
//!
//! Those of `std` panic when the reader of a pipe has gone, as `head` does when it has seen enough. That is no error here.
//! Any other error, such as a full disk's, is said on stderr.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write as _};

/// Prints to stdout.
pub fn out(text: Arguments<'_>) {
    let mut stdout = io::stdout().lock();
    if let Err(error) = stdout.write_fmt(text).and_then(|()| stdout.flush())
        && error.kind() != ErrorKind::BrokenPipe
    {
        err(format_args!("gradfs: error: cannot print to stdout: {error}\n"));
    }
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
