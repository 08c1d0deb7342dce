//! A model whose client, coordinator and partition are in one process: no connection, no copy.
//!
//! | module | holds |
//! |---|---|
//! | `mailbox` | what the three ends say to each other |
//! | `shard` | what a client asks of a partition in its own process |

mod mailbox;
mod shard;

pub use mailbox::{End, Mail, Mailbox, Recipient};
pub use shard::{HeldVersion, Pushed, Shard, SharedBlock, SharedPayload};
