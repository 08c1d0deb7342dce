//! The core under hand-made schedules, one for each of its promises, and under random ones.

mod async_jobs;
mod clipped_jobs;
mod deterministic_jobs;
mod giving_way;
mod grace_jobs;
mod groups;
mod history;
mod layerwise_jobs;
mod losses;
mod members;
mod quorum_jobs;
mod random;
mod records;
mod schedules;
mod sim;
mod ssp_jobs;
mod stale_jobs;
mod sync_jobs;
mod together;
