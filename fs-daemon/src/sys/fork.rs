//! fork(2): it makes a daemon of a command, and processes that outlive it.

use std::fs;
use std::io;

use nix::unistd::{ForkResult, fork};

/// Forks this process, which must have one thread.
///
/// # Errors
/// Fails with the error of fork(2), or if there are more threads.
pub fn fork_single_threaded() -> io::Result<ForkResult> {
    let threads = fs::read_dir("/proc/self/task")?.count();
    if threads != 1 {
        return Err(io::Error::other(format!("the process has {threads} threads already")));
    }
    // SAFETY: The child has only the thread that calls fork. This process has no other thread, so the child
    // inherits no lock of another thread and no half-made change, and may do whatever this process might.
    Ok(unsafe { fork() }?)
}
