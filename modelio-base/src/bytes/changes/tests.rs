//! Tests of changes and patches.

use proptest::prelude::*;

use super::*;

/// A block, and a version of it in which these bytes are others.
fn versions(len: usize, at: &[usize]) -> [Vec<u8>; 2] {
    let old: Vec<u8> = (0..len).map(|i| (i * 7 + i / 256) as u8).collect();
    let mut new = old.clone();
    at.iter().for_each(|&at| new[at % len] ^= 0x55);
    [old, new]
}

fn patch(changed: &Changed, new: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    changed.patch(new, &mut out).then_some(out)
}

#[test]
fn the_patch_has_the_shortest_form() {
    let len = 256 << 10;
    let every = |step: usize, bytes: usize| -> Vec<usize> {
        (0..len).step_by(step).flat_map(|at| at..at + bytes).collect()
    };
    // Changed bytes, the unit, and how long the patch is.
    let cases: [(&str, Vec<usize>, usize, Option<usize>); 7] = [
        ("nothing", vec![], 2, Some(HEAD)),
        ("one element", vec![4097], 2, Some(HEAD + 2 + 2)),
        ("1% of bf16: a byte and a value each", every(200, 1), 2, Some(HEAD + 1311 * 3)),
        ("a third of bf16: a bit each, and values", every(6, 1), 2, Some(HEAD + (128 << 10) / 8 + 43691 * 2)),
        ("full lines", every(1024, 64), 2, Some(HEAD + 512 + 256 * 64)),
        ("fp32", every(400, 2), 4, Some(HEAD + 656 * 5)),
        ("all", every(1, 1), 2, None),
    ];
    for (name, at, unit, expected) in cases {
        let [old, new] = versions(len, &at);
        let changed = Changed::between(&old, &new, unit);
        assert_eq!(patch(&changed, &new).map(|patch| patch.len()), expected, "{name}");
    }
}

#[test]
fn a_dense_sample_makes_the_block_whole_and_a_sparse_end_does_not() {
    let [old, mut new] = versions(64 << 10, &(0..64 << 10).collect::<Vec<_>>());
    assert_eq!(Changed::between(&old, &new, 4), Changed::Whole);
    new[1024..].copy_from_slice(&old[1024..]);
    assert!(matches!(Changed::between(&old, &new, 4), Changed::Some(_)));
}

#[test]
fn a_patch_that_lies_is_refused() {
    let [old, new] = versions(1000, &[5, 700]);
    let good = patch(&Changed::between(&old, &new, 1), &new).unwrap();
    let apply = |patch: &[u8], len: usize| Changed::apply(patch, &mut vec![0; len]);
    assert!(apply(&good, 1000).is_ok());
    assert_eq!(apply(&good, 500), Err(PatchError::Beyond));
    assert_eq!(apply(&good[..good.len() - 1], 1000), Err(PatchError::Length));
    assert_eq!(apply(&[&good[..], &[0]].concat(), 1000), Err(PatchError::Length));
    let with = |at: usize, byte: u8| [&good[..at], &[byte], &good[at + 1..]].concat();
    assert_eq!(apply(&with(0, 7), 1000), Err(PatchError::Form));
    assert_eq!(apply(&with(1, 2), 1000), Err(PatchError::Form));
    assert_eq!(apply(&with(1, 1), 1000), Err(PatchError::Length));
    assert_eq!(apply(&with(4, 1), 1000), Err(PatchError::Length));
    assert_eq!(apply(&with(4, 200), 1000), Err(PatchError::Length));
    // The last byte of the gaps promises another one.
    assert_eq!(apply(&with(HEAD + 2, 0x85), 1000), Err(PatchError::Length));
}

