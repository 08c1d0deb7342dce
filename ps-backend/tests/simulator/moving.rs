//! The model moves: at a moment when all that there is of the job are a version and the lead's core, both are taken
//! to other shards, under another block map. Who was connected is told, perhaps late, twice or never; who greets a
//! shard of the past is told then.

use libmodelio::block_map::BlockMap;
use libmodelio::ids::{ShardId, Version};
use libmodelio::wire::Message;
use ps_backend::lead::LeadCore;

use crate::history::Content;
use crate::shard::Shard;
use crate::world::{Body, Event, Node, Now, World};

/// How long a move waits for its moment.
const PATIENCE: Now = Now::from_secs(5);
/// How often it looks for it.
const LOOK: Now = Now::from_millis(1);
/// Numbers of shards.
const SHARDS: u16 = 9;

/// Where the model is for some time. Its lead is the node of its number.
#[derive(Debug)]
pub struct Course {
    pub map: BlockMap,
    /// Which of the world's shards are its parts.
    pub parts: Vec<usize>,
    /// Nobody is there any more.
    stopped: bool,
}

/// What happens in a move.
#[derive(Clone, Debug)]
pub enum Moving {
    /// Its moment may have come; until then it is waited for.
    Look(Now),
    /// The new shards begin, with the lead as it was handed over.
    Switch(Vec<u8>),
    /// Those of a course are stopped.
    Stop(usize),
}

impl World {
    /// Which course the model is on.
    pub fn current(&self) -> usize {
        self.courses.len() - 1
    }

    pub fn lead_node(&self) -> Node {
        Node::Lead(self.current())
    }

    /// Whether it is a shard, or the lead, of the course that the model is on.
    pub fn is_current(&self, node: Node) -> bool {
        match node {
            Node::Client(_) => true,
            Node::Lead(course) => course == self.current(),
            Node::Part(part) => self.shards[part].course == self.current(),
        }
    }

    /// Whether `opener` keeps up a connection to `acceptor`.
    pub fn is_wanted(&self, opener: Node, acceptor: Node) -> bool {
        match opener {
            Node::Client(index) => self.clients[index].part_of(&self.courses, acceptor).is_some(),
            opener => self.is_current(opener),
        }
    }

    /// The model is on shards of `map` from now on; `local` of them is in the lead's process.
    pub fn begin_course(&mut self, map: BlockMap, local: Option<usize>, version: Version, whole: &[Content]) {
        let lead = Node::Lead(self.courses.len());
        let mut parts = Vec::new();
        for (at, shard) in map.shares().into_keys().enumerate() {
            let mut shard = Shard::new(map.blocks_of(shard).collect(), version, whole, self.settings.keep);
            shard.course = self.courses.len();
            let node = Node::Part(self.shards.len());
            if local == Some(at) {
                shard.process = Some(lead);
                self.network.local.push((lead, node));
            }
            parts.push(self.shards.len());
            self.shards.push(shard);
        }
        self.courses.push(Course { map, parts: parts.clone(), stopped: false });
        for part in parts {
            self.connects(lead, Node::Part(part), Now::ZERO);
        }
    }

    pub fn client_connects(&mut self, index: usize) {
        let course = self.clients[index].course;
        let parts = self.courses[course].parts.clone();
        for node in [Node::Lead(course)].into_iter().chain(parts.into_iter().map(Node::Part)) {
            self.connects(Node::Client(index), node, Now::ZERO);
        }
    }

    // -- the lead and the shards

    pub fn begin_move(&mut self) {
        if !std::mem::replace(&mut self.moving, true) {
            self.lead.hold();
            self.after(Now::ZERO, Event::Moves(Moving::Look(self.now + PATIENCE)));
        }
    }

    pub fn moves(&mut self, moving: Moving) {
        match moving {
            Moving::Look(until) if self.lead.is_held() => {
                self.trace(|| format!("the job is held (until {until:?})"));
                // Some moves fail here, and nothing has changed.
                if self.rng.u32(0..8) == 0 {
                    return self.give_up_move();
                }
                let bytes = self.lead.hand_over().expect("it is held");
                self.frozen = true;
                let after = self.some_time(300_000);
                self.after(after, Event::Moves(Moving::Switch(bytes)));
            }
            Moving::Look(until) if until <= self.now => {
                self.trace(|| format!("not moved: {}", self.lead.held_up_by()));
                self.give_up_move();
            }
            Moving::Look(until) => self.after(LOOK, Event::Moves(Moving::Look(until))),
            Moving::Switch(bytes) => self.switch(&bytes),
            Moving::Stop(course) => {
                self.courses[course].stopped = true;
                for (opener, acceptor) in self.network.pairs() {
                    let is_of = match acceptor {
                        Node::Part(part) => self.shards[part].course == course,
                        node => node == Node::Lead(course),
                    };
                    if is_of && matches!(opener, Node::Client(_)) {
                        self.reset(opener, acceptor);
                    }
                }
            }
        }
    }

