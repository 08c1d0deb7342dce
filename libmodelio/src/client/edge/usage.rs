//! Which of the connections to a shard blocks go over. A client with several shards has enough with one or two to each,
//! and a shard with several clients says which are to rest; when something is lost, or does not get on, all are used
//! but those over which nothing seems to come through.

use super::{Inner, Shared, Way};
use crate::client::core::Part;
use crate::transport::frames::Link;
use crate::wire::Message;

/// What is known of the connections to one shard.
#[derive(Default)]
pub(super) struct Usage {
    /// The shard wants these to be used only if need be.
    resting: Vec<Link>,
    /// What was sent over these did not arrive, or nothing came, and nothing has come since.
    doubted: Vec<Link>,
}

fn is_in(list: &[Link], link: &Link) -> bool {
    list.iter().any(|known| known.is(link))
}

impl Usage {
    /// Whether `link`, of `links`, is used: one of `most`, or of all where something does not get on.
    fn uses(&self, links: &[Link], link: &Link, most: usize, struggles: bool) -> bool {
        let sound = |link: &&Link| !is_in(&self.doubted, link);
        let awake = |link: &&Link| sound(link) && !is_in(&self.resting, link);
        let most = if struggles { links.len() } else { most };
        let among = |used: &mut dyn Iterator<Item = &Link>| used.take(most).any(|used| used.is(link));
        if !struggles && links.iter().any(|link| awake(&link)) {
            among(&mut links.iter().filter(awake))
        } else if links.iter().any(|link| sound(&link)) {
            among(&mut links.iter().filter(sound))
        } else {
            among(&mut links.iter())
        }
    }

    /// It is to be used only if need be.
    pub(super) fn rest(&mut self, link: &Link) {
        if !is_in(&self.resting, link) {
            self.resting.push(link.clone());
        }
    }

    /// It is over.
    pub(super) fn forget(&mut self, link: &Link) {
        self.resting.retain(|known| !known.is(link));
        self.doubted.retain(|known| !known.is(link));
    }
}

impl Inner {
    /// Whether blocks go over this connection now, of a client with so many threads.
    pub(super) fn uses(&self, part: Part, link: &Link, threads: usize) -> bool {
        let most = threads.div_ceil(self.parts.len()).max(1);
        let peer = &self.parts[part];
        peer.usage.uses(&peer.links, link, most, self.core.struggles(part))
    }
}

impl Shared {
    /// The shard wants a connection to be used only if need be, or as the others.
    pub(in crate::client) fn rest(&self, way: &Way, part: Part, link: &Link, rests: bool) {
        self.change_usage(way, part, |usage, _| match rests {
            true => usage.rest(link),
            false => usage.resting.retain(|resting| !resting.is(link)),
        });
    }

    /// What was sent did not arrive, as the shard has said over `link`: so that one is sound, and the others show that
    /// they are.
    pub(in crate::client) fn doubt_others(&self, way: &Way, part: Part, link: &Link) {
        self.change_usage(way, part, |usage, links| {
            links.iter().filter(|other| !other.is(link)).for_each(|other| usage.doubt(other));
        });
    }

    /// Nothing came over it that was asked for.
    pub(in crate::client) fn doubt(&self, way: &Way, part: Part, link: &Link) {
        self.change_usage(way, part, |usage, _| usage.doubt(link));
    }

    /// Something has come over it.
    pub(in crate::client) fn trust(&self, way: &Way, part: Part, link: &Link) {
        self.change_usage(way, part, |usage, _| usage.doubted.retain(|doubted| !doubted.is(link)));
    }

    /// If that changes something, all of them are asked again.
    fn change_usage(&self, way: &Way, part: Part, change: impl FnOnce(&mut Usage, &[Link])) {
        let mut inner = self.inner.lock();
        if !inner.is_in_force(way) {
            return;
        }
        let peer = &mut inner.parts[part];
        let before = peer.usage.len();
        change(&mut peer.usage, &peer.links);
        if peer.usage.len() != before {
            peer.links.iter().for_each(Link::wake);
        }
    }
}

impl Usage {
    fn len(&self) -> (usize, usize) {
        (self.resting.len(), self.doubted.len())
    }

    fn doubt(&mut self, link: &Link) {
        if !is_in(&self.doubted, link) {
            self.doubted.push(link.clone());
            // The answer shows that it is sound.
            link.say(0, Message::Ping);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which of three connections are used.
    fn used(usage: &Usage, links: &[Link], most: usize, struggles: bool) -> Vec<usize> {
        (0..links.len()).filter(|&at| usage.uses(links, &links[at], most, struggles)).collect()
    }

    #[test]
    fn as_many_as_are_wanted_and_never_none() {
        let links: Vec<Link> = (0..3).map(|_| Link::default()).collect();
        let mut usage = Usage::default();
        assert_eq!(used(&usage, &links, 2, false), [0, 1]);
        assert_eq!(used(&usage, &links, 2, true), [0, 1, 2]);
        usage.resting = vec![links[0].clone()];
        assert_eq!(used(&usage, &links, 1, false), [1]);
        assert_eq!(used(&usage, &links, 1, true), [0, 1, 2]);
        usage.resting = links.clone();
        assert_eq!(used(&usage, &links, 1, false), [0]);
        usage.doubt(&links[0]);
        usage.doubt(&links[0]);
        assert_eq!(used(&usage, &links, 1, false), [1]);
        assert_eq!(used(&usage, &links, 1, true), [1, 2]);
        usage.doubted = links.clone();
        assert_eq!(used(&usage, &links, 1, false), [0]);
        assert_eq!(used(&usage, &links, 1, true), [0, 1, 2]);
        links.iter().for_each(|link| usage.forget(link));
        assert!(usage.resting.is_empty() && usage.doubted.is_empty());
    }
}
