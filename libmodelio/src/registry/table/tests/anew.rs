//! A table that begins anew: numbers stay with the shards that hold blocks, records only go forward, and
//! deleted models do not come back.

use crate::vocabulary::controls::Controls;

use super::*;
use crate::registry::table::refused::MAX_REFUSED;

fn bound(core: &mut Tested, address: &str, number: u16) -> Result<ShardId, Refusal> {
    announce_as(core, address, number, true, Now::ZERO)
}

fn unbound(core: &mut Tested, address: &str, number: u16) -> Result<ShardId, Refusal> {
    announce_as(core, address, number, false, Now::ZERO)
}

/// A record whose blocks are all at the shard of this number.
fn record_at(name: &str, generation: u64, epoch: u64, owner: u16) -> ModelRecord {
    let record = record(name, generation, epoch);
    let owners = record.owners.iter().map(|&(_, run)| (ShardId(owner), run)).collect();
    ModelRecord { owners, coordinator: ShardId(owner), ready: true, ..record }
}

fn restore(core: &mut Tested, record: &ModelRecord, shards: &[(u16, &str)]) -> Result<(), Refusal> {
    let shards = shards.iter().map(|&(number, address)| shard(address, number)).collect();
    core.handle(&RegistryRequest::Restore { shards }, &record.encode().unwrap(), Now::ZERO).map(|_| ())
}

fn holding(core: &mut Tested, lives: &[(&str, u64)], deleted: &[(&str, u64)]) -> Vec<Fate> {
    let held = lives.iter().map(|&(name, generation)| HeldPartition {
        model: name.to_owned(),
        generation: Generation(generation),
        epoch: Epoch(1),
    });
    let deleted = deleted.iter().map(|&(name, generation)| (name.to_owned(), Generation(generation)));
    let (held, deleted) = (held.collect(), deleted.collect());
    let request = RegistryRequest::Holding { shard: ShardId(1), held, deleted };
    match core.handle(&request, &[], Now::ZERO).unwrap().message {
        RegistryAnswer::Fates { fates, .. } => fates,
        other => panic!("{other:?}"),
    }
}

fn taken(number: u16, address: &str) -> Refusal {
    Refusal::NumberTaken { shard: ShardId(number), address: address.to_owned() }
}

#[test]
fn a_number_is_that_of_the_shard_with_blocks() {
    on_each(|table| {
        let mut core = table();
        assert_eq!(unbound(&mut core, "new:1", 0), Ok(ShardId(1)));
        assert_eq!(bound(&mut core, "old:1", 1), Ok(ShardId(1)));
        assert_eq!(living(&mut core, Now::ZERO), [1], "the newcomer has none until it asks again");
        assert_eq!(unbound(&mut core, "new:1", 1), Ok(ShardId(2)));
        // The next one comes later still, and the newcomer gives way once more.
        assert_eq!(bound(&mut core, "old:2", 2), Ok(ShardId(2)));
        assert_eq!(unbound(&mut core, "new:1", 2), Ok(ShardId(3)));
        // Two with blocks cannot both have it.
        assert_eq!(bound(&mut core, "new:1", 3), Ok(ShardId(3)));
        assert_eq!(bound(&mut core, "old:3", 3), Err(taken(3, "new:1")));
        assert_eq!(living(&mut core, Now::ZERO), [1, 2, 3]);
        // A shard without blocks takes any number.
        assert_eq!(unbound(&mut core, "old:3", 3), Ok(ShardId(4)));
    });
}

#[test]
fn a_number_that_a_model_names_is_kept_for_its_shard() {
    on_each(|table| {
        let mut core = table();
        assert_eq!(unbound(&mut core, "new:1", 0), Ok(ShardId(1)));
        restore(&mut core, &record_at("m", 7, 1, 1), &[(1, "old:1")]).unwrap();
        assert_eq!(living(&mut core, Now::ZERO), [0; 0], "it has not said itself that it is there");
        assert_eq!(bound(&mut core, "new:1", 1), Err(taken(1, "old:1")));
        assert_eq!(unbound(&mut core, "new:1", 1), Ok(ShardId(2)));
        // The shard gets its old number, whatever number it claims, and though it has lost its blocks.
        assert_eq!(unbound(&mut core, "old:1", 0), Ok(ShardId(1)));
        // Without an address the number is nobody's, and given to nobody.
        restore(&mut core, &record_at("other", 8, 1, 3), &[]).unwrap();
        assert_eq!(unbound(&mut core, "new:2", 3), Ok(ShardId(4)));
        assert_eq!(bound(&mut core, "old:3", 3), Ok(ShardId(3)));
    });
}

