//! Every placement, every order, every contradiction.

use libmodelio::vocabulary::norm::Quantity;
use libmodelio::vocabulary::reducer::Combine;

use super::*;

const A: ClientId = ClientId(1);
const B: ClientId = ClientId(2);
const ONE: PlanId = PlanId(1);
const TWO: PlanId = PlanId(2);

const fn place(first: bool, last: bool) -> Placement {
    Placement::Ready(ReservedPlace { first, last, check: true, kept: false })
}
const SENT: Sent = Sent { lies: false, ahead: false };
const LIES: Sent = Sent { lies: true, ahead: false };
const AHEAD: Sent = Sent { lies: false, ahead: true };

const STORE: Placement = place(true, false);
const ADD: Placement = place(false, false);
const LAST: Placement = place(false, true);
const ALONE: Placement = place(true, true);

fn blocks(of: impl IntoIterator<Item = usize>) -> FixedBitSet {
    let mut set = FixedBitSet::with_capacity(3);
    set.extend(of);
    set
}

fn order(plan: PlanId, newest: PlanId) -> PartitionError {
    PartitionError::Order { plan, newest }
}

fn source(client: ClientId, of: impl IntoIterator<Item = usize>) -> Source {
    Source { client, blocks: blocks(of), check: true, provisional: false }
}

/// Of a contribution that is still written: any block may come.
fn open(client: ClientId) -> Source {
    Source { provisional: true, ..source(client, [0, 1, 2]) }
}

/// What is done when plan 1 counts, and when it is dropped.
const COUNTS: [Action; 2] = [Action::Conclude(ONE), Action::Done(ONE)];
const GONE: [Action; 2] = [Action::Void(ONE), Action::Done(ONE)];

/// The kinds of work.
enum Kind {
    Add,
    Reduce,
    Assign,
}

/// A partition of three blocks at version 4.
struct Bench {
    core: PartitionCore,
}

impl Bench {
    fn new() -> Bench {
        Bench { core: PartitionCore::new(3, Version(4)) }
    }

    fn plan(id: PlanId, kind: Kind, sources: Vec<Source>) -> PartitionPlan {
        let work = match kind {
            Kind::Add => Work::Add { combine: Combine::Sum },
            Kind::Reduce => Work::Reduce {
                step: Default::default(),
                tensors: Default::default(),
                groups: Default::default(),
                factors: Default::default(),
                fresh_state: false,
            },
            Kind::Assign => Work::Assign { token: 0 },
        };
        PartitionPlan { id, work, base: Version(4), sources, ordered: false, in_place: false }
    }

    /// The actions that `f` causes.
    fn acts(&mut self, f: impl FnOnce(&mut PartitionCore, &mut Vec<Action>)) -> Vec<Action> {
        let mut actions = Vec::new();
        f(&mut self.core, &mut actions);
        actions
    }

    /// Starts a plan that has its memory; returns the actions that follow.
    fn begin(&mut self, plan: PartitionPlan) -> Vec<Action> {
        let id = plan.id;
        assert_eq!(self.starts(plan), [Action::Begin(id)]);
        self.begun(id)
    }

    /// How the core refuses `f`, which makes it do nothing.
    fn refused(
        &mut self,
        f: impl FnOnce(&mut PartitionCore, &mut Vec<Action>) -> Result<(), PartitionError>,
    ) -> PartitionError {
        let mut actions = Vec::new();
        let error = f(&mut self.core, &mut actions).expect_err("it is refused");
        assert_eq!(actions, []);
        error
    }

    fn starts(&mut self, plan: PartitionPlan) -> Vec<Action> {
        self.acts(|core, actions| core.start(plan, false, actions).unwrap())
    }

    fn begun(&mut self, plan: PlanId) -> Vec<Action> {
        self.acts(|core, actions| core.begun(plan, actions))
    }

    fn drops(&mut self, plan: PlanId) -> Vec<Action> {
        self.acts(|core, actions| core.drop_plan(plan, actions).unwrap())
    }

    fn concludes(&mut self, plan: PlanId) -> Vec<Action> {
        self.acts(|core, actions| core.conclude(plan, actions).unwrap())
    }

    fn computed(&mut self, plan: PlanId) -> Vec<Action> {
        self.acts(|core, actions| core.computed(plan, actions))
    }

    fn ends(
        &mut self,
        client: ClientId,
        plan: PlanId,
        block: u32,
        outcome: ReservationOutcome,
    ) -> Vec<Action> {
        self.acts(|core, actions| core.end(client, plan, block, outcome, actions))
    }

    /// A payload is sent, and is there.
    fn comes(&mut self, client: ClientId, plan: PlanId, block: u32) -> Vec<Action> {
        self.core.reserve(client, plan, block, SENT);
        self.completes(client, plan, block)
    }

    /// The same; where it went.
    fn placed(&mut self, client: ClientId, plan: PlanId, block: u32) -> Placement {
        let placement = self.core.reserve(client, plan, block, SENT);
        self.completes(client, plan, block);
        placement
    }

    fn completes(&mut self, client: ClientId, plan: PlanId, block: u32) -> Vec<Action> {
        self.ends(client, plan, block, ReservationOutcome::Complete)
    }
}

#[test]
fn the_first_is_stored_others_are_added_the_last_finishes() {
    let mut bench = Bench::new();
    let alone = bench.begin(Bench::plan(ONE, Kind::Reduce, vec![source(A, [0, 1]), source(B, [0])]));
    assert_eq!(alone, [Action::Compute(ONE, blocks([2]))]);
    assert_eq!(bench.core.reserve(B, ONE, 0, SENT), STORE);
    assert_eq!(
        bench.core.reserve(A, ONE, 0, SENT),
        Placement::Later,
        "the block is reserved for another payload"
    );
    assert_eq!(bench.core.reserve(A, ONE, 1, SENT), ALONE);
    assert_eq!(bench.completes(B, ONE, 0), []);
    assert_eq!(bench.core.reserve(B, ONE, 0, SENT), Placement::Duplicate);
    assert_eq!(bench.core.reserve(B, ONE, 1, SENT), Placement::Unwanted, "nobody expects it of this client");
    assert_eq!(bench.core.reserve(A, ONE, 0, SENT), LAST);
    assert_eq!(bench.core.missing(A, ONE), Some(blocks([0, 1])));
    assert_eq!(bench.completes(A, ONE, 0), []);
    assert_eq!(bench.completes(A, ONE, 1), []);
    assert_eq!(bench.core.missing(A, ONE), Some(blocks([])));
    assert_eq!(bench.computed(ONE), [Action::Ready(ONE)]);
    assert_eq!(bench.core.reserve(A, ONE, 0, SENT), Placement::Duplicate);
    assert_eq!(bench.concludes(ONE), COUNTS);
    assert_eq!(bench.core.version(), Version(5));
    assert_eq!(bench.core.reserve(A, ONE, 0, SENT), Placement::Unwanted, "the plan is over");
}

