//! Blocks of a version that is still being made, and versions that come with their states.

use super::*;
use crate::client::core::Whole;
use crate::vocabulary::members::{LeaveReason, LifeSign};

const PLAN: PlanId = PlanId(1);

impl Bench {
    fn follow(&mut self, partition: usize) -> bool {
        match self.core.next_follow(partition, PlanId(0)) {
            Some(Message::Follow { plan, .. }) => plan == PLAN,
            other => {
                assert_eq!(other, None);
                false
            }
        }
    }

    /// A block comes for the plan; whether it was wanted.
    fn comes(&mut self, plan: PlanId, block: u32, whole: bool) -> bool {
        let block = BlockId(block);
        let Some(version) = self.core.followed(plan) else { return false };
        let wanted = self.core.reserve(version, block);
        if wanted {
            self.core.end_reservation(version, block, whole, self.now, &mut self.said);
        }
        wanted
    }

    /// The newest version was made by this plan, and so many plans are over.
    fn made(&mut self, sequence: u64, version: u64, by: u64, over: u64) {
        self.changes(|state| {
            (state.sequence, state.version) = (sequence, Version(version));
            (state.made_by, state.over) = (PlanId(by), PlanId(over));
        });
    }

    /// All blocks of a version come, and it is shown.
    fn pulled(&mut self, version: u64) {
        let (core, now, said) = (&mut self.core, self.now, &mut self.said);
        for block in (0..4).map(BlockId) {
            assert!(core.reserve(Version(version), block));
            core.end_reservation(Version(version), block, true, now, said);
        }
        core.shown(Version(version), now, said);
    }

    fn is_pulled(&self) -> bool {
        self.said.contains(&Action::Pulled(Version(1)))
    }
}

/// A client that follows the plan which makes version 1.
fn following() -> Bench {
    let mut bench = Bench::told();
    bench.commit(3, 10);
    bench.grant(1);
    assert!(bench.follow(0) && bench.follow(1));
    bench
}

#[test]
fn a_client_that_sends_nothing_follows_the_plan_of_others() {
    let mut bench = Bench::told();
    bench.coordinator(0, Message::Begun { plan: PLAN });
    assert!(bench.follow(0) && bench.follow(1));
    for block in 0..4 {
        assert!(bench.comes(PLAN, block, true));
    }
    assert!(!bench.is_pulled(), "it is not certain that there will be a version");
    bench.made(3, 1, 1, 1);
    assert!(bench.is_pulled());
}

#[test]
fn the_plan_of_others_is_forgotten_with_its_end() {
    let mut bench = Bench::told();
    bench.coordinator(0, Message::Begun { plan: PLAN });
    assert!(bench.follow(0) && bench.comes(PLAN, 0, true));
    bench.made(3, 0, 0, 1);
    assert!(!bench.follow(0) && !bench.comes(PLAN, 1, true), "it has made no version");
    bench.coordinator(0, Message::Begun { plan: PLAN });
    assert!(!bench.follow(0), "the message comes late");
    // Another coordinator may use the number for another plan, and says so.
    bench.coordinator(0, Message::Begun { plan: PlanId(2) });
    bench.core.coordinator_up(bench.now, &mut bench.said);
    bench.made(1, 0, 0, 0);
    assert_eq!(bench.core.next_follow(0, PlanId(0)), None);
}

#[test]
fn new_weights_of_its_own_are_not_followed() {
    let mut bench = Bench::told();
    bench.coordinator(0, Message::Begun { plan: PlanId(0) });
    assert!(!bench.follow(0), "no plan has this number");
}

#[test]
fn blocks_that_come_ahead_are_shown_when_their_plan_has_made_the_version() {
    let mut bench = following();
    for block in 0..4 {
        assert!(bench.comes(PLAN, block, true));
        assert!(!bench.comes(PLAN, block, true), "it is here");
    }
    assert!(!bench.is_pulled(), "it is not certain that there will be a version");
    assert_eq!((bench.core.pulling(), bench.core.next_deadline().is_some()), (None, true));
    bench.made(3, 1, 1, 1);
    assert!(bench.is_pulled());
}

