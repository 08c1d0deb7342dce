//! The runtime of the clients: one thread, started by the first call.

use std::future::Future;
use std::io;
use std::sync::OnceLock;

use nix::sys::signal::{SigSet, Signal};
use tokio::runtime::{Builder, Runtime};

/// Runs `future` to its end, while the caller waits.
///
/// # Errors
/// If the system has no thread for the runtime.
pub fn block_on<F: Future>(future: F) -> io::Result<F::Output> {
    static RUNTIME: OnceLock<io::Result<Runtime>> = OnceLock::new();
    let start = || {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(1).thread_name("stores").enable_all().on_thread_start(leave_signals).build()
    };
    match RUNTIME.get_or_init(start) {
        Ok(runtime) => Ok(runtime.block_on(future)),
        Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
    }
}

/// Signals that end a process are for the threads that wait for them.
fn leave_signals() {
    let ending = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect::<SigSet>();
    // It fails for a set that is none.
    let _ = ending.thread_block();
}
