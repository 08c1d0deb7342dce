//! Moving a model's blocks off a shard: the coordinator's decisions, step by step. Pure: answers, failures
//! and `now` go in, messages to send come out. `docs/network.md` has the story; `server::moving` is the edge,
//! and the simulator has one of its own.
//!
//! Until the registry may have replaced the model's record, any failure, or a request to stop, ends the move
//! and changes nothing. From then on nothing ends it: the registry is asked until it has said which record it
//! has, and shards are told of the new map until they know.

mod plan;
mod switching;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use libmodelio::vocabulary::ids::{Epoch, ShardId};
use libmodelio::wire::Refusal;

pub use crate::core::Now;
pub use plan::{Job, Plan};
use switching::Switching;

/// For what is answered at once.
pub const PROMPT: Duration = Duration::from_secs(10);
/// Longest wait for a shard that takes memory.
pub const PATIENT: Duration = Duration::from_secs(300);
/// The time for which one shard is told to switch, or to forget, before the next one is.
pub const SWITCHING: Duration = Duration::from_secs(3);
/// How often it is looked whether the job is held.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// How often shards are asked how far they are.
const POLL: Duration = Duration::from_millis(10);
/// The time after which an unanswered message is repeated.
const AGAIN: Duration = Duration::from_millis(500);
/// The time for which shards that do not answer are told that a move is given up.
const ABANDONING: Duration = Duration::from_secs(60);
/// The edge gives up by itself and says why. If it does not, it is given up here, after this additional time.
const GRACE: Duration = Duration::from_secs(1);
/// A piece of the coordinator's state, in bytes.
pub const PIECE: u64 = 8 << 20;

/// How far a move is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Off which shard.
    pub off: ShardId,
    /// The present stage.
    pub stage: &'static str,
    /// Blocks that are where they are to be.
    pub blocks: u32,
    /// Blocks of the model, once they are on their way.
    pub of: u32,
}

/// An order to a shard. Every order can be repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tell {
    /// To take memory.
    Adopt,
    /// To fetch its blocks.
    Fill,
    /// To say how far it is.
    Adopting,
    /// A piece of the coordinator's state, from this byte on.
    HandOver {
        /// At most [`PIECE`] bytes from here.
        at: u64,
    },
    /// The new map is in force.
    Switch,
    /// The new map is given up.
    Abandon,
    /// The model is deleted.
    Delete,
}

/// The answer of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// The order is carried out.
    Done,
    /// To [`Tell::Adopting`]: the number of its blocks that are there.
    Adopted {
        /// The blocks that are there.
        blocks: u32,
        /// To be there.
        of: u32,
    },
}

/// The outcome of the attempt to replace the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Put {
    /// The record is replaced.
    Done,
    /// The registry has a record of another epoch than the one that was to be replaced.
    Other(Epoch),
    /// The registry refuses: nothing has changed, and nothing will.
    Refused(String),
    /// The registry does not know the model: it was deleted, or the registry was started anew.
    Gone,
    /// The registry has another model of that name.
    Taken(String),
    /// The request has not reached the registry.
    NotSent(String),
    /// The request may be carried out, or may have been.
    Unknown(String),
}

/// The registry's answer after a switch. Facts that are missing are unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Looked {
    /// The model is no more, or is another one.
    pub forgotten: Option<bool>,
    /// Shards that it lists.
    pub listed: Option<BTreeSet<ShardId>>,
}

/// How the job is, whenever time passes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sight {
    /// The reason why the job is not held yet.
    pub held_up_by: Option<String>,
    /// The model is still there.
    pub wanted: bool,
    /// The process ends.
    pub ends: bool,
}

