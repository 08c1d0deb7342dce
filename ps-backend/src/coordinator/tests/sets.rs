//! New weights in parts: what a complete set begins, and what becomes of its parts.

use libmodelio::wire::{PartOf, PlanPart, SetOfParts};

use super::*;

const WHY: ShardError = ShardError::PartGone(1);

fn part(number: u32, blocks: Range<u32>, all: bool) -> Message {
    let part = PartOf { set: "a".into(), number, of: 2, all };
    let token = u64::from(number) + 7;
    Message::AssignPart { token, part, blocks: vec![blocks], timeout_ms: 10_000, meta: Default::default() }
}

/// Both parts have come. The plan that publishes them.
fn both(bench: &mut Bench, all: bool) -> Plan {
    bench.client(B, 2, part(1, 1..3, all));
    assert!(bench.said.is_empty(), "nothing begins before all parts are there: {:?}", bench.said);
    bench.client(A, 2, part(0, 0..2, all));
    bench.started()
}

/// The answers to a client.
fn answers(bench: &mut Bench, client: ClientId) -> Vec<(u64, Message)> {
    bench.sent_to(client).into_iter().filter(|(request, _)| *request > 0).collect()
}

fn refused(request: u64, why: ShardError) -> Vec<(u64, Message)> {
    vec![(request, Message::Refused(why.into()))]
}

#[test]
fn one_plan_publishes_all_parts_of_a_set() {
    for (all, blocks) in [(false, 0..3), (true, 0..4)] {
        let mut bench = Bench::new();
        let plan = both(&mut bench, all);
        let of = |client, token, blocks| PlanPart { client, token, blocks: vec![blocks] };
        let parts = vec![of(A, 7, 0..2), of(B, 8, 1..3)];
        assert_eq!(plan.parts, Some(SetOfParts { all, parts }));
        let [source] = &plan.sources[..] else { panic!("{:?}", plan.sources) };
        assert_eq!((source.client, &source.blocks), (NOBODY, &vec![blocks]));
        let grants = |said: &Action| matches!(said, Action::ToClient(_, _, Message::Grant { .. }));
        assert!(!bench.said.iter().any(grants), "nobody sends anything");
        bench.carries_out(plan.plan);
        for client in [A, B] {
            assert_eq!(answers(&mut bench, client), [(2, Message::Done)]);
        }
        assert_eq!(bench.coordinator.job().version(), Version(1));
        // A plan that is over is not refused any more.
        bench.partition(0, Message::Unmade { plan: plan.plan, why: WHY });
        assert_eq!(bench.coordinator.job().version(), Version(1));
    }
}

#[test]
fn a_set_that_makes_no_version_is_refused_to_all() {
    let mut bench = Bench::new();
    let plan = both(&mut bench, false);
    bench.partition(0, Message::Unmade { plan: PlanId(plan.plan.0 + 1), why: WHY });
    assert!(answers(&mut bench, A).is_empty(), "another plan");
    bench.partition(0, Message::Unmade { plan: plan.plan, why: WHY });
    for client in [A, B] {
        assert_eq!(answers(&mut bench, client), refused(2, WHY));
    }
    assert!(bench.sent_to(NOBODY).is_empty(), "nobody has to hear that the plan is over");
    bench.partition(0, Message::Ready { plan: plan.plan });
    bench.partition(plan.plan.0, Message::Done);
    assert_eq!(bench.coordinator.job().version(), Version(0));
    // The set may come again.
    bench.said.clear();
    bench.client(B, 3, part(1, 1..3, false));
    bench.client(A, 3, part(0, 0..2, false));
    assert!(bench.started().parts.is_some());
}

#[test]
fn a_lost_client_takes_its_part_along_and_a_complete_set_goes_on() {
    let mut bench = Bench::new();
    bench.client(B, 2, part(1, 1..3, false));
    bench.client(B, 3, Message::WithdrawAssign { token: 8 });
    assert_eq!(
        answers(&mut bench, B),
        [refused(2, ShardError::Interrupted), vec![(3, Message::Done)]].concat()
    );
    bench.client(A, 2, part(0, 0..2, false));
    assert!(bench.sent_to_partition().is_empty());
    bench.pass(Now::from_secs(10));
    let late = ShardError::TimedOut("set \"a\" lacks part 1 of 2".into());
    assert_eq!(answers(&mut bench, A), refused(2, late));
    bench.client(B, 4, part(1, 1..3, false));
    bench.client(A, 3, part(0, 0..2, false));
    let plan = bench.started();
    bench.client(B, 5, Message::WithdrawAssign { token: 8 });
    assert_eq!(answers(&mut bench, B), [(5, Message::Done)], "the set has begun");
    let lease = bench.coordinator.job().controls().lease;
    bench.coordinator.client_alive(A, bench.now + lease);
    bench.coordinator.client_down(B, bench.now, &mut bench.said);
    bench.pass(lease);
    assert_eq!(bench.coordinator.client_count(), (1, 1), "the silent client is given up");
    bench.carries_out(plan.plan);
    assert_eq!(bench.coordinator.job().version(), Version(1));
}

#[test]
fn a_job_that_fails_says_so_to_the_parts_that_wait() {
    let mut bench = Bench::new();
    bench.client(B, 2, part(1, 1..3, false));
    bench.client(
        A,
        2,
        Message::Assign {
            token: 1,
            blocks: vec![0..1],
            timeout_ms: 9,
            ahead: None,
            meta: Default::default(),
        },
    );
    bench.started();
    bench.partition(0, Message::Refused(Refusal::NoModel("m".into())));
    for client in [A, B] {
        let said = answers(&mut bench, client);
        assert!(matches!(said[..], [(2, Message::Refused(Refusal::Shard(ShardError::Lost(_))))]), "{said:?}");
    }
}

#[test]
fn a_set_goes_on_where_the_model_has_moved() {
    let mut bench = Bench::new();
    bench.client(B, 2, part(1, 1..3, false));
    bench.hold();
    let bytes = bench.coordinator.hand_over().unwrap();
    let coordinator = CoordinatorCore::taken_over(&bytes, &layout(4), 1, bench.now).unwrap();
    let mut there = Bench { coordinator, now: bench.now, said: Vec::new() };
    there.coordinator.go_on(there.now, &mut there.said);
    for client in [A, B] {
        there.coordinator.client_up(client, there.now, &mut there.said).unwrap();
    }
    there.client(B, 2, part(1, 1..3, false));
    there.client(A, 2, part(0, 0..2, false));
    let plan = there.started();
    // The bytes have not moved.
    there.partition(0, Message::Unmade { plan: plan.plan, why: WHY });
    assert_eq!(answers(&mut there, B), refused(2, WHY));
}
