//! The requests that wait for a version, their deadlines, and the version that ends them.

use std::time::Duration;

use super::{Action, ClientCore, LastCommit, Now, Token};
use crate::vocabulary::controls::PullPolicy;
use crate::vocabulary::ids::{LearnerId, Version};
use crate::vocabulary::shard_error::ShardError;

const BEING_MADE: &str = "the contribution is taken, but its version is still being made";
const OTHERS_MISSING: &str = "other learners have not contributed to this step";
/// A reason of [`ShardError::TimedOut`]: the version has been published, and its bytes are not here.
pub const NOT_HERE: &str = "the newest version has not come";
/// A reason of [`ShardError::TimedOut`]: the version has been published, and programs hold all that the client may
/// show.
pub const BUFFERS_HELD: &str =
    "every version buffer of this mount is held open (close old handles or raise control/max_versions)";

/// The condition that ends a wait.
#[derive(Clone, Copy, Debug)]
pub(super) enum Awaits {
    /// The client shows the last commit of this learner.
    Step(LearnerId),
    /// The client shows this version, or a newer one.
    Version(Version),
    /// The same, as long as all shards are connected: whoever reads alone is not held up by one that is away.
    Reachable(Version),
}

#[derive(Debug)]
pub(super) struct Wait {
    pub(super) token: Token,
    pub(super) awaits: Awaits,
    pub(super) since: Now,
    pub(super) deadline: Now,
}

/// There is no memory for the version that is pulled.
#[derive(Debug)]
struct Shortage {
    since: Now,
    why: String,
}

/// A version that a program has just closed may still be held for a moment: so long an open waits for its buffer.
const BUFFER_WAIT: Duration = Duration::from_millis(200);
/// A shortage that comes again within this time is not logged again.
const SHORTAGE_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The waits, and whether there is memory for the version that is pulled.
#[derive(Debug, Default)]
pub(super) struct Waits {
    waiting: Vec<Wait>,
    shortage: Option<Shortage>,
    /// When the log was last told of a shortage.
    said_at: Option<Now>,
}

impl Waits {
    /// The waits that have no answer yet.
    pub(super) fn waiting(&self) -> impl Iterator<Item = &Wait> {
        self.waiting.iter()
    }

    /// There is no memory, for this reason. True if the log should say it.
    fn lack_memory(&mut self, why: String, now: Now) -> bool {
        self.shortage.get_or_insert(Shortage { since: now, why });
        let is_said = self.said_at.is_some_and(|at| now < at + SHORTAGE_LOG_INTERVAL);
        if !is_said {
            self.said_at = Some(now);
        }
        !is_said
    }

    /// There is memory.
    pub(super) fn has_memory(&mut self) {
        self.shortage = None;
    }
}

impl ClientCore {
    /// Waits until the client shows a version that holds the last commit of `learner`.
    pub fn await_step(
        &mut self,
        token: Token,
        learner: LearnerId,
        deadline: Now,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        self.wait(Wait { token, awaits: Awaits::Step(learner), since: now, deadline }, now, actions);
    }

    /// Waits until an open as `learner`, or as none, shows what it must.
    pub fn await_fresh(
        &mut self,
        token: Token,
        learner: Option<LearnerId>,
        deadline: Now,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let own = learner.filter(|learner| self.last_commit(*learner) == LastCommit::Waits);
        let newest = self.must_show(learner).unwrap_or_default();
        let awaits = match own {
            Some(own) => Awaits::Step(own),
            None if self.pull_policy() == PullPolicy::OnDemand => Awaits::Version(newest),
            None => Awaits::Reachable(newest),
        };
        self.wait(Wait { token, awaits, since: now, deadline }, now, actions);
    }

    /// Waits until the client shows the newest version that the coordinator has announced, or a newer one.
    pub fn await_newest(&mut self, token: Token, deadline: Now, now: Now, actions: &mut Vec<Action>) {
        let awaits = Awaits::Version(self.state.version);
        self.wait(Wait { token, awaits, since: now, deadline }, now, actions);
    }

    pub(super) fn wait(&mut self, wait: Wait, now: Now, actions: &mut Vec<Action>) {
        self.waits.waiting.push(wait);
        self.answer_waits(now, actions);
        self.start_pull(now, actions);
        // There may be memory by now.
        if self.waits.shortage.is_some() {
            actions.extend(self.owners.partitions().map(Action::Wake));
        }
    }