#[test]
fn blocks_of_a_plan_that_has_made_no_version_are_not_shown() {
    for (version, by, over) in [(0, 0, 1), (1, 2, 2), (1, 0, 2), (2, 1, 2)] {
        let mut bench = following();
        (0..4).for_each(|block| assert!(bench.comes(PLAN, block, true)));
        bench.made(3, version, by, over);
        assert!(!bench.is_pulled(), "version {version} by plan {by}");
        assert!(!bench.comes(PLAN, 0, true), "nothing of it is wanted");
        let pulls = (version > 0).then_some(Version(version));
        assert_eq!(bench.core.pulling(), pulls);
    }
}

#[test]
fn a_coordinator_that_connects_again_is_asked_for_the_version_as_if_nothing_had_come() {
    let mut bench = following();
    (0..4).for_each(|block| assert!(bench.comes(PLAN, block, true)));
    bench.core.coordinator_down(bench.now, &mut bench.said);
    bench.core.coordinator_up(bench.now, &mut bench.said);
    bench.made(9, 1, 1, 1);
    assert!(!bench.is_pulled());
    assert_eq!(bench.core.pulling(), Some(Version(1)));
}

#[test]
fn what_a_shard_does_not_send_ahead_is_asked_for_once_the_version_exists() {
    let mut bench = following();
    assert!(bench.comes(PLAN, 0, true) && bench.comes(PLAN, 1, true));
    assert_eq!(bench.core.next_pull(0, 8, bench.now), None);
    bench.pass(5000);
    bench.made(3, 1, 1, 1);
    assert_eq!(bench.core.pulling(), Some(Version(1)));
    assert_eq!(bench.core.pull_whole(true, bench.now), Whole::Not);
    assert_eq!(bench.core.next_pull(0, 8, bench.now), None, "the shard sends the rest by itself");
    assert!(bench.comes(PLAN, 2, true));
    bench.pass(1000);
    let pull = |bench: &mut Bench, partition| bench.core.next_pull(partition, 8, bench.now);
    assert_eq!(pull(&mut bench, 0), None, "it is complete");
    assert_eq!(
        pull(&mut bench, 1),
        Some(Message::Pull { version: Version(1), blocks: 3..4, base: Some(Version(0)) })
    );
    assert!(bench.core.reserve(Version(1), BlockId(3)));
    bench.core.end_reservation(Version(1), BlockId(3), true, bench.now, &mut bench.said);
    assert!(bench.is_pulled());
}

#[test]
fn blocks_that_were_lost_on_their_way_are_asked_for_at_once() {
    for closes in [false, true] {
        let mut bench = following();
        assert!(bench.comes(PLAN, 0, true));
        if closes {
            bench.core.check_partition(0, bench.now, &mut bench.said);
        } else {
            assert!(bench.comes(PLAN, 2, false));
        }
        assert!(!bench.follow(0), "the shard sends no block twice");
        assert_eq!(bench.core.next_pull(0, 8, bench.now), None, "there is no version");
        bench.made(3, 1, 1, 1);
        let missing = Message::Pull { version: Version(1), blocks: 2..3, base: Some(Version(0)) };
        assert_eq!(bench.core.next_pull(0, 8, bench.now), Some(missing));
    }
}

#[test]
fn no_plan_is_followed_while_a_connection_receives_for_another_one() {
    let mut bench = following();
    assert!(bench.core.reserve(Version(1), BlockId(0)));
    bench.made(3, 0, 0, 1);
    bench.grant(2);
    assert_eq!(bench.core.next_follow(0, PlanId(0)), None);
    bench.core.end_reservation(Version(1), BlockId(0), true, bench.now, &mut bench.said);
    assert_eq!(
        bench.core.next_follow(0, PLAN),
        Some(Message::Follow { plan: PlanId(2), base: Some(Version(0)) })
    );
    assert_eq!(bench.core.next_follow(0, PlanId(2)), None, "it was asked over this connection");
    assert!((0..4).all(|block| bench.comes(PlanId(2), block, true)), "nothing was there");
    bench.made(4, 1, 2, 2);
    assert!(bench.is_pulled());
}

