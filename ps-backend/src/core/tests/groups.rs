//! Promises of jobs whose settings have rules for single tensors. The bench has two: `head` and `body`.

use libmodelio::vocabulary::groups::Groups;
use libmodelio::vocabulary::groups::Steps;
use libmodelio::vocabulary::groups::TensorReducers;
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::reducer::Reducer;
use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::bench::{Bench, Id, blocks, completes, early_job, everything, job, ok, open};

/// The steps of the running plan, and the number of each tensor's.
fn planned(bench: &Bench) -> ([Steps; 2], [u64; 2]) {
    let Work::Reduce { step, tensors, groups, .. } = &bench.running.as_ref().expect("a plan").work else {
        panic!("new weights")
    };
    let steps = groups.steps(step);
    let groups = groups.runs().iter().flat_map(|&(count, group)| std::iter::repeat_n(group, count as usize));
    let mut all = groups.map(|group| Steps::from(steps.of_group(group).clone()));
    let mut next = || all.next().unwrap_or_else(|| Steps::from(steps.model().clone()));
    ([next(), next()], [0, 1].map(|tensor| tensors.of(tensor)))
}

/// Makes a version, and returns the reducer of each tensor and the number of its step.
fn version(bench: &mut Bench, id: Id) -> [(Reducer, u64); 2] {
    everything(bench, id, true);
    let (steps, numbers) = planned(bench);
    bench.reduce_done(true);
    [0, 1].map(|tensor| (steps[tensor].model().reducer, numbers[tensor]))
}

#[test]
fn a_group_has_its_own_reducer_decay_and_rate() {
    let (mut bench, ids) = job("1", &["a"]);
    for (name, value) in [
        ("reducer", "adamw"),
        ("learning_rate", "0.003"),
        ("weight_decay", "0.5"),
        ("tensors", "h* learning_rate_scale=0.1 weight_decay=0\nbody reducer=momentum"),
        ("warmup", "3"),
    ] {
        bench.set(name, value);
    }
    let rates = [[0.0, 0.0], [0.0001, 0.001], [0.0002, 0.002], [0.0003, 0.003]];
    for expected in rates {
        everything(&mut bench, ids[0], true);
        let ([head, body], _) = planned(&bench);
        let of = |steps: &Steps| steps.model().hyper.clone();
        assert_eq!([of(&head), of(&body)].map(|hyper| hyper.learning_rate), expected, "after the schedule");
        assert_eq!([of(&head), of(&body)].map(|hyper| hyper.weight_decay), [0.0, 0.5]);
        assert_eq!([head, body].map(|of| of.model().reducer), [Reducer::AdamW, Reducer::Momentum]);
        bench.reduce_done(true);
    }
}

#[test]
fn a_tensor_whose_reducer_changes_begins_anew_alone() {
    use Reducer::{Adam, Lion, Momentum, Sgd};
    let (mut bench, ids) = job("1", &["a"]);
    bench.set("reducer", "adam");
    assert_eq!([(); 2].map(|()| version(&mut bench, ids[0])[1]), [(Adam, 1), (Adam, 2)]);
    bench.set("tensors", "body reducer=momentum");
    assert_eq!(version(&mut bench, ids[0]), [(Adam, 3), (Momentum, 1)]);
    // Neither another decay nor a rule that says what is so already changes the state.
    bench.set("tensors", "body reducer=momentum weight_decay=0.5\nhead reducer=adam");
    assert_eq!(version(&mut bench, ids[0]), [(Adam, 4), (Momentum, 2)]);
    // The model's own reducer is that of tensors without another.
    bench.set("tensors", "body reducer=momentum");
    bench.set("reducer", "lion");
    assert_eq!(version(&mut bench, ids[0]), [(Lion, 1), (Momentum, 3)]);
    bench.set("reducer", "momentum");
    bench.set("tensors", "");
    assert_eq!(version(&mut bench, ids[0]), [(Momentum, 1), (Momentum, 4)]);
    bench.set("tensors", "head reducer=sgd");
    assert_eq!(version(&mut bench, ids[0]), [(Sgd, 1), (Momentum, 5)]);
}

/// The factors of both tensors in the running plan.
fn factors(bench: &Bench) -> [Option<f64>; 2] {
    let Work::Reduce { factors, .. } = &bench.running.as_ref().expect("a plan").work else { panic!() };
    [0, 1].map(|tensor| factors.of(tensor))
}

