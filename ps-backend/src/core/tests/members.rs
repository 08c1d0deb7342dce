//! Promises about who is in the job: forming, joining, leaving, leases, too few.

use libmodelio::vocabulary::ids::{Incarnation, Step, Version};
use libmodelio::vocabulary::members::{Attached, LeaveReason, LifeSign};
use libmodelio::vocabulary::phase::JobPhase;
use libmodelio::vocabulary::shard_error::ShardError;

use super::super::*;
use super::bench::{
    Bench, Uid, blocks, completes, early_job, everything, formed, job, ok, open, patient, payload,
};

#[test]
fn nothing_completes_before_the_job_is_formed() {
    let (mut bench, ids) = job("2", &["a"]);
    assert_eq!(bench.core.state(), JobPhase::Forming);
    let (a, first) = everything(&mut bench, ids[0], true);
    assert!(ok(&bench, first) && bench.running.is_none());
    let b = bench.join("b").unwrap();
    assert!(bench.running.is_none(), "b takes part");
    let (b, _) = everything(&mut bench, b, true);
    bench.makes(1, &[a, b]);
}

#[test]
fn lowering_learners_in_mid_step_forms_the_job() {
    let (mut bench, ids) = job("3", &["a", "b"]);
    everything(&mut bench, ids[0], true);
    everything(&mut bench, ids[1], true);
    assert!(bench.running.is_none());
    bench.set("learners", "2");
    assert!(bench.running.is_some());
}

#[test]
fn raising_learners_counts_when_all_have_left() {
    let (mut bench, ids) = job("2", &["a", "b"]);
    bench.leave(ids[1].0);
    bench.set("learning_rate", "0.5");
    assert_eq!(bench.core.state(), JobPhase::Running);
    bench.set("learners", "3");
    assert_eq!(bench.core.state(), JobPhase::Running);
    let (a, _) = completes(&mut bench, ids[0]);
    assert_eq!(bench.versions_of(&[a]), [Some(Version(1))], "a does not wait for others");
    bench.leave(ids[0].0);
    let next = [bench.join("c").unwrap(), bench.join("d").unwrap()];
    assert_eq!(bench.core.state(), JobPhase::Forming);
    everything(&mut bench, next[0], true);
    everything(&mut bench, next[1], true);
    assert!(bench.running.is_none(), "the third is not there");
    bench.join("e").unwrap();
    assert_eq!(bench.core.state(), JobPhase::Running);
}

#[test]
fn a_learner_that_joins_in_mid_step_takes_part_from_the_next_version() {
    let (mut bench, ids) = job("1", &["a"]);
    let (step, uid) = open(&mut bench, ids[0]);
    let b = bench.join("b").unwrap();
    let (of_b, commit) = everything(&mut bench, b, true);
    assert!(!ok(&bench, commit), "its step is not current");
    bench.commit(ids[0].0, step, uid, blocks([]), true, 1_000);
    bench.reduce_done(true);
    assert!(ok(&bench, commit) && bench.running.is_none(), "the next version needs both");
    everything(&mut bench, ids[0], true);
    bench.makes(2, &[of_b]);
}

#[test]
fn a_learner_that_joined_in_a_dropped_step_need_not_wait() {
    let (mut bench, ids) = job("1", &["a"]);
    open(&mut bench, ids[0]);
    let b = bench.join("b").unwrap();
    bench.leave(ids[0].0);
    let (of_b, _) = everything(&mut bench, b, true);
    bench.makes(1, &[of_b]);
}

#[test]
fn a_learner_that_dies_before_its_commit_leaves_no_trace() {
    let (mut bench, ids) = early_job("2", &["a", "b"]);
    let (b, _) = everything(&mut bench, ids[1], true);
    let (_, a) = open(&mut bench, ids[0]);
    assert!(bench.comes(ids[0].0, a, 0));
    assert!(bench.comes(ids[0].0, a, 1));
    bench.leave(ids[0].0);
    bench.reduce_done(true);
    assert_eq!(bench.versions_of(&[a, b]), [None, Some(Version(1))]);
}

