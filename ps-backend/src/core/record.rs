//! The record of a job: the facts about its newest version, without connections and work under way.
//!
//! It is the coordinator's part of a snapshot. A contribution that is not part of a version is not in it: its learner
//! is recorded at the step before.

use std::collections::BTreeSet;

use libmodelio::vocabulary::groups::TensorReducers;
use libmodelio::vocabulary::ids::{Incarnation, Step, Version};
use libmodelio::vocabulary::meta::Meta;
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::vocabulary::tensor_steps::TensorSteps;
use libmodelio::wire::{LearnerRecord, MAX_TOLD_LEARNERS, Message};
use serde::{Deserialize, Serialize};

use super::incarnations::check_name;
use super::{Action, JobCore, Member, Now};

/// The facts about a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// The version.
    pub version: Version,
    /// The reducer whose optimizer state exists. If tensors have several, one with the most state.
    pub optimizer: Reducer,
    /// The reducer of each tensor, as runs of tensors, if they have several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reducers: Option<TensorReducers>,
    /// The optimizer steps of each tensor since its state was zero, as runs of tensors.
    pub steps: TensorSteps,
    /// The number of contributions that are part of it or of an earlier version.
    pub contributions: u64,
    /// The names of learners. Those in the job come first.
    pub learners: Vec<LearnerRecord>,
    /// The highest incarnation of a name that is not listed.
    pub unlisted: Incarnation,
    /// What the publisher of the version has said of it.
    #[serde(default, skip_serializing_if = "Meta::is_empty")]
    pub meta: Meta,
}

impl JobRecord {
    /// The reducer of one tensor.
    pub fn reducer_of(&self, tensor: usize) -> Reducer {
        self.reducers.as_ref().and_then(|reducers| reducers.of(tensor)).unwrap_or(self.optimizer)
    }
}

impl JobCore {
    /// There is a snapshot of this version in the job's store.
    pub fn set_durable(&mut self, version: Version) {
        self.newest.durable = Some(version);
    }

    /// Versions have numbers below this one: no more begins without.
    pub fn set_reserved(&mut self, numbers: Option<Version>, now: Now, actions: &mut Vec<Action>) {
        self.newest.reserved = numbers;
        self.advance(now, actions);
    }

    /// What a client is told of the learners, as of the newest version, if the job goes on with such a client's weights when
    /// it is restored.
    pub fn tell_learners(&self) -> Option<Message> {
        let tells = self.controls.snapshots.restores_newest();
        tells.then(|| {
            let JobRecord { version, contributions, mut learners, unlisted, .. } = self.record();
            learners.truncate(MAX_TOLD_LEARNERS);
            Message::Learners { version, contributions, learners, unlisted }
        })
    }

    /// The record of the newest version.
    pub fn record(&self) -> JobRecord {
        let of_member = |member: &Member| LearnerRecord {
            name: member.name.clone(),
            incarnation: member.incarnation,
            step: Some(Step(member.step.0.saturating_sub(u64::from(member.unpublished)))),
        };
        let mut learners: Vec<LearnerRecord> = self.members.values().map(of_member).collect();
        let members: BTreeSet<&str> = self.members.values().map(|member| member.name.as_str()).collect();
        let left = self.incarnations.names().filter(|(name, _)| !members.contains(name));
        let of_left =
            |(name, incarnation): (&str, _)| LearnerRecord { name: name.to_owned(), incarnation, step: None };
        learners.extend(left.map(of_left));
        JobRecord {
            version: self.version,
            optimizer: self.recipe.state_of().widest(),
            reducers: Some(self.recipe.state_of().clone()).filter(TensorReducers::are_mixed),
            steps: self.recipe.steps().clone(),
            contributions: self.newest.all_contributions,
            learners,
            unlisted: self.incarnations.forgotten(),
            meta: self.newest.meta.clone(),
        }
    }

    /// Begins at a record, without learners. Those that were in the job join again, as other incarnations. The job
    /// must have just begun.
    ///
    /// # Errors
    /// When the record is of a job with other tensors, or is not sound.
    pub fn restore(&mut self, record: JobRecord) -> Result<(), ShardError> {
        let refused = |why: String| Err(ShardError::NotAllowed(why));
        if record.steps.tensors() != self.recipe.tensors() as u64 {
            let got = record.steps.tensors();
            return refused(format!(
                "the record is of {got} tensors, the model has {}",
                self.recipe.tensors()
            ));
        }
        if record.reducers.as_ref().is_some_and(|of| of.tensors() != self.recipe.tensors() as u64) {
            return refused(format!(
                "the record has reducers of other than {} tensors",
                self.recipe.tensors()
            ));
        }
        if record.learners.len() > MAX_TOLD_LEARNERS {
            return refused(format!("the record names {} learners", record.learners.len()));
        }
        record.learners.iter().try_for_each(|learner| check_name(&learner.name))?;
        debug_assert!(self.members.is_empty(), "it has begun");
        self.version = record.version;
        self.recipe.restore(record.reducers, record.optimizer, record.steps);
        self.newest.all_contributions = record.contributions;
        self.newest.meta = record.meta;
        let names = record.learners.into_iter().map(|learner| (learner.name, learner.incarnation)).collect();
        self.incarnations.restore(names, record.unlisted);
        Ok(())
    }
}
