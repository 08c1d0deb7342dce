//! Shards that are out of reach: who waits for them, and for how long.

use super::*;
use crate::client::core::Gone;
use crate::vocabulary::ids::Epoch;
use crate::vocabulary::members::LeaveReason;

const COORDINATOR: ShardId = ShardId(1);
const OTHER: ShardId = ShardId(2);

impl Bench {
    fn later() -> Bench {
        Bench { now: Duration::from_secs(100), ..Bench::new() }
    }

    fn gone(&mut self, coordinator: bool, seconds: u64) {
        let gone = |shard| Gone { shard, since: self.now.saturating_sub(Duration::from_secs(seconds)) };
        let (first, second) = (coordinator.then(|| gone(COORDINATOR)), gone(OTHER));
        self.core.out_of_reach(first, if coordinator { Vec::new() } else { vec![second] });
    }

    /// The same, and looks what is due.
    fn lost(&mut self, coordinator: bool, seconds: u64) {
        self.gone(coordinator, seconds);
        self.pass(0);
    }

    /// The requests that ended with a timeout which names this shard, by their tokens.
    fn named(&mut self, shard: ShardId) -> Vec<u64> {
        let why = format!("out of reach: shard {shard},");
        let named = self.said.drain(..).filter_map(|action| match action {
            Action::Answer(token, Err(Refusal::Shard(ShardError::TimedOut(said)))) => {
                said.starts_with(&why).then_some(token)
            }
            Action::Awaited(token, Err(ShardError::TimedOut(said))) => {
                said.starts_with(&why).then_some(token)
            }
            _ => None,
        });
        named.collect()
    }
}

fn set_control() -> Message {
    Message::SetControl { name: "learners".into(), value: "2".into() }
}

#[test]
fn calls_that_need_a_shard_wait_for_shard_patience() {
    let mut bench = Bench::later();
    bench.commit(2, 100);
    bench.coordinator(3, Message::Done);
    bench.commit(3, 100);
    bench.ask(4, set_control(), 100);
    bench.core.await_step(5, L, bench.now + Duration::from_secs(100), bench.now, &mut bench.said);
    bench.lost(false, 19);
    assert!(bench.named(OTHER).is_empty());
    assert!(bench.core.lost_patience(bench.now).is_none());
    bench.lost(false, 20);
    assert_eq!(bench.named(OTHER), [3, 5], "settings need the coordinator alone");
    // Later ones end at once, and nothing of them is sent.
    bench.commit(6, 100);
    assert_eq!(bench.named(OTHER), [6]);
    bench.lost(true, 20);
    assert_eq!(bench.named(COORDINATOR), [4]);
    bench.core.out_of_reach(None, Vec::new());
    bench.commit(7, 100);
    assert!(bench.said.iter().any(|said| matches!(said, Action::ToCoordinator(..))));
}

#[test]
fn no_patience_with_shards_is_patience_for_a_lost_connection() {
    let mut bench = Bench::later();
    bench.sets(&[("shard_patience", "0")]);
    bench.commit(4, 100);
    bench.lost(false, 1);
    assert!(bench.named(OTHER).is_empty(), "it may be back in a moment");
    bench.lost(false, 2);
    assert_eq!(bench.named(OTHER), [4]);
}

#[test]
fn joining_and_leaving_end_as_soon_as_the_coordinator_is_known_to_be_away() {
    let mut bench = Bench::later();
    let join = || Message::Join { name: "m".into() };
    bench.ask(3, join(), 10);
    bench.ask(4, Message::Leave { learner: L, reason: LeaveReason::Asked }, 10);
    bench.said.clear();
    bench.lost(true, 1);
    assert!(bench.named(COORDINATOR).is_empty(), "it may be back in a moment");
    bench.lost(true, 2);
    assert_eq!(bench.named(COORDINATOR), [3, 4]);
    bench.ask(5, join(), 10);
    assert_eq!(bench.named(COORDINATOR), [5]);
    // The learner leaves when the coordinator is back, however long that takes.
    bench.pass(60_000);
    bench.said.clear();
    bench.core.coordinator_down(bench.now, &mut bench.said);
    bench.core.coordinator_up(bench.now, &mut bench.said);
    let leaves = bench.said.iter().find_map(|said| match said {
        Action::ToCoordinator(request, Message::Leave { .. }) => Some(*request),
        _ => None,
    });
    bench.coordinator(leaves.expect("it is sent again"), Message::Done);
    assert!(bench.said.contains(&Action::Left(L, LeaveReason::Asked)));
}

#[test]
fn a_call_waits_for_a_coordinator_that_has_just_come_back() {
    let mut bench = Bench::later();
    bench.gone(true, 20);
    bench.core.coordinator_down(bench.now, &mut bench.said);
    bench.ask(3, Message::Join { name: "m".into() }, 10);
    bench.ask(4, set_control(), 10);
    assert_eq!(bench.named(COORDINATOR), [3, 4]);
    bench.core.coordinator_up(bench.now, &mut bench.said);
    bench.said.clear();
    bench.ask(5, Message::Join { name: "m".into() }, 10);
    bench.ask(6, set_control(), 10);
    let sent = |said: &Action| matches!(said, Action::ToCoordinator(..));
    assert!(bench.said.len() == 2 && bench.said.iter().all(sent), "{:?}", bench.said);
}

