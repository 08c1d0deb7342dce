//! Staleness-aware learning rates, where every contribution makes a version.
//!
//! The staleness of a contribution is the number of versions that were made since the one that its learner last opened. A
//! learner that has opened none since it joined is taken to have the version that was the newest then. The learning rate
//! is divided by the staleness, if there is any, as W. Zhang, S. Gupta, X. Lian and J. Liu do in "Staleness-aware
//! Async-SGD for Distributed Deep Learning" (IJCAI 2016).
//!
//! The staleness is known when the contribution is committed. So no provisional plan begins in such a job.

use libmodelio::vocabulary::reducer::{Hyper, decimal};

use super::JobCore;

/// The hyper-parameters with the learning rate for a contribution of this staleness.
pub(super) fn of_stale(mut hyper: Hyper, staleness: u64) -> Hyper {
    if staleness > 1 {
        hyper.learning_rate = (decimal(hyper.learning_rate) / staleness as f64) as f32;
    }
    hyper
}

impl JobCore {
    /// Whether the learning rate depends on the staleness of the contribution.
    pub(super) fn divides_by_staleness(&self) -> bool {
        self.controls.staleness_aware && !self.gathers()
    }

    /// The staleness of what was committed. Another consistency may have left several contributions: the stalest counts.
    pub(super) fn staleness(&self) -> u64 {
        let bases = self.committed.iter().filter_map(|committed| committed.contribution.base);
        bases.map(|base| self.version.0.saturating_sub(base.0)).max().unwrap_or(0)
    }

    /// The learning rate of the newest version, if the staleness of its contribution counted.
    pub fn rate(&self) -> Option<f32> {
        self.newest.rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_learning_rate_is_divided_by_the_staleness() {
        let hyper = Hyper { learning_rate: 0.3, ..Hyper::default() };
        for (staleness, rate) in [(0, 0.3), (1, 0.3), (2, 0.15), (3, 0.1), (1000, 0.0003)] {
            assert_eq!(of_stale(hyper.clone(), staleness).learning_rate, rate, "{staleness}");
        }
    }
}
