//! The client's side of a job on a network: requests to the lead, what is to be pushed and pulled, what has to be
//! said again. Pure: events and `now` go in, actions come out; no bytes, no socket, no clock.
//!
//! Blocks move when the edge asks for work ([`ClientCore::next_push`], [`ClientCore::next_pull`]), as fast as its
//! connections take it. Nothing relies on a connection: what was lost is found missing, and sent or asked for again.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use fixedbitset::FixedBitSet;

use crate::block_map::BlockMap;
use crate::ids::{BlockId, LearnerId, PlanId, ShardId, Step, Version};
use crate::transport::{LeaveReason, ShardError};
use crate::wire::{Granted, JobState, LearnerState, Message, Refusal};

/// Time since the client started.
pub type Now = Duration;

/// The edge's name for a request. [`Token::MAX`] is the core's own for what it asks for by itself.
pub type Token = u64;

/// Index of a shard in the block map's order.
pub type Part = usize;

/// After such a silence a request is sent again, a push looked after, a pull asked for again.
const PATIENCE: Duration = Duration::from_millis(1000);

/// What a shard does not have yet, though the lead says that it counts, is asked for again after this.
const RETRY: Duration = Duration::from_millis(10);

/// Blocks that one pull request asks for.
pub const PULL_BLOCKS: usize = 4;

/// What the edge has to do.
#[derive(Debug, PartialEq)]
pub enum Action {
    /// Send to the lead, under this number.
    ToLead(u64, Message),
    /// Send to a shard.
    ToShard(Part, Message),
    /// There may be something to push to this shard, or to pull from it.
    Wake(Part),
    /// The outcome of a request: an answer of the kind that it asks for.
    Answer(Token, Result<Message, Refusal>),
    /// The outcome of [`ClientCore::await_step`].
    Awaited(Token, Result<Version, ShardError>),
    /// The payload of this contribution is no longer needed.
    Release(LearnerId, Step),
    /// The new weights of this token are no longer needed.
    ReleaseWeights(u64),
    /// The state of the job has changed.
    State,
    /// A learner of this client is no longer in the job.
    Left(LearnerId, LeaveReason),
    /// All blocks of this version are in the buffer: show it, then call [`ClientCore::shown`].
    Pulled(Version),
}

/// Where a learner's last commit is, as far as this client can show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastCommit {
    /// It is not in a version, or that version is not here yet.
    Waits,
    /// Part of this version; 0 before the first one.
    In(Version),
}

#[derive(Debug)]
struct Request {
    token: Token,
    message: Message,
    deadline: Now,
    made: Now,
    sent: Option<Now>,
}

impl Request {
    /// Sends it, perhaps again: then there is less time left for it.
    fn send(&mut self, id: u64, now: Now) -> Action {
        let gone = self.sent.map_or(now.saturating_sub(self.made), |sent| now.saturating_sub(sent));
        if let Message::Commit { timeout_ms, .. } | Message::Assign { timeout_ms, .. } = &mut self.message {
            *timeout_ms = timeout_ms.saturating_sub(u32::try_from(gone.as_millis()).unwrap_or(u32::MAX));
        }
        self.sent = Some(now);
        Action::ToLead(id, self.message.clone())
    }
}

/// What is being sent for a plan.
#[derive(Debug)]
struct Outgoing {
    plan: PlanId,
    payload: Granted,
    parts: Vec<Sending>,
}

#[derive(Debug)]
struct Sending {
    /// Blocks that are to be sent.
    todo: FixedBitSet,
    /// From here on.
    at: usize,
    /// The shard has all of it.
    done: bool,
    /// When something was last sent or asked.
    moved: Now,
}

#[derive(Debug)]
struct Pull {
    version: Version,
    parts: Vec<Receiving>,
    left: usize,
}

#[derive(Debug)]
struct Receiving {
    missing: FixedBitSet,
    /// Of them, those that were asked for.
    asked: FixedBitSet,
    /// Those that are landing at this moment.
    landing: FixedBitSet,
    moved: Now,
    /// The shard does not have the version yet: not before this.
    retry: Option<Now>,
}

/// What has to be shown for a wait to be over.
#[derive(Clone, Copy, Debug)]
enum Awaits {
    /// The last commit of this learner.
    Step(LearnerId),
    /// This version, or a newer one.
    Version(Version),
}

#[derive(Debug)]
struct Wait {
    token: Token,
    awaits: Awaits,
    deadline: Now,
}

