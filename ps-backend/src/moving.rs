//! Moving a model's blocks off a shard: the whole procedure, which the model's coordinator carries out over an
//! [`Edge`]. `docs/operate/network.md` has the story. `server::moving` is the edge, and the simulator has one of its
//! own.
//!
//! Until the registry may have replaced the model's record, any failure, or a request to stop, ends the move and
//! changes nothing. From then on nothing ends it: the registry is asked until it has said which record it has. Then
//! every shard is told of the new map; one that does not answer for long asks the registry by itself.

mod plan;
#[cfg(test)]
mod tests;

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use libmodelio::vocabulary::ids::{ShardId, Version};
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::{Message, Refusal};

pub use crate::core::Now;
pub use plan::{JobFacts, MovePlan};

/// The longest wait for an answer that takes a shard or the registry no time.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest wait for a shard that takes memory.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(300);
/// The longest wait for an answer to an order that is repeated.
const REPEATED_TIMEOUT: Duration = Duration::from_secs(3);
/// The coordinator repeats the new map for this time to shards that do not answer. Later they ask the registry.
const SWITCHING: Duration = Duration::from_secs(20);
/// The coordinator repeats for this time to shards that do not answer that a move is given up.
const ABANDONING: Duration = Duration::from_secs(60);
/// The pause before a request is repeated.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
/// How often the job is checked for being held.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// How often shards are asked how many blocks have come.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// A piece of the coordinator's state, in bytes.
const PIECE: usize = 8 << 20;

/// How far a move is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The shard that the model leaves.
    pub off: ShardId,
    /// The present stage.
    pub stage: &'static str,
    /// Blocks that are where they are to be.
    pub blocks: u32,
    /// Blocks of the model, once they are on their way.
    pub of: u32,
}

/// An order to shards. Every order can be repeated.
#[derive(Clone, Debug)]
pub struct Order {
    /// The message.
    pub message: Message,
    /// Its payload.
    pub payload: Arc<[u8]>,
    /// Whether one shard that does not carry it out ends the move: the others need not be waited for.
    pub is_step: bool,
}

/// The answers of shards, or why there is none.
pub type Answers = Vec<(ShardId, Result<Message, String>)>;

/// Why the registry has not replaced the record, as far as is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PutError {
    /// It refuses: nothing has changed by this request, and nothing will.
    Refused(Refusal),
    /// The request has not reached it.
    NotSent(String),
    /// The request may be carried out, or may have been.
    Unknown(String),
}

/// The process ends. If the new map may be in force, the shards that have it find out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends;

/// What the coordinator's process does for a move. It may wait where it is asked for something: a thread of its own may
/// block there (see [`run`]), a simulator's edge is pending.
pub trait Edge {
    /// What time it is.
    fn now(&mut self) -> impl Future<Output = Now>;

    /// Lets time pass.
    ///
    /// # Errors
    /// The process ends.
    fn pause(&mut self, time: Duration) -> impl Future<Output = Result<(), Ends>>;

    /// Asks shards, all at once, and waits for all that answer in this time. Of a [step](Order::is_step) it waits for
    /// nobody once one has failed, or [`Self::unwanted`] says something.
    ///
    /// # Errors
    /// The process ends.
    fn ask(
        &mut self,
        shards: &[ShardId],
        order: Order,
        within: Duration,
    ) -> impl Future<Output = Result<Answers, Ends>>;

    /// Shows how far the move is.
    fn show(&mut self, progress: Progress);

    /// Why the move is to end, if the operator has stopped it or the model was deleted.
    fn unwanted(&mut self) -> impl Future<Output = Option<Refusal>>;

    /// Begins to hold the job.
    fn hold(&mut self);

    /// The newest version, and whose optimizer state there is, once the job is held.
    ///
    /// # Errors
    /// What keeps it from being held.
    fn held(&mut self) -> impl Future<Output = Result<(Version, Reducer), String>>;

    /// The coordinator's state, which nothing changes from now on, and what time it is there.
    ///
    /// # Errors
    /// Why there is none.
    fn freeze(&mut self) -> impl Future<Output = Result<(Vec<u8>, Now), String>>;

    /// The job goes on as if nothing had been.
    fn release(&mut self);