#[test]
fn a_sum_that_is_kept_makes_no_version() {
    let mut bench = Bench::new();
    let sources = vec![source(A, [0]), source(B, [0])];
    assert_eq!(bench.begin(Bench::plan(ONE, Kind::Add, sources)), []);
    assert_eq!(bench.placed(A, ONE, 0), STORE);
    assert_eq!(bench.core.reserve(B, ONE, 0, SENT), ADD);
    assert_eq!(bench.completes(B, ONE, 0), [Action::Ready(ONE)]);
    assert_eq!(bench.concludes(ONE), COUNTS);
    assert_eq!(bench.core.version(), Version(4));
}

#[test]
fn sums_that_are_measured_are_kept_and_make_no_version() {
    let mut bench = Bench::new();
    let work = Work::Measure {
        step: Default::default(),
        tensors: Default::default(),
        groups: Default::default(),
        quantity: Quantity::Gradient,
    };
    let plan = PartitionPlan { work, ..Bench::plan(ONE, Kind::Add, vec![source(A, [0]), source(B, [0, 1])]) };
    assert_eq!(bench.begin(plan), [Action::Compute(ONE, blocks([2]))], "nobody sends this block");
    assert_eq!(bench.placed(A, ONE, 0), STORE);
    assert_eq!(bench.placed(B, ONE, 0), LAST);
    assert_eq!(bench.core.reserve(B, ONE, 1, SENT), ALONE);
    assert_eq!(bench.completes(B, ONE, 1), [], "a block is being measured");
    assert_eq!(bench.computed(ONE), [Action::Ready(ONE)]);
    assert_eq!(bench.concludes(ONE), COUNTS);
    assert_eq!(bench.core.version(), Version(4));
}

#[test]
fn new_values_make_a_version_and_leave_the_other_blocks() {
    let mut bench = Bench::new();
    let alone = bench.begin(Bench::plan(ONE, Kind::Assign, vec![source(A, [1])]));
    assert_eq!(alone, [Action::Compute(ONE, blocks([0, 2]))]);
    assert_eq!(bench.core.reserve(A, ONE, 1, SENT), ALONE);
    bench.computed(ONE);
    assert_eq!(bench.completes(A, ONE, 1), [Action::Ready(ONE)]);
    assert_eq!(bench.concludes(ONE), COUNTS);
    assert_eq!(bench.core.version(), Version(5));
}

#[test]
fn an_ordered_plan_takes_each_in_its_turn() {
    let mut bench = Bench::new();
    let sources = vec![source(B, [0]), source(A, [0, 1])];
    bench.begin(PartitionPlan { ordered: true, ..Bench::plan(ONE, Kind::Add, sources) });
    assert_eq!(bench.core.reserve(A, ONE, 0, SENT), Placement::Later, "B comes first");
    assert_eq!(bench.core.reserve(A, ONE, 1, SENT), STORE, "it is alone here");
    assert_eq!(bench.placed(B, ONE, 0), STORE);
    assert_eq!(bench.core.reserve(A, ONE, 0, SENT), ADD);
}

#[test]
fn payloads_may_come_before_their_plan() {
    let mut bench = Bench::new();
    assert_eq!(bench.core.reserve(A, ONE, 0, SENT), Placement::Later);
    assert_eq!(bench.core.missing(A, ONE), None);
    let plan = Bench::plan(ONE, Kind::Add, vec![source(A, [0])]);
    bench.starts(plan);
    assert_eq!(bench.core.reserve(A, ONE, 0, SENT), Placement::Later, "the edge takes its memory");
    assert_eq!(bench.core.missing(A, ONE), None);
    bench.begun(ONE);
    assert_eq!(bench.core.reserve(A, ONE, 0, SENT), STORE);
}

#[test]
fn a_released_payload_can_come_again() {
    let mut bench = Bench::new();
    bench.begin(Bench::plan(ONE, Kind::Add, vec![source(A, [0])]));
    bench.core.reserve(A, ONE, 0, SENT);
    assert_eq!(bench.ends(A, ONE, 0, ReservationOutcome::Released), []);
    assert_eq!(bench.core.reserve(A, ONE, 0, SENT), STORE);
    assert_eq!(bench.completes(A, ONE, 0), [Action::Ready(ONE)]);
}

#[test]
fn nan_voids_a_plan_until_it_is_dropped() {
    let mut bench = Bench::new();
    let plan = Bench::plan(ONE, Kind::Add, vec![source(A, [0, 1])]);
    bench.begin(plan.clone());
    bench.core.reserve(A, ONE, 0, SENT);
    let refused = [Action::NonFinite { plan: ONE, client: A, block: 0 }];
    assert_eq!(bench.ends(A, ONE, 0, ReservationOutcome::NonFinite), refused);
    assert_eq!(bench.core.reserve(A, ONE, 1, SENT), Placement::Unwanted);
    assert_eq!(bench.core.missing(A, ONE), Some(blocks([])));
    // The coordinator asks again: the answer may be lost.
    assert_eq!(bench.starts(plan), refused);
    assert_eq!(bench.drops(ONE), GONE);
}

