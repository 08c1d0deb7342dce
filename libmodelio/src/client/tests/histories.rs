//! Random histories of a client whose connections come and go, whose messages are lost, and whose model moves; with a
//! coordinator and shards that keep in mind what is still to be asked for.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use proptest::prelude::*;

use crate::client::core::{Action, ClientCore, Now, Push};
use crate::vocabulary::block_map::BlockMap;
use crate::vocabulary::block_ranges::BlockRanges;
use crate::vocabulary::ids::{
    BlockId, ClientId, Epoch, Incarnation, LearnerId, PlanId, ShardId, Step, Version,
};
use crate::vocabulary::members::Attached;
use crate::vocabulary::shard_error::ShardError;
use crate::wire::{Granted, JobState, LearnerState, Message, Refusal};

const BLOCKS: u32 = 6;
const LEARNERS: [LearnerId; 2] = [LearnerId(1), LearnerId(2)];
type Key = (LearnerId, Step);

/// What a coordinator knows that never forgets, whatever host it is on.
#[derive(Default)]
struct Coordinator {
    /// Contributions that may be granted.
    pending: BTreeMap<Key, BlockRanges>,
    waiting: BTreeMap<u64, Key>,
    answered: BTreeMap<u64, Message>,
    acked_through: u64,
    /// Of each learner, the last step that counts, and in which version.
    counts: BTreeMap<LearnerId, (Step, Version)>,
    plan: Option<(PlanId, Vec<Key>, BTreeSet<u32>)>,
    last_plan: u64,
    sequence: u64,
    version: Version,
}

impl Coordinator {
    fn counted(&self, learner: LearnerId) -> Step {
        self.counts.get(&learner).map_or(Step(0), |&(step, _)| step)
    }

    fn is_planned(&self, key: &Key) -> bool {
        self.plan.as_ref().is_some_and(|(_, keys, _)| keys.contains(key))
    }

