//! Messages of strangers to the job: numbers that nobody has reached, in the name of a client or of a shard.

use libmodelio::wire::MAX_SKIPPED;

use super::super::requests::MAX_ANSWERS;
use super::*;

const FAR: [u64; 3] = [1 << 63, u64::MAX - 1, u64::MAX];

#[test]
fn a_number_that_nobody_has_reached_does_not_make_the_coordinator_deaf() {
    for number in FAR {
        let mut bench = Bench::new();
        bench.client(A, 2, Message::Open { learner: LearnerId(1) });
        let answers = bench.sent_to(A);
        // Neither message changes anything, and both are answered.
        bench.client(A, number, Message::Abort { learner: LearnerId(1) });
        let why = format!("request {number} is too far ahead: the newest of the client is 2");
        assert_eq!(bench.sent_to(A), [(number, Message::Refused(Refusal::Other(why.clone())))]);
        bench.client(A, 0, Message::AckThrough { request: number, newest: number });
        assert_eq!(bench.said, [Action::Close(A, Refusal::Other(why))]);
        bench.said.clear();
        bench.client(A, 2, Message::Open { learner: LearnerId(1) });
        assert_eq!(bench.sent_to(A), answers, "an unacknowledged answer is sent again");
        bench.commit(A, 1, 1, 3);
        bench.commit(B, 2, 1, 2);
        assert_eq!(bench.started().sources.len(), 2);
    }
}

#[test]
fn a_number_that_is_believed_lasts_no_longer_than_its_connection() {
    for number in [1000, 2 + MAX_SKIPPED] {
        let learner = LearnerId(1);
        let lies: [&[(u64, Message)]; 5] = [
            &[(number, Message::Abort { learner })],
            &[(number, Message::Open { learner: LearnerId(77) })],
            &[
                (number, Message::Abort { learner }),
                (0, Message::AckThrough { request: number, newest: number }),
            ],
            &[
                (0, Message::AckThrough { request: 0, newest: number }),
                (3, Message::Abort { learner: LearnerId(77) }),
            ],
            &[(0, Message::AckThrough { request: 2, newest: 0 })],
        ];
        for lie in lies {
            let mut bench = Bench::new();
            bench.client(A, 2, Message::Open { learner });
            for (request, message) in lie {
                bench.client(A, *request, message.clone());
            }
            bench.coordinator.client_down(A, bench.now, &mut bench.said);
            bench.coordinator.client_up(A, bench.now, &mut bench.said).unwrap();
            bench.said.clear();
            bench.client(A, 0, Message::AckThrough { request: 1, newest: 2 });
            bench.client(A, 2, Message::Open { learner });
            assert_eq!(
                bench.sent_to(A),
                [(2, Message::Opened { step: Step(1), staging_lent: false })],
                "{lie:?}"
            );
            bench.commit(A, 1, 1, 3);
            let opened = Message::Opened { step: Step(1), staging_lent: false };
            assert_eq!(
                bench.sent_to(A),
                [(3, opened)],
                "it is taken, and the other learner is waited for: {lie:?}"
            );
            bench.commit(B, 2, 1, 2);
            assert_eq!(bench.started().sources.len(), 2, "{lie:?}");
        }
    }
}

#[test]
fn a_client_that_was_given_up_while_a_stranger_had_its_number_is_served_when_it_is_back() {
    let mut bench = Bench::new();
    bench.client(A, 1000, Message::Abort { learner: LearnerId(1) });
    bench.pass(bench.coordinator.job().controls().lease);
    bench.coordinator.client_up(A, bench.now, &mut bench.said).unwrap();
    bench.said.clear();
    bench.client(A, 0, Message::AckThrough { request: 1, newest: 2 });
    let late = |answers: &[(u64, Message)]| {
        matches!(answers, [(_, Message::Refused(Refusal::Shard(ShardError::TimedOut(_))))])
    };
    bench.client(A, 2, Message::Open { learner: LearnerId(1) });
    assert!(late(&bench.sent_to(A)), "it may have been carried out");
    bench.client(A, 3, Message::Join { name: "again".into() });
    assert_eq!(bench.sent_to(A)[0].1.name(), "Joined");
}

