//! What a false coordinator, which a client may believe while the registry cannot be asked, says of numbers.

use super::*;
use crate::wire::MAX_NUMBER;

const FAR: [u64; 3] = [1 << 62, 1 << 63, u64::MAX];
/// What somebody may have reached.
const NEAR: [u64; 3] = [1000, 1 << 40, MAX_NUMBER];

impl Bench {
    /// The connection to whoever coordinated is over, and there is one to the coordinator.
    fn comes_back(&mut self) {
        self.core.coordinator_down(self.now, &mut self.said);
        self.said.clear();
        self.core.coordinator_up(self.now, &mut self.said);
    }
}

#[test]
fn a_lie_about_numbers_lasts_no_longer_than_its_connection() {
    for number in NEAR {
        let mut bench = Bench::committed();
        bench.coordinator(0, Message::Over { plan: PlanId(number) });
        bench.coordinator(
            0,
            Message::State(Box::new(JobState {
                sequence: number,
                version: Version(number),
                over: PlanId(number),
                acked_through: Some(number),
                learners: vec![LearnerState {
                    learner: L,
                    incarnation: Incarnation(1),
                    step: Step(u64::MAX),
                    unpublished: false,
                    published_in: Version(number),
                    joined_at: Version(0),
                    attached: Attached::No,
                }],
                ..JobState::default()
            })),
        );
        bench.grant(5);
        assert_eq!(bench.core.outgoing(), None, "the liar is believed as long as it coordinates");
        bench.comes_back();
        bench.state(2, 1, 0, false);
        assert_eq!((bench.core.state().version, bench.core.pulling()), (Version(1), Some(Version(1))));
    }
}

#[test]
fn a_plan_is_sent_after_somebody_has_called_all_plans_over() {
    for number in NEAR {
        let mut bench = Bench::committed();
        bench.coordinator(0, Message::Over { plan: PlanId(number) });
        bench.comes_back();
        bench.grant(1);
        assert_eq!((bench.pushes(0), bench.pushes(1)), (vec![0, 2], vec![1]));
    }
}

#[test]
fn a_plan_that_a_shard_has_begun_again_is_sent_again() {
    let mut bench = Bench::in_plan();
    assert_eq!((bench.pushes(0), bench.pushes(1)), (vec![0, 2], vec![1]));
    for partition in 0..2 {
        let missing = Message::Missing { plan: PlanId(1), blocks: vec![] };
        bench.core.from_shard(partition, missing, bench.now, &mut bench.said);
    }
    bench.said.clear();
    bench.grant(1);
    assert_eq!(bench.said, [], "it has just been asked");
    bench.pass(1000);
    bench.grant(1);
    for partition in 0..2 {
        assert!(bench.said.contains(&Action::ToShard(partition, Message::Probe { plan: PlanId(1) })));
    }
}

#[test]
fn a_number_that_no_coordinator_reaches_is_passed_over() {
    for number in FAR.into_iter().chain([MAX_NUMBER + 1]) {
        let mut bench = Bench::in_plan();
        bench.said.clear();
        bench.coordinator(0, Message::Over { plan: PlanId(number) });
        let of = Vec::new();
        bench.granted(number, Granted::Contributions { of, replaces: false, open: None });
        let state = |sequence, version, over| {
            Message::State(Box::new(JobState {
                sequence,
                version: Version(version),
                over: PlanId(over),
                ..JobState::default()
            }))
        };
        for state in [state(number, 0, 0), state(1000, number, 0), state(1000, 0, number)] {
            bench.coordinator(0, state);
        }
        assert_eq!(bench.said, []);
        assert_eq!((bench.pushes(0), bench.pushes(1)), (vec![0, 2], vec![1]), "{number}");
    }
}

#[test]
fn a_setting_that_no_job_can_have_is_passed_over() {
    let mut bench = Bench::new();
    let before = bench.core.state().clone();
    let state = |learners| {
        let mut state = JobState { sequence: before.sequence + 1, ..before.clone() };
        state.controls.learners = learners;
        state
    };
    bench.coordinator(0, Message::State(Box::new(state(0))));
    assert_eq!(*bench.core.state(), before);
    bench.coordinator(0, Message::State(Box::new(state(2))));
    assert_eq!(*bench.core.state(), state(2), "the next one counts");
}

#[test]
fn blocks_that_are_not_of_the_plan_are_not_sent() {
    let mut bench = Bench::new();
    bench.ask(3, commit(L, 1, 0..1, 10, false), 10);
    bench.grant(1);
    assert_eq!((bench.pushes(0), bench.pushes(1)), (vec![0], vec![]));
    // A stranger has begun a plan of this number there, of all blocks.
    for partition in 0..2 {
        let missing = Message::Missing { plan: PlanId(1), blocks: vec![0..3] };
        bench.core.from_shard(partition, missing, bench.now, &mut bench.said);
    }
    assert_eq!((bench.pushes(0), bench.pushes(1)), (vec![0], vec![]));
}

#[test]
fn a_version_that_no_job_reaches_is_not_pulled() {
    let mut bench = Bench::new();
    bench.state(2, 1, 1, false);
    let ask = |bench: &mut Bench| bench.core.next_pull(0, 8, bench.now);
    assert!(ask(&mut bench).is_some());
    for number in FAR {
        let lie = Refusal::NoVersion { wanted: Version(1), newest: Version(number) };
        bench.core.from_shard(0, Message::Refused(lie), bench.now, &mut bench.said);
        assert_eq!((bench.core.pulling(), bench.core.state().version), (Some(Version(1)), Version(1)));
        bench.pass(10);
        assert_eq!(
            ask(&mut bench),
            Some(Message::Pull { version: Version(1), blocks: 0..3, base: Some(Version(0)) })
        );
    }
}
