//! Passes on the lines that learners print, with the rank before each (edge module).

use std::io::{self, BufRead as _, BufReader, PipeReader, PipeWriter, Read as _, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

/// A longer line is passed on in pieces.
const LONGEST_LINE: u64 = 64 << 10;
/// Enough for a thread that copies lines: there are two for each process.
const STACK: usize = 128 << 10;

/// Passes lines on until the streams end.
pub struct Output {
    open: Sender<()>,
    ended: Receiver<()>,
    lines: Arc<Lines>,
}

/// Counts lines: those of which the writing has begun, and those that are written.
#[derive(Default)]
struct Lines {
    begun: AtomicU64,
    written: AtomicU64,
}

impl Output {
    pub fn new() -> Output {
        let (open, ended) = channel();
        Output { open, ended, lines: Arc::default() }
    }

    /// The streams for a process of this rank.
    ///
    /// # Errors
    /// No more descriptors or threads.
    pub fn streams(&self, rank: u32) -> io::Result<(PipeWriter, PipeWriter)> {
        let (from_out, out) = io::pipe()?;
        let (from_err, err) = io::pipe()?;
        self.copy(rank, from_out, io::stdout)?;
        self.copy(rank, from_err, io::stderr)?;
        Ok((out, err))
    }

    fn copy<W: Write + 'static>(&self, rank: u32, from: PipeReader, to: fn() -> W) -> io::Result<()> {
        let (open, lines) = (self.open.clone(), Arc::clone(&self.lines));
        let copies = move || {
            // A reader that is gone is learnt by the process with its next line, by EPIPE.
            let _ = copy_lines(from, to, format!("[{rank}] ").as_bytes(), &lines);
            drop(open);
        };
        thread::Builder::new().name(format!("output-{rank}")).stack_size(STACK).spawn(copies).map(drop)
    }

    /// Waits until all lines are passed on. No line for as long as `patience` ends the wait, too: whoever a process has
    /// left behind may hold its streams for long. A reader of ours that is slow has sixty times as long for each line.
    pub fn finish(self, patience: Duration) {
        drop(self.open);
        let (mut seen, mut waited) = (0, 0);
        // Nothing is ever sent: it ends when the last sender is gone.
        while self.ended.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
            let written = self.lines.written.load(Ordering::Relaxed);
            let is_writing = self.lines.begun.load(Ordering::Relaxed) != written;
            waited = if written == seen { waited + 1 } else { 0 };
            if waited > 0 && !is_writing || waited >= 60 {
                return;
            }
            seen = written;
        }
    }
}

fn copy_lines<W: Write>(
    from: impl io::Read,
    to: impl Fn() -> W,
    prefix: &[u8],
    lines: &Lines,
) -> io::Result<()> {
    let mut from = BufReader::new(from);
    loop {
        // One write a line, so that lines of several processes do not mix.
        let mut line = prefix.to_vec();
        if from.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        lines.begun.fetch_add(1, Ordering::Relaxed);
        let mut to = to();
        let written = to.write_all(&line).and_then(|()| to.flush());
        lines.written.fetch_add(1, Ordering::Relaxed);
        written?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn each_line_has_the_prefix_and_an_end() {
        struct Into<'a>(&'a RefCell<Vec<u8>>);
        impl Write for Into<'_> {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.borrow_mut().write(bytes)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let written = RefCell::default();
        let long = "x".repeat(LONGEST_LINE as usize + 1);
        copy_lines(format!("a\n\n{long}\nb").as_bytes(), || Into(&written), b"[3] ", &Lines::default())
            .unwrap();
        let expected = format!("[3] a\n[3] \n[3] {}\n[3] x\n[3] b\n", &long[1..]);
        assert_eq!(String::from_utf8(written.take()).unwrap(), expected);
    }
}
