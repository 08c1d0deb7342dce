//! The runtime of the clients: one thread, started by the first call.

use std::future::Future;
use std::io;
use std::sync::OnceLock;

use tokio::runtime::{Builder, Runtime};

/// Runs `future` to its end, while the caller waits.
///
/// # Errors
/// If the system has no thread for the runtime.
pub fn block_on<F: Future>(future: F) -> io::Result<F::Output> {
    static RUNTIME: OnceLock<io::Result<Runtime>> = OnceLock::new();
    let start = || Builder::new_multi_thread().worker_threads(1).thread_name("stores").enable_all().build();
    match RUNTIME.get_or_init(start) {
        Ok(runtime) => Ok(runtime.block_on(future)),
        Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
    }
}
