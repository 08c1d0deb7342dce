//! What one partition keeps of blocks, in the memory of another.

use common::initial_weights;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::reducer::{Hyper, Reducer};
use libmodelio::wire::DataKind;
use ps_backend::partition::store::{Limits, PartitionError, PartitionStore, kept_range};

use crate::common;
use crate::driver::{Source, Twin, Way, bytes_of, empty, model, partition_of};

const KEPT: [DataKind; 4] = [DataKind::Weights, DataKind::Masters, DataKind::Slot(0), DataKind::Slot(1)];

fn source(twin: &Twin, seed: usize) -> Source {
    // Not all blocks: some are carried over.
    Source {
        seed,
        way: Way::Wide,
        blocks: twin.blocks().filter(|block| !(block.0 as usize + seed).is_multiple_of(3)).collect(),
    }
}

/// Blocks of the model as one partition or another has them, brought into `to`.
fn bring(from: &PartitionStore, to: &PartitionStore) {
    let kept = from.keep().unwrap();
    for &global in to.partition().blocks() {
        let (there, here) = (from.partition().local(global).unwrap(), to.partition().local(global).unwrap());
        for what in [DataKind::Weights].into_iter().chain(to.wants(here).unwrap()) {
            assert!(matches!(to.finish_loading(), Err(PartitionError::NotLoaded(_))));
            assert!(to.load_piece(here, what, &kept.bytes(there, what).unwrap()).unwrap());
            assert!(!to.load_piece(here, what, &kept.bytes(there, what).unwrap()).unwrap());
        }
    }
    to.finish_loading().unwrap();
}

fn check_equal(a: &PartitionStore, b: &PartitionStore) {
    let (kept, other) = (a.keep().unwrap(), b.keep().unwrap());
    assert_eq!(kept.version(), other.version());
    for &global in b.partition().blocks() {
        let (here, there) = (a.partition().local(global).unwrap(), b.partition().local(global).unwrap());
        for what in KEPT {
            let equal = kept.bytes(here, what).unwrap() == other.bytes(there, what).unwrap();
            assert!(equal, "{what:?} of block {global}");
        }
    }
}

fn trained(reducer: Reducer, steps: usize) -> Twin {
    let mut twin = Twin::new(partition_of(&model(), |_| true), reducer, Hyper::default(), Limits::default());
    for step in 0..steps {
        let sources = [source(&twin, 2 * step), source(&twin, 2 * step + 1)];
        twin.reduce(&sources);
    }
    twin
}

#[test]
fn a_partition_that_has_moved_goes_on_as_if_it_had_not() {
    for (reducer, then) in [
        (Reducer::Adam, Reducer::Adam),
        (Reducer::Momentum, Reducer::Momentum),
        (Reducer::Sum, Reducer::Sum),
        // Its state begins at zero, whatever was brought.
        (Reducer::Adam, Reducer::AdamW),
        (Reducer::Sgd, Reducer::Adam),
    ] {
        let (stays, mut moves) = (&mut trained(reducer, 3), trained(reducer, 3));
        stays.change(then);
        moves.change(then);
        let there = empty(partition_of(&model(), |_| true), Reducer::Sgd);
        there.begin_at(Version(3), then).unwrap();
        bring(&moves.store, &there);
        moves.moved_to(there);
        for step in 10..14 {
            let sources = [source(stays, step), source(stays, 2 * step)];
            stays.add(&sources[..1]);
            moves.add(&sources[..1]);
            stays.reduce(&sources[1..]);
            moves.reduce(&sources[1..]);
            assert!(stays.check("stays") == moves.check("moves"), "{reducer:?}, then {then:?}, {step}");
        }
        check_equal(&stays.store, &moves.store);
    }
}