#[test]
fn a_shard_that_was_given_another_number_has_its_own_again() {
    on_each(|table| {
        let mut core = table();
        assert_eq!(unbound(&mut core, "other:1", 0), Ok(ShardId(1)));
        assert_eq!(unbound(&mut core, "old:2", 0), Ok(ShardId(2)));
        core.handle(&RegistryRequest::Drain { shard: ShardId(2) }, &[], Now::ZERO).unwrap();
        // It had number 9 before it was restarted, and lost its blocks.
        restore(&mut core, &record_at("m", 7, 1, 9), &[(9, "old:2")]).unwrap();
        let listed: Vec<_> =
            core.living(Now::ZERO).iter().map(|shard| (shard.shard.0, shard.draining)).collect();
        assert_eq!(listed, [(1, false), (9, true)]);
        // A shard that has blocks under its new number keeps that number, and the model does without the shard.
        restore(&mut core, &record_at("n", 8, 1, 1), &[(1, "other:1")]).unwrap();
        restore(&mut core, &record_at("o", 9, 1, 5), &[(5, "other:1")]).unwrap();
        assert_eq!(living(&mut core, Now::ZERO), [1, 9]);
        assert_eq!(get(&mut core, "o").unwrap().coordinator, ShardId(5));
    });
}

#[test]
fn a_shards_draining_mark_counts_for_a_table_that_does_not_know_the_shard() {
    on_each(|table| {
        let mut core = table();
        let say = |core: &mut Tested, draining| {
            let record = ShardRecord { draining, ..shard("a:1", 1) };
            let request = RegistryRequest::Announce { record, lease_ms: 1000, bound: false };
            core.handle(&request, &[], Now::ZERO).unwrap();
            core.living(Now::ZERO).iter().all(|shard| shard.draining)
        };
        assert!(say(&mut core, true) && say(&mut core, false));
        let mut core = table();
        assert!(!say(&mut core, false) && !say(&mut core, true));
    });
}

#[test]
fn records_only_go_forward() {
    on_each(|table| {
        let mut core = table();
        let (first, second) = (record_at("m", 7, 1, 1), record_at("m", 7, 2, 1));
        let loading = ModelRecord { ready: false, ..first.clone() };
        restore(&mut core, &loading, &[]).unwrap();
        restore(&mut core, &first, &[]).unwrap();
        restore(&mut core, &loading, &[]).unwrap();
        assert_eq!(get(&mut core, "m"), Ok(first.clone()), "it stays ready");
        restore(&mut core, &second, &[]).unwrap();
        assert_eq!(
            restore(&mut core, &first, &[]),
            Err(Refusal::Epoch { expected: Epoch(2), got: Epoch(1) }),
            "an older block map"
        );
        let other =
            ModelRecord { controls: Controls::default().with("learners", "7").unwrap(), ..second.clone() };
        assert!(matches!(restore(&mut core, &other, &[]), Err(Refusal::Other(_))), "two of one epoch");
        assert_eq!(
            restore(&mut core, &record_at("m", 8, 9, 1), &[]),
            Err(Refusal::Exists("m".to_owned())),
            "another life"
        );
        assert_eq!(get(&mut core, "m"), Ok(second));
    });
}

#[test]
fn a_deleted_model_does_not_come_back() {
    on_each(|table| {
        let mut core = core(table);
        assert_eq!(holding(&mut core, &[("m", 1)], &[]), [Fate::Unknown], "that is no reason to drop it");
        put(&mut core, &record("m", 1, 1), None).unwrap();
        assert_eq!(
            holding(&mut core, &[("m", 1), ("m", 2), ("n", 1)], &[]),
            [Fate::Known { epoch: Epoch(1) }, Fate::Taken { generation: Generation(1) }, Fate::Unknown]
        );
        delete(&mut core, "m", 1).unwrap();
        let gone = [Fate::Deleted];
        assert_eq!(holding(&mut core, &[("m", 1)], &[]), gone);
        assert_eq!(restore(&mut core, &record_at("m", 1, 5, 1), &[]), Err(Refusal::Deleted("m".to_owned())));
        put(&mut core, &record("m", 2, 1), None).unwrap();
        assert_eq!(holding(&mut core, &[("m", 1)], &[]), gone, "though the name has another life");

        // The models' shards tell a table that has lost the deletion.
        let mut anew = table();
        restore(&mut anew, &record_at("m", 1, 1, 1), &[]).unwrap();
        assert_eq!(holding(&mut anew, &[("m", 1), ("m", 2)], &[("m", 1)]), [Fate::Deleted, Fate::Unknown]);
        assert_eq!(get(&mut anew, "m"), Err(Refusal::NoModel("m".to_owned())));
        assert!(restore(&mut anew, &record_at("m", 1, 1, 1), &[]).is_err());
        assert_eq!(anew.record_bytes(), 0);
    });
}

