//! Chooses the refused calls that get a line in the log: a program that tries again in a loop must not flood
//! it.
//!
//! The log shows a few lines of each kind in an interval. One line counts the omitted ones, when the next
//! call is refused after that, or when the mount ends. Refusals are of one kind if call, errno and sentence
//! are the same, except for numbers and quotations in the sentence: another block is the same mistake,
//! another file is not, and neither is another model.
//!
//! Each line names the model, the learner if the file is a learner's, and the process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::process::thread_group;
use crate::fs::Fs;
use crate::session::error::CallError;

/// How long what is shown of a kind counts.
const INTERVAL: Duration = Duration::from_secs(10);
/// Lines shown of a kind in that time.
const LINES: u32 = 5;
/// Kinds that are distinguished at a time: more than the usual mistakes of all programs of a job in that
/// time.
const KINDS: usize = 64;

/// The log is the process's, so this is as well.
static LIMIT: Mutex<Limit> = Mutex::new(Limit::new());

/// Who makes a call, and on what.
pub(super) struct Caller {
    /// The filesystem, which knows whose file it is.
    pub fs: Arc<Fs>,
    /// The call's name.
    pub call: &'static str,
    /// The file, or the directory of the name.
    pub ino: u64,
    /// The thread that calls; 0 in a PID namespace that is not ours.
    pub tid: u32,
}

impl Caller {
    /// The errno of the refused call, whose sentence goes into the log.
    pub(super) fn refused(&self, error: &CallError) -> i32 {
        self.say(error, error.is_quiet());
        error.errno
    }

    /// Logs a refusal as a warning, ordinary or not, unless there were too many.
    pub(super) fn warn(&self, error: &CallError) {
        self.say(error, false);
    }

    fn say(&self, error: &CallError, is_quiet: bool) {
        let Caller { fs, call, ino, tid } = self;
        if is_quiet && !tracing::enabled!(tracing::Level::DEBUG) {
            return;
        }
        let (model, learner) = fs.whose(*ino);
        let (model, learner) = (model.as_ref().map(|model| model.name.as_str()), learner.as_deref());
        let now = Instant::now();
        let shown = !is_quiet && {
            log_left_out(now);
            // The lock is not held for the line: writing it may take long, and others need the lock meanwhile.
            LIMIT.lock().admits(now, call, model, error)
        };
        let pid = || thread_group(*tid).or((*tid != 0).then_some(*tid));
        if shown {
            tracing::warn!(call, model, learner, pid = pid(), "{error}");
        } else {
            tracing::debug!(call, model, learner, pid = pid(), "{error}");
        }
    }
}

/// Logs what was left out and not said yet.
pub(super) fn log_rest() {
    log_left_out(Instant::now() + INTERVAL);
}

fn log_left_out(now: Instant) {
    loop {
        let Some(RefusalKind { call, model, error, left_out, .. }) = LIMIT.lock().take_over(now) else {
            return;
        };
        let model = model.as_deref();
        tracing::warn!(call, model, "{left_out} more like this within {} s: {error}", INTERVAL.as_secs());
    }
}

/// Shown and omitted refusals in the current intervals.
struct Limit {
    kinds: [Option<RefusalKind>; KINDS],
}

/// Refusals of one kind since the first of them.
#[derive(Debug)]
struct RefusalKind {
    call: &'static str,
    model: Option<String>,
    /// The first.
    error: CallError,
    since: Instant,
    shown: u32,
    left_out: u64,
}

impl Limit {
    const fn new() -> Limit {
        Limit { kinds: [const { None }; KINDS] }
    }

    /// Takes out what is over by `now`; returns the first of it that something was left out of.
    fn take_over(&mut self, now: Instant) -> Option<RefusalKind> {
        let over = |kind: &mut RefusalKind| now.saturating_duration_since(kind.since) >= INTERVAL;
        self.kinds.iter_mut().find_map(|slot| slot.take_if(over).filter(|kind| kind.left_out > 0))
    }

    /// Whether the refusal of `call` is to be shown; counts it either way. Allocates only for refusals that
    /// are shown.
    fn admits(&mut self, now: Instant, call: &'static str, model: Option<&str>, error: &CallError) -> bool {
        let first = || {
            let model = model.map(str::to_owned);
            RefusalKind { call, model, error: error.clone(), since: now, shown: 0, left_out: 0 }
        };
        let kind = self.place(call, model, error).get_or_insert_with(first);
        if kind.shown < LINES {
            kind.shown += 1;
            true
        } else {
            kind.left_out += 1;
            false
        }
    }

    /// The place that counts the refusal: its kind's place, else a free one. When all places are taken, it is
    /// the place of any refusal of the same call and errno, or else of the last that came.
    fn place(&mut self, call: &str, model: Option<&str>, error: &CallError) -> &mut Option<RefusalKind> {
        let same_call = |kind: &RefusalKind| kind.call == call && kind.error.errno == error.errno;
        let same = |kind: &RefusalKind| {
            same_call(kind) && kind.model.as_deref() == model && alike(&kind.error.message, &error.message)
        };
        let find = |wanted: &dyn Fn(&Option<RefusalKind>) -> bool| self.kinds.iter().position(wanted);
        let place = find(&|slot| slot.as_ref().is_some_and(same))
            .or_else(|| find(&Option::is_none))
            .or_else(|| find(&|slot| slot.as_ref().is_some_and(same_call)))
            .unwrap_or(KINDS - 1);
        &mut self.kinds[place]
    }
}

