//! Leases, numbers, compare-and-swap, limits; and any sequence of requests against a plain model of the
//! table. The tests of a table that begins anew are in `anew`.

mod anew;
mod calls;
mod in_etcd;
mod lost;
pub(in crate::registry) mod tested;

use crate::vocabulary::block_map::BlockMap;
use crate::vocabulary::controls::Controls;
use crate::vocabulary::layout::{DType, MIN_BLOCK_SIZE, ModelLayout};
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use tested::{Tested, on_each};

const SECOND: Duration = Duration::from_secs(1);

fn shard(address: &str, number: u16) -> ShardRecord {
    ShardRecord {
        shard: ShardId(number),
        address: address.to_owned(),
        host: "h".to_owned(),
        draining: false,
        rdma: String::new(),
    }
}

fn announce(core: &mut Tested, address: &str, number: u16, now: Now) -> Result<ShardId, Refusal> {
    announce_as(core, address, number, false, now)
}

fn announce_as(
    core: &mut Tested,
    address: &str,
    number: u16,
    bound: bool,
    now: Now,
) -> Result<ShardId, Refusal> {
    let request = RegistryRequest::Announce { record: shard(address, number), lease_ms: 1000, bound };
    match core.handle(&request, &[], now)?.message {
        RegistryAnswer::Shard(number) => Ok(number),
        other => panic!("{other:?}"),
    }
}

fn living(core: &mut Tested, now: Now) -> Vec<u16> {
    match core.handle(&RegistryRequest::Shards, &[], now).unwrap().message {
        RegistryAnswer::Shards(shards) => shards.iter().map(|record| record.shard.0).collect(),
        other => panic!("{other:?}"),
    }
}

fn record(name: &str, generation: u64, epoch: u64) -> ModelRecord {
    let tensors = vec![("w".to_owned(), DType::F32, vec![100_000])];
    let layout = ModelLayout::new(tensors, MIN_BLOCK_SIZE).unwrap();
    let owners = vec![ShardId(1); layout.blocks() as usize];
    let map = BlockMap::from_owners(Epoch(epoch), owners).unwrap();
    let metadata = Default::default();
    ModelRecord::new(name, Generation(generation), &layout, metadata, &map, ShardId(1), Default::default())
        .unwrap()
}

fn put(core: &mut Tested, record: &ModelRecord, replaces: Option<u64>) -> Result<(), Refusal> {
    let request = RegistryRequest::Put { replaces: replaces.map(Epoch) };
    core.handle(&request, &record.encode().unwrap(), Now::ZERO).map(|_| ())
}

fn get(core: &mut Tested, name: &str) -> Result<ModelRecord, Refusal> {
    let answer = core.handle(&RegistryRequest::Model { name: name.to_owned() }, &[], Now::ZERO)?;
    assert_eq!(answer.message, RegistryAnswer::Model);
    Ok(ModelRecord::decode(&answer.payload.unwrap()).unwrap())
}

fn delete(core: &mut Tested, name: &str, generation: u64) -> Result<(), Refusal> {
    let request = RegistryRequest::Delete { name: name.to_owned(), generation: Generation(generation) };
    core.handle(&request, &[], Now::ZERO).map(|_| ())
}

/// With shard 1.
fn core(table: &dyn Fn() -> Tested) -> Tested {
    let mut core = table();
    assert_eq!(announce(&mut core, "a:1", 0, Now::ZERO), Ok(ShardId(1)));
    core
}

#[test]
fn leases_end_and_numbers_stay() {
    on_each(|table| {
        let mut core = core(table);
        assert_eq!(announce(&mut core, "b:1", 0, Now::ZERO), Ok(ShardId(2)));
        assert_eq!(announce(&mut core, "a:1", 1, SECOND / 2), Ok(ShardId(1)));
        assert_eq!(living(&mut core, SECOND - Duration::from_millis(1)), [1, 2]);
        assert_eq!(living(&mut core, SECOND), [1], "the other one's lease is over");
        assert_eq!(living(&mut core, SECOND * 2), [0; 0]);
        assert_eq!(announce(&mut core, "b:1", 0, SECOND * 9), Ok(ShardId(2)));
        assert_eq!(announce(&mut core, "c:1", 2, SECOND * 9), Ok(ShardId(3)), "2 is another's");
        assert_eq!(announce(&mut core, "d:1", 77, SECOND * 9), Ok(ShardId(77)), "of an earlier registry");
        assert_eq!(living(&mut core, SECOND * 9), [2, 3, 77]);
    });
}