#[test]
fn a_record_that_cannot_be_restored_changes_nothing() {
    on_each(|table| {
        let mut core = table();
        bound(&mut core, "new:1", 1).unwrap();
        let record = record_at("m", 7, 1, 1);
        assert_eq!(restore(&mut core, &record, &[(1, "old:1")]), Err(taken(1, "new:1")));
        assert!(matches!(restore(&mut core, &record, &[(1, "nowhere")]), Err(Refusal::Other(_))));
        let request = RegistryRequest::Restore { shards: Vec::new() };
        assert!(matches!(core.handle(&request, b"garbage", Now::ZERO), Err(Refusal::Other(_))));
        assert_eq!(get(&mut core, "m"), Err(Refusal::NoModel("m".to_owned())));
        assert_eq!(living(&mut core, Now::ZERO), [1]);
    });
}

proptest! {
    /// Any shards and coordinators tell a table of their blocks and models, and other shards hold nothing: no
    /// two have one number, a shard with blocks keeps its number, a record's epoch never goes back, and
    /// deleted models stay deleted.
    #[test]
    fn whatever_it_is_told_numbers_stay_and_epochs_rise(
        ops in vec((0..5u8, 0..6usize, 1..5u16, 1..4u64), 1..80)
    ) {
        stay_and_rise(&ops, &|| Tested::Here(RegistryCore::new()))?;
    }
}

/// Kinds of reports, each with who makes it, and two numbers.
type Reports = [(u8, usize, u16, u64)];

pub(super) fn stay_and_rise(ops: &Reports, table: &dyn Fn() -> Tested) -> Result<(), TestCaseError> {
    let mut core = table();
    // The number that each process believes to have; the first three have blocks under their numbers.
    let addresses = ["a:1", "b:1", "c:1", "d:1", "e:1", "f:1"];
    let mut believes = [1u16, 2, 3, 0, 0, 0];
    let mut epochs: BTreeMap<u64, u64> = BTreeMap::new();
    let mut dead = BTreeSet::new();
    for (op, who, number, n) in ops.iter().copied() {
        match op {
            0 | 1 => {
                let answer = announce_as(&mut core, addresses[who], believes[who], who < 3, Now::ZERO);
                match answer {
                    Ok(given) if who < 3 => prop_assert_eq!(given.0, believes[who]),
                    Ok(given) => believes[who] = given.0,
                    Err(Refusal::NumberTaken { .. }) => prop_assert!(who < 3),
                    Err(other) => prop_assert!(false, "{other}"),
                }
            }
            2 => {
                // A model on one of the shards with blocks, as its coordinator reports it.
                let owner = who % 3;
                let record = record_at("m", n, u64::from(number), believes[owner]);
                let restored = restore(&mut core, &record, &[(believes[owner], addresses[owner])]);
                if restored.is_ok() {
                    prop_assert!(!dead.contains(&n));
                }
            }
            3 => {
                dead.insert(n);
                prop_assert_eq!(holding(&mut core, &[("m", n)], &[("m", n)]), [Fate::Deleted]);
            }
            _ => {
                let there = get(&mut core, "m").map(|record| record.generation.0);
                prop_assert_eq!(delete(&mut core, "m", n).is_ok(), there.is_err() || there == Ok(n));
                if there == Ok(n) {
                    dead.insert(n);
                }
            }
        }
        let known = core.known();
        let at: Vec<String> = known.iter().map(|shard| shard.address.clone()).collect();
        let distinct: BTreeSet<&String> = at.iter().collect();
        prop_assert_eq!(distinct.len(), at.len(), "an address has one number");
        for shard in &known {
            let who = addresses.iter().position(|address| *address == shard.address).unwrap();
            if who < 3 {
                prop_assert_eq!(shard.shard.0, believes[who], "of one that has blocks");
            }
        }
        if let Ok(record) = get(&mut core, "m") {
            prop_assert!(!dead.contains(&record.generation.0));
            let newest = epochs.entry(record.generation.0).or_default();
            prop_assert!(*newest <= record.epoch.0, "an epoch goes back");
            *newest = record.epoch.0;
        }
    }
    Ok(())
}

