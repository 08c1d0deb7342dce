//! The table of learners: blocks are taken once, and what is dropped is sent no more.

use super::*;
use crate::client::core::Own;
use crate::vocabulary::block_slot::BlockSlot;
use crate::vocabulary::members::LeaveReason;
use crate::vocabulary::partly::PartlyWritten;

fn slot(step: u64, block: u32) -> BlockSlot {
    BlockSlot { learner: L, incarnation: Incarnation(1), step: Step(step), block: BlockId(block) }
}

impl Bench {
    fn take(&mut self, step: u64, block: u32) -> Result<bool, ShardError> {
        self.core.take(slot(step, block))
    }

    fn may_commit(&self, step: u64) -> Result<(), ShardError> {
        self.core.may_commit(L, Step(step))
    }

    /// Opens the next contribution, as a mount does; the step if it is known here.
    fn open(&mut self, token: u64) -> Option<u64> {
        self.said.clear();
        let deadline = self.now + Duration::from_secs(10);
        self.core.open(token, L, deadline, self.now, &mut self.said);
        self.said.iter().find_map(|action| match action {
            Action::Answer(of, Ok(Message::Opened { step, .. })) if *of == token => Some(step.0),
            _ => None,
        })
    }

    /// The coordinator tells the step.
    fn opened(&mut self, request: u64, step: u64) {
        self.coordinator(request, Message::Opened { step: Step(step), staging_lent: false });
    }

    /// The number of the request that was sent last.
    fn last_request(&self) -> u64 {
        let numbers = self.said.iter().filter_map(|action| match action {
            Action::ToCoordinator(request, _) => Some(*request),
            _ => None,
        });
        numbers.max().expect("a request was sent")
    }

    /// The plan that a commit gives up.
    fn given_up(&self) -> Option<PlanId> {
        self.said.iter().find_map(|action| match action {
            Action::ToCoordinator(_, Message::Commit { given_up, .. }) => *given_up,
            _ => None,
        })
    }

    fn sends(&self) -> Option<u64> {
        self.core.outgoing().map(|(plan, _)| plan.0)
    }
}

fn out_of_order(got: u64, expected: u64) -> ShardError {
    ShardError::StepOutOfOrder { got: Step(got), expected: Step(expected) }
}

#[test]
fn a_block_is_taken_once_a_contribution() {
    let mut bench = Bench::new();
    assert_eq!(bench.take(2, 0), Err(out_of_order(2, 1)), "not open");
    assert_eq!((bench.take(1, 2), bench.take(1, 2)), (Ok(true), Ok(false)));
    bench.core.give_back(slot(1, 2));
    assert_eq!(bench.take(1, 2), Ok(true), "it was refused");
    assert_eq!(bench.open(3), Some(1));
    assert_eq!(bench.take(1, 2), Ok(false), "the same contribution");
    bench.ask(4, Message::Abort { learner: L }, 10);
    assert_eq!(bench.take(1, 2), Err(out_of_order(1, 1)), "it was dropped");
    assert_eq!(bench.open(5), Some(1));
    assert_eq!(bench.take(1, 2), Ok(true), "another one");
}

#[test]
fn a_taken_step_is_not_taken_again() {
    let mut bench = Bench::new();
    assert!(bench.core.is_writing(L));
    assert_eq!(bench.may_commit(1), Ok(()));
    bench.commit(3, 10);
    assert!(!bench.core.is_writing(L));
    let timed_out = ShardError::TimedOut("others".into());
    bench.coordinator(3, Message::Refused(timed_out.into()));
    assert!(bench.core.is_writing(L));
    assert_eq!(bench.take(1, 0), Ok(true), "it is still open");
    bench.commit(4, 10);
    bench.coordinator(4, Message::Done);
    assert!(!bench.core.is_writing(L));
    assert_eq!((bench.take(1, 1), bench.may_commit(1)), (Ok(false), Ok(())), "sent again");
    assert_eq!(bench.may_commit(2), Err(out_of_order(2, 2)));
}

