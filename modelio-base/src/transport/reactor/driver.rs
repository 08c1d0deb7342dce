//! The interface between a serving thread and its driver: io_uring, epoll, rings in shared memory, or queue pairs.

use std::time::Duration;

use nix::errno::Errno;

use super::port::{Completion, Port, Readiness};
use super::table::Table;
use crate::transport::stream::Token;

/// Moves bytes for one thread. [`wait`](Driver::wait) reports each begun operation once.
pub trait Driver {
    /// Whether the bytes of a stream go through its descriptor, which is a socket.
    const IS_BY_SOCKET: bool = false;

    /// Begins to fill `port.receive`, up to all of it; `port.receiving` is outstanding until it is reported.
    fn receive(&mut self, token: Token, port: &mut Port) -> Result<(), Errno>;

    /// Begins to send `port.send`; `port.sending` is outstanding until it is reported.
    fn send(&mut self, token: Token, port: &mut Port) -> Result<(), Errno>;

    /// Begins to wait until the descriptor is ready; `port.readiness` is set until it is reported.
    /// Only sockets are watched, to listen or to connect.
    fn watch(&mut self, _: Token, _: &mut Port, _: Readiness) -> Result<(), Errno> {
        Err(Errno::EOPNOTSUPP)
    }

    /// Ends outstanding operations soon; those that cannot be ended at once are reported as usual.
    fn cancel(&mut self, token: Token, port: &mut Port) -> Result<(), Errno>;

    /// Whether `wait` has something to report without waiting.
    fn ready(&self) -> bool;

    /// Reports finished operations, at the end of `done`. It waits for one, or for a wake-up, up to `timeout`.
    fn wait(&mut self, table: &mut Table, done: &mut Vec<Completion>, timeout: Duration)
    -> Result<(), Errno>;
}
