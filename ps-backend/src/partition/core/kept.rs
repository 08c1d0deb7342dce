//! Payloads that lie where they can be read, and are kept until they can be read in one pass with others of their block.

use libmodelio::vocabulary::ids::{ClientId, PlanId};
use smallvec::SmallVec;

use super::{Kind, PartitionCore, Place, Placement, Running};

/// The clients whose payloads go in one pass, in the order of addition, and whether each is to be checked.
pub type Taken = SmallVec<[(ClientId, bool); 4]>;

impl PartitionCore {
    /// A block is reserved for a payload of `client`, with which other kept payloads go. Returns the clients
    /// of all of them, in the order of addition, and whether each is to be checked. Each of them has a
    /// reservation from now on. Some may have gone since, so the answer also says whether the block is
    /// computed with them. `None` if the client was not to send it after all.
    pub fn take_kept(&mut self, client: ClientId, plan: PlanId, block: u32) -> Option<(Taken, bool)> {
        let mut taken = Taken::new();
        let running = self.running_if(plan)?;
        let b = block as usize;
        let own = running.plan.source_of(client, b)?;
        let is_last = running.came[b] + running.count_kept(b) + 1 == running.wanted[b];
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
        let last = is_last && running.plan.kind() != Kind::Add;
        running.last.set(b, last);
        Some((taken, last))
    }

    /// Reserves a block for a payload that is kept, and with which others go.
    pub fn reserve_kept(&mut self, plan: PlanId, block: u32) -> Option<(ClientId, Place)> {
        let running = self.running_if(plan)?;
        let at = running.kept.iter().rposition(|kept| kept.contains(block as usize))?;
        running.kept[at].set(block as usize, false);
        let client = running.plan.sources[at].client;
        match self.reserve(client, plan, block, false) {
            Placement::Ready(place) => Some((client, place)),
            _ => {
                self.running_if(plan)?.kept[at].insert(block as usize);
                None
            }
        }
    }

    /// A payload that was kept is not there any more: it can come again.
    pub fn is_gone(&mut self, client: ClientId, plan: PlanId, block: u32) {
        if let Some(running) = self.running_if(plan)
            && let Some(at) = running.plan.source_of(client, block as usize)
        {
            running.kept[at].set(block as usize, false);
        }
    }
}

impl Running {
    /// The sources whose kept payloads of a block go with one of source `at`: all if that is the last to come, and
    /// otherwise those before it in an ordered plan.
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

    pub(super) fn count_kept(&self, block: usize) -> u32 {
        self.kept.iter().filter(|kept| kept.contains(block)).count() as u32
    }

    /// Whether all payloads of a block have come, or are kept, and some are kept.
    pub(super) fn is_gathered(&self, block: usize) -> bool {
        let kept = self.count_kept(block);
        kept > 0 && self.came[block] + kept == self.wanted[block] && !self.busy.contains(block)
    }
}