#[test]
fn a_payload_that_may_have_changed_while_it_was_read_is_in_no_plan() {
    let mut bench = Bench::new();
    let plan = Bench::plan(ONE, Kind::Reduce, vec![source(A, [0, 1, 2])]);
    bench.begin(plan.clone());
    bench.comes(A, ONE, 0);
    bench.core.reserve(A, ONE, 1, SENT);
    bench.core.reserve(A, ONE, 2, SENT);
    assert_eq!(bench.ends(A, ONE, 1, ReservationOutcome::Torn), [Action::Torn(ONE)]);
    // Further payloads make it no better, and nothing more is wanted.
    assert_eq!(bench.completes(A, ONE, 2), []);
    assert_eq!(bench.core.reserve(A, ONE, 1, SENT), Placement::Unwanted);
    let early = bench.core.conclude(ONE, &mut Vec::new());
    assert_eq!(early, Err(PartitionError::NotReady(ONE)));
    // The coordinator asks again: the answer may be lost.
    assert_eq!(bench.starts(plan), [Action::Torn(ONE)]);
    assert_eq!(bench.drops(ONE), GONE);
}

#[test]
fn a_dropped_plan_is_void_when_no_reservation_of_it_is_left() {
    let mut bench = Bench::new();
    bench.begin(Bench::plan(ONE, Kind::Add, vec![source(A, [0, 1])]));
    bench.core.reserve(A, ONE, 0, SENT);
    bench.core.reserve(A, ONE, 1, SENT);
    assert!(bench.core.wants(ONE));
    assert_eq!(bench.drops(ONE), [Action::Abandon(ONE)]);
    assert!(!bench.core.wants(ONE));
    assert_eq!(bench.ends(A, ONE, 0, ReservationOutcome::Released), []);
    assert_eq!(bench.completes(A, ONE, 1), GONE);
    assert_eq!(bench.drops(ONE), [Action::Done(ONE)], "said again");
}

#[test]
fn clients_are_silent_until_a_payload_of_the_plan_has_come() {
    let mut bench = Bench::new();
    assert_eq!(bench.core.silent(ONE), None, "nobody waits for it");
    bench.begin(Bench::plan(ONE, Kind::Reduce, vec![source(A, [0, 1]), source(C, []), source(B, [0, 2])]));
    assert_eq!(bench.core.silent(ONE), Some(vec![(A, 2), (B, 2)]), "no block of the third one is here");
    bench.comes(A, ONE, 1);
    assert_eq!(bench.core.silent(ONE), Some(vec![(A, 0), (B, 2)]), "the first one still lacks a block");
    assert_eq!(bench.core.silent(TWO), None);
    // Also if the plan is dropped because a payload was not whole.
    bench.core.reserve(A, ONE, 0, SENT);
    bench.ends(A, ONE, 0, ReservationOutcome::Torn);
    assert_eq!(bench.core.silent(ONE), Some(vec![(A, 0), (B, 2)]));
    bench.drops(ONE);
    assert_eq!(bench.core.silent(ONE), None, "a repeated order says it no more");
}

#[test]
fn whoever_has_sent_what_is_not_finite_is_not_silent() {
    let mut bench = Bench::new();
    bench.begin(Bench::plan(ONE, Kind::Reduce, vec![source(A, [0, 1]), source(B, [0])]));
    bench.core.reserve(A, ONE, 1, SENT);
    bench.ends(A, ONE, 1, ReservationOutcome::NonFinite);
    assert_eq!(bench.core.silent(ONE), Some(vec![(A, 0), (B, 1)]));
}

#[test]
fn where_the_order_of_clients_counts_only_the_first_is_silent() {
    let mut bench = Bench::new();
    let sources = vec![source(A, [0]), source(B, [0]), source(C, [0])];
    bench.begin(PartitionPlan { ordered: true, ..Bench::plan(ONE, Kind::Reduce, sources) });
    assert_eq!(bench.core.silent(ONE), Some(vec![(A, 1)]));
    bench.comes(A, ONE, 0);
    assert_eq!(bench.core.silent(ONE), Some(vec![(A, 0), (B, 1)]), "the third one may wait for the second");
}

#[test]
fn a_plan_that_is_dropped_before_it_comes_never_begins() {
    let mut bench = Bench::new();
    assert_eq!(bench.drops(ONE), [Action::Done(ONE)]);
    let late = Bench::plan(ONE, Kind::Add, vec![source(A, [0])]);
    assert_eq!(bench.refused(|core, actions| core.start(late, false, actions)), order(ONE, ONE));
    assert_eq!(bench.core.running(), None);
    assert_eq!(bench.core.reserve(A, ONE, 0, SENT), Placement::Unwanted);
}

#[test]
fn orders_that_are_repeated_are_answered_again_and_change_nothing() {
    let mut bench = Bench::new();
    let plan = Bench::plan(ONE, Kind::Reduce, vec![source(A, [0, 1, 2])]);
    bench.begin(plan.clone());
    assert_eq!(bench.starts(plan.clone()), []);
    for block in 0..3 {
        bench.comes(A, ONE, block);
    }
    assert_eq!(bench.starts(plan.clone()), [Action::Ready(ONE)]);
    bench.concludes(ONE);
    assert_eq!(bench.concludes(ONE), [Action::Done(ONE)]);
    // A plan that this coordinator calls past gets no answer that it waits for, but gets an answer.
    assert_eq!(bench.refused(|core, actions| core.start(plan, false, actions)), order(ONE, ONE));
    assert_eq!(bench.core.version(), Version(5));
}

#[test]
fn a_number_that_does_not_follow_is_refused_and_changes_nothing() {
    let mut bench = Bench::new();
    for far in [TWO, PlanId(u64::MAX - 1), PlanId(u64::MAX)] {
        let plan = Bench::plan(far, Kind::Add, vec![source(A, [0])]);
        assert_eq!(bench.refused(|core, actions| core.start(plan, true, actions)), order(far, PlanId(0)));
        assert_eq!(bench.refused(|core, actions| core.drop_plan(far, actions)), order(far, PlanId(0)));
        assert_eq!(bench.refused(|core, actions| core.conclude(far, actions)), PartitionError::NotReady(far));
        assert_eq!(bench.core.missing(A, far), None);
    }
    bench.begin(Bench::plan(ONE, Kind::Add, vec![source(A, [0])]));
}

