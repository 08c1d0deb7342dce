//! Schedules: which learning rate each version of a job is made with.

use libmodelio::vocabulary::ids::Version;

use super::super::*;
use super::sim::{Id, Sim, everything, job};

fn rate(sim: &Sim) -> f32 {
    match &sim.running.as_ref().expect("a plan").work {
        Work::Reduce { step, .. } => step.hyper.learning_rate,
        _ => panic!("new weights"),
    }
}

/// Makes versions, and returns the rate of each.
fn rates(sim: &mut Sim, id: Id, versions: usize) -> Vec<f32> {
    let mut one = || {
        everything(sim, id, true);
        let rate = rate(sim);
        sim.reduce_done(true);
        rate
    };
    (0..versions).map(|_| one()).collect()
}

fn schedule(sim: &mut Sim) {
    for (name, value) in [("learning_rate", "0.5"), ("warmup", "2"), ("schedule", "linear(6)")] {
        sim.set(name, value);
    }
}

const RATES: [f32; 7] = [0.0, 0.25, 0.5, 0.375, 0.25, 0.125, 0.0];

#[test]
fn a_schedule_begins_when_it_is_set() {
    let (mut sim, ids) = job("1", &["a"]);
    assert_eq!(rates(&mut sim, ids[0], 3), [0.001; 3]);
    schedule(&mut sim);
    assert_eq!(sim.core.controls().schedule_start, Version(3));
    assert_eq!(rates(&mut sim, ids[0], 7), RATES);
    // It is at its end. Another one begins anew, and the same one may be told to.
    sim.set("schedule", "linear(4)");
    assert_eq!(rates(&mut sim, ids[0], 4), [0.0, 0.25, 0.5, 0.25]);
    sim.set("schedule_start", "14");
    assert_eq!(rates(&mut sim, ids[0], 2), [0.0, 0.25]);
    sim.set("schedule", "constant");
    sim.set("warmup", "0");
    assert_eq!(rates(&mut sim, ids[0], 1), [0.5]);
}

#[test]
fn a_version_is_made_with_the_rate_that_its_plan_began_with() {
    let (mut sim, ids) = job("1", &["a"]);
    schedule(&mut sim);
    rates(&mut sim, ids[0], 2);
    everything(&mut sim, ids[0], true);
    assert_eq!(rate(&sim), 0.5);
    sim.set("learning_rate", "0.25");
    assert_eq!(rate(&sim), 0.5);
    sim.reduce_done(true);
    assert_eq!(rates(&mut sim, ids[0], 2), [0.1875, 0.125]);
}

#[test]
fn a_job_that_goes_on_from_a_record_goes_on_in_its_schedule() {
    let (mut sim, ids) = job("1", &["a"]);
    rates(&mut sim, ids[0], 2);
    schedule(&mut sim);
    assert_eq!(rates(&mut sim, ids[0], 3), RATES[..3]);
    let (record, controls) = (sim.core.record(), sim.core.controls().clone());
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
    let (mut sim, ids) = job("1", &["a"]);
    schedule(&mut sim);
    assert_eq!(rates(&mut sim, ids[0], 2), RATES[..2]);
    sim.set("reducer", "assign");
    rates(&mut sim, ids[0], 1);
    sim.set("reducer", "sgd");
    assert_eq!(rates(&mut sim, ids[0], 2), RATES[3..5]);
}
