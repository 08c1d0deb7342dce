//! The core under hand-made schedules, one for each of its promises, and under random ones.

mod async_jobs;
mod losses;
mod members;
mod random;
mod sim;
mod sync_jobs;
