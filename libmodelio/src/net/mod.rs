//! The edge of the network where bytes move: reactors, which drive many connections a thread, with io_uring or with
//! plain sockets and epoll.
//!
//! What a connection says is a [`Stream`], a state machine without a socket. A [`Reactor`] asks it where bytes are to
//! go and which are to be sent, and tells it what came of it; payload is received straight into its place and sent
//! straight from it, many pieces at once. Nothing is allocated or copied for an operation, and a stream that cannot
//! go on holds up no other.
//!
//! | module | holds |
//! |---|---|
//! | `stream` | the seam: [`Stream`], [`Close`] |
//! | `memory` | slices of memory that the kernel uses (`unsafe`) |
//! | `backend` | which way, and why not io_uring |
//! | `sockets` | options of TCP sockets |
//! | `reactor`, `handle` | threads, and what others hold of them |
//! | `engine`, `port` | the loop of a thread, the same for both ways |
//! | `uring`, `poll` | the two ways (`uring`: `unsafe`) |
//! | `rings` | a third one, in shared memory, with threads of its own (`unsafe`) |
//! | `lines` | a fourth one, by RDMA, with a thread for each completion queue |
//! | `connect`, `listen` | how connections come about |

mod backend;
mod connect;
mod engine;
mod handle;
#[cfg(feature = "rdma")]
mod lines;
mod listen;
mod memory;
mod poll;
mod port;
mod reactor;
mod rings;
mod sockets;
mod stream;
mod uring;

pub use backend::{Backend, Choice, NotUring, UnknownChoice};
pub use handle::{Connection, Handle, Refused, Thread};
#[cfg(feature = "rdma")]
pub(crate) use lines::Pollers;
pub use listen::bind;
pub use memory::{Buffer, ReceiveSlices, SLICES_MAX, SendSlices};
pub use reactor::{Reactor, ReactorOptions, StartError, StillRunning};
pub use rings::Threads;
pub use sockets::{InUse, SocketOptions, connect, in_use};
pub use stream::{Close, Receive, Stream};
