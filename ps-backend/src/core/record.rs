//! The record of a job: everything that is true of its newest version, whoever is connected and whatever is
//! under way.
//!
//! It is the coordinator's part of a snapshot. A contribution that is part of no version yet is not in it:
//! its learner is recorded at the step before.

use std::collections::BTreeSet;

use libmodelio::transport::ShardError;
use libmodelio::vocabulary::ids::{Incarnation, LearnerId, Step, Version};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::vocabulary::tensor_steps::TensorSteps;
use serde::{Deserialize, Serialize};

use super::membership::check_name;
use super::{JobCore, MAX_LEARNERS, Member};

/// All that is true of a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// The version.
    pub version: Version,
    /// The reducer whose optimizer state there is.
    pub optimizer: Reducer,
    /// Optimizer steps of each tensor since its state was zero, as runs of tensors.
    pub steps: TensorSteps,
    /// Contributions that are part of it, or of a version before.
    pub contributions: u64,
    /// Names of learners, those that are in the job first.
    pub learners: Vec<LearnerRecord>,
    /// The highest incarnation of a name that is not listed.
    pub unlisted: Incarnation,
}

/// The facts about a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LearnerRecord {
    /// The name in `learners/<name>`.
    pub name: String,
    /// The last life under it.
    pub incarnation: Incarnation,
    /// The last step of that life that is part of the version; unknown of one that has left.
    pub step: Option<Step>,
}

impl<S: Clone> JobCore<S> {
    /// The facts about the newest version.
    pub fn record(&self) -> JobRecord {
        let of_member = |member: &Member| LearnerRecord {
            name: member.name.clone(),
            incarnation: member.incarnation,
            step: Some(Step(member.step.0.saturating_sub(u64::from(member.unpublished)))),
        };
        let mut learners: Vec<LearnerRecord> = self.members.values().map(of_member).collect();
        let members: BTreeSet<&str> = self.members.values().map(|member| member.name.as_str()).collect();
        let left = self.lives.iter().filter(|(name, _)| !members.contains(name.as_str()));
        learners.extend(left.map(|(name, &incarnation)| LearnerRecord {
            name: name.clone(),
            incarnation,
            step: None,
        }));
        JobRecord {
            version: self.version,
            optimizer: self.state_of,
            steps: self.optimizer_steps.clone(),
            contributions: self.contributions_taken,
            learners,
            unlisted: self.forgotten,
        }
    }

    /// Goes on from a record, without learners: those that were in the job join again, as other incarnations.
    /// The job must have just begun.
    ///
    /// # Errors
    /// A record of a job with other tensors, or one that no job has.
    pub fn restore(&mut self, record: JobRecord) -> Result<(), ShardError> {
        let refused = |why: String| Err(ShardError::NotAllowed(why));
        if record.steps.tensors() != self.tensors as u64 {
            let got = record.steps.tensors();
            return refused(format!("the record is of {got} tensors, the model has {}", self.tensors));
        }
        if record.learners.len() > 2 * MAX_LEARNERS {
            return refused(format!("the record names {} learners", record.learners.len()));
        }
        record.learners.iter().try_for_each(|learner| check_name(&learner.name))?;
        debug_assert!(self.members.is_empty() && self.next_learner == LearnerId(1).0, "it has begun");
        self.version = record.version;
        self.state_of = record.optimizer;
        self.optimizer_steps = record.steps;
        self.contributions_taken = record.contributions;
        self.forgotten = record.unlisted;
        for LearnerRecord { name, incarnation, .. } in record.learners.into_iter().rev() {
            self.lives.insert(name.clone(), incarnation);
            self.left.push_back(name);
        }
        Ok(())
    }
}