#[test]
fn a_crowd_of_announcements_leaves_places_for_shards() {
    let mut core = RegistryCore::new();
    let request = RegistryRequest::Announce { record: shard("a:1", 0), lease_ms: 1000, bound: false };
    core.handle(&request, &[], Now::ZERO).unwrap();
    let request = RegistryRequest::Put { replaces: None };
    core.handle(&request, &record("m", 1, 1).encode().unwrap(), Now::ZERO).unwrap();
    let from = |host| Some(IpAddr::from([127, 0, 0, host]));
    let mut come = |from, address: String, at: u32| {
        let lease_ms = MAX_LEASE.as_millis() as u32;
        let request = RegistryRequest::Announce { record: shard(&address, 0), lease_ms, bound: false };
        core.handle_from(from, &request, &[], SECOND * at).unwrap();
        core.announcements().map(|(record, _)| record.address.clone()).collect::<BTreeSet<_>>()
    };
    come(from(2), "real:1".into(), 0);
    for at in 0..2 * MAX_SHARDS {
        come(from(1), format!("invented:{}", at + 1), 1);
    }
    // One of another address than the crowd keeps its place. The crowd's own are used by whoever comes.
    let there = come(from(1), "new:1".into(), 2);
    assert!(["a:1", "real:1", "new:1"].into_iter().all(|one| there.contains(one)));
    for at in 0..MAX_SHARDS as u32 - 10 {
        come(from(1), "new:1".into(), 3);
        come(from(1), format!("invented:{}", 10_000 + at), 3);
    }
    let there = come(from(1), "late:1".into(), 4);
    let known = ["a:1", "real:1", "new:1", "late:1"];
    assert!(known.into_iter().all(|one| there.contains(one)) && there.len() == MAX_SHARDS);
}

#[test]
fn shards_withdraw_and_drain() {
    on_each(|table| {
        let mut core = core(table);
        core.handle(&RegistryRequest::Drain { shard: ShardId(1) }, &[], Now::ZERO).unwrap();
        announce(&mut core, "a:1", 1, Now::ZERO).unwrap();
        assert!(core.living(Now::ZERO).iter().all(|record| record.draining), "announcing does not end it");
        let unknown = core.handle(&RegistryRequest::Drain { shard: ShardId(9) }, &[], Now::ZERO);
        assert_eq!(unknown, Err(Refusal::Other("there is no shard 9".to_owned())));
        for _ in 0..2 {
            core.handle(&RegistryRequest::Undrain { shard: ShardId(1) }, &[], Now::ZERO).unwrap();
            announce(&mut core, "a:1", 1, Now::ZERO).unwrap();
            assert!(core.living(Now::ZERO).iter().all(|record| !record.draining), "it is taken back");
        }
        let unknown = core.handle(&RegistryRequest::Undrain { shard: ShardId(9) }, &[], Now::ZERO);
        assert_eq!(unknown, Err(Refusal::Other("there is no shard 9".to_owned())));
        core.handle(&RegistryRequest::Drain { shard: ShardId(1) }, &[], Now::ZERO).unwrap();
        for _ in 0..2 {
            core.handle(&RegistryRequest::Withdraw { shard: ShardId(1) }, &[], Now::ZERO).unwrap();
            assert_eq!(living(&mut core, Now::ZERO), [0; 0]);
        }
        announce(&mut core, "a:1", 1, Now::ZERO).unwrap();
        assert!(core.living(Now::ZERO).iter().all(|record| !record.draining), "it has come anew");
    });
}

#[test]
fn the_table_of_shards_has_an_end() {
    let mut core = Tested::Here(RegistryCore::new());
    for i in 1..=MAX_SHARDS as u16 {
        assert_eq!(announce(&mut core, &format!("h:{i}"), 0, Now::ZERO), Ok(ShardId(i)));
    }
    put(&mut core, &record("m", 1, 1), None).unwrap();
    // Shard 1 owns blocks and keeps its number. Another one gives way.
    assert_eq!(announce(&mut core, "new:1", 0, Now::ZERO), Ok(ShardId(2)));
    assert_eq!(living(&mut core, Now::ZERO).len(), MAX_SHARDS);
    // All leases are over.
    assert_eq!(announce(&mut core, "new:2", 0, SECOND), Ok(ShardId(2)));
    assert_eq!(announce(&mut core, "h:1", 0, SECOND), Ok(ShardId(1)));
    let owners = (1..=MAX_SHARDS as u16).map(ShardId).collect::<Vec<_>>();
    let map = BlockMap::from_owners(Epoch(1), owners).unwrap();
    let layout = ModelLayout::blank((MAX_SHARDS as u64) << 16, DType::F32, 1 << 16).unwrap();
    let all = ModelRecord::new(
        "all",
        Generation(2),
        &layout,
        Default::default(),
        &map,
        ShardId(1),
        Default::default(),
    );
    put(&mut core, &all.unwrap(), None).unwrap();
    let full = announce(&mut core, "new:3", 0, SECOND);
    assert_eq!(
        full,
        Err(Refusal::Other("there are 1024 shards already, the most that a registry knows".to_owned()))
    );
}

