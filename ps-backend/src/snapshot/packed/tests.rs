//! What several writers have written is read again, in other blocks too; what has not changed is not written again; and
//! what is damaged is refused by name.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use libmodelio::vocabulary::ids::{BlockId, Generation, Version};
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::wire::Lineage;

use super::shelf::staying;
use super::*;
use crate::partition::store::{Home, Limits, PartitionStore, kept_range};
use crate::snapshot::tests::{BLOCK, expected, head, sealed_anew};
use crate::snapshot::{Head, Piece, SnapshotError, kinds, pieces};

/// As fast as it goes.
fn fast<'a>() -> (&'a Pace, Stepping<'a>) {
    static PACE: LazyLock<Pace> = LazyLock::new(Pace::default);
    (&PACE, &|| false)
}

type Contents = BTreeMap<Piece, Vec<u8>>;

fn contents(head: &Head) -> Contents {
    let layout = head.layout(head.block_size).unwrap();
    let content = |piece: Piece| (piece, expected(piece, &kept_range(&layout, piece.0, piece.1)));
    pieces(&layout, kinds(&head.record)).map(content).collect()
}

/// Writes a snapshot by so many writers, and returns its name and the bytes of its new packs.
fn write(
    shelf: &Shelf,
    id: u64,
    head: &Head,
    contents: &Contents,
    writers: u32,
    before: &Places,
) -> (String, u64) {
    let (mut places, mut written) = (Places::default(), 0);
    for writer in 0..writers {
        let of_writer = contents.iter().filter(|((block, _), _)| block.0 % writers == writer);
        // Kind by kind, as copies have them.
        let mut of_writer: Vec<(Piece, &[u8])> =
            of_writer.map(|(piece, bytes)| (*piece, &bytes[..])).collect();
        of_writer.sort_by_key(|((block, kind), _)| (*kind, *block));
        let name = Shelf::pack_name(id, writer);
        let part =
            write_part(&**shelf.store(), &name, before, fast(), of_writer.into_iter(), &|_| Ok(())).unwrap();
        let text = serde_json::to_string(&part.places).unwrap();
        let read: Places = serde_json::from_str(&text).unwrap();
        assert!(read == part.places && places.add_all(&read));
        written += part.written;
    }
    (shelf.add((id, 0), head.clone(), id, (places, 0)).unwrap(), written)
}

fn check(shelf: &Shelf, name: &str, contents: &Contents, head: &Head) {
    let stored = head.layout(head.block_size).unwrap();
    for block_size in [BLOCK, 4 * BLOCK, 1 << 20] {
        let description = shelf.description(name).unwrap();
        assert_eq!(description.head, *head);
        let reader = PackedReader::new(shelf.store().clone(), description, Some(block_size)).unwrap();
        let layout: &ModelLayout = reader.layout();
        for (block, kind) in pieces(layout, kinds(&head.record)) {
            let mut bytes = Vec::new();
            reader.piece((block, kind), &mut bytes).unwrap();
            let range = kept_range(layout, block, kind);
            let mut wanted = vec![0; (range.end - range.start) as usize];
            let mut any = false;
            for ((of, what), content) in contents.iter().filter(|((_, what), _)| *what == kind) {
                let there = kept_range(&stored, *of, *what);
                let (from, to) = (there.start.max(range.start), there.end.min(range.end));
                if from < to {
                    any = true;
                    wanted[(from - range.start) as usize..(to - range.start) as usize].copy_from_slice(
                        &content[(from - there.start) as usize..(to - there.start) as usize],
                    );
                }
            }
            assert!(bytes == wanted || !any && bytes.is_empty(), "{kind:?} of {block} in {block_size}");
        }
        let mut read = 0;
        reader
            .verify(&mut |bytes| {
                read += bytes;
                Ok(())
            })
            .unwrap();
        assert_eq!(read, reader.len());
    }
}

fn shelf() -> (tempfile::TempDir, Shelf) {
    let dir = tempfile::tempdir().unwrap();
    let shelf = Shelf::open(dir.path().to_str().unwrap()).unwrap();
    (dir, shelf)
}

