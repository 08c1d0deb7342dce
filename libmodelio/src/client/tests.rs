//! Conversations of a client with a coordinator and two shards.

#![allow(clippy::single_range_in_vec_init)] // Lists of ranges of blocks.

mod coding;
mod following;
mod halfway;
mod histories;
mod learners;
mod lies;
mod moves;
mod open_weights;
mod reach;
mod readers;
mod relay;
mod shortage;

use std::time::Duration;

use crate::client::core::{Action, BUFFERS_HELD, ClientCore, LastCommit, NOT_HERE, Now};
use crate::vocabulary::block_map::BlockMap;
use crate::vocabulary::ids::{BlockId, Incarnation, LearnerId, PlanId, ShardId, Step, Version};
use crate::vocabulary::members::Attached;
use crate::vocabulary::phase::JobPhase;
use crate::vocabulary::shard_error::ShardError;
use crate::wire::{Granted, JobState, LearnerState, Message, Refusal};

const L: LearnerId = LearnerId(7);

struct Bench {
    core: ClientCore,
    now: Now,
    said: Vec<Action>,
}

impl Bench {
    /// A client of four blocks on two shards, with a learner whose step 1 is open.
    fn new() -> Bench {
        Bench::of(4)
    }

    /// The same, of so many blocks.
    fn of(blocks: u32) -> Bench {
        let map = BlockMap::striped(blocks, &[ShardId(1), ShardId(2)]).unwrap();
        let core = ClientCore::new(&map);
        let mut bench = Bench { core, now: Now::ZERO, said: Vec::new() };
        bench.core.shown(Version(0), bench.now, &mut bench.said);
        bench.core.coordinator_up(bench.now, &mut bench.said);
        (0..bench.core.shards().len())
            .for_each(|partition| bench.core.shard_up(partition, bench.now, &mut bench.said));
        bench.ask(1, Message::Join { name: "l".into() }, 10);
        let joined = Message::Joined { learner: L, incarnation: Incarnation(1), since: 1 };
        bench.coordinator(1, joined);
        bench.ask(2, Message::Open { learner: L }, 10);
        bench.coordinator(2, Message::Opened { step: Step(1), staging_lent: false });
        bench.said.clear();
        bench
    }

    /// Step 1 is committed, with token 3.
    fn committed() -> Bench {
        let mut bench = Bench::new();
        bench.commit(3, 10);
        bench
    }

    /// Plan 1 takes it.
    fn in_plan() -> Bench {
        let mut bench = Bench::committed();
        bench.grant(1);
        bench
    }

    /// The coordinator has told its state, under number 2.
    fn told() -> Bench {
        let mut bench = Bench::new();
        bench.state(2, 0, 0, false);
        bench
    }

    fn ask(&mut self, token: u64, message: Message, seconds: u64) {
        let deadline = self.now + Duration::from_secs(seconds);
        self.core.request(token, message, deadline, self.now, &mut self.said);
    }

    fn commit(&mut self, token: u64, seconds: u64) {
        self.commit_of(token, seconds, false);
    }

    fn commit_of(&mut self, token: u64, seconds: u64, lent: bool) {
        self.ask(token, commit(L, 1, 0..3, seconds, lent), seconds);
    }

    fn coordinator(&mut self, request: u64, message: Message) {
        self.core.from_coordinator(request, message, self.now, &mut self.said);
    }

    fn grant(&mut self, plan: u64) {
        let payload = Granted::Contributions { of: vec![(L, Step(1))], replaces: false, open: None };
        self.granted(plan, payload);
    }

    fn granted(&mut self, plan: u64, payload: Granted) {
        self.coordinator(0, Message::Grant { plan: PlanId(plan), payload, counted: PlanId(0) });
    }

    /// The same, while the learner is still writing.
    fn provisional(&mut self, plan: u64, step: u64) {
        let of = vec![(L, Step(step))];
        self.granted(plan, Granted::Contributions { of, replaces: false, open: Some(vec![L]) });
    }

