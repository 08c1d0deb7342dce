//! Promises of jobs in which the order of learners decides every sum.

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::shard_error::ShardError;

use super::sim::{Id, Sim, Uid, blocks, everything, ok, open, uid};

fn job(names: &[&str]) -> (Sim, Vec<Id>) {
    let learners = names.len().to_string();
    let mut sim = Sim::new(&[("deterministic", "true"), ("learners", &learners)]).in_process();
    let ids = names.iter().map(|name| sim.join(name).unwrap()).collect();
    (sim, ids)
}

fn order(sim: &Sim) -> Vec<Uid> {
    let Some(plan) = &sim.running else { return Vec::new() };
    assert!(sim.accumulator.is_empty(), "the accumulator comes first, whoever is in it");
    plan.inputs.iter().map(|input| uid(input)).collect()
}

#[test]
fn mapped_contributions_wait_for_their_turn() {
    for arrivals in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]] {
        let (mut sim, ids) = job(&["a", "b", "c"]);
        let mut uids = [(0, 0); 3];
        for i in arrivals {
            uids[i] = everything(&mut sim, ids[i], i == 1);
            sim.tick(100);
            assert!(sim.accumulations.is_empty());
        }
        assert_eq!(order(&sim), uids.map(|(uid, _)| uid));
        assert!(sim.is_waiting(uids[0].1), "its fsync returns with the version");
        sim.reduce_done(true);
        assert!(uids.iter().all(|&(_, ticket)| ok(&sim, ticket)));
    }
}

#[test]
fn nothing_is_reduced_early_beside_what_is_mapped() {
    let (mut sim, ids) = job(&["a", "b"]);
    everything(&mut sim, ids[1], false);
    let (_, uid) = open(&mut sim, ids[0]);
    assert!(!sim.comes(ids[0].0, uid, 0));
}

#[test]
fn on_a_network_no_block_comes_before_the_commits_and_nothing_is_accumulated() {
    let mut sim = Sim::new(&[("deterministic", "true"), ("learners", "2")]).on_a_network();
    let ids = ["a", "b"].map(|name| sim.join(name).unwrap());
    let written = ids.map(|id| open(&mut sim, id));
    assert!(!sim.comes(ids[1].0, written[1].1, 0));
    let [first, second] = [1, 0].map(|at| {
        let (step, uid) = written[at];
        sim.commit(ids[at].0, step, uid, blocks([0]), false, 60_000)
    });
    sim.tick(20_000);
    sim.finish_work();
    assert!(ok(&sim, first) && ok(&sim, second));
}

#[test]
fn the_wait_ends_at_the_deadline_and_can_be_taken_up_again() {
    let (mut sim, ids) = job(&["a", "b"]);
    let (_, ticket) = everything(&mut sim, ids[0], false);
    sim.tick(1_000);
    assert!(matches!(sim.replies[&ticket], Err(ShardError::TimedOut(_))));
    assert_eq!(sim.core.committed(), 0);
    sim.abort(ids[0].0);
    let (a, _) = everything(&mut sim, ids[0], false);
    let (b, _) = everything(&mut sim, ids[1], true);
    assert_eq!(order(&sim), [a, b]);
    sim.reduce_done(true);
    assert_eq!(sim.versions_of(&[a, b]), [Some(Version(1)); 2]);
}

#[test]
fn without_it_what_waits_is_accumulated_at_once() {
    let (mut sim, ids) = job(&["a", "b"]);
    let (_, ticket) = everything(&mut sim, ids[1], false);
    assert!(sim.accumulations.is_empty());
    sim.set("deterministic", "false");
    sim.accumulate_done(true);
    assert!(ok(&sim, ticket));
}
