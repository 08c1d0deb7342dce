//! TCP connections to a shard whose better path did not come about.
//!
//! The better path is tried again now and then, by one additional connection. When that has come about, one of the
//! TCP connections is closed.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::client::options::TransportChoice;
use crate::transport::frames::Link;

/// The pause before the better path is tried again. It doubles with each failed try,
const FIRST: Duration = Duration::from_secs(5);
/// up to this limit.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// How long a connection is kept open before it is closed, so that blocks on it can arrive.
const DRAIN: Duration = Duration::from_secs(1);

/// A path to a shard that is better than TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::client) enum FastPath {
    SharedMemory,
    Rdma,
}

impl FastPath {
    /// The transport choice that allows only this path.
    pub(in crate::client) fn alone(self) -> TransportChoice {
        match self {
            FastPath::SharedMemory => TransportChoice::SharedMemory,
            FastPath::Rdma => TransportChoice::Rdma,
        }
    }
}

impl std::fmt::Display for FastPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            FastPath::SharedMemory => "shared memory",
            FastPath::Rdma => "RDMA",
        })
    }
}

/// The fallbacks to one shard.
#[derive(Default)]
pub(in crate::client) struct Fallbacks {
    /// The fallbacks, by the numbers of their connections.
    taken: BTreeMap<usize, Fallback>,
    /// The newest reason in the log.
    logged: Option<String>,
    /// The number of failed tries in a row.
    tries: u32,
    /// The time of the next try.
    again: Option<Instant>,
    /// The number of the connection that tries the better path.
    trial: Option<usize>,
    /// A connection that is not needed any more, and when it is closed.
    leaving: Option<(Link, Instant)>,
}

struct Fallback {
    instead_of: FastPath,
    why: String,
    /// The connection, once it is greeted.
    link: Option<Link>,
}

/// The next thing to do.
pub(in crate::client) enum Due {
    /// Try the better path by the connection of this number.
    Try(usize),
    /// Close a connection that a better one has replaced.
    Close(Link),
    /// Do nothing before this time.
    At(Instant),
}

impl Fallbacks {
    /// Notes that a connection has to go by TCP. Returns true if the log does not have the reason yet.
    pub(in crate::client) fn take(
        &mut self,
        number: usize,
        instead_of: FastPath,
        why: &str,
        now: Instant,
    ) -> bool {
        self.taken.insert(number, Fallback { instead_of, why: why.to_owned(), link: None });
        self.again.get_or_insert(now + FIRST);
        self.logged.replace(why.to_owned()).as_deref() != Some(why)
    }

    /// Whether a connection goes by TCP for want of a better path.
    pub(in crate::client) fn is_one(&self, link: &Link) -> bool {
        self.taken.values().any(|fallback| fallback.link.as_ref().is_some_and(|known| known.is(link)))
    }

    /// Why some or all connections do not go by `fast`.
    pub(in crate::client) fn why(&self, fast: FastPath) -> Option<&str> {
        self.taken.values().find(|fallback| fallback.instead_of == fast).map(|fallback| fallback.why.as_str())
    }

    /// Whether the connection of this number only tries the better path.
    pub(in crate::client) fn is_trial(&self, number: usize) -> bool {
        self.trial == Some(number)
    }

    /// Whether a connection is trying the better path.
    pub(in crate::client) fn is_trying(&self) -> bool {
        self.trial.is_some()
    }

    /// A TCP connection was greeted.
    pub(in crate::client) fn greeted(&mut self, number: usize, link: &Link) {
        if let Some(fallback) = self.taken.get_mut(&number) {
            fallback.link = Some(link.clone());
        }
    }

    /// A connection by the better path was greeted. Returns the TCP connection that it replaces, which is parked and
    /// closed soon.
    pub(in crate::client) fn overcome(&mut self, number: usize, now: Instant) -> Option<Link> {
        self.taken.remove(&number);
        (self.logged, self.tries) = (None, 0);
        if self.trial != Some(number) {
            self.settle();
            return None;
        }
        self.trial = None;
        self.again = Some(now);
        let leaving = self.taken.values().find_map(|fallback| fallback.link.clone());
        self.leaving = leaving.clone().map(|link| (link, now + DRAIN));
        self.settle();
        leaving
    }

    /// A connection has ended. True if it only tried the better path.
    pub(in crate::client) fn ended(&mut self, number: usize, link: &Link, now: Instant) -> bool {
        let tried = self.is_trial(number);
        if tried {
            self.trial = None;
            self.tries += 1;
            self.again = Some(now + FIRST.saturating_mul(1 << self.tries.min(8)).min(MAX_PAUSE));
        }
        self.taken.remove(&number);
        if self.leaving.as_ref().is_some_and(|(leaving, _)| leaving.is(link)) {
            self.leaving = None;
        }
        self.settle();
        tried
    }

    fn settle(&mut self) {
        if self.taken.is_empty() {
            self.again = None;
        }
    }