    /// The state changes, and the coordinator says so.
    fn changes(&mut self, change: impl FnOnce(&mut JobState)) {
        let mut state = self.core.state().clone();
        state.sequence += 1;
        change(&mut state);
        self.coordinator(0, Message::State(Box::new(state)));
    }

    fn sets(&mut self, settings: &[(&str, &str)]) {
        self.changes(|state| {
            state.controls = state.controls.clone().with_all(settings.iter().copied()).unwrap();
        });
    }

    fn pass(&mut self, millis: u64) {
        self.now += Duration::from_millis(millis);
        self.core.tick(self.now, &mut self.said);
    }

    fn pushes(&mut self, partition: usize) -> Vec<u32> {
        std::iter::from_fn(|| self.core.next_push(partition, self.now)).map(|push| push.block.0).collect()
    }

    fn state(&mut self, sequence: u64, version: u64, step: u64, unpublished: bool) {
        let learner = LearnerState {
            learner: L,
            incarnation: Incarnation(1),
            step: Step(step),
            unpublished,
            published_in: Version(version),
            joined_at: Version(0),
            attached: Attached::No,
        };
        let version = Version(version);
        self.coordinator(
            0,
            Message::State(Box::new(JobState {
                sequence,
                version,
                learners: vec![learner],
                ..JobState::default()
            })),
        );
    }
}

fn commit(learner: LearnerId, step: u64, blocks: std::ops::Range<u32>, seconds: u64, lent: bool) -> Message {
    Message::Commit {
        learner,
        step: Step(step),
        blocks: vec![blocks],
        tensors: vec![0..1],
        partly: Some(Default::default()),
        contents: Default::default(),
        weight: Default::default(),
        timeout_ms: seconds as u32 * 1000,
        lent,
        given_up: None,
        base: None,
    }
}

/// New weights of all blocks.
fn assign(token: u64, seconds: u64) -> Message {
    Message::Assign {
        token,
        blocks: vec![0..4],
        timeout_ms: seconds as u32 * 1000,
        ahead: None,
        meta: Default::default(),
    }
}

#[test]
fn a_job_without_coordinator_fails_at_once_until_one_is_found() {
    let mut bench = Bench::committed();
    bench.core.await_step(4, L, Duration::from_secs(20), bench.now, &mut bench.said);
    let lost = || ShardError::Lost("it has come back empty".into());
    bench.said.clear();
    bench.core.fail(lost(), bench.now, &mut bench.said);
    assert!(bench.said.contains(&Action::Answer(3, Err(lost().into()))), "{:?}", bench.said);
    assert!(bench.said.contains(&Action::Release(L, Step(1))), "nobody asks for it any more");
    assert_eq!((bench.core.state().phase, bench.core.kept()), (JobPhase::Failed, (0, 0)));
    bench.said.clear();
    bench.ask(5, Message::Join { name: "x".into() }, 10);
    assert!(bench.said.contains(&Action::Answer(5, Err(lost().into()))), "{:?}", bench.said);

    // It was another process that said so.
    bench.core.coordinator_up(bench.now, &mut bench.said);
    bench.said.clear();
    bench.ask(6, Message::Join { name: "x".into() }, 10);
    assert!(matches!(bench.said[..], [Action::ToCoordinator(_, Message::Join { .. })]), "{:?}", bench.said);
    assert_eq!(bench.core.lost(), None);
}

#[test]
fn a_job_that_has_failed_needs_no_coordinator_to_refuse_what_is_asked() {
    let mut bench = Bench::new();
    bench.ask(4, Message::Join { name: "w".into() }, 10);
    bench.pass(10);
    bench.changes(|state| state.phase = JobPhase::Failed);
    bench.said.clear();
    bench.ask(5, Message::Join { name: "x".into() }, 10);
    assert!(matches!(bench.said[..], [Action::ToCoordinator(_, Message::Join { .. })]), "{:?}", bench.said);
    bench.said.clear();
    let why = bench.core.lost().unwrap();
    bench.core.coordinator_down(bench.now, &mut bench.said);
    assert_eq!(bench.said, [Action::Answer(5, Err(why.clone().into()))], "not what may have been taken");
    bench.said.clear();
    bench.ask(6, Message::Join { name: "y".into() }, 10);
    assert_eq!(bench.said, [Action::Answer(6, Err(why.into()))]);
}

