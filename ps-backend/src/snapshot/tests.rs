//! The format of a directory: written data is read again, whatever the sizes, and altered data is refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::dtype::DType;
use libmodelio::vocabulary::groups::{Groups, Overrides, TensorReducers};
use libmodelio::vocabulary::ids::{Incarnation, Step, Version};
use libmodelio::vocabulary::tensor_steps::TensorSteps;
use tempfile::TempDir;

use super::files::INDEX;
use super::*;
use crate::core::LearnerRecord;

const BLOCK: u32 = 64 << 10;

/// Types of all kinds, an empty tensor among them, and blocks that hold several of them.
fn head(optimizer: Reducer, stepped: u64) -> Head {
    let tensors = vec![
        ("d".to_owned(), DType::F64, vec![3, 1000]),
        ("a/b".to_owned(), DType::F32, vec![20_011]),
        ("none".to_owned(), DType::F32, vec![0, 4]),
        ("h".to_owned(), DType::BF16, vec![7, 5003]),
        ("g".to_owned(), DType::F16, vec![]),
        ("e".to_owned(), DType::E4M3, vec![40_003]),
        ("f".to_owned(), DType::E5M2, vec![3, 9]),
        ("i".to_owned(), DType::from_name("U8").unwrap(), vec![31]),
    ];
    let count = tensors.len();
    let layout = ModelLayout::new(tensors, BLOCK).unwrap();
    let learner = |name: &str, step| LearnerRecord { name: name.into(), incarnation: Incarnation(2), step };
    let record = JobRecord {
        version: Version(9),
        optimizer,
        reducers: None,
        steps: TensorSteps::from(vec![(2, stepped), (count as u32 - 2, stepped / 2)]),
        contributions: 18,
        learners: vec![learner("a", Some(Step(9))), learner("b", None)],
        unlisted: Incarnation(4),
    };
    let controls =
        Controls::default().with_all([("reducer", optimizer.name()), ("learning_rate", "0.1")]).unwrap();
    Head::new("m", &layout, BTreeMap::from([("format".into(), "pt".into())]), &controls, record)
}

/// Bytes that tell where they are from.
fn expected((_, what): Piece, range: &std::ops::Range<u64>) -> Vec<u8> {
    let kind = match what {
        Kept::Weights => 1,
        Kept::Masters => 2,
        Kept::Slot(slot) => 3 + u64::from(slot),
    };
    range.clone().map(|at| (at.wrapping_mul(2_654_435_761) >> 7) as u8 ^ (kind * 17) as u8).collect()
}

struct Numbers(ModelLayout);

impl Source for Numbers {
    fn send(
        &mut self,
        wanted: &mut dyn Iterator<Item = Piece>,
        sink: &mut dyn Sink,
    ) -> Result<(), SnapshotError> {
        for piece in wanted {
            sink.take(piece, &expected(piece, &kept_range(&self.0, piece.0, piece.1)))?;
        }
        Ok(())
    }
}

fn write(dir: &Path, head: &Head, piece_size: u64, replaces: bool) -> Result<(), SnapshotError> {
    let mut source = Numbers(head.layout(head.block_size).unwrap());
    Writer::create(dir, head.clone(), piece_size, replaces)?.write(&mut source, &mut |_| Ok(()))
}

fn verified(dir: &Path) -> Result<Reader, SnapshotError> {
    let reader = Reader::open(dir, None)?;
    reader.verify(&mut |_| Ok(()))?;
    Ok(reader)
}

/// Compares the received pieces. Masters are kept only for narrow types.
struct Compare<'a>(&'a ModelLayout, usize);