#[test]
fn an_averaged_tensor_is_divided_by_the_contributions_that_bring_it() {
    let (mut bench, ids) = job("3", &["a", "b", "c"]);
    bench.set("tensors", "head reducer=average");
    let brings = [[0, 1, 2, 3].as_slice(), &[2, 3], &[0, 1]];
    // All bring all; then one brings no values, and then two.
    for (of, expected) in
        [([0, 0, 0], None), ([0, 1, 0], Some(0.5)), ([1, 1, 2], Some(1.0)), ([1, 1, 1], None)]
    {
        for (id, of) in ids.iter().zip(of) {
            let (step, uid) = open(&mut bench, *id);
            bench.commit(id.0, step, uid, blocks(brings[of].iter().copied()), true, 1_000);
        }
        assert_eq!(factors(&bench), [expected, None], "{of:?}");
        let (_, numbers) = planned(&bench);
        assert_eq!(numbers[0] == 0, of == [1; 3], "nobody brings it");
        bench.reduce_done(true);
    }
}

#[test]
fn the_averaged_tensors_stay_while_contributions_to_the_version_are_in() {
    let (mut bench, ids) = job("2", &["a", "b"]);
    bench.set("tensors", "head reducer=average");
    let averaged = bench.averaged();
    everything(&mut bench, ids[0], true);
    for rules in ["", "body reducer=average", "* reducer=average", "head frozen"] {
        bench.set("tensors", rules);
        assert_eq!(bench.averaged(), averaged, "{rules:?}");
    }
    // Rules that average the same tensors can be set.
    bench.set("tensors", "head reducer=average\nbody weight_decay=0");
    assert_eq!(bench.core.controls().tensors.to_string().lines().count(), 2);
    completes(&mut bench, ids[1]);
    bench.set("tensors", "");
    assert_ne!(bench.averaged(), averaged);
}

#[test]
fn a_contribution_with_values_of_other_tensors_is_refused() {
    let (mut bench, ids) = job("1", &["a"]);
    let (step, uid) = open(&mut bench, ids[0]);
    let before = bench.averaged();
    bench.set("tensors", "head reducer=average");
    let now = bench.averaged();
    let ticket = bench.commit_begun_with(before, ids[0].0, step, uid);
    assert!(matches!(&bench.replies[&ticket], Err(ShardError::NotAllowed(why)) if why.contains("averaged")));
    let ticket = bench.commit_begun_with(now, ids[0].0, step, uid);
    assert!(!bench.replies.contains_key(&ticket) || ok(&bench, ticket));
}

#[test]
fn a_plan_that_has_begun_early_learns_who_brings_values() {
    let (bench, ids) = job("2", &["a", "b"]);
    let mut bench = bench.on_a_network();
    bench.set("tensors", "head reducer=average");
    let opened = [0, 1].map(|of| open(&mut bench, ids[of]));
    assert!(bench.comes(ids[0].0, opened[0].1, 2));
    for ((step, uid), (id, of)) in opened.into_iter().zip(ids.iter().zip([0..4, 2..4])) {
        bench.comes(id.0, uid, 2);
        bench.commit(id.0, step, uid, blocks(of), true, 1_000);
    }
    assert_eq!(factors(&bench), [Some(1.0), None]);
    bench.reduce_done(true);
}

#[test]
fn rules_are_fixed_once_a_plan_has_begun() {
    let (mut bench, ids) = early_job("1", &["a"]);
    bench.set("tensors", "body weight_decay=0.5");
    let (step, a) = open(&mut bench, ids[0]);
    assert!(bench.comes(ids[0].0, a, 0));
    bench.set("tensors", "body reducer=adam");
    bench.commit(ids[0].0, step, a, blocks(0..4), true, 1_000);
    let ([_, body], numbers) = planned(&bench);
    assert_eq!((body.model().reducer, body.model().hyper.weight_decay, numbers), (Reducer::Sgd, 0.5, [1, 1]));
    bench.reduce_done(true);
    assert_eq!(version(&mut bench, ids[0]), [(Reducer::Sgd, 2), (Reducer::Adam, 1)]);
}

#[test]
fn a_record_has_the_reducer_of_each_tensor() {
    let (mut bench, ids) = job("1", &["a"]);
    bench.set("reducer", "momentum");
    bench.set("tensors", "body reducer=adam");
    version(&mut bench, ids[0]);
    let record = bench.core.record();
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
    bench.set("tensors", "");
    version(&mut bench, ids[0]);
    let text = serde_json::to_string(&bench.core.record()).unwrap();
    assert!(!text.contains("reducers"), "{text}");
    let wrong = JobRecord {
        reducers: Some(TensorReducers::new(3, Reducer::Sgd, &Groups::default())),
        ..bench.core.record()
    };
    job("1", &[]).0.core.restore(wrong).unwrap_err();
}
