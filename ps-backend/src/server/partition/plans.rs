//! Orders of the coordinator: beginning a plan, computing blocks that nobody sends, and concluding it.
use std::sync::Arc;
use std::time::{Duration, Instant};

use fixedbitset::FixedBitSet;
use libmodelio::transport::frames::Link;
use libmodelio::transport::local::{Granted, Mail, MailboxEnd, Recipient};
use libmodelio::transport::stream::Close;
use libmodelio::vocabulary::ids::{BlockId, PlanId};
use libmodelio::vocabulary::reducer::Combine;
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::{self, Message, Refusal, Work};

use super::{Partition, PartitionState, ToCoordinator};
use crate::partition::core::{self, Action, PartitionPlan, Source, local_blocks};
use crate::partition::executor::{Batch, Done, Pass};
use crate::partition::store::{Making, PartitionError, PartitionJob};

/// The pause before a plan that cannot begin yet is tried again: readers hold old versions, or work on the plan before
/// it is not over.
const BEGIN_PAUSE: Duration = Duration::from_millis(1);
/// The log names plans that cannot begin for longer than this.
const START_NAMED_AFTER: Duration = Duration::from_secs(2);
/// Missing memory that was logged is not logged again for so long.
const SHORTAGE_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// A coordinator that repeats the start of a plan for this long does not know another one that is ready here.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(3);

impl From<core::PartitionError> for Refusal {
    fn from(error: core::PartitionError) -> Refusal {
        match error {
            core::PartitionError::Order { plan, newest } => Refusal::Plan { plan, newest },
            other => Refusal::other(other),
        }
    }
}

/// Orders of the coordinator in this process.
impl Recipient for Partition {
    fn receive(self: Arc<Partition>, from: MailboxEnd, mail: Mail) {
        match (from, mail) {
            (MailboxEnd::Coordinator, Mail::Message(request, message)) => {
                self.from_coordinator(request, message, None);
            }
            (MailboxEnd::Coordinator, Mail::Granted(granted)) => self.is_granted(granted),
            _ => {}
        }
    }
}

impl Partition {
    /// Sets the coordinator, whose plans up to `over` are over. Closes an earlier connection: if that was the true
    /// coordinator's, the coordinator connects again and takes its place back.
    pub(in crate::server) fn coordinated_by(&self, coordinator: ToCoordinator, over: PlanId) {
        let mut state = self.state.lock();
        if self.moved.get().is_some() {
            // The coordinator has not changed.
            return;
        }
        state.leave_coordinator(Close::Asked("the coordinator has connected again".into()));
        state.coordinator = Some(coordinator);
        state.coordinated_since = Instant::now();
        state.core.coordinated_anew(over);
    }

    /// An order of the coordinator, over this connection if it is elsewhere.
    pub(in crate::server) fn from_coordinator(
        self: &Arc<Partition>,
        request: u64,
        message: Message,
        link: Option<&Link>,
    ) {
        let mut actions = Vec::new();
        let mut state = self.state.lock();
        // A connection that another one has replaced has no authority any more.
        let is_the_coordinator = match (link, &state.coordinator) {
            (Some(link), Some(ToCoordinator::There(known))) => known.is(link),
            (link, known) => link.is_none() && !matches!(known, Some(ToCoordinator::There(_))),
        };
        if self.moved.get().is_some() || !is_the_coordinator {
            return;
        }
        let outcome = match message {
            Message::Start(plan) => self.start(&mut state, *plan, &mut actions),
            Message::Conclude { plan } => state.core.conclude(plan, &mut actions).map_err(Refusal::from),
            Message::Drop { plan } => {
                if let Some(clients) = state.core.silent(plan) {
                    state.send(self.epoch, 0, Message::Lacking { plan, clients });
                }
                state.core.drop_plan(plan, &mut actions).map_err(Refusal::from)
            }
            other => Err(Refusal::Role { what: other.name().to_owned() }),
        };
        if let Err(refusal) = outcome {
            state.send(self.epoch, request, Message::Refused(refusal));
        }
        self.act(state, actions);
    }

