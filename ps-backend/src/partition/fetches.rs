//! Payloads that lie with clients, and the slots into which they are fetched before they are used. Pure.
//!
//! Payloads that a connection names are used in the order in which they were named. A payload is fetched
//! ahead of its turn, as long as no connection lacks a slot for a payload whose turn it is: a connection that
//! lacks one is *short*. Then connections give back slots with payloads that have to wait, as contributions
//! that are added up in a fixed order do. They fetch these again when their turn has come, and not before. So
//! there is always a slot for payloads that others wait for, and a payload is fetched in vain once at most,
//! unless another payload of its block has come meanwhile. At most half of the slots are under way for one
//! client: if it stalls, others have the rest.
//!
//! A payload that can be fetched straight to its place, as the first contribution to a block can, takes no
//! slot. It is used as soon as it comes, though payloads named before it may still wait in slots.

use std::collections::{HashMap, HashSet, VecDeque};

use libmodelio::vocabulary::ids::ClientId;

/// Fetches that are under way on one connection, at most.
const UNDER_WAY: usize = 16;

/// The decision about a payload that is not here yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It would be used at once.
    Now,
    /// It would have to wait. Its connection goes on when that may have changed.
    Later,
    /// Nobody wants the payload.
    Never,
}

/// The queue's questions to a connection, and its orders.
pub trait Edge<T, S> {
    /// The error that ends the connection.
    type Error;

    /// The decision about the next payload.
    ///
    /// # Errors
    /// [`Self::Error`].
    fn turn(&mut self, what: &T) -> Result<Turn, Self::Error>;

    /// Whether [`Self::turn`] would say [`Turn::Now`] of a payload that is not the next.
    fn is_due(&mut self, what: &T) -> bool;

    /// Uses it, or sees that nobody wants it. False if it has to wait: then as with [`Turn::Later`].
    ///
    /// # Errors
    /// [`Self::Error`].
    fn reduce_fetched(&mut self, what: &T, slot: &S) -> Result<bool, Self::Error>;

    /// The payload is done with.
    fn over(&mut self, what: T);

    /// Begins to fetch it to where it belongs, if it may come there at once and there is room for a fetch;
    /// [`Fetches::came`] says that it is there, and used. False if it needs a slot, or has to wait.
    ///
    /// # Errors
    /// [`Self::Error`].
    fn fetch_direct(&mut self, what: &T) -> Result<bool, Self::Error>;

    /// Whether one more fetch into a slot can be under way. If not, the connection goes on when one may.
    fn has_room(&self) -> bool;

    /// Whether another connection is short.
    fn is_pressed(&self) -> bool;

    /// A free slot. If there is none, the connection goes on when there may be one.
    fn slot(&mut self) -> Option<S>;

    /// Begins to fetch it; [`Fetches::came`] says that it is there.
    ///
    /// # Errors
    /// [`Self::Error`].
    fn fetch(&mut self, what: &T, slot: S) -> Result<(), Self::Error>;
}

/// How it stands with a connection that can do no more just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stand {
    /// It has what it needs, or waits without a slot.
    Well,
    /// The turn of a payload has come, and there is no slot for it.
    Short,
    /// The payloads in its slots have to wait.
    Idle,
}

#[derive(Debug)]
enum Where<S> {
    /// With the client; it may be fetched ahead of its turn.
    Named {
        ahead: bool,
    },
    /// Being fetched; not `wanted` when it comes.
    Coming {
        wanted: bool,
    },
    Here(S),
    /// Being fetched to where it belongs.
    ComingDirect,
    /// Used.
    Used,
}

/// The payloads that one connection has named, in order. All payloads before one that is in a slot, or that
/// comes into a slot and is wanted, are here or on their way.
#[derive(Debug)]
pub struct Fetches<T, S> {
    queue: VecDeque<(T, Where<S>)>,
    /// The number of the first of them.
    first: u64,
    /// The numbers of payloads that are being fetched, in the order of the requests.
    coming: VecDeque<u64>,
}

