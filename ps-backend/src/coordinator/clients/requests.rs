//! What clients ask for, which is carried out once, and their leases.

use std::collections::BTreeSet;

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::block_ranges;
use libmodelio::vocabulary::ids::{ClientId, LearnerId};
use libmodelio::vocabulary::partly::{MAX_PIECES, PartlyWritten};
use libmodelio::vocabulary::settings_json;
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::{Message, ReaderDoes, Refusal};

use super::{Client, GivenUp, given_up_at};
use crate::coordinator::requests::{Asked, Known, MAX_ANSWERS};
use crate::coordinator::senders::ranges;
use crate::coordinator::sets::{Complete, Part};
use crate::coordinator::{Action, CoordinatorCore, MAX_CLIENTS, NOBODY};
use crate::core::{Contribution, Now, Opening, Source, Ticket};

/// The longest name of a setting, in bytes.
const MAX_SETTING_NAME: usize = 64;

/// The longest reason of a refusal that quotes a client, in characters.
const MAX_REASON: usize = 1000;

/// If leases never end, a client that is not connected and has nothing in the job is forgotten after this time.
const FORGET: Now = Now::from_secs(60);

/// Why a client is given up whose lease is over.
const SILENT: &str = "silent past the lease";

impl CoordinatorCore {
    /// A client connects, perhaps again. It is sent the state of the job.
    ///
    /// # Errors
    /// When there are too many clients.
    pub fn client_up(&mut self, id: ClientId, now: Now, actions: &mut Vec<Action>) -> Result<(), Refusal> {
        let is_full = !self.clients.contains_key(&id) && self.clients.len() >= MAX_CLIENTS;
        let idle = if is_full { self.idle_client() } else { None };
        if is_full && idle.is_none() {
            return Err(Refusal::Other(format!("the model already has {MAX_CLIENTS} clients, its limit")));
        }
        if !self.clients.contains_key(&id) {
            let was = given_up_at(&self.given_up, id);
            let before = was.and_then(|at| self.given_up.remove(at)).map(|(_, before)| before);
            self.clients.insert(id, Client::new(before.unwrap_or_default()));
        }
        if let Some(idle) = idle {
            self.client_gone(idle, SILENT, now, actions);
        }
        let Some(client) = self.clients.get_mut(&id) else { return Ok(()) };
        client.requests.connects(now);
        client.connected = true;
        client.last_seen = now;
        client.told_learners = None;
        if self.core.readers_revision() > 0 {
            actions.push(Action::ToClient(id, 0, self.core.tell_readers(id)));
        }
        self.send_state(id, now, actions);
        self.grant_again(id, actions);
        Ok(())
    }

    /// The client that has been silent for longest, among those that are not connected and have only answers kept for
    /// them.
    fn idle_client(&self) -> Option<ClientId> {
        let idle = self.clients.iter().filter(|(id, client)| !client.connected && !self.takes_part(**id));
        idle.min_by_key(|(_, client)| client.last_seen).map(|(&id, _)| id)
    }

    /// The learners in the job, each with its client.
    pub fn clients_of_learners(&self) -> impl Iterator<Item = (LearnerId, ClientId)> {
        self.clients
            .iter()
            .flat_map(|(&id, client)| client.learners.keys().map(move |&learner| (learner, id)))
    }

