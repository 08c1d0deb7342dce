//! Models whose blocks are lost, and their next lives.

use super::*;
use crate::vocabulary::ids::Version;
use crate::wire::{Lineage, LostModel};

const fn at(seconds: u64) -> Now {
    Now::from_secs(seconds)
}

/// A ready model on these shards that is restored from a store.
fn stored(generation: u64, owners: &[u16], lineage: Lineage) -> ModelRecord {
    let record = record("m", generation, 1);
    let blocks: u32 = record.owners.iter().map(|&(_, run)| run).sum();
    let mut owners: Vec<(ShardId, u32)> = owners.iter().map(|&owner| (ShardId(owner), 1)).collect();
    owners[0].1 = blocks + 1 - owners.len() as u32;
    ModelRecord { coordinator: owners[0].0, owners, ready: true, lineage, ..record }
}

fn first() -> ModelRecord {
    let lineage = Lineage { store: "/s".to_owned(), ..Lineage::new(Generation(7), Version(0)) };
    stored(7, &[1, 2], lineage)
}

/// The next life of a model, of another generation.
fn next(before: &ModelRecord, generation: u64, by: u16) -> ModelRecord {
    let (lineage, _) = before.lineage.restored(ShardId(by), Version(3), before.ready);
    ModelRecord { ready: false, ..stored(generation, &[2], lineage) }
}

fn announced(core: &mut Tested, address: &str, now: Now) -> ShardId {
    announce_as(core, address, 0, false, now).unwrap()
}

fn two_shards(core: &mut Tested) {
    assert_eq!((announced(core, "a:1", at(0)), announced(core, "b:1", at(0))), (ShardId(1), ShardId(2)));
    put(core, &first(), None).unwrap();
}

fn succeed(core: &mut Tested, record: &ModelRecord, before: u64) -> Result<(), Refusal> {
    let request = RegistryRequest::Succeed { generation: Generation(before), epoch: Epoch(1) };
    core.handle(&request, &record.encode().unwrap(), at(0)).map(|_| ())
}

fn keep(core: &mut Tested, epoch: u64, reserved: u64, store: &str) -> Result<(), Refusal> {
    let (model, store, newest) = ("m".to_owned(), store.to_owned(), store == "/newest");
    let (generation, epoch, reserved) = (Generation(7), Epoch(epoch), Version(reserved));
    let request = RegistryRequest::Keep { model, generation, epoch, reserved, store, newest };
    core.handle(&request, &[], at(0)).map(|_| ())
}

/// The shards without which the model is lost, for a shard that holds these lives; and those that are needed.
fn losses(core: &mut Tested, asks: u16, held: &[u64], now: Now) -> (Vec<u16>, Vec<u16>) {
    losses_of(core, asks, (held, &[]), now)
}

/// The same, for one that makes these lives.
fn losses_of(
    core: &mut Tested,
    asks: u16,
    (held, makes): (&[u64], &[u64]),
    now: Now,
) -> (Vec<u16>, Vec<u16>) {
    let lives = |of: &[u64]| of.iter().copied().map(Generation).collect();
    let request = RegistryRequest::Lost { shard: ShardId(asks), held: lives(held), makes: lives(makes) };
    let RegistryAnswer::Losses(losses) = core.handle(&request, &[], now).unwrap().message else {
        panic!("another answer")
    };
    let shards = |of: &LostModel| of.shards.clone();
    let lost = losses.models.iter().flat_map(shards).map(|shard| shard.0).collect();
    (lost, losses.needed.iter().map(|of| of.shard.0).collect())
}

#[test]
fn a_model_is_lost_with_a_shard_that_holds_blocks_of_it() {
    on_each(|table| {
        let mut core = table();
        two_shards(&mut core);
        assert_eq!(losses(&mut core, 1, &[7], at(0)), (vec![], vec![1, 2]));
        announced(&mut core, "a:1", at(10));
        assert_eq!(losses(&mut core, 1, &[7], at(10)), (vec![2], vec![1]), "its lease is over");
        announced(&mut core, "a:1", at(12));
        assert_eq!(announced(&mut core, "b:1", at(12)), ShardId(2));
        assert_eq!(losses(&mut core, 2, &[], at(12)).0, [2], "it has come back without them");
        assert_eq!(losses(&mut core, 2, &[7], at(12)).0, [0; 0]);
        core.handle(&RegistryRequest::Withdraw { shard: ShardId(1) }, &[], at(12)).unwrap();
        assert_eq!(losses(&mut core, 2, &[7], at(12)), (vec![1], vec![2]), "it was found dead");
    });
}

#[test]
fn a_model_without_a_store_is_never_lost() {
    on_each(|table| {
        let mut core = table();
        two_shards(&mut core);
        keep(&mut core, 1, 0, "").unwrap();
        assert_eq!(losses(&mut core, 2, &[], at(99)), (vec![], vec![]));
        keep(&mut core, 1, 0, "/t").unwrap();
        assert_eq!(losses(&mut core, 2, &[], at(99)).0, [1, 2]);
        assert_eq!(get(&mut core, "m").unwrap().lineage.store, "/t");
        for (store, newest) in [("/newest", true), ("/t", false)] {
            keep(&mut core, 1, 0, store).unwrap();
            assert_eq!(get(&mut core, "m").unwrap().lineage.newest, newest, "{store}");
        }
    });
}

