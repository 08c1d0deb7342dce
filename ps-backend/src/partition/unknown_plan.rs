//! Blocks of plans that the partition does not know yet. Pure.
//!
//! A block may overtake the coordinator's message about its plan. So the block waits for that message, and later
//! blocks on its connection wait behind it. The wait has a limit: the coordinator repeats itself, so if no message
//! comes for a while, the plan is over, never existed, or will begin again. Then the block is dropped, which is
//! harmless: its sender asks what is missing once the plan is known, and sends the block again.

use std::time::{Duration, Instant};

use libmodelio::vocabulary::ids::PlanId;

/// The longest wait for the message about a plan. The coordinator repeats it more often.
pub const MAX_WAIT: Duration = Duration::from_secs(3);

/// The plan that one connection waits for.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnknownPlan {
    waits: Option<(PlanId, Instant)>,
}

impl UnknownPlan {
    /// A block of the unknown `plan` has come at `now`. True if it must wait. Once a plan has been waited for long
    /// enough, its further blocks need not wait.
    pub fn waits(&mut self, plan: PlanId, now: Instant) -> bool {
        match self.waits {
            Some((of, since)) if of == plan => now < since + MAX_WAIT,
            _ => {
                self.waits = Some((plan, now));
                true
            }
        }
    }

    /// The end of the wait, if it is after `now`.
    pub fn until(&self, now: Instant) -> Option<Instant> {
        self.waits.map(|(_, since)| since + MAX_WAIT).filter(|&until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_waited_for_once() {
        let start = Instant::now();
        let mut unknown_plan = UnknownPlan::default();
        assert_eq!(unknown_plan.until(start), None);
        assert!(unknown_plan.waits(PlanId(7), start));
        let almost = start + MAX_WAIT - Duration::from_millis(1);
        assert!(unknown_plan.waits(PlanId(7), almost));
        assert_eq!(unknown_plan.until(almost), Some(start + MAX_WAIT));
        let late = start + MAX_WAIT;
        assert!(!unknown_plan.waits(PlanId(7), late), "long enough");
        assert_eq!(unknown_plan.until(late), None);
        assert!(unknown_plan.waits(PlanId(8), late), "another one has its own time");
        assert_eq!(unknown_plan.until(late), Some(late + MAX_WAIT));
    }
}