#[test]
fn versions_that_are_pulled_on_demand_and_those_of_new_weights_are_not_followed() {
    let mut bench = Bench::new();
    bench.sets(&[("pull", "on-demand")]);
    bench.commit(3, 10);
    bench.grant(1);
    assert!(!bench.follow(0));
    let mut bench = Bench::told();
    bench.ask(3, assign(5, 1), 1);
    bench.granted(1, Granted::Weights(5));
    assert!(!bench.follow(0));
}

#[test]
fn an_open_on_demand_must_show_the_version_that_is_shown_when_it_comes() {
    for (pull, must_show) in [("on-demand", Version(1)), ("eager", Version(0))] {
        let mut bench = Bench::new();
        bench.sets(&[("pull", pull)]);
        bench.made(3, 1, 0, 0);
        let expected = if pull == "on-demand" { LastCommit::Waits } else { LastCommit::In(Version(0)) };
        assert_eq!(bench.core.freshness(None), expected);
        // The name was looked up before this, and so names the version before.
        bench.core.shown(Version(1), bench.now, &mut bench.said);
        assert_eq!(bench.core.freshness(None), LastCommit::In(must_show));
    }
}

#[test]
fn payload_of_a_step_that_is_not_the_open_one_is_released() {
    let mut bench = following();
    bench.coordinator(3, Message::Done);
    bench.state(3, 1, 1, false);
    bench.ask(4, commit(L, 3, 0..4, 1, false), 1);
    bench.coordinator(4, Message::Refused(ShardError::TimedOut("others".into()).into()));
    bench.said.clear();
    bench.ask(5, Message::Open { learner: L }, 10);
    bench.coordinator(5, Message::Opened { step: Step(2), staging_lent: false });
    assert!(bench.said.contains(&Action::Release(L, Step(3))), "{:?}", bench.said);
}

#[test]
fn the_time_of_a_pull_is_known_where_no_shard_sends_blocks_by_itself() {
    for sends in [false, true] {
        let mut bench = Bench::told();
        bench.commit(3, 10);
        bench.grant(1);
        if sends {
            assert!(bench.follow(0) && bench.follow(1));
        }
        bench.pass(500);
        bench.made(3, 1, 1, 1);
        bench.pass(200);
        (0..4).for_each(|block| assert!(bench.comes(PLAN, block, true)));
        assert!(bench.is_pulled());
        bench.core.shown(Version(1), bench.now, &mut bench.said);
        let pull = bench.core.pull_report().1.pull;
        assert_eq!(pull, (!sends).then_some(Duration::from_millis(200)));
    }
}

#[test]
fn an_adaptive_client_follows_a_synchronous_plan_once_all_is_committed() {
    for consistency in ["sync", "async"] {
        let mut bench = Bench::new();
        bench.sets(&[("pull", "adaptive"), ("consistency", consistency)]);
        bench.changes(|state| state.members = 1);
        // A program opens once a second, and a pull takes 0.2 s.
        for version in 1..20 {
            bench.core.version_opened(None, bench.now);
            bench.made(2 + version, version, 0, 0);
            bench.pass(700);
            assert_eq!(bench.core.pulling(), Some(Version(version)));
            bench.pass(200);
            bench.pulled(version);
            bench.pass(100);
        }
        bench.core.version_opened(None, bench.now);
        bench.provisional(1, 1);
        assert!(!bench.follow(0), "it is not due");
        bench.commit(3, 10);
        bench.grant(1);
        assert_eq!(bench.follow(0), consistency == "sync");
    }
}

/// An adaptive client in an asynchronous job, which shows version 3. A program that is no learner opens so often, and a
/// pull takes 0.2 s.
fn adaptive(interval: u64) -> Bench {
    let mut bench = Bench::new();
    bench.sets(&[("pull", "adaptive"), ("consistency", "async")]);
    bench.changes(|state| state.members = 1);
    for version in 1..4 {
        let opened = bench.now;
        bench.core.version_opened(None, bench.now);
        bench.made(2 + version, version, 0, 0);
        while bench.core.pulling().is_none() {
            bench.pass(100);
        }
        bench.pass(200);
        bench.pulled(version);
        bench.pass(interval - (bench.now - opened).as_millis() as u64);
    }
    bench.core.version_opened(None, bench.now);
    bench
}

