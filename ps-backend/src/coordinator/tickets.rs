//! Requests that the job's core answers later.

use std::collections::BTreeMap;

use libmodelio::vocabulary::ids::ClientId;
use serde::{Deserialize, Serialize};

use super::requests::Asked;
use crate::core::Ticket;

/// The requests by the tickets under which the core knows them.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Tickets {
    waiting: BTreeMap<Ticket, (ClientId, Asked)>,
    next: Ticket,
}

impl Default for Tickets {
    fn default() -> Tickets {
        Tickets { waiting: BTreeMap::new(), next: 1 }
    }
}

impl Tickets {
    /// A ticket for what a client has asked.
    pub(super) fn give(&mut self, client: ClientId, asked: Asked) -> Ticket {
        let ticket = self.next;
        self.next += 1;
        self.waiting.insert(ticket, (client, asked));
        ticket
    }

    /// The request that is answered now, unless its client was given up.
    pub(super) fn take(&mut self, ticket: Ticket) -> Option<(ClientId, Asked)> {
        self.waiting.remove(&ticket)
    }

    /// All of them are answered now.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = (ClientId, Asked)> + use<> {
        std::mem::take(&mut self.waiting).into_values()
    }

    /// The client is given up.
    pub(super) fn forget(&mut self, client: ClientId) {
        self.waiting.retain(|_, (of, _)| *of != client);
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }
}
