//! The decisions of `gradfs run`: who is started again, who is asked to end, who is killed, and the exit status.
//!
//! A pure core: events and the time go in, acts come out. The edge around it has the processes.

use std::time::{Duration, Instant};

use clap::ValueEnum;
use nix::sys::signal::Signal;

/// A SIGINT so soon after the first is the same wish: timeout(1) signals its child, and then the child's group.
const REPEATED_WITHIN: Duration = Duration::from_millis(200);

/// The status that shells have for a command that cannot be started.
const NOT_STARTED: u8 = 126;

/// What becomes of the others when a process fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnFailure {
    /// The others are ended, too
    Stop,
    /// Its learner leaves, and the others go on
    Drop,
    /// It is started again, at most --restarts times; then as stop
    Restart,
}

/// How a process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By itself, with this status.
    Exited(i32),
    /// By this signal.
    Killed(i32),
    /// It did not begin.
    NotStarted,
}

impl End {
    /// The exit status that a shell has for it.
    pub fn status(self) -> u8 {
        match self {
            End::Exited(status) => status as u8,
            End::Killed(signal) => 128u8.wrapping_add(signal as u8),
            End::NotStarted => NOT_STARTED,
        }
    }

    /// The same in words, behind the name of the process.
    pub fn in_words(self) -> String {
        match self {
            End::Exited(status) => format!("has ended with status {status}"),
            End::Killed(number) => match Signal::try_from(number) {
                Ok(signal) => format!("was killed by {signal}"),
                Err(_) => format!("was killed by signal {number}"),
            },
            End::NotStarted => "could not be started".into(),
        }
    }
}

/// What the edge has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    /// Start the process of this rank; its learner has joined.
    Start(u32),
    /// Have the learner leave and join again, and start its process again.
    Restart(u32),
    /// Send the signal to the process group of this rank.
    Send(u32, Signal),
    /// Have the learner of this rank leave.
    Leave(u32),
    /// Tell the user.
    Say(String),
}

#[derive(Debug, Default)]
struct Rank {
    alive: bool,
    restarts: u32,
    /// It was asked to end because it is one too many: its end is no failure.
    removed: bool,
    kill_at: Option<Instant>,
}

/// The processes by rank, and what they were told.
#[derive(Debug)]
pub struct Supervisor {
    on_failure: OnFailure,
    restarts: u32,
    grace: Duration,
    ranks: Vec<Rank>,
    first_failure: Option<u8>,
    succeeded: bool,
    stopping: bool,
    /// When the user first asked for the end.
    asked: Option<Instant>,
    /// Signals that went to all, and that end whoever does not handle them.
    forwarded: Vec<Signal>,
}

impl Supervisor {
    pub fn new(on_failure: OnFailure, restarts: u32, grace: Duration) -> Supervisor {
        Supervisor {
            on_failure,
            restarts,
            grace,
            ranks: Vec::new(),
            first_failure: None,
            succeeded: false,
            stopping: false,
            asked: None,
            forwarded: Vec::new(),
        }
    }