    fn give_up_move(&mut self) {
        self.moving = false;
        self.on_lead(|lead, now, actions| lead.release(now, actions));
        self.arm(self.lead_node());
    }

    fn switch(&mut self, bytes: &[u8]) {
        let before = self.current();
        let (version, whole) = self.whole();
        let map = self.another_map();
        self.trace(|| format!("moves to {:?} at version {version}", map.owners()));
        let parts = map.shares().len();
        let local = self.rng.bool().then(|| self.rng.usize(0..parts));
        self.history.moved(parts);
        self.begin_course(map, local, version, &whole);
        let taken = LeadCore::taken_over(bytes, self.settings.blocks, parts, self.now);
        self.lead = taken.expect("what was handed over");
        (self.frozen, self.moving) = (false, false);
        self.on_lead(|lead, now, actions| lead.go_on(now, actions));
        self.arm(self.lead_node());
        // Those who are connected are told, and their connections end.
        let parts = self.courses[before].parts.clone();
        let nodes = [Node::Lead(before)].into_iter().chain(parts.into_iter().map(Node::Part));
        for node in nodes {
            for index in 0..self.clients.len() {
                if self.clients[index].alive && self.network.connection(Node::Client(index), node).acceptor_up
                {
                    // One in four is cut off by the connection's end before it hears.
                    if self.rng.u32(0..4) > 0 {
                        self.say_moved(node, index);
                    }
                    if self.rng.bool() {
                        self.reset(Node::Client(index), node);
                    }
                }
            }
        }
        if self.rng.bool() {
            let after = self.some_time(3_000_000);
            self.after(after, Event::Moves(Moving::Stop(before)));
        }
    }

    /// The newest version, of all shards.
    fn whole(&self) -> (Version, Vec<Content>) {
        let expected = self.lead.job().version();
        let mut whole = vec![Content::default(); self.settings.blocks as usize];
        for &part in &self.courses[self.current()].parts {
            let (version, blocks) = self.shards[part].front();
            assert_eq!(version, expected, "part {part} is not where the job is held");
            blocks.for_each(|(block, content)| whole[block.index()] = content);
        }
        (expected, whole)
    }

    /// The map after some shard has left.
    fn another_map(&mut self) -> BlockMap {
        let map = self.courses[self.current()].map.clone();
        let owners: Vec<ShardId> = map.shares().into_keys().collect();
        let gone = owners[self.rng.usize(0..owners.len())];
        let mut others: Vec<ShardId> = (1..=SHARDS).map(ShardId).filter(|&shard| shard != gone).collect();
        self.rng.shuffle(&mut others);
        others.truncate(1 + self.rng.usize(0..3));
        map.without(gone, &others).expect("a map")
    }

    // -- clients

    /// A node of the past tells a client where the model went from there.
    pub fn say_moved(&mut self, node: Node, index: usize) {
        let course = match node {
            Node::Lead(course) => course,
            Node::Part(part) => self.shards[part].course,
            Node::Client(_) => unreachable!("a client has no model"),
        };
        if self.courses[course].stopped {
            return;
        }
        self.send(node, Node::Client(index), 0, Message::Moved, Body::Course(course + 1));
    }

    /// A client greets a node of the past.
    pub fn greeted_in_vain(&mut self, index: usize, node: Node) {
        let known = self.clients[index].course;
        if self.courses[known].stopped {
            // It finds nobody, and asks the registry after a while.
            let after = Now::from_secs(2) + self.some_time(1_000_000);
            return self.after(after, Event::Found(index, self.current()));
        }
        // The answer may be lost with its connection; then it greets again.
        if !self.chance(0.2) {
            let after = self.some_time(20_000);
            self.after(after, Event::Found(index, known + 1));
        }
        let again = Now::from_millis(50) + self.some_time(300_000);
        self.connects(Node::Client(index), node, again);
    }

    /// A client is told where the model is, or was.
    pub fn client_told(&mut self, index: usize, course: usize) {
        if !self.clients[index].alive {
            return;
        }
        let map = self.courses[course].map.clone();
        let is_newer = course > self.clients[index].course;
        // Its connections end, whatever becomes of what it was told.
        let before = self.clients[index].course;
        if is_newer {
            let parts = self.courses[before].parts.clone();
            for node in [Node::Lead(before)].into_iter().chain(parts.into_iter().map(Node::Part)) {
                self.reset(Node::Client(index), node);
            }
            // From here on parts are those of the new map.
            let client = &mut self.clients[index];
            client.course = course;
            client.sending = vec![0; map.shares().len()];
        }
        let taken = self.on_client(index, |core, now, actions| core.moved(&map, now, actions));
        assert_eq!(taken, is_newer, "client {index} is told of course {course}");
        if is_newer {
            self.trace(|| format!("client {index} goes to course {course}"));
            self.client_connects(index);
        }
    }
}
