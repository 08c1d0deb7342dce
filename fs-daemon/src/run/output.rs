//! Passes on the lines that learners print, with the rank before each (edge module).
//!
//! A process of its own does that. It is nobody's child and lives for as long as there are streams, so learners can print
//! when `gradfs run` is killed. It gets the streams over a socket, and answers each with 0 or an errno.

use std::io::{self, BufRead as _, BufReader, PipeReader, PipeWriter, Read as _, Write};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use libmodelio::transport::shm::Descriptors;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::SigSet;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, setpgid};

use crate::printing;
use crate::sys::fork::fork_single_threaded;

/// A longer line is passed on in pieces.
const LONGEST_LINE: u64 = 64 << 10;
/// Enough for a thread that copies lines: there are two for each process.
const STACK: usize = 128 << 10;
/// How long the last lines of processes that have ended may take.
const LAST_LINES: Duration = Duration::from_secs(1);
/// The request to end. Others have four bytes, the number of a stream.
const END: [u8; 1] = [0];

/// The process that passes lines on.
pub struct Output(Arc<OwnedFd>);

impl Output {
    /// Starts it. This process must have one thread.
    ///
    /// # Errors
    /// Those of socketpair(2) and fork(2).
    pub fn start() -> io::Result<Output> {
        let (ours, its) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        match fork_single_threaded()? {
            ForkResult::Parent { child } => {
                // Where ends of children are ignored, there is no status to take.
                let _ = waitpid(child, None);
                Ok(Output(Arc::new(ours)))
            }
            ForkResult::Child => {
                drop(ours);
                if let Ok(ForkResult::Child) = fork_single_threaded() {
                    serve(its);
                }
                std::process::exit(0)
            }
        }
    }

    /// The streams for a process of this rank.
    ///
    /// # Errors
    /// No more descriptors or threads, here or there.
    pub fn streams(&self, rank: u32) -> io::Result<(PipeWriter, PipeWriter)> {
        Ok((self.stream(2 * rank)?, self.stream(2 * rank + 1)?))
    }

    fn stream(&self, number: u32) -> io::Result<PipeWriter> {
        let (from, to) = io::pipe()?;
        send(self.0.as_raw_fd(), &number.to_le_bytes(), MsgFlags::MSG_NOSIGNAL)?;
        Descriptors::new(Arc::clone(&self.0)).send(number, from.as_fd()).map_err(io::Error::other)?;
        let mut errno = [0; 4];
        match recv(self.0.as_raw_fd(), &mut errno, MsgFlags::empty())? {
            0 => Err(io::Error::other("the process that passes its lines on has ended")),
            _ => match i32::from_le_bytes(errno) {
                0 => Ok(to),
                errno => Err(io::Error::from_raw_os_error(errno)),
            },
        }
    }

    /// Waits until all lines are passed on, as [`Copies::finish`] does.
    pub fn finish(self) {
        if send(self.0.as_raw_fd(), &END, MsgFlags::MSG_NOSIGNAL).is_ok() {
            // It ends, and says no more unless it could not print.
            if recv(self.0.as_raw_fd(), &mut [0], MsgFlags::empty()) == Ok(1) {
                printing::fail();
            }
        }
    }
}

/// The process that passes lines on, until it is asked to end or, when `gradfs run` is gone, the last stream ends.
fn serve(control: OwnedFd) {
    // Signals of the terminal are for `gradfs run`, which passes them on. Neither call can fail here.
    let _ = setpgid(Pid::from_raw(0), Pid::from_raw(0));
    let _ = SigSet::all().thread_block();
    let (control, copies) = (Arc::new(control), Copies::new());
    loop {
        let mut request = [0; 4];
        match recv(control.as_raw_fd(), &mut request, MsgFlags::empty()) {
            Ok(4) => {
                let added = add_stream(&copies, &control, u32::from_le_bytes(request));
                let errno = added.map_or_else(|error| error.raw_os_error().unwrap_or(libc::EIO), |()| 0);
                let _ = send(control.as_raw_fd(), &errno.to_le_bytes(), MsgFlags::MSG_NOSIGNAL);
            }
            Ok(1) => {
                copies.finish(LAST_LINES);
                if printing::has_failed() {
                    let _ = send(control.as_raw_fd(), &END, MsgFlags::MSG_NOSIGNAL);
                }
                return;
            }
            Err(Errno::EINTR) => {}
            Ok(_) | Err(_) => return copies.finish(Duration::MAX),
        }
    }
}

fn add_stream(copies: &Copies, control: &Arc<OwnedFd>, number: u32) -> io::Result<()> {
    poll(&mut [PollFd::new(control.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE)?;
    let stream = Descriptors::new(Arc::clone(control)).receive(number);
    // Without a descriptor left, the message comes without its own.
    let stream = PipeReader::from(stream.map_err(|_| io::Error::from(Errno::EMFILE))?);
    match number % 2 {
        0 => copies.copy(number / 2, stream, io::stdout),
        _ => copies.copy(number / 2, stream, io::stderr),
    }
}

/// Passes lines on until the streams end.
struct Copies {
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

impl Copies {
    fn new() -> Copies {
        let (open, ended) = channel();
        Copies { open, ended, lines: Arc::default() }
    }

    fn copy<W: Write + 'static>(&self, rank: u32, from: PipeReader, to: fn() -> W) -> io::Result<()> {
        let (open, lines) = (self.open.clone(), Arc::clone(&self.lines));
        let copies = move || {
            // A reader that is gone is learnt by the process with its next line, by EPIPE.
            printing::printed(copy_lines(from, to, format!("[{rank}] ").as_bytes(), &lines));
            drop(open);
        };
        thread::Builder::new().name(format!("output-{rank}")).stack_size(STACK).spawn(copies).map(drop)
    }

    /// Waits until all lines are passed on. No line for as long as `patience` ends the wait, too: whoever a process has
    /// left behind may hold its streams for long. A reader of ours that is slow has sixty times as long for each line.
    fn finish(self, patience: Duration) {
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