#[test]
fn numbers_of_a_false_coordinator_are_void_with_the_next_connection() {
    for said in [PlanId(0), ONE, PlanId(77), PlanId(u64::MAX)] {
        let mut bench = Bench::new();
        bench.begin(Bench::plan(ONE, Kind::Add, vec![]));
        bench.concludes(ONE);
        bench.core.coordinated_anew(said);
        // Whatever the stranger gets the partition to do:
        for plan in [TWO, PlanId(said.0.saturating_add(1)), said] {
            let mut actions = Vec::new();
            let _ = bench.core.drop_plan(plan, &mut actions);
            let _ = bench.core.start(Bench::plan(plan, Kind::Add, vec![source(B, [0])]), true, &mut actions);
        }
        bench.core.coordinated_anew(ONE);
        let plan = Bench::plan(TWO, Kind::Add, vec![source(A, [0])]);
        if let Some((running, _)) = bench.core.running() {
            assert_eq!(bench.begun(running), []);
        }
        let started = bench.starts(plan);
        assert_eq!(started.last(), Some(&Action::Begin(TWO)), "{said}");
    }
}

#[test]
fn a_plan_of_a_false_coordinator_makes_way_for_the_true_ones() {
    let mut bench = Bench::new();
    bench.core.coordinated_anew(PlanId(0));
    bench.begin(Bench::plan(ONE, Kind::Add, vec![source(B, [0, 1])]));
    bench.core.reserve(B, ONE, 0, SENT);
    bench.core.coordinated_anew(PlanId(0));
    let plan = Bench::plan(ONE, Kind::Add, vec![source(A, [0])]);
    let start =
        |core: &mut PartitionCore, actions: &mut Vec<Action>| core.start(plan.clone(), false, actions);
    assert_eq!(bench.acts(|core, actions| start(core, actions).unwrap()), [Action::Abandon(ONE)]);
    assert_eq!(bench.acts(|core, actions| start(core, actions).unwrap()), [], "a block of it is reserved");
    assert_eq!(bench.ends(A, ONE, 0, ReservationOutcome::Released), [Action::Void(ONE)]);
    assert_eq!(bench.acts(|core, actions| start(core, actions).unwrap()), [Action::Begin(ONE)]);
    bench.begun(ONE);
    assert_eq!(bench.core.reserve(B, ONE, 0, SENT), Placement::Unwanted);
    assert_eq!(bench.core.reserve(A, ONE, 0, SENT), STORE);
}

#[test]
fn a_plan_that_is_ready_is_only_ended_by_who_knows_it() {
    let mut bench = Bench::new();
    let plan = Bench::plan(ONE, Kind::Add, vec![source(A, [0])]);
    bench.begin(plan.clone());
    assert_eq!(bench.comes(A, ONE, 0), [Action::Ready(ONE)]);
    for said in [PlanId(0), ONE, PlanId(u64::MAX)] {
        bench.core.coordinated_anew(said);
        let other = Bench::plan(ONE, Kind::Add, vec![]);
        let newest = said.max(ONE).max(if said == PlanId(0) { ONE } else { said });
        assert_eq!(bench.refused(|core, actions| core.start(other, false, actions)), order(ONE, newest));
        assert_eq!(bench.refused(|core, actions| core.drop_plan(ONE, actions)), order(ONE, newest));
        assert_eq!(bench.refused(|core, actions| core.conclude(ONE, actions)), order(ONE, newest));
    }
    // The coordinator is back: it names the plan, and then says what becomes of it.
    bench.core.coordinated_anew(ONE);
    assert_eq!(bench.starts(plan.clone()), [Action::Ready(ONE)]);
    assert_eq!(bench.concludes(ONE), COUNTS);

    // A plan that the coordinator does not know, though it insists, does not stay.
    let mut bench = Bench::new();
    bench.begin(Bench::plan(ONE, Kind::Add, vec![]));
    bench.core.coordinated_anew(PlanId(0));
    let began = bench.acts(|core, actions| core.start(plan, true, actions).unwrap());
    assert_eq!(began, [Action::Void(ONE), Action::Begin(ONE)]);
}

#[test]
fn contradictions_are_refused_and_change_nothing() {
    let mut bench = Bench::new();
    let mut start = |plan: PartitionPlan| {
        let mut actions = Vec::new();
        let result = bench.core.start(plan, false, &mut actions);
        assert_eq!(actions, []);
        result
    };
    let plan = Bench::plan(ONE, Kind::Add, vec![source(A, [0])]);
    let other = PartitionPlan { base: Version(7), ..plan.clone() };
    let error = PartitionError::Base { plan: ONE, base: Version(7), version: Version(4) };
    assert_eq!(start(other), Err(error));
    let wide = Source { client: A, blocks: FixedBitSet::with_capacity(9), check: true, provisional: false };
    assert_eq!(start(PartitionPlan { sources: vec![wide], ..plan.clone() }), Err(PartitionError::Shape(ONE)));
    assert_eq!(bench.core.running(), None);

    let mut actions = Vec::new();
    assert_eq!(bench.core.conclude(ONE, &mut actions), Err(PartitionError::NotReady(ONE)), "it never came");
    bench.begin(plan);
    assert_eq!(bench.core.conclude(ONE, &mut actions), Err(PartitionError::NotReady(ONE)));
    let next = Bench::plan(TWO, Kind::Add, vec![]);
    let overlap = PartitionError::Overlap { new: TWO, running: ONE };
    assert_eq!(bench.core.start(next, false, &mut actions), Err(overlap));
    assert_eq!((actions, bench.core.running()), (vec![], Some((ONE, 1))));
}

/// A plan whose source `client` may send any block.
fn provisional(id: PlanId, client: ClientId) -> PartitionPlan {
    Bench::plan(id, Kind::Reduce, vec![open(client)])
}

