//! Kept payloads: they stay where they lie until they can be read in one pass with others of their block.

use libmodelio::vocabulary::ids::{ClientId, PlanId};
use smallvec::SmallVec;

use super::{PartitionCore, Placement, ReservedPlace, Running, Sent};

/// The clients whose payloads are read in one pass, in the order of addition, and whether each payload must be
/// checked.
pub type Taken = SmallVec<[(ClientId, bool); 4]>;

/// Why kept payloads are not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// The client was not to send the block after all.
    Unwanted,
    /// In an ordered plan, a kept payload has gone that was to be added before. The plan is torn.
    OutOfTurn,
}

impl PartitionCore {
    /// A block is reserved for a payload of `client`, and kept payloads are added in the same pass. Returns the
    /// clients of all of them, in the order of addition, and whether each payload must be checked. Each has a
    /// reservation from now on. Some kept payloads may have gone since, so the result also says whether the block is
    /// computed in this pass.
    ///
    /// # Errors
    /// [`NotTaken`]. Then nothing is taken.
    pub fn take_kept(
        &mut self,
        client: ClientId,
        plan: PlanId,
        block: u32,
    ) -> Result<(Taken, bool), NotTaken> {
        let mut taken = Taken::new();
        let running = self.running_if(plan).ok_or(NotTaken::Unwanted)?;
        let b = block as usize;
        let own = running.plan.source_of(client, b).ok_or(NotTaken::Unwanted)?;
        let is_last = running.came[b] + running.count_kept(b) + 1 == running.wanted[b];
        if running.plan.ordered && !is_last && !running.has_turn(own, b) {
            return Err(NotTaken::OutOfTurn);
        }
        for at in 0..running.kept.len() {
            let goes = running.goes_with(own, b, is_last).any(|of| of == at);
            if at == own || goes {
                taken.push((running.plan.sources[at].client, running.plan.sources[at].check));
            }
            if goes {
                running.kept[at].set(b, false);
                running.in_flight += 1;
            }
        }
        let last = is_last && running.plan.finishes();
        running.last.set(b, last);
        Ok((taken, last))
    }

    /// Reserves a block for a kept payload, with which others are added.
    pub fn reserve_kept(&mut self, plan: PlanId, block: u32) -> Option<(ClientId, ReservedPlace)> {
        let running = self.running_if(plan)?;
        let at = running.kept.iter().rposition(|kept| kept.contains(block as usize))?;
        running.kept[at].set(block as usize, false);
        let client = running.plan.sources[at].client;
        // The payload was taken before, so its block is whole if the plan is provisional.
        let sent = Sent { lies: false, ahead: true };
        match self.reserve(client, plan, block, sent) {
            Placement::Ready(place) => Some((client, place)),
            _ => {
                self.running_if(plan)?.kept[at].insert(block as usize);
                None
            }
        }
    }

    /// A kept payload has gone. It can come again.
    pub fn is_gone(&mut self, client: ClientId, plan: PlanId, block: u32) {
        if let Some(running) = self.running_if(plan)
            && let Some(at) = running.plan.source_of(client, block as usize)
        {
            running.kept[at].set(block as usize, false);
        }
    }
}

impl Running {
    /// The sources whose kept payloads of a block are added with that of source `at`. These are all if it is the last
    /// to come; otherwise, in an ordered plan, those before it.
    pub(super) fn goes_with(
        &self,
        at: usize,
        block: usize,
        is_last: bool,
    ) -> impl Iterator<Item = usize> + Clone {
        let reach = match (is_last, self.plan.ordered) {
            (true, _) => self.kept.len(),
            (false, true) => at,
            (false, false) => 0,
        };
        (0..reach).filter(move |&of| self.kept[of].contains(block))
    }

    /// Whether the payloads of a block of all sources before `at` have come or are kept.
    pub(super) fn has_turn(&self, at: usize, block: usize) -> bool {
        let before = self.plan.sources[..at].iter().filter(|source| source.blocks.contains(block)).count();
        self.came[block] as usize + self.goes_with(at, block, false).count() >= before
    }

    pub(super) fn count_kept(&self, block: usize) -> u32 {
        self.kept.iter().filter(|kept| kept.contains(block)).count() as u32
    }

    /// Whether all payloads of a block have come or are kept, and some are kept.
    pub(super) fn is_gathered(&self, block: usize) -> bool {
        let kept = self.count_kept(block);
        kept > 0 && self.came[block] + kept == self.wanted[block] && !self.busy.contains(block)
    }
}
