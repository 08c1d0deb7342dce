//! Schedules: which learning rate each version of a job is made with.

use libmodelio::vocabulary::ids::Version;

use super::super::*;
use super::bench::{Bench, Id, everything, job};

fn rate(bench: &Bench) -> f32 {
    match &bench.running.as_ref().expect("a plan").work {
        Work::Reduce { step, .. } => step.hyper.learning_rate,
        _ => panic!("new weights"),
    }
}

/// Makes versions, and returns the rate of each.
fn rates(bench: &mut Bench, id: Id, versions: usize) -> Vec<f32> {
    let mut one = || {
        everything(bench, id, true);
        let rate = rate(bench);
        bench.reduce_done(true);
        rate
    };
    (0..versions).map(|_| one()).collect()
}

fn schedule(bench: &mut Bench) {
    for (name, value) in [("learning_rate", "0.5"), ("warmup", "2"), ("schedule", "linear(6)")] {
        bench.set(name, value);
    }
}

const RATES: [f32; 7] = [0.0, 0.25, 0.5, 0.375, 0.25, 0.125, 0.0];

#[test]
fn a_schedule_begins_when_it_is_set() {
    let (mut bench, ids) = job("1", &["a"]);
    assert_eq!(rates(&mut bench, ids[0], 3), [0.001; 3]);
    schedule(&mut bench);
    assert_eq!(bench.core.controls().schedule_start, Version(3));
    assert_eq!(rates(&mut bench, ids[0], 7), RATES);
    // It is at its end. Another one begins anew, and the same one may be told to.
    bench.set("schedule", "linear(4)");
    assert_eq!(rates(&mut bench, ids[0], 4), [0.0, 0.25, 0.5, 0.25]);
    bench.set("schedule_start", "14");
    assert_eq!(rates(&mut bench, ids[0], 2), [0.0, 0.25]);
    bench.set("schedule", "constant");
    bench.set("warmup", "0");
    assert_eq!(rates(&mut bench, ids[0], 1), [0.5]);
}

#[test]
fn a_version_is_made_with_the_rate_that_its_plan_began_with() {
    let (mut bench, ids) = job("1", &["a"]);
    schedule(&mut bench);
    rates(&mut bench, ids[0], 2);
    everything(&mut bench, ids[0], true);
    assert_eq!(rate(&bench), 0.5);
    bench.set("learning_rate", "0.25");
    assert_eq!(rate(&bench), 0.5);
    bench.reduce_done(true);
    assert_eq!(rates(&mut bench, ids[0], 2), [0.1875, 0.125]);
}

#[test]
fn a_job_that_goes_on_from_a_record_goes_on_in_its_schedule() {
    let (mut bench, ids) = job("1", &["a"]);
    rates(&mut bench, ids[0], 2);
    schedule(&mut bench);
    assert_eq!(rates(&mut bench, ids[0], 3), RATES[..3]);
    let (record, controls) = (bench.core.record(), bench.core.controls().clone());
    let (mut again, _) = job("1", &[]);
    let settings = ["learning_rate", "warmup", "schedule", "schedule_start"];
    settings.into_iter().for_each(|name| again.set(name, &controls.get(name).unwrap()));
    again.core.restore(record).unwrap();
    let id = again.join("a").unwrap();
    everything(&mut again, id, true);
    assert_eq!(rate(&again), RATES[3]);
}

#[test]
fn new_weights_count_as_a_version() {
    let (mut bench, ids) = job("1", &["a"]);
    schedule(&mut bench);
    assert_eq!(rates(&mut bench, ids[0], 2), RATES[..2]);
    bench.set("reducer", "assign");
    rates(&mut bench, ids[0], 1);
    bench.set("reducer", "sgd");
    assert_eq!(rates(&mut bench, ids[0], 2), RATES[3..5]);
}