#[test]
fn blocks_of_a_provisional_plan_are_computed_as_they_come_and_the_rest_when_it_is_sealed() {
    let mut bench = Bench::new();
    assert_eq!(bench.begin(provisional(ONE, A)), []);
    assert_eq!(bench.core.reserve(A, ONE, 1, AHEAD), ALONE);
    assert_eq!(bench.completes(A, ONE, 1), []);
    assert_eq!(
        (bench.core.missing(A, ONE), bench.core.running()),
        (None, Some((ONE, 2))),
        "nobody knows yet"
    );
    assert_eq!(bench.refused(|core, actions| core.conclude(ONE, actions)), PartitionError::NotReady(ONE));
    // The plan was whole with two blocks, of which one has come.
    let sealed = Bench::plan(ONE, Kind::Reduce, vec![source(A, [0, 1])]);
    let again = sealed.clone();
    assert_eq!(bench.starts(sealed), [Action::Sealed(ONE), Action::Compute(ONE, blocks([2]))]);
    assert_eq!(bench.starts(again), [], "it is sealed once");
    let late = provisional(ONE, A);
    assert_eq!(bench.starts(late), [], "it has been sealed since");
    assert_eq!(bench.core.missing(A, ONE), Some(blocks([0])));
    assert_eq!(bench.core.reserve(A, ONE, 2, AHEAD), Placement::Unwanted);
    assert_eq!(bench.core.reserve(A, ONE, 0, AHEAD), ALONE);
    assert_eq!(bench.completes(A, ONE, 0), []);
    assert_eq!(bench.computed(ONE), [Action::Ready(ONE)]);
}

#[test]
fn a_plan_that_is_sealed_before_it_has_begun_computes_the_rest_when_it_has() {
    let mut bench = Bench::new();
    bench.starts(provisional(ONE, A));
    let sealed = Bench::plan(ONE, Kind::Reduce, vec![source(A, [])]);
    assert_eq!(bench.starts(sealed), [Action::Sealed(ONE)]);
    assert_eq!(bench.begun(ONE), [Action::Compute(ONE, blocks([0, 1, 2]))]);
    assert_eq!(bench.computed(ONE), [Action::Ready(ONE)]);
}

#[test]
fn of_several_who_write_each_may_turn_out_to_send_less() {
    let mut bench = Bench::new();
    bench.begin(Bench::plan(ONE, Kind::Reduce, vec![open(A), open(B)]));
    for block in [0, 1] {
        assert_eq!(bench.core.reserve(A, ONE, block, AHEAD), STORE);
        bench.completes(A, ONE, block);
    }
    // A block is reserved while the plan is sealed, and its payload turns out to be the only one.
    assert_eq!(bench.core.reserve(A, ONE, 2, AHEAD), STORE);
    let sealed = Bench::plan(ONE, Kind::Reduce, vec![source(A, [0, 1, 2]), source(B, [0])]);
    assert_eq!(bench.starts(sealed), [Action::Sealed(ONE), Action::Compute(ONE, blocks([1]))]);
    assert_eq!(bench.completes(A, ONE, 2), [], "one thing is computed at a time");
    assert_eq!(bench.placed(B, ONE, 0), LAST);
    assert_eq!(bench.computed(ONE), [Action::Compute(ONE, blocks([2]))]);
    assert_eq!(bench.computed(ONE), [Action::Ready(ONE)]);
}

#[test]
fn a_block_that_was_not_to_come_tears_the_plan_when_it_is_sealed() {
    let mut bench = Bench::new();
    bench.begin(provisional(ONE, A));
    bench.core.reserve(A, ONE, 1, AHEAD);
    bench.completes(A, ONE, 1);
    let sealed = Bench::plan(ONE, Kind::Reduce, vec![source(A, [0])]);
    assert_eq!(bench.starts(sealed), [Action::Sealed(ONE), Action::Torn(ONE)]);
}

#[test]
fn a_payload_of_the_sealed_plan_waits_until_the_plan_is_sealed() {
    let mut bench = Bench::new();
    let committed = source(B, [0, 1]);
    bench.begin(Bench::plan(ONE, Kind::Reduce, vec![open(A), committed.clone()]));
    assert_eq!(bench.core.reserve(A, ONE, 0, AHEAD), STORE);
    bench.completes(A, ONE, 0);
    assert_eq!(bench.core.reserve(A, ONE, 1, SENT), Placement::Later, "it may be written in part");
    assert_eq!(bench.placed(B, ONE, 1), STORE, "this contribution is committed");
    let sealed = Bench::plan(ONE, Kind::Reduce, vec![source(A, [0, 1]), committed]);
    bench.starts(sealed);
    assert_eq!(bench.core.reserve(A, ONE, 1, SENT), LAST);
}

#[test]
fn a_provisional_plan_that_is_dropped_leaves_nothing() {
    let mut bench = Bench::new();
    bench.begin(provisional(ONE, A));
    bench.core.reserve(A, ONE, 1, AHEAD);
    assert_eq!(bench.drops(ONE), [Action::Abandon(ONE)]);
    assert_eq!(bench.completes(A, ONE, 1), GONE);
    assert_eq!(bench.core.version(), Version(4));
    assert_eq!(bench.core.reserve(A, ONE, 0, AHEAD), Placement::Unwanted);
}

#[test]
fn only_the_plan_that_has_begun_can_be_sealed() {
    let mut bench = Bench::new();
    bench.begin(provisional(ONE, A));
    let other = Bench::plan(ONE, Kind::Reduce, vec![source(B, [0])]);
    assert_eq!(
        bench.refused(|core, actions| core.start(other, false, actions)),
        PartitionError::Overlap { new: ONE, running: ONE }
    );
}

/// A payload that goes in one pass with others, which are kept.
const fn together(last: bool) -> Placement {
    Placement::Ready(ReservedPlace { first: true, last, check: true, kept: true })
}

fn taken(clients: impl IntoIterator<Item = ClientId>) -> Taken {
    clients.into_iter().map(|client| (client, true)).collect()
}

const C: ClientId = ClientId(3);