#[test]
fn shards_that_are_none_are_refused() {
    on_each(|table| {
        let mut core = table();
        for address in ["", "host", ":1", "host:0", "host:99999", "host:http"] {
            let refused = announce(&mut core, address, 0, Now::ZERO).unwrap_err();
            assert_eq!(refused, Refusal::Other(format!("shard address {address:?}, expected host:port")));
        }
        assert!(announce(&mut core, &format!("{}:1", "x".repeat(300)), 0, Now::ZERO).is_err());
        for lease_ms in [0, 3_600_001] {
            let request = RegistryRequest::Announce { record: shard("a:1", 0), lease_ms, bound: false };
            let refused = core.handle(&request, &[], Now::ZERO).unwrap_err();
            assert_eq!(refused, Refusal::Other(format!("a lease of {lease_ms} ms, expected 1 to 3600000")));
        }
        assert_eq!(living(&mut core, Now::ZERO), [0; 0]);
    });
}

#[test]
fn a_put_is_a_compare_and_swap() {
    on_each(|table| {
        let mut core = core(table);
        let first = record("m", 7, 1);
        assert_eq!(put(&mut core, &first, Some(1)), Err(Refusal::NoModel("m".to_owned())));
        assert_eq!(put(&mut core, &first, None), Ok(()));
        assert_eq!(put(&mut core, &first, None), Ok(()), "repeated");
        assert_eq!(put(&mut core, &record("m", 8, 1), None), Err(Refusal::Exists("m".to_owned())));

        let ready = ModelRecord { ready: true, ..first.clone() };
        assert_eq!(put(&mut core, &ready, Some(1)), Ok(()));
        assert!(
            matches!(put(&mut core, &record("m", 7, 2), Some(1)), Err(Refusal::Other(_))),
            "not ready again"
        );
        let next = ModelRecord { ready: true, ..record("m", 7, 2) };
        assert_eq!(put(&mut core, &next, Some(1)), Ok(()));
        assert_eq!(put(&mut core, &next, Some(1)), Ok(()), "repeated");
        let stale = Refusal::Epoch { expected: Epoch(2), got: Epoch(1) };
        assert_eq!(
            put(&mut core, &ModelRecord { epoch: Epoch(3), ..next.clone() }, Some(1)),
            Err(stale.clone())
        );
        assert_eq!(put(&mut core, &ready, Some(2)), Err(stale), "epochs only rise");
        let same_epoch =
            ModelRecord { controls: Controls::default().with("learners", "7").unwrap(), ..next.clone() };
        assert!(matches!(put(&mut core, &same_epoch, Some(2)), Err(Refusal::Other(_))));
        let other_tensors =
            ModelRecord { epoch: Epoch(3), metadata: [Default::default()].into(), ..next.clone() };
        assert!(matches!(put(&mut core, &other_tensors, Some(2)), Err(Refusal::Other(_))));
        let other_life = ModelRecord { generation: Generation(8), epoch: Epoch(3), ..next.clone() };
        let (expected, got) = (Generation(7), Generation(8));
        let other = Refusal::Generation { model: "m".to_owned(), expected, got };
        assert_eq!(put(&mut core, &other_life, Some(2)), Err(other));
        assert_eq!(get(&mut core, "m"), Ok(next));
    });
}

#[test]
fn records_that_are_none_are_refused() {
    on_each(|table| {
        let mut core = core(table);
        let request = RegistryRequest::Put { replaces: None };
        assert!(matches!(core.handle(&request, b"garbage", Now::ZERO), Err(Refusal::Other(_))));
        let bad = ModelRecord { coordinator: ShardId(2), ..record("m", 1, 1) };
        assert!(matches!(put(&mut core, &bad, None), Err(Refusal::Other(_))));
        let mut unknown = ModelRecord { coordinator: ShardId(2), ..record("m", 1, 1) };
        unknown.owners[0].0 = ShardId(2);
        let refused = "the block map names shard 2, which never announced itself";
        assert_eq!(put(&mut core, &unknown, None), Err(Refusal::Other(refused.to_owned())));
        assert_eq!(get(&mut core, "m"), Err(Refusal::NoModel("m".to_owned())));
        let long = get(&mut core, &"x".repeat(100_000)).unwrap_err();
        assert!(long.to_string().len() < 400, "{long}");
    });
}