impl Sink for Compare<'_> {
    fn take(&mut self, (block, what): Piece, bytes: &[u8]) -> Result<(), SnapshotError> {
        let range = kept_range(self.0, block, what);
        let mut wanted = expected((block, what), &range);
        if what == Kept::Masters {
            let mut narrow = vec![false; wanted.len()];
            for segment in self.0.segments(block).iter().filter(|s| s.dtype.is_narrow()) {
                let from = (segment.element * 4 - range.start) as usize;
                narrow[from..from + segment.elements() as usize * 4].fill(true);
            }
            wanted.iter_mut().zip(&narrow).filter(|(_, narrow)| !**narrow).for_each(|(byte, _)| *byte = 0);
        }
        assert_eq!(bytes, wanted, "{what:?} of block {block}");
        self.1 += 1;
        Ok(())
    }
}

#[test]
fn what_is_written_is_read_again() {
    for optimizer in Reducer::all() {
        for (piece_size, block_size, stepped) in
            [(PIECE_SIZE, BLOCK, 3), (50_000, 4 * BLOCK, 5), (1, BLOCK, 0)]
        {
            let (dir, head) = (TempDir::new().unwrap(), head(optimizer, stepped));
            write(dir.path(), &head, piece_size, false).unwrap();
            verified(dir.path()).unwrap();
            let mut reader = Reader::open(dir.path(), Some(block_size)).unwrap();
            assert_eq!(*reader.head(), head);
            assert_eq!(reader.head().controls().unwrap().reducer, optimizer);
            let layout = reader.layout().clone();
            assert_eq!(layout.block_size(), block_size);
            let mut compare = Compare(&layout, 0);
            reader.send(&mut pieces(&layout, kinds(&head.record)), &mut compare).unwrap();
            let slots = if stepped > 0 { optimizer.state_slots() } else { 0 };
            assert_eq!(compare.1, pieces(&layout, kinds(&head.record)).count());
            let names = names(dir.path());
            assert_eq!(names.iter().any(|name| name.contains("index")), piece_size < PIECE_SIZE);
            let header = fs::read(dir.path().join("optimizer.safetensors")).unwrap();
            let text = String::from_utf8_lossy(&header[..4096]).into_owned();
            let states =
                ["exp_avg.a/b", "exp_avg_sq.a/b", "momentum_buffer.a/b", "square_avg.a/b", "\"sum.a/b"];
            assert_eq!(states.iter().filter(|name| text.contains(*name)).count(), slots, "{optimizer}");
            assert!(text.contains("master.h") && !text.contains("master.d") && text.contains("step.d"));
        }
    }
}

#[test]
fn a_tensor_has_the_state_of_its_own_reducer() {
    let (dir, mut head) = (TempDir::new().unwrap(), head(Reducer::Adam, 3));
    let plain = Overrides { reducer: Some(Reducer::Sgd), ..Overrides::default() };
    let heavy = Overrides { reducer: Some(Reducer::Momentum), ..plain };
    let groups =
        Groups::new([Overrides::default(), plain, plain, heavy, heavy, heavy, plain, Overrides::default()]);
    head.record.reducers = Some(TensorReducers::new(8, Reducer::Adam, &groups));
    write(dir.path(), &head, PIECE_SIZE, false).unwrap();
    verified(dir.path()).unwrap();
    let mut reader = Reader::open(dir.path(), None).unwrap();
    assert_eq!(*reader.head(), head);
    let header = fs::read(dir.path().join("optimizer.safetensors")).unwrap();
    let text = String::from_utf8_lossy(&header[..4096]).into_owned();
    let names = [
        "exp_avg.d",
        "exp_avg_sq.d",
        "exp_avg.a/b",
        "momentum_buffer.a/b",
        "momentum_buffer.h",
        "exp_avg_sq.h",
    ];
    let there = names.map(|name| text.contains(&format!("\"{name}\"")));
    assert_eq!(there, [true, true, false, false, true, false]);
    // What a reducer does not keep is zero. The F64 tensor comes first, and has state of both kinds.
    let layout = reader.layout().clone();
    let whole: Vec<_> = pieces(&layout, [Kept::Slot(1)].into_iter()).collect();
    let mut state = Collect(Vec::new());
    reader.send(&mut whole.into_iter(), &mut state).unwrap();
    let (of_d, rest) = state.0.split_at(3 * 1000 * 8);
    assert_eq!(of_d, expected((BlockId(0), Kept::Slot(1)), &(0..3 * 1000 * 8)));
    assert!(rest.iter().all(|byte| *byte == 0));
}