/// Work for the edge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Tell a shard, and say what it answers, or why it does not, by [`MoveCore::answered`] with this number.
    Tell {
        /// The number of the question.
        number: u64,
        /// Whom.
        shard: ShardId,
        /// The order.
        what: Tell,
        /// It answers in this time, or has not answered.
        within: Duration,
    },
    /// Begin to hold the job.
    Hold,
    /// Nothing changes the coordinator from now on: report the length of its state by [`MoveCore::frozen`].
    Freeze,
    /// The job goes on as if nothing had been.
    Release,
    /// Ask the registry to replace the record, or to restore it as it is to be; the answer is for [`MoveCore::put`].
    Put {
        /// It has lost it.
        restores: bool,
    },
    /// Ask the registry what there is; the answer is for [`MoveCore::looked`].
    Look,
    /// For the log.
    Warn(String),
    /// Answer the request for the move. Shards may still have to be told: see [`MoveCore::is_over`].
    Finished(Result<(), Refusal>),
}

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    /// Shards take memory.
    Memory,
    /// The step under way is to end.
    Waiting,
    /// Shards are told to fetch blocks, and then asked how far they are.
    Filling {
        begun: bool,
        poll_at: Option<Now>,
        /// Blocks in the answers so far, and in all answers of the last round.
        coming: (u32, u32),
        there: (u32, u32),
    },
    /// The coordinator's state goes to the next coordinator, from this byte on.
    HandingOver { at: u64, of: u64 },
    /// The shards are checked: one that was started anew meanwhile has lost its data.
    Checking { there: bool },
    /// The registry is asked. Once an answer has been lost, it is unknown whether the request was carried
    /// out.
    Putting { unknown: bool, restores: bool, again_at: Option<Now> },
    /// The new map is in force.
    Switching(Switching),
    /// It never will be.
    Abandoning { left: BTreeSet<ShardId>, until: Now, again_at: Option<Now> },
    /// No work is left.
    Over,
}

/// A message to a shard that is not answered.
#[derive(Debug)]
struct Asked {
    shard: ShardId,
    since: Now,
    until: Now,
}

/// One move of one model.
#[derive(Debug)]
pub struct MoveCore {
    plan: Arc<Plan>,
    /// The time by which the move is in force, or given up.
    deadline: Now,
    /// How long the job may stand still.
    hold: Duration,
    /// When it began to.
    held_at: Option<Now>,
    stage: Stage,
    asked: BTreeMap<u64, Asked>,
    next_number: u64,
    finished: bool,
}

impl MoveCore {
    /// Begins. `hold` is how long the job may stand still, if not as long as the plan says.
    pub fn new(
        plan: Arc<Plan>,
        deadline: Now,
        hold: Option<Duration>,
        now: Now,
        actions: &mut Vec<Action>,
    ) -> MoveCore {
        let hold = hold.unwrap_or(plan.hold);
        let mut core = MoveCore {
            plan,
            deadline,
            hold,
            held_at: None,
            stage: Stage::Memory,
            asked: BTreeMap::new(),
            next_number: 1,
            finished: false,
        };
        core.tell_owners(Tell::Adopt, core.left(now).min(PATIENT), now, actions);
        core
    }

    /// The plan of the move.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Whether no shard has to be told anything any more.
    pub fn is_over(&self) -> bool {
        self.stage == Stage::Over
    }

    /// Whether the move can still be stopped: the registry has not been asked.
    pub fn can_stop(&self) -> bool {
        !matches!(self.stage, Stage::Putting { .. } | Stage::Switching(_))
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        let (stage, blocks, of) = match self.stage {
            Stage::Memory => ("taking memory", 0, 0),
            Stage::Waiting => ("waiting for the step", 0, 0),
            Stage::Filling { there: (blocks, of), .. } => ("moving blocks", blocks, of),
            Stage::HandingOver { .. } | Stage::Checking { .. } => ("handing over", 0, 0),
            Stage::Putting { .. } => ("asking the registry", 0, 0),
            Stage::Switching(_) => ("switching", 0, 0),
            Stage::Abandoning { .. } | Stage::Over => ("giving up", 0, 0),
        };
        Progress { off: self.plan.off, stage, blocks, of }
    }

    /// The latest time at which [`Self::tick`] has something to do, whatever happens to the job.
    pub fn next_deadline(&self, now: Now) -> Now {
        let asked = self.asked.values().map(|asked| asked.until).min();
        let stage = match &self.stage {
            Stage::Waiting => Some(now + CHECK_INTERVAL),
            Stage::Filling { poll_at: at, .. }
            | Stage::Putting { again_at: at, .. }
            | Stage::Abandoning { again_at: at, .. } => *at,
            Stage::Switching(switching) => switching.again_at(),
            _ => None,
        };
        let held = self.held_at.filter(|_| self.can_stop() && !self.finished).map(|at| at + self.hold);
        [asked, stage, held].into_iter().flatten().min().unwrap_or(Now::MAX)
    }