#[test]
fn a_shard_that_others_have_told_of_is_not_lost_before_it_could_announce_itself() {
    on_each(|table| {
        let mut core = table();
        let shards = vec![shard("a:1", 1), shard("b:1", 2)];
        core.handle(&RegistryRequest::Restore { shards }, &first().encode().unwrap(), at(1)).unwrap();
        assert_eq!(losses(&mut core, 3, &[], at(9)), (vec![], vec![1, 2]));
        core.handle(&RegistryRequest::Withdraw { shard: ShardId(1) }, &[], at(9)).unwrap();
        assert_eq!(losses(&mut core, 3, &[], at(9)), (vec![1], vec![2]));
    });
}

#[test]
fn only_one_restores_a_model() {
    on_each(|table| {
        let mut core = table();
        two_shards(&mut core);
        let (one, other) = (next(&first(), 8, 2), next(&first(), 9, 1));
        succeed(&mut core, &one, 7).unwrap();
        succeed(&mut core, &one, 7).unwrap();
        let taken = succeed(&mut core, &other, 7);
        assert!(matches!(taken, Err(Refusal::Generation { expected: Generation(8), .. })), "{taken:?}");
        assert_eq!(get(&mut core, "m").unwrap(), one);
        // The life before is over.
        let held = vec![HeldPartition { model: "m".to_owned(), generation: Generation(7), epoch: Epoch(1) }];
        let request = RegistryRequest::Holding { shard: ShardId(1), held, deleted: Vec::new() };
        let answer = core.handle(&request, &[], at(0)).unwrap().message;
        assert_eq!(answer, RegistryAnswer::Fates { draining: false, fates: vec![Fate::Deleted] });
        assert!(matches!(keep(&mut core, 1, 9, "/s"), Err(Refusal::Generation { .. })));
    });
}

#[test]
fn a_restoration_whose_shard_dies_is_begun_again() {
    on_each(|table| {
        let mut core = table();
        two_shards(&mut core);
        let second = next(&first(), 8, 2);
        succeed(&mut core, &second, 7).unwrap();
        assert_eq!(losses_of(&mut core, 2, (&[], &[8]), at(0)), (vec![], vec![2]), "it is under way");
        assert_eq!(losses_of(&mut core, 2, (&[8], &[]), at(0)).0, [2], "it was given up, or started anew");
        announced(&mut core, "a:1", at(9));
        assert_eq!(losses(&mut core, 1, &[], at(9)).0, [2]);
        let third = next(&second, 9, 1);
        succeed(&mut core, &third, 8).unwrap();
        assert_eq!(get(&mut core, "m").unwrap().lineage.restored, 2);
    });
}

#[test]
fn a_next_life_begins_behind_numbers_that_were_reserved_meanwhile() {
    on_each(|table| {
        let mut core = table();
        two_shards(&mut core);
        let early = next(&first(), 8, 2);
        // Also if its own numbers reach beyond those.
        let longer = Lineage { reserved: Version(early.lineage.reserved.0 << 2), ..early.lineage.clone() };
        keep(&mut core, 1, early.lineage.reserved.0 - 1, "/s").unwrap();
        for record in [&early, &ModelRecord { lineage: longer, ..early.clone() }] {
            succeed(&mut core, record, 7).unwrap_err();
        }
        let behind = next(&get(&mut core, "m").unwrap(), 8, 2);
        succeed(&mut core, &behind, 7).unwrap();
    });
}

#[test]
fn a_next_life_is_of_the_same_lineage_and_begins_with_new_numbers() {
    on_each(|table| {
        let mut core = table();
        two_shards(&mut core);
        let good = next(&first(), 8, 2);
        let of = |lineage| ModelRecord { lineage, ..good.clone() };
        let bad = [
            of(Lineage { first: Generation(3), ..good.lineage.clone() }),
            of(Lineage { restored: 0, ..good.lineage.clone() }),
            of(Lineage { by: ShardId(0), ..good.lineage.clone() }),
            of(Lineage { reserved: first().lineage.reserved, ..good.lineage.clone() }),
            ModelRecord { generation: Generation(7), ..good.clone() },
            ModelRecord { block_size: 2 * good.block_size, owners: vec![(ShardId(2), 1)], ..good.clone() },
        ];
        for record in bad {
            succeed(&mut core, &record, 7).unwrap_err();
        }
        assert_eq!(get(&mut core, "m").unwrap(), first());
        succeed(&mut core, &good, 7).unwrap();
    });
}

#[test]
fn numbers_that_are_reserved_stay_so() {
    on_each(|table| {
        let mut core = table();
        two_shards(&mut core);
        let reserved = |core: &mut Tested| get(core, "m").unwrap().lineage.reserved.0;
        keep(&mut core, 1, 9 << 20, "/s").unwrap();
        keep(&mut core, 1, 5 << 20, "/s").unwrap();
        assert_eq!(reserved(&mut core), 9 << 20);
        assert_eq!(
            keep(&mut core, 2, 10 << 20, "/s"),
            Err(Refusal::Epoch { expected: Epoch(1), got: Epoch(2) })
        );
        // Who moves the model may have its record from before.
        let moved = ModelRecord { epoch: Epoch(2), ..first() };
        put(&mut core, &moved, Some(1)).unwrap();
        assert_eq!((reserved(&mut core), get(&mut core, "m").unwrap().epoch), (9 << 20, Epoch(2)));
        core.handle(&RegistryRequest::Restore { shards: vec![] }, &moved.encode().unwrap(), at(0)).unwrap();
        assert_eq!(reserved(&mut core), 9 << 20);
    });
}