    /// The client's connection has ended. It may come back within its lease. A client that only reads is forgotten at
    /// once.
    pub fn client_down(&mut self, id: ClientId, now: Now, actions: &mut Vec<Action>) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.connected = false;
        self.drop_open_weights(|of| of == id, now, actions);
        let Some(client) = self.clients.get(&id) else { return };
        if client.requests.is_done() && !self.takes_part(id) {
            self.client_gone(id, SILENT, now, actions);
        }
    }

    /// Whether the job has contributions or learners of this client's.
    fn takes_part(&self, id: ClientId) -> bool {
        self.clients.get(&id).is_some_and(|client| !client.learners.is_empty())
            || self.core.has_readers(id)
            || self.core.unread().any(|(_, source)| source.client == id)
            || self.assigns_from(id)
    }

    /// A sign of life of a client.
    pub fn client_alive(&mut self, id: ClientId, now: Now) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.last_seen = now;
        }
    }

    /// Nobody listened during this pause, which has just ended. So nobody's silence of that time counts, whether or not
    /// their connections have outlasted it.
    pub fn forgive_silence(&mut self, pause: Now, now: Now) {
        for client in self.clients.values_mut() {
            client.last_seen = client.last_seen.saturating_add(pause).min(now);
        }
        self.core.forgive_silence(pause, now);
    }

    /// The number of connected clients, and of all known ones.
    pub fn client_count(&self) -> (usize, usize) {
        (self.clients.values().filter(|client| client.connected).count(), self.clients.len())
    }

    /// A message of a client.
    pub fn from_client(
        &mut self,
        id: ClientId,
        request: u64,
        message: Message,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let Some(client) = self.clients.get_mut(&id) else {
            return actions.push(Action::Close(id, Refusal::Other("unknown client".into())));
        };
        client.last_seen = now;
        if request == 0 {
            return self.notified(id, message, now, actions);
        }
        match client.requests.known(request) {
            Known::New => {}
            Known::Nothing => return,
            Known::Late => {
                // The request may have been carried out.
                let late = ShardError::TimedOut("the client was silent past the lease".into());
                return actions.push(Action::ToClient(id, request, Message::Refused(late.into())));
            }
            Known::Answered(answer) => return actions.push(Action::ToClient(id, request, answer.clone())),
        }
        if let Err(refusal) = client.requests.reaches(request) {
            return actions.push(Action::ToClient(id, request, Message::Refused(refusal)));
        }
        if client.requests.is_full() {
            let why = format!("{MAX_ANSWERS} answers were not acknowledged");
            actions.push(Action::Close(id, Refusal::Other(why)));
            return self.client_down(id, now, actions);
        }
        let asked = client.requests.opens(request);
        // A commit must not count if it comes after the end of its contribution, so each learner's requests are taken
        // in order. But a commit that repeats a taken one gets its answer.
        let repeats = match &message {
            Message::Commit { learner, step, .. } => {
                self.core.member(*learner, now).is_some_and(|member| *step == member.step)
            }
            _ => false,
        };
        if let Some(newest) = subject(&message).and_then(|learner| client.learners.get_mut(&learner)) {
            // Nor does an older commit end the wait of a newer one.
            let is_overtaken = client.requests.is_before(request, *newest);
            if is_overtaken && (!repeats || client.requests.is_open(*newest)) {
                let overtaken = Message::Refused(ShardError::Interrupted.into());
                return self.answer(id, asked, overtaken, actions);
            }
            if !is_overtaken {
                *newest = asked;
            }
        }
        if let Err(refusal) = self.carry_out(id, asked, message, now, actions) {
            self.answer(id, asked, Message::Refused(refusal), actions);
        }
    }

    /// Takes a message that needs no answer.
    fn notified(&mut self, id: ClientId, message: Message, now: Now, actions: &mut Vec<Action>) {
        match message {
            Message::AckThrough { request, newest } => {
                if let Some(client) = self.clients.get_mut(&id)
                    && let Err(refusal) = client.requests.numbered(request, newest)
                {
                    actions.push(Action::Close(id, refusal));
                    self.client_down(id, now, actions);
                }
            }
            Message::Touch { learners, sign } => {
                for learner in learners.into_iter().filter(|learner| self.owners.get(learner) == Some(&id)) {
                    self.core.touch(learner, sign, now);
                }
            }
            // The client knows the step. If this is refused, so will be the commit.
            Message::Open { learner } if self.health.failed().is_none() => {
                if let Err(refusal) = self.open(id, learner, now, actions) {
                    tracing::debug!(%learner, %refusal, "cannot be opened");
                }
            }
            Message::WholeBlock { learner, step } if self.owners.get(&learner) == Some(&id) => {
                let mut wanted = Vec::new();
                self.core.is_whole(learner, step, now, &mut wanted);
                self.perform(wanted, now, actions);
            }
            Message::Staged { version } => {
                self.core.staged(id, version);
                self.tell_reader_news(actions);
            }
            Message::TellReaders
                if self.clients.get_mut(&id).is_some_and(|client| client.asks_for_readers(now)) =>
            {
                actions.push(Action::ToClient(id, 0, self.core.tell_readers(id)));
            }
            Message::BeginWeights { token } if self.clients.contains_key(&id) => {
                self.queue.writers.begin((id, token));
            }
            Message::WholeWeights { token } if self.clients.contains_key(&id) => {
                self.begin_open_weights(id, token, now, actions);
            }
            Message::NonFiniteContribution { plan, learner, block } => {
                self.withheld(id, plan, Some(learner), ShardError::NonFinite(block), now, actions);
            }
            // The staged contribution lies in this process, so another plan would not find it either.
            Message::SourceGone { plan, learner }
                if self.local_shard.is_there() && self.needs(plan, learner) =>
            {
                let who = learner.map_or("new weights".to_owned(), |learner| format!("learner {learner}"));
                let why = format!("plan {plan}: the contribution of {who} is gone");
                self.fail(0, &Refusal::Other(why), now, actions);
            }
            Message::SourceGone { plan, learner } => {
                self.withheld(id, plan, learner, ShardError::Interrupted, now, actions);
            }
            // Others are signs of life, or messages of a later release.
            _ => {}
        }
    }

    fn carry_out(
        &mut self,
        id: ClientId,
        asked: Asked,
        message: Message,
        now: Now,
        actions: &mut Vec<Action>,
    ) -> Result<(), Refusal> {
        if let Some(failed) = self.health.failed() {
            return Err(failed.clone());
        }
        if let Message::Abort { learner } | Message::Withdraw { learner } = message
            && self.owners.get(&learner) == Some(&id)
        {
            // Nobody waits for the lent memory.
            self.reclaim(learner, ShardError::Interrupted, now, actions);
            if matches!(message, Message::Abort { .. }) {
                self.recall(learner, now, actions);
                // The answer comes behind a state that says whether the last commit counts.
                self.send_state(id, now, actions);
            }
        }
        let mut wanted = Vec::new();
        let core = &mut self.core;
        let deadline = |timeout_ms: u32| now + Now::from_millis(timeout_ms.into());
        let mine = |learner: LearnerId| match self.owners.get(&learner) {
            Some(owner) if *owner == id => Ok(learner),
            _ => Err(ShardError::UnknownLearner(learner)),
        };
        let answer = match message {
            Message::Join { name } => {
                let (learner, incarnation) = core.join(&name, now, &mut wanted)?;
                self.owners.insert(learner, id);
                if let Some(client) = self.clients.get_mut(&id) {
                    client.learners.insert(learner, asked);
                }
                // The state is sent first: a learner that has joined may begin at once, and its job may have begun to
                // run just now.
                self.perform(std::mem::take(&mut wanted), now, actions);
                self.send_state_to_all(now, actions);
                Some(Message::Joined { learner, incarnation, since: self.states.sequence() })
            }
            Message::Leave { learner, reason } => {
                core.leave(mine(learner)?, reason, now, &mut wanted)?;
                Some(Message::Done)
            }
            Message::Open { learner } => {
                let Opening { step, staging_lent } = self.open(id, learner, now, actions)?;
                Some(Message::Opened { step, staging_lent })
            }
            Message::Abort { learner } => {
                core.abort(mine(learner)?, now, &mut wanted)?;
                Some(Message::Done)
            }
            Message::Withdraw { learner } => {
                core.withdraw(mine(learner)?, now, &mut wanted)?;
                Some(Message::Done)
            }
            Message::Commit {
                learner,
                step,
                blocks,
                tensors,
                partly,
                contents,
                weight,
                timeout_ms,
                lent,
                given_up,
                base,
            } => {
                let learner = mine(learner)?;
                // Clients open contributions by themselves and announce them separately. The announcement may still
                // be under way.
                let next = core.member(learner, now).map(|member| member.step.next());
                if next == Some(step) {
                    core.open(learner, now)?;
                }
                let sent = self.shape.block_set(&blocks).ok_or(ShardError::OutOfRange)?;
                let tensors = block_ranges::to_bits(&tensors, self.shape.tensors())
                    .map_err(|_| ShardError::OutOfRange)?;
                let fits = |partly: &PartlyWritten| {
                    partly.pieces() <= MAX_PIECES && partly.check(self.shape.blocks()).is_ok()
                };
                if !partly.as_ref().is_none_or(fits) || !weight.is_valid() {
                    return Err(ShardError::OutOfRange.into());
                }
                let ticket = self.ticket(id, asked);
                let source = Source::of_contribution(id, step);
                let steady = self.local_shard.is_there() && !lent;
                let contribution = Contribution {
                    learner,
                    sent,
                    tensors,
                    partly,
                    contents,
                    weight,
                    base,
                    source,
                    steady,
                    lent,
                };
                let deadline = deadline(timeout_ms);
                // Another contribution to the step was begun before this one, and its blocks were sent.
                if self.provisional_plan().is_some_and(|plan| given_up >= Some(plan)) {
                    self.core.drop_provisional(learner, &mut wanted);
                }
                self.core.commit(ticket, step, contribution, deadline, now, &mut wanted);
                None
            }
            Message::Assign { token, blocks, timeout_ms, ahead, meta } => {
                self.shape.block_set(&blocks).ok_or(ShardError::OutOfRange)?;
                self.queue.open_next.take_if(|open| *open == (id, token));
                self.core.may_assign()?;
                self.queue.writers.publish((id, token), self.core.version())?;
                let ticket = self.ticket(id, asked);
                let source = Source { client: id, name: token, weights: blocks, ahead, meta, parts: None };
                self.core.assign(ticket, source, deadline(timeout_ms), now, &mut wanted);
                None
            }
            Message::AssignPart { token, part, blocks, timeout_ms, meta } => {
                self.shape.block_set(&blocks).ok_or(ShardError::OutOfRange)?;
                self.core.may_assign()?;
                let (waiting, deadline) = ((id, asked), deadline(timeout_ms));
                let part = Part { client: id, token, blocks, meta, waiting, of: part, deadline };
                let come = self.sets.come(part)?;
                self.queue.writers.begin((id, token));
                if let Some(set) = come {
                    let Complete { set, meta, waiting, deadline } = set;
                    let parts: Vec<_> = set.parts.iter().map(|part| (part.client, part.token)).collect();
                    if let Err(beaten) = self.queue.writers.publish_set(&parts, self.core.version()) {
                        for (client, asked) in waiting {
                            self.answer(client, asked, Message::Refused(beaten.clone().into()), actions);
                        }
                        return Ok(());
                    }
                    let mut blocks = FixedBitSet::with_capacity(self.shape.blocks() as usize);
                    blocks.set_range(.., set.all);
                    for part in &set.parts {
                        blocks.union_with(&self.shape.block_set(&part.blocks).unwrap_or_default());
                    }
                    let ticket = self.tickets.give(waiting);
                    let (weights, parts) = (ranges(&blocks), Some(set));
                    let source = Source { client: NOBODY, name: token, weights, ahead: None, meta, parts };
                    self.core.assign(ticket, source, deadline, now, &mut wanted);
                }
                None
            }
            Message::WithdrawAssign { token } => {
                self.queue.writers.withdraw((id, token));
                if let Some((client, asked)) = self.sets.withdraw(id, token) {
                    self.answer(client, asked, Message::Refused(ShardError::Interrupted.into()), actions);
                }
                let core = &mut self.core;
                core.withdraw_assign(|s| s.client == id && s.name == token, now, &mut wanted);
                self.perform(std::mem::take(&mut wanted), now, actions);
                self.recall_assign(id, token, now, actions);
                Some(Message::Done)
            }
            Message::SetControl { name, value } => {
                let longest = settings_json::longest(&name);
                if name.len() > MAX_SETTING_NAME || value.len() > longest {
                    return Err(Refusal::Control(format!(
                        "a setting's name has up to {MAX_SETTING_NAME} bytes, this one's value up to {longest}"
                    )));
                }
                let controls = settings_json::with(core.controls(), &name, &value);
                // Answers are kept, so their reasons must not be long.
                let refused = |error: &dyn std::fmt::Display| {
                    Refusal::Control(error.to_string().chars().take(MAX_REASON).collect())
                };
                let controls = controls.map_err(|error| refused(&error))?;
                controls.check_trainable(self.shape.is_trainable()).map_err(|error| refused(&error))?;
                let of_tensors = controls.of_tensors(self.shape.names());
                let (frozen, groups) = of_tensors.map_err(|error| refused(&error))?;
                core.may_set(&controls, &frozen, &groups).map_err(|error| refused(&error))?;
                core.set_tensors(frozen, groups);
                core.set_controls(controls, now, &mut wanted);
                self.states.outdated();
                Some(Message::Done)
            }
            Message::Reader { name, does } => {
                match does {
                    ReaderDoes::Begins { host, staged } => core.begin_reader(id, &name, host, staged)?,
                    ReaderDoes::Applies(version) => core.applies(id, &name, version, now, &mut wanted)?,
                    ReaderDoes::Ends => core.end_reader(id, &name, now, &mut wanted)?,
                }
                // The news come before the answer.
                self.perform(std::mem::take(&mut wanted), now, actions);
                Some(Message::Done)
            }
            Message::AllReduce { learner, op, values, timeout_ms } => {
                let (learner, deadline) = (mine(learner)?, deadline(timeout_ms));
                let before = self.all_reduce.give(learner, op, values, (id, asked), deadline)?;
                self.core.gives_numbers(learner, now);
                if let Some((client, asked)) = before {
                    self.answer(client, asked, Message::Refused(ShardError::Interrupted.into()), actions);
                }
                None
            }
            other => return Err(Refusal::Role { what: other.name().to_owned() }),
        };
        if let Some(answer) = answer {
            self.answer(id, asked, answer, actions);
        }
        self.perform(wanted, now, actions);
        Ok(())
    }

    /// The client of a learner begins a contribution.
    fn open(
        &mut self,
        id: ClientId,
        learner: LearnerId,
        now: Now,
        actions: &mut Vec<Action>,
    ) -> Result<Opening, ShardError> {
        if self.owners.get(&learner) != Some(&id) {
            return Err(ShardError::UnknownLearner(learner));
        }
        // The client waits for no earlier commit, and is about to write over the memory of the last payload.
        self.reclaim(learner, ShardError::Interrupted, now, actions);
        let mut wanted = Vec::new();
        self.core.withdraw_untaken(learner, now, &mut wanted);
        let opening = self.core.open(learner, now);
        self.perform(wanted, now, actions);
        opening
    }

    fn ticket(&mut self, client: ClientId, asked: Asked) -> Ticket {
        self.tickets.give(vec![(client, asked)])
    }

    /// The silence after which a client is given up.
    fn longest_absence(&self) -> Now {
        let lease = self.core.controls().lease;
        if lease.is_zero() { FORGET } else { lease }
    }

    /// Gives up clients that have been silent for the lease.
    pub(in crate::coordinator) fn expire_clients(&mut self, now: Now, actions: &mut Vec<Action>) {
        let (longest, endless) = (self.longest_absence(), self.core.controls().lease.is_zero());
        for client in self.clients.values_mut().filter(|client| client.connected) {
            client.requests.tick(longest, now);
        }
        if self.local_shard.is_there() {
            return;
        }
        let is_gone = |(id, client): &(&ClientId, &Client)| {
            let kept = endless && (client.connected || self.takes_part(**id));
            now.saturating_sub(client.last_seen) >= longest && !kept
        };
        let gone: Vec<ClientId> = self.clients.iter().filter(is_gone).map(|(&id, _)| id).collect();
        for id in gone {
            self.client_gone(id, SILENT, now, actions);
        }
    }

    /// Gives up a client, with its waiting contributions.
    pub(in crate::coordinator) fn client_gone(
        &mut self,
        id: ClientId,
        why: &str,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let Some(client) = self.clients.remove(&id) else { return };
        self.progress.forget(id);
        self.queue.writers.leave(id);
        // No request can come late from a client that has made none.
        if client.requests.newest() > 0 {
            if self.given_up.len() >= MAX_CLIENTS {
                self.given_up.pop_front();
            }
            let before = GivenUp { newest: client.requests.newest(), counted: client.counted };
            self.given_up.push_back((id, before));
        }
        self.tickets.forget(id);
        self.sets.lose(id);
        let mut wanted = Vec::new();
        self.core.withdraw_assign(|source| source.client == id, now, &mut wanted);
        self.core.end_readers(id, now, &mut wanted);
        // This comes before anything is dropped: it may have begun work that is void afterwards.
        self.perform(wanted, now, actions);
        // Learners that have left may have left contributions behind.
        let left = self.core.unread().filter(|(_, source)| source.client == id).map(|(learner, _)| learner);
        let learners: BTreeSet<LearnerId> = client.learners.into_keys().chain(left).collect();
        self.lose(id, &learners.into_iter().collect::<Vec<_>>(), now, actions);
        actions.push(Action::Close(id, Refusal::Other(why.into())));
    }
}

/// The learner that a request is about.
fn subject(message: &Message) -> Option<LearnerId> {
    match message {
        Message::Leave { learner, .. }
        | Message::Open { learner }
        | Message::Commit { learner, .. }
        | Message::Abort { learner }
        | Message::Withdraw { learner } => Some(*learner),
        _ => None,
    }
}
