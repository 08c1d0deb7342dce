//! The promises of the consistencies, checked for every plan and after every event, with an own count of
//! steps.
use std::collections::BTreeMap;
use std::sync::Arc;

use libmodelio::vocabulary::controls::Consistency;
use libmodelio::vocabulary::ids::LearnerId;

use super::super::*;

#[derive(Debug, Default)]
pub struct History {
    /// The consistency is never changed.
    pub fixed: bool,
    /// Steps of those in the job, from where the slowest was when they joined. Counts in what is being made.
    steps: BTreeMap<LearnerId, u64>,
    /// The learners whose contributions are in the plan that is being measured or carried out.
    running: Vec<LearnerId>,
}

impl History {
    pub fn slowest(&self) -> u64 {
        self.steps.values().min().copied().unwrap_or(0)
    }

    pub fn joined(&mut self, learner: LearnerId, start: u64) {
        self.steps.insert(learner, start);
    }

    pub fn left(&mut self, learner: LearnerId) {
        self.steps.remove(&learner);
    }

    /// A version is going to be made of this number of `contributions`, of which `inputs` are not in the
    /// accumulator.
    pub fn begin(&mut self, core: &JobCore, contributions: u32, inputs: &[Arc<Contribution>]) {
        let members = core.members(Now::ZERO);
        let missing = members.iter().filter(|m| m.joined_at <= core.version() && !m.unpublished).count();
        let least = core.controls().min_learners as usize;
        let contributions = contributions as usize;
        match core.consistency {
            Consistency::Sync => assert_eq!(missing, 0, "{members:?}"),
            Consistency::Quorum(quorum) | Consistency::Grace(quorum, _) => {
                let active = missing + contributions;
                assert!(contributions >= active.min(quorum as usize), "{contributions} of {members:?}");
                assert!(missing == 0 || !core.is_in_grace(), "a grace window is cut short: {members:?}");
            }
            Consistency::Async | Consistency::Ssp(_) if self.fixed => assert_eq!(contributions, 1),
            Consistency::Async | Consistency::Ssp(_) => {}
        }
        if core.gathers() {
            assert!(members.len().max(contributions) >= least, "{contributions} of {members:?}");
        }
        self.running = inputs.iter().map(|input| input.learner).collect();
        let slowest = self.slowest();
        for learner in &self.running {
            let Some(steps) = self.steps.get_mut(learner) else { continue };
            if let Consistency::Ssp(most) = core.consistency
                && self.fixed
            {
                assert!(*steps - slowest <= u64::from(most), "{learner} runs ahead: {:?}", self.steps);
            }
            *steps += 1;
        }
    }

    /// The version of contributions is made. New weights may be published while contributions are measured.
    pub fn published(&mut self) {
        self.running.clear();
    }

    /// The plan that was begun makes no version.
    pub fn void(&mut self) {
        for learner in std::mem::take(&mut self.running) {
            if let Some(steps) = self.steps.get_mut(&learner) {
                *steps -= 1;
            }
        }
    }

    /// Nobody has committed more than s + 1 steps more than the slowest learner. A learner that has committed
    /// c steps reads, in the newest version, everybody's steps up to c - s - 1.
    pub fn check_coordinator(&self, core: &JobCore) {
        let Consistency::Ssp(most) = core.consistency else { return };
        if !self.fixed {
            return;
        }
        let bound = u64::from(most) + 1;
        for (reader, &read) in &self.steps {
            // Its open waits for the version that is being made.
            if self.running.contains(reader) {
                continue;
            }
            for (learner, &committed) in &self.steps {
                let published = committed - u64::from(self.running.contains(learner));
                let steps = &self.steps;
                assert!(read <= published + bound, "{reader} is ahead of {learner}: {steps:?}");
            }
        }
    }
}