#[test]
fn a_delete_names_the_life() {
    on_each(|table| {
        let mut core = core(table);
        put(&mut core, &record("m", 1, 1), None).unwrap();
        let (expected, got) = (Generation(1), Generation(2));
        let other = Refusal::Generation { model: "m".to_owned(), expected, got };
        assert_eq!(delete(&mut core, "m", 2), Err(other));
        assert_eq!(delete(&mut core, "m", 1), Ok(()));
        assert_eq!(delete(&mut core, "m", 1), Ok(()), "repeated");
        assert_eq!(core.record_bytes(), 0);
        assert_eq!(put(&mut core, &record("m", 1, 1), None), Err(Refusal::Deleted("m".to_owned())), "late");
        assert_eq!(put(&mut core, &record("m", 2, 1), None), Ok(()));
    });
}

#[test]
fn the_table_of_models_has_an_end() {
    let mut core = core(&|| Tested::Here(RegistryCore::new()));
    let mut record = record("m", 1, 1);
    for i in 0..MAX_MODELS {
        record.name = format!("{i:05}");
        put(&mut core, &record, None).unwrap();
    }
    record.name = "one more".to_owned();
    assert!(matches!(put(&mut core, &record, None), Err(Refusal::Other(_))));
    delete(&mut core, "00000", 1).unwrap();
    put(&mut core, &record, None).unwrap();
    let names = core.handle(&RegistryRequest::Models, &[], Now::ZERO).unwrap().message;
    let RegistryAnswer::Models(names) = names else { panic!("{names:?}") };
    assert_eq!((names.len(), names[0].as_str()), (MAX_MODELS, "00001"));
    assert!(names.is_sorted());
}

/// Kinds of requests, each with which of three shards or models it is about, and two numbers.
type Ops = [(u8, u8, u64, u64)];

proptest! {
    /// Any requests of a few addresses and models: the table answers as a map and a list of leases do.
    #[test]
    fn any_sequence_keeps_the_table_right(ops in vec((0..6u8, 0..3u8, 1..4u64, 0..4u64), 1..60)) {
        keeps_right(&ops, &|| Tested::Here(RegistryCore::new()))?;
    }
}

fn keeps_right(ops: &Ops, table: &dyn Fn() -> Tested) -> Result<(), TestCaseError> {
    let mut core = core(table);
    let mut now = Now::ZERO;
    let mut leases = BTreeMap::from([("a:1".to_owned(), SECOND)]);
    let mut numbers = BTreeMap::from([("a:1".to_owned(), 1)]);
    let mut models: BTreeMap<String, ModelRecord> = BTreeMap::new();
    let mut dead = BTreeSet::new();
    for (op, which, a, b) in ops.iter().copied() {
        let (address, name) = (["a:1", "b:1", "c:1"][which as usize], ["x", "y", "z"][which as usize]);
        match op {
            0 => {
                let number = announce(&mut core, address, b as u16, now).unwrap().0;
                leases.insert(address.to_owned(), now + SECOND);
                prop_assert_eq!(*numbers.entry(address.to_owned()).or_insert(number), number);
            }
            1 => now += SECOND * a as u32 / 3,
            2 => {
                if let Some(&number) = numbers.get(address) {
                    let request = RegistryRequest::Withdraw { shard: ShardId(number) };
                    core.handle(&request, &[], now).unwrap();
                    leases.insert(address.to_owned(), now);
                }
            }
            3 => {
                let new = record(name, a, 1);
                let free = !models.contains_key(name) && !dead.contains(&(name, a));
                let repeated = models.get(name) == Some(&new);
                prop_assert_eq!(put(&mut core, &new, None).is_ok(), free || repeated);
                if free {
                    models.insert(name.to_owned(), new);
                }
            }
            4 => {
                let new = record(name, a, b + 1);
                let stored = models.get(name);
                let swaps = stored.is_some_and(|old| {
                    old == &new || old.generation.0 == a && old.epoch.0 == b && new.epoch > old.epoch
                });
                prop_assert_eq!(put(&mut core, &new, Some(b)).is_ok(), swaps);
                if swaps {
                    models.insert(name.to_owned(), new);
                }
            }
            _ => {
                let stored = models.get(name).map(|record| record.generation.0);
                prop_assert_eq!(delete(&mut core, name, a).is_ok(), stored.is_none_or(|life| life == a));
                if stored == Some(a) {
                    models.remove(name);
                    dead.insert((name, a));
                }
            }
        }
        let expected: BTreeSet<u16> =
            numbers.iter().filter(|(address, _)| leases[*address] > now).map(|(_, number)| *number).collect();
        prop_assert_eq!(living(&mut core, now), expected.into_iter().collect::<Vec<_>>());
        let distinct: BTreeSet<_> = numbers.values().collect();
        prop_assert_eq!(distinct.len(), numbers.len());
        for name in ["x", "y", "z"] {
            prop_assert_eq!(get(&mut core, name).ok(), models.get(name).cloned());
        }
        let bytes: usize = models.values().map(|record| record.encode().unwrap().len()).sum();
        prop_assert_eq!(core.record_bytes(), bytes);
    }
    Ok(())
}
