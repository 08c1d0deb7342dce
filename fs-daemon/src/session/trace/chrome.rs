//! A trace as Chrome's trace-event JSON, which Perfetto reads: what is in which process and thread of it, and its text.
//!
//! A model is a process. Its learners, its plans, its versions and its shards are threads. Slices of one thread nest:
//! where two would only overlap, the later one gets another thread of the same name.

use std::collections::BTreeMap;
use std::time::Duration;

use libmodelio::observe::trace::{Call, Event, PlanOutcome, Recording, What};
use libmodelio::vocabulary::ids::{LearnerId, ShardId};
use serde_json::{Value, json};

/// A pause of a program between two calls that is shorter is not shown as computing.
const SHORTEST: Duration = Duration::from_micros(20);
/// The same between two writes. One write(2) of a program comes as several, and the kernel copies between them.
const SHORTEST_IN_WRITES: Duration = Duration::from_millis(1);

/// The record of one model in a trace.
pub struct Traced {
    /// Its name.
    pub model: String,
    /// The names of its learners.
    pub learners: BTreeMap<LearnerId, String>,
    /// Its events.
    pub recording: Option<Recording>,
}

/// What a thread of the document shows. They are in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Track {
    Learner(LearnerId),
    Plans,
    Versions,
    To(ShardId),
    From(ShardId),
}

/// A slice, or an instant.
#[derive(Clone, Copy, Debug)]
struct Shown {
    at: Duration,
    took: Duration,
    kind: EventKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EventKind {
    Event(What),
    /// A program between two calls.
    Compute,
}

/// A line of the document.
enum Line {
    Meta(Value),
    Event { pid: u32, tid: u32, of: Shown },
}

/// The document. Its text is made as it is read.
pub struct Document {
    lines: Vec<Line>,
    next: usize,
    text: Vec<u8>,
    events: usize,
    lost: u64,
}

impl Document {
    /// Of a trace that began so long after 1970, and took so long.
    pub fn new(models: Vec<Traced>, began: Duration, took: Duration) -> Document {
        let lost = models.iter().filter_map(|model| Some(model.recording.as_ref()?.lost)).sum();
        let about = json!({
            "lost_events": lost,
            "program": concat!("gradfs ", env!("CARGO_PKG_VERSION")),
            "began_unix_seconds": began.as_secs_f64(),
            "seconds": took.as_secs_f64(),
        });
        let text = format!("{{\"otherData\":{about},\n\"displayTimeUnit\":\"ms\",\n\"traceEvents\":[");
        let mut document = Document { lines: Vec::new(), next: 0, text: text.into_bytes(), events: 0, lost };
        for (pid, model) in (1..).zip(models) {
            document.add(pid, model);
        }
        document
    }

    /// The number of slices and instants.
    pub fn len(&self) -> usize {
        self.events
    }

    /// The number of events that gave way to newer ones.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    fn add(&mut self, pid: u32, Traced { model, learners, recording }: Traced) {
        let meta = |name: &str, tid: u32, args: Value| {
            Line::Meta(json!({ "ph": "M", "name": name, "pid": pid, "tid": tid, "args": args }))
        };
        self.lines.push(meta("process_name", 0, json!({ "name": format!("model {model}") })));
        self.lines.push(meta("process_sort_index", 0, json!({ "sort_index": pid })));
        let mut tid = 0;
        for (track, shown) in tracks(recording) {
            for (lane, shown) in lanes(shown).into_iter().enumerate() {
                tid += 1;
                let mut name = track.name(&learners);
                if lane > 0 {
                    name = format!("{name} ({})", lane + 1);
                }
                self.lines.push(meta("thread_name", tid, json!({ "name": name })));
                self.lines.push(meta("thread_sort_index", tid, json!({ "sort_index": tid })));
                self.events += shown.len();
                self.lines.extend(shown.into_iter().map(|of| Line::Event { pid, tid, of }));
            }
        }
    }

