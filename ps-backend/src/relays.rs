//! The relays of a job: clients that pull versions from each other, so that a shard sends each block about once. Pure.
//!
//! They form a chain. Its first one pulls from the shards, and each other one from the one before it, while that still
//! receives. Relays of one zone follow each other in the chain, and so do those of one host. So a version crosses each
//! link between zones and hosts once. A relay that its follower cannot pull from goes to the end of the chain for a
//! while, where nobody needs it. No circle can form.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use libmodelio::vocabulary::ids::ClientId;
use libmodelio::wire::Message;

/// For how long nobody pulls from a relay that has failed.
const SHUNNED: Duration = Duration::from_secs(60);

/// The longest address and host, and the longest zone, in bytes.
const MAX_ADDRESS: usize = 255;
const MAX_ZONE: usize = 64;

/// One relay.
#[derive(Debug)]
struct Relay {
    address: String,
    zone: String,
    host: String,
    /// Rises with each relay that joins.
    number: u64,
    /// Nobody pulls from it until then.
    shunned: Option<Duration>,
    /// The relay that it was told to pull from, and its depth. None if it was told nothing yet.
    told: Option<(Option<String>, u32)>,
}

impl Relay {
    /// Whether `other` may pull from it.
    fn serves(&self, other: &Relay) -> bool {
        let is_loopback = self.address.parse().is_ok_and(|address: SocketAddr| address.ip().is_loopback());
        self.shunned.is_none() && (!is_loopback || self.host == other.host)
    }

    /// The relay's place in the chain, in a form that can be compared.
    fn place(&self) -> (bool, String, String, u64) {
        (self.shunned.is_some(), self.zone.clone(), self.host.clone(), self.number)
    }
}

/// A relay as a status has it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RelayPlace {
    /// Where it listens for others.
    pub address: String,
    /// The zone that its mount was given.
    pub zone: String,
    /// The relay that it pulls from. Without one, it pulls from shards.
    pub via: Option<String>,
    /// The relay has failed, and nobody pulls from it for a while.
    pub shunned: bool,
}

/// The relays of a job.
#[derive(Debug, Default)]
pub struct Relays {
    relays: BTreeMap<ClientId, Relay>,
    joined: u64,
    /// The chain may be another one than the relays were told.
    has_changed: bool,
}

impl Relays {
    /// Takes a client's message about relays. False if the message is another one.
    ///
    /// # Errors
    /// If the message cannot be true. The client's connection must end.
    pub fn takes(&mut self, client: ClientId, message: &Message, now: Duration) -> Result<bool, String> {
        match message {
            Message::Relay { address, zone, host } => {
                let longest = address.len().max(host.len());
                if longest > MAX_ADDRESS || zone.len() > MAX_ZONE || address.is_empty() {
                    return Err(format!(
                        "a relay has an address and a host of {MAX_ADDRESS} bytes at most, and a zone of {MAX_ZONE}"
                    ));
                }
                self.joined += 1;
                let (number, shunned, told) = (self.joined, None, None);
                let (address, zone, host) = (address.clone(), zone.clone(), host.clone());
                self.relays.insert(client, Relay { address, zone, host, number, shunned, told });
            }
            Message::RelayFailed { address } => self.has_failed(client, address, now),
            _ => return Ok(false),
        }
        self.has_changed = true;
        Ok(true)
    }

    /// A relay cannot pull from the one at `address`. It is answered in any case.
    fn has_failed(&mut self, client: ClientId, address: &String, now: Duration) {
        let told = self.relays.get_mut(&client).and_then(|relay| relay.told.take());
        if told.is_some_and(|(before, _)| before.as_ref() == Some(address))
            && let Some(failed) = self.relays.values_mut().find(|relay| relay.address == *address)
        {
            failed.shunned = Some(now + SHUNNED);
        }
    }

