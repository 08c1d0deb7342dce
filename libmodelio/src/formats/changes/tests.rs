//! Tests of files of changes: what they say is compared with what two versions differ in.

use proptest::prelude::*;
use safetensors::SafeTensors;

use super::*;

const BLOCK: u32 = 64 << 10;

fn layout() -> ModelLayout {
    let of =
        |name: &str, dtype: &str, count| (name.to_owned(), DType::from_name(dtype).unwrap(), vec![count]);
    let tensors = vec![
        of("wide", "F64", 5001),
        of("empty", "F32", 0),
        of("a", "F32", 12_345),
        of("b", "BF16", 40_001),
        of("flags", "U8", 777),
        of("packed", "F4", 1002),
    ];
    ModelLayout::new(tensors, BLOCK).unwrap()
}

/// Two versions that differ in these bytes.
fn versions(layout: &ModelLayout, at: &[usize]) -> [Vec<u8>; 2] {
    let old: Vec<u8> = (0..layout.size()).map(|at| (at * 31 / 7) as u8).collect();
    let mut new = old.clone();
    at.iter().for_each(|&at| new[at % old.len()] ^= 0x41);
    [old, new]
}

fn collected(layout: &ModelLayout, [old, new]: &[Vec<u8>; 2], with_old: bool, whole: bool) -> ModelChanges {
    let mut collector = Collector::new(layout);
    for block in (0..layout.blocks()).map(BlockId) {
        let bytes = span(&layout.block_bytes(block));
        let (old, new) = (&old[bytes.clone()], &new[bytes]);
        let changed = if whole { Changed::Whole } else { Changed::between(old, new, layout.unit(block)) };
        collector.block(block, &changed, with_old.then_some((old, new))).unwrap();
    }
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    collector.finish((Version(3), Version(7)), &metadata).unwrap()
}

fn bytes<'a>(model: &'a [u8]) -> impl Fn(Range<u64>) -> &'a [u8] {
    |range| &model[range.start as usize..range.end as usize]
}

/// Puts a sparse file onto the old version.
fn put(file: &[u8], layout: &ModelLayout, model: &mut [u8]) -> usize {
    let file = SafeTensors::deserialize(file).unwrap();
    let mut elements = 0;
    for tensor in layout.tensors() {
        let Ok(indices) = file.tensor(&format!("{}.indices", tensor.name)) else { continue };
        let values = file.tensor(&format!("{}.values", tensor.name)).unwrap();
        let indices: Vec<u32> =
            indices.data().as_chunks::<4>().0.iter().map(|index| u32::from_le_bytes(*index)).collect();
        assert!(indices.is_sorted_by(|one, next| one < next), "{}", tensor.name);
        elements += indices.len();
        let of = Granule::of(tensor.dtype);
        let first_ones = indices.iter().step_by(of.elements as usize);
        for (index, value) in first_ones.zip(values.data().chunks_exact(of.bytes as usize)) {
            let at = (tensor.bytes.start + u64::from(*index) / of.elements * of.bytes) as usize;
            model[at..at + value.len()].copy_from_slice(value);
        }
    }
    elements
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn files_of_changes_are_the_same_from_any_place_on(
        at in proptest::collection::vec(any::<usize>(), 0..3000),
        run in proptest::option::of((0_usize..150_000, 1_usize..9000)),
        with_old: bool, whole: bool,
        reads in proptest::collection::vec((any::<u64>(), 0_usize..5000), 20),
    ) {
        let layout = layout();
        let run = run.into_iter().flat_map(|(start, len)| start..start + len);
        let at: Vec<usize> = at.into_iter().chain(run).collect();
        let both = versions(&layout, &at);
        let changes = collected(&layout, &both, with_old, whole);
        let [mut old, new] = both;
        let sparse = changes.read_sparse(0, usize::MAX, bytes(&new));
        let patch = changes.read_patch(0, usize::MAX, bytes(&new));
        prop_assert_eq!((sparse.len() as u64, patch.len() as u64), (changes.sparse_len(), changes.patch_len()));
        for (offset, len) in reads {
            for (whole, is_patch) in [(&sparse, false), (&patch, true)] {
                let offset = offset % (whole.len() as u64 + 10);
                let part = match is_patch {
                    false => changes.read_sparse(offset, len, bytes(&new)),
                    true => changes.read_patch(offset, len, bytes(&new)),
                };
                let from = whole.len().min(offset as usize);
                prop_assert_eq!(&part[..], &whole[from..whole.len().min(from + len)]);
            }
        }
        let (head, rest) = patch.split_first_chunk().unwrap();
        let head = PatchHead::decode(head, patch.len() as u64).unwrap();
        let (encoded, values) = rest.split_at(head.runs as usize);
        let runs = Runs::decode(encoded.to_vec(), head.size).unwrap();
        let mut patched = old.clone();
        for (run, before) in runs.from(0) {
            patched[run.start as usize..run.end as usize]
                .copy_from_slice(&values[before as usize..][..(run.end - run.start) as usize]);
        }
        prop_assert!(patched == new);
        let differing = layout.tensors().iter().map(|tensor| {
            let of = Granule::of(tensor.dtype);
            let part = |model: &[u8]| bytes(model)(tensor.bytes.clone()).to_vec();
            let (old, new) = (part(&old), part(&new));
            let pairs = old.chunks(of.bytes as usize).zip(new.chunks(of.bytes as usize));
            pairs.filter(|(old, new)| old != new).count() * of.elements as usize
        });
        let differing: usize = differing.sum();
        let listed = put(&sparse, &layout, &mut old);
        prop_assert!(old == new);
        prop_assert!(listed >= differing);
        if with_old {
            prop_assert_eq!(listed, differing);
        }
    }
}

