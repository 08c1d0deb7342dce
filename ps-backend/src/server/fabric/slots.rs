//! Slots that connections have in common: whoever has some that it cannot use gives them back when somebody else could.

use std::collections::HashMap;
use std::sync::Arc;

use libmodelio::link::Link;
use libmodelio::net::Connection;
use libmodelio::rdma::verbs::{Pool, Slot};
use parking_lot::Mutex;

use crate::part::fetches::{Stand, Then, Turns};

/// Slots of one size, and who has them in common.
pub(super) struct Slots {
    pool: Arc<Pool>,
    all: Mutex<All>,
}

#[derive(Default)]
struct All {
    turns: Turns,
    links: HashMap<u64, Link>,
    last: u64,
}

impl Slots {
    pub(super) fn new(pool: Arc<Pool>) -> Arc<Slots> {
        Arc::new(Slots { pool, all: Mutex::default() })
    }

    /// One more connection has them, too.
    pub(super) fn join(self: &Arc<Slots>, link: &Link) -> Seat {
        let mut all = self.all.lock();
        all.last += 1;
        let number = all.last;
        all.links.insert(number, link.clone());
        Seat { slots: Arc::clone(self), number }
    }
}

/// A connection among those that have slots in common.
pub(super) struct Seat {
    slots: Arc<Slots>,
    number: u64,
}

impl Seat {
    /// A free slot. If there is none, `waits` is woken when there is one.
    pub(super) fn take(&self, waits: Option<&Connection>) -> Option<Slot> {
        self.slots.pool.take(waits)
    }

    /// Whether another connection lacks a slot for what would be used at once.
    pub(super) fn is_pressed(&self) -> bool {
        self.slots.all.lock().turns.is_pressed(self.number)
    }

    /// It stands so with the connection. True if it is to give its slots back.
    pub(super) fn stands(&self, stand: Stand) -> bool {
        let mut all = self.slots.all.lock();
        let woken: Vec<Link> = match all.turns.stands(self.number, stand) {
            Then::GiveBack => return true,
            Then::Wake(idle) => idle.iter().filter_map(|number| all.links.get(number).cloned()).collect(),
        };
        drop(all);
        woken.iter().for_each(Link::wake);
        false
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut all = self.slots.all.lock();
        all.turns.gone(self.number);
        all.links.remove(&self.number);
    }
}
