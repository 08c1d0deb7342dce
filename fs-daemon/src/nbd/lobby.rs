//! Clients that have not chosen an export yet. Few may wait here: one more sends the one away that has waited longest, so
//! that connections of which nothing comes keep nobody out.

use std::collections::VecDeque;
use std::sync::Arc;

use libmodelio::transport::stream::{Close, Connection};
use parking_lot::Mutex;

/// The most clients that wait at a time.
const MOST: usize = 256;

#[derive(Default)]
struct Waiting {
    /// With their numbers, in the order in which they came.
    clients: VecDeque<(u64, Connection)>,
    next: u64,
}

/// The clients that wait.
#[derive(Clone, Default)]
pub struct Lobby(Arc<Mutex<Waiting>>);

/// A client's place in the lobby, until this is dropped.
pub struct Place {
    lobby: Lobby,
    number: u64,
}

impl Lobby {
    /// A client comes in.
    pub fn enter(&self, client: &Connection) -> Place {
        let mut waiting = self.0.lock();
        let number = waiting.next;
        waiting.next += 1;
        waiting.clients.push_back((number, client.clone()));
        let oldest = if waiting.clients.len() > MOST { waiting.clients.pop_front() } else { None };
        drop(waiting);
        if let Some((_, oldest)) = oldest {
            oldest.close(Close::Asked("too many clients have chosen no export".into()));
        }
        Place { lobby: self.clone(), number }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut waiting = self.lobby.0.lock();
        if let Ok(index) = waiting.clients.binary_search_by_key(&self.number, |(number, _)| *number) {
            waiting.clients.remove(index);
        }
    }
}
