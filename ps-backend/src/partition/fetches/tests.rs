//! Fetches of several models' connections that share few slots, in random order: every payload is used, no connection
//! waits for ever, and none fetches a payload in vain more than once.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::ids::{ClientId, PlanId, Version};
use libmodelio::wire::Work;
use proptest::prelude::*;

use super::*;
use crate::partition::core::{
    Action, PartitionCore, PartitionPlan, Placement, ReservationOutcome, ReservedPlace, Sent, Source,
};

const PLAN: PlanId = PlanId(1);

/// Slots, and whether one was given back since that was last looked at.
#[derive(Clone)]
struct Slots {
    free: Rc<RefCell<Vec<bool>>>,
    freed: Rc<Cell<bool>>,
}

impl Slots {
    fn new(count: usize) -> Slots {
        Slots { free: Rc::new(RefCell::new(vec![true; count])), freed: Rc::default() }
    }

    fn take(&self, next: &mut usize, in_turn: bool) -> Option<Slot> {
        let mut free = self.free.borrow_mut();
        let count = free.len();
        let tries = if in_turn { 1 } else { count };
        let index = (0..tries).map(|n| (*next + n) % count).find(|&index| free[index])?;
        free[index] = false;
        *next = (index + 1) % count;
        Some(Slot { slots: self.clone(), index })
    }

    fn count_free(&self) -> usize {
        self.free.borrow().iter().filter(|&&free| free).count()
    }
}

struct Slot {
    slots: Slots,
    index: usize,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.free.borrow_mut()[self.index] = true;
        self.slots.freed.set(true);
    }
}

/// A connection of one of the models' clients.
struct Connection {
    model: usize,
    client: ClientId,
    to_name: VecDeque<u32>,
    fetches: Fetches<u32, Slot>,
    woken: bool,
    of: Of,
}

/// What a connection has done and waits for.
#[derive(Default)]
struct Of {
    /// The device is at work on these.
    under_way: VecDeque<(u32, Option<Slot>)>,
    reduced: Vec<u32>,
    reads: HashMap<u32, usize>,
    waits_for_core: bool,
    waits_for_slot: bool,
}

struct World {
    cores: Vec<PartitionCore>,
    shared: Shared,
    connections: Vec<Connection>,
}

/// What the connections share.
struct Shared {
    slots: Slots,
    next: usize,
    in_turn: bool,
    /// First contributions are fetched to where they belong.
    direct: bool,
    turns: RefCell<Turns>,
}

struct Sides<'a> {
    who: u64,
    model: usize,
    client: ClientId,
    core: &'a mut PartitionCore,
    shared: &'a mut Shared,
    of: &'a mut Of,
    moved: bool,
}

/// Clients of different models are different ones.
fn client_of(model: usize, client: ClientId) -> ClientId {
    ClientId(client.0 + 100 * model as u64)
}

impl Sides<'_> {
    fn client(&self) -> ClientId {
        client_of(self.model, self.client)
    }
}

impl Edge<u32, Slot> for Sides<'_> {
    type Error = std::convert::Infallible;

    fn turn(&mut self, &block: &u32) -> Result<Turn, Self::Error> {
        Ok(match self.core.peek(self.client, PLAN, block, Sent::default()) {
            Placement::Later => {
                self.of.waits_for_core = true;
                Turn::Later
            }
            Placement::Duplicate | Placement::Unwanted => Turn::Never,
            _ => Turn::Now,
        })
    }

    fn is_due(&mut self, &block: &u32) -> bool {
        let placement = self.core.peek(self.client, PLAN, block, Sent::default());
        matches!(placement, Placement::Ready(_))
    }

    fn reduce_fetched(&mut self, &block: &u32, _: &Slot) -> Result<bool, Self::Error> {
        match self.core.reserve(self.client, PLAN, block, Sent::default()) {
            Placement::Later => {
                self.of.waits_for_core = true;
                Ok(false)
            }
            Placement::Duplicate | Placement::Unwanted => Ok(true),
            _ => {
                self.core.end(self.client, PLAN, block, ReservationOutcome::Complete, &mut Vec::new());
                self.moved = true;
                Ok(true)
            }
        }
    }

    fn over(&mut self, block: u32) {
        self.of.reduced.push(block);
    }

    fn fetch_direct(&mut self, &block: &u32) -> Result<bool, Self::Error> {
        let placement = self.core.peek(self.client, PLAN, block, Sent::default());
        let is_first = matches!(placement, Placement::Ready(ReservedPlace { first: true, last: false, .. }));
        if !self.shared.direct || !is_first {
            return Ok(false);
        }
        self.core.reserve(self.client, PLAN, block, Sent::default());
        self.of.under_way.push_back((block, None));
        *self.of.reads.entry(block).or_default() += 1;
        Ok(true)
    }

    fn has_room(&self) -> bool {
        self.shared.turns.borrow_mut().may_begin(self.who, self.client())
    }

    fn is_pressed(&self) -> bool {
        self.shared.turns.borrow().is_pressed(self.who)
    }

    fn slot(&mut self) -> Option<Slot> {
        let slot = self.shared.slots.take(&mut self.shared.next, self.shared.in_turn);
        self.of.waits_for_slot |= slot.is_none();
        slot
    }

    fn fetch(&mut self, &block: &u32, slot: Slot) -> Result<(), Self::Error> {
        self.of.under_way.push_back((block, Some(slot)));
        self.shared.turns.borrow_mut().began(self.client());
        *self.of.reads.entry(block).or_default() += 1;
        Ok(())
    }
}