#[test]
fn a_committed_contribution_stays_when_its_learner_leaves() {
    let (mut bench, ids) = job("2", &["a", "b"]);
    let (a, _) = everything(&mut bench, ids[0], true);
    bench.leave(ids[0].0);
    let (b, _) = everything(&mut bench, ids[1], true);
    bench.makes(1, &[a, b]);
}

#[test]
fn committed_contributions_are_published_when_all_have_left() {
    let (mut bench, ids) = job("2", &["a", "b"]);
    let (a, _) = everything(&mut bench, ids[0], false);
    bench.leave(ids[0].0);
    bench.leave(ids[1].0);
    assert!(bench.running.is_none(), "being accumulated");
    bench.accumulate_done(true);
    bench.makes(1, &[a]);
    assert_eq!(bench.core.state(), JobPhase::Forming, "the next ones are a new job");
}

/// A version is being made of the contributions of learners that have all left. They are fewer than `min_learners`.
fn left_while_it_is_made(steady: &[bool]) -> (Bench, Vec<Uid>) {
    let names = &["first", "second", "third"][..=steady.len()];
    let (mut bench, ids) = patient(&[("min_learners", &names.len().to_string())], names, 100);
    let uids = ids.iter().zip(steady).map(|(id, steady)| everything(&mut bench, *id, *steady).0).collect();
    bench.leave(ids[steady.len()].0);
    assert!(bench.running.is_none(), "there are too few learners");
    let joiner = bench.join("joiner").unwrap();
    assert!(bench.running.is_some(), "the version does not wait for the joiner");
    ids[..steady.len()].iter().chain([&joiner]).for_each(|id| bench.leave(id.0));
    assert_eq!(bench.core.state(), JobPhase::Forming);
    (bench, uids)
}

#[test]
fn who_joins_when_all_have_left_takes_no_part_in_the_version_that_is_being_made() {
    let (mut bench, uids) = left_while_it_is_made(&[true]);
    let next = ["a", "b"].map(|name| bench.join(name).unwrap());
    let joined = next.map(|id| bench.core.member(id.0, bench.now).unwrap().joined_at);
    assert_eq!(joined, [Version(1); 2], "they take part in versions after the first");
    bench.reduce_done(true);
    assert_eq!(bench.versions_of(&uids), [Some(Version(1))]);
    let (a, _) = everything(&mut bench, next[0], true);
    assert!(bench.running.is_none(), "b takes part");
    let (b, _) = everything(&mut bench, next[1], true);
    bench.makes(2, &[a, b]);
}

#[test]
fn who_joins_when_all_have_left_takes_part_if_the_version_is_not_made() {
    let (mut bench, uids) = left_while_it_is_made(&[true, false]);
    let a = bench.join("a").unwrap();
    assert!(bench.reduce_refused(), "one of the contributions holds NaN");
    let (of_a, ticket) = everything(&mut bench, a, true);
    assert!(ok(&bench, ticket), "nothing is being made of which it is no part");
    let next = ["b", "c"].map(|name| bench.join(name).unwrap());
    assert!(bench.running.is_none(), "b and c take part");
    next.iter().for_each(|id| _ = everything(&mut bench, *id, true));
    bench.reduce_done(true);
    assert_eq!(bench.versions_of(&[uids[0], of_a]), [Some(Version(1)); 2]);
}

#[test]
fn below_min_learners_everything_is_refused() {
    let mut bench = Bench::new(&[("learners", "2"), ("min_learners", "2")]);
    let a = bench.join("a").unwrap();
    assert!(bench.core.open(a.0, bench.now).is_ok(), "not formed is not stopped");
    let b = bench.join("b").unwrap();
    let (taken, _) = everything(&mut bench, a, true);
    let (ahead, waiting) = everything(&mut bench, a, true);
    bench.leave(b.0);
    let stopped = ShardError::Stopped { active: 1, needed: 2 };
    assert_eq!(bench.core.state(), JobPhase::Stopped);
    assert_eq!(bench.replies[&waiting], Err(stopped.clone()));
    assert_eq!(bench.core.open(a.0, bench.now).unwrap_err(), stopped);
    let refused = bench.commit(a.0, Step(2), ahead, blocks([]), true, 1_000);
    assert_eq!(bench.replies[&refused], Err(stopped));
    // It goes on with a new learner; the step that was under way is not repeated.
    bench.join("c").unwrap();
    bench.makes(1, &[taken]);
}