#[test]
fn a_snapshot_of_several_writers_is_read_in_blocks_of_any_size() {
    for (reducer, stepped) in [(Reducer::Adam, 0), (Reducer::Adam, 7), (Reducer::Sgd, 3)] {
        for writers in [1, 3] {
            let ((_dir, shelf), head) = (shelf(), head(reducer, stepped));
            let contents = contents(&head);
            let (name, written) = write(&shelf, 1, &head, &contents, writers, &Places::default());
            assert_eq!(written, contents.values().map(|bytes| bytes.len() as u64).sum::<u64>());
            check(&shelf, &name, &contents, &head);
        }
    }
}

#[test]
fn what_has_not_changed_is_not_written_again_and_stays_when_its_snapshot_goes() {
    let ((dir, shelf), mut head) = (shelf(), head(Reducer::Adam, 7));
    let mut contents = contents(&head);
    let (first, all) = write(&shelf, 1, &head, &contents, 2, &Places::default());
    let before = shelf.description(&first).unwrap().places;
    let piece = *contents.keys().nth(3).unwrap();
    contents.get_mut(&piece).unwrap()[5] ^= 1;
    head.record.version = Version(10);
    // By another number of writers.
    let (second, written) = write(&shelf, 2, &head, &contents, 3, &before);
    assert_eq!(written, contents[&piece].len() as u64);
    assert!(written < all / 4);
    assert_eq!(shelf.names().unwrap(), [first, second.clone()]);
    fs::write(dir.path().join("packs/0000000000000009-0-00000"), "of a snapshot that did not get to its end")
        .unwrap();
    shelf.collect(Keep { newest: 1, every: Duration::ZERO }, Generation(1)).unwrap();
    assert_eq!(shelf.names().unwrap(), *std::slice::from_ref(&second));
    check(&shelf, &second, &contents, &head);
    assert!(!dir.path().join("packs/0000000000000009-0-00000").exists());
}

/// All files below a directory.
fn files(dir: &Path) -> Vec<std::path::PathBuf> {
    let folders = ["packs", "snapshots"].into_iter();
    let mut files: Vec<_> = folders
        .flat_map(|folder| fs::read_dir(dir.join(folder)).unwrap().map(|entry| entry.unwrap().path()))
        .collect();
    files.sort();
    files
}

#[test]
fn a_flipped_bit_a_short_pack_and_a_lost_one_are_refused_by_name() {
    let ((dir, shelf), head) = (shelf(), head(Reducer::Adam, 7));
    let (name, _) = write(&shelf, 1, &head, &contents(&head), 2, &Places::default());
    let verify = || -> Result<(), SnapshotError> {
        let reader = PackedReader::new(shelf.store().clone(), shelf.description(&name)?, None)?;
        reader.verify(&mut |_| Ok(()))
    };
    verify().unwrap();
    for path in files(dir.path()) {
        let bytes = fs::read(&path).unwrap();
        for at in [0, bytes.len() / 2, bytes.len() - 1] {
            let mut flipped = bytes.clone();
            flipped[at] ^= 4;
            fs::write(&path, &flipped).unwrap();
            let why = verify().unwrap_err().to_string();
            assert!(why.contains(path.file_name().unwrap().to_str().unwrap()), "{why}");
        }
        fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        verify().unwrap_err();
        fs::remove_file(&path).unwrap();
        let why = verify().unwrap_err().to_string();
        assert!(
            why.contains("there is no") && why.contains(path.file_name().unwrap().to_str().unwrap()),
            "{why}"
        );
        fs::write(&path, &bytes).unwrap();
        verify().unwrap();
    }
}

/// A partition of these blocks that is about to be filled.
fn partition(head: &Head, blocks: &[BlockId]) -> PartitionStore {
    let (layout, optimizer) = (head.layout(head.block_size).unwrap(), head.record.optimizer);
    let partition = layout.partition(blocks).unwrap();
    let store = PartitionStore::new(partition, optimizer, Limits::default(), Home::default()).unwrap();
    store.begin_at(head.record.version, optimizer).unwrap();
    store
}