#[test]
fn a_step_that_the_coordinator_has_taken_back_is_taken_anew() {
    let mut bench = Bench::committed();
    bench.coordinator(3, Message::Refused(ShardError::TimedOut("others".into()).into()));
    // What became of it, only the coordinator knows.
    assert_eq!(bench.open(4), None);
    bench.opened(bench.last_request(), 2);
    assert_eq!((bench.take(1, 1), bench.take(2, 1)), (Ok(false), Ok(true)), "it was taken after all");
    bench.ask(5, Message::Abort { learner: L }, 10);
    // It finds that nothing of it came.
    bench.ask(6, Message::Open { learner: L }, 10);
    bench.opened(6, 1);
    assert_eq!((bench.take(1, 0), bench.take(1, 0)), (Ok(true), Ok(false)));
    assert_eq!(bench.take(2, 1), Err(out_of_order(2, 1)));
    assert_eq!(bench.may_commit(1), Ok(()));
}

#[test]
fn a_learner_that_is_gone_or_of_another_incarnation_offers_nothing() {
    let mut bench = Bench::new();
    let other = BlockSlot { incarnation: Incarnation(2), ..slot(1, 0) };
    assert_eq!(bench.core.take(other), Err(ShardError::UnknownLearner(L)));
    assert_eq!(bench.core.identity(L), Some(("l", Incarnation(1))));
    bench.ask(3, Message::Leave { learner: L, reason: crate::vocabulary::members::LeaveReason::Asked }, 10);
    assert!(bench.core.has_learner(L) && bench.core.is_leaving(L));
    bench.coordinator(3, Message::Done);
    assert_eq!(bench.take(1, 0), Err(ShardError::UnknownLearner(L)));
    assert_eq!(bench.may_commit(1), Err(ShardError::UnknownLearner(L)));
    assert!(!bench.core.is_writing(L) && !bench.core.is_leaving(L));
    assert_eq!(bench.core.identity(L), None);
}

#[test]
fn a_late_answer_to_a_parallel_request_opens_nothing() {
    let mut bench = Bench::new();
    assert_eq!(bench.open(3), Some(1));
    let beside = bench.last_request();
    bench.ask(4, Message::Abort { learner: L }, 10);
    bench.opened(beside, 1);
    assert_eq!(bench.take(1, 0), Err(out_of_order(1, 1)));
}

impl Bench {
    /// A block of step 1 is staged; where this and earlier ones may be sent now.
    fn offers(&mut self, block: u32) -> Option<usize> {
        let offered = self.core.offered(L, Step(1), BlockId(block), self.now, &mut self.said);
        offered.expect("the contribution is open").wakes
    }

    /// How often a whole block was announced to the coordinator.
    fn announcements(&mut self) -> usize {
        let whole = Message::WholeBlock { learner: L, step: Step(1) };
        self.said.extract_if(.., |action| *action == Action::ToCoordinator(0, whole.clone())).count()
    }
}

#[test]
fn the_coordinator_is_told_once_that_a_contribution_has_a_whole_block() {
    let mut bench = Bench::new();
    assert_eq!((bench.offers(2), bench.offers(0)), (None, None));
    assert_eq!(bench.announcements(), 1);
    bench.provisional(7, 1);
    assert_eq!(
        (0..2).flat_map(|partition| bench.pushes(partition)).count(),
        2,
        "what was whole before the plan"
    );
    assert_eq!(
        (bench.offers(0), bench.offers(1)),
        (None, None),
        "one was sent, and one is too few to wake anybody"
    );
    assert_eq!((bench.pushes(1), bench.announcements()), (vec![1], 0));
    bench.ask(3, Message::Abort { learner: L }, 10);
    assert_eq!(
        bench.core.offered(L, Step(1), BlockId(0), bench.now, &mut bench.said),
        None,
        "it was dropped"
    );
    bench.ask(4, Message::Open { learner: L }, 10);
    bench.opened(4, 1);
    bench.offers(0);
    assert_eq!(bench.announcements(), 1, "another contribution");
    bench.commit(5, 10);
    assert_eq!(
        bench.core.offered(L, Step(1), BlockId(1), bench.now, &mut bench.said),
        None,
        "it is committed"
    );
}

#[test]
fn connections_are_woken_for_every_fourth_block_of_a_contribution_that_is_written() {
    let mut bench = Bench::of(17);
    bench.offers(16);
    bench.provisional(7, 1);
    let mut woken: Vec<usize> = (0..16).filter_map(|block| bench.offers(block)).collect();
    woken.sort_unstable();
    assert_eq!(woken, [0, 0, 1, 1], "each of two shards has eight of these blocks");
}

