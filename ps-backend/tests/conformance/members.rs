//! Learners: joining, leaving, names, limits, what the job tells of them.

use std::sync::Mutex;
use std::sync::mpsc::channel;

use libmodelio::client::Event;
use libmodelio::vocabulary::block_slot::Placement;
use libmodelio::vocabulary::ids::{LearnerId, Step};
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::shard_error::ShardError;

use crate::site::{LONG, Message, Reply, Way, answer, done, is_unknown, until};

pub fn a_name_is_one_learners_at_a_time(way: &Way) {
    let (_site, [a, b]) = way.job(&[("reducer", "sum")]).two_ends();
    let first = a.join("x");
    for end in [&a, &b] {
        assert_eq!(end.try_join("x").unwrap_err(), ShardError::NameTaken("x".into()));
    }
    let other = b.join("y");
    assert_ne!(first.id, other.id);
    first.leave(LeaveReason::Asked);
    let again = b.join("x");
    assert!(again.incarnation > first.incarnation, "another life");
    assert_ne!(again.id, first.id);
    // The old one is nobody any more, also where it was.
    is_unknown(a.ask(Message::Leave { learner: first.id, reason: LeaveReason::Asked }), first.id);
    assert!(!a.has(first.id) && b.has(again.id));
}

pub fn strangers_are_unknown(way: &Way) {
    let (_site, end, learner) = way.job(&[]).one();
    let nobody = LearnerId(learner.id.0 + 1000);
    assert!(!end.job.has_learner(nobody));
    let notice = || learner.open().notice;
    for message in [
        Message::Leave { learner: nobody, reason: LeaveReason::Asked },
        Message::Open { learner: nobody },
        Message::Commit { learner: nobody, step: Step(1), notice: notice() },
        Message::Abort { learner: nobody },
        Message::Withdraw { learner: nobody },
        Message::AwaitStep { learner: nobody },
    ] {
        let text = format!("{message:?}");
        let refused = end.ask(message);
        assert!(
            matches!(refused, Err(ShardError::UnknownLearner(who)) if who == nobody),
            "{refused:?} to {text}"
        );
    }
    let contribution = learner.open();
    let bytes = contribution.filled(0, 1.0);
    let slot = learner.slot(contribution.step, 0);
    let room = Some(&contribution.notice.staging);
    let mut other_life = slot;
    other_life.incarnation.0 += 1;
    let mut stranger = slot;
    stranger.learner = nobody;
    for slot in [other_life, stranger] {
        assert_eq!(
            end.job.write(&bytes, slot, room),
            Err(ShardError::UnknownLearner(slot.learner)),
            "{slot:?}"
        );
    }
    assert_ne!(end.job.write(&bytes, slot, room), Ok(Placement::Duplicate), "nothing was taken");
}

pub fn the_number_of_learners_is_limited(way: &Way) {
    const MOST: usize = 64;
    let (_site, end) = way.job(&[("learners", "2"), ("max_learners", "64")]).one_end();
    let (sender, joined) = channel();
    for i in 0..MOST {
        let sender = sender.clone();
        let join = Message::Join { name: format!("learner{i}") };
        end.ask_within(join, LONG, Box::new(move |result| drop(sender.send(result))));
    }
    let mut learners = Vec::new();
    for _ in 0..MOST {
        match joined.recv_timeout(LONG).unwrap() {
            Ok(Reply::Joined { learner, .. }) => learners.push(learner),
            other => panic!("{other:?}"),
        }
    }
    let too_many = ShardError::TooManyLearners(MOST);
    assert_eq!(end.try_join("one-more").unwrap_err(), too_many);
    // The place of one that leaves is free.
    let learner = learners[MOST / 2];
    done(end.ask(Message::Leave { learner, reason: LeaveReason::Asked }));
    end.try_join("one-more").unwrap();
    assert_eq!(end.try_join("another").unwrap_err(), too_many);
}

pub fn the_status_shows_the_learners_of_the_job(way: &Way) {
    let (_site, end) = way.job(&[("reducer", "sum"), ("learners", "2")]).one_end();
    let (sender, events) = channel();
    let tell = Mutex::new(sender);
    end.job.subscribe(Box::new(move |event| tell.lock().unwrap().send(event).unwrap_or_default()));
    let (a, b) = (end.join("a"), end.join("b"));
    let phase = |name: &str| {
        let members = end.job.status().members;
        members.iter().find(|member| member.name == name).map(|member| member.phase)
    };
    until("both are idle", || phase("a") == Some("idle") && phase("b") == Some("idle"));
    let contribution = a.all_of(1.0);
    until("one writes", || phase("a") == Some("writing"));
    done(contribution.commit());
    until("it has committed", || phase("a") == Some("committed") && end.job.status().committed == 1);
    b.leave(LeaveReason::Died);
    until("one has left", || phase("b").is_none());
    let left = |event| matches!(event, Event::Left(learner, LeaveReason::Died) if learner == b.id);
    while !left(events.recv_timeout(LONG).expect("word of who has left")) {}
    assert!(!end.job.has_learner(b.id) && end.job.has_learner(a.id));
    assert_eq!(a.pull(), 1);
    until("one contribution counts", || end.job.status().contributions == 1);
    // Answers that come beside are no answers to something else.
    let open = end.send(Message::Open { learner: a.id }, LONG);
    assert!(matches!(answer(&open), Ok(Reply::Opened { step: Step(2), .. })));
}