    /// Asks the registry to replace the record, or to restore it as it is to be.
    ///
    /// # Errors
    /// [`PutError`].
    fn put(&mut self, restores: bool) -> impl Future<Output = Result<(), PutError>>;

    /// Whether the registry knows that the model was deleted.
    fn is_deleted(&mut self) -> impl Future<Output = bool>;

    /// A line for the log.
    fn warn(&mut self, what: String);

    /// Answers the request for the move. Shards that are to forget their blocks may still have to be told.
    fn finish(&mut self, outcome: Result<(), Refusal>);
}

/// Why a move does not go on.
#[derive(Debug)]
enum Failure {
    Ends,
    Refused(Refusal),
}

impl From<Ends> for Failure {
    fn from(_: Ends) -> Failure {
        Failure::Ends
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Failure {
        Failure::Refused(refusal)
    }
}

fn step(message: Message, payload: &[u8]) -> Order {
    Order { message, payload: payload.into(), is_step: true }
}

fn failed(why: impl Into<String>) -> Failure {
    Failure::Refused(Refusal::Other(why.into()))
}

/// [`move_model`] with an edge whose calls block: it is never pending.
pub fn run(edge: &mut impl Edge, plan: &MovePlan, deadline: Now, hold: Option<Duration>) {
    let moves = pin!(move_model(edge, plan, deadline, hold));
    let Poll::Ready(()) = moves.poll(&mut Context::from_waker(Waker::noop())) else {
        unreachable!("the edge's calls block");
    };
}

/// Moves a model by `plan`: until `deadline` its map is in force, or it is given up. `hold` is how long the job may
/// stand still, if not as long as the plan says.
pub async fn move_model(edge: &mut impl Edge, plan: &MovePlan, deadline: Now, hold: Option<Duration>) {
    let hold = hold.unwrap_or(plan.hold);
    let mut moving = Moving { edge, plan, deadline, hold, held_until: None };
    let moved = match moving.prepare().await {
        Ok(()) => moving.put().await,
        failed => failed,
    };
    let end = match moved {
        Ok(()) => moving.switch().await,
        Err(Failure::Refused(why)) => moving.give_up(why).await,
        Err(Failure::Ends) => Err(Ends),
    };
    if end.is_err() {
        edge.finish(Err(Refusal::other("the shard shuts down")));
    }
}

/// One move of one model.
struct Moving<'a, E> {
    edge: &'a mut E,
    plan: &'a MovePlan,
    deadline: Now,
    /// How long the job may stand still.
    hold: Duration,
    /// Until when it may.
    held_until: Option<Now>,
}

