//! The use of a serving thread's descriptor: a stream, or something that waits until the descriptor is ready,
//! such as a connection that is being made, or a listener.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::port::Readiness;
use crate::transport::stream::{Close, Stream};

/// The use of a descriptor.
pub(in crate::transport) enum Kind {
    Stream(Box<dyn Stream>),
    Waiting(Box<dyn Waiting>),
}

/// The next state of a descriptor that is ready.
pub(in crate::transport) enum Ready {
    /// The descriptor is waited for again.
    Again,
    /// The same, after a pause.
    After(Duration),
    /// There is a connection, and this is its stream.
    Stream(Box<dyn Stream>),
}

/// Something that waits for a descriptor. All calls come from one thread; none may block.
pub(in crate::transport) trait Waiting: Send {
    /// Begins, before the descriptor is waited for.
    ///
    /// # Errors
    /// Closes the descriptor.
    fn start(&mut self, fd: &OwnedFd) -> Result<(), Close> {
        let _ = fd;
        Ok(())
    }

    /// The readiness to wait for.
    fn readiness(&self) -> Readiness;

    /// The deadline, and the reason with which the descriptor is closed then.
    fn deadline(&self) -> Option<(Instant, Close)> {
        None
    }

    /// The descriptor is ready.
    ///
    /// # Errors
    /// Closes the descriptor.
    fn ready(&mut self, fd: &OwnedFd) -> Result<Ready, Close>;

    /// The descriptor is over, and there was no stream.
    fn closed(&mut self, why: &Close) {
        let _ = why;
    }
}

impl Kind {
    /// Tells the owner that the descriptor is over.
    pub fn closed(&mut self, why: &Close) {
        match self {
            Kind::Stream(stream) => stream.closed(why),
            Kind::Waiting(waiting) => waiting.closed(why),
        }
    }
}
