//! The memory for blocks that the shard does not reduce on arrival.

use super::region;
use crate::bytes::region::{Region, RegionKey};
use crate::bytes::surplus::UNUSED_FOR;
use crate::client::Job;
use crate::vocabulary::ids::Step;
use crate::vocabulary::shard_error::ShardError;

/// Staging memory goes when so many contributions in turn were mapped.
const MAPPED_IN_TURN: u32 = 2;

/// A learner's staging memory.
pub(super) struct Staging {
    region: Region,
    /// A second region, for a learner that writes while the shard still reads the first.
    spare: Option<Region>,
    /// The number of contributions since the second region was last used.
    spare_unused: u32,
    /// The number of mapped contributions since something was last written.
    mapped_in_turn: u32,
    /// Both may still be read for a dropped plan.
    has_strays: bool,
    /// The last two steps whose commit was sent, and the regions of their payload.
    shipped: [Option<(Step, RegionKey)>; 2],
}

impl Staging {
    /// # Errors
    /// When there is no memory.
    pub(super) fn new(job: &Job) -> Result<Staging, ShardError> {
        Ok(Staging {
            region: Staging::take(job)?,
            spare: None,
            spare_unused: 0,
            mapped_in_turn: 0,
            has_strays: false,
            shipped: [None; 2],
        })
    }

    fn take(job: &Job) -> Result<Region, ShardError> {
        region(job, "gradfs-staging")
    }

    /// The region of the contribution that is open, or opened next.
    pub(super) fn region(&self) -> &Region {
        &self.region
    }

    /// A commit of `step` is sent, with the payload in the region `from`.
    pub(super) fn ship(&mut self, step: Step, from: RegionKey) {
        if self.shipped[0].is_some_and(|(last, _)| last != step) {
            self.shipped[1] = self.shipped[0];
        }
        self.shipped[0] = Some((step, from));
    }

    /// Whether the payload of the step before `step` lies in the present region.
    fn holds_the_one_before(&self, step: Step) -> bool {
        let before = self.shipped.iter().flatten().find(|(shipped, _)| shipped.next() == step);
        before.is_some_and(|(_, key)| *key == self.region.key())
    }

    /// The contribution of `step` is opened. The region that the shards may still be reading is not written: they may
    /// read strays of a dropped plan, and the step before this one if that is `lent`.
    ///
    /// # Errors
    /// When there is no memory.
    pub(super) fn open(
        &mut self,
        job: &Job,
        step: Step,
        has_strays: bool,
        lent: bool,
    ) -> Result<(), ShardError> {
        self.has_strays |= has_strays;
        if self.has_strays {
            self.region = Staging::take(job)?;
            (self.spare, self.has_strays) = (None, false);
        }
        // The step before may differ from the last commit here: a commit that timed out may have been taken, and this may
        // be the second try after an abort.
        if lent && self.holds_the_one_before(step) {
            let spare = match self.spare.take() {
                Some(spare) => spare,
                None => Staging::take(job)?,
            };
            self.spare = Some(std::mem::replace(&mut self.region, spare));
            self.spare_unused = 0;
        } else {
            self.spare_unused += 1;
            self.spare.take_if(|_| self.spare_unused >= UNUSED_FOR);
        }
        Ok(())
    }

    /// The contribution is written, and not mapped.
    pub(super) fn is_written(&mut self) {
        self.mapped_in_turn = 0;
    }

    /// A mapped contribution is taken. A program that goes on so has no use for staging memory. True if it goes.
    pub(super) fn mapped_one(&mut self, job: &Job) -> bool {
        self.mapped_in_turn += 1;
        if self.mapped_in_turn != MAPPED_IN_TURN || self.region.memory().taken() == 0 && self.spare.is_none()
        {
            return false;
        }
        // Whoever still reads the old memory keeps it until then.
        let Ok(region) = Staging::take(job) else { return false };
        (self.region, self.spare) = (region, None);
        job.tell_gone();
        true
    }
}
