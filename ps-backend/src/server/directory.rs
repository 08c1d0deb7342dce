//! The registry as this process reaches it: it is here, or elsewhere.

use std::time::{Duration, Instant};

use libmodelio::registry::{Registry, RegistryError, RemoteRegistry};
use libmodelio::wire::{Message, Refusal, RegistryRequest};

use super::origins::Origin;
use super::table::{Local, Table};
use super::unsent::AdminAnswer;

/// The longest wait for the registry.
const REGISTRY_PATIENCE: Duration = Duration::from_secs(5);

/// The registry's table, if it is in this process, or the way to it.
pub(super) enum Directory {
    Here(Table),
    Elsewhere(RemoteRegistry),
}

impl Directory {
    /// The registry at this address, or here.
    pub(super) fn at(address: Option<String>) -> Directory {
        address
            .map_or_else(|| Directory::Here(Table::new()), |at| Directory::Elsewhere(RemoteRegistry::new(at)))
    }

    pub(super) fn name(&self) -> &str {
        match self {
            Directory::Here(_) => "here",
            Directory::Elsewhere(remote) => remote.address(),
        }
    }

    /// The table, if it is in this process.
    pub(super) fn table(&self) -> Option<&Table> {
        match self {
            Directory::Here(table) => Some(table),
            Directory::Elsewhere(_) => None,
        }
    }

    /// Asks the registry.
    pub(super) fn ask<T>(
        &self,
        ask: impl FnOnce(&dyn Registry, Instant) -> Result<T, RegistryError>,
    ) -> Result<T, RegistryError> {
        let deadline = Instant::now() + REGISTRY_PATIENCE;
        match self {
            Directory::Here(table) => ask(&Local(table), deadline),
            Directory::Elsewhere(remote) => ask(remote, deadline),
        }
    }

    /// Answers somebody who asks the registry from an address.
    pub(super) fn answer(
        &self,
        from: Option<Origin>,
        asked: &RegistryRequest,
        payload: &[u8],
    ) -> AdminAnswer {
        let Some(table) = self.table() else {
            return Err(Refusal::other(format!("the registry is at {}, not here", self.name())));
        };
        let answer = table.handle_from(from.map(Origin::address), asked, payload)?;
        Ok((Message::Registered(answer.message), answer.payload.map(|bytes| bytes.to_vec())))
    }
}
