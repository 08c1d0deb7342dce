//! The record of a job, which snapshots keep: it has the newest version's facts, and nothing else.

use libmodelio::vocabulary::ids::{Incarnation, Step, Version};
use libmodelio::vocabulary::tensor_steps::TensorSteps;
use libmodelio::wire::LearnerRecord;

use super::super::*;
use super::bench::{completes, everything, job, open};

fn known(record: &JobRecord) -> Vec<(&str, u64, Option<u64>)> {
    let learners = record.learners.iter();
    learners.map(|l| (l.name.as_str(), l.incarnation.0.into(), l.step.map(|step| step.0))).collect()
}

#[test]
fn a_record_has_what_is_part_of_the_version_and_no_more() {
    let (mut bench, ids) = job("2", &["a", "b"]);
    for _ in 0..2 {
        everything(&mut bench, ids[0], true);
        completes(&mut bench, ids[1]);
    }
    let record = bench.core.record();
    assert_eq!((record.version, record.contributions, record.steps.highest()), (Version(2), 4, 2));
    assert_eq!(known(&record), [("a", 1, Some(2)), ("b", 1, Some(2))]);
    // One learner has committed, and one writes.
    everything(&mut bench, ids[0], true);
    open(&mut bench, ids[1]);
    assert_eq!(bench.core.record(), record);
    // A version that is being made is not part of it.
    everything(&mut bench, ids[1], true);
    assert_eq!(bench.core.record(), record);
    bench.reduce_done(true);
    assert_eq!(known(&bench.core.record()), [("a", 1, Some(3)), ("b", 1, Some(3))]);
    bench.leave(ids[0].0);
    assert_eq!(known(&bench.core.record()), [("b", 1, Some(3)), ("a", 1, None)]);
}

#[test]
fn a_job_goes_on_from_a_record_with_other_lives_of_its_learners() {
    let (mut bench, ids) = job("2", &["a", "b"]);
    everything(&mut bench, ids[0], true);
    completes(&mut bench, ids[1]);
    bench.leave(ids[1].0);
    let record = bench.core.record();
    let (mut again, _) = job("2", &[]);
    again.core.restore(record.clone()).unwrap();
    let kept = again.core.record();
    assert_eq!((kept.version, &kept.steps, kept.contributions), (Version(1), &record.steps, 2));
    assert_eq!(known(&kept), [("a", 1, None), ("b", 1, None)]);
    let lives = ["a", "b", "c"].map(|name| again.join(name).unwrap().1);
    assert_eq!(lives, [Incarnation(2), Incarnation(2), Incarnation(1)]);
    assert_eq!(again.core.member(LearnerId(1), Now::ZERO).unwrap().step, Step(0));
}

#[test]
fn a_record_of_another_job_is_refused() {
    let (bench, _) = job("1", &["a"]);
    let record = bench.core.record();
    let (mut again, _) = job("1", &[]);
    for wrong in [
        JobRecord { steps: TensorSteps::uniform(99, 1), ..record.clone() },
        JobRecord {
            learners: vec![LearnerRecord { name: "a/b".into(), incarnation: Incarnation(1), step: None }],
            ..record.clone()
        },
    ] {
        again.core.restore(wrong).unwrap_err();
        assert_eq!(again.core.record().learners, []);
    }
    again.core.restore(record).unwrap();
}
