//! A move step by step: the messages to each shard and their times, and the outcome of each fault.
use libmodelio::vocabulary::block_map::BlockMap;
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::Generation;
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::wire::{ModelRecord, ShardRecord};

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const DEADLINE: Now = Now::from_secs(600);

fn shard(number: u16, draining: bool) -> ShardRecord {
    let address = format!("node{number}:7070");
    ShardRecord { shard: ShardId(number), address, host: String::new(), draining, rdma: String::new() }
}

/// A model on shards 1 and 2, coordinated by 1; nobody else has blocks.
fn record() -> ModelRecord {
    let layout = ModelLayout::blank(1 << 20, DType::F32, 64 << 10).unwrap();
    let map = BlockMap::striped(layout.blocks(), &[ShardId(1), ShardId(2)]).unwrap();
    let record =
        ModelRecord::new("m", Generation(1), &layout, BTreeMap::new(), &map, ShardId(1), Default::default());
    ModelRecord { ready: true, ..record.unwrap() }
}

fn plan_of(off: u16, before: ModelRecord, shards: &[ShardRecord]) -> Result<Option<Plan>, Refusal> {
    let controls = Controls::default();
    let job = Job { generation: Generation(1), epoch: Epoch(1), controls: &controls };
    Plan::new(ShardId(off), before, shards, &job, 7)
}

/// Off this shard; 3 takes its place.
fn plan(off: u16) -> Plan {
    let shards = [shard(1, off == 1), shard(2, off == 2), shard(3, false)];
    plan_of(off, record(), &shards).unwrap().unwrap()
}

/// A move, and its actions.
struct Moving {
    core: MoveCore,
    now: Now,
    sight: Sight,
    told: Vec<(u64, u16, Tell)>,
    other: Vec<Action>,
}

impl Moving {
    fn new(off: u16) -> Moving {
        let mut actions = Vec::new();
        let core = MoveCore::new(Arc::new(plan(off)), DEADLINE, None, Now::ZERO, &mut actions);
        let sight = Sight { held_up_by: None, wanted: true, ends: false };
        let mut moving = Moving { core, now: Now::ZERO, sight, told: Vec::new(), other: Vec::new() };
        moving.take(actions);
        moving
    }