#[test]
fn a_job_that_has_failed_can_be_abandoned_too() {
    let mut bench = Bench::new();
    bench.changes(|state| state.phase = JobPhase::Failed);
    assert!(bench.core.lost().is_some() && !bench.core.is_abandoned(), "its coordinator says so");
    let lost = || ShardError::Lost("the name is another model's".into());
    bench.core.fail(lost(), bench.now, &mut bench.said);
    bench.said.clear();
    bench.ask(5, Message::Join { name: "x".into() }, 10);
    assert!(bench.said.contains(&Action::Answer(5, Err(lost().into()))), "{:?}", bench.said);
    bench.core.coordinator_up(bench.now, &mut bench.said);
    assert_eq!(bench.core.state().phase, JobPhase::Failed, "as before");
}

#[test]
fn granted_blocks_are_sent_to_their_shards_and_kept_until_they_are_taken() {
    let mut bench = Bench::in_plan();
    assert_eq!((bench.pushes(0), bench.pushes(1)), (vec![0, 2], vec![1]));
    bench.said.clear();
    // One block is missing at the shard: it was lost on the way.
    bench.pass(1000);
    assert!(bench.said.contains(&Action::ToShard(0, Message::Probe { plan: PlanId(1) })));
    let missing = Message::Missing { plan: PlanId(1), blocks: vec![2..3] };
    bench.core.from_shard(0, missing, bench.now, &mut bench.said);
    assert_eq!(bench.pushes(0), [2]);
    assert_eq!(bench.core.kept(), (1, 1));
    bench.coordinator(3, Message::Done);
    assert!(bench.said.contains(&Action::Release(L, Step(1))));
    assert_eq!((bench.core.kept(), bench.core.outgoing()), ((0, 0), None));
}

#[test]
fn lent_payload_is_sent_no_more_once_its_commit_is_answered() {
    for coordinator_answers in [true, false] {
        let mut bench = Bench::new();
        bench.commit_of(3, 2, true);
        bench.grant(1);
        assert_eq!(bench.pushes(0), [0, 2]);
        bench.said.clear();
        if coordinator_answers {
            bench.coordinator(3, Message::Refused(ShardError::TimedOut("it was dropped".into()).into()));
        } else {
            bench.pass(2000);
        }
        let at = |what: &dyn Fn(&Action) -> bool| bench.said.iter().position(what);
        let answered = at(&|action| matches!(action, Action::Answer(3, Err(_)))).expect("an answer");
        let released = at(&|action| *action == Action::Release(L, Step(1))).expect("a release");
        assert!(released < answered, "{:?}", bench.said);
        // The coordinator's word is that the plan is dropped. Without it, what shards may be reading has to end first.
        let ended = at(&|action| *action == Action::EndLoans);
        assert_eq!(
            ended.map(|ended| ended < answered),
            (!coordinator_answers).then_some(true),
            "{:?}",
            bench.said
        );
        assert_eq!((bench.core.outgoing(), bench.core.kept()), (None, (0, 0)));
        assert_eq!((bench.pushes(0), bench.pushes(1)), (vec![], vec![]));
        // Asked again, it is told to be gone.
        bench.said.clear();
        bench.grant(1);
        let gone = Message::SourceGone { plan: PlanId(1), learner: Some(L) };
        assert_eq!(bench.said, [Action::ToCoordinator(0, gone)]);
    }
}

#[test]
fn loans_end_when_the_job_has_failed_by_another_word_than_the_coordinators() {
    let mut bench = Bench::new();
    bench.commit_of(3, 10, true);
    bench.grant(1);
    bench.said.clear();
    bench.core.fail(ShardError::Lost("its process is gone".into()), bench.now, &mut bench.said);
    let ended = bench.said.iter().position(|action| *action == Action::EndLoans).expect("an end");
    let answered = bench.said.iter().position(|action| matches!(action, Action::Answer(3, Err(_))));
    assert!(answered.is_some_and(|answered| ended < answered), "{:?}", bench.said);
    assert_eq!((bench.core.outgoing(), bench.core.kept()), (None, (0, 0)));
}