#[test]
fn when_all_have_left_the_job_forms_anew() {
    let (mut bench, ids) = formed(&[("min_learners", "2")], &["a", "b"]);
    bench.leave(ids[0].0);
    bench.leave(ids[1].0);
    let c = bench.join("a").unwrap();
    assert_eq!((bench.core.state(), c.1), (JobPhase::Forming, Incarnation(2)));
    everything(&mut bench, c, true);
    assert!(bench.running.is_none());
}

#[test]
fn a_silent_learner_leaves_when_nobody_is_attached() {
    let mut bench = Bench::new(&[("lease", "1")]);
    let a = bench.join("a").unwrap();
    bench.join("b").unwrap();
    bench.core.touch(a.0, LifeSign::Process(Attached::Yes), bench.now);
    bench.tick(1_000);
    assert_eq!(bench.left.len(), 1, "a is attached, and nobody waits for it");
    assert_eq!(bench.left[0].1, LeaveReason::LeaseExpired);
}

#[test]
fn a_silent_learner_leaves_when_it_has_been_waited_for() {
    let (mut bench, ids) = formed(&[("patience", "1")], &["a", "b"]);
    bench.attach(&ids);
    bench.tick(900);
    let (a, _) = everything(&mut bench, ids[0], true);
    bench.tick(900);
    assert_eq!(bench.left, [], "silent for long enough, but not waited for that long");
    bench.tick(100);
    assert_eq!(bench.left, [(ids[1].0, LeaveReason::PatienceOver)]);
    bench.reduce_done(true);
    assert_eq!(bench.versions_of(&[a]), [Some(Version(1))], "the job goes on with the rest");
}

#[test]
fn patience_ends_for_a_learner_that_contributes_nothing_and_does_not_say_that_it_works() {
    for busy in [
        "opens and closes",
        "takes back",
        "takes back and goes on",
        "writes on",
        "says so",
        "says so after all",
    ] {
        let (mut bench, ids) = formed(&[("patience", "4")], &["a", "b"]);
        bench.attach(&ids);
        everything(&mut bench, ids[0], true);
        if busy == "writes on" {
            open(&mut bench, ids[1]);
        }
        for _ in 0..10 {
            bench.tick(500);
            if !bench.left.is_empty() {
                break;
            }
            match busy {
                "opens and closes" => bench.core.touch(ids[1].0, LifeSign::Process(Attached::Yes), bench.now),
                "writes on" => bench.core.touch(ids[1].0, LifeSign::Writes, bench.now),
                "says so" => bench.core.touch(ids[1].0, LifeSign::Works, bench.now),
                _ => {
                    bench.abort(ids[1].0);
                    open(&mut bench, ids[1]);
                    bench.core.touch(ids[1].0, LifeSign::Writes, bench.now);
                    match busy {
                        "takes back" => bench.abort(ids[1].0),
                        "says so after all" => bench.core.touch(ids[1].0, LifeSign::Works, bench.now),
                        _ => {}
                    }
                }
            }
        }
        let left = [(ids[1].0, LeaveReason::PatienceOver)];
        assert_eq!(
            bench.left,
            if busy.starts_with("takes") || busy.starts_with("opens") { &left[..] } else { &[] },
            "{busy}"
        );
    }
}

/// Waits for a second. Who waits in vain comes again a moment later.
fn waits_in_vain(bench: &mut Bench, learner: LearnerId) {
    bench.core.gives_numbers(learner, bench.now);
    bench.tick(900);
    bench.core.numbers_are_late(learner, bench.now);
    bench.tick(100);
}

