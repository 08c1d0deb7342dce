//! The places of clients. Clients that have not chosen an export yet wait in the lobby, and others are seated. Of each,
//! so many have a place. One more that waits sends the one away that has waited longest, and one more that is seated
//! the one that has been silent longest: first of those that only read. So clients that do nothing keep nobody out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libmodelio::transport::stream::{Close, Connection};
use parking_lot::Mutex;

/// The most clients that wait at a time.
pub const MOST_WAITING: usize = 256;
/// The most clients that are seated at a time.
pub const MOST_SEATED: usize = 768;

#[derive(Default)]
struct Places {
    /// With their numbers, in the order in which they came.
    waiting: VecDeque<(u64, Connection)>,
    seated: Vec<Seated>,
    next: u64,
}

struct Seated {
    number: u64,
    client: Connection,
    is_writable: bool,
    heard: Arc<AtomicU64>,
}

/// All places.
#[derive(Clone, Default)]
pub struct Lobby {
    places: Arc<Mutex<Places>>,
    /// The number of requests of seated clients.
    requests: Arc<AtomicU64>,
}

/// A client's place, until this is dropped.
pub struct LobbyPlace {
    lobby: Lobby,
    number: u64,
    /// The client's last request, by its number among those of all.
    heard: Arc<AtomicU64>,
}

impl Lobby {
    /// A client comes in.
    pub fn enter(&self, client: &Connection) -> LobbyPlace {
        let mut places = self.places.lock();
        let number = places.next;
        places.next += 1;
        places.waiting.push_back((number, client.clone()));
        let oldest = if places.waiting.len() > MOST_WAITING { places.waiting.pop_front() } else { None };
        drop(places);
        if let Some((_, oldest)) = oldest {
            oldest.close(Close::Asked("too many clients have chosen no export".into()));
        }
        LobbyPlace { lobby: self.clone(), number, heard: Arc::default() }
    }
}

impl LobbyPlace {
    /// The client has chosen an export.
    pub fn sit(&self, is_writable: bool) {
        self.heard();
        let mut places = self.lobby.places.lock();
        let Some(index) = places.waiting.iter().position(|(number, _)| *number == self.number) else {
            return;
        };
        let Some((number, client)) = places.waiting.remove(index) else { return };
        let silent = |index: &usize| {
            let seated: &Seated = &places.seated[*index];
            (seated.is_writable, seated.heard.load(Ordering::Relaxed))
        };
        let is_full = places.seated.len() >= MOST_SEATED;
        let longest = (0..places.seated.len()).filter(|_| is_full).min_by_key(silent);
        let gone = longest.map(|index| places.seated.swap_remove(index));
        places.seated.push(Seated { number, client, is_writable, heard: Arc::clone(&self.heard) });
        drop(places);
        if let Some(gone) = gone {
            let why = "too many clients of block devices: the one that was silent longest is sent away";
            if gone.is_writable {
                tracing::warn!("{why}");
            }
            gone.client.close(Close::Asked(why.into()));
        }
    }

    /// The client has made a request.
    pub fn heard(&self) {
        let request = self.lobby.requests.fetch_add(1, Ordering::Relaxed);
        self.heard.store(request, Ordering::Relaxed);
    }
}

impl Drop for LobbyPlace {
    fn drop(&mut self) {
        let mut places = self.lobby.places.lock();
        if let Ok(index) = places.waiting.binary_search_by_key(&self.number, |(number, _)| *number) {
            places.waiting.remove(index);
        }
        places.seated.retain(|seated| seated.number != self.number);
    }
}