#[test]
fn a_readable_payload_is_kept_for_the_last_one_of_its_block() {
    let mut bench = Bench::new();
    bench.begin(Bench::plan(ONE, Kind::Reduce, vec![source(A, [0]), source(B, [0]), source(C, [0, 1, 2])]));
    assert_eq!(bench.core.reserve(C, ONE, 1, LIES), ALONE, "nothing else of it comes");
    bench.completes(C, ONE, 1);
    assert_eq!(bench.core.reserve(B, ONE, 0, LIES), Placement::Keep);
    assert_eq!(bench.core.reserve(B, ONE, 0, LIES), Placement::Duplicate);
    assert_eq!(bench.core.missing(B, ONE), Some(blocks([])));
    assert_eq!(bench.core.reserve(C, ONE, 0, LIES), Placement::Keep);
    assert_eq!(bench.core.reserve(A, ONE, 0, LIES), together(true));
    assert_eq!(bench.core.take_kept(A, ONE, 0), Ok((taken([A, B, C]), true)), "in the order of the sources");
    for client in [A, B, C] {
        assert_eq!(bench.completes(client, ONE, 0), []);
    }
    assert_eq!(bench.core.running(), Some((ONE, 1)));
    assert_eq!(bench.core.reserve(C, ONE, 2, LIES), ALONE);
    assert_eq!(bench.completes(C, ONE, 2), [Action::Ready(ONE)]);
}

#[test]
fn a_kept_payload_that_is_gone_can_come_again() {
    let mut bench = Bench::new();
    bench.begin(Bench::plan(ONE, Kind::Reduce, vec![source(A, [0]), source(B, [0])]));
    assert_eq!(bench.core.reserve(A, ONE, 0, LIES), Placement::Keep);
    bench.core.is_gone(A, ONE, 0);
    assert_eq!(bench.core.missing(A, ONE), Some(blocks([0])));
    assert_eq!(bench.core.reserve(A, ONE, 0, LIES), Placement::Keep);
    assert_eq!(bench.core.reserve(B, ONE, 0, SENT), together(true));
    bench.core.is_gone(A, ONE, 0);
    // The payload was to be the last, and is not any more.
    assert_eq!(bench.core.take_kept(B, ONE, 0), Ok((taken([B]), false)));
    bench.completes(B, ONE, 0);
    assert_eq!(bench.core.reserve(A, ONE, 0, LIES), LAST);
}

#[test]
fn in_an_ordered_plan_what_is_kept_goes_before_what_follows_it() {
    let mut bench = Bench::new();
    let sources = vec![source(A, [0]), source(B, [0]), source(C, [0])];
    bench.begin(PartitionPlan { ordered: true, ..Bench::plan(ONE, Kind::Reduce, sources) });
    assert_eq!(bench.core.reserve(C, ONE, 0, LIES), Placement::Keep, "though it is not its turn");
    assert_eq!(bench.core.reserve(B, ONE, 0, SENT), Placement::Later, "A comes first");
    assert_eq!(bench.core.reserve(A, ONE, 0, LIES), Placement::Keep);
    assert_eq!(bench.core.reserve(B, ONE, 0, SENT), together(true));
    assert_eq!(bench.core.take_kept(B, ONE, 0), Ok((taken([A, B, C]), true)));

    let mut bench = Bench::new();
    let sources = vec![source(A, [0]), source(B, [0]), source(C, [0])];
    bench.begin(PartitionPlan { ordered: true, ..Bench::plan(ONE, Kind::Reduce, sources) });
    assert_eq!(bench.core.reserve(A, ONE, 0, LIES), Placement::Keep);
    assert_eq!(bench.core.reserve(B, ONE, 0, SENT), together(false));
    assert_eq!(bench.core.take_kept(B, ONE, 0), Ok((taken([A, B]), false)));
    bench.completes(A, ONE, 0);
    bench.completes(B, ONE, 0);
    assert_eq!(bench.core.reserve(C, ONE, 0, LIES), LAST);
}

#[test]
fn an_ordered_plan_is_torn_if_a_kept_payload_goes_that_was_to_be_added_before() {
    for (last, by, gone, outcome) in [
        (true, C, A, Err(NotTaken::OutOfTurn)),
        (true, C, B, Err(NotTaken::OutOfTurn)),
        (true, B, A, Err(NotTaken::OutOfTurn)),
        (true, B, C, Ok((taken([A, B]), false))),
        (false, B, A, Err(NotTaken::OutOfTurn)),
    ] {
        let mut bench = Bench::new();
        let sources = vec![source(A, [0]), source(B, [0]), source(C, [0])];
        bench.begin(PartitionPlan { ordered: true, ..Bench::plan(ONE, Kind::Reduce, sources) });
        let others = [A, B, C].into_iter().filter(|of| *of != by && (last || *of == A));
        for of in others {
            assert_eq!(bench.core.reserve(of, ONE, 0, LIES), Placement::Keep);
        }
        assert_eq!(bench.core.reserve(by, ONE, 0, SENT), together(last));
        bench.core.is_gone(gone, ONE, 0);
        assert_eq!(bench.core.take_kept(by, ONE, 0), outcome, "{by} without {gone}");
        if outcome.is_err() {
            assert_eq!(bench.ends(by, ONE, 0, ReservationOutcome::Torn), [Action::Torn(ONE)]);
        }
    }
}

#[test]
fn kept_payloads_are_gathered_when_nothing_else_comes_for_their_block() {
    let mut bench = Bench::new();
    bench.begin(Bench::plan(ONE, Kind::Reduce, vec![open(A), open(B)]));
    for block in 0..3 {
        assert_eq!(bench.core.reserve(A, ONE, block, Sent { ahead: true, ..LIES }), Placement::Keep);
    }
    // A payload is on its way into the sum while the plan is sealed.
    assert_eq!(bench.core.reserve(B, ONE, 1, AHEAD), together(true));
    let sealed = Bench::plan(ONE, Kind::Reduce, vec![source(A, [0, 1, 2]), source(B, [1])]);
    assert_eq!(bench.starts(sealed), [Action::Sealed(ONE), Action::Gather(ONE, blocks([0, 2]))]);
    let (client, place) = bench.core.reserve_kept(ONE, 0).unwrap();
    assert_eq!((client, Placement::Ready(place)), (A, ALONE));
    assert_eq!(bench.core.reserve_kept(ONE, 0), None);
    assert_eq!(bench.completes(A, ONE, 0), []);
    assert_eq!(bench.ends(B, ONE, 1, ReservationOutcome::Released), []);
    assert_eq!(bench.core.reserve(B, ONE, 1, LIES), together(true));
}

