//! Frames on a byte stream: they turn a [`Conversation`], which handles messages, into a
//! [`Stream`](super::stream::Stream), which moves bytes. Both ends and every role use the same code.
//!
//! Headers and bodies go through a small buffer. A payload is received straight into the place that the conversation
//! names, and sent straight from where it lies. Both are checked by CRC32C while they are in cache. Pings are answered
//! here.
//!
//! | module | holds |
//! |---|---|
//! | `link` | the queue of messages, for all threads |
//! | `conversation` | the handler of messages |
//! | `sending` | frames that are sent (`unsafe`) |
//! | `arriving` | the payload that is being received (`unsafe`) |
//! | `reading` | frames that are received (`unsafe`) |
//! | `pace` | when patches are compressed |
//! | `progress`, `watch` | deadlines, among them that of a frame under way |
//! | `framed` | a conversation as a stream |

mod arriving;
mod conversation;
mod framed;
mod link;
mod pace;
mod progress;
mod reading;
mod sending;
mod watch;

pub use conversation::{Conversation, Take};
pub use framed::Framed;
pub use link::{Link, Outgoing};

/// Memory of a connection that sends much, in bytes.
pub const CONNECTION_BYTES: u64 = sending::HEADS as u64;
