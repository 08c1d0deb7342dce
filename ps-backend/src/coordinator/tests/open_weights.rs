//! New weights whose blocks are sent while others are still written.

use libmodelio::vocabulary::ids::BlockId;
use libmodelio::wire::Plan;

use super::*;

const TOKEN: u64 = 7;

/// Two clients with a learner each. The first one writes new weights, for which a plan has begun.
fn writing() -> (Bench, Plan) {
    let mut bench = Bench::new();
    bench.coordinator.states.announce_plans();
    bench.client(A, 2, Message::SetControl { name: "reducer".into(), value: "assign".into() });
    bench.said.clear();
    bench.client(A, 0, Message::WholeWeights { token: TOKEN });
    let plan = bench.started();
    assert!(plan.sources[0].provisional && plan.work == Work::Assign { token: TOKEN });
    let grant = Message::Grant { plan: plan.plan, payload: Granted::OpenWeights(TOKEN), counted: PlanId(0) };
    assert_eq!(bench.sent_to(A), [(0, grant)]);
    assert_eq!(
        bench.sent_to(B),
        [(0, Message::Begun { plan: plan.plan })],
        "it sends nothing, and may follow"
    );
    (bench, plan)
}

fn assign(token: u64, ahead: Option<PlanId>) -> Message {
    Message::Assign { token, blocks: vec![0..3], timeout_ms: 10_000, ahead, meta: Default::default() }
}

impl Bench {
    /// The plan is concluded, and its shard is done with it.
    fn concludes(&mut self, plan: PlanId) {
        self.partition(0, Message::Ready { plan });
        assert_eq!(self.sent_to_partition(), [Message::Conclude { plan }]);
        self.partition(plan.0, Message::Done);
    }
}

#[test]
fn the_request_to_publish_seals_the_plan_that_has_taken_blocks() {
    let (mut bench, open) = writing();
    bench.partition(0, Message::Ready { plan: open.plan });
    assert_eq!(bench.coordinator.job().version(), Version(0), "it is not sealed");
    bench.client(A, 3, assign(TOKEN, Some(open.plan)));
    let sealed = bench.started();
    assert_eq!((sealed.plan, sealed.base, &sealed.work), (open.plan, open.base, &open.work));
    assert_eq!((sealed.sources[0].provisional, &sealed.sources[0].blocks), (false, &vec![0..3]));
    let grant = Message::Grant { plan: open.plan, payload: Granted::Weights(TOKEN), counted: PlanId(0) };
    assert_eq!(bench.sent_to(A), [(0, grant)]);
    bench.concludes(open.plan);
    assert_eq!(bench.sent_to(A), [(3, Message::Done)]);
    assert_eq!(bench.coordinator.job().version(), Version(1));
}

#[test]
fn weights_that_were_written_again_are_sent_as_a_whole() {
    for gone in [true, false] {
        let (mut bench, open) = writing();
        if gone {
            bench.client(A, 0, Message::SourceGone { plan: open.plan, learner: None });
        }
        bench.client(A, 3, assign(TOKEN, None));
        assert_eq!(bench.sent_to_partition(), [Message::Drop { plan: open.plan }]);
        assert_eq!(bench.sent_to(A), [(0, Message::Over { plan: open.plan })]);
        bench.partition(open.plan.0, Message::Done);
        let whole = bench.started();
        assert!(whole.plan > open.plan && !whole.sources[0].provisional);
        bench.concludes(whole.plan);
        assert_eq!(bench.coordinator.job().version(), Version(1));
    }
}

#[test]
fn weights_that_are_still_written_hold_no_other_work_up() {
    let (mut bench, open) = writing();
    bench.commit(A, 1, 1, 3);
    bench.commit(B, 2, 1, 2);
    assert_eq!(bench.sent_to_partition(), [Message::Drop { plan: open.plan }]);
    bench.partition(open.plan.0, Message::Done);
    let step = bench.started();
    assert_eq!(step.sources.len(), 2);
    bench.concludes(step.plan);
    // What was sent for the dropped plan does not count.
    bench.client(A, 5, assign(TOKEN, Some(open.plan)));
    let whole = bench.started();
    assert!(whole.plan > step.plan && !whole.sources[0].provisional);
    bench.concludes(whole.plan);
    assert_eq!(bench.coordinator.job().version(), Version(2));
}