#[test]
fn kept_payloads_do_not_hold_up_a_dropped_plan() {
    let mut bench = Bench::new();
    bench.begin(Bench::plan(ONE, Kind::Add, vec![source(A, [0]), source(B, [0])]));
    assert_eq!(bench.core.reserve(A, ONE, 0, LIES), Placement::Keep);
    assert_eq!(bench.drops(ONE), GONE);
}

#[test]
fn a_reader_gets_blocks_as_they_are_computed_and_all_of_them_once_the_version_counts() {
    let mut bench = Bench::new();
    let mut has = blocks([]);
    assert_eq!(bench.core.ahead(ONE, &has), Ahead::Wait, "it may begin");
    bench.begin(Bench::plan(ONE, Kind::Reduce, vec![open(A), open(B)]));
    for client in [A, B] {
        assert_eq!(bench.core.ahead(ONE, &has), Ahead::Wait);
        bench.core.reserve(client, ONE, 1, AHEAD);
        assert_eq!(bench.core.ahead(ONE, &has), Ahead::Wait, "it is being added");
        bench.completes(client, ONE, 1);
    }
    assert_eq!(bench.core.ahead(ONE, &has), Ahead::Computed(1));
    has.insert(1);
    assert_eq!(bench.core.ahead(ONE, &has), Ahead::Wait);
    let sealed = Bench::plan(ONE, Kind::Reduce, vec![source(A, [1, 2]), source(B, [1])]);
    assert_eq!(bench.starts(sealed), [Action::Sealed(ONE), Action::Compute(ONE, blocks([0]))]);
    assert_eq!(bench.core.ahead(ONE, &has), Ahead::Wait);
    bench.computed(ONE);
    assert_eq!(bench.core.ahead(ONE, &has), Ahead::Computed(0));
    assert_eq!(bench.comes(A, ONE, 2), [Action::Ready(ONE)]);
    bench.concludes(ONE);
    assert_eq!(bench.core.ahead(ONE, &has), Ahead::Made(Version(5)));
    bench.begin(PartitionPlan { base: Version(5), ..Bench::plan(TWO, Kind::Reduce, vec![source(A, [0])]) });
    assert_eq!(bench.core.ahead(ONE, &has), Ahead::Made(Version(5)));
    bench.computed(TWO);
    bench.comes(A, TWO, 0);
    bench.concludes(TWO);
    assert_eq!(bench.core.ahead(ONE, &has), Ahead::Made(Version(5)), "also when it is no longer the newest");
    assert_eq!(bench.core.ahead(TWO, &has), Ahead::Made(Version(6)));
    // A coordinator may connect that knows nothing of these plans.
    bench.core.coordinated_anew(PlanId(0));
    assert_eq!(bench.core.ahead(ONE, &has), Ahead::Wait);
    assert_eq!(bench.core.ahead(TWO, &has), Ahead::Made(Version(6)), "the coordinator may conclude it again");
}

#[test]
fn a_reader_gets_nothing_of_a_plan_that_is_refused_dropped_or_makes_no_version() {
    let mut bench = Bench::new();
    let has = blocks([]);
    bench.begin(Bench::plan(ONE, Kind::Reduce, vec![source(A, [0, 1, 2])]));
    bench.comes(A, ONE, 0);
    assert_eq!(bench.core.ahead(ONE, &has), Ahead::Computed(0));
    bench.core.reserve(A, ONE, 1, SENT);
    bench.ends(A, ONE, 1, ReservationOutcome::NonFinite);
    assert_eq!(bench.core.ahead(ONE, &has), Ahead::Over);
    bench.drops(ONE);
    assert_eq!(bench.core.ahead(ONE, &has), Ahead::Over);
    bench.begin(Bench::plan(TWO, Kind::Add, vec![source(A, [0])]));
    bench.comes(A, TWO, 0);
    assert_eq!(bench.core.ahead(TWO, &has), Ahead::Wait);
    bench.concludes(TWO);
    assert_eq!(bench.core.ahead(TWO, &has), Ahead::Over);
}

#[test]
fn readers_are_told_when_a_block_is_computed_and_not_whenever_payload_comes() {
    let mut bench = Bench::new();
    let has = blocks([]);
    bench.begin(Bench::plan(ONE, Kind::Reduce, vec![source(A, [0, 1]), source(B, [0])]));
    bench.core.has_news_for_readers();
    bench.comes(A, ONE, 0);
    assert!(!bench.core.has_news_for_readers(), "the block is not computed");
    bench.core.reserve(B, ONE, 0, SENT);
    bench.ends(B, ONE, 0, ReservationOutcome::Released);
    assert!(!bench.core.has_news_for_readers(), "it has not come");
    bench.core.reserve(B, ONE, 0, SENT);
    assert!(!bench.core.has_news_for_readers());
    bench.completes(B, ONE, 0);
    assert!(bench.core.has_news_for_readers() && !bench.core.has_news_for_readers());
    assert_eq!(bench.core.ahead(ONE, &has), Ahead::Computed(0));
    bench.computed(ONE);
    assert!(bench.core.has_news_for_readers());
    bench.comes(A, ONE, 1);
    assert!(bench.core.has_news_for_readers());
    bench.concludes(ONE);
    assert!(bench.core.has_news_for_readers());
    bench.begin(PartitionPlan { base: Version(5), ..Bench::plan(TWO, Kind::Reduce, vec![source(A, [0])]) });
    assert!(!bench.core.has_news_for_readers());
    bench.drops(TWO);
    assert!(bench.core.has_news_for_readers());
}

#[test]
fn a_plan_that_another_process_has_dropped_is_not_computed_a_second_time() {
    for starts in [false, true] {
        let mut bench = Bench::new();
        let plan = || Bench::plan(ONE, Kind::Reduce, vec![source(A, [0, 1, 2])]);
        bench.begin(plan());
        bench.comes(A, ONE, 0);
        assert_eq!(bench.core.ahead(ONE, &blocks([])), Ahead::Computed(0));
        // Somebody else connects as the coordinator.
        bench.core.coordinated_anew(PlanId(0));
        if starts {
            bench.starts(plan());
        }
        bench.drops(ONE);
        bench.core.coordinated_anew(PlanId(0));
        assert_eq!(bench.starts(plan()), [Action::Torn(ONE)]);
    }
}

