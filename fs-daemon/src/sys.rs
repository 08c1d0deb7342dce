//! System calls that have no safe wrapper elsewhere. All `unsafe` of the daemon is under here.

pub mod fork;
pub mod pidfd;
pub mod signals;