    fn take(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Tell { number, shard, what, .. } => self.told.push((number, shard.0, what)),
                other => self.other.push(other),
            }
        }
    }

    fn act(&mut self, f: impl FnOnce(&mut MoveCore, Now, &mut Vec<Action>)) {
        let mut actions = Vec::new();
        f(&mut self.core, self.now, &mut actions);
        self.take(actions);
    }

    fn tick(&mut self, after: Duration) {
        self.now += after;
        let sight = self.sight.clone();
        self.act(|core, now, actions| core.tick(now, &sight, actions));
    }

    /// Checks the orders since the last time, with their shards, in order.
    #[track_caller]
    fn told(&mut self, expected: &[(u16, Tell)]) -> Vec<u64> {
        let told: Vec<(u16, Tell)> = self.told.iter().map(|&(_, shard, what)| (shard, what)).collect();
        assert_eq!(told, expected);
        self.told.drain(..).map(|(number, ..)| number).collect()
    }

    #[track_caller]
    fn wants(&mut self, expected: &[Action]) {
        assert_eq!(std::mem::take(&mut self.other), expected);
    }

    fn answer(&mut self, numbers: Vec<u64>, told: Told) {
        for number in numbers {
            self.act(|core, now, actions| core.answered(number, Ok(told), now, actions));
        }
    }

    fn silence(&mut self, number: u64) {
        self.act(|core, now, actions| core.answered(number, Err("no answer".into()), now, actions));
    }

    /// All up to the question to the registry; shards of the new map are `a` and `b`, and `coordinator` coordinates.
    #[track_caller]
    fn prepare(&mut self, [a, b]: [u16; 2], coordinator: u16) {
        let both = |what| [(a, what), (b, what)];
        let numbers = self.told(&both(Tell::Adopt));
        self.answer(numbers, Told::Done);
        self.wants(&[Action::Hold]);
        self.tick(CHECK_INTERVAL);
        let numbers = self.told(&both(Tell::Fill));
        self.answer(numbers, Told::Done);
        self.tick(CHECK_INTERVAL);
        let numbers = self.told(&both(Tell::Adopting));
        self.answer(numbers, Told::Adopted { blocks: 7, of: 8 });
        assert_eq!(
            self.core.progress(),
            Progress { stage: "moving blocks", blocks: 14, of: 16, off: self.core.plan().off }
        );
        self.tick(POLL);
        let numbers = self.told(&both(Tell::Adopting));
        self.answer(numbers, Told::Adopted { blocks: 8, of: 8 });
        self.wants(&[Action::Freeze]);
        self.act(|core, now, actions| core.frozen(Ok(PIECE + 1), now, actions));
        let numbers = self.told(&[(coordinator, Tell::HandOver { at: 0 })]);
        self.answer(numbers, Told::Done);
        let numbers = self.told(&[(coordinator, Tell::HandOver { at: PIECE })]);
        self.answer(numbers, Told::Done);
        let numbers = self.told(&both(Tell::Adopting));
        self.answer(numbers, Told::Adopted { blocks: 8, of: 8 });
        self.wants(&[Action::Put { restores: false }]);
        assert!(!self.core.can_stop());
    }

    fn put(&mut self, answer: Put) {
        self.act(|core, now, actions| core.put(answer, now, actions));
    }

    fn looked(&mut self, forgotten: bool, listed: &[u16]) {
        let listed = Some(listed.iter().map(|&shard| ShardId(shard)).collect());
        let looked = Looked { forgotten: Some(forgotten), listed };
        self.act(|core, now, actions| core.looked(&looked, now, actions));
    }

    /// Checks that the move has failed with this word, the job goes on, and the new owners forget their
    /// blocks.
    #[track_caller]
    fn has_failed(&mut self, held: bool, word: &str, owners: [u16; 2]) {
        let mut wants = std::mem::take(&mut self.other);
        if held {
            assert_eq!(wants.remove(0), Action::Release);
        }
        let [Action::Finished(Err(why))] = &wants[..] else { panic!("{wants:?}") };
        assert!(why.to_string().contains(word), "{why}");
        let told: Vec<(u16, Tell)> = self.told.iter().map(|&(_, shard, what)| (shard, what)).collect();
        let abandoned = owners.map(|shard| (shard, Tell::Abandon));
        assert!(told.ends_with(&abandoned), "{told:?}");
        let numbers: Vec<u64> = self.told.drain(..).rev().take(2).map(|(number, ..)| number).collect();
        self.answer(numbers, Told::Done);
        assert!(self.core.is_over());
    }
}

#[test]
fn all_goes_well() {
    let mut moving = Moving::new(1);
    moving.prepare([2, 3], moving.core.plan().after.coordinator.0);
    moving.put(Put::Done);
    // The next coordinator comes after the other new owner, and the present one last: here it is also the
    // shard that is left.
    let coordinator = moving.core.plan().after.coordinator.0;
    let numbers = moving.told(&[(5 - coordinator, Tell::Switch)]);
    moving.answer(numbers, Told::Done);
    let numbers = moving.told(&[(coordinator, Tell::Switch)]);
    moving.answer(numbers, Told::Done);
    let numbers = moving.told(&[(1, Tell::Switch)]);
    moving.answer(numbers, Told::Done);
    moving.wants(&[Action::Look]);
    moving.looked(false, &[1, 2, 3]);
    moving.wants(&[Action::Finished(Ok(()))]);
    assert!(moving.core.is_over());
}