/// Takes pieces one behind the other.
struct Collect(Vec<u8>);

impl Sink for Collect {
    fn take(&mut self, _: Piece, bytes: &[u8]) -> Result<(), SnapshotError> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn missing_optimizer_state_is_zero() {
    let (dir, head) = (TempDir::new().unwrap(), head(Reducer::Adam, 0));
    write(dir.path(), &head, PIECE_SIZE, false).unwrap();
    let mut reader = verified(dir.path()).unwrap();
    struct Empty;
    impl Sink for Empty {
        fn take(&mut self, (_, what): Piece, bytes: &[u8]) -> Result<(), SnapshotError> {
            assert_eq!(matches!(what, Kept::Slot(_)), bytes.is_empty(), "{what:?}");
            Ok(())
        }
    }
    let layout = reader.layout().clone();
    reader.send(&mut pieces(&layout, all_kinds(Reducer::Adam)), &mut Empty).unwrap();
}

#[test]
fn any_flipped_bit_and_any_missing_byte_is_refused_with_its_file() {
    let dir = TempDir::new().unwrap();
    write(dir.path(), &head(Reducer::Adam, 3), 50_000, false).unwrap();
    let mut random = fastrand::Rng::with_seed(11);
    for name in names(dir.path()) {
        let path = dir.path().join(&name);
        let good = fs::read(&path).unwrap();
        let some: Vec<usize> = (0..24).map(|_| random.usize(..good.len())).collect();
        for at in some.into_iter().chain([0, 7, 8, good.len() / 2, good.len() - 1]) {
            let mut bad = good.clone();
            bad[at] ^= 1 << random.u32(..8);
            fs::write(&path, &bad).unwrap();
            let error = verified(dir.path()).expect_err("a flipped bit").to_string();
            assert!(error.contains(&name), "{name} at {at}: {error}");
        }
        fs::write(&path, &good[..good.len() - 1]).unwrap();
        let error = verified(dir.path()).expect_err("a byte is missing").to_string();
        assert!(error.contains(&name), "{name}: {error}");
        fs::remove_file(&path).unwrap();
        let error = verified(dir.path()).expect_err("a file is missing").to_string();
        assert!(error.contains(&name), "{name}: {error}");
        fs::write(&path, &good).unwrap();
    }
    verified(dir.path()).unwrap();
}

#[test]
fn settings_that_a_snapshot_does_not_have_are_at_their_defaults() {
    let mut head = head(Reducer::Lion, 3);
    let before = head.controls().unwrap();
    for name in ["learning_rate_floor", "schedule", "warmup", "schedule_start", "clip_value", "loss_scale"] {
        assert!(head.settings.remove(name).is_some(), "{name}");
    }
    assert_eq!(head.controls().unwrap(), before);
}

#[test]
fn another_format_is_refused_by_its_number() {
    let dir = TempDir::new().unwrap();
    write(dir.path(), &head(Reducer::Sgd, 3), PIECE_SIZE, false).unwrap();
    let path = dir.path().join(MANIFEST);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("\"format\":1", "\"format\":2", 1)).unwrap();
    let error = Reader::open(dir.path(), None).expect_err("another format");
    assert!(matches!(error, SnapshotError::Format { expected: 1, got: 2, .. }), "{error}");
}

