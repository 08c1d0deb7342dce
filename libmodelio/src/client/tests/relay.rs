//! Pulling from a relay.

use super::*;
use crate::vocabulary::controls::PullPolicy;

const V: Version = Version(1);

fn offer() -> Message {
    Message::Relay { address: "a:9".into(), zone: String::new(), host: "h".into() }
}

fn failed() -> Action {
    Action::ToCoordinator(0, Message::RelayFailed { address: "r:1".into() })
}

impl Bench {
    /// A client of twelve blocks that pulls by relays as the coordinator says, or by the one at this address.
    fn by_relays(offer: Option<Message>, address: Option<&str>) -> Bench {
        let mut bench = Bench::of(12);
        let map = BlockMap::striped(12, &[ShardId(1), ShardId(2)]).unwrap();
        let core = std::mem::replace(&mut bench.core, ClientCore::new(&map));
        bench.core = core.by_relays(offer, address.map(str::to_owned)).pulls(PullPolicy::Eager);
        bench
    }

    /// The relay at `r:1`, behind this many others, is connected, and version 1 is pulled from it.
    fn of_relay(depth: u32) -> Bench {
        let mut bench = Bench::by_relays(Some(offer()), None);
        bench.coordinator(0, Message::PullVia { address: Some("r:1".into()), depth });
        bench.core.relay_up();
        bench.state(2, 1, 0, false);
        bench.said.clear();
        bench
    }

    fn asks_relay(&mut self, window: usize) -> Option<std::ops::Range<u32>> {
        match self.core.next_of_relay(window, self.now)? {
            Message::Pull { version: V, blocks, .. } => Some(blocks),
            other => panic!("{other:?}"),
        }
    }

    fn asks_shards(&mut self) -> Vec<u32> {
        let mut asked = Vec::new();
        for partition in 0..2 {
            while let Some(Message::Pull { blocks, .. }) = self.core.next_pull(partition, 100, self.now) {
                asked.extend(blocks.filter(|block| *block as usize % 2 == partition));
            }
        }
        asked.sort_unstable();
        asked
    }

    fn relays(&mut self, block: u32) {
        assert!(self.core.reserve(V, BlockId(block)));
        self.core.end_reservation(V, BlockId(block), true, self.now, &mut self.said);
    }
}

#[test]
fn a_version_is_asked_of_the_relay_and_of_no_shard() {
    let mut bench = Bench::of_relay(1);
    assert_eq!(bench.core.pulling(), Some(V));
    assert_eq!(bench.asks_shards(), [0; 0]);
    assert_eq!(
        (bench.asks_relay(6), bench.asks_relay(6), bench.asks_relay(6)),
        (Some(0..4), Some(4..6), None)
    );
    (0..6).for_each(|block| bench.relays(block));
    assert_eq!(
        (bench.asks_relay(99), bench.asks_relay(99), bench.asks_relay(99)),
        (Some(6..10), Some(10..12), None)
    );
    (6..11).for_each(|block| bench.relays(block));
    assert!(!bench.said.contains(&Action::Pulled(V)), "a block is missing");
    bench.relays(11);
    assert!(bench.said.contains(&Action::Pulled(V)), "{:?}", bench.said);
    assert_eq!(bench.core.replaced_relay(), 0);
}