#[test]
fn where_nothing_can_move_is_said_before_anything_is_held() {
    let shards = [shard(1, true), shard(2, true)];
    let said = |off, record, shards: &[ShardRecord]| match plan_of(off, record, shards) {
        Err(refusal) => refusal.to_string(),
        Ok(plan) => panic!("{plan:?}"),
    };
    assert!(said(1, record(), &shards).contains("start another shard first"));
    assert!(said(1, record(), &[shard(1, true), shard(3, false)]).contains("shard 2, which owns blocks"));
    assert!(said(1, record(), &[shard(1, false), shard(2, false)]).contains("not being drained"));
    assert!(said(1, ModelRecord { ready: false, ..record() }, &shards).contains("still being loaded"));
    assert!(said(1, ModelRecord { epoch: Epoch(2), ..record() }, &shards).contains("block map"));
    assert!(plan_of(3, record(), &shards).unwrap().is_none(), "nothing is there");
    // The message with both block maps has a limit.
    let room = (16 << 20) - record().encode().unwrap().len() - 16;
    let metadata = BTreeMap::from([("long".to_owned(), "x".repeat(room))]);
    let long = ModelRecord { metadata, ..record() };
    assert!(long.encode().is_ok());
    let why = said(1, long, &[shard(1, true), shard(2, false), shard(3, false)]);
    assert!(why.contains("takes 16777") && why.contains("larger blocks"), "{why}");
}

#[test]
fn a_shard_that_does_not_take_memory_ends_it_before_the_job_is_held() {
    let mut moving = Moving::new(2);
    let numbers = moving.told(&[(1, Tell::Adopt), (3, Tell::Adopt)]);
    moving.answer(vec![numbers[0]], Told::Done);
    moving.silence(numbers[1]);
    moving.has_failed(false, "shard 3 at node3:7070: no answer", [1, 3]);
    // A shard does not answer at all.
    let mut moving = Moving::new(2);
    let numbers = moving.told(&[(1, Tell::Adopt), (3, Tell::Adopt)]);
    moving.answer(vec![numbers[1]], Told::Done);
    moving.tick(PATIENT);
    moving.wants(&[]);
    moving.tick(GRACE);
    moving.has_failed(false, "shard 1 at node1:7070: it does not answer", [1, 3]);
}

#[test]
fn the_job_is_held_no_longer_than_it_may() {
    // The hold is half of the commits' timeout.
    assert_eq!(plan(2).hold, Controls::default().timeout / 2);
    let held = |after: Duration, sight: Option<&str>| {
        let mut moving = Moving::new(2);
        let numbers = moving.told(&[(1, Tell::Adopt), (3, Tell::Adopt)]);
        moving.sight.held_up_by = sight.map(str::to_owned);
        moving.answer(numbers, Told::Done);
        moving.wants(&[Action::Hold]);
        moving.tick(after);
        moving
    };
    let hold = plan(2).hold;
    let mut moving = held(hold - SECOND, Some("slow learns"));
    moving.wants(&[]);
    moving.tick(SECOND);
    moving.has_failed(true, "within the 60s for which the job may be held: slow learns: see to that", [1, 3]);
    // Also while blocks move, and though shards answer.
    let mut moving = held(SECOND, None);
    let numbers = moving.told(&[(1, Tell::Fill), (3, Tell::Fill)]);
    moving.answer(numbers, Told::Done);
    loop {
        moving.tick(SECOND);
        if moving.now >= hold {
            break;
        }
        let numbers: Vec<u64> = moving.told.drain(..).map(|(number, ..)| number).collect();
        moving.answer(numbers, Told::Adopted { blocks: 1, of: 8 });
    }
    let text =
        "2 of 16 blocks were moved within the 60s for which the job may be held: hold it longer (--hold)";
    moving.has_failed(true, text, [1, 3]);
}

#[test]
fn it_can_be_stopped_until_the_registry_is_asked() {
    let mut moving = Moving::new(2);
    moving.act(MoveCore::stop);
    moving.has_failed(false, "stopped", [1, 3]);
    let mut moving = Moving::new(2);
    moving.prepare([1, 3], 1);
    moving.act(MoveCore::stop);
    moving.wants(&[]);
    moving.put(Put::Done);
    moving.told(&[(3, Tell::Switch)]);
}