#[test]
fn a_snapshot_is_there_until_another_one_is_complete() {
    let dir = TempDir::new().unwrap();
    write(dir.path(), &head(Reducer::Adam, 3), 50_000, false).unwrap();
    let before = names(dir.path());
    let refused = write(dir.path(), &head(Reducer::Sgd, 3), PIECE_SIZE, false).expect_err("one is there");
    assert!(matches!(refused, SnapshotError::Exists(_)), "{refused}");
    let head = head(Reducer::Sgd, 3);
    let mut source = Numbers(head.layout(BLOCK).unwrap());
    let writer = Writer::create(dir.path(), head.clone(), PIECE_SIZE, true).unwrap();
    let mut left = 3;
    let stopped = writer.write(&mut source, &mut |_| {
        left -= 1;
        if left == 0 { Err(SnapshotError::Interrupted) } else { Ok(()) }
    });
    assert!(matches!(stopped, Err(SnapshotError::Interrupted)), "{stopped:?}");
    assert_eq!(names(dir.path()), before);
    verified(dir.path()).unwrap();
    write(dir.path(), &head, PIECE_SIZE, true).unwrap();
    assert_eq!(names(dir.path()), ["manifest.json", "model.safetensors", "optimizer.safetensors"]);
    assert_eq!(*verified(dir.path()).unwrap().head(), head);
}

#[test]
fn a_file_of_somebody_else_is_replaced_only_if_that_is_wanted() {
    for name in ["model.safetensors", "optimizer.safetensors", "model-00002-of-00003.safetensors", INDEX] {
        let dir = TempDir::new().unwrap();
        std::fs::write(dir.path().join(name), "mine").unwrap();
        std::fs::write(dir.path().join("model-card.md"), "mine").unwrap();
        let head = head(Reducer::Sgd, 3);
        let refused = write(dir.path(), &head, PIECE_SIZE, false).expect_err("there is a file");
        assert!(matches!(&refused, SnapshotError::Occupied(path) if path.ends_with(name)), "{refused}");
        assert_eq!(std::fs::read(dir.path().join(name)).unwrap(), b"mine");
        write(dir.path(), &head, PIECE_SIZE, true).unwrap();
        let expected = ["manifest.json", "model-card.md", "model.safetensors", "optimizer.safetensors"];
        assert_eq!(names(dir.path()), expected);
    }
}

#[test]
fn pieces_that_lack_or_come_out_of_order_make_no_snapshot() {
    struct Odd(ModelLayout, bool);
    impl Source for Odd {
        fn send(
            &mut self,
            wanted: &mut dyn Iterator<Item = Piece>,
            sink: &mut dyn Sink,
        ) -> Result<(), SnapshotError> {
            let mut all: Vec<Piece> = wanted.collect();
            if self.1 {
                all.swap(0, 1)
            } else {
                _ = all.remove(1);
            }
            Numbers(self.0.clone()).send(&mut all.into_iter(), sink)
        }
    }
    for swaps in [true, false] {
        let (dir, head) = (TempDir::new().unwrap(), head(Reducer::Adam, 3));
        let mut source = Odd(head.layout(BLOCK).unwrap(), swaps);
        let writer = Writer::create(&dir.path().join("new"), head, PIECE_SIZE, false).unwrap();
        let error = writer.write(&mut source, &mut |_| Ok(())).expect_err("not all in order");
        assert!(matches!(error, SnapshotError::Order { .. }), "{error}");
        assert!(names(dir.path()).is_empty());
    }
}

#[test]
fn a_snapshot_of_another_model_says_what_differs() {
    let head = head(Reducer::Adam, 3);
    head.check_model(&head.layout(4 * BLOCK).unwrap()).unwrap();
    let mut other = head.clone();
    other.tensors[1].2 = vec![20_012];
    let error = head.check_model(&other.layout(BLOCK).unwrap()).expect_err("another model").to_string();
    assert!(error.contains("\"a/b\" of F32 [20011]") && error.contains("\"a/b\" of F32 [20012]"), "{error}");
    other = head.clone();
    other.tensors.pop();
    other.record.steps = TensorSteps::uniform(other.tensors.len(), 0);
    let error = head.check_model(&other.layout(BLOCK).unwrap()).expect_err("another model").to_string();
    assert!(error.contains("expected is no more"), "{error}");
}
