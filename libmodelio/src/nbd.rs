//! The protocol of network block devices (NBD), from the server's side. Pure: bytes go in, and bytes come out.
//!
//! It follows the [specification](https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md): fixed newstyle
//! negotiation, structured replies and meta contexts. Numbers are big-endian.
//!
//! | module | holds |
//! |---|---|
//! | `numbers` | the numbers of the specification |
//! | `export` | the exports that clients can open |
//! | `handshake` | options and their answers, until the client has chosen an export |
//! | `request` | requests |
//! | `reply` | the heads of replies |

mod export;
mod handshake;
pub mod numbers;
mod reply;
mod request;
#[cfg(test)]
mod tests;

pub use export::{Context, Export, Exports};
pub use handshake::{Handshake, Need, Opening, Step};
pub use numbers::Errno;
pub use reply::{Head, Replies};
pub use request::{Command, MAX_LEN, REQUEST_LEN, Request};