/// One client of one model.
#[derive(Debug)]
pub struct ClientCore {
    blocks: usize,
    shards: Vec<ShardId>,
    /// By part: its blocks.
    owned: Vec<FixedBitSet>,
    lead_up: bool,
    shard_up: Vec<bool>,
    requests: BTreeMap<u64, Request>,
    next_request: u64,
    /// What the lead was last told that the client has heard.
    heard: u64,
    state: JobState,
    /// With the number of the first state that names each.
    learners: BTreeMap<LearnerId, (LearnerState, u64)>,
    /// Last steps whose commit was answered with success, which the state may not show yet.
    committed: BTreeMap<LearnerId, Step>,
    /// The next step of each learner, and the request that has told. None where a commit was not answered with
    /// success: only the lead knows.
    next_steps: BTreeMap<LearnerId, (u64, Option<Step>)>,
    /// Blocks of the contributions that may have to be sent.
    held: BTreeMap<(LearnerId, Step), FixedBitSet>,
    /// The same for new weights.
    weights: BTreeMap<u64, FixedBitSet>,
    outgoing: Option<Outgoing>,
    /// The newest plan that is over.
    over: PlanId,
    /// None before the first one is here.
    shown: Option<Version>,
    pull: Option<Pull>,
    /// A version is whole in the buffer, but not shown yet.
    whole: bool,
    /// Blocks of the pull's version that are landing at this moment.
    landing: u32,
    waits: Vec<Wait>,
    /// Versions are pulled only when somebody waits for them.
    on_demand: bool,
}

impl ClientCore {
    /// A client that shows nothing yet, of a model striped by `map`.
    pub fn new(map: &BlockMap) -> ClientCore {
        let shards: Vec<ShardId> = map.shares().into_keys().collect();
        let blocks = map.blocks() as usize;
        let owned: Vec<FixedBitSet> = shards
            .iter()
            .map(|&shard| {
                let mut mine = FixedBitSet::with_capacity(blocks);
                mine.extend(map.blocks_of(shard).map(BlockId::index));
                mine
            })
            .collect();
        ClientCore {
            blocks,
            lead_up: false,
            shard_up: vec![false; shards.len()],
            owned,
            shards,
            requests: BTreeMap::new(),
            next_request: 1,
            heard: 0,
            state: JobState::default(),
            learners: BTreeMap::new(),
            committed: BTreeMap::new(),
            next_steps: BTreeMap::new(),
            held: BTreeMap::new(),
            weights: BTreeMap::new(),
            outgoing: None,
            over: PlanId(0),
            shown: None,
            pull: None,
            whole: false,
            landing: 0,
            waits: Vec::new(),
            on_demand: false,
        }
    }

    /// Pulls no version after the first one unless somebody waits for it.
    pub fn on_demand(self) -> ClientCore {
        ClientCore { on_demand: true, ..self }
    }

    /// The shards in the order of [`Part`]s.
    pub fn shards(&self) -> &[ShardId] {
        &self.shards
    }

    /// The job as the lead last told it.
    pub fn state(&self) -> &JobState {
        &self.state
    }

    /// The version that the client shows; 0 also before there is one.
    pub fn version(&self) -> Version {
        self.shown.unwrap_or_default()
    }

    /// Requests that are not answered yet, and contributions and new weights whose payload is still needed.
    pub fn kept(&self) -> (usize, usize) {
        (self.requests.len(), self.held.len() + self.weights.len())
    }

    /// Whether `learner` is one of this client's and in the job.
    pub fn has_learner(&self, learner: LearnerId) -> bool {
        self.learners.contains_key(&learner)
    }

    /// The next step of `learner`, and whether the payload of the last one may still be needed. None when it is not
    /// known here: the outcome of its last commit is not, or it is not one of this client's.
    pub fn next_step(&self, learner: LearnerId) -> Option<(Step, bool)> {
        if !self.learners.contains_key(&learner) {
            return None;
        }
        let step = self.next_steps.get(&learner)?.1?;
        let lent = self.held.range((learner, Step(0))..=(learner, Step(u64::MAX))).next().is_some();
        Some((step, lent))
    }

