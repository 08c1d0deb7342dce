//! Payloads in clients' memory, and the slots that they are fetched into before they are used. Pure.
//!
//! A connection's payloads are used in the order in which it has named them. A payload is fetched ahead of its turn, as
//! long as no connection needs a slot for a payload whose turn has come. A connection that needs one is *short*. Then
//! other connections give back slots whose payloads must wait, for example in a plan that adds in a fixed order. They
//! fetch these payloads again when their turn has come, and not before. So there is always a slot for a payload that
//! others wait for. A payload is fetched in vain at most once, unless another payload of its block has come meanwhile.
//! At most half of the slots are in use for one client. If it stalls, others have the rest.
//!
//! A payload that can be fetched straight into its place, as the first contribution to a block can, needs no slot. It
//! is used as soon as it comes, even while payloads before it wait in slots.

use std::collections::{HashMap, HashSet, VecDeque};

use libmodelio::vocabulary::ids::ClientId;

/// The most fetches under way on one connection.
const UNDER_WAY: usize = 16;

/// The decision about a payload that is not here yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The payload would be used at once.
    Now,
    /// The payload would have to wait. Its connection goes on when that may have changed.
    Later,
    /// The payload is not wanted.
    Never,
}

/// A connection, as the queue asks it and orders it.
pub trait Edge<T, S> {
    /// The error that ends the connection.
    type Error;

    /// The decision about the next payload.
    ///
    /// # Errors
    /// [`Self::Error`].
    fn turn(&mut self, what: &T) -> Result<Turn, Self::Error>;

    /// Whether [`Self::turn`] would return [`Turn::Now`] for a payload that is not the next one.
    fn is_due(&mut self, what: &T) -> bool;

    /// Uses a fetched payload, or finds that it is not wanted. False if it has to wait, as with [`Turn::Later`].
    ///
    /// # Errors
    /// [`Self::Error`].
    fn reduce_fetched(&mut self, what: &T, slot: &S) -> Result<bool, Self::Error>;

    /// The payload is done with.
    fn over(&mut self, what: T);

    /// Begins to fetch a payload into its place, if it may come there at once and there is room for a fetch.
    /// [`Fetches::came`] reports that it has come and was used. False if it needs a slot, or has to wait.
    ///
    /// # Errors
    /// [`Self::Error`].
    fn fetch_direct(&mut self, what: &T) -> Result<bool, Self::Error>;

    /// Whether one more fetch into a slot may begin. If not, the connection goes on when it may.
    fn has_room(&self) -> bool;

    /// Whether another connection is short.
    fn is_pressed(&self) -> bool;

    /// A free slot. If there is none, the connection goes on when there may be one.
    fn slot(&mut self) -> Option<S>;

    /// Begins to fetch a payload into a slot. [`Fetches::came`] reports that it has come.
    ///
    /// # Errors
    /// [`Self::Error`].
    fn fetch(&mut self, what: &T, slot: S) -> Result<(), Self::Error>;
}

/// The state of a connection that can do no more at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stand {
    /// The connection needs no slot, or waits without one.
    Well,
    /// A payload's turn has come, and there is no slot for it.
    Short,
    /// The payloads in its slots have to wait.
    Idle,
}

#[derive(Debug)]
enum Where<S> {
    /// The payload lies with the client. It may be fetched ahead of its turn.
    Named {
        ahead: bool,
    },
    /// The payload is being fetched. If it is not `wanted`, it is dropped when it comes.
    Coming {
        wanted: bool,
    },
    Here(S),
    /// The payload is being fetched into its place.
    ComingDirect,
    /// The payload was used.
    Used,
}

/// The payloads that one connection has named, in order. All payloads before one that is in a slot, or that comes
/// into a slot and is wanted, have come or are under way.
#[derive(Debug)]
pub struct Fetches<T, S> {
    queue: VecDeque<(T, Where<S>)>,
    /// The number of the first payload.
    first: u64,
    /// The numbers of the payloads that are being fetched, in the order of the requests.
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

    /// The number of payloads.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether there are no payloads.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The payload that was requested first has come, into a slot or into its place.
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

    /// Uses and fetches as many payloads as possible. The resulting state must be reported to [`Turns::stands`],
    /// because it concerns all connections.
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

    /// Gives all slots back. Slots that are being filled follow when they are full.
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

/// A connection's duty to others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Then {
    /// Give its slots back.
    GiveBack,
    /// Wake these connections: they have slots that they cannot use.
    Wake(Vec<u64>),
}

/// The connections that share slots, by their numbers. It knows which are short, which have slots that they cannot
/// use, and how many fetches are under way for each client.
#[derive(Debug)]
pub struct Turns {
    short: HashSet<u64>,
    idle: HashSet<u64>,
    /// The most fetches under way for a client.
    most: usize,
    under_way: HashMap<ClientId, usize>,
    /// Connections that would fetch more if their client had fewer fetches under way.
    barred: HashMap<u64, ClientId>,
}

impl Turns {
    /// For this number of slots, which clients share or which belong to one client.
    pub fn new(slots: usize, in_common: bool) -> Turns {
        let most = if in_common { (slots / 2).max(1) } else { slots };
        let (short, idle) = (HashSet::new(), HashSet::new());
        Turns { short, idle, most, under_way: HashMap::new(), barred: HashMap::new() }
    }

    /// Whether one more fetch may begin for the client of `who`. If not, [`Self::came`] returns `who` when it may.
    pub fn may_begin(&mut self, who: u64, client: ClientId) -> bool {
        if self.under_way.get(&client).is_none_or(|&count| count < self.most) {
            return true;
        }
        self.barred.insert(who, client);
        false
    }

    /// A fetch has begun for `client`.
    pub fn began(&mut self, client: ClientId) {
        *self.under_way.entry(client).or_default() += 1;
    }

    /// `count` fetches have ended. Returns the connections that must go on.
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

    /// Sets the state of `who`.
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

    /// The connection has ended.
    pub fn gone(&mut self, who: u64) {
        self.short.remove(&who);
        self.idle.remove(&who);
        self.barred.remove(&who);
    }
}

#[cfg(test)]
mod tests;
