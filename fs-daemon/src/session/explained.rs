//! The errors of calls on a model, with what its users know the data by: tensors, element types, learners.

use libmodelio::contributor::ContributeError;
use libmodelio::explained::detail;
use libmodelio::vocabulary::shard_error::ShardError;

use super::error::CallError;
use super::model::Model;

/// The error of a call on `model`, in words of the model.
pub fn explained(model: &Model, error: impl Into<ContributeError>) -> CallError {
    let error = error.into();
    let detail = match &error {
        ContributeError::Shard(ShardError::UnknownLearner(id)) => {
            model.dropped(*id).map_or_else(String::new, |dropped| format!(" ({})", dropped.reason))
        }
        error => detail(&model.job, error),
    };
    let plain = CallError::from(error);
    CallError::new(plain.errno, plain.message + &detail)
}