    /// Where the last commit of `learner` is.
    pub fn last_commit(&self, learner: LearnerId) -> LastCommit {
        let committed = self.committed.get(&learner).copied().unwrap_or_default();
        match self.learners.get(&learner) {
            None => LastCommit::In(Version(0)),
            Some((known, _)) if known.step < committed || known.unpublished => LastCommit::Waits,
            Some((known, _)) if known.published_in > self.version() => LastCommit::Waits,
            Some((known, _)) => LastCommit::In(known.published_in),
        }
    }

    // -- requests

    /// Sends a request; it is answered once, before `deadline`. The payload of a commit or of new weights
    /// stays where it is until [`Action::Release`] or [`Action::ReleaseWeights`], which may be later than the answer.
    pub fn request(
        &mut self,
        token: Token,
        message: Message,
        deadline: Now,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        match &message {
            Message::Commit { learner, step, blocks, .. } => {
                let bits = self.bits(blocks);
                if self.held.get(&(*learner, *step)).is_some_and(|held| *held != bits) {
                    let why =
                        "the commit of this step may have been taken: commit the same blocks, or abort it";
                    let refused = Refusal::Shard(ShardError::NotAllowed(why.into()));
                    return actions.push(Action::Answer(token, Err(refused)));
                }
                self.held.insert((*learner, *step), bits);
            }
            Message::Assign { token, blocks, .. } => {
                self.weights.insert(*token, self.bits(blocks));
            }
            _ => {}
        }
        let id = self.next_request;
        self.next_request += 1;
        let mut request = Request { token, message, deadline, made: now, sent: None };
        if self.lead_up {
            actions.push(request.send(id, now));
        }
        self.requests.insert(id, request);
    }

    /// Sends what is not answered.
    pub fn notify(&mut self, message: Message, actions: &mut Vec<Action>) {
        if self.lead_up {
            actions.push(Action::ToLead(0, message));
        }
    }

    /// Answered when the client shows a version that holds the last commit of `learner`.
    pub fn await_step(
        &mut self,
        token: Token,
        learner: LearnerId,
        deadline: Now,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        self.wait(Wait { token, awaits: Awaits::Step(learner), deadline }, now, actions);
    }

    /// Answered when the client shows the newest version that it has been told of, or a newer one.
    pub fn await_newest(&mut self, token: Token, deadline: Now, now: Now, actions: &mut Vec<Action>) {
        self.wait(Wait { token, awaits: Awaits::Version(self.state.version), deadline }, now, actions);
    }

    fn wait(&mut self, wait: Wait, now: Now, actions: &mut Vec<Action>) {
        self.waits.push(wait);
        self.answer_waits(now, actions);
        self.start_pull(now, actions);
    }

