//! How bytes and requests get from one process to another.
//!
//! | module | holds | uses |
//! |---|---|---|
//! | `stream` | byte streams, their connections and the memory that they name | |
//! | `frames` | messages and payload as frames on a byte stream | `stream` |
//! | `exchange` | requests and replies of other protocols on a byte stream (`unsafe`) | `stream` |
//! | `reactor` | threads that drive byte streams, by io_uring, by epoll, or by a transport's own driver | `stream` |
//! | `tcp` | byte streams over sockets | `reactor`, `stream` |
//! | `shm` | byte streams and payload in memory that processes of one host share | `reactor`, `stream` |
//! | `rdma` | byte streams and payload between registered memory of two machines | `reactor`, `stream` |
//! | `local` | a model whose client, coordinator and partition are in one process | |
//!
//! A module uses only those modules that its row names. So messages (`frames`) and the ways of moving bytes (the three
//! transports) do not know of each other, and meet in [`stream::Stream`]. `stream`, `reactor` and `tcp` are of the
//! crate below, and `rdma` is a crate of its own.
//!
//! `tally` counts moved payload, and the part that CPUs copied. It uses none of them, and none uses it.

pub mod exchange;
pub mod frames;
pub mod local;
pub mod shm;
pub mod tally;

pub use gradfs_rdma as rdma;
pub use modelio_base::transport::{reactor, stream, tcp};