/// The connection of client A is lost, and somebody connects under its number.
fn connects_anew(bench: &mut Bench) {
    bench.coordinator.client_down(A, bench.now, &mut bench.said);
    bench.coordinator.client_up(A, bench.now, &mut bench.said).unwrap();
    bench.said.clear();
}

/// The client itself connects: it has the answers up to `acked_through`, and has made requests up to `newest`.
fn client_connects(bench: &mut Bench, acked_through: u64, newest: u64) {
    connects_anew(bench);
    bench.client(A, 0, Message::AckThrough { request: acked_through, newest });
}

#[test]
fn answers_to_a_stranger_keep_the_client_out_and_its_answers_away_no_longer_than_its_connection() {
    let mut bench = Bench::new();
    let opened = (2, Message::Opened { step: Step(1), staging_lent: false });
    bench.client(A, 2, Message::Open { learner: LearnerId(1) });
    for stranger in 0..3 {
        connects_anew(&mut bench);
        let from = 10 + stranger * 10_000;
        for request in from..from + MAX_ANSWERS as u64 {
            bench.client(A, request, Message::Open { learner: LearnerId(77) });
        }
        assert_eq!(bench.sent_to(A).len(), MAX_ANSWERS);
        bench.client(A, from + MAX_ANSWERS as u64, Message::Open { learner: LearnerId(77) });
        let why = Refusal::Other(format!("{MAX_ANSWERS} answers were not acknowledged"));
        assert_eq!(bench.said, [Action::Close(A, why)]);
        assert_eq!(bench.coordinator.client_count().0, 1, "its connection is over");
        assert!(bench.coordinator.kept().1 <= 2 * MAX_ANSWERS + 1, "one of the other client");
    }
    client_connects(&mut bench, 1, 2);
    bench.client(A, 2, Message::Open { learner: LearnerId(1) });
    assert_eq!(bench.sent_to(A), [opened]);
    bench.client(A, 3, Message::Join { name: "more".into() });
    assert_eq!(bench.sent_to(A)[0].1.name(), "Joined");
}

#[test]
fn a_client_gets_an_answer_again_that_a_stranger_has_acknowledged_or_not_requested() {
    for (acked_through, newest) in [(2, 2), (2, 0), (0, 0)] {
        let mut bench = Bench::new();
        bench.client(A, 2, Message::Join { name: "more".into() });
        let joined = bench.sent_to(A);
        assert_eq!(joined[0].1.name(), "Joined");
        connects_anew(&mut bench);
        bench.client(A, 0, Message::AckThrough { request: acked_through, newest });
        client_connects(&mut bench, 1, 2);
        bench.client(A, 2, Message::Join { name: "more".into() });
        assert_eq!(bench.sent_to(A), joined, "{acked_through}, {newest}");
    }
}

#[test]
fn a_client_is_not_given_the_answer_to_a_stranger_s_request_of_the_same_number() {
    let mut bench = Bench::new();
    connects_anew(&mut bench);
    bench.client(A, 2, assign(7, 1000));
    bench.started();
    client_connects(&mut bench, 1, 1);
    bench.client(A, 2, assign(8, 9000));
    let answers = |bench: &mut Bench| -> Vec<(u64, Message)> {
        bench.sent_to(A).into_iter().filter(|(request, _)| *request > 0).collect()
    };
    bench.pass(Now::from_secs(1));
    assert_eq!(answers(&mut bench), [], "the stranger's has timed out");
    bench.pass(Now::from_secs(8));
    let answers = answers(&mut bench);
    assert!(
        matches!(&answers[..], [(2, Message::Refused(Refusal::Shard(ShardError::TimedOut(_))))]),
        "{answers:?}"
    );
}