proptest! {
    #[test]
    fn a_patch_makes_the_new_version_and_tells_what_has_changed(
        len in 1..20_000usize,
        at in prop::collection::vec(any::<prop::sample::Index>(), 0..300),
        runs in prop::collection::vec((any::<prop::sample::Index>(), 1..500usize), 0..6),
        unit in prop::sample::select(vec![1, 2, 4, 8]),
    ) {
        let mut bytes: Vec<usize> = at.iter().map(|at| at.index(len)).collect();
        bytes.extend(runs.iter().flat_map(|(at, run)| at.index(len)..len.min(at.index(len) + run)));
        bytes.sort_unstable();
        bytes.dedup();
        let [old, new] = versions(len, &bytes);
        let changed = Changed::between(&old, &new, unit);
        let Some(patch) = patch(&changed, &new) else {
            let mut copied = old.clone();
            changed.copy(&new, &mut copied);
            prop_assert_eq!(copied, new);
            return Ok(());
        };
        prop_assert!(patch.len() < len);
        let mut patched = old.clone();
        prop_assert_eq!(&Changed::apply(&patch, &mut patched).unwrap(), &changed);
        prop_assert_eq!(&patched, &new);
        changed.copy(&old, &mut patched);
        prop_assert_eq!(&patched, &old, "everything that differs is among the changes");
        if let Some(packed) = packed(&patch) {
            prop_assert!(packed.len() <= patch.len());
            prop_assert_eq!(&Changed::apply(&packed, &mut patched), &Ok(changed));
            prop_assert_eq!(&patched, &new);
        }
    }

    #[test]
    fn changes_of_several_versions_add_up(
        len in 1..20_000usize,
        versions_at in prop::collection::vec(
            prop::collection::vec((any::<prop::sample::Index>(), 1..200usize), 0..8), 1..4),
        unit in prop::sample::select(vec![1, 2, 4, 8]),
    ) {
        let [first, _] = versions(len, &[]);
        let (mut newest, mut union) = (first.clone(), Union::new(len, unit));
        for runs in versions_at {
            let mut next = newest.clone();
            for (at, run) in runs {
                next[at.index(len)..len.min(at.index(len) + run)].iter_mut().for_each(|byte| *byte ^= 0x11);
            }
            union.add(&Changed::between(&newest, &next, unit));
            newest = next;
        }
        let all = union.all();
        let mut copied = first.clone();
        all.copy(&newest, &mut copied);
        prop_assert_eq!(&copied, &newest);
        if let Some(patch) = patch(&all, &newest) {
            let mut patched = first;
            prop_assert!(Changed::apply(&patch, &mut patched).is_ok());
            prop_assert_eq!(patched, newest);
        }
    }

    #[test]
    fn any_bytes_are_a_patch_or_an_error(patch in prop::collection::vec(any::<u8>(), 0..200), len in 0..2000usize) {
        if let Ok(changed) = Changed::apply(&patch, &mut vec![1; len]) {
            changed.copy(&vec![0; len], &mut vec![1; len]);
        }
    }
}

#[test]
fn a_compressed_patch_is_whole_or_an_error() {
    let [old, new] = versions(64 << 10, &(0..64 << 10).step_by(50).collect::<Vec<_>>());
    let plain = patch(&Changed::between(&old, &new, 2), &new).unwrap();
    let packed = packed(&plain).unwrap();
    assert!(packed.len() < plain.len() * 9 / 10, "{} of {}", packed.len(), plain.len());
    let apply = |patch: &[u8]| Changed::apply(patch, &mut old.clone());
    assert!(apply(&packed).is_ok());
    let with_length = |len: usize| {
        let mut other = packed.clone();
        other[4..8].copy_from_slice(&(len as u32).to_le_bytes());
        other
    };
    for len in [0, plain.len() - 1, plain.len() + 1, old.len(), u32::MAX as usize] {
        assert_eq!(apply(&with_length(len)), Err(PatchError::Packed), "{len}");
    }
    assert_eq!(apply(&packed[..packed.len() - 1]), Err(PatchError::Packed));
    assert_eq!(apply(&[&packed[..], b"more"].concat()), Err(PatchError::Packed));
    assert_eq!(apply(&packed[..HEAD]), Err(PatchError::Packed));
    // What was compressed is no compressed patch itself.
    let twice = super::packed(&packed);
    assert!(twice.is_none_or(|twice| apply(&twice) == Err(PatchError::Form)));
    assert_eq!(super::packed(&[]), None);
    assert_eq!(super::packed(&[7; HEAD]), None, "no shorter");
}

#[test]
fn what_has_changed_goes_without_values_and_comes_back() {
    let len = 64 << 10;
    for (at, step) in
        [(vec![], 1), (vec![5, 4097], 2), ((0..len).step_by(6).collect(), 2), ((0..len).collect(), 1)]
    {
        let [old, new] = versions(len, &at);
        let changed = Changed::between(&old, &new, step);
        let mut encoded = Vec::new();
        changed.encode(&mut encoded);
        assert_eq!(Changed::decode(&encoded, len), Ok(changed.clone()));
        let mut all = Vec::new();
        changed.each_range(len, Some((&old, &new, 1)), |range| all.extend(range));
        assert_eq!(all, at, "narrowed by comparing");
        assert!(!encoded.is_empty() && Changed::decode(&encoded[1..], len).is_err());
        if !at.is_empty() && changed != Changed::Whole {
            encoded.push(0);
            assert_eq!(Changed::decode(&encoded, len), Err(PatchError::Length));
        }
    }
    let [old, new] = versions(128, &[127]);
    let (changed, mut encoded) = (Changed::between(&old, &new, 1), Vec::new());
    encode_block(BlockId(7), &Changed::Whole, &mut encoded);
    encode_block(BlockId(9), &changed, &mut encoded);
    let of = |len: usize| decode_blocks(&encoded, |block| (block.0 < 10).then_some(len));
    assert_eq!(of(128), Ok(vec![(BlockId(7), Changed::Whole), (BlockId(9), changed)]));
    assert_eq!(of(64), Err(PatchError::Beyond));
    assert_eq!(decode_blocks(&encoded, |_| None), Err(PatchError::Beyond));
    assert_eq!(decode_blocks(&encoded[..encoded.len() - 1], |_| Some(128)), Err(PatchError::Length));
}
