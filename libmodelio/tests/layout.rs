//! Properties of model layouts, and of the safetensors files they come from and go to.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use libmodelio::formats::safetensors::{CopyRange, plan_load, read_header};
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::header::header_bytes;
use libmodelio::vocabulary::layout::{
    DEFAULT_BLOCK_SIZE, DType, LayoutError, MAX_BLOCK_SIZE, MIN_BLOCK_SIZE, ModelLayout,
};
use proptest::prelude::*;
use proptest::sample::select;
use safetensors::{Dtype, SafeTensors};

type Spec = (String, DType, Vec<usize>);

const DTYPES: [Dtype; 12] = [
    Dtype::F32,
    Dtype::F16,
    Dtype::BF16,
    Dtype::F64,
    Dtype::I64,
    Dtype::C64,
    Dtype::I32,
    Dtype::I16,
    Dtype::U8,
    Dtype::BOOL,
    Dtype::F8_E4M3,
    Dtype::F6_E2M3,
];

fn shape() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        Just(vec![]),
        prop::collection::vec(0..5usize, 1..4),
        (1..40_000usize).prop_map(|n| vec![n]),
        // Sizes near block boundaries.
        (16_380..16_390usize, 1..3usize).prop_map(|(n, m)| vec![m, n]),
    ]
}

/// Models with names that need escaping, some of them in directories, and at least one byte.
fn specs() -> impl Strategy<Value = Vec<Spec>> {
    let tensor = ("(d[a-c.\"\\\\ü\n]{0,2}/){0,2}[a-z.\"\\\\ü\n]{0,6}", select(DTYPES.to_vec()), shape());
    prop::collection::vec(tensor, 1..12)
        .prop_map(|tensors| {
            let named = |(i, (name, dtype, mut shape)): (usize, (String, Dtype, Vec<usize>))| {
                // Four elements of any packed type fill bytes.
                if dtype.bitsize() < 8 {
                    shape.push(4);
                }
                (format!("{name}{i}"), DType::from(dtype), shape)
            };
            tensors.into_iter().enumerate().map(named).collect::<Vec<Spec>>()
        })
        .prop_filter("no bytes", |specs| specs.iter().any(|spec| bytes_of(spec) > 0))
}

fn block_size() -> impl Strategy<Value = u32> {
    select(vec![MIN_BLOCK_SIZE, 128 << 10, DEFAULT_BLOCK_SIZE])
}

fn bytes_of((_, dtype, shape): &Spec) -> usize {
    shape.iter().product::<usize>() * dtype.size_bits() / 8
}

/// Bytes that tell one place from another.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

/// A safetensors file with the tensors' data in the given order and their entries in `listed` order.
fn file_bytes(specs: &[Spec], listed: &[usize], padding: usize, seed: u64) -> (Vec<u8>, Vec<Vec<u8>>) {
    let data: Vec<Vec<u8>> = specs
        .iter()
        .enumerate()
        .map(|(i, spec)| pattern(bytes_of(spec), seed ^ ((i as u64) << 32)))
        .collect();
    let ends: Vec<usize> = data
        .iter()
        .scan(0, |end, data| {
            *end += data.len();
            Some(*end)
        })
        .collect();
    let mut map = serde_json::Map::new();
    for &i in listed {
        let (name, dtype, shape) = &specs[i];
        map.insert(
            name.clone(),
            serde_json::json!({
                "dtype": dtype.name(), "shape": shape, "data_offsets": [ends[i] - data[i].len(), ends[i]],
            }),
        );
    }
    let json = serde_json::Value::Object(map).to_string() + &" ".repeat(padding);
    let header = [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat();
    ([header, data.concat()].concat(), data)
}

fn file_with(bytes: &[u8]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file
}

/// What a loader does with a plan.
fn load(file: &File, layout: &ModelLayout, plan: &[CopyRange]) -> Vec<u8> {
    let mut flat = vec![0; layout.size() as usize];
    let mut reached = 0;
    for range in plan {
        assert_eq!(range.flat_offset, reached, "the plan fills the flat range once, in order");
        reached += range.len;
        let target = &mut flat[range.flat_offset as usize..][..range.len as usize];
        file.read_exact_at(target, range.file_offset).unwrap();
    }
    assert_eq!(reached, layout.size());
    flat
}

fn slice<'a>(layout: &ModelLayout, flat: &'a [u8], name: &str) -> &'a [u8] {
    let tensor = &layout.tensors()[layout.tensor_index(name).unwrap()];
    assert_eq!(tensor.name, name);
    &flat[tensor.bytes.start as usize..tensor.bytes.end as usize]
}