    /// Time passes.
    pub fn tick(&mut self, now: Now, sight: &Sight, actions: &mut Vec<Action>) {
        if self.is_over() {
            return;
        }
        if sight.ends {
            // If the new map may be in force, the shards that have it find out.
            self.finish(Err(Refusal::other("the shard shuts down")), actions);
            self.stage = Stage::Over;
            return;
        }
        if !self.finished && self.can_stop() {
            if !sight.wanted {
                return self.fail(Refusal::NoModel(self.plan.before.name.clone()), now, actions);
            }
            if let Some(why) = self.overdue(now, sight) {
                return self.fail(Refusal::Other(why), now, actions);
            }
        }
        let silent: Vec<u64> =
            self.asked.iter().filter(|(_, asked)| asked.until <= now).map(|(&number, _)| number).collect();
        for number in silent {
            self.answered(number, Err("it does not answer".into()), now, actions);
        }
        match &mut self.stage {
            Stage::Waiting if sight.held_up_by.is_none() => {
                self.stage = Stage::Filling { begun: false, poll_at: None, coming: (0, 0), there: (0, 0) };
                self.tell_owners(Tell::Fill, self.patience(now), now, actions);
            }
            Stage::Filling { poll_at, .. } if poll_at.is_some_and(|at| at <= now) => {
                *poll_at = None;
                self.tell_owners(Tell::Adopting, self.patience(now), now, actions);
            }
            Stage::Putting { again_at, restores, .. } if again_at.is_some_and(|at| at <= now) => {
                *again_at = None;
                actions.push(Action::Put { restores: *restores });
            }
            Stage::Switching(switching) if switching.again_at().is_some_and(|at| at <= now) => {
                self.switch(now, actions);
            }
            Stage::Abandoning { left, until, again_at } if again_at.is_some_and(|at| at <= now) => {
                if *until <= now {
                    actions.push(Action::Warn(
                        "shards that were to take blocks do not answer; they keep their memory until they do"
                            .into(),
                    ));
                    self.stage = Stage::Over;
                    return;
                }
                *again_at = None;
                let left: Vec<ShardId> = left.iter().copied().collect();
                left.into_iter().for_each(|shard| self.tell(shard, Tell::Abandon, SWITCHING, now, actions));
            }
            _ => {}
        }
    }

    /// The operator wants to stop the move. Does nothing if it is too late, or over.
    pub fn stop(&mut self, now: Now, actions: &mut Vec<Action>) {
        if self.can_stop() && !self.finished {
            self.fail(Refusal::other("the move was stopped; the model stays where it is"), now, actions);
        }
    }

    /// A shard has answered a question, or has not.
    pub fn answered(
        &mut self,
        number: u64,
        answer: Result<Told, String>,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        // An answer to an earlier stage means nothing any more.
        let Some(Asked { shard, .. }) = self.asked.remove(&number) else { return };
        let last = self.asked.is_empty();
        match &mut self.stage {
            Stage::Switching(switching) => {
                switching.answered(shard, answer.map(drop));
                if last {
                    self.switch(now, actions);
                }
                return;
            }
            Stage::Abandoning { left, again_at, .. } => {
                if answer.is_ok() {
                    left.remove(&shard);
                }
                if left.is_empty() {
                    self.stage = Stage::Over;
                } else if last {
                    *again_at = Some(now + AGAIN);
                }
                return;
            }
            _ => {}
        }
        let told = match answer {
            Ok(told) => told,
            Err(why) => return self.fail(Refusal::Other(self.of_shard(shard, &why)), now, actions),
        };
        match (&mut self.stage, told) {
            (Stage::Memory, Told::Done) if last => {
                self.stage = Stage::Waiting;
                self.held_at = Some(now);
                actions.push(Action::Hold);
            }
            (Stage::Filling { begun: begun @ false, poll_at, .. }, Told::Done) => {
                if last {
                    (*begun, *poll_at) = (true, Some(now));
                }
            }
            (Stage::Filling { begun: true, poll_at, coming, there }, Told::Adopted { blocks, of }) => {
                *coming = (coming.0.saturating_add(blocks), coming.1.saturating_add(of));
                if last {
                    *there = std::mem::take(coming);
                    match there.0 == there.1 {
                        true => actions.push(Action::Freeze),
                        false => *poll_at = Some(now + POLL),
                    }
                }
            }
            (Stage::HandingOver { at, of }, Told::Done) => {
                *at = at.saturating_add(PIECE);
                if *at >= *of {
                    self.stage = Stage::Checking { there: true };
                    return self.tell_owners(Tell::Adopting, self.patience(now), now, actions);
                }
                let at = *at;
                self.tell(
                    self.plan.after.coordinator,
                    Tell::HandOver { at },
                    self.patience(now),
                    now,
                    actions,
                );
            }
            (Stage::Checking { there }, Told::Adopted { blocks, of }) => {
                *there &= blocks == of;
                match (last, *there) {
                    (_, false) => {
                        let why = self.of_shard(shard, "it has lost the blocks that it was given");
                        self.fail(Refusal::Other(why), now, actions);
                    }
                    (true, true) => {
                        self.stage = Stage::Putting { unknown: false, restores: false, again_at: None };
                        actions.push(Action::Put { restores: false });
                    }
                    (false, true) => {}
                }
            }
            (Stage::Memory, Told::Done) => {}
            _ => {
                let why = self.of_shard(shard, "it answers something else");
                self.fail(Refusal::Other(why), now, actions);
            }
        }
    }

