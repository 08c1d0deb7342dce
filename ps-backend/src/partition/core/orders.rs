//! Orders of the coordinator: a plan starts, is sealed, concluded or dropped.

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::ids::PlanId;
use libmodelio::wire::Work;

use super::{Action, PartitionCore, PartitionError, PartitionPlan, Running, Stage};

impl PartitionCore {
    /// The coordinator has a new connection, and states that its plans up to `over` are over. The next plan follows
    /// that number. Numbers from other connections are void. The plan under way goes on if the coordinator names it
    /// again.
    pub fn coordinated_anew(&mut self, over: PlanId) {
        let mut newest = over;
        if let Some(running) = &mut self.running {
            running.vouched = false;
            if !running.is_void() && running.plan.id.0 <= over.0.saturating_add(1) {
                newest = newest.max(running.plan.id);
            }
        }
        self.newest = newest;
        self.readers.coordinated_anew(over, self.concluded);
    }

    /// Starts a plan. A repeated start is answered again. If another connection has started a plan that is ready here,
    /// it is replaced only if the coordinator `insists`. A coordinator that has been asking for so long cannot know of
    /// the ready plan. A plan that was dropped, or that another one has replaced, is not started a second time: its
    /// coordinator must drop it.
    ///
    /// # Errors
    /// [`PartitionError`]. Then nothing has changed.
    pub fn start(
        &mut self,
        plan: PartitionPlan,
        insists: bool,
        actions: &mut Vec<Action>,
    ) -> Result<(), PartitionError> {
        if let Some(running) = self.running.as_mut().filter(|running| running.plan == plan) {
            running.vouched = true;
            match running.stage {
                Stage::Ready => actions.push(Action::Ready(plan.id)),
                Stage::NonFinite { client, block } => {
                    actions.push(Action::NonFinite { plan: plan.id, client, block });
                }
                Stage::Torn => actions.push(Action::Torn(plan.id)),
                Stage::Beginning | Stage::Gathering | Stage::Making | Stage::Dropped | Stage::Disowned => {}
            }
            return Ok(());
        }
        if self.running.as_ref().is_some_and(|running| running.plan.becomes(&plan)) {
            self.fits(&plan)?;
            self.seal(plan, actions);
            return Ok(());
        }
        if self.running.as_ref().is_some_and(|running| plan.becomes(&running.plan)) {
            // The start comes late: the plan has been sealed since.
            return Ok(());
        }
        let is_running = self.running.as_ref().is_some_and(|running| running.plan.id == plan.id);
        let is_next = Some(plan.id.0) == self.newest.0.checked_add(1);
        if !is_next && !is_running {
            return Err(PartitionError::Order { plan: plan.id, newest: self.newest });
        }
        self.fits(&plan)?;
        if let Some(running) = &mut self.running {
            match running.stage {
                // The coordinator repeats the order when the earlier plan has ended.
                Stage::Dropped | Stage::Disowned => return Ok(()),
                _ if running.vouched => {
                    return Err(PartitionError::Overlap { new: plan.id, running: running.plan.id });
                }
                Stage::Making => return Ok(()),
                Stage::Ready if !insists => {
                    return Err(PartitionError::Order { plan: plan.id, newest: self.newest });
                }
                _ => {}
            }
            running.stage = Stage::Disowned;
            let id = running.plan.id;
            if running.in_flight > 0 {
                actions.push(Action::Abandon(id));
            }
            self.readers.lost(id);
            self.newest = PlanId(plan.id.0.saturating_sub(1));
            self.settle(actions);
            if self.running.is_some() {
                return Ok(());
            }
        }
        let blocks = self.blocks as usize;
        let wanted = wanted(&plan, blocks);
        let payloads: u64 = wanted.iter().map(|&count| u64::from(count)).sum();
        self.newest = plan.id;
        let (stage, in_flight) =
            match self.readers.is_lost(plan.id) && matches!(plan.work, Work::Reduce { .. }) {
                true => (Stage::Torn, 0),
                // The edge is working on the plan's memory.
                false => (Stage::Beginning, 1),
            };
        let begins = if in_flight == 0 { Action::Torn(plan.id) } else { Action::Begin(plan.id) };
        actions.push(begins);
        self.running = Some(Running {
            stage,
            vouched: true,
            got: vec![FixedBitSet::with_capacity(blocks); plan.sources.len()],
            kept: vec![FixedBitSet::with_capacity(blocks); plan.sources.len()],
            came: vec![0; blocks],
            wanted,
            busy: FixedBitSet::with_capacity(blocks),
            last: FixedBitSet::with_capacity(blocks),
            computing: FixedBitSet::with_capacity(blocks),
            in_flight,
            left: payloads,
            plan,
        });
        Ok(())
    }

