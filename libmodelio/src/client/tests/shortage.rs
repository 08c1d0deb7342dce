//! No memory for the version that is to be pulled.

use super::*;

const LATER: Duration = Duration::from_secs(60);
const GRACE: Duration = Duration::from_millis(200);

/// A client whose step 1 is committed, and not yet in a version.
fn committed() -> Bench {
    let mut bench = Bench::committed();
    bench.coordinator(3, Message::Done);
    bench.said.clear();
    bench
}

fn answers(bench: &mut Bench) -> Vec<Result<Version, ShardError>> {
    let answer = |action| match action {
        Action::Awaited(_, answer) => Some(answer),
        _ => None,
    };
    std::mem::take(&mut bench.said).into_iter().filter_map(answer).collect()
}

#[test]
fn who_waits_for_a_version_that_exists_is_told_that_there_is_no_memory_for_it() {
    let mut bench = committed();
    bench.core.await_step(4, L, LATER, bench.now, &mut bench.said);
    bench.state(2, 1, 1, false);
    bench.core.lacks_memory("all is taken".into(), bench.now);
    // A version that was just closed may come back at once.
    let at = bench.now + GRACE;
    assert_eq!(bench.core.next_deadline(), Some(at));
    bench.pass(199);
    assert_eq!(answers(&mut bench), []);
    bench.pass(1);
    let told = ShardError::OutOfMemory("no memory for another version here: all is taken".into());
    assert_eq!(answers(&mut bench), [Err(told.clone())]);
    assert!(bench.core.next_deadline() > Some(bench.now), "no tick has more to do");
    // The version is still wanted, and its blocks are asked for once there is memory.
    assert_eq!((bench.core.pulling(), bench.core.shortage()), (Some(Version(1)), Some("all is taken")));
    // For the next one that waits, memory is looked for first.
    bench.pass(1000);
    bench.said.clear();
    bench.core.await_step(5, L, LATER, bench.now, &mut bench.said);
    assert_eq!(bench.said, [Action::Wake(0), Action::Wake(1)]);
    bench.said.clear();
    bench.pass(199);
    assert_eq!(answers(&mut bench), []);
    bench.pass(1);
    assert_eq!(answers(&mut bench), [Err(told)]);
}

#[test]
fn memory_that_comes_in_time_is_no_error() {
    let mut bench = committed();
    bench.core.await_step(4, L, LATER, bench.now, &mut bench.said);
    bench.state(2, 1, 1, false);
    bench.core.lacks_memory("all is taken".into(), bench.now);
    bench.pass(100);
    bench.core.has_memory();
    bench.pass(1000);
    assert_eq!(answers(&mut bench), []);
}

#[test]
fn a_shortage_that_comes_and_goes_is_said_once_a_minute() {
    let mut bench = Bench::new();
    let mut said = Vec::new();
    for second in 0..150 {
        if bench.core.lacks_memory("all is taken".into(), bench.now) {
            said.push(second);
        }
        bench.core.has_memory();
        bench.now += Duration::from_secs(1);
    }
    assert_eq!(said, [0, 60, 120]);
}

#[test]
fn who_waits_for_others_goes_on_waiting_without_memory() {
    let mut bench = committed();
    bench.core.await_step(4, L, LATER, bench.now, &mut bench.said);
    bench.core.lacks_memory("all is taken".into(), bench.now);
    bench.pass(1000);
    assert_eq!(answers(&mut bench), []);
    assert!(bench.core.next_deadline() > Some(bench.now));
    // Memory is there when the version is.
    bench.core.has_memory();
    bench.state(2, 1, 1, false);
    for block in (0..4).map(BlockId) {
        assert!(bench.core.reserve(Version(1), block));
        bench.core.end_reservation(Version(1), block, true, bench.now, &mut bench.said);
    }
    bench.core.shown(Version(1), bench.now, &mut bench.said);
    assert_eq!(answers(&mut bench), [Ok(Version(1))]);
}

#[test]
fn a_version_that_is_shown_ends_the_shortage() {
    let mut bench = committed();
    bench.state(2, 1, 1, false);
    bench.core.lacks_memory("all is taken".into(), bench.now);
    bench.core.shown(Version(1), bench.now, &mut bench.said);
    assert_eq!(bench.core.shortage(), None);
    bench.core.await_newest(6, LATER, bench.now, &mut bench.said);
    assert_eq!(answers(&mut bench), [Ok(Version(1))]);
}
