//! Reactors: threads that each drive many streams, with io_uring or with plain sockets and epoll.
//!
//! A serving thread asks a [`Stream`](super::stream::Stream) for the places of incoming bytes and for the
//! bytes to send, and tells it the outcome. Payload is received straight into its place and sent straight
//! from it, many pieces at once. Nothing is allocated or copied for an operation, and a stream that cannot go
//! on holds up no other. Other transports run the same loop with a driver of their own.
//!
//! | module | holds |
//! |---|---|
//! | `backend` | which way bytes are moved, and why not by io_uring |
//! | `system_calls` | system calls on the memory of a stream (`unsafe`) |
//! | `port`, `waiting`, `table` | a descriptor, what it is for, all those of a thread |
//! | `timers` | when they are looked at next |
//! | `inbox` | what a serving thread shares with others |
//! | `sleeper` | how a thread sleeps on epoll, until another wakes it |
//! | `driver` | what the loop asks of a way of moving bytes |
//! | `endings` | how descriptors end |
//! | `serving`, `engine` | the loop, the same for all ways |
//! | `uring`, `epoll` | the two ways for sockets (`uring`: `unsafe`) |
//! | `handle`, `threads` | what others hold of a reactor, and its threads |

mod backend;
mod driver;
mod endings;
mod engine;
mod epoll;
mod handle;
mod inbox;
mod port;
mod serving;
mod sleeper;
mod system_calls;
mod table;
mod threads;
mod timers;
mod uring;
mod waiting;

pub use backend::{Backend, Choice, NotUring};
pub use driver::Driver;
pub use engine::Engine;
pub use handle::{Handle, Thread, leaves_room};
pub use inbox::{Arrival, Refused, ThreadState};
pub use port::{Completion, Op, Phase, Port, Readiness};
pub use sleeper::Sleeper;
pub use table::Table;
pub use threads::{Reactor, ReactorOptions, StartError, StillRunning};
pub use waiting::{Kind, Ready, Waiting};
