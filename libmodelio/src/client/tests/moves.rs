//! A client whose model moves, step by step.

use super::{Bench, L};
use crate::client::core::Action;
use crate::vocabulary::block_map::BlockMap;
use crate::vocabulary::ids::{BlockId, Epoch, PlanId, ShardId, Version};
use crate::wire::Message;

/// Three shards in place of two, another one in front.
fn new_map() -> BlockMap {
    BlockMap::from_owners(Epoch(2), [3, 2, 1, 2].map(ShardId).to_vec()).unwrap()
}

#[test]
fn pushes_under_way_are_granted_again_by_the_new_coordinator() {
    let mut bench = Bench::in_plan();
    assert_eq!(bench.pushes(0), [0, 2]);
    bench.said.clear();
    assert!(bench.core.moved(&new_map(), bench.now, &mut bench.said));
    assert_eq!((bench.core.outgoing(), bench.core.kept()), (None, (1, 1)), "what is kept stays");
    assert_eq!(bench.core.shards(), [1, 2, 3].map(ShardId));
    assert_eq!(bench.said, []);
    bench.pass(100);
    assert_eq!(bench.said, [], "nobody is connected");
    bench.core.coordinator_up(bench.now, &mut bench.said);
    let ack = Message::AckThrough { request: 0, newest: 3 };
    assert_eq!(
        bench.said[0],
        Action::ToCoordinator(0, ack),
        "whoever coordinates is told which numbers are the client's"
    );
    assert!(
        matches!(bench.said[1..], [Action::ToCoordinator(3, Message::Commit { .. })]),
        "{:?}",
        bench.said
    );
    // The coordinator says which plans are over; the old plan is of the past then, wherever word of it comes from.
    bench.coordinator(0, Message::Over { plan: PlanId(1) });
    bench.grant(1);
    assert_eq!(bench.core.outgoing(), None);
    bench.grant(2);
    assert_eq!([0, 1, 2].map(|partition| bench.pushes(partition)), [vec![2], vec![1], vec![0]]);
    bench.coordinator(3, Message::Done);
    assert_eq!(bench.core.kept(), (0, 0));
}

#[test]
fn a_version_is_pulled_from_its_beginning_once_none_of_its_blocks_is_reserved() {
    let mut bench = Bench::new();
    bench.state(2, 1, 1, false);
    assert!(bench.core.reserve(Version(1), BlockId(0)) && bench.core.reserve(Version(1), BlockId(1)));
    bench.core.end_reservation(Version(1), BlockId(1), true, bench.now, &mut bench.said);
    assert!(bench.core.moved(&new_map(), bench.now, &mut bench.said));
    assert_eq!(bench.core.pulling(), None, "block 0 is reserved");
    assert!(!bench.core.reserve(Version(1), BlockId(2)));
    bench.core.end_reservation(Version(1), BlockId(0), true, bench.now, &mut bench.said);
    assert_eq!(bench.core.pulling(), Some(Version(1)));
    for (partition, blocks) in [(0, vec![2]), (1, vec![1, 3]), (2, vec![0])] {
        let Some(Message::Pull { blocks: asked, .. }) = bench.core.next_pull(partition, 8, bench.now) else {
            panic!("partition {partition} is not asked")
        };
        assert_eq!(bench.core.asked_in(partition, &asked), blocks.len());
        for block in blocks.into_iter().map(BlockId) {
            assert!(bench.core.reserve(Version(1), block), "all are wanted again");
            bench.core.end_reservation(Version(1), block, true, bench.now, &mut bench.said);
        }
    }
    assert_eq!(bench.said.last(), Some(&Action::Pulled(Version(1))));
}

#[test]
fn a_map_that_is_not_newer_or_of_another_model_changes_nothing() {
    let mut bench = Bench::new();
    let owners = |epoch, count| BlockMap::from_owners(Epoch(epoch), vec![ShardId(9); count]).unwrap();
    for map in [owners(1, 4), owners(0, 4), owners(2, 5)] {
        assert!(!bench.core.moved(&map, bench.now, &mut bench.said));
    }
    assert_eq!(bench.core.shards(), [1, 2].map(ShardId));
    bench.ask(3, Message::Leave { learner: L, reason: crate::vocabulary::members::LeaveReason::Asked }, 1);
    assert!(matches!(bench.said[..], [Action::ToCoordinator(..)]), "the coordinator is connected as before");
}
