//! The text of the status, which is made for a few requests a second alone: it costs a shard more than other answers do.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The time in which at most [`MOST`] texts are made.
const WINDOW: Duration = Duration::from_secs(1);
/// The most texts that are made in [`WINDOW`]. Later requests get the newest one.
const MOST: u32 = 32;

/// The newest text.
#[derive(Default)]
pub(super) struct StatusText(Mutex<Recent>);

#[derive(Default)]
struct Recent {
    text: Arc<str>,
    since: Option<Instant>,
    made: u32,
}

impl StatusText {
    /// A text that `make` makes now, or one of the last [`WINDOW`] if enough were made in it.
    pub(super) fn text(&self, now: Instant, make: impl FnOnce() -> String) -> Arc<str> {
        let mut recent = self.0.lock();
        if recent.since.is_none_or(|since| now.saturating_duration_since(since) >= WINDOW) {
            (recent.since, recent.made) = (Some(now), 0);
        }
        if recent.made < MOST {
            recent.made += 1;
            recent.text = make().into();
        }
        Arc::clone(&recent.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crowd_that_asks_for_the_status_gets_one_of_the_last_second() {
        let (status, begun, mut made) = (StatusText::default(), Instant::now(), 0);
        let mut ask = |after: Duration| {
            let text = status.text(begun + after, || {
                made += 1;
                made.to_string()
            });
            text.parse::<u32>().unwrap()
        };
        for asked in 1..=MOST {
            assert_eq!(ask(Duration::ZERO), asked, "each of a few gets its own");
        }
        assert_eq!((ask(Duration::ZERO), ask(WINDOW / 2)), (MOST, MOST));
        assert_eq!(ask(WINDOW), MOST + 1);
    }
}