    fn start(
        &self,
        state: &mut PartitionState,
        plan: wire::Plan,
        actions: &mut Vec<Action>,
    ) -> Result<(), Refusal> {
        if let Work::Reduce { tensors, .. } | Work::Measure { tensors, .. } = &plan.work {
            let (got, expected) = (tensors.tensors(), self.store.partition().tensor_ends().len() as u64);
            if got != expected {
                let why = format!("the plan is of {got} tensors, the model has {expected}");
                return Err(Refusal::other(why));
            }
            if let Work::Reduce { factors, .. } = &plan.work
                && ![0, expected].contains(&factors.tensors())
            {
                let got = factors.tensors();
                return Err(Refusal::other(format!("factors of {got} tensors, the model has {expected}")));
            }
            if let Work::Reduce { step, groups, .. } | Work::Measure { step, groups, .. } = &plan.work {
                groups.check(expected, step.reducer).map_err(Refusal::other)?;
            }
        }
        let work = plan.work.clone();
        let mine = self.store.partition().blocks();
        let source = |source: &wire::PlanSource| Source {
            client: source.client,
            blocks: local_blocks(&source.blocks, mine),
            check: source.check,
            provisional: source.provisional,
        };
        let sources: Vec<Source> = plan.sources.iter().map(source).collect();
        let check = sources.iter().any(|source| source.check);
        let (id, base) = (plan.plan, plan.base);
        let in_place = self.store.changes_in_place(&plan.work);
        self.store.keep_changes(plan.changes as usize);
        let started = PartitionPlan { id, work: plan.work, base, sources, ordered: plan.ordered, in_place };
        let (before, repeats) = (actions.len(), state.core.running().is_some_and(|(of, _)| of == id));
        let insists = state.coordinated_since.elapsed() >= FORGOTTEN_AFTER;
        state.core.start(started, insists, actions)?;
        let seals = actions[before..].contains(&Action::Sealed(id));
        let begins = actions[before..].contains(&Action::Begin(id));
        // Others still compute while a sum is made, so nobody waits for that.
        if work.makes_version() && (seals || begins && !state.core.is_provisional()) {
            state.sealed = Some((id, Instant::now()));
        }
        if begins {
            self.takes_parts(id, plan.parts, base);
        }
        if begins || seals {
            let in_part = work.combine().is_some_and(Combine::replaces);
            state.partly = plan.sources.into_iter().filter(|of| in_part && !of.partly.is_empty()).collect();
        }
        match &state.job {
            Some((of, job)) if seals && *of == id => {
                if let Work::Reduce { tensors, factors, .. } = &work {
                    self.store.seal(job, tensors, factors);
                }
            }
            _ if begins || seals => state.starting = Some((id, base, work, check)),
            _ => {}
        }
        if let Some(why) = self.parts_fail(id).filter(|_| repeats) {
            state.send(self.epoch, 0, Message::Unmade { plan: id, why });
        }
        if repeats && !seals {
            let clients = state.core.lacking(id);
            if !clients.is_empty() {
                state.send(self.epoch, 0, Message::Lacking { plan: id, clients });
            }
        }
        Ok(())
    }

