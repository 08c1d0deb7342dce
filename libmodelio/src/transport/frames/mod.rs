//! Frames on a byte stream: what turns a [`Conversation`], which speaks messages, into a
//! [`Stream`](super::stream::Stream), which moves bytes. The same for both ends and for every role.
//!
//! Headers and bodies come through a small buffer. A payload is received straight into where the conversation says, and
//! sent straight from where it lies. Both are checked by CRC32C while they are in cache. Pings are answered here.
//!
//! | module | holds |
//! |---|---|
//! | `link` | what is to be said, by whichever thread |
//! | `conversation` | what says it |
//! | `framed` | frames, to and from a stream of bytes (`unsafe`) |
//! | `framed::watch` | its deadlines, and whether what comes moves on |

mod conversation;
mod framed;
mod link;

pub use conversation::{Conversation, Take};
pub use framed::Framed;
pub use link::{Link, Outgoing};
