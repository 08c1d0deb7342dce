//! The grace window of `grace(k, factor)`: how long a version that has k contributions waits for the others.
//!
//! The window is the factor times the mean time from the beginning of a step to its k-th contribution. A step begins when
//! the version before is published, the first one when the job is formed. Without an earlier step, the window is the
//! factor times the time of the step itself. It ends when nobody is missing, or at its own end. No provisional plan begins within
//! it: the version does not wait for a contribution that is still written then.

use libmodelio::vocabulary::controls::Consistency;
use serde::{Deserialize, Serialize};

use super::{JobCore, Now};

/// The newest step's share of the mean is one of so many.
const STEPS: u32 = 4;

/// What the core knows of the arrival of contributions.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Grace {
    /// The mean time to the k-th contribution of a step. Newer steps have a greater share of it.
    mean: Option<Now>,
    /// When the coming step began. After a hand-over that is not known.
    #[serde(skip)]
    began: Option<Now>,
    /// The window of the coming version, if k contributions are in.
    #[serde(skip)]
    window: Option<Window>,
    /// The length of the newest window.
    #[serde(skip)]
    length: Option<Now>,
}

#[derive(Clone, Copy, Debug)]
struct Window {
    since: Now,
    until: Now,
    is_over: bool,
}

impl Grace {
    /// The coming step begins.
    pub(super) fn begins(&mut self, now: Now) {
        self.began = Some(now);
    }

    /// Another consistency is in force: what was known is of no use to it.
    pub(super) fn forget(&mut self) {
        *self = Grace { began: self.began, ..Grace::default() };
    }

    /// A version of contributions is made. `self.begins` follows.
    pub(super) fn step_ended(&mut self) {
        let window = self.window.take();
        if let (Some(window), Some(began)) = (window, self.began) {
            let took = window.since.saturating_sub(began);
            let mean = self.mean.map_or(took, |mean| mean / STEPS * (STEPS - 1) + took / STEPS);
            self.mean = Some(mean);
        }
    }

    /// The length of a window that opens now. None if neither this step nor an earlier one tells it.
    fn length(&self, factor: f32, now: Now) -> Option<Now> {
        let mean = self.mean.or_else(|| Some(now.saturating_sub(self.began?)))?;
        let length = Now::try_from_secs_f64(mean.as_secs_f64() * f64::from(factor));
        // State from another process may be anything.
        Some(length.unwrap_or(Now::MAX))
    }
}

impl JobCore {
    /// Opens the window when so many contributions are in that it begins, and notes its end.
    pub(super) fn note_grace(&mut self, now: Now) {
        let Consistency::Grace(_, factor) = self.consistency else { return };
        if !self.formation.is_formed() || !self.has_enough_for_grace() {
            self.grace.window = None;
            return;
        }
        if self.grace.window.is_none() {
            // Opens that wait for the version have a deadline of their own.
            let most = self.controls.timeout / 2;
            let length = self.grace.length(factor, now).unwrap_or_default().min(most);
            self.grace.length = Some(length);
            self.grace.window = Some(Window { since: now, until: now + length, is_over: false });
        }
        if let Some(window) = &mut self.grace.window {
            window.is_over |= window.until <= now;
        }
    }

    /// Whether the k contributions are in.
    pub(super) fn has_enough_for_grace(&self) -> bool {
        matches!(self.consistency, Consistency::Grace(least, _) if self.committed.len() >= least as usize)
    }

    /// Whether the coming version waits for others though it has enough.
    pub(super) fn is_in_grace(&self) -> bool {
        self.grace.window.is_some_and(|window| !window.is_over)
    }

    /// When the window of the coming version ends.
    pub(super) fn grace_ends(&self) -> Option<Now> {
        self.grace.window.filter(|window| !window.is_over).map(|window| window.until)
    }

    /// The length of the newest grace window.
    pub fn grace_window(&self) -> Option<Now> {
        self.grace.length
    }
}
