//! The descriptors of a serving thread, by token.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use super::port::Port;
use super::waiting::Kind;
use crate::transport::stream::{Close, Connection, ConnectionState, Token};

/// One descriptor of a thread.
pub struct Entry {
    pub port: Port,
    pub kind: Kind,
    pub connection: Connection,
    /// Why the entry must end. It ends when the port is no longer busy.
    pub closing: Option<Close>,
    /// When the stream's `tick` is due.
    pub due: Option<Instant>,
    /// The earliest timer that is queued for it.
    pub queued: Option<Instant>,
    /// When operations that failed for want of kernel memory are tried again.
    pub retry: Option<Instant>,
}

impl Entry {
    pub fn new(fd: OwnedFd, kind: Kind, connection: Connection) -> Entry {
        Entry { port: Port::new(fd), kind, connection, closing: None, due: None, queued: None, retry: None }
    }

    pub fn state(&self) -> &Arc<ConnectionState> {
        self.connection.state()
    }
}

struct Slot {
    generation: u32,
    entry: Option<Entry>,
}

/// The descriptors of a thread. Each has a token.
#[derive(Default)]
pub struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn insert(&mut self, entry: Entry) -> Token {
        if let Some(slot) = self.free.pop() {
            let place = &mut self.slots[slot as usize];
            place.entry = Some(entry);
            return Token { slot, generation: place.generation };
        }
        let slot = u32::try_from(self.slots.len()).expect("fewer descriptors than 2^32");
        self.slots.push(Slot { generation: 1, entry: Some(entry) });
        Token { slot, generation: 1 }
    }

    /// The entry of this token, if it is still there.
    pub fn get(&mut self, token: Token) -> Option<&mut Entry> {
        let slot = self.slots.get_mut(token.slot as usize)?;
        if slot.generation == token.generation { slot.entry.as_mut() } else { None }
    }

    pub(super) fn remove(&mut self, token: Token) -> Option<Entry> {
        let slot = self.slots.get_mut(token.slot as usize).filter(|s| s.generation == token.generation)?;
        let entry = slot.entry.take()?;
        slot.generation = (slot.generation + 1) & 0x00ff_ffff;
        self.free.push(token.slot);
        Some(entry)
    }

    /// The tokens of all entries.
    pub fn tokens(&self) -> Vec<Token> {
        let used = self.slots.iter().enumerate().filter(|(_, slot)| slot.entry.is_some());
        used.map(|(at, slot)| Token { slot: at as u32, generation: slot.generation }).collect()
    }
}