proptest! {
    #[test]
    fn tensors_are_placed_aligned_and_in_order(specs in specs(), block_size in block_size()) {
        let layout = ModelLayout::new(specs.clone(), block_size).unwrap();
        let mut reached = 0;
        for tensor in layout.tensors() {
            prop_assert_eq!(tensor.bytes.start, reached);
            prop_assert_eq!(tensor.bytes.start % tensor.dtype.alignment() as u64, 0);
            reached = tensor.bytes.end;
        }
        prop_assert_eq!(reached, layout.size());

        let given_is_aligned = specs.iter().scan(0, |end, spec| {
            let start = *end;
            *end += bytes_of(spec);
            Some(start % spec.1.alignment() == 0)
        }).all(|aligned| aligned);
        let mut expected = specs;
        if !given_is_aligned {
            expected.sort_by_key(|spec| std::cmp::Reverse(spec.1.alignment()));
        }
        for (index, (spec, tensor)) in expected.iter().zip(layout.tensors()).enumerate() {
            prop_assert_eq!(&(tensor.name.clone(), tensor.dtype, tensor.shape.clone()), spec);
            prop_assert_eq!((tensor.bytes.end - tensor.bytes.start) as usize, bytes_of(spec));
            prop_assert_eq!(layout.tensor_index(&tensor.name), Some(index));
        }
        prop_assert_eq!(layout.tensors().len(), expected.len());
    }

    #[test]
    fn segments_cover_every_block(specs in specs(), block_size in block_size()) {
        let layout = ModelLayout::new(specs, block_size).unwrap();
        let (mut reached, mut element) = (0, 0);
        let mut tensors = layout.tensors().iter().filter(|tensor| !tensor.bytes.is_empty()).peekable();
        for block in (0..layout.blocks()).map(BlockId) {
            let bytes = layout.block_bytes(block);
            prop_assert_eq!(bytes.start, reached);
            prop_assert_eq!(layout.block_of(bytes.start), block);
            prop_assert_eq!(layout.block_of(bytes.end - 1), block);
            let mut before = None;
            for segment in layout.segments(block) {
                prop_assert_eq!(segment.bytes.start, reached);
                prop_assert!(segment.bytes.start < segment.bytes.end);
                prop_assert_ne!(before, Some(segment.dtype), "not maximal");
                if segment.dtype.is_reducible() {
                    let size = segment.dtype.size_bytes().unwrap() as u64;
                    prop_assert_eq!((segment.bytes.start % size, segment.bytes.end % size), (0, 0));
                    prop_assert_eq!(segment.element, element);
                    prop_assert_eq!(segment.elements(), (segment.bytes.end - segment.bytes.start) / size * segment.dtype.words() as u64);
                } else {
                    prop_assert_eq!(segment.elements(), 0);
                }
                // Every tensor that has bytes here is of this type.
                while let Some(tensor) = tensors.peek().filter(|t| t.bytes.start < segment.bytes.end) {
                    prop_assert_eq!(tensor.dtype, segment.dtype);
                    if tensor.bytes.end > segment.bytes.end {
                        break;
                    }
                    tensors.next();
                }
                element += segment.elements();
                reached = segment.bytes.end;
                before = Some(segment.dtype);
            }
            prop_assert_eq!(reached, bytes.end);
        }
        prop_assert_eq!((reached, element), (layout.size(), layout.elements()));
        prop_assert!(tensors.next().is_none());
    }

    #[test]
    fn absurd_shapes_never_panic(
        shapes in prop::collection::vec(
            (select(DTYPES.to_vec()), prop::collection::vec(
                select(vec![0, 1, 3, 4, 1 << 32, 1 << 62, usize::MAX - 1, usize::MAX]), 0..4)),
            0..4),
    ) {
        let specs: Vec<Spec> = shapes.into_iter().enumerate()
            .map(|(i, (dtype, shape))| (i.to_string(), dtype.into(), shape)).collect();
        if let Ok(layout) = ModelLayout::new(specs, MAX_BLOCK_SIZE) {
            prop_assert!(layout.size() > 0);
            prop_assert_eq!(layout.block_bytes(BlockId(layout.blocks() - 1)).end, layout.size());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn written_headers_are_read_by_the_reference(
        specs in specs(),
        metadata in prop::collection::btree_map(any::<String>(), any::<String>(), 0..4),
        seed: u64,
    ) {
        let layout = ModelLayout::new(specs.clone(), MIN_BLOCK_SIZE).unwrap();
        let flat = pattern(layout.size() as usize, seed);
        let header = header_bytes(layout.tensors(), &metadata);
        prop_assert_eq!(header.len() % 64, 0);
        let file = [&header[..], &flat].concat();

        let parsed = SafeTensors::deserialize(&file).unwrap();
        prop_assert_eq!(parsed.len(), specs.len());
        for (name, dtype, shape) in &specs {
            let tensor = parsed.tensor(name).unwrap();
            prop_assert_eq!((DType::from(tensor.dtype()), tensor.shape()), (*dtype, &shape[..]));
            prop_assert!(tensor.data() == slice(&layout, &flat, name), "{name:?}");
        }
        let (_, parsed) = SafeTensors::read_metadata(&file).unwrap();
        let parsed: BTreeMap<_, _> = parsed.metadata().clone().unwrap_or_default().into_iter().collect();
        prop_assert_eq!(&parsed, &metadata);

        // What we serve we can load again, in one piece and the same order.
        let header = read_header(&file_with(&file)).unwrap();
        prop_assert_eq!(&header.metadata, &metadata);
        let (again, plan) = plan_load(std::slice::from_ref(&header), MIN_BLOCK_SIZE).unwrap();
        prop_assert_eq!(again.tensors(), layout.tensors());
        prop_assert_eq!(plan, [CopyRange {
            file: 0,
            file_offset: header.data_start, flat_offset: 0, len: layout.size(),
        }]);
    }

    #[test]
    fn every_tensor_is_loaded_right(
        (specs, listed) in specs().prop_flat_map(|specs| {
            let order: Vec<usize> = (0..specs.len()).collect();
            (Just(specs), Just(order).prop_shuffle())
        }),
        padding in 0..9usize,
        seed: u64,
    ) {
        let (bytes, data) = file_bytes(&specs, &listed, padding, seed);
        let file = file_with(&bytes);
        let header = read_header(&file).unwrap();
        for (spec, data) in specs.iter().zip(&data) {
            let tensor = header.tensors.iter().find(|tensor| tensor.name == spec.0).unwrap();
            prop_assert!(bytes[tensor.bytes.start as usize..tensor.bytes.end as usize] == data[..]);
        }
        let (layout, plan) = plan_load(std::slice::from_ref(&header), MIN_BLOCK_SIZE).unwrap();
        let flat = load(&file, &layout, &plan);
        for (spec, data) in specs.iter().zip(&data) {
            prop_assert!(slice(&layout, &flat, &spec.0) == data, "{:?}", spec.0);
        }
        // No two ranges that could be one.
        for pair in plan.windows(2) {
            prop_assert_ne!(pair[0].file_offset + pair[0].len, pair[1].file_offset);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn hostile_headers_never_panic(
        shapes in prop::collection::vec((select(DTYPES.to_vec()), prop::collection::vec(0..4usize, 0..3)), 1..4),
        edits in prop::collection::vec(
            (any::<prop::sample::Index>(), prop_oneof![any::<u8>(), select(b"0123456789{}[]\",:- .eF".to_vec())]),
            0..4),
        length_edit in prop::option::weighted(0.1, any::<u64>()),
        keep in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let specs: Vec<Spec> = shapes.into_iter().enumerate()
            .map(|(i, (dtype, shape))| (format!("t{i}"), DType::from(dtype), shape))
            .filter(|(_, dtype, _)| dtype.size_bytes().is_some())
            .collect();
        let listed: Vec<usize> = (0..specs.len()).collect();
        let (mut bytes, data) = file_bytes(&specs, &listed, 0, 1);
        let header_end = bytes.len() - data.concat().len();
        for (index, byte) in &edits {
            bytes[8 + index.index(header_end - 8)] = *byte;
        }
        if let Some(length) = length_edit {
            bytes[..8].copy_from_slice(&length.to_le_bytes());
        }
        if let Some(keep) = keep {
            bytes.truncate(keep.index(bytes.len()));
        }
        let file = file_with(&bytes);
        match read_header(&file) {
            Ok(header) => {
                let reference = SafeTensors::deserialize(&bytes).expect("we accept no more than the reference");
                prop_assert_eq!(reference.len(), header.tensors.len());
                for tensor in &header.tensors {
                    let expected = reference.tensor(&tensor.name).unwrap();
                    let found = &bytes[tensor.bytes.start as usize..tensor.bytes.end as usize];
                    prop_assert_eq!(found, expected.data());
                    prop_assert_eq!(&tensor.shape[..], expected.shape());
                }
                if let Ok((layout, plan)) = plan_load(std::slice::from_ref(&header), MIN_BLOCK_SIZE) {
                    prop_assert_eq!(load(&file, &layout, &plan).len() as u64, layout.size());
                }
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}

#[test]
fn every_truncation_is_refused() {
    let specs = vec![
        ("a".to_owned(), DType::F32, vec![3]),
        ("b".to_owned(), DType::Opaque(Dtype::I64), vec![]),
        ("c".to_owned(), DType::BF16, vec![2, 2]),
    ];
    let (bytes, _) = file_bytes(&specs, &[2, 0, 1], 0, 5);
    assert!(read_header(&file_with(&bytes)).is_ok());
    for len in 0..bytes.len() {
        let error = read_header(&file_with(&bytes[..len])).expect_err("cut off");
        let message = error.to_string();
        assert!(message.starts_with("truncated: ") || len < 10, "{len}: {message}");
    }
}

#[test]
fn a_misaligned_file_is_loaded_in_pieces() {
    let specs = vec![
        ("half".to_owned(), DType::F16, vec![1]),
        ("a".to_owned(), DType::F32, vec![1]),
        ("b".to_owned(), DType::F32, vec![1]),
    ];
    let (bytes, data) = file_bytes(&specs, &[0, 1, 2], 0, 3);
    let file = file_with(&bytes);
    let header = read_header(&file).unwrap();
    let (layout, plan) = plan_load(std::slice::from_ref(&header), MIN_BLOCK_SIZE).unwrap();
    let range = |from: u64, flat_offset, len| CopyRange {
        file: 0,
        file_offset: header.data_start + from,
        flat_offset,
        len,
    };
    assert_eq!(plan, [range(2, 0, 8), range(0, 8, 2)]);
    assert_eq!(load(&file, &layout, &plan), [&data[1][..], &data[2], &data[0]].concat());
}

#[test]
fn reducible_types_cannot_hide() {
    let hidden = vec![("a".to_owned(), DType::Opaque(Dtype::F32), vec![8])];
    let layout = ModelLayout::new(hidden, MIN_BLOCK_SIZE).unwrap();
    assert_eq!((layout.tensors()[0].dtype, layout.elements()), (DType::F32, 8));
}

#[test]
fn names_beyond_the_header_limit_are_refused() {
    // A control character takes six bytes in JSON.
    let padding = "\u{1}".repeat(240);
    let specs = (0..70_000).map(|i| (format!("{padding}{i}"), DType::F32, vec![1])).collect();
    let error = ModelLayout::new(specs, MIN_BLOCK_SIZE).expect_err("100 MB of names");
    assert!(matches!(error, LayoutError::HeaderTooLarge(bytes) if bytes > 100_000_000), "{error}");
}

/// The description of each byte of a reduced model: its type, its element, and its place in the element.
fn element_at(layout: &ModelLayout, offset: u64) -> Option<(DType, u64, u64)> {
    let segments = layout.segments(layout.block_of(offset));
    let segment = segments.iter().find(|segment| segment.bytes.contains(&offset)).unwrap();
    let size = segment.dtype.size_bytes().filter(|_| segment.dtype.is_reducible())? as u64;
    let at = offset - segment.bytes.start;
    Some((segment.dtype, segment.element + at / size, at % size))
}

proptest! {
    #[test]
    fn partitions_hold_every_byte_and_element_once(
        specs in specs(),
        block_size in block_size(),
        owners in prop::collection::vec(0..3usize, 64),
    ) {
        let model = ModelLayout::new(specs, block_size).unwrap();
        let (mut size, mut elements) = (0, 0);
        for shard in 0..3 {
            let owner = |block: u32| owners[block as usize % owners.len()];
            let blocks: Vec<_> = (0..model.blocks()).filter(|&b| owner(b) == shard).map(BlockId).collect();
            if blocks.is_empty() {
                prop_assert!(matches!(model.partition(&blocks), Err(LayoutError::NoBlocks)));
                continue;
            }
            let partition = model.partition(&blocks).unwrap();
            let layout = partition.layout();
            prop_assert_eq!(partition.blocks(), &blocks[..]);
            prop_assert_eq!((layout.blocks() as usize, layout.block_size()), (blocks.len(), block_size));
            let (mut reached, mut counted) = (0, 0);
            for local in (0..layout.blocks()).map(BlockId) {
                let block = partition.global(local).unwrap();
                prop_assert_eq!(partition.local(block), Some(local));
                let (there, here) = (model.block_bytes(block), layout.block_bytes(local));
                prop_assert_eq!(here.start, reached);
                prop_assert_eq!(here.end - here.start, there.end - there.start);
                prop_assert_eq!(layout.segments(local).len(), model.segments(block).len());
                for (mine, theirs) in layout.segments(local).iter().zip(model.segments(block)) {
                    prop_assert_eq!(mine.dtype, theirs.dtype);
                    prop_assert_eq!(mine.bytes.start - here.start, theirs.bytes.start - there.start);
                    prop_assert_eq!(mine.bytes.end - here.start, theirs.bytes.end - there.start);
                    prop_assert_eq!((mine.bytes.start, mine.element), (reached, counted));
                    (reached, counted) = (mine.bytes.end, counted + mine.elements());
                }
                // Which byte of an element a byte is does not change, first and last of a block included.
                for (mine, theirs) in [(here.start, there.start), (here.end - 1, there.end - 1)] {
                    let (mine, theirs) = (element_at(layout, mine), element_at(&model, theirs));
                    prop_assert_eq!(mine.map(|m| (m.0, m.2)), theirs.map(|t| (t.0, t.2)));
                }
            }
            prop_assert_eq!((reached, counted), (layout.size(), layout.elements()));
            prop_assert_eq!(partition.global(BlockId(layout.blocks())), None);
            (size, elements) = (size + reached, elements + counted);
        }
        prop_assert_eq!((size, elements), (model.size(), model.elements()));
        // All of the model is a partition, too.
        let all: Vec<_> = (0..model.blocks()).map(BlockId).collect();
        let whole = model.partition(&all).unwrap();
        for block in all {
            prop_assert_eq!(whole.layout().segments(block), model.segments(block));
        }
    }
}

#[test]
fn partitions_of_other_blocks_are_refused() {
    let model = ModelLayout::blank(4 * u64::from(MIN_BLOCK_SIZE), DType::F32, MIN_BLOCK_SIZE).unwrap();
    let partition =
        |blocks: &[u32]| model.partition(&blocks.iter().copied().map(BlockId).collect::<Vec<_>>());
    assert!(matches!(partition(&[]), Err(LayoutError::NoBlocks)));
    assert!(matches!(partition(&[0, 4]), Err(LayoutError::NoSuchBlock { block: BlockId(4), blocks: 4 })));
    for blocks in [[1, 1], [2, 1]] {
        let error = partition(&blocks).expect_err("not rising");
        assert!(matches!(error, LayoutError::BlockOrder { after: BlockId(1), .. }), "{error}");
    }
    assert_eq!(partition(&[1, 3]).unwrap().local(BlockId(2)), None);
}
