//! Tests of laying tensors out, of refusing impossible layouts, and of the block grid.

use safetensors::Dtype;

use super::*;

const BLOCK: u32 = MIN_BLOCK_SIZE;

fn spec(name: &str, dtype: DType, shape: &[usize]) -> (String, DType, Vec<usize>) {
    (name.to_owned(), dtype, shape.to_vec())
}

fn refusal(specs: Vec<(String, DType, Vec<usize>)>) -> LayoutError {
    ModelLayout::new(specs, BLOCK).expect_err("must be refused")
}

fn segment(bytes: Range<u64>, dtype: DType, element: u64) -> Segment {
    Segment { bytes, dtype, element }
}

#[test]
fn tensors_and_segments_lie_where_expected() {
    let i32 = DType::Opaque(Dtype::I32);
    let layout = ModelLayout::new(
        vec![
            spec("a", DType::F32, &[10_000]),
            spec("b", DType::F32, &[2, 5_000]), // merges with a; together 80,000 bytes
            spec("none", i32, &[3, 0]),         // splits nothing
            spec("scalar", DType::F32, &[]),
            spec("mask", i32, &[3]),
            spec("c", DType::BF16, &[4]),
        ],
        BLOCK,
    )
    .unwrap();
    assert_eq!((layout.size(), layout.blocks(), layout.elements()), (80_024, 2, 20_005));
    assert_eq!(layout.tensors()[3].bytes, 80_000..80_004);
    assert_eq!(layout.segments(BlockId(0)), [segment(0..65_536, DType::F32, 0)]);
    assert_eq!(
        layout.segments(BlockId(1)),
        [
            segment(65_536..80_004, DType::F32, 16_384),
            segment(80_004..80_016, i32, 20_001),
            segment(80_016..80_024, DType::BF16, 20_001),
        ]
    );
    assert_eq!(layout.block_bytes(BlockId(1)), 65_536..80_024);
    assert_eq!(layout.tensor_index("c"), Some(5));
    assert_eq!(layout.tensor_index("a"), Some(0));
    assert_eq!(layout.tensor_index("d"), None);
}

#[test]
fn bad_input_is_refused() {
    let ok = || vec![spec("a", DType::F32, &[4])];
    for block_size in [0, 1, 4096, BLOCK + 1, BLOCK * 3, 8 << 20, u32::MAX] {
        assert!(
            matches!(ModelLayout::new(ok(), block_size), Err(LayoutError::BlockSize(b)) if b == block_size)
        );
    }
    assert!(matches!(refusal(vec![]), LayoutError::NoTensors));
    assert!(matches!(refusal(vec![spec("a", DType::F32, &[4, 0])]), LayoutError::Empty));
    let twice = vec![spec("a", DType::F32, &[1]), spec("b", DType::F32, &[1]), spec("a", DType::F16, &[1])];
    assert!(matches!(refusal(twice), LayoutError::DuplicateName(name) if name == "a"));
    for shape in [vec![usize::MAX], vec![usize::MAX, 2], vec![1 << 32, 1 << 32, 0], vec![1 << 59]] {
        let error = refusal(vec![spec("a", DType::F32, &shape)]);
        assert!(matches!(error, LayoutError::TooLarge(_)), "{shape:?}: {error}");
    }
    let many = |n| (0..n).map(|i| spec(&format!("t{i}"), DType::F32, &[1 << 58])).collect();
    assert!(matches!(refusal(many(17)), LayoutError::TooLarge(_)), "the sum overflows");
    assert!(matches!(refusal(many(1)), LayoutError::TooManyBlocks { .. }));
    let flood = vec![spec("a", DType::F32, &[1]); MAX_TENSORS + 1];
    assert!(matches!(refusal(flood), LayoutError::TooManyTensors(n) if n == MAX_TENSORS + 1));
    let odd = refusal(vec![spec("q", DType::Opaque(Dtype::F4), &[3])]);
    assert!(odd.to_string().contains("\"q\" of F4"), "{odd}");
}

