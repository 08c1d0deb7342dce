//! The operations of programs on a model, common to all faces of a model.
//!
//! A [`Reader`](libmodelio::reader::Reader) shows one version in every byte. A
//! [`Contribution`](contribution::Contribution) writes as a learner: at any offset, until a commit ends it, with a
//! step, or an abort. A [`Publication`](publication::Publication) makes whole new weights, an
//! [`OpenDisk`](disk::OpenDisk) is a model as a disk, and a [`Capture`](capture::Capture) is a snapshot of the job.
//! They belong to a [`Model`](model::Model), which knows its learners and waits for their steps.
//!
//! Nothing here knows who calls: a face that has programs behind it decides what the end of one means.
//! Nothing here blocks for long either: an operation that has to wait takes a callback, and has a deadline.
//! Only joining and leaving wait for the job's answer.

pub mod all_reduce;
pub mod capture;
pub mod contribution;
pub mod disk;
pub mod error;
pub mod learner;
pub mod model;
pub mod named;
pub mod publication;
pub mod times;
pub mod trace;
pub mod view;
pub mod wait_log;
pub mod written_view;

mod explained;
mod file_headers;
mod written;

#[cfg(test)]
mod tests;
