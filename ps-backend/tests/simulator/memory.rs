//! Memory that one process lends another. Shards read contributions in their clients' memory, which programs have back
//! when their commits are answered, and store into. Clients copy versions out of their shards' memory, each block of
//! which is pinned until its client says that it has copied it; a client that is silent for too long loses its pins,
//! and may go on copying. Whose memory is used again is decided by the very table that decides it in production.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::SystemTime;

use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::wire::Message;
use ps_backend::partition::store::table::{Left, Table};

use crate::client::ClientEvent;
use crate::history::{Content, GARBAGE};
use crate::shard::ShardEvent;
use crate::world::{Body, Event, Node, Now, World};

/// What the memory of a version holds at the moment, block by block. It is there for as long as somebody has it mapped.
pub type Buffer = Rc<RefCell<Vec<Content>>>;

/// How often each of these has happened.
#[derive(Debug, Default)]
pub struct Loans {
    /// Commits of mapped memory that have timed out: their programs store into it from then on.
    pub timed_out: u64,
    /// Blocks of mapped contributions that were sent before the commit.
    pub declared: u64,
    /// Reads of a client's memory that were over after the loan was.
    pub late_reads: u64,
    /// Reads that have found other bytes than the committed ones.
    pub changed: u64,
    /// Pins that clients have lost: connections that ended, and silence, before they had copied.
    pub lost_pins: u64,
    /// Blocks that were copied when their shard had forgotten the version.
    pub late_copies: u64,
}

/// How often each of these has happened.
#[derive(Debug, Default)]
pub struct Patches {
    /// Blocks that came as what has changed.
    pub taken: u64,
    /// Of them, blocks whose patch was broken.
    pub broken: u64,
    /// Blocks that came whole to clients that have asked for what has changed.
    pub whole: u64,
}

/// The newest versions of which a shard knows what they have changed, whether or not they are in its memory.
const KNOWN: usize = 4;

/// A block of a version that a client copies.
#[derive(Clone, Debug)]
pub struct Lent {
    memory: Buffer,
    at: usize,
    partition: usize,
    epoch: u64,
    pin: u64,
}

/// Pinned for it.
#[derive(Debug)]
struct Pin {
    number: u64,
    client: usize,
    epoch: u64,
    version: Version,
}

/// Memory of one partition's versions.
pub struct Memory {
    table: Table<Buffer>,
    free: Vec<Buffer>,
    /// The next version is made here.
    next: Option<Buffer>,
    /// The contents of the newest versions, which say what has changed between them.
    known: BTreeMap<Version, Vec<Content>>,
    /// Versions that are kept besides the newest one.
    retain: usize,
    pins: Vec<Pin>,
    next_pin: u64,
}

impl Memory {
    pub fn new(version: Version, blocks: Vec<Content>, retain: usize) -> Memory {
        let known = BTreeMap::from([(version, blocks.clone())]);
        let table = Table::new(version, Rc::new(RefCell::new(blocks)), SystemTime::UNIX_EPOCH);
        Memory { known, table, free: Vec::new(), next: None, retain, pins: Vec::new(), next_pin: 0 }
    }

    pub fn newest(&self) -> Version {
        *self.table.last_key_value().expect("a version").0
    }

    /// A version, if it is still there.
    pub fn version(&self, version: Version) -> Option<&Buffer> {
        self.table.get(&version).map(|published| &published.buffer)
    }

    fn recycle(&mut self) {
        for version in self.table.idle(self.retain) {
            if let Some(Left::Free(buffer)) = self.table.remove(version) {
                self.free.push(buffer);
            }
        }
    }

    /// A plan makes a version from now on: whatever is in the memory that it takes may be written over.
    pub fn begin(&mut self, blocks: usize) {
        self.recycle();
        let next = self.next.take().or_else(|| self.free.pop()).unwrap_or_default();
        *next.borrow_mut() = vec![Content::replaced(&[GARBAGE]); blocks];
        self.next = Some(next);
    }

