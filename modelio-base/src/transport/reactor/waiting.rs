//! The use of a descriptor: a stream, or something that waits until the descriptor is ready, such as a connection
//! that is being made, or a listener.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::port::Readiness;
use crate::transport::stream::{Close, Stream};

/// The use of a descriptor.
pub enum Kind {
    /// Bytes flow.
    Stream(Box<dyn Stream>),
    /// It becomes a connection, or brings some.
    Waiting(Box<dyn Waiting>),
}

/// The next state of a descriptor that is ready.
pub enum Ready {
    /// Wait for the descriptor again.
    Again,
    /// Wait again after a pause.
    After(Duration),
    /// The connection is open, with this stream.
    Stream(Box<dyn Stream>),
}

/// Something that waits for a descriptor. One thread makes all calls. None may block.
pub trait Waiting: Send {
    /// Begins before the first wait.
    ///
    /// # Errors
    /// The descriptor is closed.
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
    /// The descriptor is closed.
    fn ready(&mut self, fd: &OwnedFd) -> Result<Ready, Close>;

    /// The descriptor is closed, and there was no stream.
    fn closed(&mut self, why: &Close) {
        let _ = why;
    }
}

impl Kind {
    /// Tells the owner that the descriptor is closed.
    pub fn closed(&mut self, why: &Close) {
        match self {
            Kind::Stream(stream) => stream.closed(why),
            Kind::Waiting(waiting) => waiting.closed(why),
        }
    }
}
