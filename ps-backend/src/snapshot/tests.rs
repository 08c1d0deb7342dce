//! The format of a directory: written data is read again, whatever the sizes, and altered data is refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::dtype::DType;
use libmodelio::vocabulary::groups::{Groups, Overrides, TensorReducers};
use libmodelio::vocabulary::ids::{Incarnation, Step, Version};
use libmodelio::vocabulary::meta::Meta;
use libmodelio::vocabulary::tensor_steps::TensorSteps;
use libmodelio::wire::LearnerRecord;
use tempfile::TempDir;

use super::directory::watch;
use super::files::{INDEX, is_of_snapshot};
use super::*;

pub(super) const BLOCK: u32 = 64 << 10;

/// Types of all kinds, an empty tensor among them, and blocks that hold several of them.
pub(super) fn head(optimizer: Reducer, stepped: u64) -> Head {
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
        meta: Meta::try_from(BTreeMap::from([("step".into(), "9".into())])).unwrap(),
    };
    let controls =
        Controls::default().with_all([("reducer", optimizer.name()), ("learning_rate", "0.1")]).unwrap();
    Head::new("m", &layout, BTreeMap::from([("format".into(), "pt".into())]), &controls, record)
}

/// Bytes that tell where they are from.
pub(super) fn expected((_, what): Piece, range: &std::ops::Range<u64>) -> Vec<u8> {
    let kind = match what {
        DataKind::Weights => 1,
        DataKind::Masters => 2,
        DataKind::Slot(slot) => 3 + u64::from(slot),
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

/// A directory with a snapshot.
fn written(head: &Head, piece_size: u64) -> TempDir {
    let dir = TempDir::new().unwrap();
    write(dir.path(), head, piece_size, false).unwrap();
    dir
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
        if what == DataKind::Masters {
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
    let whole: Vec<_> = pieces(&layout, [DataKind::Slot(1)].into_iter()).collect();
    let mut state = Collect(Vec::new());
    reader.send(&mut whole.into_iter(), &mut state).unwrap();
    let (of_d, rest) = state.0.split_at(3 * 1000 * 8);
    assert_eq!(of_d, expected((BlockId(0), DataKind::Slot(1)), &(0..3 * 1000 * 8)));
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
    let head = head(Reducer::Adam, 0);
    let dir = written(&head, PIECE_SIZE);
    let mut reader = verified(dir.path()).unwrap();
    struct Empty;
    impl Sink for Empty {
        fn take(&mut self, (_, what): Piece, bytes: &[u8]) -> Result<(), SnapshotError> {
            assert_eq!(matches!(what, DataKind::Slot(_)), bytes.is_empty(), "{what:?}");
            Ok(())
        }
    }
    let layout = reader.layout().clone();
    reader.send(&mut pieces(&layout, all_kinds(Reducer::Adam)), &mut Empty).unwrap();
}

#[test]
fn any_flipped_bit_and_any_missing_byte_is_refused_with_its_file() {
    let dir = written(&head(Reducer::Adam, 3), 50_000);
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

/// A description with the checksum of its text.
pub(super) fn sealed_anew(text: &str) -> String {
    let (body, _) = text.rsplit_once(",\n\"checksum\"").unwrap();
    let crc = libmodelio::bytes::crc32c::crc32c(body.as_bytes());
    format!("{body},\n\"checksum\": \"{crc:08x}\"}}\n")
}

#[test]
fn another_format_is_refused_by_its_number() {
    let dir = written(&head(Reducer::Sgd, 3), PIECE_SIZE);
    let path = dir.path().join(MANIFEST);
    let text = fs::read_to_string(&path).unwrap().replacen("\"format\":1", "\"format\":2", 1);
    fs::write(&path, &text).unwrap();
    assert!(Reader::open(dir.path(), None).expect_err("a flipped bit").is_damage());
    fs::write(&path, sealed_anew(&text)).unwrap();
    let error = Reader::open(dir.path(), None).expect_err("another format");
    assert!(matches!(error, SnapshotError::Format { expected: 1, got: 2, .. }), "{error}");
}

#[test]
fn a_snapshot_is_there_until_another_one_is_complete() {
    let dir = written(&head(Reducer::Adam, 3), 50_000);
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

/// What a command has left that was killed after any change of the directory, is a whole snapshot or none.
#[test]
fn a_save_that_is_killed_anywhere_leaves_the_old_snapshot_or_the_new_one() {
    // Nothing was there; the old one has other files, and the same ones; a killed command has left it half in place.
    for (before, after) in
        [(None, 50_000), (Some(50_000), PIECE_SIZE), (Some(PIECE_SIZE), PIECE_SIZE), (Some(1), 50_000)]
    {
        let dir = TempDir::new().unwrap();
        let (old, new) = (head(Reducer::Adam, 3), head(Reducer::Sgd, 5));
        if let Some(piece_size) = before {
            write(dir.path(), &old, piece_size, false).unwrap();
        }
        let (path, expected) = (dir.path().to_owned(), new.clone());
        let (mut is_new, mut is_durable, mut unsynced) = (false, true, 0);
        watch(Box::new(move |what| {
            match what {
                "create" => (is_durable, unsynced) = (false, unsynced + 1),
                "synced" => unsynced -= 1,
                "sync" => is_durable = true,
                "switch" => {
                    assert!(is_durable && unsynced == 0, "all that the manifest names is on the disk");
                    (is_new, is_durable) = (true, false);
                }
                "place" | "remove" => {
                    assert!(is_durable || !is_new, "the manifest is on the disk before others go")
                }
                _ => unreachable!("{what}"),
            }
            let found = verified(&path).map(|reader| reader.head().clone());
            match (is_new, before) {
                (true, _) => assert_eq!(found.unwrap(), expected, "{what}"),
                (false, Some(_)) => assert_eq!(found.unwrap(), old, "{what}"),
                (false, None) => assert!(matches!(found, Err(SnapshotError::NoManifest(_))), "{what}"),
            }
        }));
        write(dir.path(), &new, after, true).unwrap();
        watch(Box::new(|_| ()));
        assert!(
            names(dir.path()).iter().all(|name| name == MANIFEST || is_of_snapshot(name)),
            "{:?}",
            names(dir.path())
        );
    }
}

/// Copies the directory after each change; each copy is one of a command that was killed there.
#[test]
fn a_save_goes_on_where_another_was_killed() {
    let (dir, copies) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    write(dir.path(), &head(Reducer::Adam, 3), 50_000, false).unwrap();
    let (from, to) = (dir.path().to_owned(), copies.path().to_owned());
    let mut count = 0;
    watch(Box::new(move |_| {
        count += 1;
        let copy = to.join(format!("{count}"));
        fs::create_dir(&copy).unwrap();
        for name in names(&from) {
            fs::copy(from.join(&name), copy.join(name)).unwrap();
        }
    }));
    write(dir.path(), &head(Reducer::Sgd, 3), PIECE_SIZE, true).unwrap();
    watch(Box::new(|_| ()));
    let new = head(Reducer::Momentum, 4);
    for copy in names(copies.path()) {
        let copy = copies.path().join(copy);
        // One that fails leaves the snapshot, and nothing of the command before.
        let stopped = Writer::create(&copy, new.clone(), PIECE_SIZE, true).unwrap();
        let before = verified(&copy).unwrap().head().clone();
        drop(stopped);
        assert_eq!(*verified(&copy).unwrap().head(), before);
        write(&copy, &new, PIECE_SIZE, true).unwrap();
        assert_eq!(names(&copy), ["manifest.json", "model.safetensors", "optimizer.safetensors"]);
        assert_eq!(*verified(&copy).unwrap().head(), new);
    }
}

#[test]
fn two_saves_do_not_write_into_one_directory_at_a_time() {
    let parent = TempDir::new().unwrap();
    let (dir, head) = (parent.path().join("new"), head(Reducer::Adam, 3));
    for replaces in [false, true] {
        let first = Writer::create(&dir, head.clone(), PIECE_SIZE, replaces).unwrap();
        let second = write(&dir, &head, PIECE_SIZE, replaces).expect_err("another one writes");
        assert!(matches!(&second, SnapshotError::Busy(at) if *at == dir), "{second}");
        let mut source = Numbers(head.layout(BLOCK).unwrap());
        first.write(&mut source, &mut |_| Ok(())).unwrap();
        verified(&dir).unwrap();
    }
}

#[test]
fn a_snapshot_is_read_to_its_end_while_another_one_replaces_it() {
    let old = head(Reducer::Adam, 3);
    let dir = written(&old, PIECE_SIZE);
    let mut reader = Reader::open(dir.path(), None).unwrap();
    write(dir.path(), &head(Reducer::Sgd, 3), PIECE_SIZE, true).unwrap();
    reader.verify(&mut |_| Ok(())).unwrap();
    let layout = reader.layout().clone();
    reader.send(&mut pieces(&layout, kinds(&old.record)), &mut Compare(&layout, 0)).unwrap();
}

#[test]
fn a_save_follows_no_link_and_waits_for_no_pipe() {
    let (dir, victim, head) = (TempDir::new().unwrap(), TempDir::new().unwrap(), head(Reducer::Adam, 3));
    let precious = victim.path().join("precious");
    fs::write(&precious, "mine").unwrap();
    for name in ["model.safetensors", "optimizer.safetensors", "manifest.json.0123456789abcdef"] {
        std::os::unix::fs::symlink(&precious, dir.path().join(name)).unwrap();
    }
    nix::unistd::mkfifo(&dir.path().join(MANIFEST), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let error = Reader::open(dir.path(), None).expect_err("a pipe is no manifest").to_string();
    assert!(error.contains("no regular file"), "{error}");
    write(dir.path(), &head, PIECE_SIZE, true).unwrap();
    verified(dir.path()).unwrap();
    assert_eq!(fs::read(&precious).unwrap(), b"mine");
    assert_eq!(names(dir.path()), ["manifest.json", "model.safetensors", "optimizer.safetensors"]);
    // A directory makes way for nobody.
    fs::remove_file(dir.path().join("optimizer.safetensors")).unwrap();
    fs::create_dir(dir.path().join("optimizer.safetensors")).unwrap();
    let refused = write(dir.path(), &head, PIECE_SIZE, true).expect_err("a directory is there");
    assert!(matches!(refused, SnapshotError::Nested(_)), "{refused}");
}

/// A snapshot of the release before: its files have no other names, and its manifest says nothing of them.
#[test]
fn a_snapshot_without_an_identity_is_read_and_replaced() {
    let head = head(Reducer::Adam, 3);
    let dir = written(&head, PIECE_SIZE);
    let path = dir.path().join(MANIFEST);
    let text = fs::read_to_string(&path).unwrap();
    let (body, _) = text.rsplit_once(",\n\"checksum\"").unwrap();
    let (start, id) = body.split_once(",\"id\":\"").unwrap();
    let body = format!("{start}{}", &id[17..]);
    fs::write(&path, sealed_anew(&format!("{body},\n\"checksum\""))).unwrap();
    assert_eq!(*verified(dir.path()).unwrap().head(), head);
    write(dir.path(), &head, PIECE_SIZE, true).unwrap();
    verified(dir.path()).unwrap();
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
