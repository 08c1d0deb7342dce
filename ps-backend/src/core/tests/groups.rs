//! Promises of jobs whose settings have rules for single tensors. The simulation has two: `head` and `body`.

use libmodelio::vocabulary::groups::Groups;
use libmodelio::vocabulary::groups::Steps;
use libmodelio::vocabulary::groups::TensorReducers;
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::sim::{Id, Sim, blocks, early_job, everything, job, ok, open};

/// The steps of the running plan, and the number of each tensor's.
fn planned(sim: &Sim) -> ([Steps; 2], [u64; 2]) {
    let Work::Reduce { step, tensors, groups, .. } = &sim.running.as_ref().expect("a plan").work else {
        panic!("new weights")
    };
    let steps = groups.steps(step);
    let groups = groups.runs().iter().flat_map(|&(count, group)| std::iter::repeat_n(group, count as usize));
    let mut all = groups.map(|group| Steps::from(steps.of_group(group).clone()));
    let mut next = || all.next().unwrap_or_else(|| Steps::from(steps.model().clone()));
    ([next(), next()], [0, 1].map(|tensor| tensors.of(tensor)))
}

/// Makes a version, and returns the reducer of each tensor and the number of its step.
fn version(sim: &mut Sim, id: Id) -> [(Reducer, u64); 2] {
    everything(sim, id, true);
    let (steps, numbers) = planned(sim);
    sim.reduce_done(true);
    [0, 1].map(|tensor| (steps[tensor].model().reducer, numbers[tensor]))
}

#[test]
fn a_group_has_its_own_reducer_decay_and_rate() {
    let (mut sim, ids) = job("1", &["a"]);
    for (name, value) in [
        ("reducer", "adamw"),
        ("learning_rate", "0.003"),
        ("weight_decay", "0.5"),
        ("tensors", "h* learning_rate_scale=0.1 weight_decay=0\nbody reducer=momentum"),
        ("warmup", "3"),
    ] {
        sim.set(name, value);
    }
    let rates = [[0.0, 0.0], [0.0001, 0.001], [0.0002, 0.002], [0.0003, 0.003]];
    for expected in rates {
        everything(&mut sim, ids[0], true);
        let ([head, body], _) = planned(&sim);
        let of = |steps: &Steps| steps.model().hyper.clone();
        assert_eq!([of(&head), of(&body)].map(|hyper| hyper.learning_rate), expected, "after the schedule");
        assert_eq!([of(&head), of(&body)].map(|hyper| hyper.weight_decay), [0.0, 0.5]);
        assert_eq!([head, body].map(|of| of.model().reducer), [Reducer::AdamW, Reducer::Momentum]);
        sim.reduce_done(true);
    }
}

#[test]
fn a_tensor_whose_reducer_changes_begins_anew_alone() {
    use Reducer::{Adam, Lion, Momentum, Sgd};
    let (mut sim, ids) = job("1", &["a"]);
    sim.set("reducer", "adam");
    assert_eq!([(); 2].map(|()| version(&mut sim, ids[0])[1]), [(Adam, 1), (Adam, 2)]);
    sim.set("tensors", "body reducer=momentum");
    assert_eq!(version(&mut sim, ids[0]), [(Adam, 3), (Momentum, 1)]);
    // Neither another decay nor a rule that says what is so already changes the state.
    sim.set("tensors", "body reducer=momentum weight_decay=0.5\nhead reducer=adam");
    assert_eq!(version(&mut sim, ids[0]), [(Adam, 4), (Momentum, 2)]);
    // The model's own reducer is that of tensors without another.
    sim.set("tensors", "body reducer=momentum");
    sim.set("reducer", "lion");
    assert_eq!(version(&mut sim, ids[0]), [(Lion, 1), (Momentum, 3)]);
    sim.set("reducer", "momentum");
    sim.set("tensors", "");
    assert_eq!(version(&mut sim, ids[0]), [(Momentum, 1), (Momentum, 4)]);
    sim.set("tensors", "head reducer=sgd");
    assert_eq!(version(&mut sim, ids[0]), [(Sgd, 1), (Momentum, 5)]);
}

/// The factors of both tensors in the running plan.
fn factors(sim: &Sim) -> [Option<f64>; 2] {
    let Work::Reduce { factors, .. } = &sim.running.as_ref().expect("a plan").work else { panic!() };
    [0, 1].map(|tensor| factors.of(tensor))
}

#[test]
fn an_averaged_tensor_is_divided_by_the_contributions_that_bring_it() {
    let (mut sim, ids) = job("3", &["a", "b", "c"]);
    sim.set("tensors", "head reducer=average");
    let brings = [[0, 1, 2, 3].as_slice(), &[2, 3], &[0, 1]];
    // All bring all; then one brings no values, and then two.
    for (of, expected) in
        [([0, 0, 0], None), ([0, 1, 0], Some(0.5)), ([1, 1, 2], Some(1.0)), ([1, 1, 1], None)]
    {
        for (id, of) in ids.iter().zip(of) {
            let (step, uid) = open(&mut sim, *id);
            sim.commit(id.0, step, uid, blocks(brings[of].iter().copied()), true, 1_000);
        }
        assert_eq!(factors(&sim), [expected, None], "{of:?}");
        let (_, numbers) = planned(&sim);
        assert_eq!(numbers[0] == 0, of == [1; 3], "nobody brings it");
        sim.reduce_done(true);
    }
}