#[test]
fn a_registry_that_may_have_done_it_is_asked_until_it_says() {
    let unknown = || Put::Unknown("cut off".into());
    let warning = || Action::Warn("whether the model has moved is not known: cut off".into());
    let mut moving = Moving::new(2);
    moving.prepare([1, 3], 1);
    moving.put(unknown());
    moving.wants(&[warning()]);
    moving.tick(AGAIN);
    moving.wants(&[Action::Put { restores: false }]);
    // The registry has not got this request, but perhaps the one before; neither time nor a stop changes
    // that.
    moving.put(Put::NotSent("nobody listens".into()));
    moving.now += DEADLINE;
    moving.act(MoveCore::stop);
    moving.tick(AGAIN);
    moving.wants(&[Action::Put { restores: false }]);
    moving.put(Put::Other(Epoch(2)));
    moving.told(&[(3, Tell::Switch)]);
    // If the first request never came, the record is somebody else's.
    for (answer, word) in [
        (Put::Other(Epoch(2)), "block map 2, not 1"),
        (Put::Refused("no such model".into()), "no such model"),
        (Put::NotSent("nobody listens".into()), "nobody listens"),
        (Put::Gone, "no such model"),
        (Put::Taken("of generation 9".into()), "of generation 9"),
    ] {
        let mut moving = Moving::new(2);
        moving.prepare([1, 3], 1);
        moving.put(answer);
        moving.has_failed(true, word, [1, 3]);
    }
    // A registry that was started anew may have lost the record, which is put there. If it has another model
    // by then, it says so.
    for (answer, warns) in [(Put::Done, 0), (Put::Taken("of generation 9".into()), 1)] {
        let mut moving = Moving::new(2);
        moving.prepare([1, 3], 1);
        moving.put(unknown());
        moving.tick(AGAIN);
        moving.put(Put::Gone);
        moving.wants(&[warning(), Action::Put { restores: false }, Action::Put { restores: true }]);
        // A refusal of this request says nothing about the outcome of the one before it.
        moving.put(Put::Refused("a number is taken".into()));
        moving.tick(AGAIN);
        moving.wants(&[Action::Put { restores: true }]);
        moving.put(answer);
        assert_eq!(moving.other.len(), warns);
        moving.told(&[(3, Tell::Switch)]);
    }
    // An answer that says no says so of all of them.
    let mut moving = Moving::new(2);
    moving.prepare([1, 3], 1);
    moving.put(unknown());
    moving.wants(&[warning()]);
    moving.tick(AGAIN);
    moving.wants(&[Action::Put { restores: false }]);
    moving.put(Put::Refused("no such model".into()));
    moving.has_failed(true, "no such model", [1, 3]);
}

#[test]
fn shards_that_do_not_know_are_told_until_they_do() {
    let mut moving = Moving::new(2);
    moving.prepare([1, 3], 1);
    moving.put(Put::Done);
    for round in 0..3 {
        let numbers = moving.told(&[(3, Tell::Switch)]);
        moving.silence(numbers[0]);
        if round == 0 {
            let numbers = moving.told(&[(2, Tell::Switch)]);
            moving.answer(numbers, Told::Done);
            let numbers = moving.told(&[(1, Tell::Switch)]);
            moving.answer(numbers, Told::Done);
        }
        moving.wants(&[Action::Look]);
        moving.looked(false, &[1, 2, 3]);
        moving.tick(AGAIN);
    }
    moving.now = DEADLINE;
    let numbers = moving.told(&[(3, Tell::Switch)]);
    moving.silence(numbers[0]);
    moving.looked(false, &[1, 2, 3]);
    let [Action::Look, Action::Warn(_), Action::Finished(Err(why))] = &moving.other[..] else {
        panic!("{:?}", moving.other)
    };
    assert!(why.to_string().contains("has moved, but not all shards know: shard 3 at node3:7070"), "{why}");
    // Nobody waits, but the move goes on until the shard knows, or is gone.
    moving.tick(2 * AGAIN);
    moving.told(&[(3, Tell::Switch)]);
    assert!(!moving.core.is_over());
    moving.act(|core, now, actions| core.answered(u64::MAX, Ok(Told::Done), now, actions));
    moving.tick(SWITCHING + GRACE);
    moving.looked(false, &[1, 2]);
    assert!(moving.core.is_over());
}