#[test]
fn patience_ends_for_a_learner_whose_numbers_are_waited_for() {
    for consistency in ["sync", "async", "quorum(1)"] {
        let settings = [("patience", "10"), ("consistency", consistency), ("lease", "3")];
        let (mut bench, ids) = formed(&settings, &["a", "b", "c"]);
        bench.attach(&ids[1..]);
        for round in 0..3 {
            for second in 0..9 {
                waits_in_vain(&mut bench, ids[0].0);
                waits_in_vain(&mut bench, ids[2].0);
                let late = bench.core.late(bench.now).map(|(_, late)| late.learners);
                assert_eq!(late, (second >= 2).then(|| vec!["b".to_owned()]), "{consistency}, {second}");
                if round == 1 {
                    // It says that it works.
                    bench.core.touch(ids[1].0, LifeSign::Works, bench.now);
                } else if second == 3 {
                    break;
                }
            }
            for id in [ids[0], ids[2], ids[1]] {
                bench.core.gives_numbers(id.0, bench.now);
            }
            bench.core.numbers_are_reduced(bench.now);
            assert_eq!((bench.core.late(bench.now), &bench.left[..]), (None, &[][..]), "{consistency}");
        }
        // Versions of others end no wait for numbers.
        for _ in 0..4 {
            waits_in_vain(&mut bench, ids[0].0);
            waits_in_vain(&mut bench, ids[2].0);
            if consistency != "sync" {
                everything(&mut bench, ids[2], true);
                bench.reduce_done(true);
            }
        }
        assert_eq!(bench.left, []);
        waits_in_vain(&mut bench, ids[0].0);
        waits_in_vain(&mut bench, ids[2].0);
        assert_eq!(bench.left, [(ids[1].0, LeaveReason::PatienceOver)], "{consistency}");
    }
}

#[test]
fn a_learner_has_a_whole_lease_after_waiting_for_numbers() {
    let (mut bench, ids) = formed(&[("lease", "2"), ("patience", "600")], &["a", "b"]);
    bench.attach(&ids[1..]);
    bench.core.gives_numbers(ids[0].0, bench.now);
    bench.tick(9_000);
    bench.core.gives_numbers(ids[1].0, bench.now);
    bench.core.numbers_are_reduced(bench.now);
    bench.tick(1_999);
    assert_eq!(bench.left, []);
    bench.tick(1);
    assert_eq!(bench.left, [(ids[0].0, LeaveReason::LeaseExpired)]);
}

#[test]
fn who_asks_for_numbers_again_and_again_and_contributes_nothing_is_not_waited_for() {
    let (mut bench, ids) = formed(&[("patience", "4")], &["a", "b"]);
    bench.attach(&ids);
    everything(&mut bench, ids[0], true);
    for _ in 0..4 {
        assert_eq!(bench.left, []);
        waits_in_vain(&mut bench, ids[1].0);
    }
    assert_eq!(bench.left, [(ids[1].0, LeaveReason::PatienceOver)]);
}

#[test]
fn others_wait_for_a_living_process_beyond_the_lease_and_for_nobody_else() {
    let (mut bench, ids) = formed(&[("lease", "1"), ("patience", "600")], &["a", "b", "c"]);
    bench.attach(&ids[..2]);
    let (step, uid) = open(&mut bench, ids[0]);
    bench.commit(ids[0].0, step, uid, blocks([0]), true, 1_000_000);
    bench.tick(999);
    assert_eq!(bench.left, []);
    bench.tick(1);
    assert_eq!(bench.left, [(ids[2].0, LeaveReason::LeaseExpired)], "no process is known to use it");
    bench.tick(598_999);
    assert_eq!(bench.left.len(), 1, "b evaluates");
    bench.tick(1);
    assert_eq!(bench.left[1..], [(ids[1].0, LeaveReason::PatienceOver)]);
}

#[test]
fn without_patience_others_wait_for_ever() {
    let (mut bench, ids) = formed(&[("lease", "1"), ("patience", "0")], &["a", "b"]);
    bench.attach(&ids);
    everything(&mut bench, ids[0], true);
    bench.tick(10_000_000);
    assert_eq!(bench.left, []);
}