    /// The next thing to do, or when to ask again. `free` is the number of the next connection.
    pub(in crate::client) fn due(&mut self, now: Instant, free: usize) -> Option<Due> {
        if let Some((link, at)) = &self.leaving {
            return Some(if *at <= now { Due::Close(link.clone()) } else { Due::At(*at) });
        }
        if self.trial.is_some() || self.taken.values().all(|fallback| fallback.link.is_none()) {
            return None;
        }
        let again = self.again?;
        if again > now {
            return Some(Due::At(again));
        }
        self.trial = Some(free);
        Some(Due::Try(free))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tried(fallbacks: &mut Fallbacks, now: Instant, free: usize) -> bool {
        matches!(fallbacks.due(now, free), Some(Due::Try(number)) if number == free)
    }

    #[test]
    fn the_better_way_is_tried_again_ever_less_often() {
        let (mut fallbacks, mut now) = (Fallbacks::default(), Instant::now());
        assert!(fallbacks.due(now, 0).is_none());
        assert!(fallbacks.take(0, FastPath::Rdma, "no room", now));
        assert!(!fallbacks.take(1, FastPath::Rdma, "no room", now), "it was logged twice");
        assert_eq!(
            (fallbacks.why(FastPath::Rdma), fallbacks.why(FastPath::SharedMemory)),
            (Some("no room"), None)
        );
        // The first connection must be there before anything is tried.
        assert!(fallbacks.due(now + MAX_PAUSE, 2).is_none());
        let links = [(); 2].map(|()| Link::default());
        (0..2).for_each(|number| fallbacks.greeted(number, &links[number]));
        let mut pauses = Vec::new();
        for _ in 0..6 {
            let Some(Due::At(at)) = fallbacks.due(now, 2) else { panic!("it is not tried again") };
            pauses.push((at - now).as_secs());
            now = at;
            assert!(tried(&mut fallbacks, now, 2) && fallbacks.is_trial(2));
            assert!(fallbacks.due(now, 3).is_none(), "it is tried twice at once");
            assert!(fallbacks.ended(2, &Link::default(), now), "it was a trial");
        }
        assert_eq!(pauses, [5, 10, 20, 40, 60, 60]);
    }

    #[test]
    fn each_that_comes_about_takes_the_place_of_one() {
        let (mut fallbacks, mut now) = (Fallbacks::default(), Instant::now());
        let links = [(); 2].map(|()| Link::default());
        for (number, link) in links.iter().enumerate() {
            fallbacks.take(number, FastPath::Rdma, "the link is down", now);
            fallbacks.greeted(number, link);
        }
        now += FIRST;
        assert!(tried(&mut fallbacks, now, 2));
        let leaving = fallbacks.overcome(2, now).expect("one makes room");
        assert!(leaving.is(&links[0]));
        // Blocks on the old connection arrive first.
        assert!(matches!(fallbacks.due(now, 3), Some(Due::At(at)) if at == now + DRAIN));
        now += DRAIN;
        assert!(matches!(fallbacks.due(now, 3), Some(Due::Close(link)) if link.is(&links[0])));
        assert!(fallbacks.is_one(&links[1]) && !fallbacks.is_one(&Link::default()) && !fallbacks.is_trying());
        assert!(!fallbacks.ended(0, &links[0], now));
        // The other connection's turn comes at once.
        assert!(fallbacks.why(FastPath::Rdma).is_some() && tried(&mut fallbacks, now, 0));
        assert!(fallbacks.overcome(0, now).expect("one makes room").is(&links[1]));
        assert!(!fallbacks.ended(1, &links[1], now));
        assert!(fallbacks.why(FastPath::Rdma).is_none() && fallbacks.due(now + MAX_PAUSE, 1).is_none());
        assert!(fallbacks.take(1, FastPath::Rdma, "the link is down", now), "it is news again");
    }

    #[test]
    fn one_that_ends_by_itself_makes_room_for_the_better_way() {
        let (mut fallbacks, now) = (Fallbacks::default(), Instant::now());
        let link = Link::default();
        fallbacks.take(0, FastPath::SharedMemory, "nobody answers", now);
        fallbacks.greeted(0, &link);
        assert!(tried(&mut fallbacks, now + FIRST, 1));
        assert!(!fallbacks.ended(0, &link, now + FIRST), "it was in use");
        assert!(fallbacks.overcome(1, now + FIRST).is_none() && !fallbacks.is_trial(1));
        assert!(fallbacks.due(now + MAX_PAUSE, 2).is_none());
        // The connection with the earlier fallback's number goes by the better path now.
        fallbacks.take(0, FastPath::SharedMemory, "nobody answers", now);
        assert!(fallbacks.overcome(0, now).is_none());
        assert!(
            fallbacks.why(FastPath::SharedMemory).is_none() && fallbacks.due(now + MAX_PAUSE, 2).is_none()
        );
    }
}