#[test]
fn a_block_is_sent_at_once_if_the_ones_before_it_came_a_while_ago() {
    let mut bench = Bench::of(17);
    bench.offers(16);
    bench.provisional(7, 1);
    bench.now += Duration::from_millis(1);
    assert_eq!([0, 2, 4, 6, 8].map(|block| bench.offers(block)), [Some(0), None, None, None, Some(0)]);
    bench.now += Duration::from_millis(1);
    assert_eq!([10, 12].map(|block| bench.offers(block)), [Some(0), None]);
}

#[test]
fn a_contribution_of_one_block_is_committed_rather_than_announced() {
    let mut bench = Bench::of(1);
    assert_eq!((bench.offers(0), bench.announcements()), (None, 0));
}

#[test]
fn memory_that_a_dropped_plan_may_read_is_told_of_once() {
    let mut bench = Bench::new();
    bench.offers(0);
    assert!(!bench.core.take_strays(L), "nothing was sent");
    bench.provisional(7, 1);
    bench.coordinator(0, Message::Over { plan: PlanId(7) });
    assert_eq!((bench.core.take_strays(L), bench.core.take_strays(L)), (true, false));
    bench.provisional(8, 1);
    bench.commit(3, 10);
    bench.grant(8);
    bench.coordinator(0, Message::Over { plan: PlanId(8) });
    assert!(!bench.core.take_strays(L), "the plan was sealed, and is read before the commit is answered");
    bench.coordinator(3, Message::Done);
    assert!(!bench.core.take_strays(L));
}

#[test]
fn memory_of_a_commit_that_failed_with_the_coordinator_is_not_written_again() {
    let mut bench = Bench::new();
    bench.offers(0);
    bench.commit(3, 10);
    bench.grant(8);
    bench.core.fail(ShardError::Lost("it has come back empty".into()), bench.now, &mut bench.said);
    assert!(bench.core.take_strays(L), "the plan may be under way, and count");
}

#[test]
fn blocks_of_a_refused_commit_join_no_later_contribution_to_the_step() {
    let mut bench = Bench::new();
    bench.offers(0);
    bench.provisional(7, 1);
    assert_eq!((0..2).flat_map(|partition| bench.pushes(partition)).collect::<Vec<_>>(), [0]);
    bench.commit(3, 10);
    bench.core.fail(ShardError::Lost("it has come back empty".into()), bench.now, &mut bench.said);
    bench.ask(4, Message::Abort { learner: L }, 10);
    // The coordinator is found after all. It has heard of neither.
    bench.core.coordinator_up(bench.now, &mut bench.said);
    bench.state(9, 0, 0, false);
    bench.ask(5, Message::Open { learner: L }, 10);
    bench.opened(5, 1);
    bench.provisional(7, 1);
    bench.offers(0);
    assert_eq!(
        (0..2).flat_map(|partition| bench.pushes(partition)).count(),
        0,
        "plan 7 has blocks of the first try"
    );
    bench.said.clear();
    bench.commit(6, 10);
    assert_eq!(bench.given_up(), Some(PlanId(7)), "{:?}", bench.said);
}

/// A contribution of which a block was reduced for plan 7 where it came.
fn with_a_block_in_plan_7() -> Bench {
    let mut bench = Bench::new();
    assert_eq!(bench.core.next_own(L, Step(1), BlockId(0)), Own::Announce);
    bench.provisional(7, 1);
    assert_eq!(bench.core.next_own(L, Step(1), BlockId(0)), Own::Send(PlanId(7)));
    assert!(bench.core.sent_own(L, Step(1), PlanId(7), BlockId(0)));
    bench
}

/// A coordinator that does not know of this announces the plan again.
fn connects_anew(bench: &mut Bench) {
    bench.core.coordinator_down(bench.now, &mut bench.said);
    bench.core.coordinator_up(bench.now, &mut bench.said);
    bench.provisional(7, 1);
}