#[test]
fn the_rest_of_a_version_comes_from_the_shards_when_the_relay_is_gone() {
    let mut bench = Bench::of_relay(1);
    bench.asks_relay(6);
    bench.relays(1);
    bench.said.clear();
    bench.core.relay_down(bench.now, &mut bench.said);
    assert_eq!(bench.said, [Action::Wake(0), Action::Wake(1), failed(), Action::Relay]);
    assert_eq!(bench.core.relay_address(), None, "until the coordinator names another one");
    assert_eq!(bench.asks_shards(), [0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
    assert_eq!(bench.core.replaced_relay(), 11);
    // What still comes from the relay counts once.
    bench.relays(0);
    assert!(!bench.core.reserve(V, BlockId(0)));
}

#[test]
fn a_silent_relay_is_left_and_the_sooner_the_fewer_relays_are_before_it() {
    for (depth, patience) in [(1, 1250), (3, 1750), (100, 3000), (u32::MAX, 3000)] {
        let mut bench = Bench::of_relay(depth);
        bench.asks_relay(6);
        bench.pass(900);
        bench.relays(0);
        bench.pass(patience - 1);
        assert!(!bench.said.contains(&failed()), "{depth}");
        assert_eq!(bench.core.next_deadline(), Some(bench.now + Duration::from_millis(1)));
        bench.pass(1);
        assert!(bench.said.contains(&failed()), "{depth}");
        assert_eq!(bench.asks_shards().len(), 11);
    }
}

#[test]
fn a_relay_is_not_blamed_where_this_client_has_no_buffer() {
    let mut bench = Bench::of_relay(1);
    bench.core.set_no_buffer(true);
    bench.pass(10_000);
    assert!(!bench.said.contains(&failed()));
    bench.core.set_no_buffer(false);
    bench.pass(1000);
    assert_eq!(bench.asks_relay(4), Some(0..4));
}

#[test]
fn a_relay_that_is_behind_is_left_for_one_version() {
    let mut bench = Bench::of_relay(1);
    bench.asks_relay(6);
    let refused =
        |wanted| Message::Refused(Refusal::NoVersion { wanted: Version(wanted), newest: Version(0) });
    bench.core.from_relay(&refused(7), bench.now, &mut bench.said);
    assert_eq!(bench.asks_shards(), [0; 0], "another version was meant");
    bench.core.from_relay(&refused(1), bench.now, &mut bench.said);
    assert_eq!(bench.asks_shards().len(), 12);
    assert!(!bench.said.contains(&failed()));
    assert!(bench.core.relay_address().is_some());
}

#[test]
fn another_relay_takes_the_place_of_one_for_the_next_version() {
    let mut bench = Bench::of_relay(1);
    bench.asks_relay(6);
    bench.coordinator(0, Message::PullVia { address: Some("r:1".into()), depth: 2 });
    assert_eq!(bench.asks_shards(), [0; 0], "it is the same one");
    bench.coordinator(0, Message::PullVia { address: Some("r:2".into()), depth: 2 });
    assert_eq!(bench.core.relay_address().map(|address| &**address), Some("r:2"));
    assert!(bench.said.contains(&Action::Relay) && !bench.said.contains(&failed()));
    assert_eq!(bench.asks_shards().len(), 12);
}

#[test]
fn the_coordinator_is_told_of_a_relay_with_each_connection_and_names_none_to_others() {
    let mut bench = Bench::by_relays(Some(offer()), None);
    bench.core.coordinator_down(bench.now, &mut bench.said);
    bench.core.coordinator_up(bench.now, &mut bench.said);
    assert!(bench.said.contains(&Action::ToCoordinator(0, offer())));
    for address in [None, Some("r:1")] {
        let mut bench = Bench::by_relays(None, address);
        bench.core.coordinator_up(bench.now, &mut bench.said);
        bench.coordinator(0, Message::PullVia { address: Some("r:9".into()), depth: 1 });
        assert_eq!(bench.core.relay_address().map(|address| &**address), address);
        assert!(
            !bench.said.iter().any(|said| matches!(said, Action::ToCoordinator(_, Message::Relay { .. })))
        );
    }
}

#[test]
fn a_relay_that_was_named_by_hand_is_tried_again() {
    let mut bench = Bench::by_relays(None, Some("r:1"));
    bench.core.relay_up();
    bench.state(2, 1, 0, false);
    assert_eq!(bench.asks_relay(9), Some(0..4));
    bench.core.relay_down(bench.now, &mut bench.said);
    assert_eq!(bench.asks_shards().len(), 12);
    assert!(bench.core.relay_address().is_some() && !bench.said.contains(&failed()));
}

#[test]
fn a_version_that_a_follower_wants_is_pulled_on_its_behalf() {
    let mut bench = Bench::by_relays(Some(offer()), None);
    let map = BlockMap::striped(12, &[ShardId(1), ShardId(2)]).unwrap();
    bench.core = std::mem::replace(&mut bench.core, ClientCore::new(&map)).pulls(PullPolicy::OnDemand);
    bench.state(2, 1, 0, false);
    assert_eq!(bench.core.pulling(), None);
    bench.core.follower_wants(Version(u64::MAX), bench.now, &mut bench.said);
    assert_eq!(bench.core.pulling(), Some(V), "and none of which the coordinator has not said anything");
    assert!(!bench.core.has_pulled(V, BlockId(0)) && bench.core.has_pulled_none());
    bench.asks_shards();
    bench.relays(0);
    assert!(bench.core.has_pulled(V, BlockId(0)) && !bench.core.has_pulled(Version(2), BlockId(0)));
    assert!(!bench.core.has_pulled(V, BlockId(1)) && !bench.core.has_pulled(V, BlockId(99)));
}
