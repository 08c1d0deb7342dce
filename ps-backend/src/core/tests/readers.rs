//! Versions wait for readers, and not for ever.

use libmodelio::vocabulary::ids::{ClientId, Version};
use libmodelio::vocabulary::readers::{MAX_READERS, MAX_READERS_OF_CLIENT};
use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::bench::{Bench, everything, formed, ok};

const HERE: ClientId = ClientId(1);
const THERE: ClientId = ClientId(2);

/// A job of a publisher, whose versions wait for readers; it gives up after 2 s.
fn publisher(hold: &str) -> Bench {
    Bench::new(&[("reducer", "assign"), ("lease", "2"), ("timeout", "10"), ("hold_for_readers", hold)])
}

impl Bench {
    fn reads(&mut self, client: ClientId, name: &str) {
        self.core.begin_reader(client, name, "host".into(), Version(0)).unwrap();
    }

    fn applies(&mut self, client: ClientId, name: &str, version: u64) {
        self.call(|core, now, actions| core.applies(client, name, Version(version), now, actions)).unwrap();
    }

    /// Publishes, which is expected to wait for nobody.
    fn publish(&mut self) {
        let ticket = self.assign(10_000);
        self.reduce_done(true);
        assert!(ok(self, ticket));
    }

    fn given_up(&self) -> Vec<String> {
        let readers = self.core.readers(None).into_iter().filter(|reader| reader.is_given_up);
        readers.map(|reader| reader.name).collect()
    }
}

#[test]
fn a_version_waits_until_all_readers_have_applied_the_one_before() {
    let mut bench = publisher("1");
    bench.reads(HERE, "a");
    bench.reads(THERE, "b");
    bench.publish();
    assert!(bench.core.held_by().is_empty(), "who has applied nothing holds nobody");
    bench.applies(HERE, "a", 1);
    bench.applies(THERE, "b", 0);
    let ticket = bench.assign(10_000);
    assert!(bench.is_waiting(ticket) && bench.running.is_none());
    assert_eq!(bench.core.held_by(), ["b"]);
    bench.applies(THERE, "b", 1);
    bench.reduce_done(true);
    assert!(ok(&bench, ticket) && bench.core.held_by().is_empty());
}

#[test]
fn a_version_may_be_so_many_ahead_of_the_slowest_reader() {
    let mut bench = publisher("2");
    bench.reads(HERE, "a");
    bench.applies(HERE, "a", 0);
    bench.publish();
    bench.publish();
    let ticket = bench.assign(10_000);
    assert!(bench.is_waiting(ticket) && bench.running.is_none());
    bench.set("hold_for_readers", "3");
    bench.reduce_done(true);
    assert!(ok(&bench, ticket), "the setting was changed while it waited");
    let ticket = bench.assign(10_000);
    assert!(bench.running.is_none());
    bench.set("hold_for_readers", "0");
    bench.reduce_done(true);
    assert!(ok(&bench, ticket));
}

#[test]
fn a_reader_that_ends_or_whose_client_is_gone_holds_nobody() {
    let mut bench = publisher("1");
    for (client, name) in [(HERE, "a"), (THERE, "b"), (THERE, "c")] {
        bench.reads(client, name);
        bench.applies(client, name, 0);
    }
    bench.publish();
    let ticket = bench.assign(10_000);
    bench.call(|core, now, actions| core.end_reader(HERE, "a", now, actions)).unwrap();
    assert!(bench.is_waiting(ticket) && bench.running.is_none());
    bench.call(|core, now, actions| core.end_readers(THERE, now, actions));
    bench.reduce_done(true);
    assert!(ok(&bench, ticket) && bench.core.readers(None).is_empty());
}

#[test]
fn a_reader_is_given_up_after_the_lease_and_waited_for_again_once_it_applies() {
    let mut bench = publisher("1");
    bench.reads(HERE, "a");
    bench.applies(HERE, "a", 0);
    bench.publish();
    bench.tick(5_000);
    assert!(bench.given_up().is_empty(), "nobody has waited");
    let ticket = bench.assign(10_000);
    bench.tick(1_900);
    assert!(bench.running.is_none() && bench.given_up().is_empty());
    bench.tick(100);
    assert_eq!(bench.given_up(), ["a"]);
    bench.reduce_done(true);
    assert!(ok(&bench, ticket));
    bench.publish();
    bench.applies(HERE, "a", 2);
    assert!(bench.given_up().is_empty());
    let ticket = bench.assign(10_000);
    assert!(bench.running.is_none());
    bench.applies(HERE, "a", 3);
    bench.reduce_done(true);
    assert!(ok(&bench, ticket));
}

#[test]
fn a_wait_for_readers_ends_after_half_of_the_timeout_so_that_its_request_succeeds() {
    let mut bench = publisher("1");
    bench.set("lease", "0");
    bench.reads(HERE, "a");
    bench.applies(HERE, "a", 0);
    bench.publish();
    let ticket = bench.assign(10_000);
    bench.tick(5_000);
    bench.reduce_done(true);
    assert!(ok(&bench, ticket));
    // Whoever waits for less hears why.
    bench.applies(HERE, "a", 0);
    let ticket = bench.assign(1_000);
    bench.tick(1_000);
    let ShardError::TimedOut(why) = bench.replies[&ticket].clone().unwrap_err() else { panic!() };
    assert!(why.contains("hold_for_readers"), "{why}");
}

