//! The connections to a shard that blocks go over.
//!
//! A client with several shards uses one or two connections to each. A shard with several clients parks some of their
//! connections. If something is lost or does not progress, the client uses all connections, except those that seem to
//! bring nothing.

use crate::transport::frames::Link;
use crate::wire::Message;

/// The usage of the connections to one shard.
#[derive(Default)]
pub(super) struct Usage {
    /// Connections that the shard has parked.
    parked: Vec<Link>,
    /// Connections whose blocks did not arrive or did not come, and that have brought nothing since.
    suspected: Vec<Link>,
}

fn is_in(list: &[Link], link: &Link) -> bool {
    list.iter().any(|known| known.is(link))
}

impl Usage {
    /// Whether `link`, one of `links`, is in use. At most `most` of them are, or all while something does not
    /// progress.
    pub(super) fn uses(&self, links: &[Link], link: &Link, most: usize, struggles: bool) -> bool {
        let sound = |link: &&Link| !is_in(&self.suspected, link);
        let awake = |link: &&Link| sound(link) && !is_in(&self.parked, link);
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

    /// The shard parks the connection.
    pub(super) fn park(&mut self, link: &Link) {
        if !is_in(&self.parked, link) {
            self.parked.push(link.clone());
        }
    }

    /// The connection has ended.
    pub(super) fn forget(&mut self, link: &Link) {
        self.parked.retain(|known| !known.is(link));
        self.suspected.retain(|known| !known.is(link));
    }

    /// The shard uses the connection again.
    pub(super) fn wake(&mut self, link: &Link) {
        self.parked.retain(|parked| !parked.is(link));
    }

    /// The connection has brought something.
    pub(super) fn trust(&mut self, link: &Link) {
        self.suspected.retain(|suspected| !suspected.is(link));
    }

    pub(super) fn len(&self) -> (usize, usize) {
        (self.parked.len(), self.suspected.len())
    }

    pub(super) fn suspect(&mut self, link: &Link) {
        if !is_in(&self.suspected, link) {
            self.suspected.push(link.clone());
            // The answer shows that the connection works.
            link.send_message(0, Message::Ping);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The connections in use, of three.
    fn used(usage: &Usage, links: &[Link], most: usize, struggles: bool) -> Vec<usize> {
        (0..links.len()).filter(|&at| usage.uses(links, &links[at], most, struggles)).collect()
    }

    #[test]
    fn as_many_as_are_wanted_and_never_none() {
        let links: Vec<Link> = (0..3).map(|_| Link::default()).collect();
        let mut usage = Usage::default();
        assert_eq!(used(&usage, &links, 2, false), [0, 1]);
        assert_eq!(used(&usage, &links, 2, true), [0, 1, 2]);
        usage.parked = vec![links[0].clone()];
        assert_eq!(used(&usage, &links, 1, false), [1]);
        assert_eq!(used(&usage, &links, 1, true), [0, 1, 2]);
        usage.parked = links.clone();
        assert_eq!(used(&usage, &links, 1, false), [0]);
        usage.suspect(&links[0]);
        usage.suspect(&links[0]);
        assert_eq!(used(&usage, &links, 1, false), [1]);
        assert_eq!(used(&usage, &links, 1, true), [1, 2]);
        usage.suspected = links.clone();
        assert_eq!(used(&usage, &links, 1, false), [0]);
        assert_eq!(used(&usage, &links, 1, true), [0, 1, 2]);
        links.iter().for_each(|link| usage.forget(link));
        assert!(usage.parked.is_empty() && usage.suspected.is_empty());
    }
}