#[test]
fn a_setting_that_was_refused_is_refused_when_it_comes_again_though_it_would_do_now() {
    let mut bench = Bench::new();
    let set = |name: &str, value: &str| Message::SetControl { name: name.into(), value: value.into() };
    bench.client(A, 2, set("min_learners", "3"));
    bench.client(A, 3, set("learners", "3"));
    bench.client(A, 2, set("min_learners", "3"));
    let refused = |answer: &&(u64, Message)| matches!(answer, (2, Message::Refused(Refusal::Control(_))));
    assert_eq!(bench.sent_to(A).iter().filter(refused).count(), 2);
    assert_eq!(bench.coordinator.job().controls().min_learners, 1);
}

#[test]
fn a_client_that_reconnects_without_a_request_gets_its_acknowledged_number() {
    let mut bench = Bench::new();
    bench.client(A, MAX_SKIPPED, Message::Open { learner: LearnerId(1) });
    let newest = MAX_SKIPPED + 1000;
    bench.client(A, newest, Message::Open { learner: LearnerId(1) });
    bench.client(A, 0, Message::AckThrough { request: newest, newest });
    for acked_through in [newest, newest + 5] {
        client_connects(&mut bench, acked_through, newest + 5);
        assert_eq!(bench.said, []);
        bench.pass(bench.coordinator.job().controls().lease / 2);
        let sent = bench.said.iter().rev().find_map(|action| match action {
            Action::ToClient(A, 0, Message::State(state)) => Some(state.acked_through),
            _ => None,
        });
        assert_eq!(sent, Some(Some(acked_through)));
        bench.said.clear();
    }
}

#[test]
fn requests_of_a_client_that_is_back_are_carried_out_once_even_after_a_stranger_took_its_place() {
    let mut bench = Bench::new();
    bench.client(A, 1000, Message::Abort { learner: LearnerId(1) });
    bench.pass(bench.coordinator.job().controls().lease);
    client_connects(&mut bench, 1, 2);
    bench.client(A, 3, Message::Join { name: "again".into() });
    let joined = bench.sent_to(A);
    client_connects(&mut bench, 2, 3);
    bench.client(A, 3, Message::Join { name: "again".into() });
    assert_eq!(bench.sent_to(A), joined, "the same answer");
    assert_eq!(joined[0].1.name(), "Joined");
}

#[test]
fn unacknowledged_answers_keep_no_client_out_and_kept_refusals_are_cut() {
    let mut bench = Bench::new();
    for id in 0..MAX_CLIENTS as u64 {
        let id = ClientId(1 << 20 | id);
        let full = bench.coordinator.client_up(id, bench.now, &mut bench.said).is_err();
        assert!(!full, "{id}");
        let setting = Message::SetControl { name: "momentum".into(), value: "9".repeat(1 << 10) };
        bench.client(id, 1, setting.clone());
        let once = bench.sent_to(id);
        bench.client(id, 1, setting);
        let (once, again) = (format!("{once:?}"), format!("{:?}", bench.sent_to(id)));
        assert!(once.len() > 200 && (100..200).contains(&again.len()), "{again}");
        bench.client(id, 2, Message::Open { learner: LearnerId(77) });
        bench.coordinator.client_down(id, bench.now, &mut bench.said);
    }
    assert_eq!(bench.coordinator.client_count(), (2, MAX_CLIENTS));
    bench.commit(A, 1, 1, 2);
    bench.commit(B, 2, 1, 2);
    assert_eq!(bench.started().sources.len(), 2, "who takes part stays");
}

#[test]
fn requests_that_were_given_up_before_they_came_stop_no_later_one() {
    let mut bench = Bench::new();
    bench.client(A, 0, Message::AckThrough { request: 1000, newest: 1000 });
    assert_eq!(bench.said, []);
    bench.commit(A, 1, 1, 2);
    bench.commit(B, 2, 1, 2);
    assert_eq!(bench.started().sources.len(), 2);
}

