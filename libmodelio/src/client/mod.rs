//! Taking part in a job: as a learner, and as who shows its versions.
//!
//! | module | holds |
//! |---|---|
//! | `core` | what is decided (pure) |
//! | `job` | [`Job`], what others call |
//! | `options` | what it is told, and tells |
//! | `late` | whom the job waits for |
//! | `keeper` | its clock: deadlines, connections that are missing |
//! | `shared` | lock, clock, and what the core's decisions change |
//! | `routes`, `redirect`, `inquiry` | the block map in force, where its shards are, and how another one takes its place |
//! | `peer`, `connections`, `usage`, `fallback` | which connections there are, are missing, are used, and go by TCP for now |
//! | `conversation` | what is said on each kind of connection |
//! | `paths` | how blocks go: by TCP, shared memory, RDMA, or in this process |
//! | `blocks` | payload on its way, whatever the path (`unsafe`) |
//! | `versions` | the versions that are shown here |
//! | `sum` | adding up contributions before they cross the network |

mod blocks;
mod connections;
mod conversation;
pub mod core;
mod fallback;
mod inquiry;
mod job;
mod keeper;
mod late;
mod options;
mod paths;
mod peer;
mod redirect;
mod routes;
mod shared;
mod sum;
#[cfg(test)]
mod tests;
mod usage;
mod versions;

pub use self::core::LastCommit;
pub use job::{Job, JobStatus, ShardView, VersionView, wait_for};
pub use options::{
    Answered, ClientError, ClientOptions, Done, Event, Listener, Opening, Pulls, SetDone, SetError,
    TransportChoice,
};