#[test]
fn nothing_is_sent_for_a_plan_whose_contribution_was_dropped_when_the_plan_was_over_here() {
    let mut bench = with_a_block_in_plan_7();
    bench.coordinator(0, Message::Over { plan: PlanId(7) });
    assert_eq!(bench.sends(), None);
    bench.ask(3, Message::Abort { learner: L }, 10);
    connects_anew(&mut bench);
    assert_eq!(bench.sends(), None, "it was given up");
    assert_eq!(bench.open(4), Some(1));
    assert_eq!(bench.core.next_own(L, Step(1), BlockId(0)), Own::Stage, "the abort has no answer");
    bench.coordinator(3, Message::Done);
    assert_eq!(bench.core.next_own(L, Step(1), BlockId(0)), Own::Announce, "another contribution");
    bench.provisional(8, 1);
    assert_eq!(bench.core.next_own(L, Step(1), BlockId(0)), Own::Send(PlanId(8)));
}

#[test]
fn nothing_is_sent_for_a_plan_whose_contribution_cannot_be_committed() {
    let mut bench = with_a_block_in_plan_7();
    bench.coordinator(0, Message::Over { plan: PlanId(7) });
    // Its block is nowhere: that stays so however often it is committed.
    for token in [3, 4] {
        bench.said.clear();
        bench.commit(token, 10);
        let refused = |action: &Action| matches!(action, Action::Answer(of, Err(_)) if *of == token);
        assert!(bench.said.iter().any(refused), "{:?}", bench.said);
    }
    bench.ask(5, Message::Abort { learner: L }, 10);
    connects_anew(&mut bench);
    assert_eq!(bench.sends(), None, "it was given up");
}

#[test]
fn nothing_is_sent_for_a_plan_whose_contribution_was_dropped_after_its_commit() {
    let mut bench = with_a_block_in_plan_7();
    bench.commit(3, 10);
    bench.coordinator(0, Message::Over { plan: PlanId(7) });
    bench.ask(4, Message::Abort { learner: L }, 10);
    connects_anew(&mut bench);
    assert_eq!(bench.sends(), None, "it was given up");
}

#[test]
fn a_commit_that_the_coordinator_does_not_know_yet_is_sent_for_the_provisional_plan() {
    let mut bench = Bench::committed();
    bench.provisional(7, 1);
    let sent = |bench: &mut Bench| (0..2).flat_map(|partition| bench.pushes(partition)).count();
    assert_eq!((bench.sends(), sent(&mut bench)), (Some(7), 3));
    bench.grant(7);
    assert_eq!(sent(&mut bench), 0);
}

/// The second learner of the client.
const M: LearnerId = LearnerId(2);

impl Bench {
    /// Both learners write step 1, under plan 7.
    fn two_write() -> Bench {
        let mut bench = Bench::new();
        bench.ask(20, Message::Join { name: "m".into() }, 10);
        let request = bench.last_request();
        bench.coordinator(request, Message::Joined { learner: M, incarnation: Incarnation(1), since: 1 });
        bench.ask(21, Message::Open { learner: M }, 10);
        let request = bench.last_request();
        bench.opened(request, 1);
        let of = vec![(L, Step(1)), (M, Step(1))];
        bench.granted(7, Granted::Contributions { of, replaces: false, open: Some(vec![L, M]) });
        bench
    }

    fn whole(&mut self, learner: LearnerId, block: u32) {
        self.core.offered(learner, Step(1), BlockId(block), self.now, &mut self.said).expect("it is open");
    }

    fn sent(&mut self) -> Vec<u32> {
        let mut sent: Vec<u32> = (0..2).flat_map(|partition| self.pushes(partition)).collect();
        sent.sort_unstable();
        sent
    }

    fn commits(&mut self, learner: LearnerId, blocks: std::ops::Range<u32>, partly: PartlyWritten) {
        let mut message = commit(learner, 1, blocks, 10, false);
        if let Message::Commit { partly: of, .. } = &mut message {
            *of = Some(partly);
        }
        self.ask(30 + u64::from(learner.0), message, 10);
    }
}

#[test]
fn a_block_is_sent_when_all_learners_of_its_client_have_written_it() {
    let mut bench = Bench::two_write();
    bench.whole(L, 0);
    assert!(bench.sent().is_empty());
    bench.whole(M, 1);
    assert!(bench.sent().is_empty());
    bench.whole(M, 0);
    assert_eq!(bench.sent(), [0]);
}

