//! Requests to the coordinator. A request is sent when the coordinator is connected, repeated while there is no
//! answer, and answered once.

use std::collections::BTreeMap;
use std::time::Duration;

use super::coordination::ToldLearners;
use super::held::KeptContribution;
use super::learners::{Learner, OnlyInPlan};
use super::{Action, ClientCore, Now, REPEAT_AFTER, Token};
use crate::vocabulary::ids::{LearnerId, Step, Version};
use crate::vocabulary::members::Attached;
use crate::vocabulary::phase::JobPhase;
use crate::vocabulary::settings_json;
use crate::vocabulary::shard_error::ShardError;
use crate::wire::{Granted, LearnerState, Message, Refusal};

#[derive(Debug)]
pub(super) struct Request {
    pub(super) token: Token,
    pub(super) message: Message,
    pub(super) deadline: Now,
    pub(super) made: Now,
    pub(super) sent: Option<Now>,
    /// The caller waits no more: the request ends at the deadline with [`ShardError::Interrupted`].
    pub(super) is_withdrawn: bool,
}

/// The time that a withdrawn call still waits for the coordinator's answer.
const WITHDRAWN: Duration = Duration::from_millis(400);

/// The deadline of requests that the client has already answered itself.
const BESIDE: Duration = Duration::from_secs(30);

impl Request {
    /// The core's own, whose answer nobody waits for.
    fn own(message: Message, deadline: Now, now: Now) -> Request {
        Request { token: Token::MAX, message, deadline, made: now, sent: None, is_withdrawn: false }
    }

    /// Sends the request, perhaps again, with the time that is left for it.
    pub(super) fn send(&mut self, id: u64, now: Now) -> Action {
        let gone = self.sent.map_or(now.saturating_sub(self.made), |sent| now.saturating_sub(sent));
        if let Message::Commit { timeout_ms, .. }
        | Message::Assign { timeout_ms, .. }
        | Message::AssignPart { timeout_ms, .. } = &mut self.message
        {
            *timeout_ms = timeout_ms.saturating_sub(u32::try_from(gone.as_millis()).unwrap_or(u32::MAX));
        }
        self.sent = Some(now);
        Action::ToCoordinator(id, self.message.clone())
    }
}

/// The unanswered requests, by their numbers.
#[derive(Debug)]
pub(super) struct Requests {
    open: BTreeMap<u64, Request>,
    next: u64,
    /// The number that the client last sent in an `AckThrough`.
    acked_through: u64,
}

impl Default for Requests {
    fn default() -> Requests {
        Requests { open: BTreeMap::new(), next: 1, acked_through: 0 }
    }
}

impl Requests {
    /// The number of the next request.
    fn number(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        number
    }

    /// Makes a request of the core's own, which the next tick sends. Returns its number.
    pub(super) fn make_own(&mut self, message: Message, deadline: Now, now: Now) -> u64 {
        let id = self.number();
        self.open.insert(id, Request::own(message, deadline, now));
        id
    }