impl<T, S> Default for Fetches<T, S> {
    fn default() -> Fetches<T, S> {
        Fetches { queue: VecDeque::new(), first: 0, coming: VecDeque::new() }
    }
}

impl<T, S> Fetches<T, S> {
    /// Adds a payload.
    pub fn name(&mut self, what: T) {
        self.queue.push_back((what, Where::Named { ahead: true }));
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether there are no payloads.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The payload that was asked for first has come, into a slot, or to its place.
    pub fn came(&mut self, slot: Option<S>) {
        let Some(number) = self.coming.pop_front() else { return };
        if let Some((_, state)) = self.queue.get_mut((number - self.first) as usize) {
            *state = match (&state, slot) {
                (Where::Coming { wanted: true }, Some(slot)) => Where::Here(slot),
                (Where::ComingDirect, None) => Where::Used,
                _ => Where::Named { ahead: false },
            };
        }
    }

    /// Uses payloads that can be used, and fetches those that can be fetched. Report the resulting state to
    /// [`Turns::stands`], because it concerns all connections.
    ///
    /// # Errors
    /// The errors of `edge`.
    pub fn advance<E: Edge<T, S>>(&mut self, edge: &mut E) -> Result<Stand, E::Error> {
        loop {
            let Some((what, state)) = self.queue.front() else { return Ok(Stand::Well) };
            match state {
                Where::Coming { .. } | Where::ComingDirect => break,
                Where::Used => self.pop(edge),
                Where::Here(slot) if edge.reduce_fetched(what, slot)? => self.pop(edge),
                Where::Here(_) => {
                    self.fetch_ahead(edge)?;
                    return Ok(Stand::Idle);
                }
                Where::Named { .. } => match edge.turn(what)? {
                    Turn::Never => self.pop(edge),
                    Turn::Later => break,
                    Turn::Now if self.fetch_direct(0, edge)? => break,
                    Turn::Now if !self.has_room(edge) => return Ok(Stand::Well),
                    Turn::Now => match edge.slot() {
                        Some(slot) => {
                            self.fetch(0, slot, edge)?;
                            break;
                        }
                        None => return Ok(Stand::Short),
                    },
                },
            }
        }
        self.fetch_ahead(edge)?;
        Ok(Stand::Well)
    }

    /// Gives back all its slots. Slots that are being filled are free when they are full.
    pub fn give_back(&mut self) -> Vec<S> {
        let mut slots = Vec::new();
        for (_, state) in &mut self.queue {
            match state {
                Where::Named { .. } | Where::ComingDirect | Where::Used => {}
                Where::Coming { wanted } => *wanted = false,
                Where::Here(_) => {
                    if let Where::Here(slot) = std::mem::replace(state, Where::Named { ahead: false }) {
                        slots.push(slot);
                    }
                }
            }
        }
        slots
    }

    fn pop<E: Edge<T, S>>(&mut self, edge: &mut E) {
        if let Some((what, _)) = self.queue.pop_front() {
            self.first += 1;
            edge.over(what);
        }
    }

    fn has_room<E: Edge<T, S>>(&self, edge: &E) -> bool {
        self.coming.len() < UNDER_WAY && edge.has_room()
    }

    fn fetch_direct<E: Edge<T, S>>(&mut self, index: usize, edge: &mut E) -> Result<bool, E::Error> {
        if self.coming.len() >= UNDER_WAY {
            return Ok(false);
        }
        let (what, state) = &mut self.queue[index];
        let goes = edge.fetch_direct(what)?;
        if goes {
            *state = Where::ComingDirect;
            self.coming.push_back(self.first + index as u64);
        }
        Ok(goes)
    }

    fn fetch_ahead<E: Edge<T, S>>(&mut self, edge: &mut E) -> Result<(), E::Error> {
        let is_named =
            |state: &Where<S>| matches!(state, Where::Named { .. } | Where::Coming { wanted: false });
        let all = self.queue.len();
        let missing = self.queue.iter().position(|(_, state)| is_named(state)).unwrap_or(all);
        for index in missing..all {
            if matches!(self.queue[index].1, Where::Named { .. }) && self.fetch_direct(index, edge)? {
                continue;
            }
            let (what, state) = &self.queue[index];
            let may = match state {
                Where::Named { ahead: true } => !edge.is_pressed(),
                Where::Named { ahead: false } => edge.is_due(what),
                Where::ComingDirect | Where::Used => continue,
                Where::Coming { .. } | Where::Here(_) => false,
            };
            if !may || !self.has_room(edge) {
                break;
            }
            let Some(slot) = edge.slot() else { break };
            self.fetch(index, slot, edge)?;
        }
        Ok(())
    }

    fn fetch<E: Edge<T, S>>(&mut self, index: usize, slot: S, edge: &mut E) -> Result<(), E::Error> {
        let (what, state) = &mut self.queue[index];
        edge.fetch(what, slot)?;
        *state = Where::Coming { wanted: true };
        self.coming.push_back(self.first + index as u64);
        Ok(())
    }
}

/// The instruction to a connection about others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Then {
    /// Give its slots back.
    GiveBack,
    /// Have these go on: they have slots that they cannot use.
    Wake(Vec<u64>),
}