impl<E: Edge> Moving<'_, E> {
    /// All up to the question to the registry: blocks and the coordinator's state are at the new owners.
    async fn prepare(&mut self) -> Result<(), Failure> {
        self.show("taking memory", (0, 0));
        let owners = self.owners();
        let (attempt, off) = (self.plan.attempt, self.plan.off);
        let prepare = step(Message::Prepare { attempt, off }, &self.plan.moved);
        self.ask(&owners, prepare, MEMORY_TIMEOUT, None).await?;
        self.show("waiting for the step", (0, 0));
        self.edge.hold();
        self.held_until = Some(self.edge.now().await + self.hold);
        let (version, reducer) = loop {
            match self.edge.held().await {
                Ok(held) => break held,
                Err(why) => {
                    let what = format!(": {why}: see to that and run the command again, or ");
                    self.check(Some("the step that is under way does not end"), &what).await?;
                }
            }
            self.edge.pause(CHECK_INTERVAL).await?;
        };
        let generation = self.plan.after.generation;
        let fill = step(Message::Fill { generation, attempt, version, reducer }, &[]);
        let mut there = (0, 0);
        loop {
            self.show("moving blocks", there);
            let undone = format!("{} of {} blocks were moved", there.0, there.1);
            there = self.ask(&owners, fill.clone(), ANSWER_TIMEOUT, Some(&undone)).await?;
            if there.0 == there.1 {
                break;
            }
            self.edge.pause(POLL_INTERVAL).await?;
        }
        let (state, now) = self.edge.freeze().await.map_err(failed)?;
        self.show("handing over", (0, 0));
        let (of, now) = (state.len() as u64, u64::try_from(now.as_nanos()).unwrap_or(u64::MAX));
        let undone = Some("the coordinator's state was not handed over");
        for (at, piece) in (0..).step_by(PIECE).zip(state.chunks(PIECE)) {
            let hands = step(Message::HandOver { generation, attempt, at, of, now }, piece);
            self.ask(&[self.plan.after.coordinator], hands, ANSWER_TIMEOUT, undone).await?;
        }
        // A shard that was started anew meanwhile has lost its blocks.
        match self.ask(&owners, fill, ANSWER_TIMEOUT, undone).await? {
            (blocks, of) if blocks == of => Ok(()),
            _ => Err(failed("a shard has lost the blocks that it was given")),
        }
    }

    /// The registry is asked until it has said which record it has. Once the request may have been carried out, the
    /// only way back is an answer that says that it was not and never will be.
    async fn put(&mut self) -> Result<(), Failure> {
        self.show("asking the registry", (0, 0));
        let says = |why: String| failed(format!("the registry cannot be asked, or refuses: {why}"));
        let (mut unknown, mut restores) = (false, false);
        loop {
            let why = match self.edge.put(restores).await {
                Ok(()) => return Ok(()),
                Err(PutError::Refused(refusal)) => match &refusal {
                    // The request was carried out, and the present coordinator has moved the model again.
                    Refusal::Epoch { expected, .. } if unknown && *expected >= self.plan.after.epoch => {
                        return Ok(());
                    }
                    // A registry that was started anew since, or a model that was deleted. The request may have been
                    // carried out, and new owners may know: the move can only go on.
                    Refusal::NoModel(_) if unknown && !restores => {
                        restores = true;
                        continue;
                    }
                    Refusal::Exists(_) | Refusal::Generation { .. } if unknown => {
                        self.edge.warn(format!("it has moved, and the registry has lost it: {refusal}"));
                        return Ok(());
                    }
                    // A registry that was started anew does not know whether the request was carried out.
                    Refusal::Epoch { .. } | Refusal::NoModel(_) => return Err(says(refusal.to_string())),
                    _ if !restores => return Err(says(refusal.to_string())),
                    _ => refusal.to_string(),
                },
                Err(PutError::NotSent(why)) if !unknown => return Err(says(why)),
                Err(PutError::NotSent(why) | PutError::Unknown(why)) => why,
            };
            if !std::mem::replace(&mut unknown, true) {
                self.edge.warn(format!("whether the model has moved is not known: {why}"));
            }
            self.edge.pause(RETRY_PAUSE).await?;
        }
    }

    /// The new map is in force. New owners are told first, so that a client that hears of the map finds them, and the
    /// present coordinator last.
    async fn switch(&mut self) -> Result<(), Ends> {
        self.show("switching", (0, 0));
        let plan = self.plan;
        let is_last = |shard: &ShardId| [plan.off, plan.before.coordinator].contains(shard);
        let (last, first): (Vec<ShardId>, Vec<ShardId>) = plan.all().partition(is_last);
        let mut left = [first, last];
        let until = self.edge.now().await + SWITCHING;
        let outcome = loop {
            let Some(why) = self.repeat(&mut left, Message::Switch, &plan.moved).await? else { break Ok(()) };
            if self.edge.is_deleted().await {
                break Err(Refusal::NoModel(plan.after.name.clone()));
            }
            if self.edge.now().await >= until {
                let why = format!(
                    "the model has moved, but not all shards know: {why}: they ask the registry when they can"
                );
                break Err(Refusal::Other(why));
            }
            self.edge.pause(RETRY_PAUSE).await?;
        };
        self.edge.finish(outcome);
        Ok(())
    }

    /// The move is given up: the job goes on, and the new owners forget their blocks.
    async fn give_up(&mut self, why: Refusal) -> Result<(), Ends> {
        if self.held_until.is_some() {
            self.edge.release();
        }
        self.edge.finish(Err(why));
        let abandon = Message::Abandon { generation: self.plan.after.generation, attempt: self.plan.attempt };
        let (mut left, until) = ([self.owners()], self.edge.now().await + ABANDONING);
        while let Some(why) = self.repeat(&mut left, abandon.clone(), &[]).await? {
            if self.edge.now().await >= until {
                self.edge.warn(format!("{why}: it keeps the memory that it took until the next move"));
                break;
            }
            self.edge.pause(RETRY_PAUSE).await?;
        }
        Ok(())
    }

    // -- shards

    fn owners(&self) -> Vec<ShardId> {
        self.plan.all().filter(|shard| *shard != self.plan.off).collect()
    }

    /// Gives the shards that are `left` an order, one group after the other. Those that carry it out are no longer
    /// left. The result is why one has not, if one has not.
    async fn repeat(
        &mut self,
        left: &mut [Vec<ShardId>],
        message: Message,
        payload: &[u8],
    ) -> Result<Option<String>, Ends> {
        let order = Order { message, payload: payload.into(), is_step: false };
        let mut trouble = None;
        for shards in left.iter_mut().filter(|shards| !shards.is_empty()) {
            let answers = self.edge.ask(shards, order.clone(), REPEATED_TIMEOUT).await?;
            trouble = self.trouble(shards, &answers).or(trouble);
            shards.retain(|shard| !answers.iter().any(|(of, answer)| of == shard && answer.is_ok()));
        }
        Ok(trouble)
    }

    /// Has shards carry out a step: how many blocks are there, and are to be. `undone` says what was not done, should
    /// time run out.
    async fn ask(
        &mut self,
        shards: &[ShardId],
        order: Order,
        within: Duration,
        undone: Option<&str>,
    ) -> Result<(u32, u32), Failure> {
        let ends = self.held_until.map_or(self.deadline, |held| held.min(self.deadline));
        let within = within.min(ends.saturating_sub(self.edge.now().await));
        let fills = matches!(order.message, Message::Fill { .. });
        let answers = self.edge.ask(shards, order, within).await?;
        let trouble = self.trouble(shards, &answers);
        let who = trouble.as_ref().map_or(": ".into(), |why| format!(" ({why}): "));
        self.check(undone, &who).await?;
        if let Some(why) = trouble {
            return Err(failed(why));
        }
        let mut there = (0u32, 0u32);
        for (shard, answer) in answers {
            match answer {
                Ok(Message::Filled { blocks, of }) if fills => {
                    there = (there.0.saturating_add(blocks), there.1.saturating_add(of));
                }
                Ok(Message::Done) if !fills => {}
                _ => return Err(failed(self.of_shard(shard, "it answers something else"))),
            }
        }
        Ok(there)
    }

    /// Why one of these shards has not done what it was told, or that some do not answer.
    fn trouble(&self, shards: &[ShardId], answers: &Answers) -> Option<String> {
        let failed = |(shard, answer): &(ShardId, Result<Message, String>)| {
            answer.as_ref().err().map(|why| self.of_shard(*shard, why))
        };
        answers.iter().find_map(failed).or_else(|| {
            let silent = |shard: &&ShardId| !answers.iter().any(|(of, _)| of == *shard);
            let silent =
                shards.iter().filter(silent).map(|&shard| self.of_shard(shard, "it does not answer"));
            let silent: Vec<String> = silent.collect();
            (!silent.is_empty()).then(|| silent.join(", "))
        })
    }

    /// Ends the move if nobody wants it any more, or it has taken too long. Then the message says what is `undone`, and
    /// `why`, before what gives it longer.
    async fn check(&mut self, undone: Option<&str>, why: &str) -> Result<(), Failure> {
        if let Some(why) = self.edge.unwanted().await {
            return Err(why.into());
        }
        let now = self.edge.now().await;
        let (within, longer) = match self.held_until {
            Some(until) if until <= now => (
                format!("within the {:?} for which the job may be held", self.hold),
                "hold it longer (--hold), but less than the commits of its learners wait (control/timeout)",
            ),
            _ if self.deadline <= now => ("in time".to_owned(), "give it longer (--timeout)"),
            _ => return Ok(()),
        };
        undone.map_or(Ok(()), |undone| Err(failed(format!("{undone} {within}{why}{longer}"))))
    }

    fn of_shard(&self, shard: ShardId, why: &str) -> String {
        let known = self.plan.shards.iter().find(|known| known.shard == shard);
        let address = known.map(|known| known.address.as_str());
        format!("shard {shard} at {}: {why}", address.unwrap_or_default())
    }

    fn show(&mut self, stage: &'static str, (blocks, of): (u32, u32)) {
        self.edge.show(Progress { off: self.plan.off, stage, blocks, of });
    }
}
