//! Decisions at a simulated clock.

use super::*;
use Act::{Leave, Restart, Send, Start};
use proptest::prelude::*;

const GRACE: Duration = Duration::from_secs(30);

fn of(on_failure: OnFailure, count: u32) -> (Supervisor, Instant) {
    let mut supervisor = Supervisor::new(on_failure, 2, GRACE);
    for rank in 0..count {
        assert_eq!(supervisor.add(), [Start(rank)]);
    }
    (supervisor, Instant::now())
}

/// Acts without what is said.
fn done(acts: Vec<Act>) -> Vec<Act> {
    acts.into_iter().filter(|act| !matches!(act, Act::Say(_))).collect()
}

#[test]
fn those_that_end_well_leave_and_the_status_is_0() {
    let (mut all, now) = of(OnFailure::Stop, 2);
    assert_eq!(all.ended(0, End::Exited(0), now), [Leave(0)]);
    assert_eq!(all.status(), None);
    assert_eq!(all.ended(1, End::Exited(0), now), [Leave(1)]);
    assert_eq!(all.status(), Some(0));
    assert_eq!(all.ended(1, End::Exited(3), now), [], "it has ended before");
}

#[test]
fn a_failure_ends_the_others_and_kills_them_after_the_grace() {
    let (mut all, now) = of(OnFailure::Stop, 3);
    let acts = done(all.ended(1, End::Exited(7), now));
    assert_eq!(acts, [Send(0, Signal::SIGTERM), Send(2, Signal::SIGTERM), Leave(1)]);
    assert_eq!(all.ended(0, End::Killed(15), now), [Leave(0)]);
    assert_eq!(all.next_tick(), Some(now + GRACE));
    assert_eq!(all.tick(now + GRACE - Duration::from_millis(1)), []);
    assert_eq!(done(all.tick(now + GRACE)), [Send(2, Signal::SIGKILL)]);
    assert_eq!((all.tick(now + 2 * GRACE), all.next_tick()), (vec![], None), "once");
    all.ended(2, End::Killed(9), now + GRACE);
    assert_eq!(all.status(), Some(7), "the first failure's");
}

#[test]
fn none_is_started_once_all_are_to_end() {
    let (mut all, now) = of(OnFailure::Stop, 1);
    all.ended(0, End::NotStarted, now);
    assert_eq!((all.next_rank(), all.add()), (1, vec![Leave(1)]));
    assert_eq!((all.status(), all.next_rank()), (Some(126), 2));
}

#[test]
fn dropped_ones_count_only_if_all_fail() {
    let (mut all, now) = of(OnFailure::Drop, 2);
    assert_eq!(done(all.ended(0, End::Killed(9), now)), [Leave(0)]);
    all.ended(1, End::Exited(0), now);
    assert_eq!(all.status(), Some(0));
    let (mut all, now) = of(OnFailure::Drop, 2);
    all.ended(1, End::Killed(9), now);
    all.ended(0, End::Exited(3), now);
    assert_eq!(all.status(), Some(137));
}

#[test]
fn a_process_is_started_again_as_often_as_it_may() {
    let (mut all, now) = of(OnFailure::Restart, 2);
    for _ in 0..2 {
        assert_eq!(done(all.ended(0, End::Exited(1), now)), [Restart(0)]);
    }
    assert_eq!(done(all.ended(1, End::Exited(1), now)), [Restart(1)], "each has its own count");
    assert_eq!(done(all.ended(0, End::Exited(4), now)), [Send(1, Signal::SIGTERM), Leave(0)]);
    all.ended(1, End::Killed(15), now);
    assert_eq!(all.status(), Some(4));
}

#[test]
fn a_process_that_a_forwarded_signal_ends_is_not_started_again() {
    let (mut all, now) = of(OnFailure::Restart, 1);
    assert_eq!(all.signal(Signal::SIGHUP, now), [Send(0, Signal::SIGHUP)]);
    assert_eq!(done(all.ended(0, End::Killed(1), now)), [Leave(0)]);
    assert_eq!(all.status(), Some(129));
}