#[test]
fn lent_payload_is_given_back_when_the_client_ends() {
    let mut bench = Bench::new();
    bench.commit_of(3, 10, true);
    bench.grant(1);
    bench.said.clear();
    let mut said = Vec::new();
    bench.core.end_loans(&mut said);
    assert_eq!(said, [Action::Release(L, Step(1)), Action::EndLoans]);
    assert_eq!((bench.core.outgoing(), bench.core.kept()), (None, (0, 0)));
}

#[test]
fn a_request_is_sent_again_with_less_time_until_its_deadline() {
    let mut bench = Bench::new();
    bench.commit(3, 2);
    bench.said.clear();
    bench.pass(1000);
    let again = |action: &Action| {
        matches!(action, Action::ToCoordinator(3, Message::Commit { timeout_ms: 1000, .. }))
    };
    assert!(bench.said.iter().any(again), "{:?}", bench.said);
    bench.pass(1000);
    let late =
        |action: &Action| matches!(action, Action::Answer(3, Err(Refusal::Shard(ShardError::TimedOut(_)))));
    assert!(bench.said.iter().any(late));
    // It may have been taken: the payload stays, and another commit of the step must be the same.
    assert_eq!(bench.core.kept(), (0, 1));
    bench.said.clear();
    bench.ask(4, commit(L, 1, 0..4, 1, false), 1);
    assert!(matches!(bench.said[..], [Action::Answer(4, Err(Refusal::Shard(ShardError::NotAllowed(_))))]));
}

#[test]
fn the_late_answer_to_an_earlier_request_releases_nothing_that_was_committed_since() {
    for open_is_late in [true, false] {
        let mut bench = Bench::new();
        // A first write opens the step, and a commit follows. The coordinator takes the commit, and its time is over.
        let (early, late) = if open_is_late {
            bench.ask(3, Message::Open { learner: L }, 10);
            (3, Message::Opened { step: Step(1), staging_lent: false })
        } else {
            bench.commit(3, 10);
            (3, Message::Refused(ShardError::NotAllowed("the same commit was sent again".into()).into()))
        };
        bench.commit(4, 10);
        bench.grant(1);
        bench.said.clear();
        bench.coordinator(
            4,
            Message::Refused(ShardError::TimedOut("its version is being made".into()).into()),
        );
        // The answer to the earlier request came late.
        bench.coordinator(early, late);
        assert!(!bench.said.contains(&Action::Release(L, Step(1))), "{:?}", bench.said);
        assert_eq!((bench.pushes(0), bench.pushes(1)), (vec![0, 2], vec![1]), "it is sent as before");
        // An answer to a later request does tell: the commit was in vain.
        bench.coordinator(0, Message::Over { plan: PlanId(1) });
        bench.ask(5, Message::Open { learner: L }, 10);
        bench.coordinator(5, Message::Opened { step: Step(1), staging_lent: false });
        assert!(bench.said.contains(&Action::Release(L, Step(1))), "{:?}", bench.said);
    }
}

#[test]
fn a_coordinator_out_of_reach_is_not_sought_in_a_loop() {
    let mut bench = Bench::committed();
    bench.core.coordinator_down(bench.now, &mut bench.said);
    bench.pass(2000);
    assert_eq!(bench.core.next_deadline(), Some(Duration::from_secs(10)));
}

#[test]
fn a_grant_of_what_was_given_up_is_declined() {
    let mut bench = Bench::new();
    bench.ask(3, assign(5, 1), 1);
    bench.pass(1000);
    assert!(bench.said.contains(&Action::ReleaseWeights(5)));
    bench.granted(1, Granted::Weights(5));
    let gone = Message::SourceGone { plan: PlanId(1), learner: None };
    assert!(bench.said.contains(&Action::ToCoordinator(0, gone)));
    assert_eq!(bench.core.outgoing(), None);
}