#[test]
fn who_asks_again_and_again_waits_no_longer() {
    let mut bench = publisher("1");
    bench.reads(HERE, "a");
    bench.applies(HERE, "a", 0);
    bench.publish();
    for _ in 0..3 {
        let ticket = bench.assign(500);
        bench.tick(500);
        assert!(matches!(bench.replies[&ticket], Err(ShardError::TimedOut(_))));
    }
    let ticket = bench.assign(1_000);
    bench.tick(500);
    bench.reduce_done(true);
    assert!(ok(&bench, ticket));
}

#[test]
fn steps_of_learners_wait_for_readers_and_readers_are_no_learners() {
    for consistency in ["sync", "quorum(1)", "grace(1, 0.5)", "async", "ssp(3)"] {
        let settings = [("consistency", consistency), ("learners", "1"), ("hold_for_readers", "1")];
        let (mut bench, ids) = formed(&settings, &["a"]);
        bench.reads(HERE, "r");
        bench.applies(HERE, "r", 0);
        assert_eq!(bench.core.learners().count(), 1, "a reader is no learner");
        let (_, ticket) = everything(&mut bench, ids[0], true);
        bench.reduce_done(true);
        assert!(ok(&bench, ticket), "{consistency}");
        let (_, ticket) = everything(&mut bench, ids[0], true);
        assert!(bench.running.is_none() && bench.is_waiting(ticket), "{consistency}");
        assert_eq!(bench.core.held_by(), ["r"], "{consistency}");
        assert!(bench.core.late(bench.now + Now::from_secs(60)).is_none(), "no learner is waited for");
        bench.applies(HERE, "r", 1);
        bench.reduce_done(true);
        assert!(ok(&bench, ticket), "{consistency}");
    }
}

#[test]
fn a_version_that_has_begun_waits_for_no_reader() {
    let bench = Bench::new(&[("learners", "1"), ("hold_for_readers", "1")]).on_a_network();
    let (mut bench, ids) = super::bench::joined(bench, &["a"]);
    everything(&mut bench, ids[0], true);
    bench.reduce_done(true);
    let (step, uid) = super::bench::open(&mut bench, ids[0]);
    assert!(bench.comes(ids[0].0, uid, 0));
    bench.reads(HERE, "r");
    bench.applies(HERE, "r", 0);
    let ticket = bench.commit(ids[0].0, step, uid, super::bench::blocks([0, 1]), true, 1_000);
    bench.reduce_done(true);
    assert!(ok(&bench, ticket));
    let (_, uid) = super::bench::open(&mut bench, ids[0]);
    assert!(!bench.comes(ids[0].0, uid, 0), "no plan begins early for a version that waits");
}

#[test]
fn what_a_reader_says_must_be_possible_and_its_own() {
    let mut bench = publisher("1");
    bench.reads(HERE, "a");
    let refused = |bench: &mut Bench, client, name: &str, version| {
        bench
            .call(|core, now, actions| core.applies(client, name, Version(version), now, actions))
            .unwrap_err()
    };
    let newest = Version(0);
    assert_eq!(refused(&mut bench, HERE, "a", 1), ShardError::NoVersionYet { got: Version(1), newest });
    assert!(matches!(refused(&mut bench, THERE, "a", 0), ShardError::NotAllowed(_)));
    assert_eq!(refused(&mut bench, HERE, "b", 0), ShardError::NoReader("b".into()));
    assert_eq!(bench.core.readers(Some(HERE))[0].applied, None, "nothing has changed");
    let begins =
        |bench: &mut Bench, client, name: &str| bench.core.begin_reader(client, name, "host".into(), newest);
    assert_eq!(begins(&mut bench, THERE, "a"), Err(ShardError::ReaderTaken("a".into())));
    for name in ["", ".a", "a/b", "applied", &"a".repeat(65)] {
        assert!(matches!(begins(&mut bench, HERE, name), Err(ShardError::NotAllowed(_))), "{name}");
    }
    // It may go back: it says what it runs.
    bench.publish();
    for version in [1, 0] {
        bench.applies(HERE, "a", version);
        assert_eq!(bench.core.readers(None)[0].applied, Some(Version(version)));
    }
}

#[test]
fn there_are_so_many_readers_at_most() {
    let mut core = publisher("0").core;
    let mut begin = |client, n: usize| {
        core.begin_reader(ClientId(client), &format!("{client}-{n}"), String::new(), Version(0))
    };
    let clients = (MAX_READERS / MAX_READERS_OF_CLIENT) as u64;
    for client in 0..clients {
        for n in 0..MAX_READERS_OF_CLIENT {
            begin(client, n).unwrap();
        }
    }
    let full = |of| Err(ShardError::TooManyReaders(of, "a job".into()));
    assert_eq!(begin(clients, 0), full(MAX_READERS));
    core.end_readers(ClientId(0), Now::ZERO, &mut Vec::new());
    let mut begin = |client, n: usize| {
        core.begin_reader(ClientId(client), &format!("{client}-{n}"), String::new(), Version(0))
    };
    begin(1, MAX_READERS_OF_CLIENT).unwrap_err();
    begin(clients, 0).unwrap();
    let numbers: std::collections::BTreeSet<_> =
        core.readers(None).iter().map(|reader| reader.reader).collect();
    assert_eq!(numbers.len(), MAX_READERS - MAX_READERS_OF_CLIENT + 1, "numbers are unique");
}