#[test]
fn partitions_are_filled_with_their_blocks_of_a_snapshot() {
    for (reducer, stepped) in [(Reducer::Adam, 0), (Reducer::Adam, 7), (Reducer::Sgd, 3)] {
        let ((_dir, shelf), head) = (shelf(), head(reducer, stepped));
        let contents = contents(&head);
        let (name, _) = write(&shelf, 1, &head, &contents, 2, &Places::default());
        let reader =
            PackedReader::new(shelf.store().clone(), shelf.description(&name).unwrap(), None).unwrap();
        for of in 0..3 {
            let blocks: Vec<BlockId> = (of..reader.layout().blocks()).step_by(3).map(BlockId).collect();
            let (store, there) = (partition(&head, &blocks), AtomicU64::new(0));
            let told = |bytes| {
                there.fetch_add(bytes, Ordering::Relaxed);
                Ok(())
            };
            Filling::of(&reader, &store, &told).run(reducer).unwrap();
            store.finish_loading().unwrap();
            let kept = store.keep().unwrap();
            assert_eq!(kept.version(), head.record.version);
            let ours = contents.iter().filter(|((block, _), _)| blocks.contains(block));
            let mut all = 0;
            for (&(block, what), bytes) in ours {
                let local = store.partition().local(block).unwrap();
                assert!(kept.bytes(local, what).unwrap()[..] == bytes[..], "{what:?} of {block}");
                all += bytes.len() as u64;
            }
            assert_eq!(there.into_inner(), all);
        }
        let all: Vec<BlockId> = (0..reader.layout().blocks()).map(BlockId).collect();
        let interrupted = |_| Err(SnapshotError::Interrupted);
        let outcome = Filling::of(&reader, &partition(&head, &all), &interrupted).run(reducer);
        assert!(matches!(outcome, Err(SnapshotError::Interrupted)), "{outcome:?}");
        let other = Head { block_size: 2 * BLOCK, ..head.clone() };
        let outcome = Filling::of(&reader, &partition(&other, &[BlockId(0)]), &told_nothing).run(reducer);
        assert!(outcome.unwrap_err().to_string().contains("its blocks have"));
    }
}

fn told_nothing(_: u64) -> Result<(), SnapshotError> {
    Ok(())
}

#[test]
fn a_partition_is_not_filled_with_a_flipped_bit() {
    let ((dir, shelf), head) = (shelf(), head(Reducer::Adam, 7));
    let (name, _) = write(&shelf, 1, &head, &contents(&head), 1, &Places::default());
    let path = files(dir.path()).into_iter().find(|path| path.parent().unwrap().ends_with("packs")).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&path, &bytes).unwrap();
    let reader = PackedReader::new(shelf.store().clone(), shelf.description(&name).unwrap(), None).unwrap();
    let all: Vec<BlockId> = (0..reader.layout().blocks()).map(BlockId).collect();
    let store = partition(&head, &all);
    let why = Filling::of(&reader, &store, &told_nothing).run(Reducer::Adam).unwrap_err();
    assert!(why.is_damage() && why.to_string().contains("of block"), "{why}");
    store.finish_loading().unwrap_err();
}

#[test]
fn a_snapshot_of_a_newer_format_is_refused_by_its_number_and_is_not_damaged() {
    let ((dir, shelf), head) = (shelf(), head(Reducer::Adam, 7));
    let (name, _) = write(&shelf, 1, &head, &contents(&head), 1, &Places::default());
    let path = dir.path().join(format!("snapshots/{name}.json"));
    let text = fs::read_to_string(&path).unwrap().replacen("\"format\":2", "\"format\":3", 1);
    fs::write(&path, &text).unwrap();
    assert!(shelf.description(&name).unwrap_err().is_damage(), "a flipped bit");
    fs::write(&path, sealed_anew(&text)).unwrap();
    let why = shelf.description(&name).unwrap_err();
    assert!(matches!(why, SnapshotError::Format { expected: 2, got: 3, .. }), "{why}");
    // A newer gradfs can go on from it.
    assert!(!why.is_damage());
}

#[test]
fn a_snapshot_with_a_part_missing_is_none() {
    let ((_dir, shelf), head) = (shelf(), head(Reducer::Adam, 7));
    let contents = contents(&head);
    let some = contents.iter().filter(|((block, _), _)| *block != BlockId(1));
    let some = some.map(|(piece, bytes)| (*piece, &bytes[..]));
    let part =
        write_part(&**shelf.store(), "packs/x", &Places::default(), fast(), some, &|_| Ok(())).unwrap();
    let why = shelf.add((1, 0), head, 0, (part.places, 0)).unwrap_err().to_string();
    assert!(why.contains("of block 1"), "{why}");
    assert_eq!(shelf.names().unwrap(), [""; 0]);
}

