//! What the coordinator tells its clients of readers.

use libmodelio::vocabulary::ids::ReaderId;
use libmodelio::vocabulary::readers::ReaderState;
use libmodelio::wire::ReaderDoes;

use super::*;

fn does(name: &str, does: ReaderDoes) -> Message {
    Message::Reader { name: name.into(), does }
}

fn begins() -> ReaderDoes {
    ReaderDoes::Begins { host: "host".into(), staged: Version(0) }
}

fn state(reader: u32, name: &str, is_own: bool, applied: Option<u64>) -> ReaderState {
    ReaderState {
        reader: ReaderId(reader),
        name: name.into(),
        host: "host".into(),
        is_own,
        staged: Version(0),
        applied: applied.map(Version),
        is_given_up: false,
    }
}

fn news(since: Option<u64>, revision: u64, readers: Vec<ReaderState>, gone: &[u32]) -> (u64, Message) {
    let gone = gone.iter().map(|&reader| ReaderId(reader)).collect();
    (0, Message::Readers { since, revision, readers, gone })
}

#[test]
fn clients_are_told_what_has_changed_in_the_readers_once_and_before_the_answer() {
    let mut bench = Bench::new();
    bench.client(A, 2, does("r", begins()));
    let told = |is_own, applied| vec![state(1, "r", is_own, applied)];
    assert_eq!(bench.sent_to(A), [news(Some(0), 1, told(true, None), &[]), (2, Message::Done)]);
    assert_eq!(bench.sent_to(B), [news(Some(0), 1, told(false, None), &[])]);
    // A repeated request changes nothing.
    bench.client(A, 2, does("r", begins()));
    assert_eq!((bench.sent_to(A), bench.sent_to(B)), (vec![(2, Message::Done)], vec![]));
    bench.client(A, 3, does("r", ReaderDoes::Applies(Version(0))));
    assert_eq!(bench.sent_to(B), [news(Some(1), 2, told(false, Some(0)), &[])]);
    bench.client(A, 0, Message::Staged { version: Version(0) });
    assert_eq!(bench.sent_to(B), [], "nothing has changed");
    // Who has missed something, or comes late, is told all.
    bench.client(B, 0, Message::TellReaders);
    assert_eq!(bench.sent_to(B), [news(None, 2, told(false, Some(0)), &[])]);
    bench.client(B, 0, Message::TellReaders);
    assert_eq!(bench.sent_to(B), [], "it was told just now");
    bench.now += REPEAT;
    bench.client(B, 0, Message::TellReaders);
    assert_eq!(bench.sent_to(B), [news(None, 2, told(false, Some(0)), &[])]);
    let late = ClientId(30);
    bench.coordinator.client_up(late, bench.now, &mut bench.said).unwrap();
    assert_eq!(bench.sent_to(late), [news(None, 2, told(false, Some(0)), &[])]);
    bench.client(A, 4, does("r", ReaderDoes::Ends));
    assert_eq!(bench.sent_to(B), [news(Some(2), 3, vec![], &[1])]);
}

#[test]
fn readers_stay_while_their_client_may_come_back_and_go_with_it() {
    let mut bench = Bench::new();
    let reader = ClientId(30);
    bench.coordinator.client_up(reader, bench.now, &mut bench.said).unwrap();
    bench.client(reader, 1, Message::SetControl { name: "lease".into(), value: "3".into() });
    bench.client(reader, 2, does("r", begins()));
    bench.client(reader, 0, Message::AckThrough { request: 2, newest: 2 });
    bench.coordinator.client_down(reader, bench.now, &mut bench.said);
    for _ in 0..2 {
        assert!(bench.coordinator.job().has_readers(reader));
        bench.pass(Now::from_secs(1));
        for client in [A, B] {
            bench.coordinator.client_alive(client, bench.now);
        }
    }
    bench.said.clear();
    bench.pass(Now::from_secs(1));
    assert!(!bench.coordinator.job().has_readers(reader));
    assert_eq!(bench.sent_to(A)[0], news(Some(1), 2, vec![], &[1]));
}

#[test]
fn a_publisher_that_is_held_goes_on_when_the_client_of_the_reader_is_gone() {
    let controls = [("reducer", "assign"), ("hold_for_readers", "1"), ("lease", "60")];
    let controls = Controls::default().with_all(controls).unwrap();
    let coordinator = CoordinatorCore::new(&layout(4), 1, controls, PATIENCE).unwrap();
    let mut bench = Bench { coordinator, now: Now::ZERO, said: Vec::new() };
    for client in [A, B] {
        bench.coordinator.client_up(client, bench.now, &mut bench.said).unwrap();
    }
    bench.client(B, 1, does("r", begins()));
    bench.client(B, 2, does("r", ReaderDoes::Applies(Version(0))));
    bench.client(A, 1, assign(1, 60_000));
    let first = bench.started().plan;
    bench.carries_out(first);
    bench.said.clear();
    bench.client(A, 2, assign(2, 60_000));
    assert_eq!(bench.sent_to_partition(), []);
    assert_eq!(bench.coordinator.state(A, bench.now).held_by, ["r"]);
    bench.coordinator.client_gone(B, "gone", bench.now, &mut bench.said);
    let second = bench.started().plan;
    bench.carries_out(second);
    assert_eq!(bench.coordinator.job().version(), Version(2));
}

#[test]
fn readers_move_with_their_job() {
    let mut bench = Bench::new();
    bench.client(A, 2, does("r", begins()));
    bench.hold();
    let bytes = bench.coordinator.hand_over().unwrap();
    let other = CoordinatorCore::taken_over(&bytes, &layout(4), 1, bench.now).unwrap();
    assert_eq!(other.job().readers(Some(A)), [state(1, "r", true, None)]);
    assert_eq!(other.job().readers_revision(), 1);
}
