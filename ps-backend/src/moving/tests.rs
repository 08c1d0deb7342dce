//! Moves with everything that can fail, one after the other: who is told what, and what becomes of the job.

use std::collections::BTreeMap;

use libmodelio::vocabulary::block_map::BlockMap;
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::{Epoch, Generation};
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

fn plan_of(off: u16, before: ModelRecord, shards: &[ShardRecord]) -> Result<Option<MovePlan>, Refusal> {
    let controls = Controls::default();
    let job = JobFacts { generation: Generation(1), epoch: Epoch(1), controls: &controls };
    MovePlan::new(ShardId(off), before, shards, &job, 7)
}

/// Off this shard; 3 takes its place.
fn plan(off: u16) -> MovePlan {
    let shards = [shard(1, off == 1), shard(2, off == 2), shard(3, false)];
    plan_of(off, record(), &shards).unwrap().unwrap()
}

/// What a mover has the edge do, besides what it only asks for.
#[derive(Clone, Debug, PartialEq)]
enum Did {
    Tell(u16, &'static str),
    Hold,
    Freeze,
    Release,
    Put { restores: bool },
    Warn(String),
    Finish(Result<(), Refusal>),
}

/// The answer of a shard, by its number, an order, and how often that was given before.
type Shard = dyn Fn(u16, &str, usize) -> Option<Result<Message, String>>;

/// An edge in a world in which all goes well, but for what a test changes.
struct World {
    now: Now,
    did: Vec<Did>,
    /// Stages, with their blocks.
    shown: Vec<(&'static str, u32, u32)>,
    /// What a shard answers to an order that it has been given so often before; without an answer it is silent.
    shard: Box<Shard>,
    /// The step under way waits for somebody.
    held_up_by: Option<String>,
    /// From when on nobody wants the move any more.
    unwanted: Option<(&'static str, Refusal)>,
    puts: Vec<Result<(), PutError>>,
    deleted: bool,
    /// Bytes of the coordinator's state that were handed over.
    handed: usize,
    /// The process ends then.
    ends: Now,
}

fn done(what: &str, before: usize) -> Option<Result<Message, String>> {
    let blocks = 7 + before.min(1) as u32;
    Some(Ok(if what == "Fill" { Message::Filled { blocks, of: 8 } } else { Message::Done }))
}

fn unknown() -> Result<(), PutError> {
    Err(PutError::Unknown("cut off".into()))
}

fn refused(refusal: Refusal) -> Result<(), PutError> {
    Err(PutError::Refused(refusal))
}

impl Default for World {
    fn default() -> World {
        World {
            now: Now::ZERO,
            did: Vec::new(),
            shown: Vec::new(),
            shard: Box::new(|_, what, before| done(what, before)),
            held_up_by: None,
            unwanted: None,
            puts: vec![Ok(())],
            deleted: false,
            handed: 0,
            ends: Now::MAX,
        }
    }
}

impl Edge for World {
    async fn now(&mut self) -> Now {
        self.now
    }

    async fn pause(&mut self, time: Duration) -> Result<(), Ends> {
        self.now += time;
        if self.now < self.ends { Ok(()) } else { Err(Ends) }
    }

    async fn ask(&mut self, shards: &[ShardId], order: Order, within: Duration) -> Result<Answers, Ends> {
        let (what, mut answers) = (order.message.name(), Answers::new());
        if let Message::HandOver { at, of, .. } = order.message {
            assert_eq!((at as usize, of as usize), (self.handed, PIECE + 1));
            self.handed += order.payload.len();
        }
        for &shard in shards {
            let tell = Did::Tell(shard.0, what);
            let before = self.did.iter().filter(|did| **did == tell).count();
            self.did.push(tell);
            answers.extend((self.shard)(shard.0, what, before).map(|answer| (shard, answer)));
        }
        let fails = order.is_step && answers.iter().any(|(_, answer)| answer.is_err());
        if answers.len() < shards.len() && !fails {
            self.now += within;
        }
        Ok(answers)
    }

    fn show(&mut self, progress: Progress) {
        self.shown.push((progress.stage, progress.blocks, progress.of));
    }

    async fn unwanted(&mut self) -> Option<Refusal> {
        self.unwanted
            .clone()
            .filter(|(since, _)| self.shown.iter().any(|(stage, ..)| stage == since))
            .map(|(_, why)| why)
    }

    fn hold(&mut self) {
        self.did.push(Did::Hold);
    }

    async fn held(&mut self) -> Result<(Version, Reducer), String> {
        self.held_up_by.clone().map_or(Ok((Version(3), Reducer::Sum)), Err)
    }

    async fn freeze(&mut self) -> Result<(Vec<u8>, Now), String> {
        self.did.push(Did::Freeze);
        Ok((vec![0; PIECE + 1], self.now))
    }

    fn release(&mut self) {
        self.did.push(Did::Release);
    }

    async fn put(&mut self, restores: bool) -> Result<(), PutError> {
        self.did.push(Did::Put { restores });
        if self.puts.len() > 1 { self.puts.remove(0) } else { self.puts[0].clone() }
    }

    async fn is_deleted(&mut self) -> bool {
        self.deleted
    }

    fn warn(&mut self, what: String) {
        self.did.push(Did::Warn(what));
    }

    fn finish(&mut self, outcome: Result<(), Refusal>) {
        assert!(self.outcome().is_none(), "{:?}", self.did);
        self.did.push(Did::Finish(outcome));
    }
}

impl World {
    fn outcome(&self) -> Option<&Result<(), Refusal>> {
        self.did.iter().find_map(|did| match did {
            Did::Finish(outcome) => Some(outcome),
            _ => None,
        })
    }

    fn has(&self, did: &Did) -> bool {
        self.did.contains(did)
    }

    /// Moves the model off a shard.
    fn run(mut self, off: u16) -> World {
        run(&mut self, &plan(off), DEADLINE, None);
        self
    }

    /// Moves it off shard 2, which comes to nothing, for a reason of these words: the job goes on, and new owners forget
    /// their blocks.
    #[track_caller]
    fn fails(self, words: &str) -> World {
        let world = self.run(2);
        let Some(Err(why)) = world.outcome() else { panic!("{:?}", world.did) };
        assert!(why.to_string().contains(words), "{why}, not {words}");
        let kinds = |of: fn(&Did) -> bool| world.did.iter().filter(|did| of(did)).count();
        assert_eq!(kinds(|did| *did == Did::Hold), kinds(|did| *did == Did::Release), "{:?}", world.did);
        assert_eq!(kinds(|did| matches!(did, Did::Tell(_, "Switch"))), 0);
        for owner in [1, 3] {
            assert!(world.has(&Did::Tell(owner, "Abandon")), "{:?}", world.did);
        }
        world
    }

    /// Moves it off shard 2. From some point on the map is in force, and nothing ends it.
    #[track_caller]
    fn succeeds(self) -> World {
        let world = self.run(2);
        assert!(!world.has(&Did::Release) && !world.has(&Did::Tell(1, "Abandon")), "{:?}", world.did);
        for shard in [1, 2, 3] {
            assert!(world.has(&Did::Tell(shard, "Switch")), "{:?}", world.did);
        }
        world
    }

    fn puts(puts: &[Result<(), PutError>]) -> World {
        World { puts: puts.to_vec(), ..World::default() }
    }

    /// In which a shard answers an order otherwise.
    fn with(of: u16, order: &'static str, answer: Option<Result<Message, &'static str>>) -> World {
        let shard = move |shard, what: &str, before| match (shard, what) == (of, order) {
            true => answer.clone().map(|answer| answer.map_err(str::to_owned)),
            false => done(what, before),
        };
        World { shard: Box::new(shard), ..World::default() }
    }
}

#[test]
fn all_goes_well() {
    let world = World::default().run(1);
    let next = plan(1).after.coordinator.0;
    let both = |what: &'static str| [Did::Tell(2, what), Did::Tell(3, what)];
    let expected = [
        &both("Prepare")[..],
        &[Did::Hold],
        &both("Fill"),
        &both("Fill"),
        &[Did::Freeze, Did::Tell(next, "HandOver"), Did::Tell(next, "HandOver")],
        &both("Fill"),
        &[Did::Put { restores: false }],
        // The next coordinator comes after the other new owner, and the present one last: here it is also the shard that
        // is left.
        &[Did::Tell(5 - next, "Switch"), Did::Tell(next, "Switch"), Did::Tell(1, "Switch")],
        &[Did::Finish(Ok(()))],
    ];
    assert_eq!(world.did, expected.concat());
    let expected = [
        ("taking memory", 0, 0),
        ("waiting for the step", 0, 0),
        ("moving blocks", 0, 0),
        ("moving blocks", 14, 16),
        ("handing over", 0, 0),
        ("asking the registry", 0, 0),
        ("switching", 0, 0),
    ];
    assert_eq!(world.shown, expected);
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
    // The message has a limit.
    let room = (16 << 20) - record().encode().unwrap().len() - 16;
    let metadata = BTreeMap::from([("long".to_owned(), "x".repeat(room))]);
    let long = ModelRecord { metadata, ..record() };
    assert!(long.encode().is_ok());
    let why = said(1, long, &[shard(1, true), shard(2, false), shard(3, false)]);
    assert!(why.contains("takes 16777") && why.contains("larger blocks"), "{why}");
}

#[test]
fn what_fails_before_the_registry_is_asked_changes_nothing() {
    let (no, none) = (|| Some(Err("no")), || None);
    let lost = |shard, what: &str, before| match (shard, what, before) {
        (3, "Fill", 2) => Some(Err("no".into())),
        _ => done(what, before),
    };
    let held_up_by = Some("slow learns".into());
    let unwanted =
        |since, why: &str| World { unwanted: Some((since, Refusal::other(why))), ..World::default() };
    let rows: [(World, bool, &str); 17] = [
        // A shard refuses, or hangs, at any step.
        (World::with(3, "Prepare", no()), false, "shard 3 at node3:7070: no"),
        (World::with(1, "Prepare", none()), false, "shard 1 at node1:7070: it does not answer"),
        (World::with(3, "Prepare", Some(Ok(Message::Filled { blocks: 1, of: 1 }))), false, "something else"),
        (World::with(3, "Fill", Some(Ok(Message::Done))), true, "something else"),
        (World::with(3, "Fill", no()), true, "shard 3 at node3:7070: no"),
        (World::with(1, "Fill", none()), true, "shard 1 at node1:7070: it does not answer"),
        (World::with(1, "HandOver", no()), true, "shard 1 at node1:7070: no"),
        (World::with(1, "HandOver", none()), true, "shard 1 at node1:7070: it does not answer"),
        // It was started anew meanwhile.
        (World { shard: Box::new(lost), ..World::default() }, true, "shard 3 at node3:7070: no"),
        // A step does not end.
        (
            World { held_up_by, ..World::default() },
            true,
            "slow learns: see to that and run the command again",
        ),
        // The model is deleted, or the move is stopped.
        (unwanted("taking memory", "no model"), false, "no model"),
        (unwanted("taking memory", "stopped"), false, "stopped"),
        (unwanted("waiting for the step", "stopped"), true, "stopped"),
        (unwanted("moving blocks", "stopped"), true, "stopped"),
        (unwanted("handing over", "stopped"), true, "stopped"),
        // The registry is not there, or refuses.
        (World::puts(&[Err(PutError::NotSent("nobody listens".into()))]), true, "nobody listens"),
        (World::puts(&[refused(Refusal::other("a number is taken"))]), true, "a number is taken"),
    ];
    for (world, held, words) in rows {
        let world = world.fails(words);
        assert_eq!(world.has(&Did::Hold), held, "{words}: {:?}", world.did);
    }
}

#[test]
fn the_job_is_held_no_longer_than_it_may() {
    // The hold is half of the commits' timeout.
    let hold = plan(2).hold;
    assert_eq!(hold, Controls::default().timeout / 2);
    let held_up_by = Some("slow learns".into());
    let text = "within the 60s for which the job may be held: slow learns: see to that";
    let world = World { held_up_by, ..World::default() }.fails(text);
    assert!((hold..hold + SECOND).contains(&world.now), "{:?}", world.now);
    // Also while blocks move, and though shards answer.
    let one = Some(Ok(Message::Filled { blocks: 1, of: 8 }));
    let text =
        "9 of 16 blocks were moved within the 60s for which the job may be held: hold it longer (--hold)";
    let world = World::with(3, "Fill", one).fails(text);
    assert!((hold..hold + SECOND).contains(&world.now), "{:?}", world.now);
    // A shard that takes its memory for long holds nobody up.
    let world = World::with(1, "Prepare", None).fails("does not answer");
    assert!((MEMORY_TIMEOUT..MEMORY_TIMEOUT + SECOND).contains(&world.now), "{:?}", world.now);
}

#[test]
fn it_can_be_stopped_until_the_registry_is_asked() {
    let unwanted = Some(("asking the registry", Refusal::other("stopped")));
    let world = World { unwanted, puts: vec![unknown(), Ok(())], ..World::default() }.succeeds();
    assert_eq!(world.outcome(), Some(&Ok(())));
}

#[test]
fn a_registry_that_may_have_done_it_is_asked_until_it_says() {
    let (puts, restores) = (Did::Put { restores: false }, Did::Put { restores: true });
    let not_sent = || Err(PutError::NotSent("nobody listens".into()));
    let other = |epoch| refused(Refusal::Epoch { expected: Epoch(epoch), got: Epoch(1) });
    let taken = || {
        let (model, expected, got) = ("m".into(), Generation(9), Generation(1));
        refused(Refusal::Generation { model, expected, got })
    };
    let gone = || refused(Refusal::NoModel("m".into()));
    let asked = |world: &World| -> Vec<Did> {
        world.did.iter().filter(|did| matches!(did, Did::Put { .. })).cloned().collect()
    };
    let warnings = |world: &World| world.did.iter().filter(|did| matches!(did, Did::Warn(_))).count();
    // Whether the first request was carried out is not known: neither time nor a stop changes that.
    let world = World::puts(&[&[unknown()][..], &vec![not_sent(); 2000], &[other(2)]].concat());
    let world = world.succeeds();
    assert_eq!((asked(&world).len(), warnings(&world)), (2002, 1));
    assert!(world.has(&Did::Warn("whether the model has moved is not known: cut off".into())));
    assert!(world.now > DEADLINE);
    // A registry that was started anew may have lost the record, which is put there. If it has another model
    // by then, it says so. A refusal of that request says nothing about the outcome of the one before it.
    for (answer, warns) in [(Ok(()), 1), (taken(), 2)] {
        let number_taken = refused(Refusal::other("a number is taken"));
        let world = World::puts(&[unknown(), gone(), number_taken, answer]).succeeds();
        assert_eq!(asked(&world), [&puts, &puts, &restores, &restores].map(Did::clone));
        assert_eq!(warnings(&world), warns);
    }
    // If the first request never came, the record is somebody else's. An answer that says no says so of all of them.
    for (answers, words) in [
        (vec![other(2)], "the shard's is 2"),
        (vec![gone()], "there is no model"),
        (vec![taken()], "is of generation 9"),
        (vec![unknown(), refused(Refusal::other("it is too long"))], "it is too long"),
        (vec![unknown(), other(1)], "the shard's is 1"),
    ] {
        World::puts(&answers).fails(words);
    }
}

#[test]
fn shards_that_do_not_know_are_told_until_they_do() {
    // One answers in the fourth round.
    let shard = |shard, what: &str, before| match (shard, what) {
        (3, "Switch") if before < 3 => None,
        _ => done(what, before),
    };
    let world = World { shard: Box::new(shard), ..World::default() }.succeeds();
    let told =
        |world: &World, shard| world.did.iter().filter(|did| **did == Did::Tell(shard, "Switch")).count();
    assert_eq!([1, 2, 3].map(|shard| told(&world, shard)), [1, 1, 4]);
    assert_eq!(world.outcome(), Some(&Ok(())));
    // One never does: that is said, and it asks the registry when it can.
    let world = World::with(3, "Switch", None).succeeds();
    let why = world.outcome().unwrap().as_ref().unwrap_err().to_string();
    assert!(
        why.contains("has moved, but not all shards know: shard 3 at node3:7070: it does not answer"),
        "{why}"
    );
    assert!(
        told(&world, 3) > 3 && (SWITCHING..SWITCHING + 5 * SECOND).contains(&world.now),
        "{:?}",
        world.now
    );
}

#[test]
fn a_model_that_is_deleted_does_not_come_back() {
    // The end of the coordinator means nothing once the registry has been asked: it is the old one.
    let unwanted = Some(("asking the registry", Refusal::other("no model")));
    let world =
        World { unwanted, deleted: true, ..World::with(3, "Switch", Some(Err("no blocks"))) }.succeeds();
    assert_eq!(world.outcome(), Some(&Err(Refusal::NoModel("m".into()))));
}

#[test]
fn whoever_does_not_forget_is_told_for_a_while() {
    let stopped = || Some(("taking memory", Refusal::other("stopped")));
    let shard = |shard, what: &str, before| match (shard, what) {
        (3, "Abandon") => None,
        _ => done(what, before),
    };
    let world = World { unwanted: stopped(), shard: Box::new(shard), ..World::default() }.fails("stopped");
    let told = |shard| world.did.iter().filter(|did| **did == Did::Tell(shard, "Abandon")).count();
    assert!(told(1) == 1 && told(3) > 10, "{} {}", told(1), told(3));
    assert!((ABANDONING..ABANDONING + 5 * SECOND).contains(&world.now), "{:?}", world.now);
    assert!(matches!(world.did.last(), Some(Did::Warn(_))), "{:?}", world.did);
}

#[test]
fn a_process_that_ends_says_so_and_does_nothing_more() {
    let ends = || World { ends: CHECK_INTERVAL, ..World::default() };
    for world in [
        World { held_up_by: Some("slow learns".into()), ..ends() },
        World { puts: vec![unknown()], ..ends() },
        World { shard: World::with(3, "Switch", None).shard, ..ends() },
    ] {
        let world = world.run(2);
        assert_eq!(world.did.last(), Some(&Did::Finish(Err(Refusal::other("the shard shuts down")))));
        assert!(!world.has(&Did::Release) && !world.has(&Did::Tell(1, "Abandon")), "{:?}", world.did);
    }
}