    /// A block of the next version is computed.
    pub fn write(&self, block: usize, content: Content) {
        self.next.as_ref().expect("a plan has begun").borrow_mut()[block] = content;
    }

    /// The new version is the newest one.
    pub fn publish(&mut self, version: Version) {
        let next = self.next.take().expect("a plan has begun");
        self.known.insert(version, next.borrow().clone());
        while self.known.len() > KNOWN {
            self.known.pop_first();
        }
        self.table.insert(version, next, SystemTime::UNIX_EPOCH);
        self.recycle();
    }

    /// The patch that makes `content` of a block, if the shard knows what has changed since `base`. Some blocks are
    /// shorter whole.
    pub fn patch(&self, base: Option<Version>, at: usize, content: &Content) -> Option<(Version, Body)> {
        let base = base.filter(|base| !(base.0 + at as u64).is_multiple_of(3))?;
        let before = &self.known.get(&base)?[at];
        Some((base, Body::Patch(before.clone(), content.clone())))
    }

    /// Names a block of a version to a client, which it copies.
    fn lend(
        &mut self,
        version: Version,
        at: usize,
        client: usize,
        partition: usize,
        epoch: u64,
    ) -> Option<Lent> {
        let memory = self.version(version)?.clone();
        self.table.pin(version);
        let pin = self.next_pin;
        self.next_pin += 1;
        self.pins.push(Pin { number: pin, client, epoch, version });
        Some(Lent { memory, at, partition, epoch, pin })
    }

    /// A client has copied.
    fn copied(&mut self, pin: u64) {
        if let Some(at) = self.pins.iter().position(|known| known.number == pin) {
            let pin = self.pins.swap_remove(at);
            self.table.unpin(pin.version, 1);
        }
    }

    /// Connections of a client before this one have ended: it may be copying still.
    fn give_up(&mut self, client: usize, epoch: u64) -> u64 {
        let lost: Vec<Pin> =
            self.pins.extract_if(.., |pin| pin.client == client && pin.epoch < epoch).collect();
        for pin in &lost {
            self.table.give_up(pin.version);
            self.table.unpin(pin.version, 1);
        }
        lost.len() as u64
    }
}

impl World {
    /// A client asks a partition for blocks of a version, by their places there, or for what has changed in them since
    /// its `base`. They are named where memory is shared.
    pub fn lends(
        &mut self,
        partition: usize,
        client: usize,
        (version, base): (Version, Option<Version>),
        blocks: &[(usize, BlockId)],
    ) {
        let epoch = self.network.connection(Node::Client(client), Node::Partition(partition)).epoch;
        for &(at, block) in blocks {
            let memory = &mut self.shards[partition].memory;
            let content = memory.version(version).map(|memory| memory.borrow()[at].clone());
            // Most blocks are to be pinned where memory is shared.
            let patches = !self.settings.shared || (version.0 + at as u64).is_multiple_of(4);
            let patch = content.filter(|_| patches).and_then(|content| memory.patch(base, at, &content));
            if let Some((base, body)) = patch {
                let message = Message::Changes { version, block, base, crc: None };
                self.say_to_client(partition, client, message, body);
                continue;
            }
            self.patches.whole += u64::from(base.is_some());
            let body = match self.settings.shared {
                true => memory.lend(version, at, client, partition, epoch).map(Body::Lent),
                false => memory.version(version).map(|memory| Body::Content(memory.borrow()[at].clone())),
            };
            self.say_block(partition, client, version, block, body.expect("a version that is there"));
        }
    }