    /// At most `len` bytes from `offset` on; none at the end.
    pub fn part(&mut self, offset: u64, len: usize) -> &[u8] {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let end = start.saturating_add(len);
        while self.text.len() < end && self.next <= self.lines.len() {
            match self.lines.get(self.next) {
                Some(line) => {
                    let line = line.text();
                    let before = if self.next == 0 { "\n" } else { ",\n" };
                    self.text.extend_from_slice(before.as_bytes());
                    self.text.extend_from_slice(line.as_bytes());
                }
                None => self.text.extend_from_slice(b"\n]}\n"),
            }
            self.next += 1;
        }
        let end = end.min(self.text.len());
        &self.text[start.min(end)..end]
    }
}

impl Line {
    fn text(&self) -> String {
        let (pid, tid, Shown { at, took, kind }) = match self {
            Line::Meta(value) => return value.to_string(),
            Line::Event { pid, tid, of } => (pid, tid, *of),
        };
        let (name, category, args) = kind.told();
        // Microseconds, to the nanosecond.
        let us = |of: Duration| format!("{}.{:03}", of.as_micros(), of.subsec_nanos() % 1000);
        let shape = match kind.is_instant() {
            true => "\"ph\":\"i\",\"s\":\"t\"".to_owned(),
            false => format!("\"ph\":\"X\",\"dur\":{}", us(took)),
        };
        format!(
            "{{{shape},\"ts\":{},\"pid\":{pid},\"tid\":{tid},\"name\":\"{name}\",\"cat\":\"{category}\",\"args\":{args}}}",
            us(at)
        )
    }
}

impl Track {
    fn of(what: What) -> Track {
        match what {
            What::Call(learner, _) => Track::Learner(learner),
            What::Plan(..) | What::Sealed(_) | What::Blocks(_) | What::Conclude(_) => Track::Plans,
            What::Pull(_) | What::Shown(_) | What::Bubble(_) => Track::Versions,
            What::Sent(_, _, shard) => Track::To(shard),
            What::Pulled(_, _, shard) => Track::From(shard),
        }
    }

    fn name(self, learners: &BTreeMap<LearnerId, String>) -> String {
        match self {
            Track::Learner(id) => {
                let name = learners.get(&id).cloned().unwrap_or_else(|| format!("number {id}"));
                format!("learner {name}")
            }
            Track::Plans => "plans".to_owned(),
            Track::Versions => "versions".to_owned(),
            Track::To(shard) => format!("blocks to shard {shard}"),
            Track::From(shard) => format!("blocks from shard {shard}"),
        }
    }
}

impl EventKind {
    fn is_instant(self) -> bool {
        matches!(self, EventKind::Event(What::Sealed(_) | What::Shown(_)))
    }

    /// The name, the category and the arguments. None of them has a character that JSON escapes.
    fn told(self) -> (String, &'static str, Value) {
        let EventKind::Event(what) = self else { return ("compute".to_owned(), "learner", json!({})) };
        match what {
            What::Call(_, call) => {
                let name = match call {
                    Call::Write => "write",
                    Call::Commit => "commit",
                    Call::Open => "open",
                    Call::Stall => "stall",
                };
                (name.to_owned(), "learner", json!({}))
            }
            What::Plan(plan, outcome) => {
                let (version, ends) = match outcome {
                    PlanOutcome::Made(version) => (Some(version), "version"),
                    PlanOutcome::None => (None, "none"),
                    PlanOutcome::Runs => (None, "under way"),
                };
                let args = json!({ "plan": plan, "ends": ends, "version": version });
                (format!("plan {plan}"), "plan", args)
            }
            What::Sealed(plan) => (format!("plan {plan} is sealed"), "plan", json!({ "plan": plan })),
            What::Blocks(plan) => ("blocks".to_owned(), "plan", json!({ "plan": plan })),
            What::Conclude(plan) => ("conclude".to_owned(), "plan", json!({ "plan": plan })),
            What::Sent(plan, block, shard) => {
                let args = json!({ "block": block, "plan": plan, "shard": shard });
                (format!("block {block}"), "block", args)
            }
            What::Pull(version) => (format!("pull {version}"), "version", json!({ "version": version })),
            What::Pulled(version, block, shard) => {
                let args = json!({ "block": block, "version": version, "shard": shard });
                (format!("block {block}"), "block", args)
            }
            What::Shown(version) => (format!("version {version}"), "version", json!({ "version": version })),
            What::Bubble(version) => ("bubble".to_owned(), "version", json!({ "version": version })),
        }
    }
}

