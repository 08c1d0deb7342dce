//! The core under hand-made schedules, one for each of its promises.

mod async_jobs;
mod bench;
mod clipped_jobs;
mod deterministic_jobs;
mod giving_way;
mod grace_jobs;
mod groups;
mod layerwise_jobs;
mod losses;
mod members;
mod quorum_jobs;
mod readers;
mod records;
mod schedules;
mod ssp_jobs;
mod stale_jobs;
mod sync_jobs;
mod together;