#[test]
fn a_store_that_was_cleared_takes_no_late_snapshot_and_another_job() {
    let ((_dir, shelf), head) = (shelf(), head(Reducer::Adam, 7));
    let (model, other) = ((Generation(1), Lineage::default()), (Generation(2), Lineage::default()));
    shelf.claim(("m", model.0, &model.1), false).unwrap();
    assert_eq!(shelf.own_claim(model.0).unwrap(), 1);
    write(&shelf, 1, &head, &contents(&head), 2, &Places::default());
    assert!(shelf.clear(other.0).is_err() && shelf.names().unwrap().len() == 1, "it is another job's");
    assert_eq!((shelf.clear(model.0).unwrap(), shelf.names().unwrap().len()), (1, 0));
    let why = shelf.own_claim(model.0).unwrap_err().to_string();
    assert!(why.contains("were removed"), "{why}");
    shelf.claim(("other", other.0, &other.1), false).unwrap();
    assert!(
        shelf.claim(("m", Generation(3), &model.1), true).is_err(),
        "a job of another name takes nothing over"
    );
}

#[test]
fn snapshots_come_behind_those_whose_claims_were_lost() {
    let ((dir, shelf), head) = (shelf(), head(Reducer::Adam, 7));
    let life = |generation| {
        ("m", Generation(generation), Lineage { restored: generation as u32, ..Lineage::default() })
    };
    for generation in 1..4 {
        let (model, generation, lineage) = life(generation);
        shelf.claim((model, generation, &lineage), true).unwrap();
    }
    let add = |snapshot, claim| {
        let contents = contents(&head);
        let all = contents.iter().map(|(piece, bytes)| (*piece, &bytes[..]));
        let pack = Shelf::pack_name(snapshot, 0);
        let part = write_part(&**shelf.store(), &pack, &Places::default(), fast(), all, &|_| Ok(())).unwrap();
        shelf.add((snapshot, claim), head.clone(), 0, (part.places, 0)).unwrap()
    };
    let before = add(1, shelf.own_claim(Generation(3)).unwrap());
    fs::remove_dir_all(dir.path().join("claims")).unwrap();
    let (model, generation, lineage) = life(4);
    shelf.claim((model, generation, &lineage), true).unwrap();
    let after = add(2, shelf.own_claim(generation).unwrap());
    assert_eq!(shelf.names().unwrap(), [before, after]);
}

#[test]
fn a_writer_that_fails_or_is_interrupted_ends_the_others() {
    let ((dir, shelf), head) = (shelf(), head(Reducer::Adam, 7));
    let contents = contents(&head);
    let all = || contents.iter().map(|(piece, bytes)| (*piece, &bytes[..]));
    let none = Places::default();
    let interrupted =
        write_part(&**shelf.store(), "packs/x", &none, fast(), all(), &|_| Err(SnapshotError::Interrupted));
    assert!(matches!(interrupted, Err(SnapshotError::Interrupted)));
    // Many packs, and a store that takes none.
    fs::remove_dir_all(dir.path()).unwrap();
    fs::write(dir.path(), "no directory").unwrap();
    let long = vec![7; PACK_BYTES / 2];
    let many = (0..12).map(|block| ((BlockId(block), libmodelio::wire::DataKind::Weights), &long[..]));
    let failed = write_part(&**shelf.store(), "packs/x", &none, fast(), many, &|_| Ok(()));
    assert!(matches!(failed, Err(SnapshotError::Store(_))), "{failed:?}");
    fs::remove_file(dir.path()).unwrap();
    fs::create_dir(dir.path()).unwrap();
}

#[test]
fn the_newest_snapshots_stay_and_one_of_each_time() {
    let kept = |taken: &[u64], newest, every| -> Vec<u64> {
        let stays = staying(taken, Keep { newest, every: Duration::from_secs(every) });
        taken.iter().zip(stays).filter(|(_, stays)| *stays).map(|(taken, _)| *taken).collect()
    };
    let taken = [10, 20, 65, 70, 130, 131];
    assert_eq!(kept(&taken, 2, 0), [130, 131]);
    assert_eq!(kept(&taken, 0, 0), [131]);
    assert_eq!(kept(&taken, 1, 60), [10, 65, 130, 131]);
    assert_eq!(kept(&taken, 9, 60), taken);
    // A clock that was set back.
    assert_eq!(kept(&[130, 10, 131], 1, 60), [130, 10, 131]);
    assert_eq!(kept(&[], 1, 60), [0; 0]);
}
