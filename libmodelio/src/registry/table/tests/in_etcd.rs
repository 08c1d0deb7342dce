//! What only a table in etcd has: several who change it at once, records in parts, leases that end by themselves, and an
//! etcd that does not answer.

use std::thread;
use std::time::Instant;

use proptest::test_runner::{Config, TestRunner};

use super::tested::EtcdServer;
use super::*;
use crate::registry::etcd::EtcdRegistry;
use crate::registry::{EtcdUrl, Registry, RegistryError, open};
use crate::wire::MAX_HELD;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(300)
}

fn registry(server: &EtcdServer) -> EtcdRegistry {
    EtcdRegistry::open(EtcdUrl::parse(&format!("etcd://{}", server.address)).unwrap()).unwrap()
}

/// A record of about this many bytes.
fn large(name: &str, epoch: u64, bytes: usize) -> ModelRecord {
    let metadata = [("notes".to_owned(), "x".repeat(bytes))].into();
    ModelRecord { metadata, ..record(name, 1, epoch) }
}

#[test]
fn any_sequence_keeps_a_table_in_etcd_right() {
    on_each(|table| {
        let mut runner = TestRunner::new(Config { cases: 8, failure_persistence: None, ..Config::default() });
        let ops = vec((0..6u8, 0..3u8, 1..4u64, 0..4u64), 1..40);
        runner.run(&ops, |ops| keeps_right(&ops, table)).unwrap();
        let reports = vec((0..5u8, 0..6usize, 1..5u16, 1..4u64), 1..40);
        runner.run(&reports, |reports| anew::stay_and_rise(&reports, table)).unwrap();
    });
}

#[test]
fn records_above_etcds_limit_are_whole_and_leave_nothing_behind() {
    on_each(|table| {
        let mut core = core(table);
        let mut before = None;
        // Parts end at 1 MiB, and one that has grown and shrunk leaves no part.
        for (epoch, bytes) in [(1, 5_000_000), (2, 1 << 20), (3, 10), (4, 3 << 20)] {
            let record = ModelRecord { ready: true, ..large("m", 1, bytes) };
            let record = ModelRecord { epoch: Epoch(epoch), ..record };
            if before.is_some() {
                delete(&mut core, "m", epoch - 1).unwrap();
            }
            let record = ModelRecord { generation: Generation(epoch), ..record };
            put(&mut core, &record, None).unwrap();
            assert_eq!(get(&mut core, "m").unwrap(), record);
            assert_eq!(core.record_bytes(), record.encode().unwrap().len());
            before = Some(epoch);
        }
        // The same life goes on with new parts.
        let next = ModelRecord { epoch: Epoch(9), ..get(&mut core, "m").unwrap() };
        put(&mut core, &next, Some(4)).unwrap();
        assert_eq!(core.record_bytes(), next.encode().unwrap().len());
        assert_eq!(get(&mut core, "m").unwrap(), next);
        delete(&mut core, "m", 4).unwrap();
        assert_eq!(core.record_bytes(), 0);
    });
}

#[test]
fn of_those_who_change_a_record_at_once_one_wins() {
    let Some(server) = EtcdServer::start() else { return };
    let lease = Duration::from_secs(600);
    // Each has a connection of its own, as each process has.
    let numbers = thread::scope(|scope| {
        let one = |i| {
            let server = &server;
            scope.spawn(move || registry(server).announce(&shard(&format!("h:{i}"), 0), false, lease, soon()))
        };
        let all: Vec<_> = (1..=12).map(one).collect();
        all.into_iter().map(|one| one.join().unwrap().unwrap().0).collect::<BTreeSet<_>>()
    });
    assert_eq!(numbers, (1..=12).collect(), "no two have one number");
    let table = registry(&server);
    table.put(&record("m", 7, 1), None, soon()).unwrap();
    for epoch in 1..=3 {
        let won = thread::scope(|scope| {
            let one = |i: u64| {
                let server = &server;
                let next = large("m", epoch + 1, 0);
                let controls = Controls::default().with("learners", &(i + 1).to_string()).unwrap();
                let first = record("m", 7, 1);
                let next =
                    ModelRecord { controls, generation: Generation(7), metadata: first.metadata, ..next };
                scope.spawn(move || registry(server).put(&next, Some(Epoch(epoch)), soon()))
            };
            let all: Vec<_> = (1..=6).map(one).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect::<Vec<_>>()
        });
        assert_eq!(won.iter().filter(|outcome| outcome.is_ok()).count(), 1, "{won:?}");
        let lost = |outcome: &Result<(), RegistryError>| match outcome {
            Ok(()) => true,
            Err(RegistryError::Epoch { expected, .. }) => expected.0 == epoch + 1,
            Err(_) => false,
        };
        assert!(won.iter().all(lost), "{won:?}");
    }
}

