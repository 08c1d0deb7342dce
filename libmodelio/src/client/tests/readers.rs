//! A client that is told of readers, and misses some of it.

use super::Bench;
use crate::client::core::Action;
use crate::vocabulary::ids::{Incarnation, ReaderId, Version};
use crate::vocabulary::readers::{MAX_READER_ID, MAX_READERS, ReaderState};
use crate::wire::{JobState, Message};

fn reader(number: u32, is_own: bool, staged: u64) -> ReaderState {
    ReaderState {
        reader: ReaderId(number),
        name: format!("r{number}"),
        host: String::new(),
        is_own,
        staged: Version(staged),
        applied: None,
        is_given_up: false,
    }
}

fn told(bench: &mut Bench, since: Option<u64>, revision: u64, readers: &[ReaderState], gone: &[u32]) {
    let gone = gone.iter().map(|&reader| ReaderId(reader)).collect();
    bench.coordinator(0, Message::Readers { since, revision, readers: readers.to_vec(), gone });
}

fn known(bench: &Bench) -> Vec<u32> {
    bench.core.readers().map(|reader| reader.reader.0).collect()
}

const ASKS: Action = Action::ToCoordinator(0, Message::TellReaders);

#[test]
fn a_client_that_has_missed_what_has_changed_in_the_readers_asks_for_all_of_them() {
    let mut bench = Bench::new();
    told(&mut bench, Some(0), 1, &[reader(1, false, 0)], &[]);
    told(&mut bench, Some(1), 2, &[reader(2, false, 0)], &[1]);
    assert_eq!((known(&bench), &bench.said[..]), (vec![2], &[Action::Readers, Action::Readers][..]));
    bench.said.clear();
    told(&mut bench, Some(3), 4, &[reader(3, false, 0)], &[]);
    assert_eq!((known(&bench), &bench.said[..]), (vec![2], &[ASKS][..]));
    bench.said.clear();
    // The news that was lost may be the last one.
    let state = JobState { sequence: 5, readers: 4, ..bench.core.state().clone() };
    bench.coordinator(0, Message::State(Box::new(state)));
    assert!(bench.said.contains(&ASKS));
    bench.said.clear();
    told(&mut bench, None, 4, &[reader(3, false, 0)], &[]);
    assert_eq!((known(&bench), &bench.said[..]), (vec![3], &[Action::Readers][..]));
}

#[test]
fn readers_that_there_cannot_be_are_passed_over() {
    let mut bench = Bench::new();
    let path = ReaderState { name: "../a".into(), ..reader(1, false, 0) };
    told(&mut bench, None, 1, &[path, reader(MAX_READER_ID, false, 0), reader(2, false, 0)], &[]);
    assert_eq!(known(&bench), [2]);
    let many: Vec<_> = (1..=MAX_READERS as u32 + 9).map(|number| reader(number, false, 0)).collect();
    told(&mut bench, None, 2, &many, &[]);
    told(&mut bench, Some(2), 3, &[reader(7, false, 5)], &[]);
    assert_eq!(known(&bench).len(), MAX_READERS);
    assert_eq!(bench.core.reader(ReaderId(7)).map(|of| of.staged), Some(Version(5)));
}

#[test]
fn a_client_says_which_version_its_own_readers_have_staged() {
    let mut bench = Bench::new();
    told(&mut bench, None, 1, &[reader(1, true, 0), reader(2, false, 7)], &[]);
    assert_eq!(bench.said, [Action::Readers]);
    bench.said.clear();
    bench.core.shown(Version(1), bench.now, &mut bench.said);
    let says = Action::ToCoordinator(0, Message::Staged { version: Version(1) });
    assert!(bench.said.contains(&says), "{:?}", bench.said);
    bench.said.clear();
    told(&mut bench, Some(1), 2, &[reader(1, true, 1)], &[]);
    assert_eq!(bench.said, [Action::Readers]);
    // The coordinator has missed it.
    told(&mut bench, Some(2), 3, &[reader(1, true, 0)], &[]);
    assert!(bench.said.contains(&says));
}

#[test]
fn a_client_knows_the_learners_of_the_version_that_it_shows_however_many_come_after() {
    let mut bench = Bench::new();
    let shown = bench.core.version().0;
    for version in shown..shown + 40 {
        let (version, learners, unlisted) = (Version(version), Vec::new(), Incarnation(0));
        bench.coordinator(0, Message::Learners { version, contributions: version.0, learners, unlisted });
    }
    let knows = |version| bench.core.told_learners(Version(version)).map(|told| told.contributions);
    assert_eq!((knows(shown), knows(shown + 39)), (Some(shown), Some(shown + 39)));
    assert_eq!((knows(shown + 1), knows(shown + 40)), (None, None), "few others are kept");
}