    /// The rank that one process more would have.
    pub fn next_rank(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// One process more, with the next rank. Its learner has joined. Once all are to end, it is not started.
    pub fn add(&mut self) -> Vec<Act> {
        let rank = self.next_rank();
        self.ranks.push(Rank { alive: !self.stopping, ..Rank::default() });
        vec![if self.stopping { Act::Leave(rank) } else { Act::Start(rank) }]
    }

    /// The process of the last rank is one too many.
    pub fn remove_last(&mut self, now: Instant) -> Vec<Act> {
        let Some((rank, last)) = self.ranks.iter_mut().enumerate().next_back() else { return Vec::new() };
        if !last.alive || last.removed || self.stopping {
            return Vec::new();
        }
        last.removed = true;
        last.kill_at = Some(now + self.grace);
        vec![Act::Send(rank as u32, Signal::SIGTERM)]
    }

    /// The process of `rank` has ended.
    pub fn ended(&mut self, rank: u32, end: End, now: Instant) -> Vec<Act> {
        let Some(this) = self.ranks.get_mut(rank as usize).filter(|this| this.alive) else {
            return Vec::new();
        };
        this.alive = false;
        this.kill_at = None;
        if this.removed {
            return vec![Act::Leave(rank)];
        }
        if end == End::Exited(0) {
            self.succeeded = true;
            return vec![Act::Leave(rank)];
        }
        if self.stopping {
            self.first_failure.get_or_insert(end.status());
            return vec![Act::Leave(rank)];
        }
        let asked_to = self.forwarded.iter().any(|signal| end == End::Killed(*signal as i32));
        let in_vain = asked_to || end == End::NotStarted;
        if self.on_failure == OnFailure::Restart && this.restarts < self.restarts && !in_vain {
            this.restarts += 1;
            this.alive = true;
            let (count, most) = (this.restarts, self.restarts);
            let text = format!("rank {rank} {}; it is started again ({count} of {most})", end.in_words());
            return vec![Act::Say(text), Act::Restart(rank)];
        }
        self.first_failure.get_or_insert(end.status());
        let others = self.ranks.iter().any(|other| other.alive);
        let what = match self.on_failure {
            _ if !others => "",
            OnFailure::Drop => "; the others go on",
            OnFailure::Stop | OnFailure::Restart => "; the others are ended",
        };
        let mut acts = vec![Act::Say(format!("rank {rank} {}{what}", end.in_words()))];
        if self.on_failure != OnFailure::Drop {
            acts.extend(self.stop(Signal::SIGTERM, now));
        }
        acts.push(Act::Leave(rank));
        acts
    }

    /// A signal has come for all.
    pub fn signal(&mut self, signal: Signal, now: Instant) -> Vec<Act> {
        if !matches!(signal, Signal::SIGINT | Signal::SIGTERM) {
            if !self.forwarded.contains(&signal) {
                self.forwarded.push(signal);
            }
            return self.to_all(signal);
        }
        match self.asked {
            Some(first) if signal == Signal::SIGINT => {
                if now.saturating_duration_since(first) < REPEATED_WITHIN {
                    return Vec::new();
                }
                self.ranks.iter_mut().for_each(|rank| rank.kill_at = None);
                self.to_all(Signal::SIGKILL)
            }
            first => {
                self.asked = first.or(Some(now));
                self.stop(signal, now)
            }
        }
    }

    /// Kills those whose time to end by themselves is over.
    pub fn tick(&mut self, now: Instant) -> Vec<Act> {
        let mut acts = Vec::new();
        for (number, rank) in self.ranks.iter_mut().enumerate() {
            if rank.kill_at.is_some_and(|at| at <= now) {
                rank.kill_at = None;
                let seconds = self.grace.as_secs_f64();
                acts.push(Act::Say(format!("rank {number} has not ended within {seconds} s: it is killed")));
                acts.push(Act::Send(number as u32, Signal::SIGKILL));
            }
        }
        acts
    }

    /// When [`Self::tick`] has something to do.
    pub fn next_tick(&self) -> Option<Instant> {
        self.ranks.iter().filter_map(|rank| rank.kill_at).min()
    }

    /// The exit status, once nobody lives any more.
    pub fn status(&self) -> Option<u8> {
        if self.living().next().is_some() {
            return None;
        }
        let forgiven = self.on_failure == OnFailure::Drop && self.succeeded;
        Some(self.first_failure.filter(|_| !forgiven).unwrap_or(0))
    }

    /// The ranks whose processes live.
    pub fn living(&self) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.ranks).filter(|(_, rank)| rank.alive).map(|(number, _)| number)
    }

    /// Asks all to end, and sets the time at which they are killed.
    fn stop(&mut self, signal: Signal, now: Instant) -> Vec<Act> {
        self.stopping = true;
        for rank in self.ranks.iter_mut().filter(|rank| rank.alive) {
            rank.kill_at.get_or_insert(now + self.grace);
        }
        self.to_all(signal)
    }

    fn to_all(&self, signal: Signal) -> Vec<Act> {
        self.living().map(|rank| Act::Send(rank, signal)).collect()
    }
}

#[cfg(test)]
mod tests;
