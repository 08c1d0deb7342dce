//! Limits on the connections of one address, so that one stranger leaves places for others.
//!
//! Whoever has not greeted is hung up when too many others come: a peer greets at once. Whoever has greeted is served,
//! and others are refused.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use libmodelio::transport::frames::Link;
use libmodelio::transport::stream::Close;
use libmodelio::wire::{Refusal, Role};
use parking_lot::Mutex;

/// The most connections of one address that have not greeted.
const MAX_STRANGE: usize = 64;
/// The most of all addresses.
const MAX_ALL_STRANGE: usize = 1024;
/// The most connections of one address that have greeted: of its mounts, of coordinators there, and of all others.
const MAX_GREETED: usize = 512;
/// The same when half of the process's places are taken.
const MAX_WHEN_FULL: usize = 256;

/// What counts as one address: an IPv4 address, or the /64 network of an IPv6 address, which one host may have whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Origin(IpAddr);

impl Origin {
    pub(super) fn of(address: IpAddr) -> Origin {
        Origin(match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = u128::from(address) >> 64 << 64;
                Ipv6Addr::from(network).into()
            }
            address => address,
        })
    }

    /// The address, or the first of the network.
    pub(super) fn address(self) -> IpAddr {
        self.0
    }
}

/// The connections of a process, by address.
pub(super) struct Origins {
    /// The connections that the process can have.
    places: usize,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// Those that have not greeted, the oldest first.
    strange: VecDeque<(Origin, Link)>,
    greeted: BTreeMap<(Origin, Role), usize>,
    all: usize,
}

/// The place of a connection that has greeted.
pub(super) struct OriginPlace {
    of: Arc<Origins>,
    counts_as: (Origin, Role),
}

impl Origins {
    pub(super) fn new(places: usize) -> Arc<Origins> {
        Arc::new(Origins { places, inner: Mutex::default() })
    }

    /// A connection is open, and will greet. If there are too many, the one that has been silent for longest ends.
    pub(super) fn opened(&self, origin: Origin, link: &Link) {
        let mut inner = self.inner.lock();
        let strange = &mut inner.strange;
        let count = strange.iter().filter(|(of, _)| *of == origin).count();
        let surplus = match (count >= MAX_STRANGE, strange.len() >= MAX_ALL_STRANGE) {
            (true, _) => strange.iter().position(|(of, _)| *of == origin),
            (false, true) => Some(0),
            (false, false) => None,
        };
        let surplus = surplus.and_then(|at| strange.remove(at));
        strange.push_back((origin, link.clone()));
        drop(inner);
        if let Some((_, link)) = surplus {
            link.close(Close::Asked("more connections than may wait for their greeting".into()));
        }
    }

    /// A connection has greeted. Mounts take no places of coordinators, nor of those that bring a shard's announcements
    /// and an operator's commands: all of them may be on one host.
    ///
    /// # Errors
    /// When there are too many of its address.
    pub(super) fn greeted(
        self: &Arc<Origins>,
        origin: Origin,
        role: Role,
        link: &Link,
    ) -> Result<OriginPlace, Refusal> {
        let counts_as = (origin, if role == Role::Control { Role::Data } else { role });
        let mut inner = self.inner.lock();
        inner.strange.retain(|(_, other)| !other.is(link));
        let most = if inner.all >= self.places / 2 { MAX_WHEN_FULL } else { MAX_GREETED };
        let count = inner.greeted.entry(counts_as).or_default();
        if *count >= most {
            return Err(Refusal::other(format!("this address has {most} connections already, the limit")));
        }
        *count += 1;
        inner.all += 1;
        Ok(OriginPlace { of: Arc::clone(self), counts_as })
    }

    /// A connection has ended without a greeting.
    pub(super) fn ended(&self, link: &Link) {
        self.inner.lock().strange.retain(|(_, other)| !other.is(link));
    }
}