    /// A block is to be copied: that takes a while, and now and then the client is stopped just then.
    pub fn begins_to_copy(&mut self, index: usize, version: Version, block: BlockId, body: Body) {
        if let Body::Lent(_) = body
            && self.chance(self.settings.freezes)
        {
            let time = self.settings.silence + self.some_time(4 * self.settings.silence.as_micros() as u64);
            self.hangs(Node::Client(index), time);
        }
        let after = self.some_time(self.settings.arrival);
        self.after(after, Event::Client(index, ClientEvent::Completed { version, block, body }));
    }

    /// The blocks that have come, or are being copied.
    pub fn copies(&mut self, index: usize, version: Version, body: Body) -> Content {
        match body {
            Body::Content(content) | Body::Patch(_, content) => content,
            Body::Lent(Lent { memory, at, partition, epoch, pin }) => {
                self.loans.late_copies += u64::from(self.shards[partition].memory.version(version).is_none());
                self.copied(index, partition, epoch, pin);
                memory.borrow()[at].clone()
            }
            other => panic!("{other:?} arrives"),
        }
    }

    /// A client says that it is done with a block, if there is anybody to whom it says so.
    pub fn copied(&mut self, index: usize, partition: usize, epoch: u64, pin: u64) {
        if self.network.connection(Node::Client(index), Node::Partition(partition)).epoch == epoch {
            let after = self.some_time(200);
            self.after(after, Event::Shard(partition, ShardEvent::Copied(pin)));
        }
    }

    /// It is not wanted.
    pub fn not_copied(&mut self, index: usize, body: &Body) {
        if let &Body::Lent(Lent { partition, epoch, pin, .. }) = body {
            self.copied(index, partition, epoch, pin);
        }
    }

    pub fn has_copied(&mut self, partition: usize, pin: u64) {
        self.shards[partition].memory.copied(pin);
    }

    /// A partition hears that connections of a client before this one have ended.
    pub fn loses_pins(&mut self, partition: usize, index: usize, epoch: u64) {
        self.loans.lost_pins += self.shards[partition].memory.give_up(index, epoch);
        self.loses_kept(partition, index, epoch);
    }

    /// A process does nothing for so long. Shards end the connections of clients that are silent for too long.
    pub fn hangs(&mut self, node: Node, time: Now) {
        let process = self.process(node);
        let until = self.hung.entry(process).or_default();
        *until = (*until).max(self.now + time);
        let Node::Client(index) = node else { return };
        let partitions = self.network.pairs().into_iter().filter_map(|(opener, acceptor)| match acceptor {
            Node::Partition(partition) if opener == node => Some(partition),
            _ => None,
        });
        for partition in partitions.collect::<Vec<_>>() {
            let epoch = self.network.connection(node, Node::Partition(partition)).epoch;
            let over = self.clock(Node::Partition(partition)) + self.settings.silence;
            let at = self.when(Node::Partition(partition), over);
            self.at(at, Event::Shard(partition, ShardEvent::Silent(index, epoch)));
        }
    }

    /// The clock of a partition jumps: by it, clients that hang have been silent for too long.
    pub fn silence_jumps(&mut self, partition: usize, by: Now) {
        let is_client = |node: &Node| if let Node::Client(index) = node { Some(*index) } else { None };
        let hung: Vec<usize> = self.hung.keys().filter_map(is_client).collect();
        if by < self.settings.silence {
            return;
        }
        for index in hung {
            let epoch = self.network.connection(Node::Client(index), Node::Partition(partition)).epoch;
            self.after(Now::ZERO, Event::Shard(partition, ShardEvent::Silent(index, epoch)));
        }
    }

    /// The time of silence after which the partition gives up the pins of a client that hangs is over.
    pub fn is_silent(&mut self, partition: usize, index: usize, epoch: u64) {
        let (client, partition) = (Node::Client(index), Node::Partition(partition));
        let hangs = self.hung.get(&client).is_some_and(|&until| until > self.now);
        if hangs && self.network.connection(client, partition).epoch == epoch {
            self.trace(|| format!("{partition:?} has not heard of {client:?} for too long"));
            self.reset(client, partition);
        }
    }
}