#[test]
fn after_the_last_contribution_its_version_is_pulled_within_a_second_though_nobody_opens() {
    let mut bench = adaptive(8000);
    bench.made(6, 4, 0, 0);
    assert_eq!(bench.core.pulling(), None, "an open is expected in eight seconds");
    let due = bench.core.next_deadline().unwrap();
    assert!(due <= bench.now + Duration::from_secs(1), "{due:?}");
    bench.pass(500);
    bench.made(7, 5, 0, 0);
    assert_eq!(bench.core.pulling(), None, "newer ones come meanwhile");
    bench.pass(500);
    assert_eq!(bench.core.pulling(), Some(Version(5)));
}

#[test]
fn when_a_learner_leaves_or_its_program_ends_or_none_is_left_the_newest_version_is_pulled_at_once() {
    for what in ["leaves", "ends", "the last one"] {
        let mut bench = adaptive(8000);
        bench.made(6, 4, 0, 0);
        assert_eq!(bench.core.pulling(), None, "an open is expected in eight seconds");
        match what {
            "leaves" => bench.coordinator(0, Message::Left { learner: L, reason: LeaveReason::Asked }),
            "ends" => bench.core.touch(vec![L], LifeSign::Process(Attached::Exited), &mut bench.said),
            _ => bench.changes(|state| state.members = 0),
        }
        let is_due = bench.core.next_deadline().is_some_and(|due| due <= bench.now);
        assert!(is_due || bench.core.pulling().is_some(), "{what}");
        bench.pass(0);
        assert_eq!(bench.core.pulling(), Some(Version(4)), "{what}");
    }
}

#[test]
fn an_open_without_rhythm_waits_for_the_version_that_is_known() {
    for (interval, waits) in [(8000, true), (800, false)] {
        let mut bench = adaptive(interval);
        bench.made(6, 4, 0, 0);
        let expected = if waits { LastCommit::Waits } else { LastCommit::In(Version(0)) };
        assert_eq!(bench.core.freshness(None), expected, "one open each {interval} ms");
        assert_eq!(bench.core.freshness(Some(L)), LastCommit::In(Version(0)), "learners do not wait");
        if !waits {
            continue;
        }
        let deadline = bench.now + Duration::from_secs(10);
        bench.core.await_fresh(9, None, deadline, bench.now, &mut bench.said);
        assert_eq!(bench.core.pulling(), Some(Version(4)), "it is pulled at once for this");
        bench.made(7, 5, 0, 0);
        bench.pulled(4);
        assert!(bench.said.contains(&Action::Awaited(9, Ok(Version(4)))), "newer ones are not waited for");
    }
}

#[test]
fn no_open_waits_for_a_version_whose_shard_is_away() {
    let mut bench = adaptive(8000);
    bench.made(6, 4, 0, 0);
    let deadline = bench.now + Duration::from_secs(10);
    bench.core.await_fresh(9, None, deadline, bench.now, &mut bench.said);
    bench.core.shard_down(1);
    bench.pass(1000);
    assert!(bench.said.contains(&Action::Awaited(9, Ok(Version(3)))), "{:?}", bench.said);
    assert_eq!(bench.core.freshness(None), LastCommit::In(Version(0)));
}

#[test]
fn a_version_that_comes_with_its_state_is_not_pulled() {
    let mut bench = Bench::told();
    assert!(bench.core.takes_version(Version(1)) && !bench.core.takes_version(Version(0)));
    bench.core.brings(Version(1));
    bench.made(3, 1, 1, 1);
    bench.core.brings_nothing();
    assert!(bench.is_pulled());
    assert!(!bench.core.takes_version(Version(2)), "the buffer is not free before the version is shown");
    bench.core.shown(Version(1), bench.now, &mut bench.said);
    // A state that is older than the newest one changes nothing.
    bench.core.brings(Version(2));
    bench.made(3, 2, 2, 2);
    bench.core.brings_nothing();
    assert_eq!((bench.core.version(), bench.core.pulling()), (Version(1), None));
    bench.made(4, 2, 2, 2);
    assert_eq!(bench.core.pulling(), Some(Version(2)));
    assert!(!bench.core.takes_version(Version(3)), "it is pulled into the buffer");
}