#[test]
fn a_job_that_has_failed_needs_no_new_weights_also_those_that_are_being_sent() {
    let mut bench = Bench::new();
    bench.ask(3, assign(5, 1), 1);
    bench.granted(1, Granted::Weights(5));
    bench.pass(1000);
    bench.core.fail(ShardError::Lost("its process is gone".into()), bench.now, &mut bench.said);
    assert!(bench.said.contains(&Action::ReleaseWeights(5)));
    assert_eq!((bench.core.kept(), bench.core.outgoing()), ((0, 0), None));
}

#[test]
fn a_learner_is_part_of_the_job_s_state_as_soon_as_its_join_is_answered() {
    let mut bench = Bench::new();
    bench.ask(3, Message::Join { name: "b".into() }, 1);
    let joined = Message::Joined { learner: LearnerId(2), incarnation: Incarnation(4), since: 9 };
    bench.coordinator(3, joined);
    let known = |bench: &Bench| bench.core.state().learners.iter().any(|l| l.learner == LearnerId(2));
    assert!(known(&bench));
    bench.state(9, 0, 0, false);
    assert!(!known(&bench), "the coordinator says who is there");
}

/// The coordinator says that version 1 is the client's new weights of token 5, which are of these blocks.
fn own_weights(blocks: std::ops::Range<u32>, can_show: bool, change: impl Fn(&mut JobState)) -> Bench {
    let mut bench = Bench::new();
    if can_show {
        bench.core.can_show(5);
    }
    bench.ask(
        3,
        Message::Assign {
            token: 5,
            blocks: vec![blocks],
            timeout_ms: 1000,
            ahead: None,
            meta: Default::default(),
        },
        1,
    );
    bench.granted(1, Granted::Weights(5));
    bench.changes(|state| {
        (state.version, state.over, state.own_weights) = (Version(1), PlanId(1), Some(5));
        change(state);
    });
    bench
}

#[test]
fn a_version_that_is_the_clients_own_new_weights_is_not_pulled() {
    let mut bench = own_weights(0..4, true, |_| {});
    assert!(bench.said.contains(&Action::Own(Version(1), 5)));
    assert_eq!(bench.core.pulling(), None);
    let (core, now, said) = (&mut bench.core, bench.now, &mut bench.said);
    core.shown(Version(1), now, said);
    assert_eq!((core.version(), core.pull_report().1.pulls), (Version(1), 0));
    bench.coordinator(3, Message::Done);
    assert!(bench.said.contains(&Action::ReleaseWeights(5)));
}

#[test]
fn a_version_is_pulled_if_the_clients_own_new_weights_are_not_all_of_it_or_cannot_be_shown() {
    let accept = |state: &mut JobState| state.controls = state.controls.with("nonfinite", "accept").unwrap();
    for bench in [
        own_weights(0..3, true, |_| {}),
        own_weights(0..4, false, |_| {}),
        own_weights(0..4, true, |state| state.own_weights = None),
        own_weights(0..4, true, |state| state.own_weights = Some(6)),
        own_weights(0..4, true, accept),
    ] {
        assert!(!bench.said.iter().any(|said| matches!(said, Action::Own(..))));
        assert_eq!(bench.core.pulling(), Some(Version(1)));
    }
}

#[test]
fn new_weights_that_are_being_sent_are_kept_until_the_plan_is_over() {
    let mut bench = Bench::new();
    bench.ask(3, assign(5, 1), 1);
    bench.granted(1, Granted::Weights(5));
    bench.pass(1000);
    assert!(!bench.said.contains(&Action::ReleaseWeights(5)), "the shards may be reading them");
    bench.coordinator(0, Message::Over { plan: PlanId(1) });
    assert!(bench.said.contains(&Action::ReleaseWeights(5)));
}