#[test]
fn a_commit_frees_the_blocks_that_waited_for_its_learner() {
    let mut bench = Bench::two_write();
    bench.whole(L, 0);
    bench.whole(L, 1);
    let mut partly = PartlyWritten::default();
    partly.insert(BlockId(2), vec![0..4]);
    bench.commits(M, 2..3, partly);
    assert_eq!(bench.sent(), [0, 1], "block 2 is whole nowhere");
    bench.whole(L, 2);
    assert_eq!(bench.sent(), [2]);
}

#[test]
fn a_block_of_averaged_tensors_is_not_sent_early_if_a_learner_of_its_client_does_not_have_it_whole() {
    let mut bench = Bench::two_write();
    let mut averaged = fixedbitset::FixedBitSet::with_capacity(3);
    averaged.insert_range(1..3);
    bench.core.set_averaged(averaged);
    for block in 0..3 {
        bench.whole(L, block);
    }
    bench.whole(M, 1);
    let mut partly = PartlyWritten::default();
    partly.insert(BlockId(2), vec![0..4]);
    bench.commits(M, 1..3, partly);
    assert_eq!(bench.sent(), [0, 1]);
    bench.commits(L, 0..3, PartlyWritten::default());
    assert!(bench.sent().is_empty(), "others may be writing");
    let of = vec![(L, Step(1)), (M, Step(1))];
    bench.granted(7, Granted::Contributions { of, replaces: false, open: None });
    assert_eq!(bench.sent(), [2]);
}

#[test]
fn a_contribution_that_is_dropped_stops_the_plan_for_all_learners_of_its_client() {
    let mut bench = Bench::two_write();
    bench.whole(L, 0);
    bench.whole(M, 0);
    assert_eq!(bench.sent(), [0]);
    bench.ask(40, Message::Abort { learner: M }, 10);
    bench.whole(L, 1);
    assert_eq!((bench.sends(), bench.sent()), (None, vec![]));
    bench.said.clear();
    bench.commits(L, 0..2, PartlyWritten::default());
    assert_eq!(bench.given_up(), Some(PlanId(7)));
    assert!(bench.core.take_strays(L), "the dropped plan may still read its block");
}

#[test]
fn blocks_of_a_new_contribution_join_no_plan_that_ends_with_the_one_before() {
    let mut bench = Bench::new();
    bench.core = bench.core.reads_in_place();
    let next = |bench: &mut Bench| bench.core.next_own(L, Step(1), BlockId(0));
    assert_eq!(next(&mut bench), Own::Announce);
    bench.ask(3, Message::Abort { learner: L }, 10);
    bench.core.open_known(L, bench.now, bench.now, &mut bench.said).unwrap();
    // The coordinator has begun a plan before it learns that the contribution was dropped.
    bench.provisional(1, 1);
    assert_eq!(next(&mut bench), Own::Stage);
    bench.coordinator(0, Message::Over { plan: PlanId(1) });
    bench.coordinator(3, Message::Done);
    assert_eq!(next(&mut bench), Own::Announce);
    bench.provisional(2, 1);
    assert_eq!(next(&mut bench), Own::Send(PlanId(2)));
}

#[test]
fn what_is_on_its_way_stays_until_its_plan_is_over_though_it_is_taken_back_and_its_learner_has_left() {
    let mut bench = Bench::new();
    bench.commit(3, 1);
    bench.pass(2_000);
    assert!(bench.said.iter().any(|said| matches!(said, Action::Answer(3, Err(_)))), "{:?}", bench.said);
    bench.grant(1);
    assert_eq!(bench.pushes(0).len() + bench.pushes(1).len(), 3);
    bench.ask(4, Message::Abort { learner: L }, 10);
    // The coordinator hears first that the learner leaves. So its commit counts.
    bench.coordinator(0, Message::Left { learner: L, reason: LeaveReason::Asked });
    let released = Action::Release(L, Step(1));
    assert!(!bench.said.contains(&released), "a shard may still be reading: {:?}", bench.said);
    bench.coordinator(0, Message::Over { plan: PlanId(1) });
    assert!(bench.said.contains(&released), "{:?}", bench.said);
}