    /// Carries out actions, and wakes those that wait. Then it releases the lock, and delivers the messages to the
    /// coordinator.
    pub(super) fn act(
        self: &Arc<Partition>,
        mut state: parking_lot::MutexGuard<'_, PartitionState>,
        actions: Vec<Action>,
    ) {
        let mut batches = Vec::new();
        let mut jobs: Vec<Box<dyn FnOnce() + Send>> = Vec::new();
        let (mut begins, mut made, mut laid) = (None, None, None);
        for action in actions {
            match action {
                // If the memory is there, the plan begins before any client is told to send.
                Action::Begin(plan) => match &state.starting {
                    Some((of, _, work, _)) if *of == plan && self.store.is_prepared(work) => {
                        begins = Some(plan)
                    }
                    _ => {
                        let partition = Arc::clone(self);
                        jobs.push(Box::new(move || partition.begin(plan)));
                    }
                },
                Action::Gather(plan, blocks) => {
                    let partition = Arc::clone(self);
                    let gather = Box::new(move |block| partition.gather(plan, block));
                    let pass = Pass::Gather(gather, listed(&blocks));
                    batches.push(Batch { pass, done: Box::new(drop) });
                }
                Action::Compute(plan, blocks) => {
                    let partition = Arc::clone(self);
                    let done: Done = Box::new(move |outcome| partition.computed(plan, outcome));
                    match state.job_of(plan) {
                        Some(job) => {
                            batches.push(Batch { pass: Pass::Compute(job, listed(&blocks)), done });
                        }
                        None => jobs.push(Box::new(|| done(Ok(())))),
                    }
                }
                Action::Make(plan, blocks) => {
                    made = state.job_of(plan).map(|job| (plan, job, listed(&blocks)));
                }
                // Its job knows since the start was taken.
                Action::Sealed(_) => {}
                Action::Ready(plan) => {
                    let job = state.job_of(plan);
                    let ready = match job.as_ref().and_then(|job| job.squares()) {
                        Some(squares) => Message::Measured { plan, squares },
                        None => Message::Ready { plan },
                    };
                    // In place, the blocks are still to be computed.
                    if job.is_none_or(|job| !job.is_in_place()) {
                        self.is_computed(&mut state, plan);
                    }
                    state.send(self.epoch, 0, ready);
                }
                Action::NonFinite { plan, client, block } => {
                    let block = self.store.partition().global(BlockId(block)).unwrap_or_default();
                    state.send(self.epoch, 0, Message::NonFinitePayload { plan, client, block });
                }
                Action::Torn(plan) => state.send(self.epoch, 0, Message::Torn { plan }),
                Action::Done(plan) => state.send(self.epoch, plan.0, Message::Done),
                Action::Conclude(plan) => {
                    laid = Some(self.lets_parts_go(plan));
                    state.kept.clear();
                    self.is_computed(&mut state, plan);
                    let Some((_, job)) = state.job.take_if(|(of, _)| *of == plan) else { continue };
                    match self.store.conclude(&job) {
                        Ok(Some(merge)) => {
                            batches.push(Batch { pass: Pass::Merge(merge), done: Box::new(drop) });
                        }
                        Ok(None) if job.work().makes_version() && self.has_client_here => {
                            // The answer that follows reports the buffer, unless another message does so before.
                            state.here.has_buffer = true;
                            state.report_buffer(&self.store);
                        }
                        Ok(None) => {}
                        Err(error) => {
                            tracing::error!(model = %self.model, %plan, %error, "cannot be concluded");
                            let lost = ShardError::Lost(format!("plan {plan}: {error}"));
                            state.send(self.epoch, plan.0, Message::Refused(lost.into()));
                        }
                    }
                }
                Action::Void(plan) => {
                    laid = Some(self.lets_parts_go(plan));
                    state.kept.clear();
                    if let Some((_, job)) = state.job.take_if(|(of, _)| *of == plan) {
                        job.give_up();
                    }
                }
                Action::Abandon(plan) => {
                    state.coming.iter().for_each(|coming| coming.abandon(plan));
                }
            }
        }
        state.wake();
        let mailbox = state.mailbox();
        drop(state);
        // Freeing parts takes a while.
        drop(laid);
        if let Some(plan) = begins {
            self.begin(plan);
        }
        if let Some((plan, job, blocks)) = made {
            self.make(plan, job, blocks);
        }
        batches.into_iter().for_each(|batch| self.executor.execute(batch));
        jobs.into_iter().for_each(|job| self.executor.spawn(job));
        if let Some(mailbox) = mailbox {
            mailbox.drain();
        }
    }

    /// Takes the memory for a plan, or starts a thread that waits for some. A thread of the executor must not wait: the
    /// work that would free the memory may lie below on its stack.
    fn begin(self: &Arc<Partition>, plan: PlanId) {
        let error = match self.try_begin(plan) {
            Ok(()) => return,
            Err(error) => error,
        };
        if !error.is_transient() {
            return self.cannot_begin(plan, &error);
        }
        let partition = Arc::clone(self);
        let waits = move || partition.begin_later(plan, error);
        if let Err(error) = std::thread::Builder::new().name("begin".into()).spawn(waits) {
            self.cannot_begin(plan, &error);
        }
    }

    fn begin_later(self: &Arc<Partition>, plan: PlanId, mut error: PartitionError) {
        let started = Instant::now();
        let mut said = false;
        loop {
            if !said && started.elapsed() > START_NAMED_AFTER {
                // If there is no memory, the log says that.
                if self.store.shortage().is_none() {
                    tracing::warn!(model = %self.model, %plan, "cannot begin yet: {error}");
                }
                said = true;
            }
            std::thread::sleep(BEGIN_PAUSE);
            error = match self.try_begin(plan) {
                Ok(()) => return,
                Err(error) if error.is_transient() => error,
                Err(error) => return self.cannot_begin(plan, &error),
            }
        }
    }

    /// Reports to the coordinator that the plan never begins.
    fn cannot_begin(&self, plan: PlanId, error: &dyn std::fmt::Display) {
        tracing::error!(model = %self.model, %plan, %error, "cannot begin");
        let lost = ShardError::Lost(format!("plan {plan} cannot begin: {error}"));
        let state = self.state.lock();
        state.send(self.epoch, plan.0, Message::Refused(lost.into()));
        PartitionState::deliver(state);
    }

    fn try_begin(self: &Arc<Partition>, plan: PlanId) -> Result<(), PartitionError> {
        let mut actions = Vec::new();
        let mut state = self.state.lock();
        let wanted = state.core.wants(plan);
        if let Some((_, base, work, check)) = state.starting.clone().filter(|(of, ..)| wanted && *of == plan)
        {
            drop(state);
            if work.makes_version() {
                self.add_buffer();
            }
            let job = self.store.begin(base, work, check)?;
            state = self.state.lock();
            // The plan may have been sealed meanwhile.
            if let Some((_, _, Work::Reduce { tensors, factors, .. }, _)) = &state.starting
                && !state.core.is_provisional()
            {
                self.store.seal(&job, tensors, factors);
            }
            if state.core.wants(plan) {
                state.job = Some((plan, job));
            } else {
                job.give_up();
            }
            state.starting = None;
        }
        state.core.begun(plan, &mut actions);
        let granted = std::mem::take(&mut state.granted);
        self.act(state, actions);
        self.lay(plan);
        granted.into_iter().for_each(|granted| self.is_granted(granted));
        Ok(())
    }

