//! The registry as this process reaches it: it is here, or elsewhere.

use std::time::{Duration, Instant};

use libmodelio::registry::{Registry, RegistryError, RemoteRegistry};
use libmodelio::wire::{Message, Refusal, RegistryRequest};

use super::origins::Origin;
use super::table::{Local, Table};
use super::unsent::AdminAnswer;

/// The longest wait for the registry.
const REGISTRY_PATIENCE: Duration = Duration::from_secs(5);

/// The registry's table, if it is in this process, and the way to it otherwise.
pub(super) struct Directory {
    pub table: Option<Table>,
    elsewhere: Option<RemoteRegistry>,
    /// Where the registry is, if it is not here.
    address: Option<String>,
}

impl Directory {
    /// The registry at this address, or here.
    pub(super) fn at(address: Option<String>) -> Directory {
        let table = address.is_none().then(Table::new);
        Directory { table, elsewhere: address.clone().map(RemoteRegistry::new), address }
    }

    pub(super) fn name(&self) -> &str {
        self.address.as_deref().unwrap_or("here")
    }

    /// Asks the registry, in this process or elsewhere.
    pub(super) fn ask<T>(
        &self,
        ask: impl FnOnce(&dyn Registry, Instant) -> Result<T, RegistryError>,
    ) -> Result<T, RegistryError> {
        let deadline = Instant::now() + REGISTRY_PATIENCE;
        match (&self.table, &self.elsewhere) {
            (Some(table), _) => ask(&Local(table), deadline),
            (None, Some(remote)) => ask(remote, deadline),
            (None, None) => Err(RegistryError::Refused(Refusal::other("there is no registry"))),
        }
    }

    /// Answers somebody who asks the registry from an address.
    pub(super) fn answer(
        &self,
        from: Option<Origin>,
        asked: &RegistryRequest,
        payload: &[u8],
    ) -> AdminAnswer {
        let Some(table) = &self.table else {
            return Err(Refusal::other(format!("the registry is at {}, not here", self.name())));
        };
        let answer = table.handle_from(from.map(Origin::address), asked, payload)?;
        Ok((Message::Registered(answer.message), answer.payload.map(|bytes| bytes.to_vec())))
    }
}
