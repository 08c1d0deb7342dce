//! The ends of a serving thread's descriptors, and the text of a panic.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::inbox::Arrival;
use super::waiting::Kind;
use crate::transport::stream::Close;

/// Calls `closed` of a descriptor's owner. A panic goes no further.
pub(super) fn farewell(mut kind: Kind, why: &Close) {
    let outcome = catch_unwind(AssertUnwindSafe(move || kind.closed(why)));
    if let Err(panic) = outcome {
        tracing::error!(panic = panic_message(panic.as_ref()), "a stream panicked when it was closed");
    }
}

/// Refuses an arrival at a thread that is ending.
pub(super) fn refuse(arrival: Arrival) {
    let Arrival { fd, kind, connection } = arrival;
    drop(fd);
    farewell(kind, &Close::ShutDown);
    connection.state().ended();
}

/// The text of a panic.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}