    /// There is no memory for the version that is to be pulled, for this reason. Those that wait for a version which
    /// exists are told so soon. True if the log should say it.
    pub fn lacks_memory(&mut self, why: String, now: Now) -> bool {
        self.waits.lack_memory(why, now)
    }

    /// The version that is to be pulled has a buffer, or waits for one that readers hold.
    pub fn has_memory(&mut self) {
        self.waits.has_memory();
    }

    /// Why there is no memory for the version that is to be pulled.
    pub fn shortage(&self) -> Option<&str> {
        self.waits.shortage.as_ref().map(|shortage| shortage.why.as_str())
    }

    /// When the first wait is to be answered because there is no memory.
    pub(super) fn shortage_deadline(&self) -> Option<Now> {
        self.waits.waiting().filter_map(|wait| self.fails_at(wait)).min()
    }

    /// When a wait for a version that exists ends, if there is no memory to pull it until then.
    fn fails_at(&self, wait: &Wait) -> Option<Now> {
        let exists = match wait.awaits {
            Awaits::Step(learner) => self.is_published(learner),
            Awaits::Version(version) | Awaits::Reachable(version) => self.state.version >= version,
        };
        let shortage = self.waits.shortage.as_ref().filter(|_| exists)?;
        Some(shortage.since.max(wait.since) + BUFFER_WAIT)
    }

    /// The answer to a wait for which there is no memory.
    fn fails(&self, wait: &Wait, now: Now) -> Option<ShardError> {
        let why = self.shortage().filter(|_| self.fails_at(wait).is_some_and(|at| at <= now))?;
        Some(ShardError::OutOfMemory(format!("no memory for another version here: {why}")))
    }

    pub(super) fn answer_waits(&mut self, now: Now, actions: &mut Vec<Action>) {
        let impatient = self.lost_patience(now);
        let ended = self.lost().or_else(|| self.stopped()).or_else(|| impatient.clone());
        let mut waits = std::mem::take(&mut self.waits.waiting);
        waits.retain(|wait| {
            let fails = || self.fails(wait, now).map(Err);
            let late = |why: &'static str| {
                let late = || Err(ShardError::TimedOut(why.into()).with_away(&self.state.away));
                (wait.deadline <= now).then(late)
            };
            let result = match wait.awaits {
                Awaits::Step(learner) if !self.learners.contains_key(&learner) => {
                    Some(Err(ShardError::UnknownLearner(learner)))
                }
                Awaits::Step(learner) => match self.last_commit(learner) {
                    LastCommit::In(_) => Some(Ok(self.version())),
                    LastCommit::Waits => {
                        let is_out = self.is_published(learner);
                        let why = if is_out { self.why_not_here() } else { self.why_not_out() };
                        fails().or_else(|| late(why)).or_else(|| ended.clone().map(Err))
                    }
                },
                Awaits::Version(version) | Awaits::Reachable(version)
                    if self.buffers.shown().is_some_and(|shown| shown >= version) =>
                {
                    Some(Ok(self.version()))
                }
                Awaits::Reachable(_) if self.shows_any() && !self.reaches_all() => Some(Ok(self.version())),
                Awaits::Version(_) | Awaits::Reachable(_) => {
                    let ended = || self.lost().or_else(|| impatient.clone());
                    fails().or_else(|| late(self.why_not_here())).or_else(|| ended().map(Err))
                }
            };
            let Some(result) = result else { return true };
            actions.push(Action::Awaited(wait.token, result));
            false
        });
        self.waits.waiting.append(&mut waits);
    }

    /// Why the version of a step has not been published.
    fn why_not_out(&self) -> &'static str {
        // Only shards are waited for.
        if self.state.late.is_empty() && !self.state.away.is_empty() { BEING_MADE } else { OTHERS_MISSING }
    }

    /// Why the client does not show a version that has been published.
    fn why_not_here(&self) -> &'static str {
        match &self.pull {
            Some(pull) if pull.no_buffer => BUFFERS_HELD,
            _ => NOT_HERE,
        }
    }

    /// The client shows this version from now on.
    pub fn shown(&mut self, version: Version, now: Now, actions: &mut Vec<Action>) {
        let was_pulled = self.buffers.show(version);
        self.pull_times.caught_up();
        self.waits.has_memory();
        if was_pulled {
            self.pull_times.ended(now);
        }
        self.tell_staged(version, actions);
        self.start_pull(now, actions);
        self.answer_waits(now, actions);
    }
}
