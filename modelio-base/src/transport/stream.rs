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
//! | `traffic` | how a TCP socket's bytes get on (`unsafe`) |
//! | `slices` | lists of memory that a driver reads and writes (`unsafe`) |
//! | `buffer` | memory that a stream owns (`unsafe`) |
//! | `loan` | payload where it lies, lent to a connection (`unsafe`) |

mod buffer;
mod close;
mod connection;
mod in_use;
mod loan;
mod slices;
mod traffic;

use std::time::Instant;

pub use buffer::Buffer;
pub use close::{Close, errno};
pub use connection::{Connection, ConnectionState, ServingThread, Token};
pub use in_use::{InUse, congestion_name, in_use, is_same_host};
pub use loan::{Guard, LentPayload, Target};
pub use slices::{ReceiveSlices, SLICES_MAX, SendSlices};
pub use traffic::Traffic;

/// One end of a byte stream. One thread at a time, that of its reactor, makes all calls. None may block.
///
/// [`opened`](Stream::opened) comes first, and once. The others follow as bytes and wake-ups come.
/// [`closed`](Stream::closed) comes last, and once. If a connection never comes about, `closed` is the only call.
///
/// After each wake-up and after each `received` and `transmitted`, the reactor calls `receive` again if no receive is
/// outstanding, and `transmit` if no send is. So at most one of each is outstanding.
///
/// A panic of a callback closes the connection with [`Close::Panicked`] and goes no further.
pub trait Stream: Send {
    /// Bytes can flow. Other threads wake or close the stream by `connection`.
    fn opened(&mut self, connection: &Connection) {
        let _ = connection;
    }

    /// Pushes the places of the next received bytes to `into`, which is empty. [`ReceiveSlices::push`] has the
    /// contract for that memory.
    fn receive(&mut self, into: &mut ReceiveSlices) -> Receive;

    /// The next `bytes` of the memory that `receive` named are filled, from its front. `receive` is called again
    /// after this. `bytes` is at least the number that was asked for, except before the end of the peer's stream.
    ///
    /// # Errors
    /// Closes the connection: the peer broke the protocol.
    fn received(&mut self, bytes: usize) -> Result<(), Close>;

    /// `bytes` of those that `receive` asked for have come, which is not enough yet. The peer lives.
    fn arriving(&mut self, bytes: usize) {
        let _ = bytes;
    }

    /// Pushes the bytes to send to `out`, which is empty. If it stays empty, the stream is asked again after a
    /// wake-up. [`SendSlices::push`] has the contract for that memory.
    fn transmit(&mut self, out: &mut SendSlices);

    /// The kernel has the next `bytes` that `transmit` named. Their memory belongs to the stream again. Several calls
    /// together may report what one `transmit` named.
    ///
    /// # Errors
    /// Closes the connection, for example because the last message is sent.
    fn transmitted(&mut self, bytes: usize) -> Result<(), Close>;

    /// Whether the stream has nothing more to send after the named bytes. The sending side is closed then,
    /// and the peer's bytes are received until the peer ends the connection, or the stream does.
    fn is_finished(&self) -> bool {
        false
    }

    /// Time passes. This is called when the connection is open, after each wake-up, and at the returned time. `None`
    /// waits for the next wake-up.
    ///
    /// # Errors
    /// Closes the connection: a deadline has passed.
    fn tick(&mut self, now: Instant) -> Result<Option<Instant>, Close> {
        let _ = now;
        Ok(None)
    }

    /// The stream has ended. The kernel holds none of the named memory, and the socket is closed.
    fn closed(&mut self, why: &Close);
}

/// The answer of [`Stream::receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receive {
    /// Receive into the pushed slices. [`Stream::received`] is called when at least `least` bytes have come: 1 up to
    /// the length of the slices.
    Into {
        /// In bytes.
        least: usize,
    },
    /// Receive nothing now. The stream is asked again after a wake-up. Bytes wait in the socket, and then at the
    /// peer. A peer that has gone is noticed only when the stream goes on.
    Paused,
}