    /// The coordinator does nothing any more; `state` is the length of its state in bytes.
    pub fn frozen(&mut self, state: Result<u64, String>, now: Now, actions: &mut Vec<Action>) {
        if !matches!(self.stage, Stage::Filling { .. }) {
            return;
        }
        match state {
            Ok(of) => {
                self.stage = Stage::HandingOver { at: 0, of };
                self.tell(
                    self.plan.after.coordinator,
                    Tell::HandOver { at: 0 },
                    self.patience(now),
                    now,
                    actions,
                );
            }
            Err(why) => self.fail(Refusal::Other(why), now, actions),
        }
    }

    /// The registry's answer to the request to replace the record, or its silence. Once the request may have
    /// been carried out, the only way back is an answer that says that it was not and never will be.
    pub fn put(&mut self, answer: Put, now: Now, actions: &mut Vec<Action>) {
        let Stage::Putting { unknown, restores, again_at } = &mut self.stage else { return };
        let said = |why: String| Refusal::Other(format!("the registry cannot be asked, or refuses: {why}"));
        match answer {
            Put::Done => self.in_force(now, actions),
            // The request was carried out, and the present coordinator has moved the model again.
            Put::Other(epoch) if *unknown && epoch >= self.plan.after.epoch => self.in_force(now, actions),
            // A registry that was started anew since, or a model that was deleted. The request may have been
            // carried out, and new owners may know: the move can only go on.
            Put::Gone if *unknown && !*restores => {
                *restores = true;
                actions.push(Action::Put { restores: true });
            }
            Put::Taken(why) if *unknown => {
                actions.push(Action::Warn(format!("it has moved, and the registry has lost it: {why}")));
                self.in_force(now, actions);
            }
            // This is the answer to an earlier request, too.
            Put::Other(epoch) => {
                let why = format!("the model is of block map {epoch}, not {}", self.plan.before.epoch);
                self.fail(said(why), now, actions);
            }
            Put::Gone => self.fail(said("there is no such model".into()), now, actions),
            Put::Taken(why) => self.fail(said(why), now, actions),
            // A registry that was started anew does not know whether the request was carried out.
            Put::Refused(why) if !*restores => self.fail(said(why), now, actions),
            Put::NotSent(why) if !*unknown => self.fail(said(why), now, actions),
            Put::Refused(why) | Put::NotSent(why) | Put::Unknown(why) => {
                if !std::mem::replace(unknown, true) {
                    actions.push(Action::Warn(format!("whether the model has moved is not known: {why}")));
                }
                *again_at = Some(now + AGAIN);
            }
        }
    }

    /// The registry's answer to [`Action::Look`].
    pub fn looked(&mut self, looked: &Looked, now: Now, actions: &mut Vec<Action>) {
        let off = self.plan.off;
        let Stage::Switching(switching) = &mut self.stage else { return };
        if looked.forgotten == Some(true) {
            // The model was deleted meanwhile. A shard that heard of the deletion before the switch has no
            // record of the model, and a shard that has not switched may not have heard of it.
            let all = self.plan.owners.iter().chain([&self.plan.leaving]);
            let all: Vec<ShardId> = all.map(|record| record.shard).collect();
            all.into_iter().for_each(|shard| self.tell(shard, Tell::Delete, PROMPT, now, actions));
            self.finish(Err(Refusal::NoModel(self.plan.after.name.clone())), actions);
            self.stage = Stage::Over;
            return;
        }
        if let Some(listed) = &looked.listed {
            switching.forgo(listed, off, self.finished);
        }
        let Some(trouble) = switching.trouble().map(str::to_owned) else {
            self.finish(Ok(()), actions);
            self.stage = Stage::Over;
            return;
        };
        if let Some(warning) = switching.rests(now, if self.finished { 2 * AGAIN } else { AGAIN }) {
            actions.push(Action::Warn(warning));
        }
        if now >= self.deadline {
            let why = format!(
                "the model has moved, but not all shards know: {trouble}: they are told when they answer"
            );
            self.finish(Err(Refusal::Other(why)), actions);
        }
    }