fn refused(core: &mut Tested, now: Now) -> Vec<(u16, String, String)> {
    match core.handle(&RegistryRequest::Refused, &[], now).unwrap().message {
        RegistryAnswer::Refused(shards) => {
            shards.into_iter().map(|shard| (shard.record.shard.0, shard.record.address, shard.why)).collect()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_refused_shard_is_listed_as_long_as_it_asks() {
    on_each(|table| {
        let mut core = table();
        assert_eq!(bound(&mut core, "new:1", 1), Ok(ShardId(1)));
        assert_eq!(bound(&mut core, "old:1", 1), Err(taken(1, "new:1")));
        let expected = (1, "old:1".to_owned(), taken(1, "new:1").to_string());
        assert_eq!(refused(&mut core, Now::ZERO), std::slice::from_ref(&expected));
        assert_eq!(living(&mut core, Now::ZERO), [1]);
        assert_eq!(refused(&mut core, Now::from_millis(999)), [expected]);
        assert_eq!(refused(&mut core, Now::from_millis(1000)), [], "its lease would be over");
        // It has its number since.
        assert_eq!(bound(&mut core, "old:1", 1), Err(taken(1, "new:1")));
        core.handle(&RegistryRequest::Withdraw { shard: ShardId(1) }, &[], Now::ZERO).unwrap();
        assert_eq!(bound(&mut core, "old:1", 1), Ok(ShardId(1)));
        assert_eq!(refused(&mut core, Now::ZERO), []);
    });
}

#[test]
fn a_crowd_of_refused_ones_takes_no_memory() {
    on_each(|table| {
        let mut core = table();
        assert_eq!(bound(&mut core, "new:1", 1), Ok(ShardId(1)));
        for port in 1..=2 * MAX_REFUSED {
            assert_eq!(bound(&mut core, &format!("old:{port}"), 1), Err(taken(1, "new:1")));
        }
        assert_eq!(refused(&mut core, Now::ZERO).len(), MAX_REFUSED);
        // They make room once they ask no more.
        let later = Now::from_millis(1000);
        assert_eq!(announce_as(&mut core, "late:1", 1, true, later), Err(taken(1, "new:1")));
        assert_eq!(refused(&mut core, later), [(1, "late:1".to_owned(), taken(1, "new:1").to_string())]);
    });
}

#[test]
fn a_table_from_a_state_file_gives_way_to_shards() {
    let mut old = core(&|| Tested::Here(RegistryCore::new()));
    bound(&mut old, "a:1", 1).unwrap();
    bound(&mut old, "b:1", 2).unwrap();
    for name in ["m", "n", "gone"] {
        let owner = if name == "n" { 2 } else { 1 };
        put(&mut old, &record_at(name, 7, 3, owner), None).unwrap();
    }
    delete(&mut old, "gone", 7).unwrap();
    let Tested::Here(old) = old else { unreachable!() };
    let restarted = || {
        let kept = old.kept(Now::ZERO);
        Tested::Here(RegistryCore::of(&kept, Now::ZERO, SECOND, true))
    };
    // What it knew it knows; whoever is silent is gone with the lease.
    let mut new = restarted();
    assert_eq!((living(&mut new, Now::ZERO), living(&mut new, SECOND)), (vec![1, 2], vec![]));
    assert_eq!(get(&mut new, "m").unwrap(), record_at("m", 7, 3, 1));
    assert_eq!(unbound(&mut new, "c:1", 1), Ok(ShardId(3)), "the number is another's");
    assert_eq!(
        holding(&mut new, &[("m", 7), ("gone", 7)], &[]),
        [Fate::Known { epoch: Epoch(3) }, Fate::Deleted]
    );
    // A model that a shard has confirmed stays, whatever others say.
    assert_eq!(holding(&mut new, &[("m", 8)], &[]), [Fate::Taken { generation: Generation(7) }]);
    assert_eq!(restore(&mut new, &record_at("m", 8, 1, 1), &[]), Err(Refusal::Exists("m".to_owned())));
    // The file is older than a shard that has a number, and than a model.
    let mut new = restarted();
    assert_eq!(bound(&mut new, "c:1", 1), Ok(ShardId(1)));
    assert_eq!(living(&mut new, Now::ZERO), [1, 2]);
    assert_eq!(bound(&mut new, "a:1", 1), Err(taken(1, "c:1")), "there are two that live");
    assert_eq!(holding(&mut new, &[("m", 8)], &[]), [Fate::Unknown]);
    restore(&mut new, &record_at("m", 8, 1, 1), &[(1, "c:1")]).unwrap();
    assert_eq!(get(&mut new, "m").unwrap(), record_at("m", 8, 1, 1));
    assert_eq!(holding(&mut new, &[("m", 7)], &[]), [Fate::Taken { generation: Generation(8) }]);
    // The shard is where the file says, under another number.
    let mut new = restarted();
    restore(&mut new, &record_at("o", 9, 1, 9), &[(9, "b:1")]).unwrap();
    assert_eq!(new.known().iter().map(|shard| shard.shard.0).collect::<Vec<_>>(), [1, 9]);
}
