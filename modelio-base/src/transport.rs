//! Byte streams, and the threads that drive them.
//!
//! | module | holds | uses |
//! |---|---|---|
//! | `stream` | byte streams, their connections and the memory that they name | |
//! | `reactor` | threads that drive byte streams, by io_uring, by epoll, or by a transport's own driver | `stream` |
//! | `tcp` | byte streams over sockets | `reactor`, `stream` |

pub mod reactor;
pub mod stream;
pub mod tcp;
