//! Which of the connections to a shard blocks go over. A client with several shards has enough with one or two to each,
//! and a shard with several clients says which are to rest; when something is lost, or does not get on, all are used
//! but those over which nothing seems to come through.

use crate::transport::frames::Link;
use crate::wire::Message;

/// What is known of the connections to one shard.
#[derive(Default)]
pub(super) struct Usage {
    /// The shard wants these to be used only if need be.
    parked: Vec<Link>,
    /// What was sent over these did not arrive, or nothing came, and nothing has come since.
    suspected: Vec<Link>,
}

fn is_in(list: &[Link], link: &Link) -> bool {
    list.iter().any(|known| known.is(link))
}

impl Usage {
    /// Whether `link`, of `links`, is used: one of `most`, or of all where something does not get on.
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

    /// It is to be used only if need be.
    pub(super) fn park(&mut self, link: &Link) {
        if !is_in(&self.parked, link) {
            self.parked.push(link.clone());
        }
    }

    /// It is over.
    pub(super) fn forget(&mut self, link: &Link) {
        self.parked.retain(|known| !known.is(link));
        self.suspected.retain(|known| !known.is(link));
    }

    /// It may be used as the others.
    pub(super) fn wake(&mut self, link: &Link) {
        self.parked.retain(|parked| !parked.is(link));
    }

    /// Something has come over it.
    pub(super) fn trust(&mut self, link: &Link) {
        self.suspected.retain(|suspected| !suspected.is(link));
    }

    pub(super) fn len(&self) -> (usize, usize) {
        (self.parked.len(), self.suspected.len())
    }

    pub(super) fn suspect(&mut self, link: &Link) {
        if !is_in(&self.suspected, link) {
            self.suspected.push(link.clone());
            // The answer shows that it is sound.
            link.send_message(0, Message::Ping);
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