    // -- steps

    fn in_force(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.stage = Stage::Switching(Switching::new(&self.plan, now));
        self.switch(now, actions);
    }

    /// Tells those whose turn it is; when it was everybody's, the registry is asked.
    fn switch(&mut self, now: Now, actions: &mut Vec<Action>) {
        let Stage::Switching(switching) = &mut self.stage else { return };
        match switching.next() {
            next if next.is_empty() => actions.push(Action::Look),
            next => {
                next.into_iter().for_each(|shard| self.tell(shard, Tell::Switch, SWITCHING, now, actions))
            }
        }
    }

    fn finish(&mut self, outcome: Result<(), Refusal>, actions: &mut Vec<Action>) {
        if !std::mem::replace(&mut self.finished, true) {
            actions.push(Action::Finished(outcome));
        }
    }

    /// The move is given up: the job goes on, and the new owners forget their blocks.
    fn fail(&mut self, why: Refusal, now: Now, actions: &mut Vec<Action>) {
        if self.held_at.is_some() {
            actions.push(Action::Release);
        }
        self.finish(Err(why), actions);
        self.asked.clear();
        let left = self.plan.owners.iter().map(|owner| owner.shard).collect();
        self.stage = Stage::Abandoning { left, until: now + ABANDONING, again_at: None };
        self.tell_owners(Tell::Abandon, SWITCHING, now, actions);
    }

    fn left(&self, now: Now) -> Duration {
        self.deadline.saturating_sub(now)
    }

    /// For a question while the job is held.
    fn patience(&self, now: Now) -> Duration {
        let held = self.held_at.map_or(Duration::MAX, |at| (at + self.hold).saturating_sub(now));
        PROMPT.min(held).min(self.left(now))
    }

    /// Why it has taken too long, if it has.
    fn overdue(&self, now: Now, sight: &Sight) -> Option<String> {
        let held = self.held_at.map(|at| at + self.hold).filter(|&until| until <= now);
        if held.is_none() && now < self.deadline {
            return None;
        }
        let (within, longer) = match held {
            Some(_) => {
                let within = format!("within the {:?} for which the job may be held", self.hold);
                (
                    within,
                    "hold it longer (--hold), but less than the commits of its learners wait (control/timeout)",
                )
            }
            None => ("in time".to_owned(), "give it longer (--timeout)"),
        };
        Some(match (&self.stage, &sight.held_up_by) {
            (Stage::Waiting, Some(why)) => format!(
                "the step that is under way does not end {within}: {why}: see to that and run the command again, or {longer}"
            ),
            (Stage::Filling { there: (blocks, of), .. }, _) => {
                format!("{blocks} of {of} blocks were moved {within}{}: {longer}", self.silent(now))
            }
            // The asked shards have no longer than that, and each says so itself.
            (Stage::Memory, _) => return None,
            _ => {
                format!("the coordinator's state was not handed over {within}{}: {longer}", self.silent(now))
            }
        })
    }

    /// The shards that have not answered for long.
    fn silent(&self, now: Now) -> String {
        let silent = self.asked.values().filter(|asked| asked.since + GRACE <= now);
        let silent: Vec<String> = silent.map(|asked| self.of_shard(asked.shard, "does not answer")).collect();
        if silent.is_empty() { String::new() } else { format!(" ({})", silent.join(", ")) }
    }

    fn of_shard(&self, shard: ShardId, why: &str) -> String {
        let known = self.plan.owners.iter().chain([&self.plan.leaving]).find(|known| known.shard == shard);
        let address = known.map(|known| known.address.as_str()).unwrap_or_default();
        format!("shard {shard} at {address}: {why}")
    }

    fn tell(&mut self, shard: ShardId, what: Tell, within: Duration, now: Now, actions: &mut Vec<Action>) {
        let number = self.next_number;
        self.next_number += 1;
        self.asked.insert(number, Asked { shard, since: now, until: now + within + GRACE });
        actions.push(Action::Tell { number, shard, what, within });
    }

    fn tell_owners(&mut self, what: Tell, within: Duration, now: Now, actions: &mut Vec<Action>) {
        let owners: Vec<ShardId> = self.plan.owners.iter().map(|owner| owner.shard).collect();
        owners.into_iter().for_each(|shard| self.tell(shard, what, within, now, actions));
    }
}
