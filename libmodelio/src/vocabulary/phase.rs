//! The phases of a job, and how long a wait lasts before status names its cause.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A shard that has not been reached for this long is away, and named.
pub const AWAY: Duration = Duration::from_secs(2);

/// Learners that others have been waiting for this long are named.
pub const LONG: Duration = Duration::from_secs(5);

/// The phase of a job, as far as this end knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobPhase {
    /// It takes contributions.
    #[default]
    Running,
    /// It waits for its first learners.
    Forming,
    /// It makes a version.
    Reducing,
    /// It has fewer learners than `min_learners`.
    Stopped,
    /// It waits for shards that are out of reach.
    Waiting,
    /// A shard has lost its blocks, or nobody coordinates the job any more.
    Failed,
}

impl JobPhase {
    /// The name in status.
    pub fn name(self) -> &'static str {
        match self {
            JobPhase::Running => "running",
            JobPhase::Forming => "forming",
            JobPhase::Reducing => "reducing",
            JobPhase::Stopped => "stopped",
            JobPhase::Waiting => "waiting",
            JobPhase::Failed => "failed",
        }
    }
}

impl fmt::Display for JobPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