#[test]
fn a_version_is_pulled_whole_and_a_learner_sees_its_own_step() {
    let mut bench = Bench::committed();
    bench.coordinator(3, Message::Done);
    assert_eq!(bench.core.last_commit(L), LastCommit::Waits);
    bench.core.await_step(4, L, Duration::from_secs(10), bench.now, &mut bench.said);
    bench.state(2, 1, 1, false);
    assert_eq!(bench.core.pulling(), Some(Version(1)));
    let pull = bench.core.next_pull(0, 8, bench.now);
    assert_eq!(pull, Some(Message::Pull { version: Version(1), blocks: 0..3, base: Some(Version(0)) }));
    // The shard does not have it yet: it is asked again soon.
    let not_yet = Refusal::NoVersion { wanted: Version(1), newest: Version(0) };
    bench.core.from_shard(0, Message::Refused(not_yet), bench.now, &mut bench.said);
    assert_eq!(bench.core.next_pull(0, 8, bench.now), None);
    bench.pass(10);
    assert!(bench.core.next_pull(0, 8, bench.now).is_some());
    for block in (0..4).map(BlockId) {
        assert!(bench.core.reserve(Version(1), block));
        assert!(!bench.core.reserve(Version(1), block), "it is reserved");
        bench.core.end_reservation(Version(1), block, true, bench.now, &mut bench.said);
    }
    assert_eq!(bench.said.last(), Some(&Action::Pulled(Version(1))));
    bench.said.clear();
    bench.core.shown(Version(1), bench.now, &mut bench.said);
    assert_eq!(bench.said, [Action::Awaited(4, Ok(Version(1)))]);
    assert_eq!(bench.core.last_commit(L), LastCommit::In(Version(1)));
}

#[test]
fn a_wait_for_a_step_that_times_out_names_the_reason() {
    let mut bench = Bench::committed();
    bench.coordinator(3, Message::Done);
    let waits = |bench: &mut Bench| {
        bench.said.clear();
        bench.core.await_step(4, L, bench.now, bench.now, &mut bench.said);
        match bench.said.last() {
            Some(Action::Awaited(4, Err(ShardError::TimedOut(why)))) => why.to_string(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(waits(&mut bench), "other learners have not contributed to this step");
    bench.changes(|state| state.away = vec![ShardId(2)]);
    let being_made = "the contribution is taken, but its version is still being made; out of reach: shard 2";
    assert_eq!(waits(&mut bench), being_made);
    bench.changes(|state| state.away.clear());
    bench.state(4, 1, 1, false);
    assert_eq!(waits(&mut bench), NOT_HERE);
    bench.core.set_no_buffer(true);
    assert_eq!(waits(&mut bench), BUFFERS_HELD);
    bench.core.set_no_buffer(false);
    assert_eq!(waits(&mut bench), NOT_HERE);
}

#[test]
fn a_learner_that_joined_after_it_was_given_up_leaves_again() {
    let mut bench = Bench::new();
    bench.ask(3, Message::Join { name: "late".into() }, 1);
    bench.pass(1000);
    bench.said.clear();
    let learner = |learner| LearnerState {
        learner,
        incarnation: Incarnation(1),
        step: Step(0),
        unpublished: false,
        published_in: Version(0),
        joined_at: Version(0),
        attached: Attached::No,
    };
    let state = |sequence| {
        let learners = vec![learner(L), learner(LearnerId(8))];
        Message::State(Box::new(JobState { sequence, learners, ..JobState::default() }))
    };
    let leaves = |bench: &mut Bench| {
        let is_it =
            |a: &Action| matches!(a, Action::ToCoordinator(_, Message::Leave { learner: LearnerId(8), .. }));
        std::mem::take(&mut bench.said).iter().filter(|action| is_it(action)).count()
    };
    bench.coordinator(0, state(5));
    assert_eq!(leaves(&mut bench), 1);
    bench.coordinator(0, state(6));
    assert_eq!(leaves(&mut bench), 0, "it is being asked");
    // The coordinator was away for so long that this was given up, too.
    bench.core.coordinator_down(bench.now, &mut bench.said);
    bench.pass(20_000);
    bench.core.coordinator_up(bench.now, &mut bench.said);
    assert_eq!(leaves(&mut bench), 0);
    bench.coordinator(0, state(7));
    assert_eq!(leaves(&mut bench), 1);
    // It may not have been carried out.
    bench.coordinator(5, Message::Refused(ShardError::TimedOut("it was given up".into()).into()));
    bench.coordinator(0, state(8));
    assert_eq!(leaves(&mut bench), 1);
}