    fn answer_waits(&mut self, now: Now, actions: &mut Vec<Action>) {
        let stopped = self.stopped();
        let mut waits = std::mem::take(&mut self.waits);
        waits.retain(|wait| {
            let late = |why: &'static str| {
                Some(Err(ShardError::TimedOut(why.into()))).filter(|_| wait.deadline <= now)
            };
            let result = match wait.awaits {
                Awaits::Step(learner) if !self.learners.contains_key(&learner) => {
                    Some(Err(ShardError::UnknownLearner(learner)))
                }
                Awaits::Step(learner) => match self.last_commit(learner) {
                    LastCommit::In(_) => Some(Ok(self.version())),
                    LastCommit::Waits => late("other learners have not contributed to this step")
                        .or_else(|| stopped.clone().map(Err)),
                },
                Awaits::Version(version) if self.shown.is_some_and(|shown| shown >= version) => {
                    Some(Ok(self.version()))
                }
                Awaits::Version(_) => late("the newest version has not come"),
            };
            let Some(result) = result else { return true };
            actions.push(Action::Awaited(wait.token, result));
            false
        });
        self.waits.append(&mut waits);
    }

    /// Why requests fail just now, if the job is stopped.
    pub fn stopped(&self) -> Option<ShardError> {
        let needed = self.state.controls.iter().find(|(name, _)| name == "min_learners");
        let needed = needed.and_then(|(_, value)| value.parse().ok()).unwrap_or(1);
        (self.state.state == "stopped").then_some(ShardError::Stopped { active: self.state.members, needed })
    }

    fn bits(&self, ranges: &[Range<u32>]) -> FixedBitSet {
        let mut bits = FixedBitSet::with_capacity(self.blocks);
        for range in ranges {
            bits.insert_range((range.start as usize).min(self.blocks)..(range.end as usize).min(self.blocks));
        }
        bits
    }

    fn release(&mut self, learner: LearnerId, step: Step, actions: &mut Vec<Action>) {
        if self.held.remove(&(learner, step)).is_some() {
            // A plan that has it is over, though word of that may be late.
            if self.sends(learner, step) {
                self.outgoing = None;
            }
            actions.push(Action::Release(learner, step));
        }
    }

    /// Releases what learners have left behind that nobody answers for any more. Should the lead ask for it yet, it
    /// is told that it is gone.
    fn release_left(&mut self, actions: &mut Vec<Action>) {
        let is_left = |&(learner, step): &(LearnerId, Step)| {
            !self.learners.contains_key(&learner)
                && !self.is_committing(learner, step)
                && !self.sends(learner, step)
        };
        let left: Vec<_> = self.held.keys().copied().filter(is_left).collect();
        for (learner, step) in left {
            self.release(learner, step, actions);
        }
    }

    fn is_committing(&self, learner: LearnerId, step: Step) -> bool {
        let of = |request: &Request| matches!(request.message, Message::Commit { learner: l, step: s, .. } if (l, s) == (learner, step));
        self.requests.values().any(of)
    }

    /// Whether the plan under way has this contribution.
    fn sends(&self, learner: LearnerId, step: Step) -> bool {
        let of = |outgoing: &Outgoing| matches!(&outgoing.payload, Granted::Contributions { of, .. } if of.contains(&(learner, step)));
        self.outgoing.as_ref().is_some_and(of)
    }

    /// Releases new weights that nobody waits for any more, unless they are being sent.
    fn release_weights(&mut self, actions: &mut Vec<Action>) {
        let is_needed = |token: u64| {
            self.requests
                .values()
                .any(|r| matches!(r.message, Message::Assign { token: t, .. } if t == token))
                || self.outgoing.as_ref().is_some_and(|outgoing| outgoing.payload == Granted::Weights(token))
        };
        let over: Vec<u64> = self.weights.keys().copied().filter(|&token| !is_needed(token)).collect();
        for token in over {
            self.weights.remove(&token);
            actions.push(Action::ReleaseWeights(token));
        }
    }

    /// Payload of steps before `step` is no longer needed: the lead has moved on.
    fn release_older(&mut self, learner: LearnerId, step: Step, actions: &mut Vec<Action>) {
        let old: Vec<Step> =
            self.held.range((learner, Step(0))..(learner, step)).map(|(&(_, step), _)| step).collect();
        for step in old {
            self.release(learner, step, actions);
        }
    }

    // -- what comes from the lead

    /// The connection to the lead is there: what is not answered is sent (again).
    pub fn lead_up(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.lead_up = true;
        if self.heard > 0 {
            actions.push(Action::ToLead(0, Message::Heard { request: self.heard }));
        }
        for (&id, request) in &mut self.requests {
            actions.push(request.send(id, now));
        }
    }

    /// It is gone.
    pub fn lead_down(&mut self) {
        self.lead_up = false;
    }

    /// A message from the lead.
    pub fn from_lead(&mut self, request: u64, message: Message, now: Now, actions: &mut Vec<Action>) {
        match message {
            _ if request != 0 => self.answered(request, message, now, actions),
            Message::State(state) => self.take_state(state, now, actions),
            Message::Grant { plan, payload } => self.granted(plan, payload, now, actions),
            Message::Over { plan } => self.plan_over(plan, actions),
            Message::Left { learner, reason } => self.learner_left(learner, reason, now, actions),
            // A lead sends nothing else unasked; what a later one may send means nothing here.
            _ => {}
        }
    }

    fn answered(&mut self, id: u64, answer: Message, now: Now, actions: &mut Vec<Action>) {
        let Some(request) = self.requests.remove(&id) else { return };
        let result = match answer {
            Message::Refused(refusal) => Err(refusal),
            answer => Ok(answer),
        };
        match (&request.message, &result) {
            (Message::Join { .. }, Ok(Message::Joined { learner, incarnation, since })) => {
                let new = LearnerState {
                    learner: *learner,
                    incarnation: *incarnation,
                    step: Step(0),
                    unpublished: false,
                    published_in: Version(0),
                    joined_at: Version(0),
                };
                self.learners.entry(*learner).or_insert((new, *since));
                self.next_is(*learner, id, Some(Step(1)));
            }
            (Message::Open { learner }, Ok(Message::Opened { step, staging_lent })) => {
                if self.learners.contains_key(learner) && !self.is_committing(*learner, *step) {
                    // While the step before may still be taken back, so may this number.
                    self.next_is(*learner, id, (!staging_lent).then_some(*step));
                }
                if !staging_lent {
                    self.release_older(*learner, *step, actions);
                }
                // If this one was committed before, that was in vain; unless it has been committed meanwhile.
                if !self.is_committing(*learner, *step) {
                    self.release(*learner, *step, actions);
                }
            }
            (Message::Commit { learner, step, .. }, Ok(_)) => {
                if self.learners.contains_key(learner) {
                    self.committed.insert(*learner, *step);
                    self.next_is(*learner, id, Some(step.next()));
                }
                self.release(*learner, *step, actions);
            }
            // Taken or not, that is not said: it may yet be asked for.
            (Message::Commit { learner, .. }, Err(Refusal::Shard(ShardError::TimedOut(_)))) => {
                self.next_is(*learner, id, None);
            }
            // The same commit was sent again, and that will be answered.
            (Message::Commit { learner, step, .. }, Err(_)) if self.is_committing(*learner, *step) => {}
            (Message::Commit { learner, step, .. }, Err(_)) => {
                self.next_is(*learner, id, None);
                self.release(*learner, *step, actions);
            }
            (Message::Leave { learner, reason }, Ok(_)) => self.learner_left(*learner, *reason, now, actions),
            _ => {}
        }
        self.release_left(actions);
        self.release_weights(actions);
        actions.push(Action::Answer(request.token, result));
        self.answer_waits(now, actions);
    }

    /// An answer tells which step of `learner` is next; one that comes late tells nothing.
    fn next_is(&mut self, learner: LearnerId, request: u64, step: Option<Step>) {
        let known = self.next_steps.entry(learner).or_insert((0, None));
        if request > known.0 {
            *known = (request, step);
        }
    }

    fn take_state(&mut self, state: JobState, now: Now, actions: &mut Vec<Action>) {
        if state.sequence <= self.state.sequence {
            return;
        }
        self.plan_over(state.over, actions);
        if state.heard < self.heard {
            self.notify(Message::Heard { request: self.heard }, actions);
        }
        let named: BTreeMap<LearnerId, LearnerState> =
            state.learners.iter().map(|learner| (learner.learner, learner.clone())).collect();
        let mut gone = Vec::new();
        for (learner, (known, since)) in &mut self.learners {
            match named.get(learner) {
                Some(new) => *known = new.clone(),
                // It has left, and word of that was lost.
                None if state.sequence >= *since => gone.push(*learner),
                None => {}
            }
        }
        for learner in gone {
            self.learner_left(learner, LeaveReason::LeaseExpired, now, actions);
        }
        for state in &state.learners {
            // All before a step that was taken is in versions.
            let needed = if state.unpublished { state.step } else { state.step.next() };
            self.release_older(state.learner, needed, actions);
        }
        let joining = self.requests.values().any(|request| matches!(request.message, Message::Join { .. }));
        if !joining {
            // One whose join was given up here has joined after all: nobody would ever use it.
            let strays: Vec<LearnerId> =
                named.keys().copied().filter(|learner| !self.learners.contains_key(learner)).collect();
            for learner in strays {
                let message = Message::Leave { learner, reason: LeaveReason::Asked };
                let id = self.next_request;
                self.next_request += 1;
                let deadline = now + 10 * PATIENCE;
                let mut request = Request { token: Token::MAX, message, deadline, made: now, sent: None };
                actions.push(request.send(id, now));
                self.requests.insert(id, request);
                self.learners.insert(learner, (named[&learner].clone(), state.sequence));
            }
        }
        self.state = state;
        actions.push(Action::State);
        self.start_pull(now, actions);
        self.answer_waits(now, actions);
    }

    fn learner_left(&mut self, learner: LearnerId, reason: LeaveReason, now: Now, actions: &mut Vec<Action>) {
        if self.learners.remove(&learner).is_none() {
            return;
        }
        self.committed.remove(&learner);
        self.next_steps.remove(&learner);
        // What it has committed stays: its payload is needed until the lead has answered for it.
        self.release_left(actions);
        actions.push(Action::Left(learner, reason));
        self.answer_waits(now, actions);
    }

    // -- pushing

    fn granted(&mut self, plan: PlanId, payload: Granted, now: Now, actions: &mut Vec<Action>) {
        let known = self.outgoing.as_ref().map_or(self.over, |outgoing| outgoing.plan.max(self.over));
        if plan <= known {
            return;
        }
        // The lead has one plan at a time.
        self.plan_over(PlanId(plan.0 - 1), actions);
        let mut blocks = FixedBitSet::with_capacity(self.blocks);
        let lacks = match &payload {
            Granted::Contributions { of, .. } => {
                of.iter().filter_map(|key| self.held.get(key)).for_each(|held| blocks.union_with(held));
                of.iter().find(|key| !self.held.contains_key(key)).map(|(learner, _)| Some(*learner))
            }
            Granted::Weights(token) => {
                self.weights.get(token).inspect(|held| blocks.union_with(held)).is_none().then_some(None)
            }
        };
        if let Some(learner) = lacks {
            return self.notify(Message::Lacks { plan, learner }, actions);
        }
        let parts = self.owned.iter().map(|owned| {
            let todo = owned & &blocks;
            Sending { done: todo.is_clear(), todo, at: 0, moved: now }
        });
        self.outgoing = Some(Outgoing { plan, payload, parts: parts.collect() });
        actions.extend((0..self.shards.len()).map(Action::Wake));
    }

    fn plan_over(&mut self, plan: PlanId, actions: &mut Vec<Action>) {
        self.over = self.over.max(plan);
        if self.outgoing.take_if(|outgoing| outgoing.plan <= plan).is_some() {
            self.release_left(actions);
            self.release_weights(actions);
        }
    }

    /// What the plan under way is made of.
    pub fn outgoing(&self) -> Option<(PlanId, &Granted)> {
        self.outgoing.as_ref().map(|outgoing| (outgoing.plan, &outgoing.payload))
    }

    /// Which of the plan's contributions hold `block`, in the order in which they are to be added; all of them for
    /// new weights.
    pub fn holds(&self, learner: LearnerId, step: Step, block: BlockId) -> bool {
        self.held.get(&(learner, step)).is_some_and(|held| held.contains(block.index()))
    }

    /// The next block to send to a shard. It counts as sent: call [`Self::shard_down`] if it may not have been.
    pub fn next_push(&mut self, part: Part, now: Now) -> Option<(PlanId, BlockId)> {
        let outgoing = self.outgoing.as_mut()?;
        let sending = &mut outgoing.parts[part];
        // The rest of the set begins at `at`: a step costs a step.
        let block = (sending.at..sending.todo.len()).find(|&block| sending.todo.contains(block))?;
        sending.todo.set(block, false);
        sending.at = block + 1;
        sending.moved = now;
        Some((outgoing.plan, BlockId(block as u32)))
    }

    /// The plan's sum holds NaN or Inf of `learner`, which is to be refused: tells the lead.
    pub fn unfit(&mut self, plan: PlanId, learner: LearnerId, block: BlockId, actions: &mut Vec<Action>) {
        self.notify(Message::Unfit { plan, learner, block }, actions);
    }

    // -- what comes from shards

    /// A connection to a shard is there (again): what was on its way may be lost.
    pub fn shard_up(&mut self, part: Part, now: Now, actions: &mut Vec<Action>) {
        self.shard_up[part] = true;
        self.look_after(part, now, actions);
        actions.push(Action::Wake(part));
    }

    /// None is.
    pub fn shard_down(&mut self, part: Part) {
        self.shard_up[part] = false;
    }

    /// One of several connections to a shard was lost: what was on it is found and sent again.
    pub fn look_after(&mut self, part: Part, now: Now, actions: &mut Vec<Action>) {
        if let Some(outgoing) = &mut self.outgoing
            && !outgoing.parts[part].done
        {
            outgoing.parts[part].moved = now;
            actions.push(Action::ToShard(part, Message::Probe { plan: outgoing.plan }));
        }
        if let Some(pull) = &mut self.pull {
            pull.parts[part].asked.clear();
            actions.push(Action::Wake(part));
        }
    }

    /// A message without payload from a shard.
    pub fn from_shard(&mut self, part: Part, message: Message, now: Now, actions: &mut Vec<Action>) {
        match message {
            Message::Missing { plan, blocks } => {
                let bits = self.bits(&blocks);
                let Some(outgoing) = self.outgoing.as_mut().filter(|outgoing| outgoing.plan == plan) else {
                    return;
                };
                let sending = &mut outgoing.parts[part];
                sending.done = bits.is_clear();
                sending.todo = &bits & &self.owned[part];
                sending.at = 0;
                sending.moved = now;
                actions.push(Action::Wake(part));
            }
            Message::Refused(Refusal::NoVersion { wanted, newest }) => {
                let Some(pull) = self.pull.as_mut().filter(|pull| pull.version == wanted) else { return };
                if newest > wanted {
                    // What one shard shows is decided, though the lead may not have said so here yet.
                    self.state.version = self.state.version.max(newest);
                    self.pull = None;
                    self.start_pull(now, actions);
                } else {
                    pull.parts[part].asked.clear();
                    pull.parts[part].retry = Some(now + RETRY);
                }
            }
            _ => {}
        }
    }

    // -- pulling

    /// Begins to pull the newest version if that is not the one that is shown, or being pulled.
    fn start_pull(&mut self, now: Now, actions: &mut Vec<Action>) {
        let is_shown = self.shown.is_some_and(|shown| self.state.version <= shown);
        if self.pull.is_some()
            || self.whole
            || self.landing > 0
            || self.state.sequence == 0
            || is_shown
            || !self.is_wanted()
        {
            return;
        }
        let receiving = |owned: &FixedBitSet| Receiving {
            missing: owned.clone(),
            asked: FixedBitSet::with_capacity(owned.len()),
            landing: FixedBitSet::with_capacity(owned.len()),
            moved: now,
            retry: None,
        };
        let parts = self.owned.iter().map(receiving).collect();
        self.pull = Some(Pull { version: self.state.version, parts, left: self.blocks });
        actions.extend((0..self.shards.len()).map(Action::Wake));
    }

    /// Whether somebody needs a newer version than the one that is shown.
    fn is_wanted(&self) -> bool {
        let newer = |wait: &Wait| match wait.awaits {
            Awaits::Version(version) => version > self.version(),
            Awaits::Step(learner) => {
                self.learners.get(&learner).is_some_and(|(known, _)| known.published_in > self.version())
            }
        };
        !self.on_demand || self.shown.is_none() || self.waits.iter().any(newer)
    }

    /// The version that is being pulled.
    pub fn pulling(&self) -> Option<Version> {
        self.pull.as_ref().map(|pull| pull.version)
    }

    /// The next request for blocks of a shard, while fewer than `window` blocks are on their way from it.
    pub fn next_pull(&mut self, part: Part, window: usize, now: Now) -> Option<Message> {
        let pull = self.pull.as_mut()?;
        let receiving = &mut pull.parts[part];
        let under_way = receiving.asked.count_ones(..);
        if under_way >= window || receiving.retry.is_some() {
            return None;
        }
        let count = PULL_BLOCKS.min(window - under_way);
        let asked: Vec<usize> = receiving.missing.difference(&receiving.asked).take(count).collect();
        let (&first, &last) = (asked.first()?, asked.last()?);
        // Those of the range that have come already would come again.
        let gap = |pair: &[usize]| {
            let between = &self.owned[part];
            (pair[0] + 1..pair[1]).any(|block| between.contains(block))
        };
        let last = asked.windows(2).find(|pair| gap(pair)).map_or(last, |pair| pair[0]);
        asked.into_iter().take_while(|&block| block <= last).for_each(|block| receiving.asked.insert(block));
        receiving.moved = now;
        Some(Message::Pull { version: pull.version, blocks: first as u32..last as u32 + 1 })
    }

    /// How many blocks a request asks a shard for.
    pub fn asked_in(&self, part: Part, blocks: &Range<u32>) -> usize {
        self.owned[part].count_ones(blocks.start as usize..blocks.end as usize)
    }

    /// A block of a version comes: true if it is wanted, and then [`Self::landed`] must follow. One that is landing
    /// is not wanted again: if the second one broke off, it would have spoilt the first.
    pub fn lands(&mut self, version: Version, block: BlockId) -> bool {
        let part = self.owned.iter().position(|owned| owned.contains(block.index()));
        let (Some(part), Some(pull)) = (part, &mut self.pull) else { return false };
        let receiving = &mut pull.parts[part];
        let wanted = pull.version == version
            && receiving.missing.contains(block.index())
            && !receiving.landing.put(block.index());
        self.landing += u32::from(wanted);
        wanted
    }

    /// A block is in the buffer, or (not `whole`) was lost on the way.
    pub fn landed(
        &mut self,
        version: Version,
        block: BlockId,
        whole: bool,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        self.landing = self.landing.saturating_sub(1);
        let part = self.owned.iter().position(|owned| owned.contains(block.index()));
        if let (Some(part), Some(pull)) = (part, &mut self.pull)
            && pull.version == version
        {
            let receiving = &mut pull.parts[part];
            receiving.moved = now;
            receiving.asked.set(block.index(), false);
            receiving.landing.set(block.index(), false);
            if whole && receiving.missing.contains(block.index()) {
                receiving.missing.set(block.index(), false);
                pull.left -= 1;
            }
            if pull.left == 0 && self.landing == 0 {
                self.pull = None;
                self.whole = true;
                actions.push(Action::Pulled(version));
                return;
            }
            // Who brought the block asks for more by itself.
            if receiving.asked.is_clear() {
                actions.push(Action::Wake(part));
            }
        }
        self.start_pull(now, actions);
    }

    /// The version is shown from now on.
    pub fn shown(&mut self, version: Version, now: Now, actions: &mut Vec<Action>) {
        self.shown = self.shown.max(Some(version));
        self.whole = false;
        self.start_pull(now, actions);
        self.answer_waits(now, actions);
    }

    // -- time

    /// When [`Self::tick`] has something to do at the latest.
    pub fn next_deadline(&self) -> Option<Now> {
        let requests = self.requests.values().flat_map(|request| {
            let again = request.sent.filter(|_| self.lead_up).map(|sent| sent + PATIENCE);
            [Some(request.deadline), again].into_iter().flatten()
        });
        let waits = self.waits.iter().map(|wait| wait.deadline);
        let sending = self.outgoing.iter().flat_map(|outgoing| &outgoing.parts);
        let sending = sending.filter(|part| !part.done).map(|part| part.moved + PATIENCE);
        let pulling = self.pull.iter().flat_map(|pull| &pull.parts);
        let pulling = pulling.filter(|part| !part.missing.is_clear());
        let pulling = pulling.map(|part| part.retry.unwrap_or(part.moved + PATIENCE));
        requests.chain(waits).chain(sending).chain(pulling).min()
    }

    /// Time passes: deadlines, and what has to be said again.
    pub fn tick(&mut self, now: Now, actions: &mut Vec<Action>) {
        let late: Vec<u64> =
            self.requests.iter().filter(|(_, request)| request.deadline <= now).map(|(&id, _)| id).collect();
        for id in late {
            if let Some(request) = self.requests.remove(&id) {
                let late = ShardError::TimedOut("the shard that leads this model does not answer".into());
                if let Message::Commit { learner, .. } = request.message {
                    self.next_is(learner, id, None);
                }
                self.release_left(actions);
                self.release_weights(actions);
                actions.push(Action::Answer(request.token, Err(late.into())));
            }
        }
        if self.lead_up {
            for (&id, request) in &mut self.requests {
                if request.sent.is_none_or(|sent| sent + PATIENCE <= now) {
                    actions.push(request.send(id, now));
                }
            }
            let heard = self.requests.keys().next().map_or(self.next_request, |&first| first) - 1;
            if heard > self.heard {
                self.heard = heard;
                actions.push(Action::ToLead(0, Message::Heard { request: heard }));
            }
        }
        for part in 0..self.shards.len() {
            self.tick_part(part, now, actions);
        }
        self.answer_waits(now, actions);
    }

    fn tick_part(&mut self, part: Part, now: Now, actions: &mut Vec<Action>) {
        if let Some(outgoing) = &mut self.outgoing {
            let sending = &mut outgoing.parts[part];
            if !sending.done && sending.moved + PATIENCE <= now {
                sending.moved = now;
                // Only what has all been sent can be missing.
                if sending.todo.is_clear() {
                    actions.push(Action::ToShard(part, Message::Probe { plan: outgoing.plan }));
                } else {
                    actions.push(Action::Wake(part));
                }
            }
        }
        if let Some(pull) = &mut self.pull {
            let receiving = &mut pull.parts[part];
            if receiving.retry.take_if(|at| *at <= now).is_some() {
                actions.push(Action::Wake(part));
            }
            if !receiving.missing.is_clear() && receiving.moved + PATIENCE <= now {
                receiving.moved = now;
                receiving.asked.clear();
                actions.push(Action::Wake(part));
            }
        }
    }
}