#[test]
fn a_lease_in_etcd_ends_by_itself_and_is_renewed_by_announcing() {
    let Some(server) = EtcdServer::start() else { return };
    let table = registry(&server);
    let there = |table: &EtcdRegistry| -> Vec<u16> {
        table.shards(soon()).unwrap().iter().map(|shard| shard.shard.0).collect()
    };
    table.announce(&shard("a:1", 0), false, Duration::from_secs(600), soon()).unwrap();
    table.announce(&shard("b:1", 0), false, Duration::from_secs(1), soon()).unwrap();
    let until = soon();
    while there(&table).contains(&2) {
        assert!(Instant::now() < until);
        thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(there(&table), [1]);
    // It has its number again, and another process of it renews the lease that the first one has.
    assert_eq!(
        table.announce(&shard("b:1", 0), false, Duration::from_secs(600), soon()).unwrap(),
        ShardId(2)
    );
    let again = registry(&server);
    assert_eq!(again.announce(&shard("b:1", 2), true, Duration::from_secs(600), soon()).unwrap(), ShardId(2));
    assert_eq!(there(&again), [1, 2]);
    again.withdraw(ShardId(2), soon()).unwrap();
    assert_eq!(there(&table), [1]);
}

#[test]
fn a_shard_with_many_partitions_hears_of_all() {
    on_each(|table| {
        let mut core = core(table);
        let mut deleted = Vec::new();
        for generation in 1..=3 {
            put(&mut core, &record("m", generation, 1), None).unwrap();
            if generation < 3 {
                delete(&mut core, "m", generation).unwrap();
                deleted.push(("m".to_owned(), Generation(generation)));
            }
        }
        deleted.extend((0..MAX_HELD as u64 - 2).map(|i| (format!("gone{i}"), Generation(i))));
        let one = |model: &str, generation| HeldPartition {
            model: model.to_owned(),
            generation: Generation(generation),
            epoch: Epoch(1),
        };
        let mut held = vec![one("m", 1), one("m", 3), one("m", 4)];
        held.extend((0..MAX_HELD as u64 - 4).map(|i| one(&format!("gone{i}"), i)));
        held.push(one("never", 1));
        let request = RegistryRequest::Holding { shard: ShardId(1), held, deleted };
        let RegistryAnswer::Fates { fates, .. } = core.handle(&request, &[], Now::ZERO).unwrap().message
        else {
            panic!()
        };
        let taken = Fate::Taken { generation: Generation(3) };
        assert_eq!(fates[..3], [Fate::Deleted, Fate::Known { epoch: Epoch(1) }, taken]);
        assert!(fates[3..MAX_HELD - 1].iter().all(|fate| *fate == Fate::Deleted));
        assert_eq!(fates[MAX_HELD - 1], Fate::Unknown);
    });
}

#[test]
fn an_etcd_that_does_not_answer_is_named_in_one_line_when_the_deadline_is_over() {
    // Somebody accepts there and says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let at = format!("etcd://{},{gone}", silent.local_addr().unwrap());
    let registry = open(&at).unwrap();
    let start = Instant::now();
    let why = registry.models(start + Duration::from_secs(2)).unwrap_err();
    assert!(start.elapsed() >= Duration::from_secs(2), "it tries until the deadline");
    let why = why.to_string();
    assert!(why.contains(&gone.to_string()) && why.contains("more than half of its members"), "{why}");
    assert!(!why.contains('\n'), "{why}");
    for wrong in ["etcd://", "etcd://a:x", "etcds://a"] {
        let why = open(wrong).err().unwrap().to_string();
        assert!(!why.contains('\n'), "{why}");
    }
}
