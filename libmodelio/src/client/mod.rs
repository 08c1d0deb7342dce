//! A client of a job: it contributes for learners, and shows versions.
//!
//! | module | holds |
//! |---|---|
//! | `core` | the decisions (pure) |
//! | `commit_notice` | what a contribution holds when it ends |
//! | `job` | [`Job`], the interface |
//! | `options` | options, events, errors |
//! | `memory` | accounts of memory |
//! | `lifetime`, `keeper` | deadlines, missing connections |
//! | `shared` | lock, clock and memory around the core |
//! | `routes`, `redirect`, `inquiry` | the block map in force with its shards, and its replacement |
//! | `callers` | who waits for an answer |
//! | `payloads` | contributions and new weights that are sent |
//! | `peers`, `late` | the coordinator and the shards, and whom the job waits for |
//! | `peer`, `connections`, `fallback` | the connections: which exist, are missing, are in use, and go by TCP for now |
//! | `conversation` | the messages on each kind of connection |
//! | `paths` | the ways of blocks: TCP, shared memory, RDMA, or in this process |
//! | `blocks` | payload on its way, by any path (`unsafe`) |
//! | `small` | contributions and versions that go with messages to and from the coordinator (`unsafe`) |
//! | `versions` | the versions that the client shows |
//! | `wire_form`, `coding` | the form in which contributions cross a network |
//! | `sum` | sums of contributions, before they cross the network |

mod callers;
mod commit_notice;
mod conversation;
pub mod core;
mod job;
mod lifetime;
mod memory;
mod observed;
mod options;
mod paths;
mod payloads;
mod peers;
mod shared;
#[cfg(test)]
mod tests;
mod versions;

pub use self::core::LastCommit;
pub use commit_notice::CommitNotice;
pub use job::{Job, JobStatus, ShardView, VersionView, wait_for};
pub use memory::JobMemory;
pub use observed::Phases;
pub use options::{
    Answered, ClientError, ClientOptions, Done, Event, Listener, Opening, SetDone, SetError, TransportChoice,
};
