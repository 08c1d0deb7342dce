//! Whether the job of a partition makes steps.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::Version;
use parking_lot::Mutex;

use super::Partition;

/// Learners may compute for so long between two steps.
const LATELY: Duration = Duration::from_secs(1);

/// Looks at a partition again and again.
pub(in crate::server) struct StepWatch {
    partition: Arc<Partition>,
    /// The newest version that was seen, and when it was new.
    seen: Mutex<(Version, Option<Instant>)>,
}

impl StepWatch {
    /// Looks for the first time.
    pub(in crate::server) fn of(partition: &Arc<Partition>) -> StepWatch {
        let seen = Mutex::new((partition.progress().0, None));
        StepWatch { partition: Arc::clone(partition), seen }
    }

    /// Whether a step is being made, or was made lately.
    pub(in crate::server) fn is_stepping(&self) -> bool {
        let ((version, plan), mut seen) = (self.partition.progress(), self.seen.lock());
        if plan.is_some() || seen.0 != version {
            *seen = (version, Some(Instant::now()));
        }
        seen.1.is_some_and(|at| at.elapsed() < LATELY)
    }
}
