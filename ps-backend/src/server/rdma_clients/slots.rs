//! Slots that connections share. A connection gives slots back that it cannot use, when another one could use them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use libmodelio::transport::frames::Link;
use libmodelio::transport::rdma::{Pool, Slot};
use libmodelio::transport::stream::Connection;
use libmodelio::vocabulary::ids::ClientId;
use parking_lot::Mutex;

use crate::partition::fetches::{Stand, Then, Turns};

/// Slots of one size, and the connections that share them.
pub(super) struct Slots {
    pool: Arc<Pool>,
    all: Mutex<All>,
}

struct All {
    turns: Turns,
    members: HashMap<u64, (ClientId, Link)>,
    last: u64,
}

impl Slots {
    /// Slots of clients that share them, or of one connection.
    pub(super) fn new(pool: Arc<Pool>, in_common: bool) -> Arc<Slots> {
        let turns = Turns::new(pool.count(), in_common);
        Arc::new(Slots { pool, all: Mutex::new(All { turns, members: HashMap::new(), last: 0 }) })
    }

    /// Adds a connection of that client.
    pub(super) fn join(self: &Arc<Slots>, client: ClientId, link: &Link) -> Seat {
        let mut all = self.all.lock();
        all.last += 1;
        let number = all.last;
        all.members.insert(number, (client, link.clone()));
        Seat { slots: Arc::clone(self), client, number, under_way: AtomicUsize::new(0) }
    }
}

/// A connection's share in the slots.
pub(super) struct Seat {
    slots: Arc<Slots>,
    client: ClientId,
    number: u64,
    /// The number of its fetches under way.
    under_way: AtomicUsize,
}

impl All {
    fn links(&self, numbers: &[u64]) -> Vec<Link> {
        numbers.iter().filter_map(|number| self.members.get(number)).map(|(_, link)| link.clone()).collect()
    }
}

impl Seat {
    /// A free slot. If there is none, `waits` is woken when there is one.
    pub(super) fn take(&self, waits: Option<&Connection>) -> Option<Slot> {
        self.slots.pool.take(waits)
    }

    /// Whether one more fetch may begin. If not, the connection is woken when it may.
    pub(super) fn may_begin(&self) -> bool {
        self.slots.all.lock().turns.may_begin(self.number, self.client)
    }

    /// A fetch has begun.
    pub(super) fn began(&self) {
        self.under_way.fetch_add(1, Ordering::Relaxed);
        self.slots.all.lock().turns.began(self.client);
    }

    /// `count` fetches have ended.
    pub(super) fn came(&self, count: usize) {
        self.under_way.fetch_sub(count, Ordering::Relaxed);
        let mut all = self.slots.all.lock();
        let barred = all.turns.came(self.client, count);
        let woken = all.links(&barred);
        drop(all);
        woken.iter().for_each(Link::wake);
    }

    /// Whether another connection needs a slot for a payload that would be used at once.
    pub(super) fn is_pressed(&self) -> bool {
        self.slots.all.lock().turns.is_pressed(self.number)
    }

    /// Sets the state of the connection. True if it must give its slots back.
    pub(super) fn stands(&self, stand: Stand) -> bool {
        let mut all = self.slots.all.lock();
        let woken = match all.turns.stands(self.number, stand) {
            Then::GiveBack => return true,
            Then::Wake(idle) => all.links(&idle),
        };
        drop(all);
        woken.iter().for_each(Link::wake);
        false
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.came(self.under_way.load(Ordering::Relaxed));
        let mut all = self.slots.all.lock();
        all.turns.gone(self.number);
        all.members.remove(&self.number);
    }
}