    /// Time passes, and these clients are connected. Returns what relays are told.
    pub fn tell(
        &mut self,
        is_connected: impl Fn(&ClientId) -> bool,
        now: Duration,
    ) -> Vec<(ClientId, Message)> {
        let before = self.relays.len();
        self.relays.retain(|client, _| is_connected(client));
        self.has_changed |= self.relays.len() < before;
        for relay in self.relays.values_mut() {
            self.has_changed |= relay.shunned.take_if(|until| *until <= now).is_some();
        }
        if !std::mem::take(&mut self.has_changed) {
            return Vec::new();
        }
        let mut chain: Vec<(ClientId, &mut Relay)> =
            self.relays.iter_mut().map(|(client, relay)| (*client, relay)).collect();
        chain.sort_by_cached_key(|(_, relay)| relay.place());
        let mut news = Vec::new();
        for at in 0..chain.len() {
            let (before, rest) = chain.split_at_mut(at);
            let (client, relay) = &mut rest[0];
            let before = before.last().filter(|(_, before)| before.serves(relay));
            let address = before.map(|(_, before)| before.address.clone());
            let depth = before.and_then(|(_, before)| Some(before.told.as_ref()?.1 + 1)).unwrap_or_default();
            let told = (address, depth);
            if relay.told.as_ref() != Some(&told) {
                let (address, depth) = told.clone();
                relay.told = Some(told);
                news.push((*client, Message::PullVia { address, depth }));
            }
        }
        news
    }

