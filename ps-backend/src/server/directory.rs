//! The registry as this process reaches it: it is here, or elsewhere.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::registry::{self, EtcdUrl, Registry, RegistryError};
use libmodelio::wire::{Message, Refusal, RegistryRequest};

use super::options::{ServerError, ServerOptions};
use super::origins::Origin;
use super::table::{Local, Table};
use super::unsent::AdminAnswer;

/// The longest wait for the registry.
const REGISTRY_PATIENCE: Duration = Duration::from_secs(5);

/// The registry's table, if it is in this process, or the way to it.
pub(super) enum Directory {
    Here(Box<Table>),
    Elsewhere { at: String, registry: Arc<dyn Registry>, passes_on: bool },
}

impl Directory {
    /// The registry at this address, or here.
    ///
    /// # Errors
    /// If the address is none, or the table that is here has a state file that cannot be used.
    pub(super) fn of(options: &ServerOptions) -> Result<Directory, ServerError> {
        if let Some(at) = options.registry.clone() {
            return Ok(Directory::Elsewhere {
                registry: registry::open(&at)?,
                at,
                passes_on: !options.holds_blocks,
            });
        }
        let state = options.registry_state.as_deref();
        let failed = |error| ServerError::State { path: state.map(PathBuf::from).unwrap_or_default(), error };
        Table::new(state).map(Box::new).map(Directory::Here).map_err(failed)
    }

    pub(super) fn name(&self) -> &str {
        match self {
            Directory::Here(_) => "here",
            Directory::Elsewhere { at, .. } => at,
        }
    }

    /// Where another process serves the registry, if one does.
    pub(super) fn process(&self) -> Option<&str> {
        match self {
            Directory::Elsewhere { at, .. } if !EtcdUrl::is_meant(at) => Some(at),
            _ => None,
        }
    }

    /// Whether this process asks the registry for others: it takes time, then.
    pub(super) fn passes_on(&self) -> bool {
        matches!(self, Directory::Elsewhere { passes_on: true, .. })
    }

    /// The table, if it is in this process.
    pub(super) fn table(&self) -> Option<&Table> {
        match self {
            Directory::Here(table) => Some(table),
            Directory::Elsewhere { .. } => None,
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
            Directory::Elsewhere { registry, .. } => ask(&**registry, deadline),
        }
    }

    /// Has the registry, for calls that have deadlines of their own.
    pub(super) fn with<T>(&self, uses: impl FnOnce(&dyn Registry) -> T) -> T {
        match self {
            Directory::Here(table) => uses(&Local(table)),
            Directory::Elsewhere { registry, .. } => uses(&**registry),
        }
    }

    /// Answers somebody who asks the registry from an address.
    pub(super) fn answer(
        &self,
        from: Option<Origin>,
        asked: &RegistryRequest,
        payload: &[u8],
    ) -> AdminAnswer {
        let table = match self {
            Directory::Here(table) => table,
            Directory::Elsewhere { registry, .. } if self.passes_on() => {
                let deadline = Instant::now() + REGISTRY_PATIENCE;
                let answered = registry.ask(asked.clone(), payload, deadline);
                let (answer, payload) =
                    answered.map_err(|error| Refusal::try_from(error).unwrap_or_else(Refusal::other))?;
                return Ok((
                    Message::Registered(answer),
                    Some(payload).filter(|payload| !payload.is_empty()),
                ));
            }
            Directory::Elsewhere { at, .. } => {
                return Err(Refusal::other(format!("the registry is at {at}, not here")));
            }
        };
        let answer = table.handle_from(from.map(Origin::address), asked, payload)?;
        Ok((Message::Registered(answer.message), answer.payload.map(|bytes| bytes.to_vec())))
    }
}
