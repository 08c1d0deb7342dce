//! Requests that may take long, beside the threads that serve the kernel and clients.

use std::sync::Arc;

use parking_lot::Mutex;

/// Does `work` on a thread of its own, called `name`. If the system gives no thread, the work is done in
/// place: other requests wait for it then, which is better than a failure.
pub fn on_own_thread(name: &str, work: impl FnOnce() + Send + 'static) {
    let work = Arc::new(Mutex::new(Some(work)));
    let of_thread = Arc::clone(&work);
    let take = |work: &Mutex<Option<_>>| work.lock().take();
    let on_thread = move || {
        if let Some(work) = take(&of_thread) {
            work();
        }
    };
    if let Err(error) = std::thread::Builder::new().name(name.to_owned()).spawn(on_thread) {
        tracing::warn!(%error, "no thread {name}: other requests wait for it");
        if let Some(work) = take(&work) {
            work();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn work_is_done_once_on_a_thread_of_that_name() {
        let (sender, receiver) = std::sync::mpsc::channel();
        on_own_thread("gradfs-test", move || {
            sender.send(std::thread::current().name().map(str::to_owned)).unwrap()
        });
        let name = receiver.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!(name.as_deref(), Some("gradfs-test"));
        assert!(receiver.recv_timeout(Duration::from_secs(10)).is_err(), "done twice");
    }
}