/// Whether two sentences say the same about other numbers and names.
fn alike(one: &str, other: &str) -> bool {
    fixed(one).eq(fixed(other))
}

/// The bytes of `sentence` but for numbers and what stands between double quotes.
fn fixed(sentence: &str) -> impl Iterator<Item = u8> {
    let mut quoted = false;
    sentence.bytes().filter(move |byte| {
        quoted ^= *byte == b'"';
        !quoted && !byte.is_ascii_digit()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn refusal(errno: i32, message: &str) -> CallError {
        CallError::new(errno, message)
    }

    /// How many of `count` equal refusals are shown.
    fn shown(limit: &mut Limit, now: Instant, call: &'static str, error: &CallError, count: u32) -> u32 {
        (0..count).map(|_| u32::from(limit.admits(now, call, None, error))).sum()
    }

    #[test]
    fn a_flood_is_cut_and_counted() {
        let (mut limit, start) = (Limit::new(), Instant::now());
        let error = refusal(libc::EINVAL, "block 7 was sent");
        assert_eq!(shown(&mut limit, start, "write", &error, 3), 3);
        assert_eq!(shown(&mut limit, start + SECOND, "write", &error, 1_000), LINES - 3);
        assert!(limit.take_over(start + INTERVAL - SECOND).is_none(), "not over yet");
        let kind = limit.take_over(start + INTERVAL).expect("over");
        assert_eq!((kind.call, kind.left_out, kind.error), ("write", 998, error.clone()));
        assert!(limit.take_over(start + INTERVAL).is_none(), "said once");
        assert_eq!(shown(&mut limit, start + INTERVAL, "write", &error, 1_000), LINES, "a new interval");
    }

    #[test]
    fn few_are_shown_and_forgotten() {
        let (mut limit, start) = (Limit::new(), Instant::now());
        let error = refusal(libc::EINVAL, "no");
        for i in 0..100 {
            let now = start + SECOND * i * 3;
            assert!(limit.take_over(now).is_none());
            assert!(limit.admits(now, "write", None, &error), "{i}");
        }
        assert!(limit.take_over(start + SECOND * 1_000).is_none());
        assert!(limit.kinds.iter().all(Option::is_none));
    }

    #[test]
    fn kinds_do_not_cover_each_other() {
        let (mut limit, now) = (Limit::new(), Instant::now());
        let error = refusal(libc::EINVAL, "control/learners: \"x\" is no number");
        assert_eq!(shown(&mut limit, now, "write", &error, 1_000), LINES);
        for (call, other) in [
            ("close", error.clone()),
            ("write", refusal(libc::EFBIG, &error.message)),
            ("write", refusal(libc::EINVAL, "control/retain: \"x\" is no number")),
        ] {
            assert_eq!(shown(&mut limit, now, call, &other, 1_000), LINES, "{call}, {other:?}");
        }
        assert!(limit.admits(now, "write", Some("other"), &error), "of another model");
    }

    #[test]
    fn numbers_and_quotations_make_no_kind() {
        let (mut limit, now) = (Limit::new(), Instant::now());
        let shown = (0..1_000).filter(|i| {
            let name = "x".repeat(i % 50);
            limit.admits(
                now,
                "write",
                None,
                &refusal(libc::EINVAL, &format!("block {i} of \"{name}\" was sent")),
            )
        });
        assert_eq!(shown.count(), LINES as usize);
        assert!(alike("\"a\" is 1", "\"b\" is 22"));
        assert!(!alike("\"a\" is 1", "\"a\" was 1"));
        assert!(!alike("a is 1", "b is 1"));
    }

    #[test]
    fn more_kinds_than_places() {
        let (mut limit, now) = (Limit::new(), Instant::now());
        let sentence = |i: usize| "x".repeat(i + 1);
        for i in 0..KINDS {
            assert!(limit.admits(now, "write", None, &refusal(libc::EINVAL, &sentence(i))));
        }
        let lines = |call, errno, limit: &mut Limit| {
            (KINDS..1_000).filter(|&i| limit.admits(now, call, None, &refusal(errno, &sentence(i)))).count()
        };
        assert_eq!(lines("write", libc::EINVAL, &mut limit), LINES as usize - 1, "of the first's");
        assert_eq!(lines("close", libc::EFBIG, &mut limit), LINES as usize - 1, "of the last's");
        let left_out = |limit: &mut Limit| limit.take_over(now + INTERVAL).map(|kind| kind.left_out);
        let missing = (1_000 - KINDS - LINES as usize + 1) as u64;
        assert_eq!([left_out(&mut limit), left_out(&mut limit)], [Some(missing); 2]);
        assert_eq!(left_out(&mut limit), None);
    }
}