/// The connections that share slots, by their numbers: which are short, and which have slots that they cannot
/// use; and the fetches under way for each client.
#[derive(Debug)]
pub struct Turns {
    short: HashSet<u64>,
    idle: HashSet<u64>,
    /// Fetches that may be under way for a client.
    most: usize,
    under_way: HashMap<ClientId, usize>,
    /// Connections that would fetch more if less were under way for their client.
    barred: HashMap<u64, ClientId>,
}

impl Turns {
    /// For this number of slots, shared by clients or one client's own.
    pub fn new(slots: usize, in_common: bool) -> Turns {
        let most = if in_common { (slots / 2).max(1) } else { slots };
        let (short, idle) = (HashSet::new(), HashSet::new());
        Turns { short, idle, most, under_way: HashMap::new(), barred: HashMap::new() }
    }

    /// Whether one more fetch may be under way for the client of `who`. If not, [`Self::came`] says when it
    /// may.
    pub fn may_begin(&mut self, who: u64, client: ClientId) -> bool {
        if self.under_way.get(&client).is_none_or(|&count| count < self.most) {
            return true;
        }
        self.barred.insert(who, client);
        false
    }

    /// One more fetch is under way for `client`.
    pub fn began(&mut self, client: ClientId) {
        *self.under_way.entry(client).or_default() += 1;
    }

    /// `count` fetches have ended; returns the connections that are to go on.
    pub fn came(&mut self, client: ClientId, count: usize) -> Vec<u64> {
        if let Some(left) = self.under_way.get_mut(&client) {
            *left = left.saturating_sub(count);
            if *left == 0 {
                self.under_way.remove(&client);
            }
        }
        self.barred.extract_if(|_, of| *of == client).map(|(who, _)| who).collect()
    }

    /// Whether a connection other than `who` is short.
    pub fn is_pressed(&self, who: u64) -> bool {
        self.short.iter().any(|&short| short != who)
    }

    /// It stands so with `who` from now on.
    pub fn stands(&mut self, who: u64, stand: Stand) -> Then {
        self.short.remove(&who);
        self.idle.remove(&who);
        match stand {
            Stand::Idle if self.is_pressed(who) => return Then::GiveBack,
            Stand::Idle => drop(self.idle.insert(who)),
            Stand::Short => {
                self.short.insert(who);
                return Then::Wake(self.idle.drain().collect());
            }
            Stand::Well => {}
        }
        Then::Wake(Vec::new())
    }

    /// It needs nothing any more.
    pub fn gone(&mut self, who: u64) {
        self.short.remove(&who);
        self.idle.remove(&who);
        self.barred.remove(&who);
    }
}

#[cfg(test)]
mod tests;