    /// The relays, in the order in which a version goes through them.
    pub fn chain(&self) -> Vec<RelayPlace> {
        let mut chain: Vec<&Relay> = self.relays.values().collect();
        chain.sort_by_cached_key(|relay| relay.place());
        let of = |relay: &Relay| RelayPlace {
            address: relay.address.clone(),
            zone: relay.zone.clone(),
            via: relay.told.as_ref().and_then(|(before, _)| before.clone()),
            shunned: relay.shunned.is_some(),
        };
        chain.into_iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    /// The relays of a test: client 1 is at `a:1`, and so on.
    #[derive(Default)]
    struct World {
        relays: Relays,
        connected: Vec<u64>,
        told: BTreeMap<u64, Option<String>>,
        depths: BTreeMap<u64, u32>,
    }

    impl World {
        fn joins(&mut self, client: u64, zone: &str, host: &str) {
            self.joins_at(client, format!("a:{client}"), zone, host);
        }

        fn joins_at(&mut self, client: u64, address: String, zone: &str, host: &str) {
            let message = Message::Relay { address, zone: zone.into(), host: host.into() };
            self.connected.push(client);
            assert_eq!(self.relays.takes(ClientId(client), &message, NOW), Ok(true));
            self.tells(NOW);
        }

        fn leaves(&mut self, client: u64) {
            self.connected.retain(|of| *of != client);
            self.told.remove(&client);
            self.tells(NOW);
        }

        fn fails(&mut self, of: u64, client: u64) {
            let message = Message::RelayFailed { address: format!("a:{of}") };
            assert_eq!(self.relays.takes(ClientId(client), &message, NOW), Ok(true));
            self.tells(NOW);
        }

        fn tells(&mut self, now: Duration) -> usize {
            let connected = self.connected.clone();
            let news = self.relays.tell(|client| connected.contains(&client.0), now);
            let count = news.len();
            for (client, message) in news {
                let Message::PullVia { address, depth } = message else { panic!("{message:?}") };
                self.told.insert(client.0, address);
                self.depths.insert(client.0, depth);
            }
            self.is_sound();
            count
        }

        /// Nobody has two followers, and there is no circle.
        fn is_sound(&self) {
            let from: Vec<_> = self.told.values().flatten().collect();
            assert!(from.iter().enumerate().all(|(at, one)| !from[..at].contains(one)), "{:?}", self.told);
            for (&client, address) in &self.told {
                let (mut at, mut steps) = (address.clone(), 0);
                while let Some(address) = at {
                    let next = self.told.keys().find(|of| format!("a:{of}") == address);
                    at = next.and_then(|next| self.told[next].clone());
                    steps += 1;
                    assert!(steps <= self.told.len(), "a circle: {:?}", self.told);
                }
                assert!(self.told[&client].is_none() || self.depths[&client] > 0);
            }
        }

        /// From which client each one pulls, 0 for the shards.
        fn from(&self) -> Vec<(u64, u64)> {
            let number = |address: &Option<String>| {
                address.as_ref().map_or(0, |address| address[2..].parse().unwrap())
            };
            self.told.iter().map(|(client, address)| (*client, number(address))).collect()
        }
    }

    #[test]
    fn relays_of_one_host_and_of_one_zone_are_neighbours_in_a_chain() {
        let mut world = World::default();
        world.joins(1, "x", "h");
        world.joins(2, "y", "k");
        world.joins(3, "x", "g");
        world.joins(4, "y", "i");
        world.joins(5, "x", "h");
        assert_eq!(world.from(), [(1, 3), (2, 4), (3, 0), (4, 5), (5, 1)]);
        assert_eq!(world.depths.values().copied().collect::<Vec<_>>(), [1, 4, 0, 3, 2]);
        assert_eq!(world.tells(NOW), 0, "nothing is news twice");
    }

    #[test]
    fn a_relay_that_leaves_is_replaced_by_the_one_before_it() {
        let mut world = World::default();
        (1..=4).for_each(|client| world.joins(client, "", "h"));
        assert_eq!(world.from(), [(1, 0), (2, 1), (3, 2), (4, 3)]);
        world.leaves(2);
        assert_eq!(world.from(), [(1, 0), (3, 1), (4, 3)]);
        world.leaves(1);
        assert_eq!(world.from(), [(3, 0), (4, 3)]);
        world.joins(2, "", "h");
        assert_eq!(world.from(), [(2, 4), (3, 0), (4, 3)]);
    }

    #[test]
    fn a_relay_that_fails_goes_to_the_end_of_the_chain_for_a_while() {
        let mut world = World::default();
        (1..=4).for_each(|client| world.joins(client, "", "h"));
        world.fails(2, 3);
        assert_eq!(world.from(), [(1, 0), (2, 4), (3, 1), (4, 3)]);
        // Behind it nobody pulls from a relay.
        world.fails(3, 4);
        assert_eq!(world.from(), [(1, 0), (2, 4), (3, 0), (4, 1)]);
        assert_eq!(world.tells(NOW + SHUNNED - Duration::from_millis(1)), 0);
        world.tells(NOW + SHUNNED);
        assert_eq!(world.from(), [(1, 0), (2, 1), (3, 2), (4, 3)]);
    }

    #[test]
    fn a_relay_can_complain_only_of_the_one_that_it_was_told() {
        let mut world = World::default();
        (1..=3).for_each(|client| world.joins(client, "", "h"));
        world.told.remove(&3);
        world.fails(1, 3);
        assert_eq!(world.from(), [(1, 0), (2, 1), (3, 2)], "it is answered");
        // A client that is no relay has no answer, and changes nothing.
        world.fails(1, 9);
        assert_eq!(world.from(), [(1, 0), (2, 1), (3, 2)]);
    }

    #[test]
    fn a_relay_on_loopback_serves_its_own_host_alone() {
        let mut world = World::default();
        world.joins_at(1, "127.0.0.1:1".into(), "", "g");
        world.joins_at(2, "127.0.0.1:2".into(), "", "g");
        world.joins_at(3, "10.0.0.1:3".into(), "", "h");
        let from = |client| world.told[&client].as_deref();
        assert_eq!((from(1), from(2), from(3)), (None, Some("127.0.0.1:1"), None));
    }

    #[test]
    fn a_relay_with_an_address_that_is_too_long_is_none() {
        let mut relays = Relays::default();
        for (address, zone) in [("a".repeat(256), ""), ("a:1".into(), &*"z".repeat(65)), (String::new(), "")]
        {
            let message = Message::Relay { address, zone: zone.into(), host: String::new() };
            assert!(relays.takes(ClientId(1), &message, NOW).is_err());
        }
        assert!(relays.tell(|_| true, NOW).is_empty());
    }
}