#[test]
fn a_call_waits_for_shards_to_which_the_model_has_just_moved() {
    let mut bench = Bench::later();
    bench.core.out_of_reach(
        Some(Gone { shard: COORDINATOR, since: Duration::ZERO }),
        vec![Gone { shard: OTHER, since: Duration::ZERO }],
    );
    let map = BlockMap::from_owners(Epoch(2), vec![ShardId(9); 4]).unwrap();
    assert!(bench.core.moved(&map, bench.now, &mut bench.said));
    bench.said.clear();
    bench.ask(3, Message::Join { name: "m".into() }, 10);
    bench.commit(4, 10);
    assert_eq!(bench.said, [], "they wait for a connection");
    assert!(bench.core.lost_patience(bench.now).is_none());
}

#[test]
fn what_is_taken_back_while_the_coordinator_is_away_is_told_it_later() {
    let mut bench = Bench::later();
    bench.commit(3, 100);
    bench.gone(true, 20);
    bench.core.coordinator_down(bench.now, &mut bench.said);
    bench.pass(0);
    assert_eq!(bench.named(COORDINATOR), [3], "it may have been taken");
    for token in [4, 5] {
        bench.ask(token, Message::Abort { learner: L }, 10);
        assert_eq!(bench.named(COORDINATOR), [token], "nobody knows whether it counts");
    }
    bench.pass(60_000);
    bench.said.clear();
    bench.core.coordinator_up(bench.now, &mut bench.said);
    let told = bench.said.iter().filter_map(|said| match said {
        Action::ToCoordinator(request, Message::Abort { learner: L }) => Some(*request),
        _ => None,
    });
    let told: Vec<_> = told.collect();
    assert_eq!(told.len(), 1, "{:?}", bench.said);
    // A coordinator that has taken the commit before that gets no payload for it.
    bench.said.clear();
    bench.grant(1);
    assert!(bench.pushes(0).is_empty());
    let gone = Message::SourceGone { plan: PlanId(1), learner: Some(L) };
    assert!(bench.said.contains(&Action::ToCoordinator(0, gone)), "{:?}", bench.said);
    bench.coordinator(told[0], Message::Done);
    bench.pass(60_000);
    bench.said.clear();
    bench.core.coordinator_up(bench.now, &mut bench.said);
    let again = |said: &Action| matches!(said, Action::ToCoordinator(_, Message::Abort { .. }));
    assert!(!bench.said.iter().any(again), "it was told");
}

#[test]
fn new_weights_that_nobody_waits_for_are_taken_back_when_the_shards_answer() {
    let mut bench = Bench::later();
    bench.ask(3, assign(9, 100), 100);
    bench.lost(false, 20);
    let told = |said: &Action| matches!(said, Action::ToCoordinator(_, Message::WithdrawAssign { token: 9 }));
    assert!(bench.said.iter().any(told), "{:?}", bench.said);
    assert_eq!(bench.named(OTHER), [3]);
}

#[test]
fn whoever_asks_for_the_settings_waits_for_the_coordinator_as_who_changes_one_does() {
    let mut bench = Bench::later();
    bench.ask(3, Message::WithdrawAssign { token: u64::MAX }, 100);
    bench.lost(true, 19);
    assert!(bench.named(COORDINATOR).is_empty(), "its patience lasts");
    bench.lost(true, 20);
    assert_eq!(bench.named(COORDINATOR), [3]);
    bench.ask(4, Message::WithdrawAssign { token: u64::MAX }, 100);
    assert_eq!(bench.named(COORDINATOR), [4], "at once");
}

#[test]
fn a_request_whose_time_is_over_names_the_coordinator_that_is_away() {
    let mut bench = Bench::later();
    bench.ask(3, Message::WithdrawAssign { token: u64::MAX }, 5);
    bench.gone(true, 4);
    bench.pass(5_000);
    assert_eq!(bench.named(COORDINATOR), [3]);
}

#[test]
fn a_signal_ends_a_wait_though_nobody_answers() {
    for is_commit in [true, false] {
        let mut bench = Bench::new();
        let withdraw = match is_commit {
            true => Message::Withdraw { learner: L },
            false => Message::WithdrawAssign { token: 9 },
        };
        match is_commit {
            true => bench.commit(3, 100),
            false => bench.ask(3, assign(9, 100), 100),
        }
        bench.ask(4, withdraw.clone(), 100);
        bench.pass(200);
        bench.ask(5, withdraw, 100);
        let ended = Action::Answer(3, Err(ShardError::Interrupted.into()));
        bench.pass(199);
        assert!(!bench.said.contains(&ended), "it may be answered yet");
        bench.pass(1);
        assert!(bench.said.contains(&ended), "{:?}", bench.said);
    }
}
