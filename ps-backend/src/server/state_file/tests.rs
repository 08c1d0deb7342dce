//! What a file has after each kind of change, and after each kind of damage.

use libmodelio::vocabulary::ids::{Epoch, ShardId};
use libmodelio::wire::ShardRecord;

use super::*;

fn shard(number: u16, living: bool) -> KeptShard {
    let (address, host, rdma) = (format!("h:{number}"), String::new(), String::new());
    let record = ShardRecord { shard: ShardId(number), address, host, draining: false, rdma };
    KeptShard { record, holds: true, living, announced: true }
}

fn model(record: &[u8]) -> (KeptModel, Arc<[u8]>) {
    let (generation, epoch, owners) = (Generation(7), Epoch(1), [ShardId(1)].into());
    (KeptModel { generation, epoch, ready: true, owners, restorer: None, len: record.len() }, record.into())
}

fn same(a: &Kept, b: &Kept) -> bool {
    (&a.shards, &a.models, &a.deleted) == (&b.shards, &b.models, &b.deleted)
}

#[test]
fn a_state_file_has_the_last_table_and_stays_small() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let mut table = Kept::default();
    let mut state = StateFile::open(&path).unwrap();
    assert!(same(state.kept(), &table));
    let held = StateFile::open(&path).err().unwrap();
    assert!(held.to_string().contains("another registry has it"), "{held}");
    for round in 0..200u16 {
        table.shards = vec![shard(1, true), shard(2, round % 2 == 0)];
        table.models.insert("m".into(), model(&vec![round as u8; 100_000]));
        table.models.insert(format!("m{round}"), model(&[1]));
        if round > 0 {
            table.models.remove(&format!("m{}", round - 1));
            table.deleted.push((format!("m{}", round - 1), Generation(7)));
        }
        state.keep(table.clone());
    }
    let len = std::fs::metadata(&path).unwrap().len();
    assert!(len < 4_000_000, "{len} bytes, of 20 MB that were written");
    for _ in 0..2 {
        drop(state);
        state = StateFile::open(&path).unwrap();
        assert!(same(state.kept(), &table));
    }
}

#[test]
fn a_state_file_that_was_cut_off_has_what_came_before() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let mut state = StateFile::open(&path).unwrap();
    let mut table = Kept::default();
    table.models.insert("first".into(), model(&[1; 50]));
    state.keep(table.clone());
    let whole = std::fs::read(&path).unwrap();
    let mut more = table.clone();
    more.models.insert("second".into(), model(&[2; 50]));
    state.keep(more);
    drop(state);
    let all = std::fs::read(&path).unwrap();
    for len in whole.len()..all.len() {
        std::fs::write(&path, &all[..len]).unwrap();
        assert!(same(StateFile::open(&path).unwrap().kept(), &table), "{len}");
    }
    let mut changed = all.clone();
    *changed.last_mut().unwrap() ^= 1;
    std::fs::write(&path, changed).unwrap();
    assert!(same(StateFile::open(&path).unwrap().kept(), &table));
    std::fs::write(&path, "name = \"x\"\n").unwrap();
    let other = StateFile::open(&path).err().unwrap();
    assert!(other.to_string().contains("no state of a registry"), "{other}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "name = \"x\"\n", "it is left as it is");
}
