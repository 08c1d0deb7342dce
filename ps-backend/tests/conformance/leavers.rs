//! Learners that leave: their committed contributions count, open ones do not, and nobody waits for them.

use std::sync::Mutex;
use std::sync::mpsc::channel;

use libmodelio::client::Event;
use libmodelio::vocabulary::block_slot::Placement;
use libmodelio::vocabulary::ids::Step;
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::shard_error::ShardError;

use crate::site::{BLOCKS, LONG, Message, Way, answer, is_unknown};

pub fn a_learner_that_leaves_in_mid_step_is_not_waited_for(way: &Way) {
    let (_site, [a, b]) = way.striped_job(&[("reducer", "sum"), ("learners", "2")]).two_ends();
    let stays = a.join("stays");
    let goes = b.join("goes");
    let mut half = goes.open();
    half.offer_all_of(0, 64.0);
    half.stage_all_of(2, 64.0);
    stays.push(1.0);
    // This learner is the last outstanding one, so its blocks may be reduced on arrival.
    half.offer_all_of(1, 64.0);
    goes.leave(LeaveReason::Died);
    stays.pulls(1, 1.0);
    // Nothing more is taken from it.
    let slot = goes.slot(Step(1), 3);
    let late = b.job.write(&half.filled(3, 64.0), slot, Some(&half.notice.staging));
    assert_eq!(late, Err(ShardError::UnknownLearner(goes.id)));
    is_unknown(half.commit(), goes.id);
    stays.makes(1.0, 2, 2.0);
    // Under its old name it is another incarnation, and begins at step 1.
    let again = b.join("goes");
    let old = b.job.write(&half.filled(3, 64.0), slot, Some(&half.notice.staging));
    assert_eq!(old, Err(ShardError::UnknownLearner(goes.id)));
    stays.push(4.0);
    again.push(8.0);
    assert_eq!((stays.pull(), again.pull()), (3, 3));
    a.shows(3, 14.0);
    b.shows(3, 14.0);
}

pub fn the_committed_contribution_of_a_leaver_stays(way: &Way) {
    let (_site, [a, b]) = way.job(&[("reducer", "sum"), ("learners", "3")]).two_ends();
    let (first, second, goes) = (a.join("first"), b.join("second"), b.join("goes"));
    goes.push(1.0);
    first.push(2.0);
    goes.leave(LeaveReason::Asked);
    second.push(4.0);
    assert_eq!((first.pull(), second.pull()), (1, 1));
    a.shows(1, 7.0);
    b.shows(1, 7.0);
}

pub fn a_learner_that_waits_for_a_leaver_gets_an_answer(way: &Way) {
    let (_site, end) = way.job(&[("reducer", "sum"), ("learners", "2")]).one_end();
    let (sender, events) = channel();
    let (a, _b) = (end.join("a"), end.join("b"));
    let tell = Mutex::new(sender);
    end.job.subscribe(Box::new(move |event| tell.lock().unwrap().send(event).unwrap_or_default()));
    a.push(1.0);
    let step = end.send(Message::AwaitStep { learner: a.id }, LONG);
    let mut ahead = a.open();
    for block in 0..BLOCKS {
        assert_ne!(ahead.offer(block, &ahead.filled(block, 1.0)), Ok(Placement::Duplicate));
    }
    let commit = ahead.send(LONG);
    a.leave(LeaveReason::Asked);
    is_unknown(answer(&step), a.id);
    is_unknown(answer(&commit), a.id);
    let left = Event::Left(a.id, LeaveReason::Asked);
    while events.recv_timeout(LONG).expect("word of who has left") != left {}
}