/// The slices of each track, in the order of their beginnings.
fn tracks(recording: Option<Recording>) -> BTreeMap<Track, Vec<Shown>> {
    let mut tracks = BTreeMap::<Track, Vec<Shown>>::new();
    for Event { at, took, what } in recording.map(|recording| recording.events).unwrap_or_default() {
        tracks.entry(Track::of(what)).or_default().push(Shown { at, took, kind: EventKind::Event(what) });
    }
    for (track, shown) in &mut tracks {
        if matches!(track, Track::Learner(_)) {
            shown.sort_by_key(|of| of.at);
            let pauses = pauses(shown);
            shown.extend(pauses);
        }
        // The longer one is around the shorter one. A stall is inside of its call.
        let is_stall = |of: &Shown| matches!(of.kind, EventKind::Event(What::Call(_, Call::Stall)));
        shown.sort_by_key(|of| (of.at, std::cmp::Reverse(of.took), is_stall(of)));
    }
    tracks
}

/// The times between the calls of a learner, whose calls are in the order of their beginnings.
fn pauses(calls: &[Shown]) -> Vec<Shown> {
    let mut pauses = Vec::new();
    let mut busy = calls.first().map_or(Duration::ZERO, |first| first.at);
    let mut wrote = false;
    for Shown { at, took, kind } in calls {
        let writes = matches!(kind, EventKind::Event(What::Call(_, Call::Write)));
        let shortest = if wrote && writes { SHORTEST_IN_WRITES } else { SHORTEST };
        if *at >= busy + shortest {
            pauses.push(Shown { at: busy, took: *at - busy, kind: EventKind::Compute });
        }
        wrote = writes;
        busy = busy.max(*at + *took);
    }
    pauses
}

/// Spreads slices, which are in order, over as few lanes as it takes that those of each lane nest.
fn lanes(shown: Vec<Shown>) -> Vec<Vec<Shown>> {
    /// A lane, and the ends of its slices that are around the present moment, the innermost last.
    #[derive(Default)]
    struct Lane {
        shown: Vec<Shown>,
        around: Vec<Duration>,
    }
    let mut lanes: Vec<Lane> = Vec::new();
    for of in shown {
        let end = of.at + of.took;
        let fits = |lane: &mut Lane| {
            while lane.around.last().is_some_and(|end| *end <= of.at) {
                lane.around.pop();
            }
            lane.around.last().is_none_or(|around| end <= *around)
        };
        let at = lanes.iter_mut().position(fits).unwrap_or_else(|| {
            lanes.push(Lane::default());
            lanes.len() - 1
        });
        let lane = &mut lanes[at];
        lane.shown.push(of);
        if !of.kind.is_instant() {
            lane.around.push(end);
        }
    }
    lanes.into_iter().map(|lane| lane.shown).collect()
}

#[cfg(test)]
mod tests {
    use libmodelio::vocabulary::ids::{BlockId, PlanId, Version};
    use proptest::prelude::*;

    use super::*;

    const A: LearnerId = LearnerId(3);

    fn event(at: u64, took: u64, what: What) -> Event {
        Event { at: Duration::from_micros(at), took: Duration::from_micros(took), what }
    }

    fn text(mut document: Document, piece: usize) -> String {
        let mut text = Vec::new();
        loop {
            match document.part(text.len() as u64, piece) {
                [] => return String::from_utf8(text).unwrap(),
                part => text.extend_from_slice(part),
            }
        }
    }

    fn document(events: Vec<Event>) -> Document {
        let learners = BTreeMap::from([(A, "a".to_owned())]);
        let recording = Some(Recording { events, lost: 2 });
        let traced = Traced { model: "m".to_owned(), learners, recording };
        Document::new(vec![traced], Duration::from_secs(1), Duration::from_secs(2))
    }

