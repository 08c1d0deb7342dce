//! The learners of a job: why they leave it, whether they are used, and how they are shown.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ids::{Incarnation, LearnerId, Step, Version};

/// The longest name of a learner, in bytes.
pub const MAX_LEARNER_NAME: usize = 64;

/// Whether a learner may be called so.
pub fn is_learner_name(name: &str) -> bool {
    let is_usual = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=MAX_LEARNER_NAME).contains(&name.len()) && !name.starts_with('.') && name.chars().all(is_usual)
}

/// That a set of parts cannot be called so, in words. Its name is as a learner's.
pub fn wrong_set_name(name: impl fmt::Debug) -> String {
    wrong_name("set", name)
}

/// That a learner cannot be called so, in words.
pub fn wrong_learner_name(name: impl fmt::Debug) -> String {
    wrong_name("learner", name)
}

/// The same of a reader: its name is as a learner's.
pub fn wrong_reader_name(name: impl fmt::Debug) -> String {
    wrong_name("reader", name)
}

fn wrong_name(of: &str, name: impl fmt::Debug) -> String {
    let rule = format!("use up to {MAX_LEARNER_NAME} letters, digits, '-', '_' and '.', not '.' first");
    format!("{of} name {name:?}: {rule}")
}

/// Why a learner left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeaveReason {
    /// It asked to (rmdir).
    Asked,
    /// Its process was killed or failed.
    Died,
    /// The learner was silent past its lease.
    LeaseExpired,
    /// Its last process had exited, and others waited for it.
    Exited,
    /// Its process lives and was silent, and others have waited for it for as long as they may.
    PatienceOver,
}

/// Whether a process uses a learner, as its mount sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Attached {
    /// No process is known to use it.
    No,
    /// A living process is known to use it.
    Yes,
    /// The last one that did has exited, or has ended otherwise than by a signal.
    Exited,
}

/// What a client tells of a learner that lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LifeSign {
    /// It goes on writing the contribution that it has open.
    Writes,
    /// Whether a process uses it, if that has changed.
    Process(Attached),
    /// Its program says that it works on something else.
    Works,
}

impl fmt::Display for LeaveReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LeaveReason::Asked => "left",
            LeaveReason::Died => "its process died",
            LeaveReason::LeaseExpired => "silent past its lease (control/lease)",
            LeaveReason::Exited => "its last process had exited, and others waited for it (control/linger)",
            LeaveReason::PatienceOver => "silent while others waited for it (control/patience)",
        })
    }
}

/// A learner as the status shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberView {
    /// Its number.
    pub learner: LearnerId,
    /// Its name.
    pub name: String,
    /// Its life.
    pub incarnation: Incarnation,
    /// Committed steps.
    pub step: Step,
    /// The last of them waits for its version.
    pub unpublished: bool,
    /// The version that the last published step is part of; 0 before the first.
    pub published_in: Version,
    /// `idle`, `writing` or `committed`.
    pub phase: &'static str,
    /// Since its last request.
    pub silent: Duration,
    /// Versions it takes part in begin after this one.
    pub joined_at: Version,
    /// Whether a process uses it, as far as its client has said.
    pub attached: Attached,
}

/// The learners that others have been waiting for so long that it is reported: a name or a number is in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WaitedFor {
    /// Names of the learners that are waited for: the first of them, as many as a report has.
    pub learners: Vec<String>,
    /// How many more there are. Without any name they are those that have not joined.
    pub more: usize,
}

/// One line for people.
impl fmt::Display for WaitedFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.learners[..], self.more) {
            ([], more) => write!(f, "{more} more to join (control/learners)"),
            (names, 0) => f.write_str(&names.join(", ")),
            (names, more) => write!(f, "{} and {more} more", names.join(", ")),
        }
    }
}
