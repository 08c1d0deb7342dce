//! The wire protocol: frames, messages, and nothing that touches a socket.

mod message;
mod registry;

pub use message::{
    BlockRanges, Granted, JobState, LearnerState, Message, Plan, PlanSource, Refusal, Role, Work,
};
pub use registry::{ModelRecord, RegistryAnswer, RegistryRequest, ShardRecord};