    fn parsed(events: Vec<Event>) -> Vec<Value> {
        let value: Value = serde_json::from_str(&text(document(events), 1 << 20)).unwrap();
        value["traceEvents"].as_array().unwrap().clone()
    }

    #[test]
    fn a_document_is_json_however_it_is_read() {
        let events = vec![event(1, 2, What::Call(A, Call::Write)), event(5, 0, What::Shown(Version(1)))];
        let whole = text(document(events.clone()), 1 << 20);
        for piece in [1, 7, 64] {
            assert_eq!(text(document(events.clone()), piece), whole);
        }
        let value: Value = serde_json::from_str(&whole).unwrap();
        assert_eq!(value["otherData"]["lost_events"], 2);
        assert_eq!(value["traceEvents"].as_array().unwrap().len(), 2 + 2 * 2 + 2);
        let empty: Value = serde_json::from_str(&text(document(Vec::new()), 9)).unwrap();
        assert_eq!(empty["traceEvents"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn a_learner_computes_between_its_calls() {
        let call = |at, took, call| event(at, took, What::Call(A, call));
        let events = parsed(vec![
            call(0, 100, Call::Write),
            call(505, 100, Call::Write),
            call(1605, 100, Call::Write),
            call(1805, 50, Call::Commit),
            call(1805, 50, Call::Stall),
        ]);
        let slices: Vec<_> = events
            .iter()
            .filter(|of| of["ph"] == "X")
            .map(|of| (of["name"].as_str().unwrap(), of["ts"].as_f64().unwrap(), of["dur"].as_f64().unwrap()))
            .collect();
        let wanted = [
            ("write", 0.0, 100.0),
            ("write", 505.0, 100.0),
            ("compute", 605.0, 1000.0),
            ("write", 1605.0, 100.0),
            ("compute", 1705.0, 100.0),
            ("commit", 1805.0, 50.0),
            ("stall", 1805.0, 50.0),
        ];
        assert_eq!(slices, wanted);
        let names: Vec<_> = events.iter().filter(|of| of["name"] == "thread_name").collect();
        assert_eq!((names.len(), &names[0]["args"]["name"]), (1, &json!("learner a")));
    }

    #[test]
    fn slices_that_overlap_get_threads_of_their_own() {
        let sent = |at, took, block| event(at, took, What::Sent(PlanId(1), BlockId(block), ShardId(2)));
        let events = parsed(vec![sent(0, 10, 0), sent(5, 10, 1), sent(15, 5, 2), sent(11, 2, 3)]);
        let thread = |name: &str| events.iter().find(|of| of["name"] == name).unwrap()["tid"].clone();
        assert_eq!(thread("block 0"), thread("block 2"));
        assert_eq!(thread("block 0"), thread("block 3"));
        assert_ne!(thread("block 0"), thread("block 1"));
        let named: Vec<_> = events.iter().filter(|of| of["name"] == "thread_name").collect();
        assert_eq!(named[1]["args"]["name"], "blocks to shard 2 (2)");
    }

    proptest! {
        #[test]
        fn all_slices_of_a_thread_nest(
            calls in prop::collection::vec((0..200u64, 0..50u64, 0..3u8), 0..60)
        ) {
            let what = |of| What::Call(A, [Call::Write, Call::Commit, Call::Stall][of as usize]);
            let events = parsed(calls.iter().map(|&(at, took, of)| event(at, took, what(of))).collect());
            let mut open = BTreeMap::<u64, Vec<f64>>::new();
            for of in events.iter().filter(|of| of["ph"] == "X") {
                let (at, took) = (of["ts"].as_f64().unwrap(), of["dur"].as_f64().unwrap());
                let open = open.entry(of["tid"].as_u64().unwrap()).or_default();
                open.retain(|end| *end > at);
                prop_assert!(took >= 0.0 && open.iter().all(|end| at + took <= *end));
                open.push(at + took);
            }
        }
    }
}