#[test]
fn a_learner_whose_last_process_has_exited_leaves_after_linger_when_others_wait_for_it() {
    for consistency in ["sync", "quorum(3)", "ssp(0)"] {
        let (mut bench, ids) = job("3", &["a", "b", "c"]);
        bench.set("consistency", consistency);
        bench.attach(&ids);
        // `a` ends, `b` only hangs.
        bench.core.touch(ids[0].0, LifeSign::Process(Attached::Exited), bench.now);
        bench.tick(10_000);
        assert_eq!(bench.left, [], "{consistency}: nobody waits for it");
        everything(&mut bench, ids[2], true);
        if consistency.starts_with("ssp") {
            // Its first step makes a version, the next one has to wait.
            bench.reduce_done(true);
            let (step, uid) = open(&mut bench, ids[2]);
            bench.commit(ids[2].0, step, uid, blocks([0]), true, 60_000);
        }
        bench.tick(1_900);
        assert_eq!(bench.left, [], "{consistency}: not for that long");
        bench.tick(100);
        assert_eq!(bench.left, [(ids[0].0, LeaveReason::Exited)], "{consistency}");
        bench.tick(20_000);
        assert_eq!(bench.left.len(), 1, "{consistency}: the other one's lease is not over");
    }
}

#[test]
fn a_learner_that_comes_back_within_linger_stays() {
    let (mut bench, ids) = job("2", &["a", "b"]);
    bench.set("linger", "2");
    for step in 1..=5 {
        let (b, _) = everything(&mut bench, ids[1], true);
        // Each step of `a` is a process of its own, which comes after a while.
        bench.tick(1_900);
        bench.core.touch(ids[0].0, LifeSign::Process(Attached::Yes), bench.now);
        everything(&mut bench, ids[0], true);
        bench.core.touch(ids[0].0, LifeSign::Process(Attached::Exited), bench.now);
        bench.makes(step, &[b]);
        // Nobody waits for it meanwhile.
        bench.tick(3_000);
    }
    assert_eq!(bench.left, []);
    // Its request shows that it is used, though nobody says so.
    everything(&mut bench, ids[1], true);
    bench.tick(1_900);
    open(&mut bench, ids[0]);
    bench.tick(10_000);
    assert_eq!(bench.left, []);
}

#[test]
fn a_learner_that_waits_for_others_does_not_linger() {
    let (mut bench, ids) = job("3", &["a", "b", "c"]);
    bench.set("linger", "0");
    everything(&mut bench, ids[0], true);
    // Its open contribution is committed at its end, and waits.
    let (step, uid) = open(&mut bench, ids[0]);
    let ticket = bench.commit(ids[0].0, step, uid, blocks([0]), true, 60_000);
    bench.core.touch(ids[0].0, LifeSign::Process(Attached::Exited), bench.now);
    bench.core.touch(ids[1].0, LifeSign::Process(Attached::Exited), bench.now);
    bench.tick(1);
    assert_eq!(bench.left, [(ids[1].0, LeaveReason::Exited)], "at once, with linger at 0");
    bench.tick(10_000);
    assert!(bench.is_waiting(ticket) && bench.left.len() == 1);
}

#[test]
fn how_many_have_not_joined_is_said_after_a_while() {
    let (mut bench, ids) = job("4", &["a", "b"]);
    bench.attach(&ids);
    bench.set("linger", "1s");
    bench.tick(60_000);
    assert_eq!(bench.core.late(bench.now), None, "nobody waits");
    let (step, uid) = open(&mut bench, ids[0]);
    bench.commit(ids[0].0, step, uid, blocks([]), true, 60_000);
    bench.core.touch(ids[1].0, LifeSign::Process(Attached::Exited), bench.now);
    bench.tick(4_900);
    assert_eq!(bench.core.late(bench.now), None);
    bench.tick(100);
    let (_, late) = bench.core.late(bench.now).unwrap();
    assert_eq!(late.to_string(), "2 more to join (control/learners)");
    assert!(bench.left.is_empty(), "linger is for learners that others wait for");
    for name in ["c", "d"] {
        let (learner, _) = bench.join(name).unwrap();
        bench.core.touch(learner, LifeSign::Process(Attached::Yes), bench.now);
    }
    bench.tick(10);
    assert_eq!(bench.core.late(bench.now), None, "the wait for those that have joined begins anew");
    bench.tick(5_100);
    assert_eq!(bench.core.late(bench.now).unwrap().1.learners, ["c", "d"], "b is gone: it has exited");
}