#[test]
fn a_plan_that_a_shard_takes_for_past_is_begun_again_under_the_next_number() {
    let (mut bench, plan) = Bench::both_committed();
    bench.said.clear();
    let past = |plan: PlanId, newest| Message::Refused(Refusal::Plan { plan, newest });
    // An answer about another plan, or about one whose turn has not come there: the order is repeated.
    bench.partition(77, past(PlanId(77), PlanId(99)));
    bench.partition(plan.plan.0, past(plan.plan, PlanId(plan.plan.0 - 1)));
    assert_eq!(bench.sent_to_partition(), []);
    bench.partition(plan.plan.0, past(plan.plan, plan.plan));
    assert_eq!(bench.sent_to_partition(), [Message::Drop { plan: plan.plan }]);
    bench.partition(plan.plan.0, Message::Done);
    let next = bench.started();
    assert_eq!(next, libmodelio::wire::Plan { plan: PlanId(plan.plan.0 + 1), ..plan });
    // Once it is concluded, no such word changes anything.
    bench.partition(0, Message::Ready { plan: next.plan });
    bench.partition(next.plan.0, past(next.plan, next.plan));
    assert!(bench.coordinator.failed().is_none());
    assert_eq!(bench.coordinator.job().version(), libmodelio::vocabulary::ids::Version(1));
}

#[test]
fn a_refusal_of_what_is_over_does_not_fail_the_job() {
    let (mut bench, plan) = Bench::both_committed();
    bench.partition(plan.plan.0 + 5, Message::Refused(Refusal::other("another one")));
    bench.partition(
        0,
        Message::NonFinitePayload {
            plan: PlanId(u64::MAX),
            client: A,
            block: libmodelio::vocabulary::ids::BlockId(0),
        },
    );
    bench.partition(
        0,
        Message::NonFinitePayload {
            plan: plan.plan,
            client: ClientId(99),
            block: libmodelio::vocabulary::ids::BlockId(0),
        },
    );
    bench.partition(0, Message::Ready { plan: PlanId(u64::MAX) });
    assert!(bench.coordinator.failed().is_none());
    assert_eq!(bench.coordinator.running(), Some((plan.plan, vec![0])));
    bench.partition(plan.plan.0, Message::Refused(Refusal::other("this one")));
    assert!(bench.coordinator.failed().is_some());
}

#[test]
fn a_reconnected_shard_gets_the_start_of_a_plan_before_its_end() {
    let (mut bench, plan) = Bench::both_committed();
    assert_eq!(bench.coordinator.over(), PlanId(0));
    bench.partition(0, Message::Ready { plan: plan.plan });
    assert_eq!(bench.sent_to_partition(), [Message::Conclude { plan: plan.plan }]);
    assert_eq!(bench.coordinator.over(), plan.plan);
    bench.coordinator.partition_up(0, &mut bench.said);
    let both = [Message::Start(Box::new(plan.clone())), Message::Conclude { plan: plan.plan }];
    assert_eq!(bench.sent_to_partition(), both);
    bench.pass(Now::from_millis(600));
    assert_eq!(bench.sent_to_partition(), both);
}

#[test]
fn only_the_client_of_a_learner_says_that_it_has_a_whole_block() {
    let Bench { coordinator, now, said } = Bench::new();
    let mut bench = Bench { coordinator: coordinator.with_provisional_plans(), now, said };
    let (learner, step) = (LearnerId(2), Step(1));
    bench.client(B, 2, Message::Open { learner });
    bench.said.clear();
    bench.client(A, 0, Message::WholeBlock { learner, step });
    bench.client(B, 0, Message::WholeBlock { learner, step: Step(2) });
    bench.client(B, 0, Message::WholeBlock { learner: LearnerId(3), step });
    assert_eq!(bench.said, []);
    for _ in 0..2 {
        bench.client(B, 0, Message::WholeBlock { learner, step });
    }
    let [Message::Start(plan)] = &bench.sent_to_partition()[..] else { panic!("{:?}", bench.said) };
    let sources: Vec<_> = plan.sources.iter().map(|source| (source.client, source.provisional)).collect();
    assert_eq!(sources, [(A, true), (B, true)]);
}
