//! Events of a trace: what learners, plans, blocks and versions did, and when. They are recorded only while a trace
//! runs; otherwise each place costs one load of a flag.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::vocabulary::ids::{BlockId, LearnerId, PlanId, ShardId, Version};

/// The most events of one trace. The oldest ones give way.
pub const MOST_EVENTS: usize = 1 << 18;

/// A call of a learner's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// A write.
    Write,
    /// The end of a contribution, until it is answered.
    Commit,
    /// An open that waits for a version.
    Open,
    /// Any wait for others inside one of these.
    Stall,
}

/// The end of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanOutcome {
    /// It has made this version.
    Made(Version),
    /// It has made none: it was dropped, or is a sum for a later plan.
    None,
    /// It is still under way when the trace ends.
    Runs,
}

/// The kinds of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A call of a learner's program.
    Call(LearnerId, Call),
    /// A plan, from its grant on.
    Plan(PlanId, PlanOutcome),
    /// The contributions of a plan are complete.
    Sealed(PlanId),
    /// The blocks of a plan, from the first one that was sent to the last one.
    Blocks(PlanId),
    /// The rest of a plan.
    Conclude(PlanId),
    /// A block was sent to a shard.
    Sent(PlanId, BlockId, ShardId),
    /// The pull of a version.
    Pull(Version),
    /// A block of a version was received from a shard.
    Pulled(Version, BlockId, ShardId),
    /// A version can be opened here.
    Shown(Version),
    /// The time from there until a program opened it.
    Bubble(Version),
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// When it began, since the trace began.
    pub at: Duration,
    /// How long it took.
    pub took: Duration,
    /// What it was.
    pub what: What,
}

/// The events of a trace.
#[derive(Debug, PartialEq, Eq)]
pub struct Recording {
    /// Those that are there, in the order in which they ended.
    pub events: Vec<Event>,
    /// The number of older ones that gave way.
    pub lost: u64,
}

/// Records the events of one model.
#[derive(Debug, Default)]
pub struct Recorder {
    on: AtomicBool,
    ring: Mutex<Option<Ring>>,
}

#[derive(Debug)]
struct Ring {
    since: Instant,
    most: usize,
    events: VecDeque<Event>,
    lost: u64,
}

impl Recorder {
    /// Whether a trace runs.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Begins a trace of at most `most` events. Times count from `since`. What another trace has recorded is dropped.
    pub fn begin(&self, since: Instant, most: usize) {
        *self.ring.lock() = Some(Ring { since, most: most.max(1), events: VecDeque::new(), lost: 0 });
        self.on.store(true, Ordering::Relaxed);
    }

    /// The events so far of the trace that runs.
    pub fn so_far(&self) -> Vec<Event> {
        self.ring.lock().iter().flat_map(|ring| &ring.events).copied().collect()
    }

    /// Ends the trace. None if none runs.
    pub fn end(&self) -> Option<Recording> {
        self.on.store(false, Ordering::Relaxed);
        let Ring { events, lost, .. } = self.ring.lock().take()?;
        Some(Recording { events: events.into(), lost })
    }

    /// Something took place, if a trace runs. Of what began before the trace, only the rest is recorded.
    pub fn record(&self, what: What, from: Instant, to: Instant) {
        if self.is_on() {
            self.record_now(what, from, to);
        }
    }

    #[cold]
    fn record_now(&self, what: What, from: Instant, to: Instant) {
        let mut ring = self.ring.lock();
        // The trace may have ended meanwhile.
        let Some(ring) = &mut *ring else { return };
        if to < ring.since {
            return;
        }
        let from = from.max(ring.since);
        if ring.events.len() == ring.most {
            ring.events.pop_front();
            ring.lost += 1;
        }
        let (at, took) = (from.duration_since(ring.since), to.saturating_duration_since(from));
        ring.events.push_back(Event { at, took, what });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const SHOWN: What = What::Shown(Version(1));

    #[test]
    fn nothing_is_recorded_unless_a_trace_runs() {
        let (recorder, now) = (Recorder::default(), Instant::now());
        recorder.record(SHOWN, now, now);
        assert!(!recorder.is_on() && recorder.end().is_none());
        recorder.begin(now, 10);
        recorder.record(SHOWN, now + MS, now + 3 * MS);
        let event = Event { at: MS, took: 2 * MS, what: SHOWN };
        assert_eq!(recorder.so_far(), [event]);
        assert_eq!(recorder.end(), Some(Recording { events: vec![event], lost: 0 }));
        recorder.record(SHOWN, now, now);
        assert!(recorder.end().is_none() && recorder.so_far().is_empty());
    }

    #[test]
    fn what_began_before_the_trace_is_cut_and_what_ended_before_is_left_out() {
        let (recorder, now) = (Recorder::default(), Instant::now());
        recorder.begin(now + 10 * MS, 10);
        recorder.record(SHOWN, now, now + 9 * MS);
        recorder.record(SHOWN, now + 5 * MS, now + 12 * MS);
        recorder.record(SHOWN, now + 13 * MS, now + 11 * MS);
        let times: Vec<_> = recorder.end().unwrap().events.iter().map(|of| (of.at, of.took)).collect();
        assert_eq!(times, [(Duration::ZERO, 2 * MS), (3 * MS, Duration::ZERO)]);
    }

    #[test]
    fn the_oldest_events_give_way() {
        let (recorder, now) = (Recorder::default(), Instant::now());
        recorder.begin(now, 3);
        for version in 0..10 {
            recorder.record(What::Shown(Version(version)), now, now);
        }
        let Recording { events, lost } = recorder.end().unwrap();
        assert_eq!((events[0].what, events.len(), lost), (What::Shown(Version(7)), 3, 7));
    }

    #[test]
    fn an_event_is_small() {
        assert!(size_of::<Event>() <= 56, "{}", size_of::<Event>());
    }
}