impl World {
    /// `models` models of `blocks` blocks, each of `clients` clients with a connection or two, which add up in order.
    fn new(models: usize, clients: u64, blocks: u32, connections: u64, slots: usize, in_turn: bool) -> World {
        let mut all = Vec::new();
        let mut cores = Vec::new();
        for model in 0..models {
            let mut core = PartitionCore::new(blocks, Version(0));
            let mut every = FixedBitSet::with_capacity(blocks as usize);
            every.insert_range(..);
            let source = |client| Source {
                client: ClientId(client),
                blocks: every.clone(),
                check: false,
                provisional: false,
            };
            let sources = (0..clients).map(source).collect();
            let work = Work::Reduce {
                step: Default::default(),
                tensors: Default::default(),
                groups: Default::default(),
                factors: Default::default(),
                fresh_state: false,
            };
            let plan =
                PartitionPlan { id: PLAN, work, base: Version(0), sources, ordered: true, in_place: false };
            let mut actions = Vec::new();
            core.start(plan, false, &mut actions).unwrap();
            assert_eq!(actions, [Action::Begin(PLAN)]);
            core.begun(PLAN, &mut actions);
            cores.push(core);
            for client in 0..clients {
                for number in 0..connections {
                    all.push(Connection {
                        model,
                        client: ClientId(client),
                        to_name: (0..blocks)
                            .filter(|block| u64::from(*block) % connections == number)
                            .collect(),
                        fetches: Fetches::default(),
                        woken: false,
                        of: Of::default(),
                    });
                }
            }
        }
        let (slots, turns) = (Slots::new(slots), RefCell::new(Turns::new(slots, true)));
        World { cores, shared: Shared { slots, next: 0, in_turn, direct: false, turns }, connections: all }
    }

    /// The payload that was asked for first on a connection has come; returns the connections to go on.
    fn came(&mut self, who: usize, (block, slot): (u32, Option<Slot>)) {
        let connection = &mut self.connections[who];
        let (model, is_direct) = (connection.model, slot.is_none());
        connection.fetches.came(slot);
        if is_direct {
            self.cores[model].end(
                connection.client,
                PLAN,
                block,
                ReservationOutcome::Complete,
                &mut Vec::new(),
            );
            let others = self.connections.iter_mut().filter(|other| other.model == model);
            others.for_each(|other| other.woken |= other.of.waits_for_core);
            return;
        }
        let client = client_of(self.connections[who].model, self.connections[who].client);
        let barred = self.shared.turns.get_mut().came(client, 1);
        barred.iter().for_each(|&who| self.connections[who as usize].woken = true);
    }

