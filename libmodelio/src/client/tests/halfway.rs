//! Pulls that fail amid a version: what is shown stays whole, and the half that has come is never shown.

use super::*;

/// A client that shows version 0, and has received this many of version 1's blocks.
fn received(blocks: u32) -> Bench {
    let mut bench = Bench::new();
    bench.state(2, 1, 0, false);
    assert_eq!(bench.core.pulling(), Some(Version(1)));
    for partition in 0..2 {
        while bench.core.next_pull(partition, 8, bench.now).is_some() {}
    }
    receives(&mut bench, Version(1), 0..blocks);
    bench.said.clear();
    bench
}

fn receives(bench: &mut Bench, version: Version, blocks: std::ops::Range<u32>) {
    for block in blocks.map(BlockId) {
        assert!(bench.core.reserve(version, block), "{block:?}");
        bench.core.end_reservation(version, block, true, bench.now, &mut bench.said);
    }
}

fn has_pulled(bench: &Bench) -> bool {
    bench.said.iter().any(|action| matches!(action, Action::Pulled(_)))
}

#[test]
fn half_a_version_is_not_shown_while_its_shard_is_away_and_its_rest_completes_it() {
    for come in 0..4 {
        let mut bench = received(come);
        bench.core.shard_down(1);
        bench.core.check_partition(1, bench.now, &mut bench.said);
        bench.pass(60_000);
        assert!(!has_pulled(&bench), "{come} blocks");
        assert_eq!((bench.core.version(), bench.core.offered_version()), (Version(0), Version(0)));
        // A block that was being received is lost with its connection.
        assert!(bench.core.reserve(Version(1), BlockId(come)));
        bench.core.end_reservation(Version(1), BlockId(come), false, bench.now, &mut bench.said);
        assert!(!has_pulled(&bench));
        bench.core.shard_up(1, bench.now, &mut bench.said);
        receives(&mut bench, Version(1), come..4);
        assert_eq!(bench.said.last(), Some(&Action::Pulled(Version(1))));
    }
}

#[test]
fn half_a_version_is_never_shown_if_its_shard_has_a_newer_one() {
    for come in 0..4 {
        let mut bench = received(come);
        let newer = Refusal::NoVersion { wanted: Version(1), newest: Version(2) };
        bench.core.from_shard(1, Message::Refused(newer), bench.now, &mut bench.said);
        assert_eq!(bench.core.pulling(), Some(Version(1)), "the state has what belongs to the newer one");
        bench.changes(|state| state.version = Version(2));
        assert_eq!(bench.core.pulling(), Some(Version(2)), "{come} blocks");
        // Blocks of the first one that come late are not wanted.
        (0..4).map(BlockId).for_each(|block| assert!(!bench.core.reserve(Version(1), block)));
        receives(&mut bench, Version(2), 0..3);
        assert!(!has_pulled(&bench));
        assert_eq!(bench.core.version(), Version(0));
        receives(&mut bench, Version(2), 3..4);
        assert_eq!(bench.said.last(), Some(&Action::Pulled(Version(2))));
    }
}