    /// Blocks that came with a commit are granted. They go to their places when the plan has its memory. If they
    /// cannot, the client sends them.
    fn is_granted(self: &Arc<Partition>, granted: Granted) {
        {
            let mut state = self.state.lock();
            if state.core.begins(granted.plan) {
                state.granted.push(granted);
                return;
            }
        }
        if self.takes_granted(&granted) {
            return;
        }
        let mailbox = self.state.lock().mailbox();
        if let Some(mailbox) = mailbox {
            mailbox.put(MailboxEnd::Partition, MailboxEnd::Coordinator, Mail::Granted(granted));
            mailbox.drain();
        }
    }

    /// Takes blocks that came with a commit, which is granted now. False if the client must send them.
    fn takes_granted(self: &Arc<Partition>, granted: &Granted) -> bool {
        let Granted { client, plan, blocks, bytes, .. } = granted;
        let mut left = &bytes[..];
        for block in blocks.iter().cloned().flatten() {
            let taken = self.push_with_commit(*client, *plan, BlockId(block), &mut left);
            if !taken.unwrap_or(false) {
                return false;
            }
        }
        left.is_empty()
    }

    /// The executor has computed the blocks that nobody sends.
    fn computed(self: &Arc<Partition>, plan: PlanId, outcome: Result<(), (BlockId, PartitionError)>) {
        if let Err((block, error)) = outcome {
            tracing::error!(model = %self.model, %plan, %block, %error, "cannot be computed");
        }
        let mut state = self.state.lock();
        let mut actions = Vec::new();
        state.core.computed(plan, &mut actions);
        self.act(state, actions);
    }

    /// All blocks of the plan are computed here.
    fn is_computed(&self, state: &mut PartitionState, plan: PlanId) {
        if let Some((_, since)) = state.sealed.take_if(|(of, _)| *of == plan) {
            self.reduce.took(since.elapsed());
        }
    }

    /// Makes blocks of a version that counts. While somebody reads the state that they change, a thread waits.
    fn make(self: &Arc<Partition>, plan: PlanId, job: Arc<PartitionJob>, blocks: Vec<BlockId>) {
        match self.store.make(&job) {
            Ok(making) => return self.make_with(plan, making, blocks),
            Err(error) if error.is_transient() => {}
            Err(error) => return self.computed(plan, Err((BlockId(0), error))),
        }
        let partition = Arc::clone(self);
        let waits = move || {
            loop {
                std::thread::sleep(BEGIN_PAUSE);
                match partition.store.make(&job) {
                    Ok(making) => return partition.make_with(plan, making, blocks),
                    Err(error) if error.is_transient() => {}
                    Err(error) => return partition.computed(plan, Err((BlockId(0), error))),
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("make".into()).spawn(waits) {
            self.computed(plan, Err((BlockId(0), error.into())));
        }
    }

    /// Has the executor make blocks, a single one in this thread. A client in this process gets the message of
    /// the new version only after this: it shows the version at once.
    fn make_with(self: &Arc<Partition>, plan: PlanId, making: Making, blocks: Vec<BlockId>) {
        if self.has_client_here || blocks.len() == 1 {
            let outcome = self.executor.make(&making, &blocks);
            return self.computed(plan, outcome);
        }
        let partition = Arc::clone(self);
        let done: Done = Box::new(move |outcome| partition.computed(plan, outcome));
        self.executor.execute(Batch { pass: Pass::Make(making, blocks), done });
    }

    /// Takes a buffer with its pages if readers hold all that the next version could have. Until there is memory for
    /// it, the plan tries again and again, so not each failure is logged.
    fn add_buffer(&self) {
        let Err(error) = self.store.add_spare(1) else { return };
        let mut said = self.said_short.lock();
        if said.is_none_or(|at| at.elapsed() >= SHORTAGE_LOG_INTERVAL) {
            *said = Some(Instant::now());
            let what = "no memory for another version: the next one waits until readers close theirs";
            tracing::error!(model = %self.model, %error, "{what}");
        }
    }
}

fn listed(blocks: &FixedBitSet) -> Vec<BlockId> {
    blocks.ones().map(|block| BlockId(block as u32)).collect()
}

#[cfg(test)]
mod tests;