#[test]
fn a_plan_that_another_process_has_replaced_is_not_computed_a_second_time() {
    let mut bench = Bench::new();
    let plan = || Bench::plan(ONE, Kind::Reduce, vec![source(A, [0, 1, 2])]);
    bench.begin(plan());
    // Somebody else connects as the coordinator, and starts a plan in its place.
    bench.core.coordinated_anew(PlanId(7));
    let other = Bench::plan(PlanId(8), Kind::Reduce, vec![source(B, [0, 1, 2])]);
    assert_eq!(bench.starts(other), [Action::Void(ONE), Action::Begin(PlanId(8))]);
    bench.begun(PlanId(8));
    bench.core.coordinated_anew(PlanId(0));
    assert_eq!(bench.starts(plan()), [Action::Void(PlanId(8)), Action::Torn(ONE)]);
    assert_eq!(bench.starts(plan()), [Action::Torn(ONE)]);
    assert_eq!(bench.drops(ONE), GONE);
    bench.begin(Bench::plan(TWO, Kind::Reduce, vec![source(A, [0, 1, 2])]));
}

/// A plan whose version changes state in place.
fn in_place(kind: Kind, sources: Vec<Source>) -> PartitionPlan {
    PartitionPlan { in_place: true, ..Bench::plan(ONE, kind, sources) }
}

#[test]
fn a_version_that_changes_state_in_place_is_made_once_it_counts() {
    let mut bench = Bench::new();
    assert_eq!(bench.begin(in_place(Kind::Reduce, vec![source(A, [0]), source(B, [0, 1])])), []);
    assert_eq!(bench.placed(A, ONE, 0), STORE);
    assert_eq!(bench.placed(B, ONE, 0), ADD, "the last payload is added, too");
    assert_eq!(bench.core.ahead(ONE, &blocks([])), Ahead::Wait, "nothing is computed before it counts");
    assert_eq!(bench.core.reserve(B, ONE, 1, SENT), STORE);
    assert_eq!(bench.completes(B, ONE, 1), [Action::Ready(ONE)]);
    assert_eq!(bench.concludes(ONE), [Action::Make(ONE, blocks([0, 1, 2]))]);
    assert_eq!(bench.core.version(), Version(4), "it is not there yet");
    assert_eq!(bench.concludes(ONE), [], "a repeated order is answered when it is made");
    assert_eq!(bench.core.reserve(B, ONE, 1, SENT), Placement::Duplicate);
    assert_eq!(bench.computed(ONE), COUNTS);
    assert_eq!(bench.core.version(), Version(5));
    assert_eq!(bench.concludes(ONE), [Action::Done(ONE)]);
}

#[test]
fn nothing_stops_a_version_that_is_being_made_in_place() {
    let mut bench = Bench::new();
    bench.begin(in_place(Kind::Reduce, Vec::new()));
    assert_eq!(bench.concludes(ONE), [Action::Make(ONE, blocks([0, 1, 2]))]);
    assert_eq!(bench.refused(|core, actions| core.drop_plan(ONE, actions)), order(ONE, ONE));
    // Another process takes the coordinator's place.
    bench.core.coordinated_anew(PlanId(0));
    let other = Bench::plan(ONE, Kind::Add, vec![source(A, [0])]);
    assert_eq!(bench.acts(|core, actions| core.start(other, true, actions).unwrap()), []);
    assert_eq!(bench.refused(|core, actions| core.drop_plan(ONE, actions)), order(ONE, ONE));
    assert!(bench.core.wants(ONE));
    assert_eq!(bench.computed(ONE), COUNTS);
    assert_eq!(bench.core.version(), Version(5));
}

#[test]
fn a_plan_that_would_change_state_in_place_is_dropped_like_others_before_it_counts() {
    let mut bench = Bench::new();
    bench.begin(in_place(Kind::Reduce, vec![source(A, [0])]));
    assert_eq!(bench.core.reserve(A, ONE, 0, SENT), STORE);
    assert_eq!(bench.completes(A, ONE, 0), [Action::Ready(ONE)]);
    assert_eq!(bench.drops(ONE), GONE);
    assert_eq!(bench.core.version(), Version(4));
}

#[test]
fn readers_get_the_first_blocks_of_a_version_while_the_others_are_made() {
    let count = MADE_AT_ONCE + 2;
    let all = |of: std::ops::Range<usize>| {
        let mut set = FixedBitSet::with_capacity(count);
        set.insert_range(of);
        set
    };
    let mut bench = Bench { core: PartitionCore::new(count as u32, Version(4)) };
    bench.begin(in_place(Kind::Reduce, Vec::new()));
    assert_eq!(bench.concludes(ONE), [Action::Make(ONE, all(0..MADE_AT_ONCE))]);
    assert_eq!(bench.core.ahead(ONE, &all(0..0)), Ahead::Wait);
    assert_eq!(bench.computed(ONE), [Action::Make(ONE, all(MADE_AT_ONCE..count))]);
    assert_eq!(bench.core.ahead(ONE, &all(0..0)), Ahead::Computed(0));
    assert_eq!(bench.core.ahead(ONE, &all(0..MADE_AT_ONCE)), Ahead::Wait);
    assert_eq!(bench.computed(ONE), COUNTS);
    assert_eq!(bench.core.ahead(ONE, &all(0..1)), Ahead::Made(Version(5)));
}

#[test]
fn new_weights_whose_masters_change_in_place_are_there_before_they_count() {
    let mut bench = Bench::new();
    let rest = bench.begin(in_place(Kind::Assign, vec![source(A, [0])]));
    assert_eq!(rest, [Action::Compute(ONE, blocks([1, 2]))]);
    assert_eq!(bench.placed(A, ONE, 0), ALONE);
    assert_eq!(bench.core.ahead(ONE, &blocks([])), Ahead::Computed(0));
    assert_eq!(bench.computed(ONE), [Action::Ready(ONE)]);
    assert_eq!(bench.concludes(ONE), [Action::Make(ONE, blocks([0, 1, 2]))]);
    assert_eq!(bench.core.ahead(ONE, &blocks([0])), Ahead::Computed(1), "readers go on");
    assert_eq!(bench.computed(ONE), COUNTS);
}