    fn state(&mut self) -> Message {
        self.sequence += 1;
        let learner = |&learner: &LearnerId| {
            let (step, published_in) = self.counts.get(&learner).copied().unwrap_or_default();
            let (incarnation, joined_at, attached) = (Incarnation(1), Version(0), Attached::No);
            LearnerState { learner, incarnation, step, unpublished: false, published_in, joined_at, attached }
        };
        Message::State(Box::new(JobState {
            sequence: self.sequence,
            version: self.version,
            acked_through: Some(self.acked_through),
            learners: LEARNERS.iter().map(learner).collect(),
            ..JobState::default()
        }))
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Doing {
    Idle,
    Waits,
    /// Its last commit timed out, or was taken back.
    Unsure,
}

struct Program {
    doing: Doing,
    step: Step,
    blocks: BlockRanges,
}

struct World {
    core: ClientCore,
    epoch: u64,
    partitions: usize,
    now: Now,
    coordinator: Coordinator,
    connected: bool,
    /// To the coordinator.
    wire: VecDeque<(u64, Message)>,
    programs: BTreeMap<LearnerId, Program>,
    /// Whose request it is, until it is answered.
    tokens: BTreeMap<u64, (LearnerId, bool)>,
    next_token: u64,
    /// Payload that is not released.
    held: BTreeSet<Key>,
    /// What shards were asked for and have not sent.
    asked: Vec<(Version, u32)>,
    reserved: Vec<(Version, u32)>,
    /// What the back buffer holds; none for half a block.
    back: Vec<Option<Version>>,
    draws: VecDeque<u16>,
}

impl World {
    fn new(draws: Vec<u16>) -> World {
        let map = BlockMap::striped(BLOCKS, &[ShardId(1), ShardId(2)]).unwrap();
        let mut core = ClientCore::new(&map).apart(ClientId(7));
        core.shown(Version(0), Now::ZERO, &mut Vec::new());
        let program = |_| Program { doing: Doing::Unsure, step: Step(1), blocks: Vec::new() };
        let mut world = World {
            core,
            epoch: 1,
            partitions: 2,
            now: Now::ZERO,
            coordinator: Coordinator::default(),
            connected: false,
            wire: VecDeque::new(),
            programs: LEARNERS.into_iter().map(|learner| (learner, program(()))).collect(),
            tokens: BTreeMap::new(),
            next_token: 1,
            held: BTreeSet::new(),
            asked: Vec::new(),
            reserved: Vec::new(),
            back: vec![None; BLOCKS as usize],
            draws: draws.into(),
        };
        world.connect();
        for learner in LEARNERS {
            let (token, deadline) = (u64::MAX - u64::from(learner.0), world.now + Duration::from_secs(1));
            let join = Message::Join { name: format!("{learner}") };
            world.core.request(token, join, deadline, world.now, &mut Vec::new());
            let joined = Message::Joined { learner, incarnation: Incarnation(1), since: 0 };
            world.core.from_coordinator(u64::from(learner.0), joined, world.now, &mut Vec::new());
        }
        world
    }

    fn draw(&mut self, below: usize) -> usize {
        self.draws.pop_front().map_or(0, usize::from) % below
    }

    fn on_core<R>(&mut self, f: impl FnOnce(&mut ClientCore, Now, &mut Vec<Action>) -> R) -> R {
        let mut actions = Vec::new();
        let result = f(&mut self.core, self.now, &mut actions);
        actions.into_iter().for_each(|action| self.act(action));
        result
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::ToCoordinator(_, Message::SourceGone { .. }) => panic!("what was granted is not held"),
            Action::ToCoordinator(request, message) => {
                assert!(self.connected, "said to nobody: {message:?}");
                self.wire.push_back((request, message));
            }
            Action::ToShard(partition, _) | Action::Wake(partition) => assert!(partition < self.partitions),
            Action::Answer(token, result) => {
                let (learner, is_open) = self.tokens.remove(&token).expect("answered once");
                self.answered(learner, is_open, result);
            }
            Action::Release(learner, step) => {
                let key = (learner, step);
                assert!(self.held.remove(&key), "{key:?} is released twice");
                assert!(
                    !self.coordinator.pending.contains_key(&key),
                    "{key:?} is released, and may be asked for"
                );
                let under_way = |(_, message): &(u64, Message)| matches!(message, Message::Commit { learner: l, step: s, .. } if (*l, *s) == key);
                let counts = step <= self.coordinator.counted(learner);
                assert!(
                    counts || !self.wire.iter().any(under_way),
                    "{key:?} is on its way to the coordinator"
                );
            }
            Action::Pulled(version) => {
                assert_eq!(self.reserved, [], "blocks are reserved in what is to be shown");
                assert_eq!(self.back, vec![Some(version); BLOCKS as usize], "not whole");
                assert!(version > self.core.version());
                self.back.fill(None);
                self.on_core(|core, now, actions| core.shown(version, now, actions));
            }
            Action::State | Action::Begins { .. } => {}
            other => panic!("{other:?}"),
        }
    }

    fn answered(&mut self, learner: LearnerId, is_open: bool, result: Result<Message, Refusal>) {
        let program = self.programs.get_mut(&learner).unwrap();
        program.doing = match result {
            Ok(Message::Opened { step, .. }) => {
                program.step = step;
                Doing::Idle
            }
            Ok(Message::Done) => {
                assert!(
                    program.step <= self.coordinator.counted(learner),
                    "acknowledged, but it does not count"
                );
                program.step = program.step.next();
                Doing::Idle
            }
            Ok(other) => panic!("{other:?}"),
            Err(_) if is_open => Doing::Unsure,
            Err(Refusal::Shard(ShardError::TimedOut(_) | ShardError::Interrupted)) => Doing::Unsure,
            Err(other) => panic!("{other}"),
        };
    }

    fn connect(&mut self) {
        self.connected = true;
        self.wire.clear();
        self.on_core(|core, now, actions| core.coordinator_up(now, actions));
        for partition in 0..self.partitions {
            self.on_core(|core, now, actions| core.shard_up(partition, now, actions));
        }
    }

    /// A program goes on.
    fn step(&mut self, learner: LearnerId) {
        let again = self.draw(2) == 0;
        let seconds = [1, 3, 30][self.draw(3)];
        let new: u32 = 1 + self.draw((1 << BLOCKS) - 1) as u32;
        let program = self.programs.get_mut(&learner).unwrap();
        let was_committed = self.held.contains(&(learner, program.step));
        let message = match program.doing {
            Doing::Waits => return,
            Doing::Unsure if !again || !was_committed => Message::Open { learner },
            Doing::Unsure | Doing::Idle => {
                if !was_committed {
                    program.blocks =
                        (0..BLOCKS).filter(|block| new >> block & 1 == 1).map(|b| b..b + 1).collect();
                }
                let (step, blocks) = (program.step, program.blocks.clone());
                self.held.insert((learner, step));
                let tensors = vec![0..1];
                Message::Commit {
                    learner,
                    step,
                    blocks,
                    tensors,
                    partly: Some(Default::default()),
                    contents: Default::default(),
                    weight: Default::default(),
                    timeout_ms: seconds * 1000,
                    lent: false,
                    given_up: None,
                    base: None,
                }
            }
        };
        program.doing = Doing::Waits;
        let token = self.next_token;
        self.next_token += 1;
        self.tokens.insert(token, (learner, matches!(message, Message::Open { .. })));
        let deadline = self.now + Duration::from_secs(seconds.into());
        self.on_core(|core, now, actions| core.request(token, message, deadline, now, actions));
    }

    /// The coordinator says something, which may be lost.
    fn coordinator_says(&mut self, request: u64, message: Message, lossless: bool) {
        if self.connected && (lossless || self.draw(4) > 0) {
            self.on_core(|core, now, actions| core.from_coordinator(request, message, now, actions));
        }
    }

    fn coordinator_answers(&mut self, request: u64, answer: Message, lossless: bool) {
        self.coordinator.waiting.remove(&request);
        self.coordinator.answered.insert(request, answer.clone());
        self.coordinator_says(request, answer, lossless);
    }

    /// The coordinator hears what is first on its wire.
    fn deliver_to_coordinator(&mut self, lossless: bool) {
        let Some((request, message)) = self.wire.pop_front() else { return };
        if let Message::AckThrough { request, .. } = message {
            self.coordinator.acked_through = self.coordinator.acked_through.max(request);
            self.coordinator.answered =
                self.coordinator.answered.split_off(&(self.coordinator.acked_through + 1));
        }
        if request == 0
            || request <= self.coordinator.acked_through
            || self.coordinator.waiting.contains_key(&request)
        {
            return;
        }
        if let Some(answer) = self.coordinator.answered.get(&request).cloned() {
            return self.coordinator_says(request, answer, lossless);
        }
        match message {
            Message::Commit { learner, step, .. } if step <= self.coordinator.counted(learner) => {
                self.coordinator_answers(request, Message::Done, lossless);
            }
            Message::Commit { learner, step, blocks, .. } => {
                assert_eq!(step, self.coordinator.counted(learner).next());
                self.coordinator.waiting.insert(request, (learner, step));
                self.coordinator.pending.insert((learner, step), blocks);
            }
            Message::Open { learner } => {
                let step = self.coordinator.counted(learner).next();
                if self.coordinator.is_planned(&(learner, step)) {
                    // It cannot be taken back now; asked again when that is decided.
                    return;
                }
                self.coordinator.pending.remove(&(learner, step));
                let withdrawn: Vec<u64> = self
                    .coordinator
                    .waiting
                    .iter()
                    .filter(|(_, key)| **key == (learner, step))
                    .map(|(&id, _)| id)
                    .collect();
                for id in withdrawn {
                    self.coordinator_answers(id, Message::Refused(ShardError::Interrupted.into()), lossless);
                }
                self.coordinator_answers(request, Message::Opened { step, staging_lent: false }, lossless);
            }
            _ => {}
        }
    }

    fn coordinator_plans(&mut self, lossless: bool) {
        if self.coordinator.plan.is_none() {
            let mut keys: Vec<Key> = self.coordinator.pending.keys().copied().collect();
            if keys.len() > 1 && self.draw(2) == 0 {
                keys.truncate(1);
            }
            if keys.is_empty() {
                return;
            }
            self.coordinator.last_plan += 1;
            self.coordinator.plan = Some((PlanId(self.coordinator.last_plan), keys, BTreeSet::new()));
        }
        let Some((plan, keys, _)) = &self.coordinator.plan else { return };
        let payload = Granted::Contributions { of: keys.clone(), replaces: false, open: None };
        let grant = Message::Grant { plan: *plan, payload, counted: PlanId(0) };
        self.coordinator_says(0, grant, lossless);
    }

    /// A shard takes what it is sent, which may be lost.
    fn shard_takes(&mut self, partition: usize, lossless: bool) {
        while let Some(Push { plan, block, .. }) = self.core.next_push(partition, self.now) {
            let (_, Granted::Contributions { of, .. }) = self.core.outgoing().unwrap() else { panic!() };
            let holders: Vec<Key> =
                of.iter().copied().filter(|&(l, s)| self.core.holds(l, s, block)).collect();
            assert!(!holders.is_empty() && holders.iter().all(|key| self.held.contains(key)));
            let lost = !lossless && self.draw(8) == 0;
            if let Some((running, _, came)) = &mut self.coordinator.plan
                && *running == plan
                && !lost
            {
                came.insert(block.0);
            }
        }
        if let Some((plan, keys, came)) = &self.coordinator.plan
            && lossless
        {
            let wanted: BTreeSet<u32> =
                keys.iter().flat_map(|key| self.coordinator.pending[key].clone()).flatten().collect();
            let blocks = wanted.difference(came).map(|&block| block..block + 1).collect();
            let missing = Message::Missing { plan: *plan, blocks };
            self.on_core(|core, now, actions| core.from_shard(partition, missing, now, actions));
        }
    }

    fn coordinator_concludes(&mut self, lossless: bool) {
        let Some((plan, keys, came)) = &self.coordinator.plan else { return };
        let mut wanted = keys.iter().flat_map(|key| self.coordinator.pending[key].clone()).flatten();
        if !wanted.all(|block| came.contains(&block)) {
            return;
        }
        let (plan, keys) = (*plan, keys.clone());
        self.coordinator.plan = None;
        self.coordinator.version = self.coordinator.version.next();
        for (learner, step) in &keys {
            assert!(self.coordinator.counted(*learner) < *step, "counted twice");
            self.coordinator.counts.insert(*learner, (*step, self.coordinator.version));
            self.coordinator.pending.remove(&(*learner, *step));
        }
        let done: Vec<u64> = self
            .coordinator
            .waiting
            .iter()
            .filter(|(_, key)| keys.contains(key))
            .map(|(&id, _)| id)
            .collect();
        for id in done {
            self.coordinator_answers(id, Message::Done, lossless);
        }
        self.coordinator_says(0, Message::Over { plan }, lossless);
    }

    fn moves(&mut self) {
        let owners: Vec<ShardId> =
            (0..BLOCKS).map(|_| ShardId(1 + self.draw(4) as u16 + self.epoch as u16 % 2)).collect();
        // What is under way is void, and the answers that the old coordinator has under way are lost.
        self.coordinator.plan = None;
        self.connected = false;
        self.wire.clear();
        self.asked.clear();
        self.epoch += 1;
        let map = BlockMap::from_owners(Epoch(self.epoch), owners).unwrap();
        self.partitions = map.shares().len();
        for times in 0..1 + self.draw(2) {
            assert_eq!(self.on_core(|core, now, actions| core.moved(&map, now, actions)), times == 0);
        }
        assert!(self.reserved.is_empty() || self.core.pulling().is_none());
    }

    fn pull(&mut self, partition: usize) {
        while let Some(message) = self.core.next_pull(partition, 8, self.now) {
            let Message::Pull { version, blocks, .. } = message else { panic!("{message:?}") };
            self.asked.extend(blocks.map(|block| (version, block)));
        }
    }

    fn reserve_a_block(&mut self) {
        if self.asked.is_empty() {
            return;
        }
        let at = self.draw(self.asked.len());
        let (version, block) = self.asked.swap_remove(at);
        if self.core.reserve(version, BlockId(block)) {
            self.back[block as usize] = None;
            self.reserved.push((version, block));
        }
    }

    fn end_a_reservation(&mut self, lossless: bool) {
        if self.reserved.is_empty() {
            return;
        }
        let at = self.draw(self.reserved.len());
        let whole = lossless || self.draw(5) > 0;
        let (version, block) = self.reserved.swap_remove(at);
        self.back[block as usize] = whole.then_some(version);
        self.on_core(|core, now, actions| core.end_reservation(version, BlockId(block), whole, now, actions));
    }

    fn pass(&mut self, millis: u64) {
        self.now += Duration::from_millis(millis);
        self.on_core(|core, now, actions| core.tick(now, actions));
    }

    /// Something happens.
    fn happens(&mut self) {
        let partition = self.draw(self.partitions);
        match self.draw(20) {
            0..4 => {
                let learner = LEARNERS[self.draw(2)];
                self.step(learner);
            }
            4..8 => self.deliver_to_coordinator(false),
            8 => self.coordinator_plans(false),
            9 => self.shard_takes(partition, false),
            10 => self.coordinator_concludes(false),
            11 => {
                // Time is up for a commit; what becomes of its contribution is open.
                let planned = |id: &u64| self.coordinator.is_planned(&self.coordinator.waiting[id]);
                if let Some(id) = self.coordinator.waiting.keys().copied().find(|id| !planned(id)) {
                    let late = ShardError::TimedOut("late".into());
                    self.coordinator_answers(id, Message::Refused(late.into()), false);
                }
            }
            12 => {
                let state = self.coordinator.state();
                self.coordinator_says(0, state, false);
            }
            13 => self.pull(partition),
            14 => self.reserve_a_block(),
            15 => self.end_a_reservation(false),
            16 => {
                let millis = 50 + self.draw(1500) as u64;
                self.pass(millis);
            }
            17 => {
                self.connected = false;
                self.on_core(|core, now, actions| core.coordinator_down(now, actions));
            }
            18 => self.connect(),
            _ => self.moves(),
        }
    }

    /// From here on nothing is lost, and all comes to its end.
    fn ends(&mut self) {
        self.draws.clear();
        self.connect();
        for _ in 0..100 {
            for learner in LEARNERS {
                if self.programs[&learner].doing == Doing::Unsure {
                    self.step(learner);
                }
            }
            while !self.wire.is_empty() {
                self.deliver_to_coordinator(true);
            }
            self.coordinator_plans(true);
            (0..self.partitions).for_each(|partition| self.shard_takes(partition, true));
            (0..self.partitions).for_each(|partition| self.shard_takes(partition, true));
            self.coordinator_concludes(true);
            let state = self.coordinator.state();
            self.coordinator_says(0, state, true);
            for partition in 0..self.partitions {
                self.pull(partition);
                while !self.asked.is_empty() {
                    self.reserve_a_block();
                }
                while !self.reserved.is_empty() {
                    self.end_a_reservation(true);
                }
            }
            self.pass(1000);
        }
        assert!(self.tokens.is_empty(), "not answered: {:?}", self.tokens);
        assert_eq!(self.core.version(), self.coordinator.version);
        assert!(self.coordinator.pending.is_empty());
        assert_eq!((self.core.kept(), &self.held), ((0, 0), &BTreeSet::new()));
    }
}

proptest! {
    #[test]
    fn each_request_is_answered_once_and_nothing_that_may_be_asked_for_is_released(
        draws in prop::collection::vec(any::<u16>(), 0..1500),
    ) {
        let mut world = World::new(draws);
        while !world.draws.is_empty() {
            world.happens();
        }
        world.ends();
    }
}