#[test]
fn a_process_that_cannot_be_started_is_not_tried_again() {
    let (mut all, now) = of(OnFailure::Restart, 2);
    assert_eq!(done(all.ended(0, End::NotStarted, now)), [Send(1, Signal::SIGTERM), Leave(0)]);
    all.ended(1, End::Killed(15), now);
    assert_eq!(all.status(), Some(126));
}

#[test]
fn signals_go_to_all_and_a_second_interrupt_kills() {
    let (mut all, now) = of(OnFailure::Restart, 2);
    assert_eq!(all.signal(Signal::SIGUSR1, now), [Send(0, Signal::SIGUSR1), Send(1, Signal::SIGUSR1)]);
    assert_eq!(all.next_tick(), None, "nobody is to end");
    assert_eq!(all.signal(Signal::SIGINT, now), [Send(0, Signal::SIGINT), Send(1, Signal::SIGINT)]);
    assert_eq!(all.next_tick(), Some(now + GRACE));
    assert_eq!(all.signal(Signal::SIGINT, now + REPEATED_WITHIN / 2), [], "the same wish");
    assert_eq!(all.ended(0, End::Killed(2), now), [Leave(0)], "it is not started again");
    assert_eq!(all.signal(Signal::SIGTERM, now + REPEATED_WITHIN), [Send(1, Signal::SIGTERM)]);
    assert_eq!(all.signal(Signal::SIGINT, now + REPEATED_WITHIN), [Send(1, Signal::SIGKILL)]);
    assert_eq!(all.tick(now + 2 * GRACE), []);
    all.ended(1, End::Killed(9), now);
    assert_eq!(all.status(), Some(130));
}

#[test]
fn one_too_many_is_asked_and_its_end_is_no_failure() {
    let (mut all, now) = of(OnFailure::Stop, 2);
    assert_eq!(all.remove_last(now), [Send(1, Signal::SIGTERM)]);
    assert_eq!(done(all.tick(now + GRACE)), [Send(1, Signal::SIGKILL)]);
    assert_eq!(all.ended(1, End::Killed(9), now), [Leave(1)]);
    all.ended(0, End::Exited(0), now);
    assert_eq!(all.status(), Some(0));
    assert_eq!(all.remove_last(now), []);
}

proptest! {
    /// Whatever happens, each learner leaves once, nobody is signalled after its end, and the end comes.
    #[test]
    fn everybody_leaves_once(
        policy in prop::sample::select(vec![OnFailure::Stop, OnFailure::Drop, OnFailure::Restart]),
        count in 1u32..6,
        events in prop::collection::vec((0u32..6, 0u8..7, 0u64..40), 0..60),
    ) {
        let (mut all, mut now) = of(policy, count);
        let mut alive = vec![true; count as usize];
        let mut left = vec![0; count as usize];
        let mut starts = 0;
        let mut check = |acts: Vec<Act>, alive: &mut Vec<bool>| -> Result<(), TestCaseError> {
            for act in acts {
                match act {
                    Send(rank, _) => prop_assert!(alive[rank as usize], "{} is signalled", rank),
                    Leave(rank) => left[rank as usize] += 1,
                    Restart(rank) => { alive[rank as usize] = true; starts += 1; }
                    _ => {}
                }
            }
            Ok(())
        };
        let ends = (0..count * 4).map(|i| (i % count, 1u8, 0u64));
        for (rank, what, seconds) in events.into_iter().chain(ends) {
            now += Duration::from_secs(seconds);
            let rank = rank % count;
            let acts = match what {
                0..=2 => {
                    alive[rank as usize] = false;
                    let end = [End::Exited(0), End::Exited(1), End::Killed(9)][usize::from(what)];
                    all.ended(rank, end, now)
                }
                3 => all.signal(Signal::SIGINT, now),
                4 => all.signal(Signal::SIGUSR1, now),
                5 => all.remove_last(now),
                _ => all.tick(now),
            };
            check(acts, &mut alive)?;
        }
        prop_assert!(all.status().is_some());
        prop_assert!(starts <= 2 * count);
        prop_assert!(left.iter().all(|times| *times == 1), "{:?}", left);
    }
}
