//! Requests that the job's core answers later.

use std::collections::BTreeMap;

use libmodelio::vocabulary::ids::ClientId;
use serde::{Deserialize, Serialize};

use super::requests::Asked;
use crate::core::Ticket;

/// A request of a client's that is not answered.
pub(super) type Waiting = (ClientId, Asked);

/// The requests by the tickets under which the core knows them.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Tickets {
    waiting: BTreeMap<Ticket, Vec<Waiting>>,
    next: Ticket,
}

impl Default for Tickets {
    fn default() -> Tickets {
        Tickets { waiting: BTreeMap::new(), next: 1 }
    }
}

impl Tickets {
    /// A ticket for what a client has asked, or several have together.
    pub(super) fn give(&mut self, asked: Vec<Waiting>) -> Ticket {
        let ticket = self.next;
        self.next += 1;
        self.waiting.insert(ticket, asked);
        ticket
    }

    /// The requests that are answered now, but for those of clients that were given up.
    pub(super) fn take(&mut self, ticket: Ticket) -> Vec<Waiting> {
        self.waiting.remove(&ticket).unwrap_or_default()
    }

    /// All of them are answered now.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = Waiting> + use<> {
        std::mem::take(&mut self.waiting).into_values().flatten()
    }

    /// The client is given up.
    pub(super) fn forget(&mut self, client: ClientId) {
        self.waiting.values_mut().for_each(|asked| asked.retain(|(of, _)| *of != client));
        self.waiting.retain(|_, asked| !asked.is_empty());
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }
}
