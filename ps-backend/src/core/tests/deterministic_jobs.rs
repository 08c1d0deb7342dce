//! Promises of jobs in which the order of learners decides every sum.

use libmodelio::vocabulary::shard_error::ShardError;

use super::bench::{Bench, Id, Uid, blocks, everything, formed, ok, open, uid};

fn job(names: &[&str]) -> (Bench, Vec<Id>) {
    let (bench, ids) = formed(&[("deterministic", "true")], names);
    (bench.in_process(), ids)
}

fn order(bench: &Bench) -> Vec<Uid> {
    let Some(plan) = &bench.running else { return Vec::new() };
    assert!(bench.accumulator.is_empty(), "the accumulator comes first, whoever is in it");
    plan.inputs.iter().map(|input| uid(input)).collect()
}

#[test]
fn mapped_contributions_wait_for_their_turn() {
    for arrivals in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]] {
        let (mut bench, ids) = job(&["a", "b", "c"]);
        let mut uids = [(0, 0); 3];
        for i in arrivals {
            uids[i] = everything(&mut bench, ids[i], i == 1);
            bench.tick(100);
            assert!(bench.accumulations.is_empty());
        }
        assert_eq!(order(&bench), uids.map(|(uid, _)| uid));
        assert!(bench.is_waiting(uids[0].1), "its fsync returns with the version");
        bench.reduce_done(true);
        assert!(uids.iter().all(|&(_, ticket)| ok(&bench, ticket)));
    }
}

#[test]
fn nothing_is_reduced_early_beside_what_is_mapped() {
    let (mut bench, ids) = job(&["a", "b"]);
    everything(&mut bench, ids[1], false);
    let (_, uid) = open(&mut bench, ids[0]);
    assert!(!bench.comes(ids[0].0, uid, 0));
}

#[test]
fn on_a_network_no_block_comes_before_the_commits_and_nothing_is_accumulated() {
    let mut bench = Bench::new(&[("deterministic", "true"), ("learners", "2")]).on_a_network();
    let ids = ["a", "b"].map(|name| bench.join(name).unwrap());
    let written = ids.map(|id| open(&mut bench, id));
    assert!(!bench.comes(ids[1].0, written[1].1, 0));
    let [first, second] = [1, 0].map(|at| {
        let (step, uid) = written[at];
        bench.commit(ids[at].0, step, uid, blocks([0]), false, 60_000)
    });
    bench.tick(20_000);
    bench.finish_work();
    assert!(ok(&bench, first) && ok(&bench, second));
}

#[test]
fn the_wait_ends_at_the_deadline_and_can_be_taken_up_again() {
    let (mut bench, ids) = job(&["a", "b"]);
    let (_, ticket) = everything(&mut bench, ids[0], false);
    bench.tick(1_000);
    assert!(matches!(bench.replies[&ticket], Err(ShardError::TimedOut(_))));
    assert_eq!(bench.core.committed(), 0);
    bench.abort(ids[0].0);
    let (a, _) = everything(&mut bench, ids[0], false);
    let (b, _) = everything(&mut bench, ids[1], true);
    assert_eq!(order(&bench), [a, b]);
    bench.makes(1, &[a, b]);
}

#[test]
fn without_it_what_waits_is_accumulated_at_once() {
    let (mut bench, ids) = job(&["a", "b"]);
    let (_, ticket) = everything(&mut bench, ids[1], false);
    assert!(bench.accumulations.is_empty());
    bench.set("deterministic", "false");
    bench.accumulate_done(true);
    assert!(ok(&bench, ticket));
}