#[test]
fn awaited_learners_are_named_after_a_while() {
    let names: Vec<String> = (0..20).map(|i| format!("l{i}")).collect();
    let (mut bench, ids) = job("20", &names.iter().map(String::as_str).collect::<Vec<_>>());
    bench.attach(&ids);
    bench.tick(60_000);
    assert_eq!(bench.core.late(bench.now), None, "nobody waits");
    let (step, uid) = open(&mut bench, ids[3]);
    bench.commit(ids[3].0, step, uid, blocks([]), true, 1_000);
    let began = bench.now;
    bench.tick(4_900);
    assert_eq!(bench.core.late(bench.now), None);
    bench.tick(100);
    let (since, late) = bench.core.late(bench.now).unwrap();
    assert_eq!((since, late.learners.len(), late.more), (began, 16, 3));
    assert!(!late.learners.contains(&"l3".to_owned()), "it has committed");
    assert_eq!(late.learners[..4], ["l0", "l1", "l2", "l4"]);
    for id in ids.iter().filter(|id| id.0 != ids[3].0 && id.0 != ids[7].0) {
        everything(&mut bench, *id, true);
    }
    bench.tick(10);
    let late = bench.core.late(bench.now).unwrap();
    assert_eq!(late, (began, WaitedFor { learners: vec!["l7".to_owned()], more: 0 }), "the same wait");
    completes(&mut bench, ids[7]);
    bench.tick(10);
    assert_eq!(bench.core.late(bench.now), None);
}

#[test]
fn a_learner_that_waits_for_an_answer_is_not_silent() {
    let mut bench = Bench::new(&[("lease", "1")]);
    let a = bench.join("a").unwrap();
    everything(&mut bench, a, true);
    bench.reduce_done(false);
    let (step, uid) = open(&mut bench, a);
    let ticket = bench.commit(a.0, step, uid, blocks([0]), true, 60_000);
    bench.tick(5_000);
    assert!(bench.is_waiting(ticket) && bench.left.is_empty(), "the shard has no buffer for it");
}

#[test]
fn a_learner_has_a_whole_lease_after_waiting_for_others() {
    let (mut bench, ids) = job("2", &["a", "b"]);
    bench.set("lease", "1");
    let (a, _) = everything(&mut bench, ids[0], true);
    for _ in 0..10 {
        bench.tick(500);
        bench.core.touch(ids[1].0, LifeSign::Writes, bench.now);
    }
    everything(&mut bench, ids[1], true);
    bench.makes(1, &[a]);
    bench.tick(999);
    assert_eq!(bench.left, []);
    bench.tick(1);
    assert_eq!(bench.left.len(), 2, "nobody says anything any more");
}

#[test]
fn the_table_of_learners_has_a_limit_and_names_are_taken_once() {
    let (mut bench, _) = job("1", &["a"]);
    assert_eq!(bench.join("a").unwrap_err(), ShardError::NameTaken("a".into()));
    for i in 1..MAX_LEARNERS {
        bench.join(&format!("l{i}")).unwrap();
    }
    assert_eq!(bench.join("one-more").unwrap_err(), ShardError::TooManyLearners(MAX_LEARNERS));
}

#[test]
fn more_learners_than_max_learners_are_refused_and_those_that_are_there_stay() {
    let (mut bench, _) = job("1", &["a", "b", "c"]);
    bench.set("learners", "1");
    bench.set("max_learners", "2");
    assert_eq!(bench.join("d").unwrap_err(), ShardError::TooManyLearners(2));
}