    /// A connection goes on, as one of a shard does.
    fn again(&mut self, who: usize) {
        let connection = &mut self.connections[who];
        connection.woken = false;
        (connection.of.waits_for_core, connection.of.waits_for_slot) = (false, false);
        let mut sides = Sides {
            who: who as u64,
            model: connection.model,
            client: connection.client,
            core: &mut self.cores[connection.model],
            shared: &mut self.shared,
            of: &mut connection.of,
            moved: false,
        };
        let Ok(stand) = connection.fetches.advance(&mut sides);
        let moved = sides.moved;
        let then = self.shared.turns.get_mut().stands(who as u64, stand);
        match then {
            Then::GiveBack => drop(connection.fetches.give_back()),
            Then::Wake(idle) => idle.iter().for_each(|&who| self.connections[who as usize].woken = true),
        }
        let model = self.connections[who].model;
        let freed = self.shared.slots.freed.take();
        for other in &mut self.connections {
            other.woken |= moved && other.model == model && other.of.waits_for_core;
            other.woken |= freed && other.of.waits_for_slot;
        }
    }

    /// Goes on in any order until nothing happens any more. Clients of `silent` never name anything, and payloads of
    /// those of `stalled` never come.
    fn run(&mut self, seed: u64, silent: fn(&Connection) -> bool, stalled: fn(&Connection) -> bool) {
        let mut random = fastrand::Rng::with_seed(seed);
        let all: usize = self.connections.iter().map(|connection| connection.to_name.len()).sum();
        // The limit counts each payload named and used, each wake-up by a completed fetch, and each by a slot
        // given back. Far more means an endless loop.
        let most = 100 + 8 * all * self.connections.len().max(4);
        for _ in 0..most {
            let may = |connection: &Connection| {
                connection.woken
                    || !connection.of.under_way.is_empty() && !stalled(connection)
                    || !connection.to_name.is_empty() && !silent(connection)
            };
            let can: Vec<usize> =
                (0..self.connections.len()).filter(|&who| may(&self.connections[who])).collect();
            let Some(&who) = (!can.is_empty()).then(|| &can[random.usize(..can.len())]) else { return };
            let connection = &mut self.connections[who];
            if !silent(connection)
                && random.bool()
                && let Some(block) = connection.to_name.pop_front()
            {
                connection.fetches.name(block);
                connection.woken = true;
            }
            if random.bool()
                && !stalled(connection)
                && let Some(what) = connection.of.under_way.pop_front()
            {
                connection.woken = true;
                self.came(who, what);
            }
            if self.connections[who].woken {
                self.again(who);
            }
        }
        panic!("it goes on for ever");
    }