    /// Seals the running plan: its sources and their blocks are known now.
    fn seal(&mut self, plan: PartitionPlan, actions: &mut Vec<Action>) {
        let Some(running) = &mut self.running else { return };
        let id = plan.id;
        running.vouched = true;
        // Some blocks that have come are not part of the sealed plan: another process has sent them.
        running.kept.iter_mut().zip(&plan.sources).for_each(|(kept, of)| kept.intersect_with(&of.blocks));
        let strays =
            running.got.iter().zip(&plan.sources).any(|(got, source)| !got.is_subset(&source.blocks));
        running.wanted = wanted(&plan, running.wanted.len());
        let (came, wanted) = (running.came.iter(), running.wanted.iter());
        let missing = came.zip(wanted).map(|(&came, &wanted)| u64::from(wanted.saturating_sub(came)));
        running.left = missing.sum();
        running.plan = plan;
        actions.push(Action::Sealed(id));
        match running.stage {
            Stage::Gathering if strays => {
                running.stage = Stage::Torn;
                actions.push(Action::Torn(id));
            }
            Stage::Gathering => {
                running.compute_rest(actions);
                let mut gathered = FixedBitSet::with_capacity(running.wanted.len());
                gathered.extend((0..running.wanted.len()).filter(|&block| running.is_gathered(block)));
                if !gathered.is_clear() {
                    actions.push(Action::Gather(id, gathered));
                }
            }
            Stage::NonFinite { client, block } => actions.push(Action::NonFinite { plan: id, client, block }),
            Stage::Torn => actions.push(Action::Torn(id)),
            Stage::Beginning | Stage::Ready | Stage::Making | Stage::Dropped | Stage::Disowned => {}
        }
        if strays {
            self.readers.notify();
        }
        self.check_ready(actions);
    }

    /// Concludes the plan: its result counts. A repeated order is answered again.
    ///
    /// # Errors
    /// [`PartitionError::NotReady`], or [`PartitionError::Order`] if the start must be repeated first.
    pub fn conclude(&mut self, plan: PlanId, actions: &mut Vec<Action>) -> Result<(), PartitionError> {
        if self.running.as_ref().is_some_and(|running| running.plan.id == plan && !running.vouched) {
            return Err(PartitionError::Order { plan, newest: self.newest });
        }
        let at_once = self.made_at_once;
        match self.running_if(plan) {
            Some(Running { stage: Stage::Making, .. }) => return Ok(()),
            Some(running) if running.stage == Stage::Ready && running.plan.in_place => {
                running.stage = Stage::Making;
                running.left = running.wanted.len() as u64;
                running.make_more(at_once, actions);
                return Ok(());
            }
            _ => {}
        }
        let is_ready = |running: &mut Running| running.plan.id == plan && running.stage == Stage::Ready;
        if let Some(running) = self.running.take_if(is_ready) {
            self.is_concluded(&running.plan, actions);
        } else if self.concluded == Some(plan) {
            actions.push(Action::Done(plan));
        } else {
            return Err(PartitionError::NotReady(plan));
        }
        Ok(())
    }

    /// Drops the plan. If it has not begun here, it never will. A repeated order is answered again.
    ///
    /// # Errors
    /// [`PartitionError::Order`] for a plan that cannot have begun anywhere yet, or if its start must be repeated
    /// first.
    pub fn drop_plan(&mut self, plan: PlanId, actions: &mut Vec<Action>) -> Result<(), PartitionError> {
        let newest = self.newest;
        let Some(running) = self.running_if(plan) else {
            if plan.0 > newest.0.saturating_add(1) {
                return Err(PartitionError::Order { plan, newest });
            }
            self.newest = newest.max(plan);
            actions.push(Action::Done(plan));
            return Ok(());
        };
        // A plan that is being made counts already.
        if running.stage == Stage::Making || running.stage == Stage::Ready && !running.vouched {
            return Err(PartitionError::Order { plan, newest });
        }
        running.stage = Stage::Dropped;
        if running.in_flight > 0 {
            actions.push(Action::Abandon(plan));
        }
        self.newest = newest.max(plan);
        self.readers.lost(plan);
        self.settle(actions);
        Ok(())
    }

    fn fits(&self, plan: &PartitionPlan) -> Result<(), PartitionError> {
        if plan.base != self.version {
            return Err(PartitionError::Base { plan: plan.id, base: plan.base, version: self.version });
        }
        if plan.sources.iter().any(|source| source.blocks.len() != self.blocks as usize) {
            return Err(PartitionError::Shape(plan.id));
        }
        Ok(())
    }
}

/// For each block, the number of payloads.
fn wanted(plan: &PartitionPlan, blocks: usize) -> Vec<u32> {
    let mut wanted = vec![0; blocks];
    for block in plan.sources.iter().flat_map(|source| source.blocks.ones()) {
        wanted[block] += 1;
    }
    wanted
}
