//! The seam between the messages of a connection and the way its bytes move: a [`Stream`] is one end of one
//! byte stream, a state machine without a socket. Its driver asks it for the places of incoming bytes and for
//! the bytes to send. The driver is a reactor over TCP, rings in shared memory, a queue pair, or a test.
//!
//! Everything here is below the transports and uses none of them.
//!
//! | module | holds |
//! |---|---|
//! | `close` | why a connection ends |
//! | `connection` | what other threads wake and close a stream by |
//! | `in_use` | what a TCP socket uses, for status and log |
//! | `slices` | lists of memory that a driver reads and writes (`unsafe`) |
//! | `buffer` | memory that a stream owns (`unsafe`) |
//! | `loan` | payload where it lies, lent to a connection (`unsafe`) |

mod buffer;
mod close;
mod connection;
mod in_use;
mod loan;
mod slices;

use std::time::Instant;

pub use buffer::Buffer;
pub use close::Close;
pub(super) use close::errno;
pub use connection::Connection;
pub(super) use connection::{ConnectionState, ServingThread, Token};
pub use in_use::{InUse, in_use};
pub(super) use in_use::{congestion_name, is_same_host};
pub use loan::{Guard, Piece, Target};
pub use slices::{ReceiveSlices, SLICES_MAX, SendSlices};

/// One end of one byte stream. All calls come from one thread at a time, that of its reactor; none may block.
///
/// The order: [`opened`](Stream::opened) once; then the others, as bytes and wake-ups come; [`closed`](Stream::closed)
/// once, and nothing after it. If a connection never comes about, `closed` is the only call.
///
/// After each wake-up and after each `received` and `transmitted` the reactor asks `receive` again if no
/// receive is outstanding, and `transmit` if no send is. So at most one of each is outstanding.
///
/// A panic of a callback closes the connection with [`Close::Panicked`] and goes no further.
pub trait Stream: Send {
    /// Bytes can flow. Other threads wake or close the stream by `connection`.
    fn opened(&mut self, connection: &Connection) {
        let _ = connection;
    }

    /// The place of the next received bytes: pushed to `into`, which is empty. The contract for that memory
    /// is written at [`ReceiveSlices::push`].
    fn receive(&mut self, into: &mut ReceiveSlices) -> Receive;

    /// The next `bytes` of the memory that `receive` named are filled, from its front; `receive` is then
    /// asked again. `bytes` is at least the number that was asked for, except before the peer's end of
    /// stream.
    ///
    /// # Errors
    /// Closes the connection: the peer broke the protocol.
    fn received(&mut self, bytes: usize) -> Result<(), Close>;

    /// `bytes` of those that `receive` asked for have come, though not enough yet: the peer lives.
    fn arriving(&mut self, bytes: usize) {
        let _ = bytes;
    }

    /// The bytes to send now: pushed to `out`, which is empty. If it stays empty, the stream is asked again
    /// after a wake-up. The contract for that memory is written at [`SendSlices::push`].
    fn transmit(&mut self, out: &mut SendSlices);

    /// The next `bytes` that `transmit` named are with the kernel; their memory is the stream's again.
    /// Several calls may together report what one `transmit` named.
    ///
    /// # Errors
    /// Closes the connection: for instance because the farewell is said.
    fn transmitted(&mut self, bytes: usize) -> Result<(), Close>;

    /// Whether the stream has nothing more to send after the named bytes. The sending side is closed then,
    /// and the peer's bytes are received until the peer ends the connection, or the stream does.
    fn is_finished(&self) -> bool {
        false
    }

    /// Time passes: called when the connection is open, after each wake-up, and when the returned time has come.
    /// `None` until the next wake-up.
    ///
    /// # Errors
    /// Closes the connection: a deadline has passed.
    fn tick(&mut self, now: Instant) -> Result<Option<Instant>, Close> {
        let _ = now;
        Ok(None)
    }

    /// The stream is over. The kernel holds none of the named memory, and the socket is closed.
    fn closed(&mut self, why: &Close);
}

/// Answer of [`Stream::receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receive {
    /// Into the pushed slices; [`Stream::received`] is called when at least `least` bytes are there: 1 to what the
    /// slices hold.
    Into {
        /// In bytes.
        least: usize,
    },
    /// Nothing now; the stream is asked again after a wake-up. Bytes wait in the socket, and then at the
    /// peer. A peer that has gone is noticed only when the stream goes on.
    Paused,
}