    fn check(&self, expected: impl Fn(&Connection) -> bool) {
        for (who, connection) in self.connections.iter().enumerate().filter(|(_, of)| expected(of)) {
            let Connection { model, client, .. } = connection;
            let what = format!("connection {who}, of {client:?} of model {model}");
            assert!(connection.to_name.is_empty() && connection.fetches.is_empty(), "{what} is not through");
            assert!(connection.of.reduced.is_sorted(), "{what}: {:?}", connection.of.reduced);
            // In vain once at most.
            assert!(
                connection.of.reads.values().all(|&reads| reads <= 2),
                "{what}: {:?}",
                connection.of.reads
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn few_slots_are_enough_for_all(
        seed: u64,
        models in 1..3usize,
        clients in 1..5u64,
        blocks in 1..20u32,
        connections in 1..3u64,
        slots in 1..8usize,
        in_turn: bool,
        direct: bool,
    ) {
        let mut world = World::new(models, clients, blocks, connections, slots, in_turn);
        world.shared.direct = direct;
        world.run(seed, |_| false, |_| false);
        world.check(|_| true);
        prop_assert_eq!(world.shared.slots.count_free(), slots);
        for core in &world.cores {
            prop_assert_eq!(core.running(), Some((PLAN, 0)));
        }
    }

    #[test]
    fn a_model_whose_first_client_is_silent_holds_up_no_other(
        seed: u64,
        clients in 2..4u64,
        blocks in 1..20u32,
        slots in 1..8usize,
        in_turn: bool,
        direct: bool,
    ) {
        let silent = |connection: &Connection| connection.model == 0 && connection.client == ClientId(0);
        let mut world = World::new(2, clients, blocks, 2, slots, in_turn);
        world.shared.direct = direct;
        world.run(seed, silent, |_| false);
        world.check(|connection| connection.model == 1);
        prop_assert_eq!(world.cores[1].running(), Some((PLAN, 0)));
        prop_assert_eq!(world.cores[0].running(), Some((PLAN, clients * u64::from(blocks))));
    }

    #[test]
    fn a_client_that_stalls_leaves_slots_to_others(
        seed: u64,
        clients in 1..4u64,
        blocks in 1..20u32,
        connections in 1..3u64,
        slots in 4..16usize,
        direct: bool,
    ) {
        let stalled = |connection: &Connection| connection.model == 0 && connection.client == ClientId(0);
        let mut world = World::new(2, clients, blocks, connections, slots, false);
        world.shared.direct = direct;
        world.run(seed, |_| false, stalled);
        world.check(|connection| connection.model == 1);
        prop_assert_eq!(world.cores[1].running(), Some((PLAN, 0)));
    }
}

#[test]
fn where_there_are_slots_for_all_each_is_fetched_once() {
    for seed in 0..100 {
        let mut world = World::new(1, 3, 8, 1, 24, false);
        world.shared.direct = seed % 2 == 1;
        world.run(seed, |_| false, |_| false);
        world.check(|_| true);
        for connection in &world.connections {
            assert!(connection.of.reads.values().all(|&reads| reads == 1), "{:?}", connection.of.reads);
        }
    }
}

#[test]
fn a_direct_fetch_takes_no_slot_and_waits_for_nobody() {
    let mut world = World::new(1, 2, 3, 1, 1, false);
    world.shared.direct = true;
    let name = |world: &mut World, who: usize, block: u32| {
        world.connections[who].fetches.name(block);
        world.again(who);
    };
    // Somebody else has the only slot.
    let mut next = 0;
    let slot = world.shared.slots.take(&mut next, false);
    // The second learner's first block has to wait for the first learner's, whose blocks are all fetched at
    // once.
    name(&mut world, 1, 0);
    assert!(world.connections[1].of.under_way.is_empty());
    for block in 0..3 {
        name(&mut world, 0, block);
    }
    assert_eq!(world.connections[0].of.under_way.len(), 3);
    for reduced in 1..=3 {
        let what = world.connections[0].of.under_way.pop_front().expect("a fetch");
        world.came(0, what);
        world.again(0);
        assert_eq!(world.connections[0].of.reduced.len(), reduced);
        assert_eq!(world.cores[0].running(), Some((PLAN, 6 - reduced as u64)));
    }
    assert!(world.connections[1].woken);
    // It needs a slot: it makes the version.
    drop(slot);
    world.again(1);
    assert_eq!(world.connections[1].of.under_way.len(), 1);
    assert!(world.connections[1].of.under_way[0].1.is_some());
}

#[test]
fn a_waiting_connection_keeps_its_slots_until_another_is_short() {
    let mut world = World::new(1, 3, 4, 1, 2, false);
    *world.shared.turns.get_mut() = Turns::new(2, false);
    let name = |world: &mut World, who: usize| {
        while let Some(block) = world.connections[who].to_name.pop_front() {
            world.connections[who].fetches.name(block);
        }
        world.again(who);
    };
    let come = |world: &mut World, who: usize| {
        while let Some(what) = world.connections[who].of.under_way.pop_front() {
            world.came(who, what);
        }
        world.again(who);
    };
    // The second has both slots, and waits; nobody wants them.
    name(&mut world, 1);
    come(&mut world, 1);
    for _ in 0..3 {
        world.again(1);
    }
    assert_eq!((world.shared.slots.count_free(), &world.connections[1].of.reduced[..]), (0, &[][..]));
    // The wait ends when the first comes.
    name(&mut world, 0);
    assert!(world.connections[1].woken);
    world.again(1);
    assert_eq!(world.shared.slots.count_free(), 2);
    assert!(world.connections[0].woken);
    // It comes before those who only fetch ahead.
    name(&mut world, 2);
    assert!(world.connections[2].of.under_way.is_empty());
    world.again(0);
    assert_eq!(world.connections[0].of.under_way.len(), 2);
    // A payload whose slot was given back is not fetched before its turn, though there may be slots.
    world.again(1);
    assert!(world.connections[1].of.under_way.is_empty());
    come(&mut world, 0);
    assert_eq!(world.connections[0].of.reduced, [0, 1]);
    come(&mut world, 0);
    assert_eq!(world.connections[0].of.reduced, [0, 1, 2, 3]);
    world.again(1);
    assert_eq!(world.connections[1].of.under_way.len(), 2);
}