#[test]
fn a_learner_that_retries_after_a_timeout_stays_and_one_that_hangs_leaves() {
    // `a` hangs in a contribution; `b` came in the middle of it and has to wait, less than its patience at a time.
    let mut bench = Bench::new(&[("patience", "1"), ("min_learners", "1")]);
    let a = bench.join("a").unwrap();
    open(&mut bench, a);
    let b = bench.join("b").unwrap();
    bench.attach(&[a, b]);
    let (step, uid) = open(&mut bench, b);
    for _ in 0..3 {
        bench.commit(b.0, step, uid, blocks([0]), true, 600);
        (0..4).for_each(|_| bench.tick(200));
    }
    assert_eq!(bench.left, [(a.0, LeaveReason::PatienceOver)]);
    bench.makes(1, &[uid]);
}

#[test]
fn requests_of_the_last_learner_to_leave_are_refused() {
    let (mut bench, ids) = job("1", &["a"]);
    everything(&mut bench, ids[0], true);
    let (step, uid) = open(&mut bench, ids[0]);
    bench.leave(ids[0].0);
    // Its contribution is being made into a version: the job is still there, without learners.
    assert_eq!(bench.core.state(), JobPhase::Stopped);
    let gone = ShardError::UnknownLearner(ids[0].0);
    assert_eq!(bench.core.open(ids[0].0, bench.now).unwrap_err(), gone);
    let ticket = bench.commit(ids[0].0, step, uid, blocks([0]), true, 1_000);
    assert_eq!(bench.replies[&ticket], Err(gone));
}

/// The room that the state takes when it is handed over.
fn room(bench: &Bench) -> usize {
    postcard::to_stdvec(&bench.core).unwrap().len()
}

#[test]
fn names_of_learners_that_left_take_bounded_room_and_come_back_as_others() {
    let (mut bench, ids) = job("1", &["first"]);
    bench.leave(ids[0].0);
    let names = |bench: &mut Bench, from: usize| {
        for at in from..from + MAX_LEARNERS {
            let name = format!("{at:0>64}");
            let (learner, incarnation) = bench.join(&name).unwrap();
            assert!(incarnation > Incarnation(0), "{name}");
            bench.leave(learner);
        }
        room(bench)
    };
    let full = names(&mut bench, 0);
    assert!(names(&mut bench, MAX_LEARNERS) <= full + MAX_LEARNERS * 8, "{full}");
    // The name is not known any more, and has another incarnation all the same.
    assert!(bench.join("first").unwrap().1 > ids[0].1);
    // A name that has left lately is known.
    let name = format!("{:0>64}", 2 * MAX_LEARNERS - 1);
    let (learner, second) = bench.join(&name).unwrap();
    bench.leave(learner);
    assert!(bench.join(&name).unwrap().1 > second);
}

#[test]
fn a_name_that_is_none_is_refused() {
    let (mut bench, _) = job("1", &["a"]);
    let before = room(&bench);
    for name in ["", ".a", "a b", "a/b", "ü", &"x".repeat(65), &"x".repeat(1 << 20)] {
        let Err(ShardError::NotAllowed(why)) = bench.join(name) else { panic!("{name:?} is taken") };
        assert!(why.contains("use up to 64") && why.len() < 400, "{why}");
    }
    assert_eq!(room(&bench), before);
    bench.join(&"x".repeat(64)).unwrap();
}

#[test]
fn writes_of_new_weights_that_wait_are_limited() {
    let (mut bench, _) = job("1", &["a"]);
    bench.set("reducer", "assign");
    bench.hold();
    let mut refused = 0;
    for ticket in 0..MAX_ASSIGNS as u64 + 3 {
        let mut actions = Vec::new();
        bench.core.assign(ticket, payload(0), Now::from_secs(9), Now::ZERO, &mut actions);
        refused += actions
            .iter()
            .filter(|action| matches!(action, Action::Reply(_, Err(ShardError::OutOfMemory(_)))))
            .count();
    }
    assert_eq!(refused, 3);
}
