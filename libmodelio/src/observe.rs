//! What a program that trains waits for, and how old the weights are that it gets: accounts, histograms and traces.
//!
//! Everything here takes events and `now`, opens no socket and reads no clock. The client and the mount feed it from
//! their edges, and `status.json`, the metrics and `gradfs trace` read it.
//!
//! | module | holds |
//! |---|---|
//! | `stall` | how long the program of a learner waits |
//! | `staleness` | how far a version is behind the newest known one |
//! | `rate` | bytes a second, over the last seconds |
//! | `plans` | how long the phases of plans take |
//! | `histogram` | how often a value was in which range |
//! | `trace` | what happened when, while a trace runs |

pub mod histogram;
pub mod plans;
pub mod rate;
pub mod staleness;
pub mod stall;
pub mod trace;

use std::time::Duration;

/// Time since a moment that the caller keeps. It may jump back: an account then stands still until its time is reached
/// again.
pub type Now = Duration;