#[test]
fn blocks_are_the_same_bit_by_bit_in_whatever_partition() {
    let twin = trained(Reducer::AdamW, 3);
    for modulus in [2, 3] {
        let there = empty(partition_of(&model(), |block| block % modulus == 1), Reducer::AdamW);
        there.begin_at(Version(3), Reducer::AdamW).unwrap();
        bring(&twin.store, &there);
        check_equal(&twin.store, &there);
        assert_eq!(there.versions(), [Version(3)]);
    }
}

#[test]
fn no_plan_begins_while_kept_state_is_read() {
    let mut twin = trained(Reducer::Adam, 2);
    let kept = twin.store.keep().unwrap();
    assert!(matches!(twin.begin_reduce(1), Err(PartitionError::Busy)));
    drop(kept);
    // One that runs already may go on to its end.
    let sources = [source(&twin, 7)];
    let job = twin.begin_reduce(1).unwrap();
    let kept = twin.store.keep().unwrap();
    let before: Vec<Vec<u8>> =
        KEPT.iter().map(|&what| kept.bytes(BlockId(4), what).unwrap().to_vec()).collect();
    twin.blocks().for_each(|block| twin.finish_block(&job, block, &sources));
    twin.concludes(job, &sources);
    assert!(matches!(twin.begin_reduce(1), Err(PartitionError::Busy)));
    for (what, before) in KEPT.into_iter().zip(before) {
        assert!(kept.bytes(BlockId(4), what).unwrap() == before, "{what:?}");
    }
    drop(kept);
    let next = [source(&twin, 8)];
    twin.reduce(&next);
    twin.check("afterwards");
}

#[test]
fn pieces_that_do_not_fit_are_refused() {
    let twin = trained(Reducer::Adam, 1);
    let (layout, weights) = (&twin.layout, initial_weights(&twin.layout));
    let there = empty(partition_of(&model(), |_| true), Reducer::Adam);
    assert!(matches!(there.keep(), Err(PartitionError::Loading)));
    let first = BlockId(0);
    assert!(there.load(first, &weights[bytes_of(layout, first)]).unwrap());
    // Earlier data is void.
    there.begin_at(Version(1), Reducer::Adam).unwrap();
    assert!(matches!(there.finish_loading(), Err(PartitionError::NotLoaded(BlockId(0)))));
    let last = BlockId(layout.blocks() - 1);
    let bytes = &weights[bytes_of(layout, last)];
    let wants = there.wants(last).unwrap();
    assert_eq!(wants, [DataKind::Masters, DataKind::Slot(0), DataKind::Slot(1)]);
    let with = |what, len: usize| there.load_piece(last, what, &vec![0; len]);
    assert!(matches!(with(DataKind::Slot(0), 0), Err(PartitionError::NotLoaded(block)) if block == last));
    let short = there.load_piece(last, DataKind::Weights, &bytes[1..]);
    assert!(matches!(short, Err(PartitionError::Length { .. })));
    assert!(there.load_piece(last, DataKind::Weights, bytes).unwrap());
    for (what, len) in [(DataKind::Masters, 4), (DataKind::Slot(0), 4), (DataKind::Slot(2), 0)] {
        assert!(matches!(with(what, len), Err(PartitionError::State { .. })), "{what:?} of {len} bytes");
    }
    assert!(matches!(there.wants(BlockId(999)), Err(PartitionError::NoBlock { .. })));
    // Masters that do not come are made of the weights, and others that come later count no more.
    assert!(!there.has_loaded(last, DataKind::Masters) && with(DataKind::Masters, 0).unwrap());
    assert!(there.has_loaded(last, DataKind::Masters));
    let masters = kept_range(layout, last, DataKind::Masters);
    assert!(!with(DataKind::Masters, (masters.end - masters.start) as usize).unwrap());
    // State that the other partition did not have is zero.
    assert!(with(DataKind::Slot(1), 0).unwrap());
    assert!(matches!(twin.store.begin_at(Version(1), Reducer::Adam), Err(PartitionError::Loaded)));
}