impl Drop for OriginPlace {
    fn drop(&mut self) {
        let mut inner = self.of.inner.lock();
        inner.all -= 1;
        let left = inner.greeted.get_mut(&self.counts_as).map_or(0, |count| {
            *count -= 1;
            *count
        });
        if left == 0 {
            inner.greeted.remove(&self.counts_as);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(text: &str) -> Origin {
        Origin::of(text.parse().unwrap())
    }

    #[test]
    fn an_address_is_a_host_as_far_as_can_be_told() {
        assert_eq!(origin("10.0.0.1"), origin("::ffff:10.0.0.1"));
        assert_ne!(origin("10.0.0.1"), origin("10.0.0.2"));
        assert_eq!(origin("2001:db8::1"), origin("2001:db8::ffff:1"));
        assert_ne!(origin("2001:db8::1"), origin("2001:db8:0:1::1"));
    }

    #[test]
    fn the_oldest_silent_connection_of_an_address_gives_way() {
        let origins = Origins::new(4096);
        let (crowd, other) = (origin("10.0.0.1"), origin("10.0.0.2"));
        let links: Vec<Link> = std::iter::repeat_with(Link::default).take(MAX_STRANGE + 1).collect();
        let early = Link::default();
        origins.opened(other, &early);
        links.iter().for_each(|link| origins.opened(crowd, link));
        let knows = |link: &Link| origins.inner.lock().strange.iter().any(|(_, other)| other.is(link));
        assert!(knows(&early) && !knows(&links[0]) && links[1..].iter().all(knows));
        let _place = origins.greeted(crowd, Role::Data, &links[1]).unwrap();
        assert!(!knows(&links[1]));
        origins.ended(&links[2]);
        assert!(!knows(&links[2]) && knows(&links[3]));
        // Of many addresses.
        for number in 0..2 * MAX_ALL_STRANGE as u32 {
            origins.opened(Origin(IpAddr::V4(number.into())), &Link::default());
        }
        assert!(!knows(&early));
        assert_eq!(origins.inner.lock().strange.len(), MAX_ALL_STRANGE);
    }

    #[test]
    fn the_mounts_of_a_host_lock_out_neither_its_coordinator_nor_its_operator() {
        let origins = Origins::new(16 * MAX_GREETED);
        let come = |role| origins.greeted(origin("127.0.0.1"), role, &Link::default());
        let mounts: Vec<OriginPlace> = (0..MAX_GREETED)
            .map(|number| come(if number % 3 == 0 { Role::Control } else { Role::Data }).unwrap())
            .collect();
        assert!(come(Role::Control).is_err() && come(Role::Data).is_err());
        let operators: Vec<OriginPlace> = (0..MAX_GREETED).map(|_| come(Role::Admin).unwrap()).collect();
        assert!(come(Role::Admin).is_err());
        let coordinator = come(Role::Coordinator).unwrap();
        assert_eq!(origins.inner.lock().all, 2 * MAX_GREETED + 1);
        drop((mounts, operators, coordinator));
        assert!(origins.inner.lock().greeted.is_empty());
    }

    #[test]
    fn an_address_leaves_places_for_others() {
        let origins = Origins::new(2 * MAX_GREETED + 100);
        let come = |origin| origins.greeted(origin, Role::Data, &Link::default());
        let crowd = origin("10.0.0.1");
        let mut places: Vec<OriginPlace> = (0..MAX_GREETED).map(|_| come(crowd).unwrap()).collect();
        assert!(come(crowd).is_err());
        let others: Vec<OriginPlace> =
            (0..MAX_WHEN_FULL).map(|_| come(origin("10.0.0.2")).unwrap()).collect();
        assert!(come(origin("10.0.0.2")).is_err(), "half of the places are taken");
        places.pop();
        assert!(come(crowd).is_err(), "it has more than its share now");
        drop(others);
        drop(come(crowd).unwrap());
        drop(places);
        assert!(origins.inner.lock().greeted.is_empty());
    }
}