#[test]
fn a_model_that_is_deleted_does_not_come_back() {
    let mut moving = Moving::new(2);
    moving.sight.wanted = false;
    moving.tick(CHECK_INTERVAL);
    moving.has_failed(false, "no model", [1, 3]);
    let mut moving = Moving::new(2);
    moving.prepare([1, 3], 1);
    // The coordinator's end means nothing from here on: it is the old one.
    moving.sight.wanted = false;
    moving.put(Put::Done);
    for shard in [3, 2, 1] {
        let numbers = moving.told(&[(shard, Tell::Switch)]);
        moving.answer(numbers, Told::Done);
    }
    moving.looked(true, &[1, 2, 3]);
    moving.told(&[(1, Tell::Delete), (3, Tell::Delete), (2, Tell::Delete)]);
    let gone = Action::Finished(Err(Refusal::NoModel("m".into())));
    moving.wants(&[Action::Look, gone]);
    assert!(moving.core.is_over());
}

#[test]
fn a_shard_that_was_started_anew_meanwhile_is_found_out() {
    let mut moving = Moving::new(2);
    let numbers = moving.told(&[(1, Tell::Adopt), (3, Tell::Adopt)]);
    moving.answer(numbers, Told::Done);
    moving.tick(CHECK_INTERVAL);
    let numbers = moving.told(&[(1, Tell::Fill), (3, Tell::Fill)]);
    moving.answer(numbers, Told::Done);
    moving.tick(CHECK_INTERVAL);
    let numbers = moving.told(&[(1, Tell::Adopting), (3, Tell::Adopting)]);
    moving.answer(numbers, Told::Adopted { blocks: 8, of: 8 });
    moving.act(|core, now, actions| core.frozen(Ok(1), now, actions));
    let numbers = moving.told(&[(1, Tell::HandOver { at: 0 })]);
    moving.answer(numbers, Told::Done);
    let numbers = moving.told(&[(1, Tell::Adopting), (3, Tell::Adopting)]);
    moving.answer(vec![numbers[0]], Told::Adopted { blocks: 8, of: 8 });
    moving.silence(numbers[1]);
    assert_eq!(moving.other[..2], [Action::Hold, Action::Freeze]);
    moving.other.drain(..2);
    moving.has_failed(true, "shard 3 at node3:7070", [1, 3]);
}

#[test]
fn whoever_does_not_forget_is_told_for_a_while() {
    let mut moving = Moving::new(2);
    moving.told(&[(1, Tell::Adopt), (3, Tell::Adopt)]);
    moving.act(MoveCore::stop);
    let numbers = moving.told(&[(1, Tell::Abandon), (3, Tell::Abandon)]);
    moving.answer(vec![numbers[0]], Told::Done);
    assert!(moving.core.next_deadline(moving.now) > moving.now, "it rests");
    moving.silence(numbers[1]);
    while moving.now < ABANDONING {
        moving.tick(AGAIN);
        let numbers: Vec<u64> = moving.told.drain(..).map(|(number, ..)| number).collect();
        numbers.into_iter().for_each(|number| moving.silence(number));
    }
    moving.tick(AGAIN);
    assert!(moving.core.is_over());
    assert!(matches!(moving.other.last(), Some(Action::Warn(_))), "{:?}", moving.other);
}

#[test]
fn a_process_that_ends_says_so_and_does_nothing_more() {
    let mut moving = Moving::new(2);
    moving.prepare([1, 3], 1);
    moving.sight.ends = true;
    moving.tick(CHECK_INTERVAL);
    moving.told(&[]);
    moving.wants(&[Action::Finished(Err(Refusal::other("the shard shuts down")))]);
    assert!(moving.core.is_over());
}