#[test]
fn bad_names_are_refused() {
    let (long_file, long_directory) = ("x".repeat(252), format!("{}/w", "x".repeat(256)));
    let long = "x/".repeat(MAX_NAME_LEN / 2) + "x";
    let of_path = ["a//b", "/a", "a/", "/", "//", "./a", "a/.", "a/../b", "../a", "a/b\0"];
    let of_file = ["", ".", "..", "a\0", "__metadata__", &long_file, &long_directory, &long];
    for name in of_path.into_iter().chain(of_file) {
        let error = refusal(vec![spec(name, DType::F32, &[1])]);
        assert!(matches!(error, LayoutError::BadName { .. }), "{name:?}: {error}");
    }
    let (long_file, long_directory) = ("x/".to_owned() + &long_file[1..], &long_directory[1..]);
    for name in ["layers.0.weight", "...", "a b", "ü", "a\nb", "a/b", "a/.../b", "_/__metadata__"]
        .into_iter()
        .chain([long_file.as_str(), long_directory, &long[2..]])
    {
        assert!(ModelLayout::new(vec![spec(name, DType::F32, &[1])], BLOCK).is_ok(), "{name:?}");
    }
}

#[test]
fn names_whose_file_is_another_ones_directory_are_refused() {
    let layout = |names: &[&str]| {
        ModelLayout::new(names.iter().map(|name| spec(name, DType::F32, &[1])).collect(), BLOCK)
    };
    for (names, file, other) in [
        (["a.npy/x", "a"], "a", "a.npy/x"),
        (["b/a", "b/a.npy/c/d"], "b/a", "b/a.npy/c/d"),
        (["b.npy/a/c", "b"], "b", "b.npy/a/c"),
    ] {
        let error = layout(&names).expect_err("must be refused");
        let LayoutError::FileAndDirectory { file: of_file, other: of_directory } = &error else {
            panic!("{error}");
        };
        assert_eq!((of_file.as_str(), of_directory.as_str()), (file, other));
        assert!(error.to_string().contains("rename one of them"), "{error}");
    }
    for names in [["a/x", "a"], ["a.npy/x", "b"], ["a.npy", "a"], ["c/a.npy/x", "a"], ["a.npy.npy/x", "a"]] {
        assert!(layout(&names).is_ok(), "{names:?}");
    }
}

#[test]
fn directories_are_counted_once() {
    let index = |names: &mut dyn Iterator<Item = String>| {
        let tensors: Vec<Tensor> = names.map(tensor_named).collect();
        names::index_names(&tensors).map(|by_name| by_name.len())
    };
    // `tensors/`, `all`, `all/y`, and two for each number.
    let paths = |count| {
        let numbered = (0..count).map(|i| format!("all/{i}/x/w"));
        numbered.chain(["all/y/w", "all/y/x", "all/w", "w"].map(str::to_owned))
    };
    let most = MAX_DIRECTORIES / 2 - 2;
    assert_eq!(index(&mut paths(most)).unwrap(), most + 4);
    let over = index(&mut paths(most + 1)).unwrap_err();
    assert!(matches!(over, LayoutError::TooManyDirectories(n) if n == MAX_DIRECTORIES + 1), "{over}");
}

fn tensor_named(name: String) -> Tensor {
    Tensor { name, dtype: DType::F32, shape: vec![], bytes: 0..4 }
}

#[test]
fn blank_models() {
    let layout = ModelLayout::blank(1 << 20, DType::BF16, DEFAULT_BLOCK_SIZE).unwrap();
    assert_eq!((layout.size(), layout.blocks(), layout.elements()), (1 << 20, 4, 1 << 19));
    assert_eq!(layout.tensors()[0].shape, [1 << 19]);
    assert_eq!(layout.tensor_index("weights"), Some(0));
    let blank = |size, dtype| ModelLayout::blank(size, dtype, BLOCK);
    assert_eq!(blank(3, DType::Opaque(Dtype::F4)).unwrap().tensors()[0].shape, [6]);
    assert!(matches!(blank(0, DType::F32), Err(LayoutError::Empty)));
    assert!(matches!(blank(6, DType::F32), Err(LayoutError::NotWholeElements { size: 6, .. })));
    assert!(matches!(blank(1 << 48, DType::F32), Err(LayoutError::TooManyBlocks { .. })));
    assert!(blank(u64::MAX, DType::Opaque(Dtype::U8)).is_err());
}
