//! Settings: they are the whole job's, count from the next version, and decide what a version waits for.

use libmodelio::client::SetError;
use libmodelio::vocabulary::controls::{ControlError, SETTINGS};
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::phase::JobPhase;
use libmodelio::vocabulary::shard_error::ShardError;

use crate::site::{BLOCKS, LONG, SHORT, Way, answer, done, timed_out, until};

pub fn settings_show_and_take_effect(way: &Way) {
    let (_site, [a, b]) =
        way.job(&[("reducer", "sgd"), ("learning_rate", "0.5"), ("retain", "3")]).two_ends();
    for end in [&a, &b] {
        assert_eq!((&*end.setting("learning_rate"), &*end.setting("retain")), ("0.5", "3"));
    }
    let learner = a.join("a");
    learner.makes(1.0, 1, -0.5);
    b.set("learning_rate", " 2\n").unwrap();
    assert_eq!(b.setting("learning_rate"), "2");
    learner.makes(1.0, 2, -2.5);
    until("it shows at the other end", || a.setting("learning_rate") == "2");
}

pub fn bad_settings_change_nothing(way: &Way) {
    let (_site, end) = way.job(&[("reducer", "sgd")]).one_end();
    let all = || SETTINGS.iter().map(|(name, _)| end.setting(name)).collect::<Vec<_>>();
    let before = all();
    for (name, value) in
        [("learning_rate", "fast"), ("reducer", "sgdd"), ("max_versions", "-1"), ("retain", "")]
    {
        let refused = end.set(name, value);
        assert!(matches!(refused, Err(SetError::Refused(ControlError::Invalid { .. }))), "{refused:?}");
    }
    let refused = end.set("nothing", "1");
    assert!(matches!(refused, Err(SetError::Refused(ControlError::Unknown(_)))), "{refused:?}");
    end.set("consistency", "async").unwrap();
    let refused = end.set("deterministic", "true");
    assert!(matches!(refused, Err(SetError::Refused(ControlError::Conflict(_)))), "{refused:?}");
    end.set("consistency", "sync").unwrap();
    assert_eq!(all(), before);
}

pub fn async_makes_a_version_of_each(way: &Way) {
    let (_site, [a, b], [one, other]) = way
        .job(&[("reducer", "sum"), ("consistency", "async"), ("learners", "2"), ("read_own_step", "true")])
        .two();
    for step in 1..=3 {
        one.makes(1.0, step, step as f32);
    }
    other.makes(10.0, 4, 13.0);
    let both = [one.all_of(100.0).send(LONG), other.all_of(1000.0).send(LONG)];
    both.iter().for_each(|commit| done(answer(commit)));
    a.sees(6);
    b.sees(6);
    a.shows(6, 1113.0);
    b.shows(6, 1113.0);
}

pub fn a_quorum_is_enough(way: &Way) {
    let (_site, [a, b]) =
        way.job(&[("reducer", "sum"), ("consistency", "quorum(2)"), ("learners", "3")]).two_ends();
    let (first, second, late) = (a.join("first"), b.join("second"), b.join("late"));
    first.push(1.0);
    assert_eq!(a.job.version(), Version(0));
    second.push(2.0);
    assert_eq!((first.pull(), second.pull()), (1, 1));
    a.shows(1, 3.0);
    // The late learner counts in the next version, which again takes two.
    late.push(4.0);
    assert_eq!(b.job.version(), Version(1));
    first.push(8.0);
    assert_eq!((first.pull(), late.pull()), (2, 2));
    a.shows(2, 15.0);
    b.shows(2, 15.0);
}

pub fn the_lead_of_the_fastest_is_bounded(way: &Way) {
    let (_site, [a, _], [fast, slow]) =
        way.job(&[("reducer", "sum"), ("consistency", "ssp(1)"), ("learners", "2")]).two();
    for step in 1..=2 {
        fast.push(1.0);
        assert_eq!(fast.pull(), step);
    }
    let third = fast.all_of(1.0);
    timed_out(answer(&third.send(SHORT)));
    assert_eq!(a.job.version(), Version(2));
    let waits = third.send(LONG);
    slow.push(10.0);
    done(answer(&waits));
    fast.pulls(4, 13.0);
}

pub fn too_few_learners_stop_the_job(way: &Way) {
    let settings = [("reducer", "sum"), ("learners", "2"), ("min_learners", "2")];
    let (_site, end) = way.job(&settings).one_end();
    let (stays, goes) = (end.join("stays"), end.join("goes"));
    stays.push(1.0);
    goes.push(1.0);
    assert_eq!(stays.pull(), 1);
    let mut contribution = stays.open();
    contribution.offer_all_of(0, 1.0);
    goes.leave(LeaveReason::Asked);
    until("the job stops", || stays.ask_to_open().is_err());
    let stopped = ShardError::Stopped { active: 1, needed: 2 };
    assert_eq!(stays.ask_to_open().unwrap_err(), stopped);
    assert_eq!(contribution.offer(1, &contribution.filled(1, 1.0)), Err(stopped.clone()));
    assert_eq!(contribution.commit().unwrap_err(), stopped);
    end.shows(1, 2.0);
    // It goes on where it was. Who comes in the middle of a step takes part from the next one on.
    let comes = end.join("comes");
    until("the job goes on", || end.job.status().state != JobPhase::Stopped);
    (1..BLOCKS).for_each(|block| contribution.offer_all_of(block, 1.0));
    done(contribution.commit());
    stays.pulls(2, 3.0);
    comes.push(4.0);
    stays.push(8.0);
    assert_eq!((comes.pull(), stays.pull()), (3, 3));
    end.shows(3, 15.0);
}