    /// Sends a request now, perhaps again.
    pub(super) fn send(&mut self, id: u64, now: Now) -> Option<Action> {
        self.open.get_mut(&id).map(|request| request.send(id, now))
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Request> {
        self.open.get_mut(&id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &Request)> {
        self.open.iter().map(|(&id, request)| (id, request))
    }

    /// Whether such a message has no answer yet.
    pub(super) fn has(&self, is_it: impl Fn(&Message) -> bool) -> bool {
        self.open.values().any(|request| is_it(&request.message))
    }

    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    /// The number up to which the coordinator was told that all requests have answers.
    pub(super) fn acked_through(&self) -> u64 {
        self.acked_through
    }

    /// The number of the newest request.
    pub(super) fn newest(&self) -> u64 {
        self.next - 1
    }

    /// Whether the coordinator is to be told that more requests have answers.
    fn acks_more(&mut self) -> bool {
        let through = self.open.keys().next().map_or(self.next, |&first| first) - 1;
        let is_more = through > self.acked_through;
        self.acked_through = self.acked_through.max(through);
        is_more
    }
}

impl ClientCore {
    /// Sends a request, which is answered once and before `deadline`. The payload of a commit or of new weights stays
    /// where it is until [`Action::Release`] or [`Action::ReleaseWeights`], perhaps beyond the answer.
    pub fn request(
        &mut self,
        token: Token,
        mut message: Message,
        deadline: Now,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        if let Some(why) = self.refuses(token, &message, now) {
            return actions.push(Action::Answer(token, Err(Refusal::Shard(why))));
        }
        let mut committed = None;
        match &mut message {
            Message::Commit { learner, step, blocks, partly, given_up, .. } => {
                *given_up = self.plans.given_up();
                committed = Some((*learner, *step));
                let blocks = self.owners.bits(blocks);
                if self.held.get(&(*learner, *step)).is_some_and(|held| held.blocks != blocks) {
                    let why =
                        "the commit of this step may have been taken: commit the same blocks, or abort it";
                    let refused = Refusal::Shard(ShardError::NotAllowed(why.into()));
                    return actions.push(Action::Answer(token, Err(refused)));
                }
                let sending = self.outgoing.as_ref().map(|outgoing| outgoing.plan);
                let open = self.learners.get_mut(learner).and_then(|known| known.open.as_mut());
                let ahead = open.filter(|open| open.step == *step).map(|open| &mut open.ahead);
                let is_lost =
                    |only_in_plan: &OnlyInPlan| only_in_plan.plan.is_none() || only_in_plan.plan != sending;
                let only_in_plan = ahead.as_ref().and_then(|ahead| ahead.as_ref()?.only_in_plan.as_ref());
                if only_in_plan.is_some_and(is_lost) && !self.held.contains_key(&(*learner, *step)) {
                    let why = "blocks of it were reduced for a version that is not made: write it again";
                    let refused = Refusal::Shard(ShardError::NotAllowed(why.into()));
                    return actions.push(Action::Answer(token, Err(refused)));
                }
                // The blocks that were sent before the commit are now part of it.
                let ahead = ahead.and_then(Option::take);
                let mut whole = blocks.clone();
                match (partly, &ahead) {
                    (Some(partly), _) => {
                        partly.blocks().for_each(|(block, _)| whole.set(block.index(), false))
                    }
                    (None, Some(ahead)) => whole.intersect_with(&ahead.whole),
                    (None, None) => whole.clear(),
                }
                let (sent_under, only_in_plan) =
                    ahead.map_or((None, None), |ahead| (ahead.sent_under, ahead.only_in_plan));
                let before = self.held.remove(&(*learner, *step));
                let (sent_before, only_before) =
                    before.map_or((None, None), |held| (held.sent_under, held.only_in_plan));
                let (sent_under, only_in_plan) = (sent_under.max(sent_before), only_in_plan.or(only_before));
                let request = self.requests.next;
                let held = KeptContribution {
                    blocks,
                    whole,
                    request,
                    sent_under,
                    only_in_plan,
                    left_at: None,
                    is_taken_back: false,
                    strays_of: None,
                };
                self.held.insert((*learner, *step), held);
            }
            Message::Abort { learner } => self.takes_back(*learner, actions),
            Message::Withdraw { learner } => {
                let learner = *learner;
                self.hurry(
                    now,
                    |message| matches!(message, Message::Commit { learner: of, .. } if *of == learner),
                );
            }
            Message::WithdrawAssign { token } => {
                let token = *token;
                self.hurry(
                    now,
                    |message| matches!(message, Message::Assign { token: of, .. } | Message::AssignPart { token: of, .. } if *of == token),
                );
            }
            Message::Leave { learner, .. } => self.drop_ahead(*learner, actions),
            Message::Assign { token, blocks, ahead, .. } => {
                *ahead = self.publishes(*token);
                self.weights.publish(*token, self.owners.bits(blocks));
            }
            _ => {}
        }
        if let Some(key) = committed {
            self.commits_ahead(key, actions);
        }
        let id = self.requests.number();
        let mut request = Request { token, message, deadline, made: now, sent: None, is_withdrawn: false };
        if self.coordination.is_up() {
            actions.push(request.send(id, now));
        }
        self.requests.open.insert(id, request);
        self.tick_reach(now, actions);
        // A connected coordinator refuses the request itself. Without one, nobody else would.
        if let Some(why) = self.lost().filter(|_| self.is_abandoned() || !self.coordination.is_up()) {
            self.answered(id, Message::Refused(why.into()), now, actions);
        }
    }

    /// The coordinator's process is gone, and the job with it. `why` answers all waiting and later requests. This
    /// state ends when another block map takes effect, or when the coordinator is found after all.
    pub fn fail(&mut self, why: ShardError, now: Now, actions: &mut Vec<Action>) {
        let before = std::mem::replace(&mut self.state.phase, JobPhase::Failed);
        self.coordination.lose(why.clone(), before);
        let is_lent = |request: &Request| matches!(request.message, Message::Commit { lent: true, .. });
        if self.requests.open.values().any(is_lent) {
            // The coordinator has not decided this, so shards may still be reading.
            actions.push(Action::EndLoans);
        }
        if self.outgoing.is_some() {
            // If the coordinator is found after all, the plan under way may count.
            for (learner, _) in self.held.keys() {
                self.learners.get_mut(learner).into_iter().for_each(Learner::is_still_read);
            }
        }
        for id in self.requests.open.keys().copied().collect::<Vec<_>>() {
            self.answered(id, Message::Refused(why.clone().into()), now, actions);
        }
        // The payload of earlier requests will not be granted any more.
        let is_weights = |payload: &Granted| matches!(payload, Granted::Weights(_) | Granted::OpenWeights(_));
        self.outgoing.take_if(|outgoing| is_weights(&outgoing.payload));
        self.release_weights(actions);
        for (learner, step) in self.held.keys().copied().collect::<Vec<_>>() {
            self.release(learner, step, actions);
        }
        self.outgoing.take_if(|outgoing| outgoing.is_provisional());
        self.answer_waits(now, actions);
        actions.push(Action::State);
    }

    /// The job is restored, in another life. Returns whether that is new.
    pub fn is_restoring(&mut self, actions: &mut Vec<Action>) -> bool {
        let before = std::mem::replace(&mut self.state.phase, JobPhase::Restoring);
        actions.push(Action::State);
        before != JobPhase::Restoring
    }

    /// The job has a coordinator.
    pub(super) fn found(&mut self) {
        if let Some(before) = self.coordination.find() {
            self.state.phase = before;
        }
    }

    /// The coordinator's connection is open. All unanswered requests are sent (again).
    pub fn coordinator_up(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.coordination.up();
        self.found();
        self.reach.coordinator_answers();
        // Numbers from an earlier connection, perhaps of another coordinator, no longer count.
        self.plans.begin_anew();
        actions.push(self.numbers());
        actions.extend(self.owners.relay.offer.clone().map(|offer| Action::ToCoordinator(0, offer)));
        for (&id, request) in &mut self.requests.open {
            actions.push(request.send(id, now));
        }
    }

    /// The coordinator's connection has ended. Requests that were made after the coordinator had reported a failed
    /// job were not taken, so they fail. Earlier requests may have been taken, and wait.
    pub fn coordinator_down(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.coordination.down();
        let (Some(failed_at), Some(why)) = (self.coordination.failed_at(), self.lost()) else { return };
        let asked_since = |request: &Request| request.made >= failed_at;
        let refused: Vec<u64> = self
            .requests
            .open
            .iter()
            .filter(|(_, request)| asked_since(request))
            .map(|(&id, _)| id)
            .collect();
        for id in refused {
            self.answered(id, Message::Refused(why.clone().into()), now, actions);
        }
    }

    /// A message from the coordinator.
    pub fn from_coordinator(&mut self, request: u64, message: Message, now: Now, actions: &mut Vec<Action>) {
        match message {
            _ if request != 0 => self.answered(request, message, now, actions),
            Message::State(state) => self.take_state(*state, now, actions),
            Message::Grant { plan, payload, counted } => self.granted(plan, payload, counted, now, actions),
            Message::Begun { plan } => self.begun(plan, now, actions),
            Message::PullVia { address, depth } => self.pulls_via(address, depth, now, actions),
            Message::Over { plan } => self.plan_over(plan, actions),
            Message::Left { learner, reason } => self.learner_left(learner, reason, now, actions),
            Message::Readers { since, revision, readers, gone } => {
                self.take_readers((since, revision), readers, &gone, actions);
            }
            Message::Learners { version, contributions, learners, unlisted } => {
                self.take_learners(ToldLearners { version, contributions, learners, unlisted });
            }
            // A coordinator of this protocol sends nothing else unasked.
            _ => {}
        }
    }

    pub(super) fn answered(&mut self, id: u64, answer: Message, now: Now, actions: &mut Vec<Action>) {
        let Some(request) = self.requests.open.remove(&id) else { return };
        let result = match answer {
            Message::Refused(refusal) => Err(refusal),
            answer => Ok(answer),
        };
        match (&request.message, &result) {
            (Message::Join { name }, Ok(Message::Joined { learner, incarnation, since })) => {
                let new = LearnerState {
                    learner: *learner,
                    incarnation: *incarnation,
                    step: Step(0),
                    unpublished: false,
                    published_in: Version(0),
                    joined_at: self.state.version,
                    attached: Attached::No,
                };
                // Until the next state includes the learner, the client adds it to the state it has.
                if self.state.learners.iter().all(|known| known.learner != *learner) {
                    self.state.learners.push(new.clone());
                }
                let new = || Learner::new(None, new, *since);
                self.learners.entry(*learner).or_insert_with(new).name = Some(name.clone());
                self.next_is(*learner, id, Some(Step(1)));
            }
            (Message::Open { learner }, Ok(Message::Opened { step, staging_lent })) => {
                // While the step before can still be taken back, this step's number is not final.
                let next = (!staging_lent).then_some(*step);
                if !self.is_committing(*learner, *step)
                    && self.next_is(*learner, id, next)
                    && request.token != Token::MAX
                {
                    self.opened(*learner, *step, actions);
                }
                if !staging_lent {
                    self.release_older(*learner, *step, actions);
                }
                // Earlier commits of this step and of later ones were in vain.
                let later = self.held.range((*learner, *step)..=(*learner, Step(u64::MAX)));
                let later: Vec<_> = later.map(|(key, _)| *key).collect();
                later.into_iter().for_each(|key| self.release_refused(id, key, actions));
            }
            (Message::Commit { learner, step, lent, .. }, Ok(_)) => {
                self.has_committed(*learner, *step, id);
                if *lent || !self.way.is_in_place() {
                    self.release(*learner, *step, actions);
                }
            }
            // The outcome is open: the coordinator may still grant it.
            (Message::Commit { learner, lent: false, .. }, Err(Refusal::Shard(ShardError::TimedOut(_)))) => {
                self.next_is(*learner, id, None);
            }
            // The same commit was sent again, and has its own answer.
            (Message::Commit { learner, step, .. }, Err(_)) if self.is_committing(*learner, *step) => {}
            (Message::Commit { learner, step, .. }, Err(_)) => {
                self.next_is(*learner, id, None);
                self.release_refused(id, (*learner, *step), actions);
            }
            // The next state shows the setting.
            (Message::SetControl { name, value }, Ok(_)) => {
                if let Ok(controls) = settings_json::with(&self.state.controls, name, value.trim()) {
                    self.state.controls = controls;
                }
            }
            (Message::Leave { learner, reason }, Ok(_)) => self.learner_left(*learner, *reason, now, actions),
            // This is the core's own request. It is repeated as long as the coordinator names a learner that nobody
            // uses.
            (Message::Leave { learner, .. }, Err(_)) if request.token == Token::MAX => {
                self.learners.remove(learner);
            }
            _ => {}
        }
        self.release_left(actions);
        self.release_weights(actions);
        actions.push(Action::Answer(request.token, result));
        self.answer_waits(now, actions);
    }

    /// Programs have their lent memory back, whatever becomes of their commits. Nobody waits for those commits any
    /// more.
    pub fn end_loans(&mut self, actions: &mut Vec<Action>) {
        let lent = |request: &Request| match request.message {
            Message::Commit { learner, step, lent: true, .. } => Some((learner, step)),
            _ => None,
        };
        let ended: Vec<_> = self.requests.open.extract_if(.., |_, request| lent(request).is_some()).collect();
        for (learner, step) in ended.iter().filter_map(|(_, request)| lent(request)) {
            self.end_loan(learner, step, actions);
        }
    }

    /// The coordinator has not decided about this commit, and its program has the memory back. Whatever was not read
    /// yet never counts.
    fn end_loan(&mut self, learner: LearnerId, step: Step, actions: &mut Vec<Action>) {
        self.release(learner, step, actions);
        actions.push(Action::EndLoans);
    }

    /// Handles deadlines, and repeats requests.
    pub(super) fn tick_requests(&mut self, now: Now, actions: &mut Vec<Action>) {
        let late: Vec<u64> = self
            .requests
            .open
            .iter()
            .filter(|(_, request)| request.deadline <= now)
            .map(|(&id, _)| id)
            .collect();
        for id in late {
            let is_withdrawn = self.requests.open.get(&id).is_some_and(|request| request.is_withdrawn);
            let late = match is_withdrawn {
                true => ShardError::Interrupted,
                false => self.unanswered(now),
            };
            self.give_up(id, late, actions);
        }
        if self.coordination.is_up() {
            let is_late = |request: &Request| request.sent.is_none_or(|sent| sent + REPEAT_AFTER <= now);
            // If requests have no effect, the coordinator may not know their numbers either.
            if self.requests.acks_more() || self.requests.open.values().any(is_late) {
                actions.push(self.numbers());
            }
            for (&id, request) in self.requests.open.iter_mut().filter(|(_, request)| is_late(request)) {
                actions.push(request.send(id, now));
            }
        }
    }

    /// The callers of these requests wait no more. A shard that is away holds up nobody's signal.
    fn hurry(&mut self, now: Now, is_it: impl Fn(&Message) -> bool) {
        for request in self.requests.open.values_mut().filter(|request| is_it(&request.message)) {
            request.deadline = request.deadline.min(now + WITHDRAWN);
            request.is_withdrawn = true;
        }
    }

    /// A contribution of `learner` is taken back. The coordinator hears of it, however long it is away: a commit that
    /// it takes before then finds no payload here.
    fn takes_back(&mut self, learner: LearnerId, actions: &mut Vec<Action>) {
        // The later one says the same.
        let is_earlier = |request: &Request| {
            request.token == Token::MAX
                && matches!(request.message, Message::Abort { learner: of } if of == learner)
        };
        self.requests.open.retain(|_, request| !is_earlier(request));
        self.drop_open(learner, actions);
        let Some(known) = self.learners.get(&learner).filter(|_| !self.way.is_in_place()) else { return };
        let from = known.committed.next();
        for (_, held) in self.held.range_mut((learner, from)..=(learner, Step(u64::MAX))) {
            held.is_taken_back = true;
        }
        let steps: Vec<_> =
            self.held.range((learner, from)..=(learner, Step(u64::MAX))).map(|(key, _)| key.1).collect();
        if steps.into_iter().any(|step| self.sends(learner, step)) {
            self.stop_sending();
        }
    }

    /// Nobody waits for this request any more. Its outcome is open. What must reach the coordinator is repeated until
    /// it answers.
    pub(super) fn give_up(&mut self, id: u64, why: ShardError, actions: &mut Vec<Action>) {
        if let Some(request) = self.requests.get_mut(id)
            && matches!(request.message, Message::Abort { .. })
        {
            request.deadline = Now::MAX;
            let token = std::mem::replace(&mut request.token, Token::MAX);
            return actions.push(Action::Answer(token, Err(why.into())));
        }
        let Some(request) = self.requests.open.remove(&id) else { return };
        match request.message {
            Message::Commit { learner, step, lent, .. } => {
                self.next_is(learner, id, None);
                if lent {
                    self.end_loan(learner, step, actions);
                }
            }
            // This is the core's own request. It is repeated as long as the coordinator names a learner that nobody
            // uses.
            Message::Leave { learner, .. } if request.token == Token::MAX => {
                self.learners.remove(&learner);
            }
            _ => {}
        }
        if let Message::Assign { token, .. } | Message::AssignPart { token, .. } = request.message {
            // The next tick sends this, and later ones repeat it until the coordinator is back.
            self.requests.make_own(Message::WithdrawAssign { token }, Now::MAX, request.made);
        }
        self.release_left(actions);
        self.release_weights(actions);
        actions.push(Action::Answer(request.token, Err(why.into())));
    }

    /// Ends the requests that need a shard which has been out of reach for too long.
    pub(super) fn tick_reach(&mut self, now: Now, actions: &mut Vec<Action>) {
        if !self.reach.misses_a_shard() {
            return;
        }
        let waiting = self.requests.iter().filter(|(_, request)| request.token != Token::MAX);
        let ended = waiting.filter_map(|(id, request)| Some((id, self.ends(&request.message, now)?)));
        for (id, why) in ended.collect::<Vec<_>>() {
            match self.requests.get_mut(id) {
                Some(request) if matches!(request.message, Message::Leave { .. }) => {
                    let token = std::mem::replace(&mut request.token, Token::MAX);
                    request.deadline = Now::MAX;
                    actions.push(Action::Answer(token, Err(Refusal::Shard(why))));
                }
                _ => self.give_up(id, why, actions),
            }
        }
    }

    /// Opens the next contribution of `learner`. If this client knows its step, it answers at once and informs the
    /// coordinator in parallel.
    pub fn open(
        &mut self,
        token: Token,
        learner: LearnerId,
        deadline: Now,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        match self.open_known(learner, deadline, now, actions) {
            Some((step, staging_lent)) => {
                actions.push(Action::Answer(token, Ok(Message::Opened { step, staging_lent })));
            }
            None => self.request(token, Message::Open { learner }, deadline, now, actions),
        }
    }

    /// Like [`Self::open`], if this client knows the step. Returns the step, and whether the staging memory is still
    /// lent.
    pub fn open_known(
        &mut self,
        learner: LearnerId,
        deadline: Now,
        now: Now,
        actions: &mut Vec<Action>,
    ) -> Option<(Step, bool)> {
        let known = self.next_step(learner)?;
        self.opened(learner, known.0, actions);
        let message = Message::Open { learner };
        // In one process no message is lost, so none has to be answered.
        match self.way.is_in_place() {
            true => self.notify(message, actions),
            false => self.request(Token::MAX, message, deadline.max(now + BESIDE), now, actions),
        }
        Some(known)
    }
}