#[test]
fn other_new_weights_are_published_meanwhile() {
    let (mut bench, open) = writing();
    bench.client(B, 0, Message::WholeWeights { token: 9 });
    assert_eq!(bench.sent_to_partition(), [], "one at a time");
    bench.client(B, 2, assign(TOKEN, Some(open.plan)));
    assert_eq!(bench.sent_to_partition(), [Message::Drop { plan: open.plan }], "another client's token");
    bench.partition(open.plan.0, Message::Done);
    let other = bench.started();
    assert_eq!(other.sources[0].client, B);
    bench.concludes(other.plan);
}

#[test]
fn weights_that_are_written_while_another_plan_is_under_way_get_theirs_after_it() {
    let (mut bench, open) = writing();
    bench.client(A, 3, assign(TOKEN, Some(open.plan)));
    bench.started();
    bench.client(B, 0, Message::WholeWeights { token: 9 });
    assert_eq!(bench.sent_to_partition(), []);
    bench.concludes(open.plan);
    let next = bench.started();
    assert_eq!((next.sources[0].client, next.sources[0].provisional), (B, true));
    bench.client(B, 2, assign(9, Some(next.plan)));
    bench.started();
    // These are complete before their turn comes.
    bench.client(A, 0, Message::WholeWeights { token: 8 });
    bench.client(A, 4, assign(8, None));
    bench.concludes(next.plan);
    let last = bench.started();
    assert_eq!((last.sources[0].client, last.sources[0].provisional), (A, false));
    bench.concludes(last.plan);
    assert_eq!(bench.coordinator.running(), None);
}

#[test]
fn weights_end_with_the_connection_of_their_client() {
    let (mut bench, open) = writing();
    bench.coordinator.client_down(A, bench.now, &mut bench.said);
    assert_eq!(bench.sent_to_partition(), [Message::Drop { plan: open.plan }]);
    bench.partition(open.plan.0, Message::Done);
    assert_eq!(bench.coordinator.running(), None);
}

#[test]
fn weights_that_are_still_written_do_not_hold_a_move_up() {
    let (mut bench, open) = writing();
    bench.hold();
    assert_eq!(bench.sent_to_partition(), [Message::Drop { plan: open.plan }]);
    bench.partition(open.plan.0, Message::Done);
    bench.client(A, 0, Message::WholeWeights { token: TOKEN });
    assert_eq!(bench.sent_to_partition(), [], "nothing begins meanwhile");
    assert!(bench.coordinator.is_held());
}

#[test]
fn a_bad_or_lost_block_of_open_weights_drops_their_plan_and_nothing_else() {
    for bad in [true, false] {
        let (mut bench, open) = writing();
        let plan = open.plan;
        bench.partition(
            0,
            match bad {
                true => Message::NonFinitePayload { plan, client: A, block: BlockId(0) },
                false => Message::Torn { plan },
            },
        );
        assert_eq!(bench.sent_to_partition(), [Message::Drop { plan }]);
        bench.partition(plan.0, Message::Done);
        bench.client(A, 3, assign(TOKEN, Some(plan)));
        let whole = bench.started();
        bench.concludes(whole.plan);
        assert_eq!(bench.sent_to(A).last(), Some(&(3, Message::Done)));
    }
}

#[test]
fn a_request_that_leaves_out_blocks_which_were_sent_stops_nobody() {
    let (mut bench, open) = writing();
    let plan = open.plan;
    let fewer = Message::Assign {
        token: TOKEN,
        blocks: vec![0..1],
        timeout_ms: 10_000,
        ahead: Some(plan),
        meta: Default::default(),
    };
    bench.client(A, 3, fewer);
    assert_eq!(bench.started().plan, plan);
    // The shard has blocks that the sealed plan does not name.
    bench.partition(0, Message::Torn { plan });
    assert_eq!(bench.sent_to_partition(), [Message::Drop { plan }]);
    bench.partition(plan.0, Message::Done);
    let again = bench.started();
    assert!(again.plan > plan && !again.sources[0].provisional);
    assert_eq!(again.sources[0].blocks, vec![0..1]);
    bench.concludes(again.plan);
    assert_eq!(bench.sent_to(A).last(), Some(&(3, Message::Done)));
    assert_eq!(bench.coordinator.job().version(), Version(1));
}