#[test]
fn nothing_changed_is_a_file_without_tensors() {
    let layout = layout();
    let both = versions(&layout, &[]);
    let changes = collected(&layout, &both, true, false);
    let file = changes.read_sparse(0, usize::MAX, bytes(&both[1]));
    let (_, metadata) = SafeTensors::read_metadata(&file).unwrap();
    let said = metadata.metadata().as_ref().unwrap();
    assert_eq!((said["gradfs.base"].as_str(), said["gradfs.version"].as_str()), ("3", "7"));
    assert!(SafeTensors::deserialize(&file).unwrap().is_empty());
    assert_eq!(changes.patch_len(), patch::HEAD as u64);
}

#[test]
fn a_tensor_of_two_to_the_31_elements_has_wide_indices() {
    for (size, width) in [((1_u64 << 31) - 1, 4), (1 << 31, 8)] {
        let layout = ModelLayout::blank(size, DType::from_name("U8").unwrap(), 4 << 20).unwrap();
        let last = BlockId(layout.blocks() - 1);
        let len = span(&layout.block_bytes(last)).len();
        let mut new = vec![0; len];
        new[len - 1] = 1;
        let mut collector = Collector::new(&layout);
        collector.block(last, &Changed::between(&vec![0; len], &new, 1), None).unwrap();
        let changes = collector.finish((Version(3), Version(7)), &BTreeMap::new()).unwrap();
        let before = changes.header.len() as u64;
        assert_eq!(changes.sparse_len(), before + width + 1);
        let index = changes.read_sparse(before, width as usize, |_| unreachable!("no values are read"));
        assert_eq!(index, (size - 1).to_le_bytes()[..width as usize]);
    }
}

#[test]
fn changes_that_are_as_long_as_the_model_are_refused() {
    let layout = ModelLayout::blank(16 << 20, DType::from_name("U8").unwrap(), 4 << 20).unwrap();
    let at: Vec<usize> = (0..16 << 20).step_by(2).collect();
    let [old, new] = versions(&layout, &at);
    let mut collector = Collector::new(&layout);
    let mut outcomes = (0..layout.blocks()).map(BlockId).map(|block| {
        let bytes = span(&layout.block_bytes(block));
        collector.block(block, &Changed::Whole, Some((&old[bytes.clone()], &new[bytes])))
    });
    assert!(outcomes.any(|outcome| outcome == Err(TooMuch)));
}