#[test]
fn the_averaged_tensors_stay_while_contributions_to_the_version_are_in() {
    let (mut sim, ids) = job("2", &["a", "b"]);
    sim.set("tensors", "head reducer=average");
    let averaged = sim.averaged();
    everything(&mut sim, ids[0], true);
    for rules in ["", "body reducer=average", "* reducer=average", "head frozen"] {
        sim.set("tensors", rules);
        assert_eq!(sim.averaged(), averaged, "{rules:?}");
    }
    // Rules that average the same tensors can be set.
    sim.set("tensors", "head reducer=average\nbody weight_decay=0");
    assert_eq!(sim.core.controls().tensors.to_string().lines().count(), 2);
    everything(&mut sim, ids[1], true);
    sim.reduce_done(true);
    sim.set("tensors", "");
    assert_ne!(sim.averaged(), averaged);
}

#[test]
fn a_contribution_with_values_of_other_tensors_is_refused() {
    let (mut sim, ids) = job("1", &["a"]);
    let (step, uid) = open(&mut sim, ids[0]);
    let before = sim.averaged();
    sim.set("tensors", "head reducer=average");
    let now = sim.averaged();
    let ticket = sim.commit_begun_with(before, ids[0].0, step, uid);
    assert!(matches!(&sim.replies[&ticket], Err(ShardError::NotAllowed(why)) if why.contains("averaged")));
    let ticket = sim.commit_begun_with(now, ids[0].0, step, uid);
    assert!(!sim.replies.contains_key(&ticket) || ok(&sim, ticket));
}

#[test]
fn a_plan_that_has_begun_early_learns_who_brings_values() {
    let (sim, ids) = job("2", &["a", "b"]);
    let mut sim = sim.on_a_network();
    sim.set("tensors", "head reducer=average");
    let opened = [0, 1].map(|of| open(&mut sim, ids[of]));
    assert!(sim.comes(ids[0].0, opened[0].1, 2));
    for ((step, uid), (id, of)) in opened.into_iter().zip(ids.iter().zip([0..4, 2..4])) {
        sim.comes(id.0, uid, 2);
        sim.commit(id.0, step, uid, blocks(of), true, 1_000);
    }
    assert_eq!(factors(&sim), [Some(1.0), None]);
    sim.reduce_done(true);
}

#[test]
fn rules_are_fixed_once_a_plan_has_begun() {
    let (mut sim, ids) = early_job("1", &["a"]);
    sim.set("tensors", "body weight_decay=0.5");
    let (step, a) = open(&mut sim, ids[0]);
    assert!(sim.comes(ids[0].0, a, 0));
    sim.set("tensors", "body reducer=adam");
    sim.commit(ids[0].0, step, a, blocks(0..4), true, 1_000);
    let ([_, body], numbers) = planned(&sim);
    assert_eq!((body.model().reducer, body.model().hyper.weight_decay, numbers), (Reducer::Sgd, 0.5, [1, 1]));
    sim.reduce_done(true);
    assert_eq!(version(&mut sim, ids[0]), [(Reducer::Sgd, 2), (Reducer::Adam, 1)]);
}

#[test]
fn a_record_has_the_reducer_of_each_tensor() {
    let (mut sim, ids) = job("1", &["a"]);
    sim.set("reducer", "momentum");
    sim.set("tensors", "body reducer=adam");
    version(&mut sim, ids[0]);
    let record = sim.core.record();
    assert_eq!((record.version, record.optimizer), (Version(1), Reducer::Adam), "which has the most state");
    assert_eq!([0, 1].map(|tensor| record.reducer_of(tensor)), [Reducer::Momentum, Reducer::Adam]);
    let text = serde_json::to_string(&record).unwrap();
    assert_eq!(serde_json::from_str::<JobRecord>(&text).unwrap(), record);
    for (rules, expected) in [
        ("body reducer=adam", [(Reducer::Momentum, 2), (Reducer::Adam, 2)]),
        ("body reducer=lion", [(Reducer::Momentum, 2), (Reducer::Lion, 1)]),
        ("", [(Reducer::Momentum, 2), (Reducer::Momentum, 1)]),
    ] {
        let (mut again, _) = job("1", &[]);
        again.set("reducer", "momentum");
        again.set("tensors", rules);
        again.core.restore(record.clone()).unwrap();
        let id = again.join("a").unwrap();
        let ([head, body], numbers) = {
            everything(&mut again, id, true);
            planned(&again)
        };
        let got = [(head.model().reducer, numbers[0]), (body.model().reducer, numbers[1])];
        assert_eq!(got, expected, "{rules}");
    }
    // A record without them is of one reducer.
    sim.set("tensors", "");
    version(&mut sim, ids[0]);
    let text = serde_json::to_string(&sim.core.record()).unwrap();
    assert!(!text.contains("reducers"), "{text}");
    let wrong = JobRecord {
        reducers: Some(TensorReducers::new(3, Reducer::Sgd, &Groups::default())),
        ..sim.core.record()
    };
    job("1", &[]).0.core.restore(wrong).unwrap_err();
}
