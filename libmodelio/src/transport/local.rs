//! A model whose client, coordinator and partition are in one process: no connection, no copy.
//!
//! | module | holds |
//! |---|---|
//! | `mailbox` | messages between the three ends |
//! | `shard` | the shard's interface to the client |

mod mailbox;
mod shard;

pub use mailbox::{Granted, Mail, Mailbox, MailboxEnd, Recipient};
pub use shard::{HeldVersion, Pushed, Shard, ShardMemory, SharedBlock, SharedPayload};
